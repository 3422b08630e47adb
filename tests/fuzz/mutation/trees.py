"""Ways to spoil a document of mappings and lists, so that it stays a document.

A `Codec` says how an input becomes a tree and a tree an input. JSON is one; formats that hold a tree among other bytes,
or sealed by a digest, have their own.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.fuzz.mutation.raw import flip_bits

if TYPE_CHECKING:
    from tests.fuzz.kind import Mutator


class Codec(NamedTuple):
    """`decode` raises ValueError for bytes without a tree; `encode` for a tree that cannot be written."""

    decode: Callable[[bytes], Any]
    encode: Callable[[Any, bytes], bytes]
    """A function from a tree and its original input to bytes."""


def _to_json(tree: Any, _: bytes = b"") -> bytes:
    return json.dumps(tree).encode()


JSON = Codec(json.loads, _to_json)


def hostile_values(random: Random) -> Any:
    """Return a value that nobody expects: of another type, beyond a bound, or text that means something to somebody."""
    kind = random.randrange(6)
    if kind == 0:
        return random.choice((None, True, False, {}, [], "", [[]], [None], {"": ""}, [0] * 2000, {"a": {"b": []}}))
    if kind == 1:
        return random.choice((0, 1, -1, 2, 3, 7, 64, 1000, 2**31 - 1, 2**31, -(2**31), 2**53, 2**63, 2**64, 10**30, -5))
    if kind == 2:
        return random.choice((0.0, -0.0, 0.5, 1.5, 1e-320, 1e308, float("inf"), -float("inf"), float("nan"), -1.0))
    if kind == 3:
        return random.choice(
            ("a", "\0", "\x1b[2J", "\ud800", "\u202e", "\n", "🙂", "x" * 5000, "1", "1.0", "true", "auto", "NaN",
             "..", "/etc/passwd", "../../x", "CON", "a/b", "%s", "{0}", "${x}", "float32", "int8", "é" * 300)
        )  # fmt: skip
    if kind == 4:
        return random.choice(({str(n): n for n in range(300)}, list(range(5000)), ["x" * 100] * 300, _nested(200)))
    return random.getrandbits(random.choice((1, 8, 16, 31, 40, 63)))


def _nested(depth: int) -> Any:
    tree: Any = 0
    for level in range(depth):
        tree = [tree] if level % 2 else {"a": tree}
    return tree


def spoiled_tree(random: Random, tree: Any) -> Any:
    """Change one place of a tree in place, or return another tree."""
    places = list(_places(tree))
    if not places:
        return hostile_values(random)
    parent, key = random.choice(places)
    change = random.randrange(8)
    if change <= 2:
        parent[key] = hostile_values(random)
    elif change == 3:
        del parent[key]
    elif change == 4:  # a value from elsewhere in the tree
        other, name = random.choice(places)
        parent[key] = copy.deepcopy(other[name])
    elif change == 5:
        if isinstance(parent, dict):
            parent[_hostile_key(random, key)] = parent.pop(key)
        else:
            parent.insert(random.randint(0, len(parent)), copy.deepcopy(parent[key]))
    elif change == 6:
        parent[key] = random.choice(([parent[key]], {"a": parent[key]}, str(parent[key]), repr(parent[key])))
    else:
        parent[key] = _nearby(random, parent[key])
    return tree


def _nearby(random: Random, value: Any) -> Any:
    """Return a value of the same type that is a little wrong."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return random.choice(
            (value + 1, value - 1, -value, value * 2, value // 2, float(value), str(value), value << 32)
        )
    if isinstance(value, float):
        return random.choice((-value, value * 1e30, value / 1e30, round(value) if abs(value) < 1e9 else 0, str(value)))
    if isinstance(value, str):
        cut = random.randint(0, len(value))
        return random.choice(
            (value[:cut], value * 2, value.upper(), value[:cut] + random.choice("\0\n🙂\ud800./~ ") + value[cut:])
        )
    if isinstance(value, list):
        return random.choice((value[:-1], value * 2, value[::-1], [*value, None]))
    return hostile_values(random)


def _hostile_key(random: Random, key: str) -> str:
    return random.choice(
        ("", "\0", "\ud800", "🙂", "x" * 2000, key + " ", key.upper(), key[:-1], "__class__", "version")
    )


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place of a value, as (its mapping or list, key or index); at most some thousands."""
    waiting, found = [tree], 0
    while waiting and found < 4000:
        parent = waiting.pop()
        entries = list(parent.items()) if isinstance(parent, dict) else list(enumerate(parent[:200]))
        for key, value in entries:
            found += 1
            yield parent, key
            if isinstance(value, (dict, list)):
                waiting.append(value)


def of_trees(codec: Codec) -> Mutator:
    """Return the mutator that changes one to three places of an input's tree."""

    def spoil_tree(random: Random, content: bytes, seeds: Sequence[bytes]) -> bytes:
        try:
            tree = codec.decode(content)
            if not isinstance(tree, (dict, list)):
                tree = codec.decode(random.choice(seeds))
            for _ in range(random.randint(1, 3)):
                tree = spoiled_tree(random, tree)
                if not isinstance(tree, (dict, list)):
                    break
            return codec.encode(tree, content)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
            return flip_bits(random, content, seeds)

    return spoil_tree
