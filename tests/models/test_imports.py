from __future__ import annotations

import subprocess
import sys

HEAVY = [
    "torch",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "onnx_ir",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "matplotlib",
]


def test_models_import_nothing_heavy():
    code = f"""
import importlib, pkgutil, sys
import kvc_trt.models
for module in pkgutil.walk_packages(kvc_trt.models.__path__, "kvc_trt.models."):
    importlib.import_module(module.name)
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "[]"


def test_the_package_alone_needs_not_even_numpy():
    code = "import kvc_trt.models, sys; print('numpy' in sys.modules or 'pydantic' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "False"
