"""Which questions an engine can be asked: what its tokenizer spells decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvc_trt.verify.questions.key_value import KeyValueWording, is_task_vocabulary
from kvc_trt.verify.questions.question import Wording
from kvc_trt.verify.questions.text import text_wording

if TYPE_CHECKING:
    from kvc_trt.engine import EngineDirectory


def wording_for(engine: EngineDirectory) -> Wording | str:
    """The wording that the engine's tokenizer can spell, or why there is none."""
    if engine.tokenizer is None:
        return "the engine has no tokenizer: nothing can be asked of it in words"
    if is_task_vocabulary(engine):
        return KeyValueWording()
    return text_wording(engine)
