"""`python -m kvc_trt` is `kvc-trt`."""

from kvc_trt.cli.main import main

main()
