"""The steps of an ensemble without a server: the tensors between them, and each step's refusals."""

from __future__ import annotations

import asyncio
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvc_trt
from kvc_trt.backends.opening import open_engine
from kvc_trt.errors import InputError
from kvc_trt.serving.errors import ServingError
from kvc_trt.serving.request import ServedRequest
from kvc_trt.serving.served_answer import Piece
from kvc_trt.serving.triton.config_schema import parsed
from kvc_trt.serving.triton.family import model_names as family
from kvc_trt.serving.triton.family.engine_step import StepOutputs
from kvc_trt.serving.triton.family.ensemble import ensemble_config, export_ensemble
from kvc_trt.serving.triton.loading import load_model
from tests.serving.triton.fake_server import (
    Request,
    Sender,
    Tensor,
    TritonError,
    TritonModelException,
    model_arguments,
    pb_utils,
)
from tests.serving.triton.prompts import ANSWER, LAMP
from tests.serving.triton.server import wait_until

STEPS = (family.PREPROCESSING, family.ENGINE_STEP, family.POSTPROCESSING)


@pytest.fixture(scope="module")
def repository(retrieval_engine, tmp_path_factory):
    return export_ensemble(open_engine(retrieval_engine), tmp_path_factory.mktemp("triton") / "repo").parent


def loaded(directory):
    return load_model(pb_utils(directory / "1"), model_arguments(directory))


@pytest.fixture(scope="module")
def steps(repository):
    found = {name: loaded(repository / name) for name in STEPS}
    yield found
    for step in found.values():
        step.close()


def integers(*values, dims=1):
    return np.array(values, np.int32).reshape((1,) * dims + (-1,))


def text(value):
    return np.array([[value]], np.object_)


def step_once(step, parameters=None, **tensors):
    (response,) = step.execute([Request([Tensor(name, array) for name, array in tensors.items()], parameters)])
    return response


def ask(step, **tensors):
    request = Request([Tensor(name, array) for name, array in tensors.items()])
    step.execute([request])
    assert request.sender.done.wait(120)
    return request.sender.responses


def prompt(steps):
    made = step_once(steps[family.PREPROCESSING], QUERY=text(LAMP.encode()), REQUEST_OUTPUT_LEN=integers(9)).outputs
    names = ("input_ids", "input_lengths", "request_output_len")
    return dict(zip(names, (made[name] for name in family.PREPROCESSING_OUTPUTS), strict=True))


def shown(steps, response):
    """Return the text of one response of the engine."""
    sources = ("answer_ids", "answer_length", "text_range", "answer_key")
    tensors = dict(zip(family.POSTPROCESSING_INPUTS, (response.outputs[name] for name in sources), strict=True))
    output = step_once(steps[family.POSTPROCESSING], **tensors).outputs["OUTPUT"]
    assert output.shape == (1,), "clients of this family read one dimension"
    return output[0].decode()


@pytest.mark.parametrize("loaded_too", [True, False])
def test_the_error_of_a_begun_answer_comes_after_its_text(repository, steps, loaded_too):
    """And it comes where `postprocessing` is not loaded."""
    sender, asked = Sender(), []

    class ToPostprocessing:
        def __init__(self, model_name, requested_output_names, inputs):
            if not loaded_too:
                raise TritonModelException(f"{model_name} is not ready")
            self._inputs = inputs

        async def async_exec(self):
            assert not sender.responses
            (answered,) = steps[family.POSTPROCESSING].execute([Request(self._inputs)])
            asked.append(answered.outputs["OUTPUT"].item())

    step = loaded(repository / family.ENGINE_STEP)
    step._pb_utils.InferenceRequest = ToPostprocessing
    asyncio.run(step._fail(sender, ServingError("too late", "the deadline came"), begun=True))
    step.close()
    assert asked == [b""] * loaded_too
    assert "the deadline came" in sender.responses[0].error.message
    assert sender.done.is_set()


@pytest.mark.slow
@pytest.mark.parametrize("stop_words", [(), ("lagos",), ("agos e", "x"), ("t",)])
@pytest.mark.parametrize("streamed", [False, True])
def test_the_steps_together_answer_as_the_engine_does(steps, retrieval_engine, stop_words, streamed):
    engine = kvc_trt.Engine.open(retrieval_engine)
    expected = engine.generate(LAMP, max_new_tokens=9, stop=list(stop_words))
    words = {"stop_words": np.array([[word.encode() for word in stop_words]], np.object_)} if stop_words else {}
    responses = ask(steps[family.ENGINE_STEP], **prompt(steps), **words, streaming=np.array([[streamed]]))
    assert "".join(shown(steps, one) for one in responses) == expected.text
    ids = [token for one in responses for token in one.outputs["output_ids"].reshape(-1).tolist()]
    assert ids == list(expected.token_ids)
    assert responses[0].outputs["output_ids"].shape[:2] == (1, 1)
    assert streamed or len(responses) == 1


def test_the_prompt_goes_before_the_answer_if_wanted(steps):
    asked = prompt(steps)
    (one,) = ask(steps[family.ENGINE_STEP], **asked, exclude_input_in_output=np.array([[False]]))
    assert shown(steps, one) == LAMP + ANSWER
    assert one.outputs["output_ids"].reshape(-1)[: asked["input_ids"].size].tolist() == asked["input_ids"][0].tolist()


def test_every_output_has_its_type(steps):
    names = [one.engine for one in family.NAMES if one.engine.startswith("return_")]
    wanted = [name for name in names if "logits" not in name and "perf" not in name]
    (one,) = ask(steps[family.ENGINE_STEP], **prompt(steps), **{name: np.array([[True]]) for name in wanted})
    assert set(one.outputs) == set(family.ENGINE_OUTPUTS)
    for name, array in one.outputs.items():
        dims = family.ENGINE_OUTPUTS[name].dims
        assert array.ndim == len(dims) + 1
        assert all(size in (found, -1) for size, found in zip(dims, array.shape[1:], strict=True)), name


def test_an_end_token_is_another_or_none(steps, retrieval_engine):
    tiger = kvc_trt.Engine.open(retrieval_engine).generate(LAMP, max_new_tokens=9).token_ids[1]
    (one,) = ask(steps[family.ENGINE_STEP], **prompt(steps), end_id=integers(tiger))
    assert shown(steps, one) == "scarlet"
    (one,) = ask(steps[family.ENGINE_STEP], **prompt(steps), end_id=integers(-1))
    assert one.outputs["output_ids"].size == 9


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"beam_width": integers(4)}, "beam_width is 4"),
        ({"num_return_sequences": integers(2)}, "num_return_sequences is 2"),
        ({"return_context_logits": np.array([[True]])}, "return_context_logits is True"),
        ({"input_lengths": integers(3)}, "input_lengths is 3, and input_ids has 9 tokens"),
        ({"request_output_len": integers(-1)}, "max_tokens must be at least 1"),
        ({"pad_id": integers(1, 2)}, "pad_id has 2 values"),
    ],
)
def test_inputs_that_the_engine_cannot_honour_are_refused(steps, tensors, message):
    (one,) = ask(steps[family.ENGINE_STEP], **{**prompt(steps), **tensors})
    assert (one.error.code, message in one.error.message) == (TritonError.INVALID_ARG, True), one.error.message


@pytest.mark.parametrize(
    ("query", "parameters", "message"),
    [
        (b"", {}, "the prompt is empty"),
        (b"\xff", {}, "not valid UTF-8"),
        (b"a " * 2_000_000, {}, "characters, expected at most 2048 tokens"),
        (b"a", {"max_token": 3}, "unknown parameter 'max_token'; did you mean 'max_tokens'?"),
        *((b"a", {name: 1}, f"{name} is not supported") for name in family.REFUSED),
    ],
)
def test_preprocessing_refuses_by_name(steps, query, parameters, message):
    found = step_once(steps[family.PREPROCESSING], parameters, QUERY=text(query)).error
    assert (found.code, message in found.message) == (TritonError.INVALID_ARG, True), found.message


def test_steps_say_what_is_missing(steps):
    assert "found none" in step_once(steps[family.PREPROCESSING]).error.message
    assert "expected TOKENS_BATCH" in step_once(steps[family.POSTPROCESSING]).error.message


def test_an_answer_is_cancelled_by_its_key_and_by_no_other(steps):
    step, asked = steps[family.ENGINE_STEP], {**prompt(steps), "request_output_len": integers(2000)}
    request = Request(
        [*(Tensor(name, array) for name, array in asked.items()), Tensor("end_id", integers(-1)),
         Tensor("streaming", np.array([[True]]))]
    )  # fmt: skip
    step.execute([request])
    wait_until(lambda: bool(request.sender.responses))
    key = request.sender.responses[0].outputs["answer_key"]
    for sent in (key ^ np.uint64(1), key):
        assert not request.sender.done.is_set()
        ask(step, cancel_answer=sent)
    assert request.sender.done.wait(120)
    assert all(one.error is None for one in request.sender.responses), "its client is gone"


def test_a_client_that_has_gone_ends_the_answer_in_the_engine(steps, monkeypatch):
    told = []

    class Told:
        def __init__(self, model_name, requested_output_names, inputs):
            told.append((model_name, inputs[0].name(), inputs[0].as_numpy().item()))

        def exec(self, decoupled):
            assert decoupled
            return iter(())

    post = steps[family.POSTPROCESSING]
    monkeypatch.setattr(post._pb_utils, "InferenceRequest", Told, raising=False)
    tensors = {"TOKENS_BATCH": integers(5, dims=2), "SEQUENCE_LENGTH": integers(1), "ANSWER_KEY": np.array([[7]])}
    request = Request([Tensor(name, array) for name, array in tensors.items()])
    post.execute([request])
    assert told == []
    request.sender.gone = True
    post.execute([request])
    assert told == [("tensorrt_llm", "cancel_answer", 7)]


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1), st.booleans())
def test_pieces_show_each_character_once(pieces, echo):
    """Tokens and texts need not end together: a piece may show text of the tokens before it."""
    outputs = StepOutputs(ServedRequest(token_ids=(3, 4)), echo)
    ids, ranges = [], []
    for number, tokens in enumerate(pieces):
        made = {name: array.reshape(-1).tolist() for name, array in outputs(Piece("x" * number, tuple(tokens)), 2)}
        ids += made["output_ids"]
        assert made["answer_ids"] == (ids if number == 0 or not echo else ids[2:])
        assert made["sequence_length"] == [len(made["output_ids"])]
        ranges.append(made["text_range"])
    assert [one[0] for one in ranges] == [2 * echo] + [0] * (len(pieces) - 1)
    assert ids == [3, 4] * echo + [token for tokens in pieces for token in tokens]
    assert [first for _, first, _ in ranges] == [0, *(last for _, _, last in ranges[:-1])]
    assert ranges[-1][2] == sum(range(len(pieces)))


def test_every_name_of_the_ensemble_goes_somewhere():
    config = parsed(ensemble_config())
    asked = {name for step in config.ensemble_scheduling.step for name in step.input_map.values()}
    made = {name for step in config.ensemble_scheduling.step for name in step.output_map.values()}
    assert set(family.ENSEMBLE_INPUTS) == {name for name in asked if not name.startswith("_")}
    assert set(family.ENSEMBLE_OUTPUTS) == {name for name in made if not name.startswith("_")}
    assert {name for name in asked if name.startswith("_")} == {name for name in made if name.startswith("_")}
    assert set(family.ENGINE_INPUTS) - {"cancel_answer"} == set(config.ensemble_scheduling.step[1].input_map)


def test_nothing_is_written_where_a_name_is_taken(retrieval_engine, tmp_path):
    (tmp_path / "postprocessing").mkdir()
    with pytest.raises(InputError, match="postprocessing exists and is not replaced"):
        export_ensemble(open_engine(retrieval_engine), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["postprocessing"]


def test_an_export_keeps_equal_files_of_a_killed_one(retrieval_engine, tmp_path):
    engine = open_engine(retrieval_engine)
    export_ensemble(engine, tmp_path)
    whole = sorted(path.name for path in tmp_path.iterdir())
    for name in ("ensemble", "preprocessing"):
        shutil.rmtree(tmp_path / name)
    kept = (tmp_path / "postprocessing").stat().st_ino
    export_ensemble(engine, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == whole
    assert (tmp_path / "postprocessing").stat().st_ino == kept
    shutil.rmtree(tmp_path / "ensemble")
    (tmp_path / "postprocessing" / "config.pbtxt").write_text("another")
    with pytest.raises(InputError, match="postprocessing exists and is not replaced"):
        export_ensemble(engine, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [name for name in whole if name != "ensemble"]


def test_an_engine_without_a_tokenizer_is_refused(tiny_engine, tmp_path):
    with pytest.raises(InputError, match="has no tokenizer"):
        export_ensemble(open_engine(tiny_engine), tmp_path / "repo")
    assert not (tmp_path / "repo").exists()


@pytest.mark.parametrize(("change", "message"), [(b"x", "another tokenizer"), (None, "cannot read tokenizer.json")])
def test_a_changed_tokenizer_is_not_loaded(repository, tmp_path, change, message):
    model = tmp_path / "preprocessing"
    shutil.copytree(repository / "preprocessing", model)
    file = model / "1" / "tokenizer.json"
    content = file.read_bytes()
    file.unlink()
    if change is not None:
        file.write_bytes(content + change)
    with pytest.raises(TritonModelException, match=message) as refused:
        loaded(model)
    assert str(tmp_path) not in str(refused.value)


def test_no_path_of_this_machine_is_written(repository):
    for file in [*repository.rglob("config.pbtxt"), *repository.rglob("model.py")]:
        assert str(repository.parent) not in file.read_text()
    assert {path.name for path in repository.iterdir()} == {family.ENSEMBLE, *STEPS}
