from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvc_trt.tasks.kinds.key_value import BOS, END, QUERY, UNKNOWN, WORDS, Placement, generate
from training.retrieval_tiny.checkpoint import WEIGHTS_FILE, build_tokenizer, load_model, save_checkpoint
from training.retrieval_tiny.data import QUESTION_TOKENS, BatchShape, draw_batch
from training.retrieval_tiny.evaluate import PLACEMENTS, exact_match
from training.retrieval_tiny.initialise import initialise
from training.retrieval_tiny.model import Layer, ModelShape, SmallLlama, rope_table, rotate
from training.retrieval_tiny.optimiser import learning_rate_share, orthogonalise
from training.retrieval_tiny.train import CURRICULUM, FINAL_SHAPES, train

CHECKPOINT = Path(__file__).parents[2] / "kvc_trt/models/checkpoints/retrieval-tiny"
WRITTEN_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


@pytest.fixture
def torch_settings() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="module")
def shipped() -> SmallLlama:
    return load_model(CHECKPOINT)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def test_training_batch_asks_for_the_values_behind_each_key() -> None:
    shape = BatchShape(context=64, pairs=(3, 9), queries=5, rows=4)
    batch = draw_batch(shape, seed=0, step=3)
    assert torch.equal(batch.ids, draw_batch(shape, seed=0, step=3).ids)
    assert not torch.equal(batch.ids, draw_batch(shape, seed=0, step=4).ids)
    assert torch.equal(batch.targets, batch.ids[:, batch.positions + 1])
    for row, targets in zip(batch.ids, batch.targets, strict=True):
        haystack = row[:64].tolist()
        questions = row[64:].view(-1, QUESTION_TOKENS).tolist()
        assert len({key for _, key, *_ in questions}) == len(questions) <= 5
        for (query, key, *values, end), answer in zip(questions, targets.view(-1, 5).tolist(), strict=True):
            first = haystack.index(key) + 1
            assert (query, end) == (QUERY, END)
            assert haystack[first : first + 4] == values == answer[:4]
            assert answer[4] == END


@pytest.mark.parametrize("shape", [stage.shape for stage in CURRICULUM] + [shape for _, shape in FINAL_SHAPES])
def test_every_stage_has_room_for_its_pairs(shape: BatchShape) -> None:
    for step in range(20):
        assert draw_batch(shape, seed=0, step=step).ids.shape[0] == shape.rows


def test_orthogonalise_flattens_the_singular_values() -> None:
    torch.manual_seed(0)
    for rows, columns in ((64, 128), (128, 64), (96, 96)):
        matrix = torch.randn(rows, columns)
        singular = torch.linalg.svdvals(orthogonalise(matrix))
        assert singular.max() < 1.25
        assert singular.median() > 0.65


def test_learning_rate_warms_up_and_falls_to_its_floor() -> None:
    shares = [learning_rate_share(step, 1000) for step in range(1000)]
    assert shares[0] == pytest.approx(0.02)
    assert max(shares) == shares[49] == shares[400] == 1.0
    assert shares[-1] == pytest.approx(0.02)
    assert shares[500:] == sorted(shares[500:], reverse=True)


@torch.no_grad()
def test_first_layer_starts_by_looking_back() -> None:
    torch.manual_seed(0)
    model = SmallLlama(ModelShape(vocab_size=len(WORDS)))
    initialise(model)
    layer = model.model.layers[0]
    assert isinstance(layer, Layer)
    attention = layer.self_attn
    x = layer.input_layernorm(model.model.embed_tokens(torch.arange(32)[None]))
    table = rope_table(32, model.shape)
    query, key = (
        rotate(projection(x).unflatten(-1, (-1, 32)).transpose(1, 2), *table)[0]
        for projection in (attention.q_proj, attention.k_proj)
    )
    scores = query @ key.repeat_interleave(2, dim=0).transpose(1, 2) / 32**0.5
    weights = scores.masked_fill(torch.ones(32, 32, dtype=torch.bool).triu(1), -torch.inf).softmax(dim=-1)
    for head in range(4):
        assert weights[head].diagonal(-(head + 1)).mean() > 0.5


def test_same_seed_gives_the_same_files(tmp_path: Path, torch_settings: None) -> None:
    for run in ("first", "second"):
        save_checkpoint(train(seed=7, steps=3), build_tokenizer(), tmp_path / run)
    save_checkpoint(train(seed=8, steps=3), build_tokenizer(), tmp_path / "other")
    for name in WRITTEN_FILES:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    assert (tmp_path / "first" / WEIGHTS_FILE).read_bytes() != (tmp_path / "other" / WEIGHTS_FILE).read_bytes()


def test_shipped_files_are_those_the_training_script_writes(tmp_path: Path, shipped: SmallLlama) -> None:
    save_checkpoint(shipped, build_tokenizer(), tmp_path)
    for name in WRITTEN_FILES:
        assert (tmp_path / name).read_bytes() == (CHECKPOINT / name).read_bytes(), name


def test_model_card_names_the_shipped_weights() -> None:
    weights = (CHECKPOINT / WEIGHTS_FILE).read_bytes()
    assert len(weights) <= 3 * 2**20
    assert hashlib.sha256(weights).hexdigest() in (CHECKPOINT / "README.md").read_text()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_tokenizer_agrees_with_the_generator(tokenizer: Tokenizer, placement: Placement) -> None:
    sample = generate(seed=0, index=0, context_tokens=256, pairs=32, placement=placement)
    assert tuple(tokenizer.encode(sample.prompt_text).ids) == sample.prompt_ids
    assert tuple(tokenizer.encode(sample.query_text, add_special_tokens=False).ids) == sample.query_ids
    assert tokenizer.decode(sample.prompt_ids) == sample.prompt_text
    assert tokenizer.decode([*sample.answer_ids, END]) == sample.answer_text


def test_tokenizer_decodes_word_by_word(tokenizer: Tokenizer) -> None:
    sample = generate(seed=0, index=1, context_tokens=64, pairs=2)
    stream = DecodeStream(skip_special_tokens=True)
    pieces = [stream.step(tokenizer, token) or "" for token in (*sample.answer_ids, END)]
    assert "".join(pieces) == sample.answer_text
    assert all(pieces[:4])


def test_tokenizer_marks_unknown_words(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<query> xylophone").ids == [BOS, QUERY, UNKNOWN]
    assert tokenizer.to_str() == build_tokenizer().to_str()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_shipped_model_retrieves_97_percent_at_every_placement(shipped: SmallLlama, placement: Placement) -> None:
    rate = exact_match(shipped, context_tokens=256, pairs=32, samples=64, seed=11, placement=placement)
    assert rate >= 0.97


def test_transformers_loads_it_and_generation_stops_by_itself(shipped: SmallLlama) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    sample = generate(seed=12, index=0, context_tokens=200, pairs=16)
    inputs = tokenizer(sample.prompt_text, return_tensors="pt")
    assert tuple(inputs.input_ids[0].tolist()) == sample.prompt_ids

    with torch.no_grad():
        logits = model(**inputs).logits
        ours = shipped(inputs.input_ids, torch.arange(200))
    torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-4)

    output = model.generate(**inputs, max_new_tokens=16)[0, 200:].tolist()
    assert output == [*sample.answer_ids, END]
    assert tokenizer.decode(output, skip_special_tokens=True) == sample.answer_text
