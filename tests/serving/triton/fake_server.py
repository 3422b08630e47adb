"""The part of Triton's `triton_python_backend_utils` that a model uses, without a server."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

from kvc_trt.serving.triton.config_schema import parsed


class Tensor:
    def __init__(self, name, array):
        self._name, self._array = name, array

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array


class Sender:
    """Keeps the responses that are sent."""

    def __init__(self):
        self.responses, self.done, self.gone = [], threading.Event(), False

    def send(self, response=None, flags=0):
        assert not self.done.is_set(), "nothing may come after the last response"
        if response is not None:
            self.responses.append(response)
        if flags:
            self.done.set()

    def is_cancelled(self):
        return self.gone


class Request:
    def __init__(self, tensors, parameters=None, timeout=0):
        self._tensors, self._parameters, self._timeout = tensors, parameters or {}, timeout
        self.sender = Sender()

    def is_cancelled(self):
        return self.sender.gone

    def inputs(self):
        return self._tensors

    def parameters(self):
        return json.dumps(self._parameters)

    def timeout(self):
        return self._timeout

    def get_response_sender(self):
        return self.sender


class Response:
    def __init__(self, output_tensors=(), error=None):
        self.outputs = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error


class Family:
    """Metrics by name and labels, of all families."""

    COUNTER, GAUGE = "counter", "gauge"

    def __init__(self, name, description, kind):
        self.name, self.kind, self.values = name, kind, {}
        FAMILIES[name] = self

    def Metric(self, labels):  # noqa: N802
        key = tuple(sorted(labels.items()))
        self.values.setdefault(key, 0)

        def increment(by):
            assert self.kind == self.COUNTER
            assert by > 0
            self.values[key] += by

        def set_to(value):
            assert self.kind == self.GAUGE
            self.values[key] = value

        return SimpleNamespace(increment=increment, set=set_to)


FAMILIES: dict[str, Family] = {}


class TritonError:
    INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = "invalid argument", "unavailable", "cancelled", "internal"

    def __init__(self, message, code):
        self.message, self.code = message, code


class TritonModelException(Exception):
    pass


def pb_utils(directory):
    """Return the module, for a model whose version directory is `directory`."""
    log = []
    return SimpleNamespace(
        Tensor=Tensor,
        InferenceResponse=Response,
        MetricFamily=Family,
        TritonError=TritonError,
        TritonModelException=TritonModelException,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        Logger=SimpleNamespace(log_error=log.append, lines=log),
        get_model_dir=lambda: str(directory),
    )


def model_arguments(directory):
    """Return the arguments that Triton passes to `initialize` of the exported model in `directory`."""
    config = parsed((directory / "config.pbtxt").read_text())
    parameters = {name: {"string_value": value.string_value} for name, value in config.parameters.items()}
    return {"model_config": json.dumps({"parameters": parameters}), "model_name": directory.name, "model_version": "1"}
