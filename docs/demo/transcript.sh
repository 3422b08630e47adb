#!/bin/sh
# Prints docs/demo/transcript.md: the demo, and what it prints on this machine. `make transcript` calls this.
set -eu
printed=$(sh docs/demo/demo.sh) # before anything is printed here: a demo that fails leaves no page
cat <<'EOF'
# What the demo prints

`make demo` builds, verifies, asks and profiles an engine of `retrieval-tiny`, the model of half a million parameters
that this repository ships. This is all of it, on a machine with two cores. `make transcript` writes this page anew;
times and speeds are those of the machine it runs on.

```text
EOF
# Paths as a reader has them, below the checkout.
printf '%s\n' "$printed" | sed -e 1d -e "s#$PWD/##g"
echo '```'
