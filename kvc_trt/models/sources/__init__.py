"""Where a model comes from: Hugging Face directories, the Hub, packages and safetensors files."""
