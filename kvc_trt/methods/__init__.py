"""The KV-cache methods, one per file; `kvc_trt.policies` is what other code imports."""
