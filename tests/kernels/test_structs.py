"""The ctypes mirrors against the C headers, as a C compiler lays them out."""

from __future__ import annotations

import ctypes
import re
import subprocess

import pytest

from kvc_trt.kernels import structs
from tests.kernels.double import INCLUDE, compiler

STRUCTS = {
    "KvcCompactParams": structs.CompactParams,
    "KvcHybridAttentionParams": structs.HybridAttentionParams,
    "KvcDenseAttentionParams": structs.DenseAttentionParams,
    "KvcMessage": structs.Message,
}
ENUMS = {"KvcStatus": structs.Status, "KvcDtype": structs.Dtype}


def text() -> str:
    return "\n".join(path.read_text() for path in sorted((INCLUDE / "kvc").glob("*.h")))


def fields_in_header(name: str) -> list[str]:
    """Names of the fields that the header declares, in its order."""
    body = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", text(), re.S)
    assert body is not None
    lines = re.sub(r"/\*.*?\*/", "", body[1], flags=re.S).split(";")
    return [re.search(r"(\w+)(\[\d+\])?\s*$", line)[1] for line in lines if line.strip()]


@pytest.fixture(scope="module")
def layout(tmp_path_factory) -> dict[str, int]:
    """Offsets, sizes and enumerators that a compiled C program prints."""
    directory = tmp_path_factory.mktemp("layout")
    prints = []
    for name in STRUCTS:
        prints.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field in fields_in_header(name):
            prints.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
            prints.append(f'printf("{name}.{field}.size %zu\\n", sizeof((({name}*)0)->{field}));')
    for constant in (*(f"KVC_{member.name}" for enum in ENUMS.values() for member in enum), "KVC_ABI_VERSION"):
        prints.append(f'printf("{constant} %d\\n", (int){constant});')
    source = directory / "layout.c"
    includes = "#include <stddef.h>\n#include <stdio.h>\n#include <kvc/kvc.h>\n"
    source.write_text(f"{includes}int main(void) {{ {' '.join(prints)} return 0; }}\n")
    subprocess.run([compiler(), "-std=c11", f"-I{INCLUDE}", str(source), "-o", str(directory / "layout")], check=True)
    printed = subprocess.run([str(directory / "layout")], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in (line.split() for line in printed.splitlines())}


@pytest.mark.parametrize("name", STRUCTS)
def test_a_struct_is_laid_out_as_the_header_says(name, layout):
    mirror = STRUCTS[name]
    fields = [field for field, *_ in mirror._fields_]
    assert fields == fields_in_header(name)
    assert ctypes.sizeof(mirror) == layout[name]
    for field in fields:
        place = getattr(mirror, field)
        assert (place.offset, place.size) == (layout[f"{name}.{field}"], layout[f"{name}.{field}.size"]), field


@pytest.mark.parametrize("name", ENUMS)
def test_an_enumeration_has_the_headers_names_and_numbers(name, layout):
    body = re.search(rf"typedef enum {name} \{{(.*?)\}}", text(), re.S)[1]
    declared = set(re.findall(r"KVC_(\w+) =", body))
    assert {member.name for member in ENUMS[name]} == declared
    assert all(layout[f"KVC_{member.name}"] == member for member in ENUMS[name])


def test_the_abi_version_is_the_headers(layout):
    assert layout["KVC_ABI_VERSION"] == structs.ABI_VERSION


def test_a_struct_knows_its_own_size():
    assert structs.CompactParams(batch=3).struct_bytes == ctypes.sizeof(structs.CompactParams)
