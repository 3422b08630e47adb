"""Build an engine whose cache is compressed, open it, and ask it."""

from pathlib import Path

import kvc_trt

DIRECTORY = "engines/example"
TEXT = Path(__file__).parents[2] / "docs" / "demo" / "needle.txt"

# The model comes with kvc-trt. Of a prompt of 1,024 tokens each layer keeps 244, and a step reads 32 of these.
kvc_trt.build("retrieval-tiny", policy="rocketkv", token_budget=64, output=DIRECTORY, verify=False)

with kvc_trt.Engine.open(DIRECTORY) as engine:
    output = engine.generate(TEXT.read_text())
    print(f"{output.text} ({output.finish_reason})")
    print(f"{len(output.prompt_token_ids)} prompt tokens, {output.physical_lengths[0]} entries in each cache")

    # A list of prompts is a batch; `stream` yields an answer token by token.
    records = "<record> lamp scarlet tiger lagos eight <record> chimney scarlet bear hanoi fourteen"
    prompts = [f"{records} <query> {name}" for name in ("lamp", "chimney")]
    print([output.text for output in engine.generate(prompts, max_new_tokens=2)])
    print("|".join(event.text for event in engine.stream(prompts[0]) if event.text))
