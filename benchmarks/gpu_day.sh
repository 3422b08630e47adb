#!/bin/sh
# Everything that needs a GPU: comparisons of every kernel with the reference, an engine on the torch backend (verify,
# profile), timings of the kernels and of the torch backend, hardware counters, compute-sanitizer (docs/gpu-day.md).
#   sh benchmarks/gpu_day.sh                          # all parts
#   sh benchmarks/gpu_day.sh --out DIR build torch    # these, in this order; what was built before is used
#   sh benchmarks/gpu_day.sh --emulated LIBRARY       # no GPU: emulated kernels on a CPU, tiny sizes, nothing measured
#   PY=python3.12 LIMIT=580 SWEEP="--batches 1 --contexts 32768" sh benchmarks/gpu_day.sh kernels
# One call ends within LIMIT seconds, a part within PART_LIMIT: what takes longer is stopped, what has no time left is
# not begun, and both are said; call it again with those parts. Results name the GPU and the commit, are written point
# by point, and are copied to --out after each part. It needs PY with torch and numpy, and what this environment has or
# the folder wheels/ beside it brings; neither git nor the internet. `make gpu` runs it inside the environment.
set -u
absolute() { case $1 in /*) echo "$1" ;; *) echo "$(pwd)/$1" ;; esac; }
out="" emulated=""
while [ $# -gt 0 ]; do
    case $1 in
    --out) out=$(absolute "${2:?--out needs a folder}") && shift 2 ;;
    --emulated) emulated=$(absolute "${2:?--emulated needs the library of make emulation}") && shift 2 ;;
    -*) echo "error: no option $1; expected --out DIR, --emulated LIBRARY" >&2 && exit 2 ;;
    *) break ;;
    esac
done
for name in "$@"; do
    case $name in
    build | compare | engine | kernels | torch | counters | sanitize) ;;
    *) echo "error: no part $name; expected build compare engine kernels torch counters sanitize" >&2 && exit 2 ;;
    esac
done

cd "$(dirname "$0")/.." || exit 3
PY=${PY:-python3}
build=$(absolute "${BUILD:-build}")
limit=${LIMIT:-1800}
part_limit=${PART_LIMIT:-900}
reports=build/gpu_day
PYTHONPATH=$(pwd)${PYTHONPATH:+:$PYTHONPATH}
bundled=""
if [ -f COMMIT ]; then
    bundled=yes
    site=$("$PY" benchmarks/bundle/unpack.py wheels build/site) || exit 3
    PYTHONPATH=$(pwd)/$site:$PYTHONPATH
fi
export PYTHONPATH

# Every file with a test that is marked `gpu`; pytest would import all other files too, and what they need.
compared=${COMPARED:-tests/kernels/test_ops.py tests/backends/torch/test_on_a_gpu.py tests/plugins_cuda/test_*.py}
# One test of each kernel: a sanitizer makes a kernel tens of times slower.
checked=${CHECKED:-tests/plugins_cuda/test_every_kernel.py}
if [ -n "$emulated" ]; then
    suffix=-emulated switch=--emulated KVC_TRT_KERNELS=$emulated
    export KVC_TRT_GPU_TESTS=emulation
    points="--points quest-matched/1/512/64"
    sweep=${SWEEP:---batches 1 --contexts 512 --budgets 64 $points --samples 1}
    torch_sweep=${TORCH_SWEEP:---batches 1 --contexts 512 --budgets 64 $points --steps 1 --prefill-budget 64}
    engine=${ENGINE:---weights bf16 --levels quick --steps 2 --no-profile}
    counters=${COUNTERS:-$points}
else
    suffix="" switch="" KVC_TRT_KERNELS=$build/libkvc_kernels.so
    # Points of every size; the whole sweeps are `python -m benchmarks.kernels` and `python -m benchmarks.torch.backend`.
    points="--points rocketkv/8/32768/1024 quest-matched/1/32768/512"
    sweep=${SWEEP:---batches 1 8 32 --contexts 32768 131072 --budgets 512 2048 $points --samples 15}
    torch_sweep=${TORCH_SWEEP:---batches 1 8 --contexts 32768 --budgets 512 $points --steps 10}
    engine=${ENGINE:-}
    counters=${COUNTERS:-}
fi
export KVC_TRT_KERNELS

"$PY" -c 'import pytest
from benchmarks.kernels import __main__, counters
from benchmarks.torch import backend, engine' || {
    echo "error: $PY cannot import what the parts need; docs/gpu-day.md says how to bring it" >&2
    exit 3
}
if [ -n "$emulated" ]; then
    echo "emulated kernels on a CPU, tiny sizes: nothing that follows was run or measured on a GPU"
else
    "$PY" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || {
        echo "error: no GPU: nothing was built, compared or timed" >&2
        exit 3
    }
fi

jobs=${JOBS:-8}
[ "$jobs" -le "$(nproc)" ] || jobs=$(nproc)
processes=""
if "$PY" -c 'import xdist' 2>/dev/null; then processes="-n $jobs --dist worksteal"; fi
mkdir -p "$reports" benchmarks/results build/emulated
mark=$reports/.started
: >"$mark"
started=$(date +%s)
part_started=$started
failed=0

# Seconds that are left: of this call, or of this part where that is less.
left() {
    of_call=$((limit - $(date +%s) + started)) of_part=$((part_limit - $(date +%s) + part_started))
    [ "$of_part" -lt "$of_call" ] && echo "$of_part" || echo "$of_call"
}

# timed WHAT COMMAND...: the command, in what is left of the time; its exit status is in $status.
timed() {
    what=$1 remaining=$(left) status=124
    shift
    if [ "$remaining" -le 0 ]; then
        echo "not run: $what: its time is over" >&2
        failed=1
        return
    fi
    echo "== $what ($(($(date +%s) - started)) s so far)"
    status=0
    timeout -k 5 "$remaining" "$@" || status=$?
    [ "$status" -eq 0 ] || failed=1
    [ "$status" -ne 124 ] || echo "stopped: $what: its time is over" >&2
}

# swept WHAT COMMAND...: a sweep; where a point ended its process (75, or a signal), another one goes on behind it.
swept() {
    timed "$@"
    again=0
    while [ "$again" -lt 20 ] && { [ "$status" -eq 75 ] || [ "$status" -gt 128 ]; }; do
        again=$((again + 1))
        timed "$@" --resume
    done
}

sanitized() {
    if [ -n "$emulated" ]; then
        # shellcheck disable=SC2086
        timed "what compute-sanitizer would be given, without it" "$PY" -m pytest -m gpu -q $checked
        return
    fi
    sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
    if [ -z "$sanitizer" ]; then
        echo "not run: compute-sanitizer (memcheck, racecheck, synccheck); it is part of the CUDA toolkit" >&2
        failed=1
        return
    fi
    for tool in memcheck racecheck synccheck; do
        # PyTorch's allocator serves tensors out of large blocks: an access past a tensor would stay inside one.
        # shellcheck disable=SC2086
        timed "$tool" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$tool" --error-exitcode 9 \
            --log-file "$reports/$tool.txt" "$PY" -m pytest -m gpu -q $checked
    done
}

part() {
    part_started=$(date +%s)
    # Lists of arguments and of files.
    # shellcheck disable=SC2086
    case $1 in
    build)
        timed "configure" cmake -S . -B "$build" -DKVC_CUDA=ON
        timed "build" cmake --build "$build" --target kvc_kernels
        ;;
    compare)
        timed "comparisons with the reference" "$PY" -m pytest -m gpu -q $processes \
            --junit-xml "$reports/compare$suffix.xml" $compared
        ;;
    sanitize) sanitized ;;
    kernels) swept "timings of the kernels" "$PY" -m benchmarks.kernels $switch $sweep ;;
    counters) swept "hardware counters" "$PY" -m benchmarks.kernels.counters $switch $counters ;;
    engine)
        swept "an engine on the torch backend" "$PY" -m benchmarks.torch.engine $switch ${bundled:+--engines engines} \
            $engine
        ;;
    torch)
        swept "timings of the torch backend" "$PY" -m benchmarks.torch.backend $switch --seconds "$(($(left) - 30))" \
            $torch_sweep
        ;;
    esac
    if [ -n "$out" ]; then
        mkdir -p "$out"
        find benchmarks/results build/emulated "$reports" -type f -newer "$mark" -exec cp {} "$out" \;
    fi
}

if [ $# -eq 0 ]; then
    set -- compare engine kernels torch counters sanitize
    [ -n "$bundled$emulated" ] || set -- build "$@"
fi
for name in "$@"; do part "$name"; done
echo "== done ($(($(date +%s) - started)) s)"
exit $failed
