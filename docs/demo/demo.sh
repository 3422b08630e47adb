#!/bin/sh
# The main job on the shipped model, one command after the other, each shown before it runs. `make demo` calls this.
set -eu
KVC_TRT=${KVC_TRT:-kvc-trt}
DEMO=${DEMO:-engines/demo}
NATIVE=${NATIVE:-$PWD/build/libkvc_cpu.so}

show() {
    printf '\n$ kvc-trt %s\n' "$*"
    "$KVC_TRT" "$@"
}

show build --model retrieval-tiny --policy rocketkv --token-budget 64 --no-verify --force -o "$DEMO"
show verify "$DEMO"
printf '\n$ tail -n 1 docs/demo/needle.txt\n'
tail -n 1 docs/demo/needle.txt
show run "$DEMO" --prompt-file docs/demo/needle.txt --stream

# By the native operators, then by the operators' bodies, which need no compiler.
printf '\n$ export KVC_TRT_CPU_KERNELS=%s\n' "$(printf '%s' "$NATIVE" | sed "s#^$PWD/#\$PWD/#")"
if [ -e "$NATIVE" ]; then
    export KVC_TRT_CPU_KERNELS="$NATIVE"
    show profile "$DEMO" --contexts 256,1024,2048 --batch 1 -o "$DEMO-profile"
else
    echo "There is no such library: make native builds it, with CMake and a C++ compiler."
fi
printf '\n$ export KVC_TRT_CPU_KERNELS=none\n'
export KVC_TRT_CPU_KERNELS=none
show profile "$DEMO" --contexts 256,1024,2048 --batch 1 -o "$DEMO-profile-bodies"
