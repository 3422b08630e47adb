"""TensorRT-LLM: a configuration for its own RocketKV, and engines through the builder that it had up to 1.2.

`llm_api` maps a policy to the LLM API of every version that has RocketKV; the other modules are the adapter for the
builder API, which was removed upstream in July 2026. Importing any of them needs no TensorRT-LLM.
"""
