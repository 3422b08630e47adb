"""The compiler's output for each kernel: resources and instructions, read from a library by cuobjdump and nvdisasm."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

_ARCHITECTURE = re.compile(r"^arch = (sm_\w+)")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+ )?([A-Z][\w.]*)")
_WAIT = "ACQBULK"
"""griddepcontrol.wait, on sm_90 and later."""
_GLOBAL = {"LD", "LDG", "LDGSTS", "ST", "STG", "ATOM", "ATOMG", "RED", "REDG"}
_RESERVED_SHARED = 1024
"""Bytes that the linker counts into SHARED for the system, on sm_90 and later."""
_TYPES = {
    "__nv_bfloat16": "bf16",
    "bfloat16_t": "bf16",
    "__half": "fp16",
    "half_t": "fp16",
    "fp8_t": "fp8",
    "float": "fp32",
    "(anonymous namespace)::": "",
    "kvc::": "",
}


class ToolMissing(Exception):
    """cuobjdump, nvdisasm or c++filt is not there."""


@dataclass
class KernelCode:
    """One kernel for one architecture."""

    name: str
    architecture: str
    registers: int = 0
    static_shared: int = 0
    stack: int = 0
    local: int = 0
    max_threads: int = 0
    """The limit of __launch_bounds__; 0 without one."""
    instructions: Counter[str] = field(default_factory=Counter)
    before_wait: Counter[str] = field(default_factory=Counter)
    """The instructions before the wait for the previous launch; all, if there is no such wait."""

    @property
    def function(self) -> str:
        """The name without its template arguments."""
        return self.name.partition("<")[0]

    def count(self, opcode: str, *modifiers: str) -> int:
        """Instructions of that opcode which carry all these modifiers."""
        return sum(
            number
            for instruction, number in self.instructions.items()
            if instruction.split(".")[0] == opcode and set(modifiers) <= set(instruction.split("."))
        )

    @property
    def waits(self) -> bool:
        """True if the kernel waits for the launch before it."""
        return self.count(_WAIT) > 0

    @property
    def early_accesses(self) -> list[str]:
        """Accesses to global memory that may not wait for the launch before: ahead of the wait, or read-only."""
        ahead = [name for name in self.before_wait if name.split(".")[0] in _GLOBAL]
        return ahead + [name for name in self.instructions if name.startswith("LDG") and "CONSTANT" in name.split(".")]

    @property
    def spills(self) -> int:
        """Accesses to local memory: spilled registers, or arrays indexed at run time."""
        return self.count("LDL") + self.count("STL")


Kernels = Callable[[str, str], KernelCode]
"""A function that returns the kernel of an architecture and a symbol."""


def read(library: Path) -> list[KernelCode]:
    """Return every kernel of the library, in the order of names and architectures."""
    kernels: dict[tuple[str, str], KernelCode] = {}

    def kernel(architecture: str, symbol: str) -> KernelCode:
        if (architecture, symbol) not in kernels:  # of a million lines few are the first of their kernel
            kernels[architecture, symbol] = KernelCode(symbol, architecture)
        return kernels[architecture, symbol]

    with ThreadPoolExecutor() as pool:
        usage, sections, instructions = pool.map(_dump, ("-res-usage", "-elf", "-sass"), repeat(library))
    _read_usage(usage, kernel)
    _read_launch_bounds(sections, kernel)
    _read_instructions(instructions, kernel)
    names = demangled(sorted({symbol for _, symbol in kernels}))
    for (_, symbol), code in kernels.items():
        code.name = names[symbol]
    return sorted(kernels.values(), key=lambda code: (code.name, _generation(code.architecture)))


def demangled(symbols: list[str]) -> dict[str, str]:
    """Readable names: `sparse_attention<bf16, 128>`, without namespaces and parameters."""
    done = subprocess.run([tool("c++filt")], input="\n".join(symbols), capture_output=True, text=True, check=True)
    return {symbol: short_name(name) for symbol, name in zip(symbols, done.stdout.splitlines(), strict=True)}


def short_name(name: str) -> str:
    """Return a demangled name without namespaces and parameters, types as bf16, fp16 and fp32."""
    for long, short in _TYPES.items():
        name = name.replace(long, short)
    name = name.replace("> >", ">>")
    name = re.sub(r"\((?:int|unsigned int|bool|long)\)", "", name.removeprefix("void "))
    return _without_parameters(name)


def _without_parameters(name: str) -> str:
    depth = 0
    for position, character in enumerate(name):
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "(" and depth == 0:
            return name[:position]
    return name


def _read_usage(text: str, kernel: Kernels) -> None:
    for architecture, symbol, line in _functions(text, " Function "):
        if match := _USAGE.search(line):
            code = kernel(architecture, symbol)
            code.registers, code.stack, shared, code.local = map(int, match.groups())
            # A kernel that uses none at all is not charged the system's part either.
            code.static_shared = max(0, shared - (_RESERVED_SHARED if _generation(architecture) >= 90 else 0))


def _read_launch_bounds(text: str, kernel: Kernels) -> None:
    bounds = False
    for architecture, symbol, line in _functions(text, ".nv.info."):
        if bounds and "Value:" in line:
            x, y, z = (int(number, 16) for number in line.split()[1:4])
            kernel(architecture, symbol).max_threads = x * y * z
        bounds = "EIATTR_MAX_THREADS" in line or (bounds and "Format:" in line)


def _read_instructions(text: str, kernel: Kernels) -> None:
    heading, waited = "\t\tFunction : ", False
    for architecture, symbol, line in _functions(text, heading):
        code = kernel(architecture, symbol)
        if line == heading:
            # A template that two translation units instantiate is in the library twice, both times the same.
            code.instructions.clear()
            code.before_wait.clear()
            waited = False
        elif match := _INSTRUCTION.match(line):
            instruction = match.group(1)
            if not waited:
                code.before_wait[instruction] += 1
            code.instructions[instruction] += 1
            waited = waited or instruction.partition(".")[0] == _WAIT


def _functions(text: str, heading: str) -> Iterator[tuple[str, str, str]]:
    """(architecture, symbol, line) of every line under a function's heading, and of the heading itself."""
    architecture = symbol = ""
    for line in text.splitlines():
        if match := _ARCHITECTURE.match(line):
            architecture, symbol = match.group(1), ""
        elif line.startswith(heading):
            symbol = line.removeprefix(heading).strip().rstrip(":")
            yield architecture, symbol, heading
        elif line.startswith("."):
            symbol = ""
        elif symbol:
            yield architecture, symbol, line


def _generation(architecture: str) -> int:
    return int(re.sub(r"\D", "", architecture))


def _dump(option: str, library: Path) -> str:
    program = tool("cuobjdump")
    # cuobjdump calls nvdisasm by name.
    path = os.pathsep.join([str(Path(tool("nvdisasm")).parent), os.environ.get("PATH", "")])
    command = [program, option, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PATH": path}).stdout


def tool(name: str) -> str:
    """Return the program on PATH, beside nvcc in /usr/local/cuda, or in the wheels of this Python."""
    folders = [os.environ.get("PATH", ""), "/usr/local/cuda/bin", *_wheel_folders()]
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        raise ToolMissing(f"{name} is not installed; pip install '.[cuda-build]' brings it")
    return found


def _wheel_folders() -> list[str]:
    try:
        spec = importlib.util.find_spec("nvidia.cu13")
    except ModuleNotFoundError:
        return []
    return [f"{folder}/bin" for folder in (spec.submodule_search_locations or [])] if spec else []
