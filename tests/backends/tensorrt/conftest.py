from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from tests.backends.tensorrt import rtx
from tests.plugins_cuda.conftest import emulation

__all__ = ["ask_parser", "emulation"]

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def ask_parser(tmp_path, request):
    """ask_parser(*graphs, plugins="python", plan=False, ...) -> one answer of rtx_program.py per graph.

    A plan asks the kernels for their workspaces: those of the emulation, which need no GPU.
    """
    if (reason := rtx.missing()) is not None:
        pytest.skip(reason)

    def ask(*graphs: onnx.ModelProto | Path, plugins="python", without=(), damage=None, **options) -> list[dict]:
        kernels = str(request.getfixturevalue("emulation").path) if options.get("plan") else None
        question = {"plugins": str(plugins), "kernels": kernels, "without": list(without), "damage": damage}
        question["graphs"] = []
        for index, graph in enumerate(graphs):
            path = graph
            if isinstance(graph, onnx.ModelProto):
                path = tmp_path / f"graph{index}.onnx"
                onnx.save(graph, path)
            question["graphs"].append({"path": str(path), **options})
        file = tmp_path / "request.json"
        file.write_text(json.dumps(question))
        command = [sys.executable, "-m", "tests.backends.tensorrt.rtx_program", file]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 0, f"ended with {done.returncode}:\n{done.stderr[-4000:]}"
        answers = json.loads(done.stdout.splitlines()[-1])["graphs"]
        return [answer | {"stderr": done.stderr} for answer in answers]

    return ask
