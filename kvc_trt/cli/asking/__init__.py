"""`kvc-trt run` beyond one prompt: conversations, typed or piped, and a second policy beside the first."""
