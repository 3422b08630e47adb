"""The names of TensorRT-LLM's four Triton models, which answer one request together, and of their tensors.

Clients send requests to `ensemble`. It sends the text through `preprocessing`, which turns it into tokens, through
`tensorrt_llm`, which answers with tokens, and through `postprocessing`, which turns them into text. Some clients
tokenise themselves and send requests to `tensorrt_llm`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvc_trt.runtime.answer_rules import RULES, Client
from kvc_trt.runtime.kinds import Kind
from kvc_trt.serving.fields import FIELDS, Field
from kvc_trt.serving.triton.tensors import MANY, TensorType, type_of

ENSEMBLE, PREPROCESSING, ENGINE_STEP, POSTPROCESSING = "ensemble", "preprocessing", "tensorrt_llm", "postprocessing"


@dataclass(frozen=True)
class Name:
    """One field of a request, under its name in `ensemble` and in `tensorrt_llm`."""

    ensemble: str
    engine: str
    field: Field
    """A field of our table (`fields.py`), or one that only this family has."""


def _ours(name: str, engine: str | None = None) -> Name:
    return Name(name, engine or name, FIELDS[name])


def _theirs(name: str, kind: Kind, only: float | None = None) -> Name:
    return Name(name, name, Field(name, kind, only=only))


def _rules() -> Iterator[Name]:
    """Yield the names of the answer rules that both models have, without the answer's length."""
    for rule in RULES.values():
        ensemble, engine = rule.named(Client.TRITON), rule.named(Client.TENSORRT_LLM)
        if ensemble is not None and engine is not None and ensemble != LENGTH:
            yield _ours(ensemble, engine)


LENGTH = "max_tokens"
"""The longest answer; it goes through `preprocessing` and reaches `tensorrt_llm` as `request_output_len`."""
NAMES = (
    _ours("stream", "streaming"),
    _ours("exclude_input_in_output"),
    _theirs("end_id", Kind.INTEGER),
    _theirs("pad_id", Kind.INTEGER),
    *_rules(),
    _ours("length_penalty", "len_penalty"),
    _ours("beam_width"),
    _theirs("num_return_sequences", Kind.INTEGER, only=1),
    _theirs("return_context_logits", Kind.SWITCH, only=False),
    _theirs("return_generation_logits", Kind.SWITCH, only=False),
    _theirs("return_perf_metrics", Kind.SWITCH, only=False),
    _ours("return_num_input_tokens"),
    _ours("return_num_output_tokens"),
    _ours("return_finish_reason"),
    _ours("return_kv_cache_tokens"),
)
"""Fields that go from `ensemble` to `tensorrt_llm` unchanged. The prompt and its length go through `preprocessing`."""

ENSEMBLE_INPUTS: Mapping[str, TensorType] = MappingProxyType(
    {
        "text_input": type_of(FIELDS["text_input"]),
        LENGTH: type_of(FIELDS[LENGTH]),
        **{one.ensemble: type_of(one.field) for one in NAMES},
    }
)
PREPROCESSING_INPUTS: Mapping[str, TensorType] = MappingProxyType(
    {"QUERY": TensorType("STRING"), "REQUEST_OUTPUT_LEN": TensorType("INT32")}
)
PREPROCESSING_OUTPUTS: Mapping[str, TensorType] = MappingProxyType(
    {
        "INPUT_ID": TensorType("INT32", (MANY,)),
        "REQUEST_INPUT_LEN": TensorType("INT32"),
        "REQUEST_OUTPUT_LEN": TensorType("INT32"),
    }
)
ENGINE_INPUTS: Mapping[str, TensorType] = MappingProxyType(
    {
        "input_ids": TensorType("INT32", (MANY,)),
        "input_lengths": TensorType("INT32"),
        "request_output_len": TensorType("INT32"),
        **{one.engine: type_of(one.field) for one in NAMES},
        "cancel_answer": TensorType("UINT64"),
    }
)
"""The inputs of `tensorrt_llm`. `cancel_answer` cancels the answer that has this `answer_key`."""
ANSWER: Mapping[str, TensorType] = MappingProxyType(
    {
        "cum_log_probs": TensorType("FP32"),
        "output_log_probs": TensorType("FP32", (1, MANY)),
        "num_input_tokens": TensorType("INT32"),
        "num_output_tokens": TensorType("INT32"),
        "finish_reason": TensorType("STRING"),
        "kv_cache_tokens_kept": TensorType("INT32"),
        "kv_cache_tokens_total": TensorType("INT32"),
        "kv_cache_tokens_reused": TensorType("INT32"),
    }
)
"""Tensors that go from `tensorrt_llm` to a client of `ensemble` unchanged."""
ENGINE_OUTPUTS: Mapping[str, TensorType] = MappingProxyType(
    {
        "output_ids": TensorType("INT32", (1, MANY)),
        "sequence_length": TensorType("INT32"),
        "answer_ids": TensorType("INT32", (1, MANY)),
        "answer_length": TensorType("INT32"),
        "text_range": TensorType("INT32", (3,)),
        "answer_key": TensorType("UINT64"),
        **ANSWER,
    }
)
"""The outputs of `tensorrt_llm`. `output_ids` are the tokens since the previous response, `answer_ids` all tokens of
the answer so far, after those of the prompt if this response echoes it. `text_range` is the part of their text that
this response shows: the number of prompt tokens, whose text is shown whole, and the range of characters of the answer's
text. A range of characters is needed because a token's text depends on the tokens before it, and a stop word may cut
it. `answer_key` is a random number for `cancel_answer`."""
POSTPROCESSING_INPUTS: Mapping[str, TensorType] = MappingProxyType(
    {
        "TOKENS_BATCH": ENGINE_OUTPUTS["answer_ids"],
        "SEQUENCE_LENGTH": ENGINE_OUTPUTS["answer_length"],
        "TEXT_RANGE": ENGINE_OUTPUTS["text_range"],
        "ANSWER_KEY": ENGINE_OUTPUTS["answer_key"],
    }
)
POSTPROCESSING_OUTPUTS: Mapping[str, TensorType] = MappingProxyType({"OUTPUT": TensorType("STRING")})
ENSEMBLE_OUTPUTS: Mapping[str, TensorType] = MappingProxyType({"text_output": TensorType("STRING"), **ANSWER})

_LORA = "there are no LoRA weights here"
_TABLE = "there are no prompt tables here"
_BIAS = "the engine adds nothing to logits; see bad_words"
_GUIDE = "the engine follows no grammar"
_DRAFT = "there is no draft model here"
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "decoder_text_input": "the model is no encoder and decoder",
        "embedding_bias_words": _BIAS,
        "embedding_bias_weights": _BIAS,
        "prompt_embedding_table": _TABLE,
        "prompt_table_extra_id": _TABLE,
        "prompt_vocab_size": _TABLE,
        "lora_task_id": _LORA,
        "lora_weights": _LORA,
        "lora_config": _LORA,
        "guided_decoding_guide_type": _GUIDE,
        "guided_decoding_guide": _GUIDE,
        "num_draft_tokens": _DRAFT,
        "use_draft_logits": _DRAFT,
        "random_seed": "its name is now seed",
        "min_length": "its name is now min_tokens",
        "stop": "close the connection or the stream to cancel a request",
        "stop_words_list": "give texts in stop_words",
        "bad_words_list": "give texts in bad_words",
    }
)
"""Fields of the family that no engine here supports -> the reason, or the alternative."""
