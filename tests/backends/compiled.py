"""Engine directories of a compiling backend, except for the plans: no TensorRT wrote those."""

from __future__ import annotations

import json
from pathlib import Path

from kvc_trt.backends.registry import backend as backend_of
from kvc_trt.backends.tensorrt.format import GRAPHS, INSPECTOR_DIRECTORY, inspector_file, plan_file
from kvc_trt.engine.files import listing, sha256
from kvc_trt.engine.format import EXTEND_FILE
from kvc_trt.engine.manifest import canonical, sealed
from kvc_trt.kernels.structs import ABI_VERSION

TARGETS = {
    "tensorrt": {"tensorrt": "11.4.0.106"},
    "tensorrt-llm": {"tensorrt": "10.14.1.48", "tensorrt_llm": "1.2.1"},
}


def as_compiled(engine: Path, backend: str, library_sha256: str = "ab" * 32) -> Path:
    """Turn the directory of any engine into one of `backend`, all hashes right."""
    files = backend_of(backend).files
    config = json.loads((engine / "config.json").read_text())
    if "extend" not in files:
        (engine / EXTEND_FILE).unlink(missing_ok=True)
        compression = config["kv_compression"]
        compression["state"] = [tensor for tensor in compression["state"] if tensor["in_step"]]
    for graph in (graph for graph in GRAPHS if f"{graph}.engine" in files):
        (engine / plan_file(graph)).write_bytes(b"no plan of TensorRT's" * 100)
        if f"{graph}.inspector" in files:
            (engine / INSPECTOR_DIRECTORY).mkdir(exist_ok=True)
            (engine / inspector_file(graph)).write_bytes(b"{}\n")
    config["build_config"]["kvc_trt"]["backend"] = backend
    (engine / "config.json").write_bytes(canonical(config))
    manifest = json.loads((engine / "manifest.json").read_text())
    manifest.pop("sha256")
    manifest["build_config"] = config["build_config"]["kvc_trt"]
    manifest["target"] = {
        "backend": backend,
        "architecture": "sm_90",
        **TARGETS[backend],
        "plugins": {"file": "libkvc_plugins.so", "sha256": library_sha256, "abi": ABI_VERSION},
        "compatibility": "none",
    }
    sizes = listing(engine)
    sizes.pop("manifest.json")
    manifest["files"] = {name: {"sha256": sha256(engine / name), "size": size} for name, size in sizes.items()}
    (engine / "manifest.json").write_bytes(sealed(manifest))
    return engine
