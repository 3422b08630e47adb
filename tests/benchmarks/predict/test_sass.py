"""Machine code is cut into blocks and loops, and every instruction keeps its lines."""

from __future__ import annotations

import pytest

from benchmarks.predict import chain, sass
from benchmarks.predict.sass import Instruction

TEXT = """
\t.section\t.text._Z1kPf,"ax",@progbits
_Z1kPf:
.text._Z1kPf:
\t//## File "/tree/kernels/outer.cuh", line 4
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @P0 EXIT ;
.L_x_1:
\t//## File "/tree/kernels/inner.cuh", line 9 inlined at "/tree/kernels/outer.cuh", line 6
\t//## File "/tree/kernels/outer.cuh", line 6
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64+0x10] ;
        /*0030*/                   FADD R8, R4, R7 ;
.L_x_2:
        /*0040*/                   FADD R9, R8, R8 ;
        /*0050*/              @P1 BRA `(.L_x_2) ;
        /*0060*/              @!P2 BRA `(.L_x_1) ;
        /*0070*/                   EXIT ;
.L_x_3:
        /*0080*/                   BRA `(.L_x_3);
$__internal_0_$__cuda_sm3x_div_rn_noftz_f32_slowpath:
        /*0090*/                   RET.REL.NODEC R2 `(_Z1kPf) ;
"""


@pytest.fixture
def kernel() -> sass.SassKernel:
    ((symbol, section),) = sass.sections(TEXT).items()
    assert symbol == "_Z1kPf"
    return sass.parse(symbol, section)


def test_blocks_end_at_labels_and_jumps(kernel: sass.SassKernel) -> None:
    assert [[one.name for one in block.instructions] for block in kernel.blocks] == [
        ["MOV", "EXIT"], ["LDG", "FADD"], ["FADD", "BRA"], ["BRA"], ["EXIT"], ["BRA"],
    ]  # fmt: skip
    assert [block.next for block in kernel.blocks] == [[1], [2], [3, 2], [4, 1], [], []]
    assert sass.reachable(kernel.blocks) == {0, 1, 2, 3, 4}
    assert kernel.code_bytes == 10 * 16


def test_loops_are_nested(kernel: sass.SassKernel) -> None:
    outer, inner = kernel.loops
    assert (outer.head, outer.latches, outer.blocks) == (1, {3}, {1, 2, 3})
    assert (inner.head, inner.latches, inner.blocks) == (2, {2}, {2})
    assert kernel.parent(inner) == outer
    assert kernel.parent(outer) is None
    assert kernel.loop_of(2) == inner
    assert kernel.loop_of(3) == outer
    assert kernel.loop_of(4) is None
    assert kernel.always_in(outer) == {1, 2, 3}


def test_an_instruction_has_the_lines_of_the_calls_around_it(kernel: sass.SassKernel) -> None:
    load = kernel.blocks[1].instructions[0]
    assert load.frames == (("inner.cuh", 9), ("outer.cuh", 6))
    assert kernel.blocks[2].instructions[0].frames == load.frames, "the lines hold until others are named"
    assert kernel.blocks[0].instructions[0].frames == (("outer.cuh", 4),)


@pytest.mark.parametrize(
    ("opcode", "operands", "written", "read"),
    [
        ("FFMA", "R5, R2, R3, R5", ["R5"], ["R2", "R3", "R5"]),
        ("LDG.E.128", "R4, desc[UR4][R2.64+0x10]", ["R4", "R5", "R6", "R7"], ["UR4", "R2", "R3"]),
        ("STS.128", "[R9+0x20], R4", [], ["R9", "R4", "R5", "R6", "R7"]),
        ("ISETP.GE.AND", "P0, PT, R0, R5, PT", ["P0"], ["R0", "R5"]),
        ("SHFL.BFLY", "PT, R5, R4, 0x10, 0x1f", ["R5"], ["R4"]),
        ("IADD3", "R2, P1, R3, UR6, RZ", ["R2", "P1"], ["R3", "UR6"]),
        ("IMAD.WIDE", "R2, R3, 0x4, R6", ["R2", "R3"], ["R3", "R6", "R7"]),
        ("HMMA.16816.F32.BF16", "R8, R4, R2, R8", ["R8", "R9", "R10", "R11"],
         ["R4", "R5", "R6", "R7", "R2", "R3", "R8", "R9", "R10", "R11"]),
    ],
)  # fmt: skip
def test_registers_of_an_instruction_are_split_into_written_and_read(
    opcode: str, operands: str, written: list[str], read: list[str]
) -> None:
    assert chain.registers(Instruction(0, opcode, operands)) == (written, read)
