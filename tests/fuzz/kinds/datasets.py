"""Data sets: JSON lines, a header and samples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvc_trt.models.presets import load_preset
from kvc_trt.tasks.dataset import DataSet, draw_data_set, read_data_set
from kvc_trt.tasks.registry import task
from kvc_trt.tasks.tokenizer import load_task_tokenizer
from tests.fuzz.kind import Kind
from tests.fuzz.mutation.raw import RAW
from tests.fuzz.mutation.trees import Codec, of_trees


def _lines(content: bytes) -> list[Any]:
    return [json.loads(line) for line in content.splitlines()]


def _joined(tree: Any, _: bytes) -> bytes:
    lines = tree if isinstance(tree, list) else [tree]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


class DataSetFile(Kind):
    name = "data-set"
    mutators = (*RAW, *[of_trees(Codec(_lines, _joined))] * 12)

    def seeds(self) -> Sequence[bytes]:
        found = []
        for model, name in (("retrieval-text", "lines"), ("retrieval-tiny", "two-records")):
            checkpoint = load_preset(model).checkpoint
            assert checkpoint is not None
            tokenizer = load_task_tokenizer(str(checkpoint))
            drawn = draw_data_set(
                task(name), seed=1, samples=2, target_tokens=256, tokenizer=tokenizer, max_new_tokens=16
            )
            found.append(drawn.to_jsonl().encode())
        return found

    def specimens(self) -> Sequence[bytes]:
        return [b"", b"{}", b"[" * 100_000, b"null\n", b"{}\n" * 200_000, b'{"count": 1e400}\n']

    def read(self, content: bytes) -> DataSet:
        found = read_data_set(self.file(content, "data.jsonl"))
        scored = task(found.task)
        for sample in found.samples:
            scored.score(sample.prompt + sample.answer_prefix, sample.answers)
        assert found.digest
        return found


KINDS = (DataSetFile,)
