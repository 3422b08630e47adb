#!/bin/sh
# A real chat model, from its file to an answer, each command shown before it runs. `make demo-chat` calls this.
set -eu
KVC_TRT=${KVC_TRT:-kvc-trt}
DEMO=${DEMO:-engines/chat}
MODEL=smollm2-135m-instruct
LOG=docs/demo/harbour-log.txt

show() {
    printf '\n$ kvc-trt'
    for argument in "$@"; do
        case $argument in
            *' '*) printf ' "%s"' "$argument" ;;
            *) printf ' %s' "$argument" ;;
        esac
    done
    echo
    "$KVC_TRT" "$@" </dev/null  # from a terminal, `run --chat` would wait for another question
}

show fetch "$MODEL"
show build --model "$MODEL" --policy rocketkv --no-verify --force -o "$DEMO"
# The summary goes to stderr, and belongs to what is shown.
show run "$DEMO" --chat "What is the capital of France?" --stream 2>&1
printf '\n$ grep code %s\n' "$LOG"
grep code "$LOG"
show run "$DEMO" --document "$LOG" --chat "What is the secret code of the blue warehouse?" 2>&1
