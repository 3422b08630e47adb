"""How the models that ship with kvc-trt were trained. Nothing in `kvc_trt` imports this."""
