"""Check an engine against the PyTorch reference, and see what compression itself costs."""

import sys

import kvc_trt

# One rung of the ladder: ops, codes, logits, tokens or retrieval; quick and full climb all of them.
level = sys.argv[1] if len(sys.argv) > 1 else "quick"
engine = kvc_trt.build("retrieval-tiny", policy="rocketkv", token_budget=64, output="engines/example", verify=False)

report = engine.verify(level)
print(report.as_text())

# A failed check is no exception: a script decides what it means.
for failure in report.failures:
    print(failure, file=sys.stderr)
sys.exit(not report.passed)
