"""GGUF files of every family that llama.cpp writes, beside transformers on the checkpoint that they were made of."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import onnxruntime
import pytest
import torch

from kvc_trt import Engine, build
from kvc_trt.engine.format import WEIGHTS_FILE
from kvc_trt.errors import InputError
from kvc_trt.files.held import HeldFile
from kvc_trt.graph.weights import EngineWeights
from kvc_trt.models.config import Yarn
from kvc_trt.models.family import families
from kvc_trt.models.gguf.checkpoint import GgufCheckpoint
from kvc_trt.models.gguf.header import GgufHeader
from kvc_trt.models.gguf.keys import GgufKeys
from kvc_trt.models.quantisation import dequantise
from kvc_trt.models.weights import EXPERT_MATRICES, check_weights
from tests.oracles.answers import STEPS, answer_of, prompts, reference_logits
from tests.oracles.family_models import MODELS, written
from tests.oracles.gguf_files import write_gguf

BAR = 1e-4
ROUNDED_INPUT = 0.04
"""Products with matrices in blocks round their input to 8 bits."""
FILES: dict[str, dict[str, Any]] = {
    "qwen2": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                  "original_max_position_embeddings": 256}},
    "phi3": {"sliding_window": 900}, "phi3-past-its-window": {}, "phi3-longrope": {}, "phi4-mini": {},
    "mistral-past-its-window": {}, "olmo": {}, "olmo2": {},
    "olmo3": {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                                  "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0,
                                                     "original_max_position_embeddings": 128,
                                                     "attention_factor": 1.5}}},
    "gemma2": {"query_pre_attn_scalar": 16, "tie_word_embeddings": True, "num_hidden_layers": 12,
               "attn_logit_softcapping": 5.0}, "gemma3": {"query_pre_attn_scalar": 16},
    "granite": {}, "command-r": {}, "command-r-plus": {}, "command-r7b-past-its-window": {},
    "falcon-7b": {}, "falcon-40b": {"bias": False}, "falcon-11b": {}, "gpt-neox": {}, "glm": {}, "glm4": {},
    "gpt-neox-one-after-the-other": {"attention_bias": True, "hidden_act": "gelu"},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}, "mixtral": {},
    "qwen2-moe": {"decoder_sparse_step": 1}, "qwen3-moe": {"mlp_only_layers": []}, "gpt-oss": {"swiglu_limit": 7.0},
    "qwen3-next": {}, "qwen3.5": {"linear_num_value_heads": 6, "linear_value_head_dim": 32}, "qwen3.5-moe": {},
}  # fmt: skip
"""Models of `MODELS` with what differs in a file of llama.cpp: it has no key for the rest."""


class Made(NamedTuple):
    """A file, and transformers' answers to `prompts()` with their logits."""

    path: Path
    answers: list[list[int]]
    logits: list[torch.Tensor]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    @cache
    def asked(name: str) -> Made:
        directory = tmp_path_factory.mktemp(name)
        model = written(name, directory / "checkpoint", **FILES[name])
        answers, logits = zip(*(answer_of(model, prompt) for prompt in prompts()), strict=True)
        return Made(write_gguf(directory / "checkpoint", directory / "model.gguf"), list(answers), list(logits))

    return asked


def test_every_gguf_architecture_is_tested_with_a_file() -> None:
    """Files of Llama, Qwen3 and StarCoder2 are those of tests/models/gguf."""
    others = {"LlamaForCausalLM", "Qwen3ForCausalLM", "Starcoder2ForCausalLM"}
    written_here = {f"{MODELS[name][0]}ForCausalLM" for name in FILES}
    assert written_here == {name for name, one in families().items() if one.gguf is not None} - others


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_the_reference_has_the_logits_of_transformers(name: str, made: Callable[[str], Made]) -> None:
    expected = made(name)
    checkpoint = GgufCheckpoint(expected.path)
    check_weights(checkpoint.config, checkpoint)
    for prompt, answer, logits in zip(prompts(), expected.answers, expected.logits, strict=True):
        found = reference_logits(checkpoint.config, checkpoint, prompt, answer)
        torch.testing.assert_close(found, logits, rtol=BAR, atol=BAR)
        assert found.argmax(dim=-1).tolist() == answer
    assert len({token for answer in expected.answers for token in answer}) > 4  # not one word for ever


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FILES if name != "phi3-longrope"])
def test_engines_answer_as_transformers_does(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    expected = made(name)
    lengths: dict[str, Any] = {"max_input_len": 704, "max_output_len": 32}
    build(str(expected.path), policy="full", output=tmp_path / "engine", weights="fp32", verify=False, **lengths)
    with Engine.open(tmp_path / "engine", threads=1) as engine:
        found = engine.generate([prompt.tolist() for prompt in prompts()], max_new_tokens=STEPS, ignore_eos=True)
    assert [list(output.token_ids) for output in found] == expected.answers


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", ["phi3", "glm4", "falcon-40b", "mixtral", "qwen2-moe", "qwen3.5"])
def test_blocks_are_kept_where_rows_are_joined_moved_or_stacked(name: str, kind: str, tmp_path: Path) -> None:
    written(name, tmp_path / "checkpoint", **FILES[name])
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", kind=kind))
    check_weights(checkpoint.config, checkpoint)
    assert checkpoint.keeps_its_blocks
    kept = 0
    for matrix in checkpoint.names():
        if (bits := checkpoint.block_bits(matrix)) is None:
            assert matrix.endswith(
                ("norm.weight", "mlp.gate.weight", "expert_gate.weight", ".bias", "conv1d.weight", "A_log", "dt_bias")
            )
            continue
        rows, whole = checkpoint.shape(matrix)[0], checkpoint.read(matrix)
        for start, stop in ((0, rows), (rows // 3, rows // 2), (rows - 1, rows)):
            packed, scales, _ = checkpoint.read_blocks(matrix, start, stop)
            np.testing.assert_array_equal(dequantise(packed, scales, bits), whole[start:stop])
        kept += 1
    assert kept >= 6 * checkpoint.config.num_hidden_layers


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3.5"])
def test_an_engine_keeps_blocks(name: str, tmp_path: Path) -> None:
    written(name, tmp_path / "checkpoint", **FILES[name])
    path = write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", kind="Q8_0")
    checkpoint, prompt = GgufCheckpoint(path), prompts()[2][:128]
    lengths: dict[str, Any] = {"max_input_len": 128, "max_output_len": 32}
    build(str(path), policy="full", output=tmp_path / "engine", weights="keep", verify=False, **lengths)
    stored = EngineWeights(HeldFile(tmp_path / "engine" / WEIGHTS_FILE))
    expected = reference_logits(checkpoint.config, checkpoint, prompt, [0])
    assert torch.equal(reference_logits(checkpoint.config, stored, prompt, [0]), expected)
    if name == "qwen3-moe":  # a linear layer would add up its bodies' rounding over all tokens
        session = onnxruntime.InferenceSession(tmp_path / "engine" / "prefill.onnx", providers=["CPUExecutionProvider"])
        given = {"input_ids": prompt[None].numpy(), "prompt_lengths": np.array([len(prompt)])}
        kinds = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}
        feed = {value.name: given[value.name].astype(kinds[value.type]) for value in session.get_inputs()}
        found = torch.tensor(session.run(["logits"], feed)[0])
        assert torch.linalg.norm(found - expected) < ROUNDED_INPUT * torch.linalg.norm(expected)


def test_qwen3_next_files_of_the_first_converter_are_read(made: Callable[[str], Made], tmp_path: Path) -> None:
    """It left the matrix of queries, keys, values and gates as a checkpoint has it."""
    directory = made("qwen3-next").path.parent / "checkpoint"
    path = write_gguf(directory, tmp_path / "model.gguf", first_converter=True)
    first, later = GgufCheckpoint(path), GgufCheckpoint(made("qwen3-next").path)
    assert "blk.0.ssm_in.weight" in first.header.tensors
    assert "blk.0.attn_qkv.weight" not in first.header.tensors
    for name in later.names():
        np.testing.assert_array_equal(first.read(name), later.read(name))


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5"])
def test_layers_for_later_tokens_are_passed_over(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    directory, path = made(name).path.parent / "checkpoint", tmp_path / "model.gguf"
    more: dict[str, Any] = {"more": {"blk.4.nextn.eh_proj.weight": np.ones((64, 128), np.float32)}}
    keys = {"block_count": 5, "nextn_predict_layers": 1}
    found = GgufCheckpoint(write_gguf(directory, path, keys=keys, **more))
    assert "blk.4.nextn.eh_proj.weight" in found.header.tensors
    assert found.config == GgufCheckpoint(made(name).path).config
    check_weights(found.config, found)
    with pytest.raises(InputError, match="nextn_predict_layers is 5, expected a part of block_count"):
        GgufCheckpoint(write_gguf(directory, path, keys=keys | {"nextn_predict_layers": 5}, **more))
    many = {"block_count": 4 + (1 << 30), "nextn_predict_layers": 1 << 30}
    with pytest.raises(InputError, match="expected a part of block_count, which is at most 1024"):
        GgufCheckpoint(write_gguf(directory, path, keys=many, **more))
    with pytest.raises(InputError, match=r"tensor 'blk\.4\.nextn\.eh_proj\.weight' has no place in Qwen3"):
        GgufCheckpoint(write_gguf(directory, path, **more))


@pytest.fixture
def parts(made: Callable[[str], Made], tmp_path: Path) -> list[Path]:
    write_gguf(made("mixtral").path.parent / "checkpoint", tmp_path / "model.gguf", tensors_of_a_part=9)
    found = sorted(tmp_path.glob("*.gguf"))
    assert [path.name for path in found] == [f"model-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    return found


def test_a_file_in_parts_is_the_whole_file(made: Callable[[str], Made], parts: list[Path]) -> None:
    whole, found = GgufCheckpoint(made("mixtral").path), GgufCheckpoint(parts[0])
    assert (found.config, found.tokenizer_contents()) == (whole.config, whole.tokenizer_contents())
    for name in whole.names():
        np.testing.assert_array_equal(found.read(name), whole.read(name))
    assert found.fingerprint() != whole.fingerprint()
    again = GgufCheckpoint(parts[0]).fingerprint()
    raw = bytearray(parts[2].read_bytes())
    raw[-1] ^= 1
    parts[2].write_bytes(raw)
    assert again == found.fingerprint() != GgufCheckpoint(parts[0]).fingerprint()


def rewritten(path: Path, keys: dict[str, int]) -> None:
    """Write a part anew with other numbers in its metadata; two bytes or four, as the package has them."""
    raw = path.read_bytes()
    for key, value in keys.items():
        place = raw.index(key.encode()) + len(key) + 4
        size = 4 if key == "split.tensors.count" else 2
        raw = raw[:place] + value.to_bytes(size, "little") + raw[place + size :]
    path.write_bytes(raw)


def test_numbers_of_parts_that_contradict_are_named(parts: list[Path]) -> None:
    for keys, message in (
        ({"split.tensors.count": 40}, "split.tensors.count is 40, but the parts have 2"),
        ({"split.count": 300}, "split.count is 300, expected at most 256 parts"),
        ({"split.no": 7}, "split.no is 7, expected 0, that of the first part"),
    ):
        content = parts[0].read_bytes()
        rewritten(parts[0], keys)
        with pytest.raises(InputError, match=re.escape(message)) as caught:
            GgufCheckpoint(parts[0])
        assert caught.value.hint is None
        parts[0].write_bytes(content)
    parts[1].write_bytes(parts[0].read_bytes())
    rewritten(parts[1], {"split.no": 1})
    with pytest.raises(InputError, match=r"00002-of-00003\.gguf: tensor '.+' is in another part too"):
        GgufCheckpoint(parts[0])


def test_parts_are_found_by_a_relative_path(parts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(parts[0].parent)
    assert GgufCheckpoint(parts[0].name).config.architecture == "MixtralForCausalLM"


def test_a_first_part_may_have_no_tensors(made: Callable[[str], Made], tmp_path: Path) -> None:
    directory = made("mixtral").path.parent / "checkpoint"
    write_gguf(directory, tmp_path / "model.gguf", tensors_of_a_part=9, small_first_part=True)
    first = min(tmp_path.glob("*.gguf"))
    assert not gguf.GGUFReader(first).tensors
    whole, found = GgufCheckpoint(made("mixtral").path), GgufCheckpoint(first)
    assert sorted(found.names()) == sorted(whole.names())


def test_the_attention_factor_of_olmo_3_is_read_from_files_of_all_converters(tmp_path: Path) -> None:
    """Earlier ones copied it into a key in which other writers may have left llama.cpp's neutral value."""
    written("olmo3", tmp_path / "checkpoint", **FILES["olmo3"])
    older, newer, kind = (f"rope.scaling.{name}" for name in ("attn_factor", "yarn_attn_factor", "type"))
    default = 0.1 * math.log(8) + 1
    cases: list[tuple[dict[str, Any], float]] = [
        ({}, 1.5), ({newer: 1.5}, 1.5), ({older: None, newer: 1.5}, 1.5), ({older: None}, default),
        ({older: 1.0}, default),
    ]  # fmt: skip
    for number, (keys, expected) in enumerate(cases):
        path = write_gguf(tmp_path / "checkpoint", tmp_path / f"{number}.gguf", keys=keys)
        scaling = GgufCheckpoint(path).config.rotary_scaling
        assert isinstance(scaling, Yarn)
        assert scaling.attention_factor == pytest.approx(expected, rel=1e-7)
    for changed in ("none", "linear", None):
        path = write_gguf(tmp_path / "checkpoint", tmp_path / "without.gguf", keys={kind: changed})
        with pytest.raises(InputError, match=r"olmo2\.rope\.scaling\.attn_factor is 1\.5, expected 1\.0 without YaRN"):
            GgufCheckpoint(path)


@pytest.mark.parametrize("kind", ["expert", "vector", "narrow"])
def test_unusual_files_are_read_or_refused_in_a_line(kind: str, tmp_path: Path) -> None:
    """`plan` asks whether blocks are kept before any shape is checked."""
    if kind == "expert":
        written("mixtral", tmp_path / "checkpoint")
        path = write_gguf(
            tmp_path / "checkpoint", tmp_path / "model.gguf", kind="Q8_0", less=("blk.0.ffn_up_exps.weight",)
        )
    elif kind == "vector":
        written("gpt-oss", tmp_path / "checkpoint", **FILES["gpt-oss"])
        path = write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", vectors="MXFP4")
    else:
        written("qwen3.5", tmp_path / "checkpoint", **FILES["qwen3.5"])
        names = ("attn_qkv", "attn_gate", "ssm_conv1d")
        less = tuple(f"blk.{layer}.{name}.weight" for layer in range(3) for name in names)
        keys = {"ssm.inner_size": 6 * 24}
        path = write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", kind="Q8_0", keys=keys, less=less)
    checkpoint = GgufCheckpoint(path)
    assert checkpoint.keeps_its_blocks == (kind == "expert")
    if kind == "vector":
        assert checkpoint.read("model.norm.weight").shape == (64,)
    else:
        with pytest.raises(InputError, match="weights: "):
            check_weights(checkpoint.config, checkpoint)


def test_parts_that_are_not_one_model_are_named(parts: list[Path]) -> None:
    with pytest.raises(InputError, match=r"model-00002-of-00003\.gguf: split\.no is 1, expected 0") as second:
        GgufCheckpoint(parts[1])
    assert second.value.hint == f"--model {parts[0]}"
    renamed = parts[0].rename(parts[0].with_name("other.gguf"))
    with pytest.raises(InputError, match=r"other\.gguf: is one of 3 parts, expected a name that ends with -00001-of-"):
        GgufCheckpoint(renamed)
    renamed.rename(parts[0])
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(InputError, match=r"00003-of-00003\.gguf: split\.no is 1 of 3, expected 2 of 3"):
        GgufCheckpoint(parts[0])
    parts[2].unlink()
    with pytest.raises(InputError, match=r"cannot read .*model-00003-of-00003\.gguf: No such file"):
        GgufCheckpoint(parts[0])


def test_an_invalid_decay_is_named(made: Callable[[str], Made], tmp_path: Path) -> None:
    raw = bytearray(made("qwen3.5").path.read_bytes())
    tensor = GgufCheckpoint(made("qwen3.5").path).header.tensors["blk.1.ssm_a"]
    raw[tensor.offset : tensor.offset + 4] = np.float32(0.5).tobytes()
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    with pytest.raises(InputError, match=r"model\.gguf: tensor 'blk\.1\.ssm_a': expected numbers below 0"):
        GgufCheckpoint(path).read("model.layers.1.linear_attn.A_log")


def test_experts_in_mxfp4_are_widened(tmp_path: Path) -> None:
    written("gpt-oss", tmp_path / "checkpoint", **FILES["gpt-oss"])
    kinds: dict[str, Any] = {"kind": "Q8_0", "others": {"_exps": "MXFP4"}}
    path = write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", **kinds)
    checkpoint, reader = GgufCheckpoint(path), gguf.GGUFReader(path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    assert not checkpoint.keeps_its_blocks
    for ours, theirs in zip(EXPERT_MATRICES, ("gate", "up", "down"), strict=True):
        name, tensor = f"model.layers.1.{ours}", stored[f"blk.1.ffn_{theirs}_exps.weight"]
        assert tensor.tensor_type.name == "MXFP4"
        expected = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(checkpoint.shape(name))
        assert len(np.unique(expected)) > 15
        np.testing.assert_array_equal(checkpoint.read(name), expected)
        np.testing.assert_array_equal(checkpoint.read_rows(name, 37, 101), expected[37:101])
    raw = bytearray(path.read_bytes())
    raw[stored["blk.0.ffn_up_exps.weight"].data_offset] = 255  # the exponent that is no number
    path.write_bytes(raw)
    with pytest.raises(InputError, match=r"model\.gguf: tensor 'blk\.0\.ffn_up_exps\.weight': contains NaN weights"):
        GgufCheckpoint(path).read(f"model.layers.0.{EXPERT_MATRICES[1]}")


def test_experts_of_several_types_are_not_kept(tmp_path: Path) -> None:
    written("mixtral", tmp_path / "checkpoint")
    path = write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", kind="Q8_0", others={"ffn_down_exps": "Q4_0"})
    checkpoint = GgufCheckpoint(path)
    assert not checkpoint.keeps_its_blocks
    with pytest.raises(
        InputError, match=r"experts\.up_proj\.weight is Q8_0, .*expected Q4_0, Q8_0, one for all matrices"
    ):
        checkpoint.block_bits("model.layers.0.mlp.experts.up_proj.weight")
    assert checkpoint.block_bits("model.layers.0.self_attn.q_proj.weight") == 8


@pytest.mark.parametrize(
    ("name", "key", "message"),
    [
        ("falcon-11b", "rope.freq_base", "falcon.rope.freq_base is None, expected the base of the rotary embedding"),
        ("granite", "attention.scale", "granite.attention.scale is None, expected the factor of queries and keys"),
        ("gemma3", "attention.key_length", "gemma3.attention.key_length is None, expected the width of a head's"),
        ("phi3-longrope", "rope.dimension_count", "phi3.rope.dimension_count is None, expected the number of channels"),
        (
            "glm",
            "attention.layer_norm_rms_epsilon",
            "chatglm.attention.layer_norm_rms_epsilon is None, expected 1.5625e-07",
        ),
        ("qwen2-moe", "expert_used_count", "missing key 'qwen2moe.expert_used_count'"),
    ],
)
def test_a_missing_key_without_a_default_is_refused_by_name(
    name: str, key: str, message: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    checkpoint = made(name).path.parent / "checkpoint"
    with pytest.raises(InputError) as caught:
        GgufCheckpoint(write_gguf(checkpoint, tmp_path / "model.gguf", without=(key,)))
    assert caught.value.message.startswith(f"{tmp_path / 'model.gguf'}: {message}")


def test_a_file_says_which_of_two_models_it_is() -> None:
    """No key has Gemma 3's scale of attention, nor GPT-NeoX's activation: the shape of the model does."""
    gemma = families()["Gemma3ForCausalLM"].gguf
    keys = {"attention.key_length": 128, "embedding_length": 5376, "attention.head_count": 32, "block_count": 62}
    assert gemma is not None
    assert gemma.fields(keys_of("gemma3", keys))["query_pre_attn_scalar"] == 168
    assert gemma.fields(keys_of("gemma3", keys | {"block_count": 48}))["query_pre_attn_scalar"] == 128
    neox = families()["GPTNeoXForCausalLM"].gguf
    assert neox is not None
    assert neox.fields(keys_of("gptneox", {"block_count": 44, "embedding_length": 6144}))["hidden_act"] == "gelu_fast"
    assert neox.fields(keys_of("gptneox", {"block_count": 36, "embedding_length": 5120}))["hidden_act"] == "gelu"


def keys_of(architecture: str, values: dict[str, int]) -> GgufKeys:
    return GgufKeys(GgufHeader("file", {f"{architecture}.{key}": one for key, one in values.items()}, {}), architecture)


THEIRS: dict[str, dict[str, Any]] = {
    "phi3": {"sliding_window": None},
    "gemma3": {"num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 5, "full_attention"],
               "query_pre_attn_scalar": 256, "head_dim": 256, "rope_parameters": None},
    "qwen2-moe": {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1},
    "qwen3-moe": {"moe_intermediate_size": 768, "mlp_only_layers": []},
}  # fmt: skip
"""Shapes that transformers gives to every file of these families, where it does not read the file's own."""


@pytest.mark.slow
@pytest.mark.parametrize("name", THEIRS)
def test_transformers_reads_the_same_file(name: str, tmp_path: Path) -> None:
    import transformers

    written(name, tmp_path / "checkpoint", **THEIRS[name])
    path = write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    checkpoint = GgufCheckpoint(path)
    for prompt in prompts():
        answer, logits = answer_of(theirs.eval(), prompt)
        found = reference_logits(checkpoint.config, checkpoint, prompt, answer)
        torch.testing.assert_close(found, logits, rtol=BAR, atol=BAR)
