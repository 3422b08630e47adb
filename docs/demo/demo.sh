#!/bin/sh
# The main job on the shipped model, one command after the other, each shown before it runs. `make demo` calls this.
set -eu
KVC_TRT=${KVC_TRT:-kvc-trt}
DEMO=${DEMO:-engines/demo}

show() {
    printf '\n$ kvc-trt %s\n' "$*"
    "$KVC_TRT" "$@"
}

show build --model retrieval-tiny --policy rocketkv --token-budget 64 --no-verify --force -o "$DEMO"
show verify "$DEMO"
printf '\n$ tail -n 1 docs/demo/needle.txt\n'
tail -n 1 docs/demo/needle.txt
show run "$DEMO" --prompt-file docs/demo/needle.txt --stream
show profile "$DEMO" --contexts 256,1024,2048 -o "$DEMO-profile"
