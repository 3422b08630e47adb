#!/bin/sh
# Everything that needs a GPU: build, compare every kernel with the reference, an engine on the torch backend (verify,
# profile), timings of the kernels and of the torch backend, compute-sanitizer on one test of every kernel.
#   sh benchmarks/gpu_day.sh                  # all parts
#   sh benchmarks/gpu_day.sh build torch      # these, in this order; what was built before is used
#   LIMIT=1800 BUILD=build SWEEP="--batches 1 --contexts 32768" sh benchmarks/gpu_day.sh
# One call ends within LIMIT seconds (under ten minutes): a part that takes longer is stopped, one without time left is
# not begun, and both are said; call it again with those parts. Results, with the GPU's name and the commit, go to
# benchmarks/results/{kernels,torch_engine,torch_backend}.json. `make gpu` runs it inside the environment.
set -u
cd "$(dirname "$0")/.." || exit 3
build=${BUILD:-build}
limit=${LIMIT:-580}
# Points of every size; the whole sweeps are `python -m benchmarks.kernels` and `python -m benchmarks.torch_backend`.
sweep=${SWEEP:---batches 1 8 32 --contexts 32768 131072 --budgets 512 2048 --samples 15}
torch_sweep=${TORCH_SWEEP:---batches 1 8 --contexts 32768 --budgets 512 --steps 10}
# One test of each kernel: a sanitizer makes a kernel tens of times slower.
checked=${CHECKED:-tests/plugins_cuda/test_every_kernel.py}

python -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || {
    echo "error: no GPU: nothing was built, compared or timed" >&2
    exit 3
}

started=$(date +%s)
failed=0

# timed WHAT COMMAND...: the command, in what is left of the time.
timed() {
    what=$1 spent=$(($(date +%s) - started))
    shift
    if [ "$spent" -ge "$limit" ]; then
        echo "not run: $what: $limit s are over" >&2
        failed=1
        return
    fi
    echo "== $what ($spent s so far)"
    status=0
    timeout -k 5 "$((limit - spent))" "$@" || status=$?
    [ "$status" -eq 0 ] || failed=1
    [ "$status" -ne 124 ] || echo "stopped: $what: $limit s are over" >&2
}

sanitized() {
    sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
    if [ -z "$sanitizer" ]; then
        echo "not run: compute-sanitizer (memcheck, racecheck, synccheck); it is part of the CUDA toolkit" >&2
        failed=1
        return
    fi
    for tool in memcheck racecheck synccheck; do
        # PyTorch's allocator serves tensors out of large blocks: an access past a tensor would stay inside one.
        timed "$tool" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$tool" --error-exitcode 9 \
            python -m pytest -m gpu -q "$checked"
    done
}

part() {
    case $1 in
    build)
        timed "configure" cmake -S . -B "$build" -DKVC_CUDA=ON
        timed "build" cmake --build "$build" --target kvc_kernels
        ;;
    compare) timed "comparisons with the reference" python -m pytest -m gpu -q ;;
    sanitize) sanitized ;;
    # shellcheck disable=SC2086  # a list of arguments
    kernels) timed "timings of the kernels" python -m benchmarks.kernels $sweep ;;
    engine) timed "an engine on the torch backend" python -m benchmarks.torch_engine ;;
    # shellcheck disable=SC2086
    torch)
        left=$((limit - $(date +%s) + started - 30))
        timed "timings of the torch backend" python -m benchmarks.torch_backend --seconds "$left" $torch_sweep
        ;;
    *)
        echo "error: no part $1; expected build compare engine kernels torch sanitize" >&2
        exit 2
        ;;
    esac
}

[ $# -gt 0 ] || set -- build compare engine kernels torch sanitize
KVC_TRT_KERNELS=$(pwd)/$build/libkvc_kernels.so
case $build in /*) KVC_TRT_KERNELS=$build/libkvc_kernels.so ;; esac
export KVC_TRT_KERNELS
for name in "$@"; do part "$name"; done
echo "== done ($(($(date +%s) - started)) s)"
exit $failed
