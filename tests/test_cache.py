from __future__ import annotations

from pathlib import Path

import pytest

from kvc_trt.errors import UnsupportedEnvironment
from kvc_trt.files.cache import cache_root


def test_the_cache_directory_is_private_to_the_user():
    assert cache_root().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("problem", ["writable by others", "link", "file"])
def test_a_cache_that_is_not_ours_alone_is_refused(tmp_path, monkeypatch, problem):
    path = tmp_path / "cache"
    monkeypatch.setenv("KVC_TRT_CACHE", str(path))
    if problem == "writable by others":
        path.mkdir()
        path.chmod(0o777)
    elif problem == "link":
        (tmp_path / "real").mkdir()
        path.symlink_to(tmp_path / "real")
    else:
        path.write_text("x")
    with pytest.raises(UnsupportedEnvironment, match="cache"):
        cache_root()


def test_the_cache_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("KVC_TRT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "kvc-trt"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    for name in ("KVC_TRT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(UnsupportedEnvironment, match="no home directory") as raised:
        cache_root()
    assert "KVC_TRT_CACHE" in raised.value.hint
