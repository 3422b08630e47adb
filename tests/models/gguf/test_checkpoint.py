"""GGUF files against transformers' own reading of them: the same tensors, the same logits."""

from __future__ import annotations

import numpy as np
import pytest

from kvc_trt import policies
from kvc_trt.errors import InputError
from kvc_trt.models.family import family
from kvc_trt.models.gguf.checkpoint import GgufCheckpoint
from kvc_trt.models.gguf.header import BLOCKS, TYPE_NUMBERS
from kvc_trt.models.weights import check_weights, row_chunks
from tests.models.gguf.tiny import HEAD_SIZE, tensors, write

TOLERANCE = 1e-4
VARIANTS = {
    "llama": {"architecture": "llama"},
    "llama-tied": {"architecture": "llama", "tied": True},
    "qwen2": {"architecture": "qwen2"},
    "qwen2-tied": {"architecture": "qwen2", "tied": True},
    "starcoder2": {"architecture": "starcoder2", "tied": True},
    "qwen3": {"architecture": "qwen3", "changes": {"rope.freq_base": 1e6}},
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    def made(**options):
        return write(tmp_path_factory.mktemp("gguf") / "model.gguf", **options)

    return made


def transformers_reading(path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


def reference_logits(checkpoint, ids):
    import torch

    from kvc_trt.reference.model.decoder import ReferenceDecoder

    parameters = policies.resolve(
        "full", model=checkpoint.config, token_budget=None, max_input_len=len(ids), max_output_len=8
    )
    decoder = ReferenceDecoder(checkpoint.config, checkpoint, method=policies.method(parameters), parameters=parameters)
    return decoder.prefill(torch.tensor([ids]), torch.tensor([len(ids)]))[0][0].numpy()


def test_the_types_are_those_of_the_gguf_package():
    import gguf

    assert {name: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] for name in BLOCKS} == BLOCKS
    assert {int(gguf.GGMLQuantizationType[name]): name for name in BLOCKS} == TYPE_NUMBERS


@pytest.mark.parametrize("variant", VARIANTS)
def test_tensors_and_logits_are_those_of_transformers(variant, file):
    check_against_transformers(file(**VARIANTS[variant]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if kind != "F32"])
def test_every_type_has_the_logits_of_transformers(kind, file):
    check_against_transformers(file(kind=kind))


def check_against_transformers(path):
    model = transformers_reading(path)
    checkpoint = GgufCheckpoint(path)
    check_weights(checkpoint.config, checkpoint)
    own, theirs = family(checkpoint.config.architecture).weights, model.state_dict()
    places = {} if own is None else own(checkpoint.config)
    for name in checkpoint.names():
        found = checkpoint.read(name).astype(np.float32)
        their_name = places[name].name if name in places else name
        np.testing.assert_array_equal(found, theirs[their_name].numpy(), err_msg=name)
    import torch

    ids = np.random.default_rng(5).integers(0, checkpoint.config.vocab_size, 33).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, -1].numpy()
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(reference_logits(checkpoint, ids), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q4_1", "Q6_K"])
def test_rows_are_those_of_the_whole_tensor_however_it_is_cut(kind, file):
    checkpoint = GgufCheckpoint(file(kind=kind))
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.embed_tokens.weight", "model.norm.weight"):
        whole = checkpoint.read(name)
        assert whole.shape == checkpoint.shape(name)
        for elements in (HEAD_SIZE * 7, 1000, 1 << 20):
            for start, stop in row_chunks(whole.shape, elements):
                np.testing.assert_array_equal(checkpoint.read_rows(name, start, stop), whole[start:stop])


def test_mistral_is_permuted_as_llama_is(file):
    """Files of Mistral models say llama; one that says mistral has the same rows and Mistral's window."""
    llama, mistral = GgufCheckpoint(file()), GgufCheckpoint(file(architecture="mistral"))
    for name in llama.names():
        np.testing.assert_array_equal(llama.read(name), mistral.read(name))
    assert mistral.config.architecture == "MistralForCausalLM"
    assert mistral.config.sliding_window == 4096
    given = GgufCheckpoint(file(architecture="mistral", changes={"attention.sliding_window": 512}))
    assert given.config.sliding_window == 512


def test_biases_of_llama_are_read_and_permuted(file):
    """transformers passes over them."""
    checkpoint = GgufCheckpoint(file(biased=True))
    check_weights(checkpoint.config, checkpoint)
    stored = tensors("llama", tied=False, biased=True, vocab_size=checkpoint.config.vocab_size)
    interleaved = stored["blk.0.attn_k.bias"].reshape(-1, HEAD_SIZE // 2, 2)
    halves = np.stack([interleaved[..., 0], interleaved[..., 1]], axis=1).reshape(-1)
    np.testing.assert_array_equal(checkpoint.read("model.layers.0.self_attn.k_proj.bias"), halves)


def test_a_missing_tensor_and_one_too_many_are_named(file):
    checkpoint = GgufCheckpoint(file(absent=("blk.1.ffn_up.weight",)))
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.up_proj\.weight missing"):
        check_weights(checkpoint.config, checkpoint)
    with pytest.raises(InputError, match=r"tensor 'blk\.0\.ffn_gate_inp\.weight' has no place in LlamaForCausalLM"):
        GgufCheckpoint(file(extra={"blk.0.ffn_gate_inp.weight": np.zeros((4, 256), np.float32)}))


def test_the_fingerprint_is_of_every_byte(file):
    path = file()
    first = GgufCheckpoint(path).fingerprint()
    assert GgufCheckpoint(path).fingerprint() == first
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert GgufCheckpoint(path).fingerprint() != first


def test_a_file_that_shrinks_is_an_error(file):
    path = file()
    checkpoint = GgufCheckpoint(path)
    with open(path, "r+b") as opened:
        opened.truncate(path.stat().st_size // 2)
    with pytest.raises(InputError, match=r"ends inside tensor 'output\.weight'"):
        checkpoint.read("lm_head.weight")
