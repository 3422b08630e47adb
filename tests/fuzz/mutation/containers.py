"""Codecs of formats that hold a tree among other bytes."""

from __future__ import annotations

import json
from typing import Any

from tests.fuzz.mutation.trees import Codec


def packed(header: Any, data: bytes) -> bytes:
    """Return a safetensors file of a header and the tensors' bytes, whatever they are."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def header_and_data(content: bytes) -> tuple[Any, bytes]:
    """Return the header of a safetensors file and the tensors' bytes; ValueError where there is none."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


SAFETENSORS = Codec(
    lambda content: header_and_data(content)[0], lambda header, content: packed(header, header_and_data(content)[1])
)
