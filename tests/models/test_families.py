from __future__ import annotations

import numpy as np
import pytest

from kvc_trt.models.family import HARMLESS, families
from kvc_trt.models.family_weights import channel_order
from tests.small_model import SMALL


@pytest.mark.parametrize("architecture", families())
def test_every_field_of_transformers_is_read_or_harmless(architecture: str) -> None:
    """A field that neither a family reads nor somebody has looked at could change what the model computes."""
    transformers = pytest.importorskip("transformers")
    family = families()[architecture]
    theirs = getattr(transformers, architecture.replace("ForCausalLM", "Config"))().to_dict()
    read = {family.spelling.get(name, name) for name in family.fields.model_fields}
    assert set(theirs) - read - family.harmless - HARMLESS == set()


def test_the_channels_of_a_head_are_in_order_unless_pairs_are_neighbours() -> None:
    assert channel_order(SMALL, interleaved=False) is None
    order = channel_order(SMALL, interleaved=True)
    assert order is not None
    half = SMALL.head_size // 2
    assert np.array_equal(order[half:], order[:half] + 1)  # pair i is 2i and 2i + 1
