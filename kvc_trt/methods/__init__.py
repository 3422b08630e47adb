"""The KV-cache methods, one per file; other code imports `kvc_trt.policies`."""
