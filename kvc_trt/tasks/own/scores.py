"""Score an answer against its references by a named metric, from 0 to 1; the best of the references counts.

The names are those of published data sets' metrics, and the figures equal LongBench's own on the same texts. A name may
end with `:first-line`: only the answer's first line counts, as LongBench has it for examples that go on after it.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvc_trt.errors import InputError, UnsupportedEnvironment, describe, did_you_mean
from kvc_trt.tasks.own.rouge import rouge_2, rouge_l
from kvc_trt.tasks.task import Score, string_match_all

DEFAULT_SCORE = "f1"
FIRST_LINE = ":first-line"
Against = Callable[[str, str], float]
"""An answer's score against one reference."""
_CHINESE_PUNCTUATION = frozenset(
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～"  # noqa: RUF001  # the very characters
    "｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏"  # noqa: RUF001
)


@dataclass(frozen=True)
class NamedScore:
    """One way to score answers."""

    summary: str
    against: Against | None
    """Against one reference; None where all of them, or the classes, are needed at once."""
    graded: bool = False
    """True if few right answers score 1: a long text is never the reference word for word."""


def normalised(text: str) -> str:
    """Lower case without punctuation, articles (a, an, the) and superfluous white space, as SQuAD compares."""
    bare = "".join(one for one in text.lower() if one not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def token_f1(output: str, reference: str) -> float:
    """F1 of the words of both, normalised."""
    return _f1(normalised(output).split(), normalised(reference).split())


def exact(output: str, reference: str) -> float:
    """1 if both are the same, normalised."""
    return float(normalised(output) == normalised(reference))


def contains(output: str, reference: str) -> float:
    """1 if the answer contains the reference, ignoring case."""
    return float(reference.lower() in output.lower())


def count(output: str, reference: str) -> float:
    """The share of the answer's numbers that are the reference."""
    numbers = re.findall(r"\d+", output)
    return numbers.count(reference.strip()) / len(numbers) if numbers else 0.0


def retrieval(output: str, reference: str) -> float:
    """The share of the answer's numbers that are the reference's own: 7 of `Paragraph 7`."""
    own = re.search(r"\d+", reference)
    return count(output, own[0]) if own else 0.0


def first_number(output: str, reference: str) -> float:
    """1 if the first number of the answer equals the reference."""
    found = re.search(r"\d+\.\d+|\d+", output)
    return float(found is not None and float(found[0]) == float(reference))


def choice(output: str, reference: str) -> float:
    """1 if the first of the letters A to D that stands alone in the answer is the reference."""
    found = re.search(r"\b[A-D]\b", output)
    return float(found is not None and found[0] == reference.strip())


def edit_similarity(output: str, reference: str) -> float:
    """Return the similarity of the reference and the answer's first line of code, rounded to a hundredth.

    It is 1 minus the insertions and deletions per character. Lines with a backtick, `#` or `//` do not count as code.
    """
    from rapidfuzz.fuzz import ratio

    lines = output.lstrip("\n").split("\n")
    said = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if not said or not reference:
        return float(said == reference)
    return round(ratio(said, reference)) / 100


def classification(output: str, reference: str, classes: Sequence[str]) -> float:
    """1 over the number of classes that the answer names, if the reference is one of them; else 0.

    A class whose name is a part of the reference's does not count, unless the one before it was left out for that.
    """
    named, place = [one for one in classes if one in output], 0
    while place < len(named):  # the class behind one that is left out is passed over: published figures have it so
        if named[place] in reference and named[place] != reference:
            del named[place]
        place += 1
    return 1 / len(named) if reference in named else 0.0


def f1_of_chinese(output: str, reference: str) -> float:
    """F1 of the words of both that jieba finds, without punctuation."""
    said, expected = ([bare for word in _chinese_words(text) if (bare := _bare(word))] for text in (output, reference))
    return _f1(said, expected)


def f1_of_characters(output: str, reference: str) -> float:
    """F1 of the characters of both, without punctuation and white space."""
    return _f1(list(_bare(output)), list(_bare(reference)))


def rouge_l_of_chinese(output: str, reference: str) -> float:
    """ROUGE-L of the words of both that jieba finds."""
    return rouge_l(" ".join(_chinese_words(output)), " ".join(_chinese_words(reference)))


SCORES = {
    "f1": NamedScore("F1 of words, without case, punctuation and articles", token_f1, graded=True),
    "f1-zh": NamedScore("F1 of Chinese words (needs jieba)", f1_of_chinese, graded=True),
    "f1-characters": NamedScore("F1 of characters, without punctuation", f1_of_characters, graded=True),
    "rouge-l": NamedScore("ROUGE-L, F measure", rouge_l, graded=True),
    "rouge-l-zh": NamedScore("ROUGE-L of Chinese words (needs jieba)", rouge_l_of_chinese, graded=True),
    "rouge-2": NamedScore("ROUGE-2, F measure", rouge_2, graded=True),
    "exact": NamedScore("the same, without case, punctuation and articles", exact),
    "contains": NamedScore("contains the reference", contains),
    "contains-all": NamedScore("share of the references that it contains", None),
    "classification": NamedScore("names the reference and no other class", None),
    "retrieval": NamedScore("share of its numbers that are the reference's", retrieval),
    "count": NamedScore("share of its numbers that are the reference", count),
    "first-number": NamedScore("its first number is the reference", first_number),
    "choice": NamedScore("its first letter of A to D is the reference", choice),
    "edit-similarity": NamedScore("likeness of its first line of code", edit_similarity, graded=True),
}
"""Every score by name; an answer gets the best that it has against one of the references."""


def score_named(name: str) -> NamedScore:
    """The score of a name, with or without `:first-line`; InputError names the nearest one."""
    bare = name.removesuffix(FIRST_LINE)
    if bare not in SCORES:
        raise InputError(
            f"unknown score {describe(name)}{did_you_mean(bare.lower(), SCORES)}", hint=f"scores: {', '.join(SCORES)}"
        )
    return SCORES[bare]


def check_references(name: str, references: Sequence[str], classes: Sequence[str]) -> None:
    """InputError for references that a score can never find: none with a number, or not one of the classes."""
    bare = name.removesuffix(FIRST_LINE)
    if (bare == "classification") != bool(classes):
        expected = "expects the list of all 'classes'" if not classes else "takes no 'classes'"
        raise InputError(f"score {bare} {expected}")
    for reference in references:
        if bare in ("retrieval", "count", "first-number") and not re.search(r"\d", reference):
            raise InputError(f"answer {describe(reference)} has no number, which score {bare} looks for")
        if bare == "first-number" and not re.fullmatch(r"\s*\d+(\.\d+)?\s*", reference):
            raise InputError(f"answer {describe(reference)} is not a number, which score {bare} looks for")
        if bare == "choice" and reference.strip() not in tuple("ABCD"):
            raise InputError(f"answer {describe(reference)} is none of the letters A to D")
        if bare.startswith("contains") and not reference:
            raise InputError("an answer is empty, and every text contains it")
    if bare.endswith("-zh"):
        _chinese_words("")


def scorer(name: str, classes: Sequence[str]) -> Score:
    """Return the function that scores an output against its references by the metric `name`."""
    bare, against = name.removesuffix(FIRST_LINE), score_named(name).against

    def rate(output: str, references: Sequence[str]) -> float:
        said = first_line(output) if name.endswith(FIRST_LINE) else output
        if bare == "contains-all":
            return string_match_all(said, references)
        if against is None:
            return max(classification(said, one, classes) for one in references)
        return max(against(said, one) for one in references)

    return rate


def first_line(output: str) -> str:
    """The first line that is not empty."""
    return output.lstrip("\n").split("\n")[0]


def _f1(said: Sequence[str], expected: Sequence[str]) -> float:
    common = (Counter(said) & Counter(expected)).total()
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(expected)
    return 2 * precision * recall / (precision + recall)


def _bare(text: str) -> str:
    """Chinese text in lower case, without punctuation and white space."""
    kept = (one for one in text.lower() if one not in string.punctuation and one not in _CHINESE_PUNCTUATION)
    return "".join("".join(kept).split())


def _chinese_words(text: str) -> list[str]:
    try:
        import jieba
    except ImportError as error:
        message = "scores of Chinese words need jieba, which is not installed"
        raise UnsupportedEnvironment(message, hint="pip install 'kvc-trt[chinese]'") from error
    jieba.setLogLevel("ERROR")
    return list(jieba.cut(text, cut_all=False))
