"""The download code against a stub of the Hub on loopback; nothing here leaves the machine."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from kvc_trt.backends.opening import open_engine
from kvc_trt.cli.main import run
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.models.random_weights import RandomWeights
from kvc_trt.models.sources.checkpoint import Checkpoint
from kvc_trt.models.sources.hub import WAYS_OUT, fetch, stored_dtype, ways_out_of
from kvc_trt.models.sources.safetensors_file import TensorPlan, write_safetensors

pytest.importorskip("huggingface_hub")
COMMIT, OLD_COMMIT = "a" * 40, "b" * 40
REVISIONS = {"main": COMMIT, COMMIT: COMMIT, "v1": OLD_COMMIT, OLD_COMMIT: OLD_COMMIT}


class StubHub(ThreadingHTTPServer):
    """Serves `repositories[name][file]` for both commits; counts requests and remembers file names asked for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.counts: dict[str, object] = {}
        """Counts that the Hub gives of a repository's tensors."""
        self.downloaded: list[str] = []
        self.failing = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StubHub

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def answer(self, with_body: bool) -> None:
        status, headers, body = (500, {}, b"") if self.server.failing else self.find(with_body)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def find(self, with_body: bool) -> tuple[int, dict[str, str], bytes]:
        parts = urlsplit(self.path).path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            name, kind, revision = "/".join(parts[2:4]), parts[4], parts[5]
        else:
            name, kind, revision = "/".join(parts[:2]), parts[2], parts[3]
        if name == "org/gated":
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        files = self.server.repositories.get(name)
        if files is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        commit = REVISIONS.get(revision)
        if commit is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if kind == "revision":
            siblings = [{"rfilename": file} for file in files]
            info = {"id": name, "sha": commit, "siblings": siblings}
            if "expand=safetensors" in self.path:
                info["safetensors"] = self.server.counts.get(name)
            return 200, {}, json.dumps(info).encode()
        if kind == "tree":
            tree = [
                {"type": "file", "path": path, "size": len(content), "oid": f"{i:040d}"}
                for i, (path, content) in enumerate(files.items())
            ]
            return 200, {}, json.dumps(tree).encode()
        file = "/".join(parts[4:])
        if with_body:
            self.server.downloaded.append(file)
        return 200, {"ETag": f'"{list(files).index(file):040d}"', "X-Repo-Commit": commit}, files[file]

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch, tiny_config, tiny_fields):
    source = RandomWeights(tiny_config(), 0)
    weights = tmp_path / "weights"
    write_safetensors(
        weights, [TensorPlan(n, "float32", source.shape(n), lambda n=n: source.read(n)) for n in source.names()]
    )
    server = StubHub()
    server.repositories["org/model"] = {
        "config.json": json.dumps(tiny_fields()).encode(),
        "model.safetensors": weights.read_bytes(),
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "pytorch_model.bin": b"pickle",
        "evil.py": b"raise SystemExit",
        "README.md": b"text",
    }
    server.repositories["org/pickled"] = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)


def test_fetches_what_a_build_needs_and_says_which_commit_it_was(hub, tmp_path, tiny_config):
    directory, commit = fetch("org/model", cache_dir=tmp_path / "cache")
    assert commit == COMMIT
    tokenizer = ["tokenizer.json", "tokenizer_config.json"]
    assert sorted(hub.downloaded) == ["chat_template.jinja", "config.json", "model.safetensors", *tokenizer]
    checkpoint = Checkpoint(directory)
    assert checkpoint.config == tiny_config()
    expected = RandomWeights(tiny_config(), 0)
    np.testing.assert_array_equal(checkpoint.read("lm_head.weight"), expected.read("lm_head.weight"))
    assert len(checkpoint.tokenizer_files()) == 3


def test_a_revision_is_resolved_to_its_commit(hub, tmp_path):
    assert fetch("org/model", "v1", cache_dir=tmp_path / "cache")[1] == OLD_COMMIT
    assert fetch("org/model", OLD_COMMIT, cache_dir=tmp_path / "cache")[1] == OLD_COMMIT


def test_fetched_models_are_not_fetched_again_and_serve_offline(hub, tmp_path):
    first = fetch("org/model", cache_dir=tmp_path / "cache")
    count = len(hub.downloaded)
    assert fetch("org/model", cache_dir=tmp_path / "cache") == first
    hub.failing = True
    assert fetch("org/model", COMMIT, cache_dir=tmp_path / "cache") == first
    assert len(hub.downloaded) == count


@pytest.mark.parametrize(
    ("repo_id", "revision", "words"),
    [
        ("org/absent", None, "does not exist"),
        ("org/gated", None, "gated"),
        ("org/model", "v9", "no revision 'v9'"),
        ("org/pickled", None, "no safetensors"),
    ],
)
def test_unavailable_models_are_input_errors_with_a_way_out(hub, tmp_path, repo_id, revision, words):
    with pytest.raises(InputError, match=words) as caught:
        fetch(repo_id, revision, cache_dir=tmp_path / "cache")
    assert caught.value.hint == WAYS_OUT
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("repo_id", ["model", "a/b/c", "../model", "org/..", "org/mo del", "-x/y", "org/m\n", ""])
def test_names_that_are_no_repository_are_refused_before_any_request(repo_id):
    with pytest.raises(InputError, match="ORGANISATION/NAME"):
        fetch(repo_id)


@pytest.mark.parametrize("revision", ["", "-x", "a b", "ma\nin"])
def test_revisions_that_cannot_be_are_refused(revision):
    with pytest.raises(InputError, match="--revision"):
        fetch("org/model", revision)


def test_a_repository_id_can_be_planned_and_built(hub, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    del hub.repositories["org/model"]["tokenizer.json"]  # what the stub has there is none
    assert run(["plan", "--model", "org/model", "--token-budget", "32"]) == 0
    assert hub.downloaded == ["config.json"]
    build = ["build", "--model", "org/model", "--token-budget", "32", "--max-input-len", "64", "--max-output-len", "16"]
    assert run([*build, "--no-verify", "-o", "engine"]) == 0
    assert open_engine(tmp_path / "engine").manifest.checkpoint.commit == COMMIT
    capfd.readouterr()
    assert run(["build", "--config", "engine/config.json", "--no-verify", "-o", "engine"]) == 0
    assert "up to date" in capfd.readouterr().out


def counted(**parameters: object) -> dict[str, object]:
    return {"parameters": parameters, "total": 0}


@pytest.mark.parametrize(
    ("counts", "dtype"),
    [
        (counted(BF16=100, F32=40), "bfloat16"),
        (counted(BF16=100, F32=60), "float32"),
        (counted(U8=10_000, F16=1), "float16"),
        (counted(U8=10_000), None),
        (counted(BF16="many"), None),
        (counted(NEW=1, BF16=5), "bfloat16"),
        ({"parameters": 5, "total": 0}, None),
        ("text", None),
        (None, None),
    ],
)
def test_the_hub_says_the_type_of_most_floats_without_a_download(hub, counts, dtype):
    hub.counts["org/model"] = counts
    assert stored_dtype("org/model", COMMIT) == dtype
    assert stored_dtype("org/absent", COMMIT) is None
    hub.failing = True
    assert stored_dtype("org/model", COMMIT) is None
    assert hub.downloaded == []


def test_a_plan_of_a_repository_has_the_dtype_of_its_tensors(hub, tmp_path, monkeypatch, capfd, tiny_fields):
    """Once they are downloaded they say it themselves, whatever the Hub says."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    fields = {name: value for name, value in tiny_fields().items() if "dtype" not in name}
    hub.repositories["org/model"]["config.json"] = json.dumps(fields).encode()
    plan = ["plan", "--model", "org/model", "--token-budget", "32"]
    assumed = "fp32 weights are assumed: config.json states no dtype"
    for counts, weights in ((counted(BF16=100, F32=40), "bf16"), (None, "fp32")):
        hub.counts["org/model"] = counts
        assert run(plan) == 0
        printed = capfd.readouterr().out
        assert f"weights: {weights}, " in printed
        assert (assumed in printed) == (counts is None)
    for more in (["--memory", "1MiB"], ["--compare"]):
        assert run(["plan", "--model", "org/model", *more]) == 0
        assert assumed in capfd.readouterr().out
    assert run([*plan, "--weights", "fp32"]) == 0
    assert assumed not in capfd.readouterr().out
    assert hub.downloaded == ["config.json"]
    fetch("org/model")
    hub.counts["org/model"] = counted(BF16=100)
    assert run(plan) == 0
    assert "weights: fp32, " in (printed := capfd.readouterr().out)
    assert assumed not in printed


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        ("org/absent", 2, "org/absent does not exist on the Hub, or needs a login"),
        ("org/gated", 2, "org/gated is gated"),
        ("org/blocks", 2, "org/blocks holds no config.json"),
        ("org/failing", 3, "org/failing is not in the Hub's cache, and the Hub cannot be reached"),
    ],
)
def test_an_unavailable_repository_is_reported_with_the_next_command(
    hub, tmp_path, monkeypatch, capfd, model, code, words
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    hub.repositories["org/blocks"] = {"model.gguf": b"GGUF"}
    hub.failing = model == "org/failing"
    assert run(["build", "--model", model, "--no-verify", "-o", str(tmp_path / "engine")]) == code
    error, hint = [line for line in capfd.readouterr().err.splitlines() if line.startswith(("error", "hint"))]
    assert words in error
    assert hint.endswith("--model FILE.gguf") or hint == f"hint: {ways_out_of(model)}"
    assert not (tmp_path / "engine").exists()


def test_an_existing_path_is_never_taken_for_a_repository(hub, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert run(["build", "--model", "org/model", "--no-verify"]) == 2
    assert "config.json" in capfd.readouterr().err
    (tmp_path / "rnd.bin").write_bytes(b"\x07" * 64)
    assert run(["build", "--model", "rnd.bin", "--no-verify"]) == 2
    assert "rnd.bin" in (said := capfd.readouterr().err)
    assert "not a GGUF file" in said
    assert hub.downloaded == []


def test_a_hub_that_fails_names_both_ways_out(hub, tmp_path):
    hub.failing = True
    with pytest.raises(UnsupportedEnvironment, match="cannot be reached") as caught:
        fetch("org/model", cache_dir=tmp_path / "cache")
    assert "--checkpoint" in (caught.value.hint or "")
    assert "--random-weights" in (caught.value.hint or "")


def test_no_network_at_all_names_both_ways_out(tmp_path):
    """Runs in a process of its own, as HF_HUB_OFFLINE is read when the library is imported."""
    code = (
        "from kvc_trt.models.sources.hub import fetch\nfrom kvc_trt.errors import UnsupportedEnvironment\n"
        f"try:\n    fetch('org/model', cache_dir={str(tmp_path)!r})\n"
        "except UnsupportedEnvironment as error:\n    print(error.message, '|', error.hint)"
    )
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True,
        env={"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(root), "HOME": str(tmp_path), "PATH": ""},
    )  # fmt: skip
    assert "cannot be reached" in result.stdout
    assert "--checkpoint PATH" in result.stdout
    assert "--random-weights SEED" in result.stdout


def test_a_closed_port_is_answered_within_the_time_limit(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UnsupportedEnvironment, match="cannot be reached"):
        fetch("org/model", cache_dir=tmp_path / "cache")


def test_a_full_disk_is_not_taken_for_a_missing_network(tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(UnsupportedEnvironment, match=r"cannot be stored .*No space left"):
        fetch("org/model", cache_dir=tmp_path)
