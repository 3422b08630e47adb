"""TensorRT-LLM: a configuration for its RocketKV, and engines through the builder that it had up to version 1.2.

`llm_api` maps a policy to the LLM API of every version with RocketKV. The other modules are the adapter to the builder
API, which was removed upstream in July 2026. Importing them does not need TensorRT-LLM.
"""
