"""kvc-trt: a deployment compiler for long-context LLMs with a compressed KV cache.

    import kvc_trt

    engine = kvc_trt.build("retrieval-tiny", policy="rocketkv", output="engines/demo")
    print(engine.generate("the code is 7 3 . what is the code ?").text)
    print(engine.verify().passed, engine.profile()["findings"])

Everything is imported when it is first used; docs/python.md is the guide.
"""

from typing import TYPE_CHECKING

from kvc_trt.lazy import lazy_names
from kvc_trt.version import __version__

if TYPE_CHECKING:
    from kvc_trt import errors, models, policies
    from kvc_trt.accuracy.request import AccuracyRequest
    from kvc_trt.api import Engine, build, measure_accuracy, plan, tune
    from kvc_trt.runtime import Event, Grammar, Output, Sampling
else:
    _MODULES = {
        **dict.fromkeys(("Engine", "build", "measure_accuracy", "plan", "tune"), "kvc_trt.api"),
        "AccuracyRequest": "kvc_trt.accuracy.request",
        **dict.fromkeys(("Event", "Grammar", "Output", "Sampling"), "kvc_trt.runtime"),
        **{name: f"kvc_trt.{name}" for name in ("errors", "models", "policies")},
    }
    __getattr__ = lazy_names(__name__, _MODULES)

__all__ = [
    "AccuracyRequest",
    "Engine",
    "Event",
    "Grammar",
    "Output",
    "Sampling",
    "__version__",
    "build",
    "errors",
    "measure_accuracy",
    "models",
    "plan",
    "policies",
    "tune",
]


def __dir__() -> list[str]:
    return sorted(__all__)
