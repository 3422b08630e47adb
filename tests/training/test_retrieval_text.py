from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvc_trt.tasks.kinds.key_value import END, PAD, UNKNOWN
from kvc_trt.tasks.registry import task
from kvc_trt.tasks.task import TaskSample
from training.retrieval_text.contexts import Kind, Texts
from training.retrieval_text.data import BRANCH_TOKENS, IGNORED, BatchShape, draw_batch
from training.retrieval_text.evaluate import MAX_NEW_TOKENS, TASKS, answer_of, scores
from training.retrieval_text.initialise import initialise, shape_for
from training.retrieval_text.lengthen import LONGEST, ROOM, SHAPES, lengthened
from training.retrieval_text.tokenizer import build_tokenizer
from training.retrieval_text.train import CURRICULUM, FINAL_SHAPES, train
from training.retrieval_tiny.branches import Branches
from training.retrieval_tiny.checkpoint import WEIGHTS_FILE, load_model, save_checkpoint
from training.retrieval_tiny.model import Layer, SmallLlama, rope_table, rotate

CHECKPOINT = Path(__file__).parents[2] / "kvc_trt/models/checkpoints/retrieval-text"
WRITTEN_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
ASKED = re.compile(r"(entry|line) (\S+) (?:(first|then|later|finally) )?(?:reads|holds) (\d+)")
STATED = re.compile(r"(Entry|Line) (\S+) (?:(first|then|later|finally) )?(?:reads|holds) (\d+)")


@pytest.fixture
def torch_settings() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


@pytest.fixture(scope="module")
def shipped() -> SmallLlama:
    return load_model(CHECKPOINT)


def draw(name: str, tokenizer: Tokenizer, *, index: int = 0, target_tokens: int = 512) -> TaskSample:
    return task(name).sample(
        seed=1,
        index=index,
        target_tokens=target_tokens,
        encode=lambda text: tokenizer.encode(text).ids,
        max_new_tokens=MAX_NEW_TOKENS,
    )


@pytest.mark.parametrize("name", TASKS)
def test_tokenizer_spells_the_tasks(tokenizer: Tokenizer, name: str) -> None:
    for index in range(8):
        sample = draw(name, tokenizer, index=index)
        ids = tokenizer.encode(sample.prompt).ids
        question = tokenizer.encode(sample.question, add_special_tokens=False).ids
        answer = tokenizer.encode(answer_of(sample), add_special_tokens=False).ids
        assert UNKNOWN not in ids + answer
        assert ids == tokenizer.encode(sample.context).ids + question
        assert tokenizer.decode(ids) == sample.prompt
        assert len(question) <= 32
        assert len(answer) < MAX_NEW_TOKENS
        stream = DecodeStream(skip_special_tokens=True)
        assert "".join(stream.step(tokenizer, i) or "" for i in [*answer, END]) == answer_of(sample)


@pytest.mark.parametrize("step", range(6))
def test_every_question_of_a_batch_is_about_its_context(tokenizer: Tokenizer, step: int) -> None:
    shape = BatchShape(context=128, rows=3, single=4, values=2, queries=2)
    batch = draw_batch(Texts(tokenizer), shape, seed=0, step=step)
    again = draw_batch(Texts(tokenizer), shape, seed=0, step=step)
    assert torch.equal(batch.ids, again.ids)
    assert torch.equal(batch.targets, again.targets)
    for ids, targets in zip(batch.ids, batch.targets, strict=True):
        stated = {found[1:] for found in STATED.findall(tokenizer.decode(ids[:128].tolist()))}
        asked = [found[1:] for found in ASKED.findall(tokenizer.decode(ids[128:].tolist()))]
        assert len(asked) >= 3
        assert set(asked) <= stated
        following = [*ids[1:].tolist(), PAD]
        for position, target in zip(batch.branches.answers.tolist(), targets.tolist(), strict=True):
            ends = target == END and following[position] in (PAD, ids[128])
            assert target == IGNORED or target == following[position] or ends
        assert (targets == END).sum() == tokenizer.decode(ids[128:].tolist()).count("Question")


@pytest.mark.parametrize("shape", [stage.shape for stage in CURRICULUM] + [shape for _, shape in FINAL_SHAPES])
def test_a_batch_of_every_shape_can_be_drawn(tokenizer: Tokenizer, shape: BatchShape) -> None:
    for step in range(4):
        batch = draw_batch(Texts(tokenizer), shape, seed=0, step=step)
        assert batch.ids.shape[0] == shape.rows
        assert batch.targets.ne(IGNORED).any(dim=1).all()


def test_branches_are_as_long_as_the_longest_question(tokenizer: Tokenizer) -> None:
    kinds: dict[Kind, str] = {
        "single": "niah-single-1",
        "values": "niah-multivalue",
        "queries": "niah-multiquery",
        "line": "lines",
    }
    for kind, name in kinds.items():
        sample = draw(name, tokenizer)
        assert (
            len(tokenizer.encode(sample.question + answer_of(sample), add_special_tokens=False).ids)
            == (BRANCH_TOKENS[kind])
        )


@torch.no_grad()
def test_a_branch_is_computed_as_if_it_followed_the_context_alone() -> None:
    torch.manual_seed(0)
    model = SmallLlama(shape_for(64))
    initialise(model)
    ids = torch.randint(64, (2, 30))
    branches = Branches.of(12, [10, 8], torch.tensor([15, 20, 22, 29]))
    logits = model.of_branches(ids, branches)
    first = model(ids[:, :22], torch.tensor([15, 20]))
    second = model(torch.cat([ids[:, :12], ids[:, 22:]], dim=1), torch.tensor([12, 19]))
    torch.testing.assert_close(logits, torch.cat([first, second], dim=1), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_first_layer_starts_by_looking_back(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    model = SmallLlama(shape_for(tokenizer.get_vocab_size()))
    initialise(model)
    layer = model.model.layers[0]
    assert isinstance(layer, Layer)
    ids = torch.tensor([tokenizer.encode(draw("niah-multikey-2", tokenizer).context).ids])
    x, table = layer.input_layernorm(model.model.embed_tokens(ids)), rope_table(ids.shape[1], model.shape)
    query, key = (
        rotate(projection(x).unflatten(-1, (-1, 64)).transpose(1, 2), *table)[0]
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj)
    )
    scores_ = query @ key.repeat_interleave(2, dim=0).transpose(1, 2) / 64**0.5
    future = torch.ones(scores_.shape[1:], dtype=torch.bool).triu(1)
    weights = scores_.masked_fill(future, -torch.inf).softmax(dim=-1)
    for head in range(4):
        assert weights[head].diagonal(-(head + 1)).mean() > 0.9


@pytest.mark.slow
def test_same_seed_gives_the_same_files(tmp_path: Path, tokenizer: Tokenizer, torch_settings: None) -> None:
    for run in ("first", "second"):
        save_checkpoint(train(seed=7, steps=2), tokenizer, tmp_path / run)
    for name in WRITTEN_FILES:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


@pytest.mark.slow
def test_a_lengthened_model_begins_as_the_shipped_one_and_has_more_positions(
    tmp_path: Path, shipped: SmallLlama, tokenizer: Tokenizer, torch_settings: None
) -> None:
    save_checkpoint(lengthened(CHECKPOINT, seed=1, steps=1), tokenizer, tmp_path)
    model = load_model(tmp_path)
    assert model.shape.max_position_embeddings == LONGEST + ROOM == max(shape.context for _, shape in SHAPES) + ROOM
    for name, weight in shipped.state_dict().items():
        assert not torch.equal(model.state_dict()[name], weight)
        torch.testing.assert_close(model.state_dict()[name], weight, atol=0.01, rtol=0)


def test_shipped_files_are_those_the_training_script_writes(
    tmp_path: Path, shipped: SmallLlama, tokenizer: Tokenizer
) -> None:
    save_checkpoint(shipped, tokenizer, tmp_path)
    for name in WRITTEN_FILES:
        assert (tmp_path / name).read_bytes() == (CHECKPOINT / name).read_bytes(), name


def test_model_card_names_the_shipped_weights() -> None:
    weights = (CHECKPOINT / WEIGHTS_FILE).read_bytes()
    assert len(weights) <= 4_000_000
    assert hashlib.sha256(weights).hexdigest() in (CHECKPOINT / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_shipped_model_answers_97_percent_of_every_task(shipped: SmallLlama, tokenizer: Tokenizer, name: str) -> None:
    found = scores(shipped, tokenizer, task(name), target_tokens=512, samples=16, seed=11)
    assert sum(found) / len(found) >= 0.97


def test_transformers_loads_it_and_generation_stops_by_itself(shipped: SmallLlama, tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    theirs = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    sample = draw("niah-multiquery", tokenizer, target_tokens=256)
    inputs = theirs(sample.prompt, return_tensors="pt")
    prompt = tokenizer.encode(sample.prompt).ids
    assert inputs.input_ids[0].tolist() == prompt

    with torch.no_grad():
        logits = model(**inputs).logits
        ours = shipped(inputs.input_ids, torch.arange(len(prompt)))
    torch.testing.assert_close(ours, logits, rtol=1e-3, atol=1e-3)

    output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS)[0, len(prompt) :].tolist()
    assert output[-1] == END
    assert theirs.decode(output, skip_special_tokens=True) == answer_of(sample)
