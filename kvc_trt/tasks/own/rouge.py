"""ROUGE-2 and ROUGE-L as LongBench scores them: C.-Y. Lin, ROUGE (2004), on sets of words, without stemming.

LongBench takes the F measure that the Python package `rouge` 1.0.1 gives. Its conventions are kept, because figures are
compared with published ones: sentences end at every full stop, words are separated by white space, a word or pair
counts once however often it occurs, and ROUGE-L is the union of longest common subsequences over all pairs of
sentences. The package itself, which nobody maintains, computes a subsequence recursively and gives up (LongBench: score
0) where two sentences are together longer than about a thousand words; this one does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

_NO_DIVISION_BY_ZERO = 1e-8


def rouge_2(output: str, reference: str) -> float:
    """F measure of the pairs of neighbouring words that both have; 0 where one has none."""
    said, expected = (set(_pairs(words)) for words in (_words(output), _words(reference)))
    return _f_measure(len(said & expected), len(said), len(expected))


def rouge_l(output: str, reference: str) -> float:
    """F measure of the words in longest common subsequences of their sentences; 0 where one has no words."""
    said, expected = _sentences(output), _sentences(reference)
    common = {word for theirs in expected for mine in said for word in longest_common_subsequence(theirs, mine)}
    return _f_measure(len(common), *(len({word for one in text for word in one}) for text in (said, expected)))


def longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """The longest list of words that both have in this order; of several, the one whose words end last in `first`."""
    lengths = [[0] * (len(second) + 1)]
    for word in first:
        above, row = lengths[-1], [0]
        for place, other in enumerate(second):
            row.append(above[place] + 1 if word == other else max(above[place + 1], row[-1]))
        lengths.append(row)
    found, i, j = [], len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            found.append(first[i])
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]


def _sentences(text: str) -> list[list[str]]:
    """The words of each sentence; an empty word for one of white space alone, which counts as a word there too."""
    return [one.split() or [""] for one in text.split(".") if one]


def _words(text: str) -> list[str]:
    return [word for sentence in _sentences(text) for word in sentence]


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    return list(pairwise(words))


def _f_measure(common: int, said: int, expected: int) -> float:
    precision, recall = (common / count if count else 0.0 for count in (said, expected))
    return 2 * precision * recall / (precision + recall + _NO_DIVISION_BY_ZERO)
