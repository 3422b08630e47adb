"""Loops of the source are found by their lines."""

from __future__ import annotations

from pathlib import Path

from benchmarks.predict.source_loops import loops_of

SOURCE = """\
constexpr int kInFlight = 8;
void f(int n) {
    // for (this is no loop)
    for (int i = 0; i < n; ++i) {
        if (i) {
#pragma unroll 4
            for (int j = 0; j < i; ++j) g(j);
        }
    }
#pragma unroll kInFlight
    for (int i = 0;
         i < n;
         ++i)
        for (int j = 0; j < kInFlight; ++j) h(i);
    do {
        g(n);
    } while (--n > 0);
#pragma unroll
    while (n) {
        ++n;
    }
}
"""


def test_loops_of_a_source_have_their_lines_and_unroll_pragmas(tmp_path: Path) -> None:
    path = tmp_path / "f.cuh"
    path.write_text(SOURCE)
    found = [(loop.first, loop.body, loop.last, loop.test, loop.unroll) for loop in loops_of(path)]
    assert found == [
        (4, 5, 9, (4, 4), None),
        (7, 7, 7, (7, 7), 4),
        (11, 14, 14, (11, 13), 8),
        (14, 14, 14, (14, 14), None),
        (15, 16, 17, (17, 17), None),
        (19, 20, 21, (19, 19), 0),
    ]
    assert [loop.trips for loop in loops_of(path)] == [None, None, None, 8, None, None]


def test_a_constant_of_several_classes_has_no_one_value(tmp_path: Path) -> None:
    path = tmp_path / "f.cuh"
    path.write_text(
        "struct A { static constexpr int kGroups = n > 4 ? 2 : 4; };\n"
        "struct B { static constexpr int kGroups = 2; };\n"
        "void f() {\n"
        "    for (int i = 0; i < kGroups; ++i) g(i);\n"
        "}\n"
    )
    assert [loop.trips for loop in loops_of(path)] == [None]


def test_loops_are_found_in_every_kernel_source() -> None:
    folder = Path(__file__).resolve().parents[3] / "plugins_cuda" / "kernels"
    assert sum(len(loops_of(path)) for path in folder.glob("*.cuh")) > 50
