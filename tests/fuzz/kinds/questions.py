"""Requests to an engine: prompts as text and as ids, the rules of an answer, and bodies of servers' clients."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvc_trt.api import Engine
from kvc_trt.cli.options.prompts import read_prompt_ids, read_text
from kvc_trt.errors import InputError
from kvc_trt.runtime import Sampling
from kvc_trt.serving.dynamo.requests import request_of
from kvc_trt.serving.request import parse_request
from tests.fuzz.kind import Kind
from tests.fuzz.kinds.engines import tiny_engine
from tests.fuzz.mutation.raw import RAW
from tests.fuzz.mutation.trees import JSON, of_trees
from tests.readable_model import text

IDS = [3, 9, 4, 12, 30, 5, 9, 41]


class Asking(Kind):
    """An engine that is loaded, and answers what it accepts with at most two tokens."""

    mutators = (*RAW, *[of_trees(JSON)] * 16)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.engine = Engine.open(tiny_engine(folder.parent), threads=1)
        self.engine.session(2)

    def json(self, content: bytes) -> Any:
        """Return the input's value, as a client's library hands it over."""
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise InputError("not valid JSON") from error


class PromptText(Asking):
    """The file of --prompt-file, up to an answer."""

    name = "prompt-text"
    mutators = RAW

    def seeds(self) -> Sequence[bytes]:
        return [text(*IDS).encode(), text(*IDS * 4).encode()]

    def specimens(self) -> Sequence[bytes]:
        return [
            text(*IDS * 20_000).encode(),
            b"\xef\xbb\xbf" + text(*IDS).encode(),
            b"",
            b"\0",
            b"x" * 500_000,
            b"\xff",
        ]

    def read(self, content: bytes) -> Any:
        return self.engine.generate(read_text(self.file(content, "prompt.txt")), max_new_tokens=1)


class PromptIds(Asking):
    """The file of --prompt-ids, up to an answer."""

    name = "prompt-ids"

    def seeds(self) -> Sequence[bytes]:
        return [json.dumps(value).encode() for value in (IDS, [IDS, IDS[:3]])]

    def specimens(self) -> Sequence[bytes]:
        values = (
            list(range(300_000)),
            [[1]] * 3,
            [1 << 70],
            [-1],
            [True],
            [[]],
            [],
            [1.0],
            {"0": 1},
            "123",
            [[[1]]],
            [None],
        )
        return [*(json.dumps(value).encode() for value in values), b"[" * 100_000, b"[" + b"9" * 900_000 + b"]"]

    def read(self, content: bytes) -> Any:
        prompts = read_prompt_ids(self.file(content, "ids.json"))
        return self.engine.generate(prompts[:2], max_new_tokens=1)


class Rules(Asking):
    """A call of `Engine.generate` with values from somebody's JSON: {"prompt", "rules", "sampling"}."""

    name = "rules"

    def seeds(self) -> Sequence[bytes]:
        sampling = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 7, "repetition_penalty": 1.2,
                    "presence_penalty": 0.1, "frequency_penalty": 0.2}  # fmt: skip
        rules = {"stop": [text(9)], "bad_words": [text(4, 5)], "min_tokens": 1, "ignore_eos": True, "logprobs": 3}
        return [
            json.dumps(value).encode()
            for value in (
                {"prompt": IDS, "rules": rules, "sampling": sampling},
                {"prompt": text(*IDS), "rules": {}, "sampling": {}},
                {"prompt": IDS, "rules": {"stop": text(9)}, "sampling": {"temperature": 1.0, "seed": 1}},
            )
        ]

    def specimens(self) -> Sequence[bytes]:
        rules = ({"stop": [5]}, {"stop": 5}, {"stop": None}, {"stop": [None]}, {"logprobs": 1e9},
                 {"min_tokens": "1"}, {"bad_words": [[1]]}, {"ignore_eos": "no"}, {"kv_proof": 1},
                 {"stop": ["x" * 100_000] * 10})  # fmt: skip
        samplings = (
            {"top_k": 1.5},
            {"seed": -1},
            {"seed": 1 << 64},
            {"temperature": "1"},
            {"top_p": True},
            {"top_k": 1 << 70},
        )
        return [
            *(json.dumps({"prompt": IDS, "rules": one, "sampling": {}}).encode() for one in rules),
            *(json.dumps({"prompt": IDS, "rules": {}, "sampling": one}).encode() for one in samplings),
        ]

    def read(self, content: bytes) -> Any:
        asked = self.json(content)
        if not isinstance(asked, dict) or not all(
            isinstance(asked.get(name, {}), dict) for name in ("rules", "sampling")
        ):
            raise InputError("no call could be made of it")
        try:
            sampling = Sampling(**asked.get("sampling", {}))
            rules = {**asked.get("rules", {}), "sampling": sampling}
            rules.setdefault("max_new_tokens", 2)
            outputs = self.engine.generate(asked.get("prompt"), **rules)
        except TypeError as error:
            if "unexpected keyword" in str(error) or "unknown keyword" in str(error):
                raise InputError("a rule that there is not") from error  # TypeError is what Python raises for that
            raise
        return outputs


class TritonRequest(Asking):
    """The fields of a request to Triton's model, up to the session's check."""

    name = "triton-request"

    def seeds(self) -> Sequence[bytes]:
        fields = {"text_input": text(*IDS), "max_tokens": 2, "stream": False, "stop_words": [text(9)],
                  "temperature": 0.5, "top_k": 3, "seed": 9, "return_log_probs": True, "bad_words": "x",
                  "min_tokens": 1}  # fmt: skip
        by_parameters = {"text_input": "a", "sampling_parameters": json.dumps({"max_tokens": 3, "stop": ["a"], "n": 1})}
        ids = {"input_ids": IDS, "max_tokens": 1, "return_finish_reason": True, "stop_token_ids": [3]}
        return [json.dumps(value).encode() for value in (fields, by_parameters, ids)]

    def specimens(self) -> Sequence[bytes]:
        return [json.dumps({"text_input": "a", "sampling_parameters": "[" * 100_000}).encode(), b'{"\\ud800": 1}']

    def read(self, content: bytes) -> Any:
        given = self.json(content)
        if not isinstance(given, dict):
            raise InputError("no fields")
        asked = parse_request(given)
        ids = asked.token_ids or self.engine.session().tokenizer.encode(asked.text).ids
        self.engine.session().check(replace(asked.rules, prompt_token_ids=tuple(ids)))
        return asked


class DynamoRequest(Asking):
    """A message of Dynamo's frontend to a worker, up to the session's check."""

    name = "dynamo-request"

    def seeds(self) -> Sequence[bytes]:
        message = {
            "token_ids": IDS,
            "stop_conditions": {
                "max_tokens": 2,
                "stop": ["a"],
                "min_tokens": 1,
                "ignore_eos": False,
                "stop_token_ids": [5],
            },
            "sampling_options": {
                "temperature": 0.5,
                "top_k": 4,
                "top_p": 0.8,
                "seed": 3,
                "n": 1,
                "use_beam_search": False,
            },
            "output_options": {"logprobs": 2, "skip_special_tokens": True},
            "annotations": [],
            "model": "tiny",
        }
        return [
            json.dumps(value).encode() for value in (message, {"token_ids": IDS, "stop_conditions": {"max_tokens": 1}})
        ]

    def read(self, content: bytes) -> Any:
        asked = self.json(content)
        if not isinstance(asked, dict):
            raise InputError("no message")
        session = self.engine.session()
        request = request_of(asked, session.executor.limits, [3])
        session.check(request)
        return request


KINDS = (PromptText, PromptIds, Rules, TritonRequest, DynamoRequest)
