#!/bin/sh
# Prints docs/demo/transcript.md: the demo, and what it prints on this machine. `make transcript` calls this.
set -eu
cat <<'EOF'
# What the demo prints

`make demo` builds, verifies, asks and profiles an engine of `retrieval-tiny`, the model of half a million parameters
that this repository ships. This is all of it, on a machine with two cores. `make transcript` writes this page anew;
times and speeds are those of the machine it runs on.

```text
EOF
sh docs/demo/demo.sh | sed 1d
echo '```'
