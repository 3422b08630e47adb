"""Measure decode steps of an engine beside its dense twin and the floor of memory bandwidth."""

import sys

import kvc_trt

contexts = [int(argument) for argument in sys.argv[1:]] or [256, 2048]
engine = kvc_trt.build("retrieval-tiny", policy="rocketkv", token_budget=64, output="engines/example", verify=False)

# Ten steps in turn on each side, so that a drift of the machine hits both; a prefill longer than a second is left out.
result = engine.profile(contexts=contexts, batches=[1, 8], steps=50, prefills=1, prefill_seconds=1.0)

for row in result["rows"]:
    if row["side"] == "engine":
        step, dense = row["median_itl_ms"], row["median_itl_ms"] * row["speedup_over_dense"]
        print(f"{row['context']:5} tokens, batch {row['batch_size']}: {step:.3f} ms a step, dense {dense:.3f} ms")
print("\n".join(f"- {finding}" for finding in result["findings"]))
