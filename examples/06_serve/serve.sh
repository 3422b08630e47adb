#!/bin/sh
# OpenAI's API over an engine on this machine: start it, ask it, end it. Loopback only, over after two minutes at most.
set -eu
KVC_TRT=${KVC_TRT:-kvc-trt}
PORT=${PORT:-0} # 0 takes one that is free

"$KVC_TRT" build --model retrieval-tiny --token-budget 64 --no-verify -o engines/served >/dev/null
: >engines/served.log
timeout 120 "$KVC_TRT" serve engines/served --port "$PORT" >engines/served.log 2>&1 &
server=$!
trap 'kill "$server" 2>/dev/null && wait "$server" || true' EXIT

until grep -q ': ready at ' engines/served.log; do
    kill -0 "$server" || { cat engines/served.log; exit 1; }
    sleep 0.2
done
url=$(sed -n 's/.*: ready at \(http[^ ]*\).*/\1/p' engines/served.log)

curl --silent --max-time 30 "$url/models"
echo
curl --silent --max-time 30 "$url/completions" -H 'Content-Type: application/json' \
    -d '{"model": "served", "prompt": "<record> lamp scarlet tiger lagos eight <query> lamp", "max_tokens": 32}'
echo
