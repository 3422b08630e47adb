"""The text part of a checkpoint whose model reads images too.

Its config.json has the decoder's fields in `text_config`, and its tensors have a prefix. To prompts without an image
the whole model answers as its decoder does. An engine holds the decoder; other tensors are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvc_trt.errors import InputError, describe
from kvc_trt.models.family import REFUSED, Family, families, family_of_own_file
from kvc_trt.validation import ForeignSchema, validated

_OUTSIDE = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
"""Fields of the decoder that stand beside `text_config`, within it, or in both places."""
_PREFIX = re.compile(r"^(?:(model\.language_model|language_model\.model)\.|language_model\.(?=lm_head\.))")
"""The prefix of a decoder's tensors; `model.` takes its place, but before the head of the vocabulary."""


class _Outer(ForeignSchema):
    text_config: dict[str, Any]


class _Text(ForeignSchema):
    model_type: str


def text_fields(mapping: Mapping[str, Any], source: str) -> Mapping[str, Any] | None:
    """Return the decoder's fields of a model with an image part; None if the mapping names another class.

    InputError if the decoder is of another kind than the class has, or a field contradicts another.
    """
    named = mapping.get("architectures")
    if isinstance(named, list) and len(named) == 1 and family_of_own_file(str(named[0])) is not None:
        return None
    own = next((one for one in families().values() if _is_with_images(one, named)), None)
    if own is None or own.beside_images is None:
        return None
    where, kind = f"{source}: text_config", own.beside_images.model_type
    text = validated(_Outer, mapping, source).text_config
    if (found := validated(_Text, text, where).model_type) != kind:
        refusal = REFUSED.get(found.capitalize())
        why = "" if refusal is None else f": {refusal.why}"
        expected = f"expected {kind} for {own.beside_images.name}{why}"
        raise InputError(f"{where}: model_type is {describe(found)}, {expected}")
    # A null stays: it may say what the absent field does not, as that no layer has a window.
    defaults = {name: value for name, value in own.beside_images.absent.items() if text.get(name) is None}
    fields = {**text, **defaults}
    # Releases of transformers read one or the other.
    outside, inside = (one.get("tie_word_embeddings") for one in (mapping, text))
    if None not in (outside, inside) and outside != inside:
        raise InputError(f"{source}: tie_word_embeddings contradicts that of text_config, expected one value")
    fields |= {name: mapping[name] for name in _OUTSIDE if mapping.get(name) is not None}
    return {**fields, "architectures": [own.architecture]}


def stored_names(names: Iterable[str]) -> dict[str, str]:
    """Return a decoder's tensors under their own names -> the names that they have beside an image part."""
    found = {}
    for name in names:
        own = _PREFIX.sub(lambda match: "model." if match[1] else "", name, count=1)
        if own != name or name.startswith("lm_head."):
            found[own] = name
    return found


def _is_with_images(family: Family, architectures: object) -> bool:
    return family.beside_images is not None and architectures == [family.beside_images.name]
