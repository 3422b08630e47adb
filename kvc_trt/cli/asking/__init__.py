"""What `kvc-trt run` asks beyond one prompt: conversations, typed or piped, and a second policy beside the first."""
