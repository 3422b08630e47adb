"""A guard goes around a statement or expression, and leaves the rest unchanged."""

from __future__ import annotations

import pytest

from tests.plugins_cuda.guards import CannotGuard, Mistake, guarded


def body(text: str, *mistakes: Mistake) -> str:
    """Return the body of a function, with guards."""
    return guarded(f"void f() {{ {text} }}", mistakes).removeprefix("void f() { ").removesuffix(" }")


@pytest.mark.parametrize(
    ("text", "right", "wrong", "expected"),
    [
        ("x = a > 0 ? b : c;", "a > 0", "a >= 0", "x = (kvc_mutant == 1 ? (a >= 0) : (a > 0)) ? b : c;"),
        ("x = a > 0 ? b : c;", "a > 0 ? b : c", "b", "x = (kvc_mutant == 1 ? (b) : (a > 0 ? b : c));"),
        ("x = a * b + c;", "a * b", "a", "x = (kvc_mutant == 1 ? (a + c) : (a * b + c));"),
        ("if (a && b < c) d();", "b < c", "b > c", "if (a && (kvc_mutant == 1 ? (b > c) : (b < c))) d();"),
        ("x = a && b && c;", "a && b", "a || b", "x = (kvc_mutant == 1 ? (a || b && c) : (a && b && c));"),
        ("x += y;", "+=", "=", "(kvc_mutant == 1 ? (x = y) : (x += y));"),
        ("f(a, g(b), c);", "g(b)", "g(d)", "f(a, g((kvc_mutant == 1 ? (d) : (b))), c);"),
        ("x = y + f(a, b);", "f(a, b)", "f(a)", "x = (kvc_mutant == 1 ? (y + f(a)) : (y + f(a, b)));"),
        ("for (;i < n; ++i) g();", "i < n", "i < 1", "for (;(kvc_mutant == 1 ? (i < 1) : (i < n)); ++i) g();"),
        ("wait<1>();", "wait<1>", "wait<2>", "(kvc_mutant == 1 ? (wait<2>()) : (wait<1>()));"),
        ("return a >= b;", ">=", ">", "return (kvc_mutant == 1 ? (a > b) : (a >= b));"),
    ],
)
def test_a_guard_is_around_the_smallest_whole_expression(text: str, right: str, wrong: str, expected: str) -> None:
    assert body(text, Mistake(1, right, wrong)) == expected


@pytest.mark.parametrize(
    ("text", "right", "wrong", "expected"),
    [
        ("if (x) s(); else t();", "s();", "", "if (x) { if (kvc_mutant == 1) {  } else { s(); } } else t();"),
        ("a(); // first, (\n b();", "b();", "", "a(); // first, (\n { if (kvc_mutant == 1) {  } else { b(); } }"),
        ("a(); b();", "a();", "a(); c();", "a(); { if (kvc_mutant == 1) { c(); } else {  } }b();"),
        ("a(); b();", "b();", "if (x) b();", "a(); { if (kvc_mutant == 1) { if (x) b(); } else { b(); } }"),
        ("a(b); a(c);", "a(b);", "", "{ if (kvc_mutant == 1) { a(c); } else { a(b); a(c); } }"),
        ("while (x) { a(); }", "a();", "", "while (x) { { if (kvc_mutant == 1) {  } else { a(); } } }"),
    ],
)
def test_a_guard_is_around_whole_statements_where_their_number_changes(
    text: str, right: str, wrong: str, expected: str
) -> None:
    assert body(text, Mistake(1, right, wrong)) == expected


def test_mistakes_in_one_place_are_nested() -> None:
    found = body("x = f(a);", Mistake(1, "f(a)", "0"), Mistake(2, "f(a)", "f(b)"), Mistake(3, "f(a)", "1"))
    inner = "f((kvc_mutant == 2 ? (b) : (a)))"
    assert found == f"x = (kvc_mutant == 1 ? (0) : ((kvc_mutant == 3 ? (1) : ({inner}))));"


def test_mistakes_that_overlap_are_refused() -> None:
    with pytest.raises(CannotGuard, match=r"'g\(\); h\(\); i\(\);' is for part of what another mistake changes"):
        body("a(); b(); c();", Mistake(1, "a(); b();", "d(); e(); g();"), Mistake(2, "b(); c();", "g(); h(); i();"))


def test_part_of_a_loops_header_cannot_be_guarded() -> None:
    with pytest.raises(CannotGuard, match="'i = 1; i < m' is only a part of a statement"):
        body("for (i = 0; i < n; ++i) g();", Mistake(1, "i = 0; i < n", "i = 1; i < m"))


def test_a_mistake_whose_text_is_gone_is_refused() -> None:
    with pytest.raises(AssertionError, match="'a > b' occurs there 0 times"):
        body("return a < b;", Mistake(1, "a > b", "a"))
