"""The ctypes mirrors have the layout that a C compiler gives the headers' structs."""

from __future__ import annotations

import ctypes
import subprocess

import pytest

from kvc_trt.kernels import structs
from kvc_trt.kernels.rotated import LIBRARY_OPERATORS
from kvc_trt.operators.compaction.compact import COMPACT
from tests.kernels.double import INCLUDE, compiler

STRUCTS = {
    **{operator.kernel.struct: structs.struct_of(operator) for operator in LIBRARY_OPERATORS},
    "KvcMessage": structs.Message,
    "KvcPrefetchParams": structs.PrefetchParameters,
}
ENUMS = {"KvcStatus": structs.Status, "KvcDtype": structs.Dtype}


@pytest.fixture(scope="module")
def layout(tmp_path_factory) -> dict[str, int]:
    """Offsets, sizes and enumerators that a compiled C program prints."""
    directory = tmp_path_factory.mktemp("layout")
    prints = []
    for name in STRUCTS:
        prints.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, *_ in STRUCTS[name]._fields_:
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
    """Offsets, sizes, and no room for a member that Python does not know."""
    mirror, end = STRUCTS[name], 0
    for field, *_ in mirror._fields_:
        place = getattr(mirror, field)
        assert (place.offset, place.size) == (layout[f"{name}.{field}"], layout[f"{name}.{field}.size"]), field
        alignment = ctypes.alignment(dict(mirror._fields_)[field])
        assert place.offset == -(-end // alignment) * alignment, field
        end = place.offset + place.size
    assert ctypes.sizeof(mirror) == layout[name] == end


@pytest.mark.parametrize("name", ENUMS)
def test_an_enumeration_has_the_headers_names_and_numbers(name, layout, tmp_path):
    """The compiler says if a switch over Python's names leaves out one of the header's."""
    assert all(layout[f"KVC_{member.name}"] == member for member in ENUMS[name])
    cases = " ".join(f"case KVC_{member.name}: return 1;" for member in ENUMS[name])
    source = tmp_path / "names.c"
    source.write_text(f"#include <kvc/kvc.h>\nint known({name} value) {{ switch (value) {{ {cases} }} return 0; }}\n")
    subprocess.run([compiler(), "-std=c11", "-Werror=switch", f"-I{INCLUDE}", "-fsyntax-only", str(source)], check=True)


def test_the_abi_version_is_the_headers(layout):
    assert layout["KVC_ABI_VERSION"] == structs.ABI_VERSION


def test_a_struct_knows_its_own_size():
    struct = structs.struct_of(COMPACT)
    assert struct(batch=3).struct_bytes == ctypes.sizeof(struct)
