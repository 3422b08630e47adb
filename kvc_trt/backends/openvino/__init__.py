"""OpenVINO: prefill on any CPU with its fused attention and its products in bfloat16 or int8; ONNX Runtime decodes."""
