"""The files for a cluster: their contents, and that Dynamo and Kubernetes read them as intended."""

from __future__ import annotations

import json
import subprocess

import pytest
import yaml

from kvc_trt.backends.opening import open_engine
from kvc_trt.cli.main import run
from kvc_trt.serving.dynamo.cluster import graph_deployment
from tests.serving.dynamo.served import PYTHON, require_environment


def test_the_directory_has_all_that_an_image_and_a_cluster_need(demo_engine, tmp_path, capsys):
    out = tmp_path / "cluster"
    assert run(["export", "dynamo", str(demo_engine), "-o", str(out), "--prefill", "2", "--decode", "3"]) == 0
    assert "not run on a cluster" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {"deployment.yaml", "Containerfile", "engine"}
    assert open_engine(out / "engine").digest == open_engine(demo_engine).digest
    found = yaml.safe_load((out / "deployment.yaml").read_text())
    assert found == graph_deployment("demo", "demo:latest", prefill=2, decode=3)
    assert "not run on a cluster" in (out / "deployment.yaml").read_text()
    containerfile = (out / "Containerfile").read_text()
    assert "COPY engine /engine" in containerfile
    assert "USER dynamo" in containerfile


def test_workers_are_started_with_options_that_they_take():
    """`python -m kvc_trt.serving.dynamo.worker` itself needs Dynamo; its options are in its text."""
    from tests.serving.dynamo.served import ROOT

    text = (ROOT / "kvc_trt" / "serving" / "dynamo" / "worker.py").read_text()
    for component in graph_deployment("demo", "i", prefill=1, decode=1)["spec"]["components"][1:]:
        arguments = component["podTemplate"]["spec"]["containers"][0]["args"]
        assert arguments[0] == "/engine"
        assert all(f'"{option}"' in text for option in arguments if option.startswith("--"))


@pytest.mark.parametrize("name", ["", "De mo", "a_b", "-a", "a" * 60, 'a"b', "a\nb", "{{a}}", "../a"])
def test_a_name_is_one_that_kubernetes_takes(demo_engine, tmp_path, name, capsys):
    assert run(["export", "dynamo", str(demo_engine), "-o", str(tmp_path / "out"), "--name", name]) == 2
    assert "cannot name a deployment" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_existing_directory_is_not_overwritten(demo_engine, tmp_path, capsys):
    assert run(["export", "dynamo", str(demo_engine), "-o", str(tmp_path)]) == 2
    assert "exists and is not replaced" in capsys.readouterr().err


def test_an_invalid_image_name_is_refused(demo_engine, tmp_path, capsys):
    arguments = ["export", "dynamo", str(demo_engine), "-o", str(tmp_path / "out"), "--image", "a b"]
    assert run(arguments) == 2
    assert "not the name of an image" in capsys.readouterr().err


READ_BY_DYNAMO = """
import json, pathlib, sys, types
import dynamo
from kubernetes.client import ApiClient
# The planner itself wants what it simulates with; of it this is but the reader of deployments.
planner = sys.modules["dynamo.planner"] = types.ModuleType("dynamo.planner")
planner.__path__ = [str(pathlib.Path(path) / "planner") for path in dynamo.__path__]
from dynamo.planner.monitoring import dgd_services as dynamo
from dynamo.profiler.utils.config import get_main_container_dict
found = json.load(sys.stdin)
components = dynamo.get_components_by_name(found)
client = ApiClient()
pods = {}
for name, component in components.items():
    pod = client._ApiClient__deserialize(component["podTemplate"], "V1PodTemplateSpec")
    pods[name] = client.sanitize_for_serialization(pod)
print(json.dumps({
    "roles": {name: dynamo.get_planner_component_role(one) for name, one in components.items()},
    "main": {name: get_main_container_dict(one) for name, one in components.items()},
    "replicas": {name: dynamo.Service(name=name, service=one).number_replicas() for name, one in components.items()},
    "pods": pods,
}))
"""


@pytest.mark.dynamo
@pytest.mark.slow
def test_dynamo_and_kubernetes_read_what_was_written():
    require_environment()
    deployment = graph_deployment("demo", "registry/demo:1", prefill=2, decode=3)
    read = subprocess.run(
        [str(PYTHON), "-c", READ_BY_DYNAMO], input=json.dumps(deployment), capture_output=True, text=True, check=True
    )
    found = json.loads(read.stdout.splitlines()[-1])
    components = {one["name"]: one for one in deployment["spec"]["components"]}
    assert found["roles"] == {"frontend": "", "prefill": "prefill", "decode": "decode"}
    assert found["replicas"] == {"frontend": 1, "prefill": 2, "decode": 3}
    for name, component in components.items():
        assert found["main"][name] == component["podTemplate"]["spec"]["containers"][0]
        assert found["pods"][name] == component["podTemplate"], "Kubernetes knows every field"
