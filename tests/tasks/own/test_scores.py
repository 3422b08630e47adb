"""Scores, on values that LongBench's own metrics give.

They were computed with the packages that LongBench's scoring imports (rouge 1.0.1, fuzzywuzzy 0.18.0 with Levenshtein,
jieba 0.42.1) from the definitions of its metrics; 4,000 random pairs of each gave the same figures as well.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.tasks.own.rouge import longest_common_subsequence, rouge_2, rouge_l
from kvc_trt.tasks.own.scores import SCORES, classification, score_named, scorer

CAT, OTHER_CAT = "The cat sat on a mat. It was big.", "A cat sat on the mat. It was a big cat."


@pytest.mark.parametrize(
    ("name", "output", "references", "expected"),
    [
        ("f1", CAT, [OTHER_CAT], 0.9333333333333333),
        ("f1", "the answer is Paris", ["Paris, France", "nothing"], 0.4),
        ("f1", "", ["Paris"], 0.0),
        ("f1:first-line", "\nParis\nParagraph: and so on", ["Paris"], 1.0),
        ("rouge-l", CAT, [OTHER_CAT], 0.7368421002770082),
        ("rouge-l", "", ["Paris"], 0.0),
        ("rouge-2", CAT, [OTHER_CAT], 0.4444444395061729),
        ("exact", "The  PARIS!", ["london", "paris"], 1.0),
        ("exact", "Paris it is", ["paris"], 0.0),
        ("contains", "It is PARIS.", ["london", "paris"], 1.0),
        ("contains-all", "It is PARIS.", ["london", "paris"], 0.5),
        ("count", "There are 12 of 30, so 12", ["12"], 2 / 3),
        ("count", "none", ["12"], 0.0),
        ("retrieval", "Paragraph 7, not 17", ["Paragraph 7"], 0.5),
        ("retrieval", "段落7", ["段落7"], 1.0),
        ("first-number", "It is 12.0, or 3", ["12"], 1.0),
        ("first-number", "no", ["12"], 0.0),
        ("choice", "The answer is B. A is wrong", ["B"], 1.0),
        ("edit-similarity", "\n# comment\n    return x + 1\nfoo", ["    return x + 2"], 0.94),
        ("edit-similarity", "```", ["x"], 0.0),
        ("edit-similarity", "", [""], 1.0),
        ("f1-characters", "他住在北京。", ["北京"], 4 / 7),
    ],
)
def test_scores_match_the_golden_values(name, output, references, expected):
    assert scorer(name, ())(output, references) == pytest.approx(expected, abs=1e-9)


def test_classification_divides_by_the_classes_that_are_named():
    classes = ["Number", "Number of people", "Date", "a Date"]
    for output, reference, expected in (
        ("Date", "Date", 1.0),
        ("Number or Date", "Date", 0.5),
        ("Number of people", "Number of people", 1.0),  # "Number" is a part of it
        ("Number of people", "Number", 0.5),
        ("nothing", "Date", 0.0),
    ):
        assert classification(output, reference, classes) == expected
        assert scorer("classification:first-line", classes)(output + "\nNumber", [reference]) == expected
    # The class behind one that is left out is passed over, as in LongBench's figures.
    assert classification("a b", "a b c", ["a", "b", "a b c"]) == 0.0
    assert classification("a b a b c", "a b c", ["a", "b", "a b c"]) == 0.5


def test_chinese_words_are_those_of_jieba(monkeypatch):
    words = {
        "他住在北京市海淀区。": ["他", "住", "在", "北京市", "海淀区", "。"],
        "北京海淀区": ["北京", "海淀区"],
        "会议讨论了预算和人事安排。": ["会议", "讨论", "了", "预算", "和", "人事安排", "。"],
        "会议讨论预算安排": ["会议", "讨论", "预算", "安排"],
    }
    jieba = SimpleNamespace(cut=lambda text, cut_all: iter(words[text]), setLogLevel=lambda level: None)
    monkeypatch.setitem(sys.modules, "jieba", jieba)
    assert scorer("f1-zh", ())("他住在北京市海淀区。", ["北京海淀区"]) == pytest.approx(0.28571428571428575)
    assert scorer("rouge-l-zh", ())("会议讨论了预算和人事安排。", ["会议讨论预算安排"]) == pytest.approx(
        0.5454545408264463
    )
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(UnsupportedEnvironment, match="jieba"):
        scorer("f1-zh", ())("a", ["a"])


TEXTS = st.lists(st.sampled_from(["a", "b", "c", "the", "7", ".", "D"]), max_size=12).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(TEXTS, TEXTS)
def test_every_score_is_between_0_and_1_and_the_same_text_scores_1(output, reference):
    for name in set(SCORES) - {"f1-zh", "rouge-l-zh", "classification", "choice", "first-number"}:
        found = scorer(name, ())(output, [reference])
        assert 0 <= found <= 1, name
    same = f"x y {reference}"
    for rate in (rouge_l, rouge_2, lambda *both: scorer("f1", ())(both[0], both[1:])):
        assert rate(same, same) == pytest.approx(1, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abc"), max_size=8))
def test_the_longest_common_subsequence_is_common_and_longest(first, second):
    found = longest_common_subsequence(first, second)
    for words in (first, second):
        rest = iter(words)
        assert all(word in rest for word in found)
    longest = 0
    for chosen in range(1 << len(first)):
        some, rest = [w for i, w in enumerate(first) if chosen >> i & 1], iter(second)
        if len(some) > longest and all(word in rest for word in some):
            longest = len(some)
    assert len(found) == longest


def test_a_score_of_another_name_is_refused():
    with pytest.raises(InputError, match="did you mean 'rouge-l'"):
        score_named("rouge_l")
