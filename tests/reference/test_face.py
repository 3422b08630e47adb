"""`kvc_trt.reference` offers its functions by name and imports each when it is first used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvc_trt import reference


def test_the_map_of_modules_and_the_public_names_agree() -> None:
    offered = [name for names in reference._MODULES.values() for name in names]
    assert sorted(offered) == sorted(reference.__all__)


@pytest.mark.parametrize("name", reference.__all__)
def test_each_public_name_is_a_function_or_class_of_its_module(name: str) -> None:
    (module,) = [module for module, names in reference._MODULES.items() if name in names]
    assert getattr(reference, name) is getattr(sys.modules[module], name)


def test_importing_the_reference_loads_no_torch() -> None:
    program = "import kvc_trt.reference, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
