#!/bin/sh
# Everything that needs a GPU, in under ten minutes: build, compare every kernel with the reference, compute-sanitizer on
# a small part of that, timings. `make gpu` runs it inside the environment; results go to benchmarks/results/kernels.json.
#   BUILD=build  SWEEP="--batches 1 --contexts 32768"  sh benchmarks/gpu_day.sh
set -eu
cd "$(dirname "$0")/.."
build=${BUILD:-build}
# Points of every size; the whole sweep is `python benchmarks/kernels.py`.
sweep=${SWEEP:---batches 1 8 32 --contexts 32768 131072 --budgets 512 2048 --samples 15}
# One test of each kernel: a sanitizer makes a kernel tens of times slower.
checked=${CHECKED:-tests/plugins_cuda/test_every_kernel.py}

python -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || {
    echo "error: no GPU: nothing was built, compared or timed" >&2
    exit 3
}

started=$(date +%s)
step() { echo "== $1 ($(($(date +%s) - started)) s so far)"; }

step "build"
cmake -S . -B "$build" -DKVC_CUDA=ON
cmake --build "$build" --target kvc_kernels
KVC_TRT_KERNELS=$(cd "$build" && pwd)/libkvc_kernels.so
export KVC_TRT_KERNELS

failed=0
step "comparisons with the reference"
python -m pytest -m gpu -q || failed=1

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
if [ -z "$sanitizer" ]; then
    echo "not run: compute-sanitizer (memcheck, racecheck, synccheck); it is part of the CUDA toolkit" >&2
    failed=1
else
    for tool in memcheck racecheck synccheck; do
        step "$tool"
        # PyTorch's allocator serves tensors out of large blocks: an access past a tensor would stay inside one.
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$tool" --error-exitcode 9 \
            python -m pytest -m gpu -q "$checked" || failed=1
    done
fi

step "timings"
# shellcheck disable=SC2086  # a list of arguments
python benchmarks/kernels.py $sweep || failed=1
step "done"
exit $failed
