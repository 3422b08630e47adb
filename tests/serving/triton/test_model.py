"""The exported model without a server: tensors in, tensors out, under whatever NumPy is installed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

import kvc_trt
from kvc_trt.backends.opening import open_engine
from kvc_trt.proof.file import proof_of
from kvc_trt.serving.triton import tensors
from kvc_trt.serving.triton.loading import load_model
from kvc_trt.serving.triton.repository import export_model
from kvc_trt.serving.triton.tensors import INPUTS, OPENAI_OUTPUTS, OUTPUTS, tensors_of
from tests.serving.triton.fake_server import (
    FAMILIES,
    Request,
    Tensor,
    TritonError,
    TritonModelException,
    model_arguments,
    pb_utils,
)
from tests.serving.triton.prompts import ANSWER, LAMP


@pytest.fixture(scope="module")
def exported(retrieval_engine, tmp_path_factory):
    return export_model(open_engine(retrieval_engine), tmp_path_factory.mktemp("triton"), "tiny")


@pytest.fixture(scope="module")
def model(exported):
    one = load_model(pb_utils(exported / "1"), model_arguments(exported))
    yield one
    one.close()


def text(*values):
    return np.array([[value.encode() if isinstance(value, str) else value for value in values]], np.object_)


def ask(model, **tensors):
    tensors = {"text_input": text(LAMP)} | tensors
    request = Request([Tensor(name, array) for name, array in tensors.items() if array is not None])
    model.execute([request])
    assert request.sender.done.wait(120)
    return request.sender.responses


def true():
    return np.array([[True]])


def test_a_request_without_streaming_has_one_response(model):
    (response,) = ask(model)
    assert (response.outputs["text_output"].tolist(), set(response.outputs)) == ([[ANSWER.encode()]], {"text_output"})


def test_a_stream_is_pieces_and_every_output_has_its_type(model):
    names = ("finish_reason", "num_input_tokens", "num_output_tokens", "kv_cache_tokens", "output_ids", "log_probs")
    responses = ask(model, stream=true(), **{f"return_{name}": true() for name in names})
    assert b"".join(one.outputs["text_output"].item() for one in responses) == ANSWER.encode()
    assert set(responses[-1].outputs) == set(OUTPUTS) - {"kv_proof", *OPENAI_OUTPUTS}
    expected = {"STRING": np.object_, "INT32": np.int32, "UINT32": np.uint32, "FP32": np.float32}
    for response in responses:
        for name, array in response.outputs.items():
            assert (array.dtype, array.ndim, array.shape[0]) == (expected[OUTPUTS[name].data_type], 2, 1), name
    assert sum(one.outputs["num_output_tokens"].item() for one in responses) == 5
    assert responses[-1].outputs["finish_reason"].item() == b"stop"


def through_openai(model, body, **more):
    """Status and document of every response to a body of OpenAI's API."""
    content = body if isinstance(body, str) else json.dumps({"model": "tiny", **body})
    responses = ask(model, text_input=None, openai_request=text(content), **more)
    for one in responses:
        assert set(one.outputs) == set(OPENAI_OUTPUTS)
    found = [one.outputs for one in responses]
    return [(one["openai_status"].item(), json.loads(one["openai_response"].item())) for one in found]


def test_openai_bodies_are_answered_whole_and_streamed(model):
    ((status, whole),) = through_openai(model, {"prompt": LAMP})
    assert (status, whole["choices"][0]["text"], whole["usage"]["completion_tokens"]) == (200, ANSWER, 5)
    chunks = through_openai(model, {"prompt": LAMP, "stream": True, "stream_options": {"include_usage": True}})
    assert {status for status, _ in chunks} == {200}
    assert "".join(chunk["choices"][0]["text"] for _, chunk in chunks[:-1]) == ANSWER
    assert chunks[-1][1]["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("body", "more", "status", "named"),
    [
        ({"prompt": LAMP, "max_token": 5}, {}, 400, "did you mean 'max_tokens'"),
        ({"prompt": LAMP, "model": "other"}, {}, 404, "there is no model 'other' here, expected tiny"),
        ({"messages": []}, {}, 400, "has no chat template"),
        ("{", {}, 400, "not valid JSON"),
        (
            {"prompt": LAMP},
            {"max_tokens": np.array([[3]], np.int32)},
            400,
            "goes alone, found max_tokens",
        ),
        ({"prompt": LAMP}, {"top_k": np.array([[3, 4]], np.int32)}, 400, "top_k has 2 values"),
    ],
)
def test_invalid_openai_bodies_are_refused(model, body, more, status, named):
    ((found, document),) = through_openai(model, body, **more)
    assert (found, named in document["error"]["message"]) == (status, True), document


def test_numbers_are_what_the_client_wrote():
    request = Request(
        [Tensor("temperature", np.array([[0.7]], np.float32)), Tensor("top_k", np.array([[3]], np.int32))]
    )
    assert tensors_of(request, INPUTS) == {"temperature": 0.7, "top_k": 3}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"text_input": None}, "found neither"),
        ({"text_input": None, "max_tokens": np.array([[3]], np.int32)}, "found neither"),
        ({"text_input": text(b"\xff")}, "not valid UTF-8"),
        ({"text_input": text("a", "b")}, "text_input has 2 values, expected one"),
        ({"max_tokens": np.zeros([1, 0], np.int32)}, "max_tokens has 0 values"),
        ({"max_tokens": np.array([[-1]], np.int32)}, "max_tokens must be at least 1"),
        ({"input_ids": np.array([[1, 2]], np.int32)}, "found both"),
    ],
)
def test_a_bad_request_is_the_clients_error(model, tensors, message):
    (response,) = ask(model, **tensors)
    assert message in response.error.message
    assert response.error.code == TritonError.INVALID_ARG


def test_parameters_of_the_request_count_and_a_typo_is_refused(model):
    for parameters, wanted in (({"max_tokens": 2}, b"scarlet tiger"), ({"max_token": 2}, None)):
        request = Request([Tensor("text_input", text(LAMP))], parameters)
        model.execute([request])
        assert request.sender.done.wait(120)
        (response,) = request.sender.responses
        if wanted is None:
            assert "did you mean 'max_tokens'?" in response.error.message
        else:
            assert response.outputs["text_output"].item() == wanted


def test_a_client_that_is_gone_ends_its_answer_and_a_deadline_too(model):
    endless = [
        Tensor("text_input", text(LAMP)),
        Tensor("ignore_eos", true()),
        Tensor("max_tokens", np.array([[2000]], np.int32)),
    ]
    gone, late = Request(endless), Request(endless, timeout=30_000)
    gone.sender.gone = True
    model.execute([gone, late])
    assert gone.sender.done.wait(120)
    assert late.sender.done.wait(120)
    codes = [request.sender.responses[-1].error.code for request in (gone, late)]
    assert codes == [TritonError.CANCELLED, TritonError.UNAVAILABLE]


def test_failures_are_internal_errors_without_details(model, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("/secret")

    monkeypatch.setattr(model._served, "submit", broken)
    (response,) = ask(model)
    assert (response.error.code, "/secret" in response.error.message) == (TritonError.INTERNAL, False)
    assert any("/secret" in line for line in model._pb_utils.Logger.lines)


@pytest.mark.parametrize("stream", [None, true()])
def test_an_answer_that_cannot_be_written_ends_with_an_error(model, monkeypatch, stream):
    """Otherwise its client would wait for ever."""

    def read(request):
        asked, _ = tensors.read_request(request)
        return asked, lambda piece, input_tokens: [("text_output", None), *{}["/secret"]]

    monkeypatch.setattr(model, "_read", read)
    *_, response = ask(model, stream=stream)
    assert (response.error.code, "/secret" in response.error.message) == (TritonError.INTERNAL, False)
    assert model._unanswered == 0


def test_figures_that_cannot_be_shown_keep_nobody_waiting(model, monkeypatch):
    def broken(figures):
        raise RuntimeError("no such metric")

    monkeypatch.setattr(model._metrics, "show", broken)
    (response,) = ask(model)
    assert response.outputs["text_output"].item() == ANSWER.encode()
    assert model._unanswered == 0
    assert any("no such metric" in line for line in model._pb_utils.Logger.lines)


def test_an_engine_that_was_changed_is_not_loaded(exported):
    args = model_arguments(exported)
    config = json.loads(args["model_config"])
    config["parameters"]["engine_sha256"]["string_value"] = "0000"
    with pytest.raises(TritonModelException, match=r"^engine is another engine .*expected 0000") as refused:
        load_model(pb_utils(exported / "1"), {**args, "model_config": json.dumps(config)})
    assert str(exported) not in str(refused.value)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rwos": "3"}, "unknown parameter 'rwos'; did you mean 'rows'?"),
        ({"rows": "three"}, "parameter 'rows' is 'three', expected an integer"),
        ({"rows": "-1"}, "parameter 'rows' is '-1', expected an integer in 0"),
        ({"memory_bytes": "9" * 30}, "parameter 'memory_bytes' is '9"),
        ({"rows": "9" * 5000}, "parameter 'rows' is '9"),
        ({"prefill_slice_ms": "nan"}, "parameter 'prefill_slice_ms' is 'nan', expected a number in 0"),
        ({"prefill_slice_ms": "-inf"}, "parameter 'prefill_slice_ms' is '-inf'"),
        ({"kv_proofs": "yes"}, "parameter 'kv_proofs' is 'yes', expected True or False"),
        ({"engine_sha256": None}, "parameter 'engine_sha256' is missing"),
    ],
)
def test_parameters_of_the_model_are_checked(exported, parameters, message):
    args = model_arguments(exported)
    config = json.loads(args["model_config"])
    for name, value in parameters.items():
        if value is None:
            del config["parameters"][name]
        else:
            config["parameters"][name] = {"string_value": value}
    with pytest.raises(TritonModelException) as refused:
        load_model(pb_utils(exported / "1"), {**args, "model_config": json.dumps(config)})
    assert message in str(refused.value)


def test_metrics_grow_by_what_the_scheduler_has_counted(model):
    ask(model)
    model._metrics.show(model._served.metrics())
    figures = model._served.metrics()
    own = (("model", "tiny"), ("version", "1"))
    assert FAMILIES["kvc_trt_generated_tokens_total"].values[own] == figures["generated_tokens"]
    assert FAMILIES["kvc_trt_running"].values[own] == 0
    first = figures["seconds_to_first_token"]
    assert FAMILIES["kvc_trt_seconds_to_first_token_count"].values[own] == first["count"]
    assert FAMILIES["kvc_trt_seconds_to_first_token_bucket"].values[(("le", "+Inf"), *own)] == first["count"]
    assert SimpleNamespace(**figures).ended["stop"] == FAMILIES["kvc_trt_ended_total"].values[(("kind", "stop"), *own)]


@pytest.fixture(scope="module")
def proving(exported):
    args = model_arguments(exported)
    config = json.loads(args["model_config"])
    config["parameters"]["kv_proofs"] = {"string_value": "True"}
    one = load_model(pb_utils(exported / "1"), {**args, "model_config": json.dumps(config)})
    yield one
    one.close()


@pytest.mark.parametrize("kind", ["digest", "lists"])
def test_a_proof_comes_with_the_last_response(proving, exported, kind):
    responses = ask(proving, stream=true(), return_kv_proof=text(kind))
    assert all("kv_proof" not in response.outputs for response in responses[:-1])
    document = json.loads(responses[-1].outputs["kv_proof"].item())
    assert document["kind"] == kind
    proof = proof_of(document, "the answer")
    assert kvc_trt.Engine.open(exported / "1" / "engine").replay(proof).passed
    (plain,) = ask(proving)
    assert set(plain.outputs) == {"text_output"}


def test_a_proof_is_refused_where_the_model_gives_none(model):
    (response,) = ask(model, return_kv_proof=text("digest"))
    assert "the engine was not opened for proofs" in response.error.message
    assert response.error.code == TritonError.INVALID_ARG
    (response,) = ask(model, return_kv_proof=text("yes"))
    assert "return_kv_proof is 'yes', expected digest or lists" in response.error.message


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_an_engine_whose_cache_has_a_format_answers_as_it_does_alone(form, tmp_path):
    from kvc_trt.cli.main import run

    arguments = ["--policy", "rocketkv", "--token-budget", "64", "--kv-cache", form, "--no-verify"]
    assert run(["build", "--model", "retrieval-tiny", *arguments, "-o", str(tmp_path / "engine")]) == 0
    expected = kvc_trt.Engine.open(tmp_path / "engine", threads=1).generate(LAMP)
    exported = export_model(open_engine(tmp_path / "engine"), tmp_path / "repository", "stored")
    one = load_model(pb_utils(exported / "1"), model_arguments(exported))
    try:
        (response,) = ask(one, return_kv_cache_tokens=true())
    finally:
        one.close()
    assert response.outputs["text_output"].item() == expected.text.encode()
    assert response.outputs["kv_cache_tokens_kept"].item() == sum(expected.physical_lengths)
