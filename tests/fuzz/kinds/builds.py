"""Inputs of a build: YAML files, `--set`, head patterns, calibration prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import yaml

from kvc_trt.backends.registry import backends
from kvc_trt.cli.text.policy import describe_parameters
from kvc_trt.config import BuildConfig, configured, parse_settings
from kvc_trt.engine.resolution import calibration
from kvc_trt.engine.resolution.head_pattern import read_head_pattern
from kvc_trt.engine.resolution.model_choice import choose_model
from kvc_trt.engine.resolution.resolve import resolve
from kvc_trt.models.presets import build_configs_directory, load_preset
from kvc_trt.policies import resolve as resolve_policy
from kvc_trt.tasks.tokenizer import load_task_tokenizer
from tests.fuzz.kind import Kind
from tests.fuzz.mutation.raw import RAW
from tests.fuzz.mutation.trees import Codec, of_trees


def _loaded(content: bytes) -> Any:
    if len(content) > 1 << 14:
        raise ValueError("too large for a reader in Python, of which thousands are made a minute")
    try:
        return yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


YAML = Codec(_loaded, lambda tree, _: yaml.safe_dump(tree, allow_unicode=False).encode())
MODEL = "retrieval-tiny"
_PIECES = (
    "1: 2\n", "2020-01-01: 1\n", "true: 1\n", "~: 1\n", "? [a, b]\n: 1\n", "<<: *a\n", "a: &a [1, 2]\n", "b: *a\n",
    "!!python/object:os.system {}\n", "!!binary aGVsbG8=", "!!set {a, b}\n", "!!omap [a: 1]\n",
    "!!timestamp 2001-12-14", "190:20:30", "1e3", "0x_1", "0b1", ".inf", "-.INF", ".nan", "~", "!!int 5", "!!float 5",
    "2001-12-14t21:59:43.10-05:00", "|\n  a\n", ">-\n  a\n", "\t", "---\n", "...\n", "%YAML 1.1\n", "'",
    '"\\uD800"', "&a", "*a", "{", "}", "- ", "\x85", "\ufeff",
)  # fmt: skip


def insert_piece(random: Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    """Something that YAML knows and a configuration does not need, mostly at the start of a line."""
    lines = content.splitlines(keepends=True)
    piece = random.choice(_PIECES).encode()
    if lines and random.random() < 0.7:
        place = random.randrange(len(lines))
        key = lines[place].partition(b":")[0]
        lines[place] = random.choice((piece, key + b": " + piece + b"\n", lines[place] + piece))
        return b"".join(lines)
    place = random.randint(0, len(content))
    return content[:place] + piece + content[place:]


def resolved(config: BuildConfig, recorded: object = None) -> str:
    """Everything that a build does with a configuration before it reads weights."""
    choice = choose_model(config.model, config.checkpoint)
    if config.dense_until == "auto":
        config = config.model_copy(update={"dense_until": None})  # it measures this machine for some seconds
    found = resolve(config, choice, "onnxruntime", backends(), recorded=recorded or {})
    return describe_parameters(found.parameters)


class BuildFile(Kind):
    """The file of `build --config`."""

    name = "build-yaml"
    mutators = (*RAW, *[of_trees(YAML)] * 5, *[insert_piece] * 5)

    def seeds(self) -> Sequence[bytes]:
        small = {"model": MODEL, "weights": "fp32", "max_input_len": 512, "max_output_len": 32, "token_budget": 64}
        shipped = [yaml.safe_load(file.read_text()) for file in sorted(build_configs_directory().glob("*.yaml"))]
        usable = [found for found in shipped if not {"head_pattern", "calibration"} & found.keys()][:12]
        texts = [yaml.safe_dump({**found, **small}) for found in usable]
        return [text.encode() for text in (*texts, "model: retrieval-tiny\n", '{"model": "retrieval-tiny"}')]

    def specimens(self) -> Sequence[bytes]:
        bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
            f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
        )
        return [
            bomb.encode(),
            (bomb + "model: *a11\n").encode(),
            "".join(f"k{n}: 1\n" for n in range(200_000)).encode(),
            ("model: " + "1:" * 200_000 + "1").encode(),
            ("model: " + "9" * 200_000).encode(),
            b"model: " + b"a " * 3000,
            b"[" * 50_000,
            b"{a: " * 50_000,
            b"- " * 100_000,
            b"model: &a [*a]\n",
            b"? &a {a: *a}\n: 1\n",
            b"model: !!python/name:os.system\n",
            ("model: " + '"' + "\\u0041" * 100_000 + '"').encode(),
            b"model: /dev/zero\n",
            b"model: retrieval-tiny\nhead_pattern: /dev/zero\npolicy: duo-attention\n",
            b"model: retrieval-tiny\nlayer_budgets: [" + b"1," * 100_000 + b"]\n",
        ]

    def read(self, content: bytes) -> str:
        config, recorded = configured(self.file(content, "build.yaml"))
        return resolved(config, recorded)


class Setting(Kind):
    """One `--set KEY=VALUE`, as the shell hands it over."""

    name = "set"
    mutators = (*RAW, *[insert_piece] * 4)

    def seeds(self) -> Sequence[bytes]:
        texts = ("token_budget=64", "split=0.5", "dense_until=32", "policy=quest", "page_size=16",
                 "verify=false", "max_input_len=512", "layer_budget=uniform", "max_batch_size=4", "window=8",
                 "weights=int8")  # fmt: skip
        return [text.encode() for text in texts]

    def specimens(self) -> Sequence[bytes]:
        bomb = (
            "["
            + "&a [x,x,x,x,x,x,x,x,x]"
            + "".join(f",&{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 9)}]" for n in range(9))
            + "]"
        )
        return [
            f"token_budget={bomb}".encode(),
            b"token_budget=" + b"9" * 100_000,
            b"split=" + b"1:" * 50_000 + b"1",
            b"a" * 100_000 + b"=1",
            b"policy=" + b"a" * 100_000,
            b"page_size=!!timestamp 2001-99-99",
            b"window=\xff",
        ]

    def read(self, content: bytes) -> str:
        text = content.replace(b"\0", b"").decode("utf-8", "surrogateescape")  # as in sys.argv
        config, _ = configured(None, ("command line", {"model": MODEL}), ("--set", parse_settings([text])))
        return resolved(config)


class HeadPattern(Kind):
    name = "head-pattern"
    mutators = RAW

    def seeds(self) -> Sequence[bytes]:
        config = load_preset(MODEL).config
        rows = [[round((layer + head) % 3 / 3, 3) for head in range(config.num_key_value_heads)]
                for layer in range(config.num_hidden_layers)]  # fmt: skip
        return [("\n".join(separator.join(map(str, row)) for row in rows) + end).encode()
                for separator, end in (("\t", "\n"), (",", ""), (" ", "\n\n"))]  # fmt: skip

    def specimens(self) -> Sequence[bytes]:
        return [
            b"1 " * 500_000, b"1\n" * 500_000, b"nan", b"inf -inf", b"1e999", b"1_0", b"\xef\xbb\xbf1", b"9" * 100_000,
            "\u0661 \u0662".encode(), b"x" * 900_000,
        ]  # fmt: skip

    def read(self, content: bytes) -> str:
        scores = read_head_pattern(self.file(content, "heads.tsv"))
        model = load_preset(MODEL).config
        return describe_parameters(
            resolve_policy(
                "duo-attention", model=model, token_budget=64, max_input_len=256, max_output_len=32, head_scores=scores
            )
        )


class CalibrationPrompts(Kind):
    """The file of `--set calibration=FILE`, up to its token ids."""

    name = "calibration"
    mutators = RAW

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        checkpoint = load_preset(MODEL).checkpoint
        assert checkpoint is not None
        self._tokenizer = load_task_tokenizer(str(checkpoint))

    def seeds(self) -> Sequence[bytes]:
        return [b"<record> lamp scarlet tiger lagos eight <query> lamp\n" * 3, b"lamp\n\nscarlet tiger"]

    def specimens(self) -> Sequence[bytes]:
        return [b"lamp " * 200_000, b"lamp\n" * 50_000, b"\n" * 100_000, b"\xef\xbb\xbflamp", b"x" * 1_000_000]

    def read(self, content: bytes) -> list[list[int]]:
        return calibration._of_file(self.file(content, "prompts.txt"), self._tokenizer, 256)


KINDS = (BuildFile, Setting, HeadPattern, CalibrationPrompts)
