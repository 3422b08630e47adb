from __future__ import annotations

import errno
import json
import os
import time

import pytest

from kvc_trt.engine import stages as module
from kvc_trt.engine.manifest import FileRecord, FinishedStage
from kvc_trt.engine.stages import Stages
from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.files.cache import cache_root
from tests.mutated_json import mutations, replaced

DIGEST = "0" * 64


def write(text):
    return lambda path: path.write_text(text)


def never(path):
    raise AssertionError("the stage was made again")


def entry():
    return cache_root() / "stages" / DIGEST


def test_a_finished_stage_is_kept_after_an_interruption():
    def interrupted(path):
        path.write_text("half")
        raise KeyboardInterrupt

    def build():
        with Stages.open(DIGEST) as stages:
            stages.run("weights", "w", write("heavy"))
            stages.run("prefill", "p", interrupted)

    with pytest.raises(KeyboardInterrupt):
        build()
    assert sorted(path.name for path in entry().iterdir()) == ["w", "weights.receipt.json"]
    with Stages.open(DIGEST) as stages:
        stages.run("weights", "w", never)
        stages.run("prefill", "p", write("graph"))
        assert stages.resumed == ["weights"]
        assert [receipt.name for receipt in stages.receipts] == ["weights", "prefill"]
        assert stages.receipts[0].files["w"].size == 5
        stages.discard()
    assert not entry().exists()


@pytest.mark.parametrize("damage", ["content", "size", "missing", "receipt", "no receipt"])
def test_a_damaged_stage_is_made_again(damage):
    with Stages.open(DIGEST) as stages:
        stages.run("weights", "w", write("heavy"))
    file, receipt = entry() / "w", entry() / "weights.receipt.json"
    if damage == "content":
        file.write_text("heavx")
    elif damage == "size":
        file.write_text("heavy!")
    elif damage == "missing":
        file.unlink()
    elif damage == "receipt":
        receipt.write_text('{"files": {"w": {"sha256": 3}}}')
    else:
        receipt.unlink()
    with Stages.open(DIGEST) as stages:
        stages.run("weights", "w", write("again"))
        assert stages.resumed == []
    assert file.read_text() == "again"


def test_a_receipt_with_any_value_replaced_is_made_again_or_whole():
    with Stages.open(DIGEST) as stages:
        stages.run("weights", "w", write("heavy"))
        honest = stages.receipts[0].model_dump()
    resumed = 0
    for path, value in list(mutations(honest))[::4]:
        (entry() / "weights.receipt.json").write_text(json.dumps(replaced(honest, path, value)))
        with Stages.open(DIGEST) as stages:
            stages.run("weights", "w", write("heavy"))
            receipt = stages.receipts[0]
            assert FinishedStage(**dict(receipt), resumed=False).files == {"w": FileRecord(**honest["files"]["w"])}
            assert (receipt.name, receipt.inputs) == ("weights", DIGEST)
            resumed += stages.resumed == ["weights"]
    assert 0 < resumed < 10  # another time, or another peak of memory


def test_a_failed_first_stage_leaves_nothing():
    def broken(path):
        path.write_text("half")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"), Stages.open(DIGEST) as stages:
        stages.run("weights", "w", broken)
    assert not entry().exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_reported(code):
    def full(path):
        path.write_text("half")
        raise OSError(code, os.strerror(code))

    with (
        pytest.raises(UnsupportedEnvironment, match="no space left while building weights"),
        Stages.open(DIGEST) as stages,
    ):
        stages.run("weights", "w", full)
    assert not entry().exists()


def test_a_second_build_of_the_same_inputs_is_refused_meanwhile():
    with Stages.open(DIGEST), pytest.raises(UnsupportedEnvironment, match="another process"), Stages.open(DIGEST):
        pass
    with Stages.open("1" * 64), Stages.open(DIGEST):
        pass


def test_old_entries_are_dropped_and_young_ones_kept():
    for digest, age in ((DIGEST, module.KEEP_SECONDS + 60), ("1" * 64, 60)):
        with Stages.open(digest) as stages:
            stages.run("weights", "w", write("heavy"))
        then = time.time() - age
        os.utime(stages.directory, (then, then))
    with Stages.open("2" * 64):
        pass
    assert sorted(path.name for path in (cache_root() / "stages").iterdir()) == ["1" * 64]


YEAR = 365 * 24 * 3600


@pytest.mark.parametrize("jump", [YEAR, -YEAR, 20 * YEAR])
def test_a_build_finds_its_stages_however_the_clock_jumps(monkeypatch, jump):
    with Stages.open(DIGEST) as stages:
        stages.run("weights", "w", write("heavy"))
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + jump)
    with Stages.open(DIGEST) as stages:
        stages.run("weights", "w", never)
        assert stages.receipts[0].seconds >= 0


def test_stages_dated_into_the_future_are_dropped_after_a_week(monkeypatch):
    with Stages.open(DIGEST) as stages:
        stages.run("weights", "w", write("heavy"))
    future = time.time() + 20 * YEAR
    os.utime(stages.directory, (future, future))
    with Stages.open("1" * 64):
        pass
    assert entry().exists()
    later = time.time() + module.KEEP_SECONDS + 60
    monkeypatch.setattr("time.time", lambda: later)
    with Stages.open("1" * 64):
        pass
    assert not entry().exists()
