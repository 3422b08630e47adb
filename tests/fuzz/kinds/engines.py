"""Files of an engine whose seals are right: whoever can write to an engine's folder can also write a new manifest."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import onnx
from google.protobuf.message import DecodeError

from kvc_trt.api import Engine
from kvc_trt.backends.opening import open_engine
from kvc_trt.cli.commands.inspect import command as inspect_command
from kvc_trt.contexts.packing import packing_of
from kvc_trt.engine import EngineDirectory
from kvc_trt.engine.manifest import MANIFEST_FILE, SELF_DIGEST
from kvc_trt.engine.program import engine_program
from tests.conftest import TINY_BUILD, TINY_MODEL
from tests.fuzz.kind import Kind
from tests.fuzz.mutation.raw import RAW, flip_bits
from tests.fuzz.mutation.trees import JSON, of_trees
from tests.readable_model import with_template


class NotPrintable(Exception):
    """A command has printed what could control a terminal."""


def tiny_engine(folder: Path) -> Path:
    """Return an engine of a tiny chat model, built once in a folder that all kinds share."""
    engine = folder / "engine"
    if not engine.exists():
        from kvc_trt.cli.main import run

        model = folder / "engine-model"
        shutil.rmtree(model, ignore_errors=True)
        shutil.rmtree(folder / "engine-chat", ignore_errors=True)
        model.mkdir()
        (model / "config.json").write_text(json.dumps(TINY_MODEL))
        with_template(model, folder / "engine-chat", eos_token_id=[7, 8])
        assert run(["build", "--model", str(folder / "engine-chat"), *TINY_BUILD, "-o", str(engine)]) == 0
    return engine


class EngineKind(Kind):
    """A copy of the tiny engine, one file of which is the input."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.engine = folder / "engine"
        shutil.rmtree(self.engine, ignore_errors=True)
        shutil.copytree(tiny_engine(folder.parent), self.engine)
        self._manifest = json.loads((self.engine / MANIFEST_FILE).read_text())
        self._manifest.pop(SELF_DIGEST)

    def seal(self, manifest: Any) -> None:
        """Write a manifest with its digest, as somebody else's program might write one."""
        if isinstance(manifest, dict):
            manifest = {key: value for key, value in manifest.items() if key != SELF_DIGEST}
            manifest = {**manifest, SELF_DIGEST: hashlib.sha256(_canonical(manifest)).hexdigest()}
        (self.engine / MANIFEST_FILE).write_bytes(_canonical(manifest))

    def replace(self, name: str, content: bytes) -> None:
        """Put `content` in the place of a file, and seal the engine again."""
        (self.engine / name).write_bytes(content)
        record = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        self.seal({**self._manifest, "files": {**self._manifest["files"], name: record}})

    def used(self, as_json: bool) -> EngineDirectory:
        """Do what commands do with an engine before a runtime loads it."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            inspect_command.main([str(self.engine), *(["--json"] if as_json else [])], standalone_mode=False)
        if not all(line.isprintable() for line in printed.getvalue().split("\n")):
            raise NotPrintable(repr(printed.getvalue())[:200])
        engine = open_engine(self.engine)
        program = engine_program(engine)
        program.limits, program.largest_budget, program.dtype, packing_of(engine).fingerprint, engine.digest
        return engine


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, indent=2, ensure_ascii=True).encode("ascii") + b"\n"


class EngineConfig(EngineKind):
    name = "engine-config"
    mutators = (*RAW, *[of_trees(JSON)] * 16)

    def seeds(self) -> Sequence[bytes]:
        return [(self.engine / "config.json").read_bytes()]

    def specimens(self) -> Sequence[bytes]:
        return [b"[" * 100_000, b"{}", b"null", self.seeds()[0].replace(b"llama", b"\\u001b[2J")]

    def read(self, content: bytes) -> EngineDirectory:
        self.replace("config.json", content)
        return self.used(as_json=bool(len(content) % 2))


class EngineManifest(EngineKind):
    name = "engine-manifest"
    mutators = (*RAW, *[of_trees(JSON)] * 16)

    def seeds(self) -> Sequence[bytes]:
        return [(tiny_engine(self.folder.parent) / MANIFEST_FILE).read_bytes()]

    def specimens(self) -> Sequence[bytes]:
        manifest = json.loads(self.seeds()[0])
        names = ["/etc/passwd", "../x", "a/../b", "\ud800", "\0", "x" * 5000, ".", "", "tokenizer"]
        record = next(iter(manifest["files"].values()))
        changed = [{**manifest, "files": {**manifest["files"], name: record}} for name in names]
        return [b"[" * 100_000, b"{}", *(json.dumps(one).encode() for one in changed)]

    def read(self, content: bytes) -> EngineDirectory:
        try:
            self.seal(json.loads(content))
        except (ValueError, RecursionError):
            (self.engine / MANIFEST_FILE).write_bytes(content)
        return self.used(as_json=bool(len(content) % 2))


class EngineTokenizer(EngineKind):
    """tokenizer_config.json of an engine, whose template and special tokens a question needs."""

    name = "engine-tokenizer-config"
    mutators = (*RAW, *[of_trees(JSON)] * 12)

    def seeds(self) -> Sequence[bytes]:
        return [(self.engine / "tokenizer" / "tokenizer_config.json").read_bytes()]

    def read(self, content: bytes) -> Any:
        self.replace("tokenizer/tokenizer_config.json", content)
        engine = self.used(as_json=False)
        return engine.chat_template, engine.tokenizer


class OnnxGraph(EngineKind):
    """The graph of a step, up to a loaded session. An engine is a program: what its graphs compute is not judged."""

    name = "engine-onnx"
    native = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.mutators = (*RAW, *[_spoil_graph] * 12)

    def seeds(self) -> Sequence[bytes]:
        return [(self.engine / "decode.onnx").read_bytes()]

    def specimens(self) -> Sequence[bytes]:
        return [b"", b"\x0a" * 100, b"\xff" * 1000]

    def read(self, content: bytes) -> Any:
        self.replace("decode.onnx", content)
        engine = Engine.open(self.engine, threads=1)
        return engine.session(1).executor.limits


def _spoil_graph(random: Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
    """Change fields of the parsed graph, so that it can still be parsed."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError:
        return flip_bits(random, content, seeds)
    for _ in range(random.randint(1, 3)):
        _spoil_message(random, model)
    return bytes(model.SerializeToString())


_TEXTS = (
    "",
    "x",
    "\n",
    "../../../etc/passwd",
    "weights.safetensors",
    "/dev/zero",
    "kvc",
    "float",
    "x" * 500,
    "\x1b[2J",
)
_INTEGERS = (0, 1, -1, 2, 2**31 - 1, -(2**31), 2**31, 2**62, -(2**63), 2**63 - 1, 7, 1 << 20)


def _spoil_message(random: Random, message: Any) -> None:
    """Walk down from a message at random and change one field."""
    while True:
        fields = message.ListFields()
        if not fields:
            return
        field, value = random.choice(fields)
        repeated = field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED
        if field.message_type is not None and random.random() < 0.9:
            message = random.choice(list(value)) if repeated else value
            continue
        if repeated:
            _spoil_list(random, value, field)
        elif field.message_type is not None or random.random() < 0.1:
            message.ClearField(field.name)
        else:
            with contextlib.suppress(ValueError, TypeError):
                setattr(message, field.name, _scalar(random, value))
        return


def _spoil_list(random: Random, values: Any, field: Any) -> None:
    index = random.randrange(len(values))
    change = random.randrange(3)
    if change == 0:
        del values[index]
    elif change == 1:
        values.append(values[index])
    elif field.message_type is not None:
        values[index].CopyFrom(random.choice(list(values)))
    else:
        with contextlib.suppress(ValueError, TypeError):
            values[index] = _scalar(random, values[index])


def _scalar(random: Random, value: Any) -> Any:
    if isinstance(value, str):
        return random.choice((*_TEXTS, value + "x", value[:-1]))
    if isinstance(value, bytes):
        return random.choice((b"", value[:-1], value * 2, value + b"\0"))
    if isinstance(value, float):
        return random.choice((0.0, -1.0, float("inf"), float("nan"), 1e30))
    return random.choice((*_INTEGERS, value + 1, value - 1))


KINDS = (EngineConfig, EngineManifest, EngineTokenizer, OnnxGraph)
