#!/bin/sh
# A real chat model, from its file to answers of two caches, each command shown before it runs. `make demo-chat` calls
# this.
set -eu
KVC_TRT=${KVC_TRT:-kvc-trt}
PYTHON=${PYTHON:-python3}
DEMO=${DEMO:-engines/chat}
MODEL=smollm2-135m-instruct
QUESTIONS=${QUESTIONS:-docs/demo/island-questions.txt}
LENGTHS="--max-input-len 1536 --max-output-len 64"

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
# $LENGTHS is several words.
show build --model "$MODEL" --policy full $LENGTHS --no-verify --force -o "$DEMO-whole"
show build --model "$MODEL" --policy rocketkv --token-budget 128 $LENGTHS --no-verify --force -o "$DEMO"
# The summary goes to stderr, and belongs to what is shown.
show run "$DEMO" --chat "What is the capital of France?" --stream 2>&1
set -- docs/demo/both_caches.py "$DEMO-whole" "$DEMO" docs/demo/island.txt "$QUESTIONS"
printf '\n$ python %s\n' "$*"
"$PYTHON" "$@"
