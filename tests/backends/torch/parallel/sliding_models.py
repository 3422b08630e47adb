"""Small models whose layers slide: their window is shorter than two of three prompts, and than an answer."""

from __future__ import annotations

from dataclasses import replace

from kvc_trt.models.config import Attention, FeedForward, ModelDescription, Norms, RopeScaling
from tests.small_model import SMALL

WINDOW = 10
"""Within the steps of a test, every slot of a ring is overwritten."""
_OWN_BASE, _OF_MODEL = Attention(window=WINDOW, rotary_base=1e4), Attention(window=WINDOW)
GEMMA_3 = replace(
    SMALL,
    num_hidden_layers=4,
    qk_norm=True,
    rotary_base=1e6,
    rotary_scaling=RopeScaling("linear", 8.0),
    description=ModelDescription(
        attention=(_OWN_BASE, _OWN_BASE, Attention(), _OWN_BASE),
        norms=Norms(place="both"),
        feed_forward=FeedForward(activation="gelu-tanh"),
        attention_scale=0.2,
        embedding_scale=8.0,
    ),
)
"""The parts of Gemma 3: sliding layers rotate by a base of their own."""
COMMAND_R7B = replace(
    SMALL,
    num_hidden_layers=4,
    tie_word_embeddings=True,
    description=ModelDescription(
        attention=(_OF_MODEL, _OF_MODEL, _OF_MODEL, Attention(rotary=False)),
        norms=Norms("layer", place="shared"),
        logit_scale=0.4,
    ),
)
"""The parts of Command R7B: full layers do not rotate."""
