"""The subcommands of `kvc-trt`, one file each; `main` imports one when it is called."""
