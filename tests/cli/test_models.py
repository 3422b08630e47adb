"""`kvc-trt models`: what a build of each preset takes."""

from __future__ import annotations

import json

from kvc_trt.cli.main import run
from kvc_trt.config import BuildConfig
from kvc_trt.engine.resolution.model_choice import choose_model
from kvc_trt.engine.resolution.resolved_build import with_defaults


def test_the_default_policy_of_a_preset_is_what_a_build_of_its_name_alone_takes(capsys):
    assert run(["models", "--json"]) == 0
    said = {preset["name"]: preset["default_policy"] for preset in json.loads(capsys.readouterr().out)["models"]}
    assert said["smollm2-135m-instruct"] != said["llama3.1-8b"]
    for name, policy in said.items():
        assert with_defaults(BuildConfig(model=name), choose_model(name)).policy == policy
