"""Checkpoints of models that read images too: their decoder answers as transformers' whole model does to text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from safetensors.torch import load_file, save_file

from kvc_trt import Engine, build
from kvc_trt.errors import InputError
from kvc_trt.models.family import HARMLESS, families
from kvc_trt.models.formats import open_checkpoint, weights_of
from kvc_trt.models.gguf.checkpoint import GgufCheckpoint
from kvc_trt.models.sources.hugging_face import parse_config
from kvc_trt.models.sources.text_part import text_fields
from kvc_trt.models.weights import check_weights
from tests.oracles.answers import STEPS, answer_of, prompts, reference_logits
from tests.oracles.family_models import randomise, their_config
from tests.oracles.gguf_files import write_gguf

transformers = pytest.importorskip("transformers")
OF_QWEN: dict[str, Any] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16,
}  # fmt: skip
OF_SIGLIP: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
AXES = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Gemma3": ("gemma3", {}, OF_SIGLIP),
    "Mistral3": ("mistral", {}, {**OF_SIGLIP, "model_type": "pixtral"}),
    "Qwen3VL": (
        "qwen3",
        {"model_type": "qwen3_vl_text", "rope_parameters": AXES},
        {**OF_QWEN, "deepstack_visual_indexes": [0]},
    ),
    "Qwen3_5": ("qwen3.5", {}, OF_QWEN),
    "Qwen3_5Moe": ("qwen3.5-moe", {}, OF_QWEN),
}
"""The prefix of transformers' classes -> the decoder in `family_models`, what differs in it, and the image part."""
OF_IMAGES = {
    "boi_token_index", "eoi_token_index", "image_token_id", "image_token_index", "mm_tokens_per_image",
    "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "video_token_id", "vision_config",
    "vision_end_token_id", "vision_feature_layer", "vision_start_token_id",
}  # fmt: skip
"""Fields that only images need."""


def config_with_images(prefix: str, **changes: Any) -> Any:
    """Return transformers' configuration of a small model; `changes` are fields of its decoder."""
    transformers.logging.set_verbosity_error()
    name, own, vision = MODELS[prefix]
    text = {**json.loads(their_config(name).to_json_string()), **own, **changes}
    config = getattr(transformers, f"{prefix}Config")(
        text_config=text, vision_config=dict(vision), attn_implementation="eager", tie_word_embeddings=False
    )
    config.architectures = [f"{prefix}ForConditionalGeneration"]
    return config


def written_with_images(prefix: str, directory: Path, **changes: Any) -> Any:
    """Write a small random checkpoint as transformers does; return its model."""
    config = config_with_images(prefix, **changes)
    torch.manual_seed(0)
    model = getattr(transformers, config.architectures[0])(config).eval()
    randomise(model, MODELS[prefix][0])
    model.save_pretrained(directory)
    return model


def rewritten(directory: Path, change: Any) -> None:
    """Replace the tensors of a checkpoint by what `change` makes of them."""
    path = directory / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(path)).items()}, path)


def test_every_class_with_an_image_part_is_here() -> None:
    expected = {own.beside_images.name for own in families().values() if own.beside_images is not None}
    assert {f"{prefix}ForConditionalGeneration" for prefix in MODELS} == expected


@pytest.mark.parametrize("prefix", MODELS)
def test_the_decoder_has_the_logits_of_the_whole_model(prefix: str, tmp_path: Path) -> None:
    model = written_with_images(prefix, tmp_path / "checkpoint")
    checkpoint = open_checkpoint(tmp_path / "checkpoint")
    config, weights = checkpoint.config, weights_of(checkpoint)
    check_weights(config, weights)
    assert not any("vis" in name for name in weights.names())
    for prompt in prompts():
        answer, logits = answer_of(model, prompt)
        found = reference_logits(config, weights, prompt, answer)
        torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["Gemma3", "Qwen3_5Moe"])
def test_an_engine_of_the_decoder_answers_as_the_whole_model(prefix: str, tmp_path: Path) -> None:
    model = written_with_images(prefix, tmp_path / "checkpoint")
    room: dict[str, Any] = {"max_input_len": 256, "max_output_len": 32}
    build(str(tmp_path / "checkpoint"), policy="full", output=tmp_path / "engine", **room)
    asked = [prompt for prompt in prompts() if len(prompt) <= 256]
    with Engine.open(tmp_path / "engine", threads=1) as engine:
        found = engine.generate([prompt.tolist() for prompt in asked], max_new_tokens=STEPS, ignore_eos=True)
    assert [list(output.token_ids) for output in found] == [answer_of(model, prompt)[0] for prompt in asked]


@pytest.mark.parametrize("prefix", ["Gemma3", "Qwen3_5"])
def test_both_orders_of_prefixes_are_read(prefix: str, tmp_path: Path) -> None:
    """Gemma 3 is published as `language_model.model.`, Qwen3.5 as `model.language_model.`; releases write either."""
    written_with_images(prefix, tmp_path)
    before = open_checkpoint(tmp_path)
    shapes = {name: before.shape(name) for name in before.names()}
    old, new = "language_model.model.", "model.language_model."

    def swapped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        is_old = any(name.startswith(old) for name in tensors)
        here, there = (old, new) if is_old else (new, old)
        head, other = ("language_model.lm_head.", "lm_head.") if is_old else ("lm_head.", "language_model.lm_head.")
        return {name.replace(here, there).replace(head, other, 1): tensor for name, tensor in tensors.items()}

    rewritten(tmp_path, swapped)
    after = open_checkpoint(tmp_path)
    assert {name: after.shape(name) for name in after.names()} == shapes
    check_weights(after.config, weights_of(after))


@pytest.mark.parametrize("form", ["together", "another shape"])
def test_experts_of_qwen_3_5_are_read_as_they_are_published(form: str, tmp_path: Path) -> None:
    """Published: one tensor of a layer's gates above ups, and one of its downs; transformers writes each expert's."""
    written_with_images("Qwen3_5Moe", tmp_path)
    apart = weights_of(open_checkpoint(tmp_path))
    expected = {name: apart.read(name) for name in apart.names()}

    def together(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
        for layer in range(4):
            base = f"model.language_model.layers.{layer}.mlp.experts"
            gate, up, down = (
                torch.stack([tensors[f"{base}.{expert}.{part}_proj.weight"] for expert in range(6)])
                for part in ("gate", "up", "down")
            )
            gates = torch.cat([gate, up], dim=1)
            found |= {f"{base}.gate_up_proj": gates, f"{base}.down_proj": down}
            if form == "another shape":
                found[f"{base}.gate_up_proj"] = gates[:, 1:]
        return found

    rewritten(tmp_path, together)
    if form == "another shape":
        with pytest.raises(InputError, match=r"gate_up_proj has shape \[6, 63, 64\], expected \[6, 64, 64\]"):
            weights_of(open_checkpoint(tmp_path))
        return
    found = weights_of(open_checkpoint(tmp_path))
    check_weights(open_checkpoint(tmp_path).config, found)
    assert set(found.names()) == set(expected)
    for name, values in expected.items():
        assert (found.read(name) == values).all(), name


@pytest.mark.parametrize("prefix", MODELS)
def test_every_field_beside_the_decoder_is_of_images_or_read(prefix: str) -> None:
    """A field that neither reads could change the model's answer to text."""
    theirs = set(getattr(transformers, f"{prefix}Config")().to_dict())
    assert theirs - OF_IMAGES - HARMLESS - {"architectures", "dtype"} == {"text_config", "tie_word_embeddings"}


def test_fields_that_published_files_leave_out_have_transformers_defaults() -> None:
    """Gemma 3 4B and 12B state in `text_config` what differs from the class's defaults."""
    stated = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    whole = transformers.Gemma3Config(text_config=dict(stated)).text_config
    given = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": stated}
    sparse = text_fields(given, "config.json")
    assert sparse is not None
    found = parse_config(sparse, "config.json")
    whole.architectures, whole.eos_token_id = ["Gemma3ForCausalLM"], [1, 106]
    fields = {**json.loads(whole.to_json_string()), "bos_token_id": None}
    assert found == parse_config(fields, "config.json")
    assert (found.vocab_size, found.num_attention_heads, found.head_size) == (262208, 8, 256)
    assert found.eos_token_ids == (1, 106)


def test_a_window_of_null_is_none_as_in_the_published_mistral_small(tmp_path: Path) -> None:
    """An absent window is one of 4096 tokens, which the file must not be taken to leave out."""
    model = written_with_images("Mistral3", tmp_path, sliding_window=None, max_position_embeddings=8192)
    stated = json.loads((tmp_path / "config.json").read_text())["text_config"]
    assert stated["sliding_window"] is None
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.sliding_window is None
    prompt = torch.randint(3, 64, (4500,), generator=torch.Generator().manual_seed(13))
    answer, logits = answer_of(model, prompt)
    found = reference_logits(checkpoint.config, weights_of(checkpoint), prompt, answer)
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("prefix", MODELS)
def test_a_null_in_text_config_means_what_it_means_to_transformers(prefix: str) -> None:
    """Every field that is read, but those that transformers wants a value of."""
    whole = json.loads(config_with_images(prefix).to_json_string())
    whole["text_config"]["tie_word_embeddings"] = False
    architecture, compared = f"{prefix}ForConditionalGeneration", []
    (own,) = (one for one in families().values() if one.beside_images and one.beside_images.name == architecture)
    for name in {own.spelling.get(ours, ours) for ours in own.fields.model_fields}:
        fields = {**whole, "text_config": {**whole["text_config"], name: None}}
        try:
            theirs = getattr(transformers, f"{prefix}Config").from_dict(fields).text_config
        except StrictDataclassFieldValidationError:
            continue
        theirs.architectures = [own.architecture]
        expected = {**json.loads(theirs.to_json_string()), "tie_word_embeddings": False}
        assert parsed_or_refused(text_fields(fields, "config.json")) == parsed_or_refused(expected), name
        compared.append(name)
    assert {"sliding_window", "rope_theta", "torch_dtype"} & set(own.fields.model_fields) <= set(compared)


def parsed_or_refused(fields: Any) -> Any:
    """Return the configuration, or why there is none."""
    try:
        return parse_config(fields, "config.json")
    except InputError as error:
        return str(error)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tie_word_embeddings": True}, "tie_word_embeddings contradicts that of text_config"),
        ({"text_config": None}, "text_config"),
        ({"text_config": {"model_type": "gemma3_text"}}, "model_type is 'gemma3_text', expected qwen3_5_text"),
        ({"architectures": ["Qwen2_5_VLForConditionalGeneration"]}, "expected one of"),
    ],
)
def test_a_decoder_that_does_not_fit_is_refused_in_one_line(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    written_with_images("Qwen3_5", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(InputError, match=words) as caught:
        open_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def decoder_of(directory: Path, to: Path) -> Path:
    """Write the decoder of a checkpoint with an image part alone, under the names and fields of its own class."""
    config = json.loads((directory / "config.json").read_text())
    own = config["architectures"][0].replace("ForConditionalGeneration", "")
    text = {"Qwen3VL": "Qwen3", "Mistral3": "Mistral"}[own]
    to.mkdir()
    (to / "config.json").write_text(json.dumps({**config["text_config"], "architectures": [f"{text}ForCausalLM"]}))
    tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        part = name.replace("model.language_model.", "model.").replace("language_model.model.", "model.")
        part = part.replace("language_model.lm_head", "lm_head")
        if part.startswith(("model.layers", "model.embed_tokens", "model.norm", "lm_head")):
            tensors[part] = tensor.contiguous()
    save_file(tensors, to / "model.safetensors")
    return to


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefix", "architecture", "keys"),
    [
        ("Qwen3VL", "qwen3vl", {"n_deepstack_layers": 1, "rope.dimension_sections": [8, 4, 4, 0]}),
        ("Mistral3", "mistral3", {}),
    ],
)
def test_the_decoder_is_read_from_gguf_too(
    prefix: str, architecture: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    """llama.cpp's converter writes it as a file of its own, apart from the image part."""
    model = written_with_images(prefix, tmp_path / "whole")
    decoder = decoder_of(tmp_path / "whole", tmp_path / "decoder")
    path = write_gguf(decoder, tmp_path / "model.gguf", architecture=architecture, keys=keys)
    checkpoint = GgufCheckpoint(path)
    assert checkpoint.header.scalar("general.architecture") == architecture
    check_weights(checkpoint.config, checkpoint)
    for prompt in prompts():
        answer, logits = answer_of(model, prompt)
        found = reference_logits(checkpoint.config, checkpoint, prompt, answer)
        torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_scale_by_position_of_later_mistral_3_files_is_refused(tmp_path: Path) -> None:
    written_with_images("Mistral3", tmp_path / "whole")
    decoder = decoder_of(tmp_path / "whole", tmp_path / "decoder")
    keys = {"attention.temperature_scale": 0.1}
    path = write_gguf(decoder, tmp_path / "model.gguf", architecture="mistral3", keys=keys)
    with pytest.raises(InputError, match=r"mistral3\.attention\.temperature_scale is 0\.1"):
        GgufCheckpoint(path)
