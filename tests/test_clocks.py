"""A clock that jumps must not matter: only a few places may ask for the time of day, and none measures with it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import kvc_trt

PACKAGE = Path(kvc_trt.__file__).parent
OF_THE_DAY = {
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime", "strftime", "clock_gettime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}
READERS = {
    "engine/verification.py": "the date of a verification, which is printed",
    "files/held.py": "whether a file was written just now, so that the next write could have the same time",
    "engine/stages.py": "how old an entry of the cache is; tests/engine/test_stages.py lets the clock jump",
    "machine.py": "the date of a measurement, which nothing computes with",
    "runtime/chat/conversation.py": "the date that a chat template writes into a prompt",
    "runtime/chat/template_worker.py": "the same",
    "serving/dynamo/model_card.py": "the field `created` of a model in OpenAI's API",
    "serving/http/server.py": "the same",
    "serving/protocol/documents.py": "the field `created` of an answer in OpenAI's API",
    "serving/triton/openai.py": "the field `created` of a model",
}


def asked(source: str) -> Iterator[str]:
    """Yield the functions of the time of day that a module uses."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in OF_THE_DAY.get(node.value.id, ()):
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module in OF_THE_DAY:
            yield from (alias.name for alias in node.names if alias.name in OF_THE_DAY[node.module])


def test_only_few_places_ask_for_the_time_of_day():
    found = {path.relative_to(PACKAGE).as_posix(): set(asked(path.read_text())) for path in PACKAGE.rglob("*.py")}
    assert {name for name, functions in found.items() if functions} == set(READERS)


def test_every_call_for_the_time_of_day_is_detected():
    assert list(asked("import time\nx = time.time() - start")) == ["time.time"]
    assert list(asked("from time import time_ns")) == ["time_ns"]
    assert list(asked("from datetime import datetime\nnow = datetime.now()")) == ["datetime.now"]
    assert list(asked("import time\nfrom datetime import datetime\ntime.monotonic()")) == []
