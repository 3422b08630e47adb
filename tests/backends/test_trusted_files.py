"""Files that kvc-trt executes must belong to the user or to root."""

from __future__ import annotations

import grp
import os
import pwd
from types import SimpleNamespace

import pytest

from kvc_trt.backends import trusted_files
from kvc_trt.backends.trusted_files import check_writers, has_others, untrusted
from kvc_trt.errors import UnsupportedEnvironment

ACCOUNTS = (("root", 0, 0), ("ann", 1000, 1000), ("bob", 1001, 100), ("cid", 1002, 100))
GROUPS = {
    0: [],
    100: [],
    1000: [],
    1003: ["ann"],
    1004: ["ann", "root"],
    1005: ["ann", "bob"],
    1006: ["from elsewhere"],
}


@pytest.fixture
def accounts(monkeypatch):
    """A system with these users and groups, and none for number 5000."""
    users = [SimpleNamespace(pw_name=name, pw_uid=user, pw_gid=group) for name, user, group in ACCOUNTS]
    groups = {number: SimpleNamespace(gr_mem=members) for number, members in GROUPS.items()}
    monkeypatch.setattr(pwd, "getpwall", lambda: users)
    monkeypatch.setattr(grp, "getgrgid", groups.__getitem__)


@pytest.mark.parametrize(
    ("group", "others"),
    [(1000, False), (1003, False), (1004, False), (5000, False), (0, False), (100, True), (1005, True), (1006, True)],
)
def test_a_group_of_the_user_alone_has_no_others(accounts, group, others):
    assert has_others(group, 1000) == others


@pytest.mark.parametrize("others", [False, True])
def test_a_file_that_its_group_may_write_is_trusted_if_the_group_has_no_others(tmp_path, monkeypatch, others):
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        os.chown(tmp_path, 1000, 1000)
    library = tmp_path / "libkvc.so"
    library.touch()
    os.chown(library, os.geteuid(), -1)
    library.chmod(0o664)
    monkeypatch.setattr(trusted_files, "has_others", lambda group, user: others)
    if not others:
        check_writers(library)
        return
    with pytest.raises(
        UnsupportedEnvironment, match=r"libkvc\.so can be written by a group; expected a library that nobody"
    ):
        check_writers(library)


@pytest.mark.parametrize(
    ("owner", "mode", "sticky", "problem"),
    [
        (1000, 0o755, False, None),
        (0, 0o755, False, None),
        (1000, 0o775, False, None),
        (0, 0o775, False, "can be written by a group"),
        (1001, 0o755, False, "belongs to user 1001"),
        (1000, 0o757, False, "can be written by everybody"),
        (0, 0o777, True, None),
    ],
)
def test_files_written_by_others_are_not_trusted(owner, mode, sticky, problem):
    assert untrusted(owner, mode, 1000, sticky=sticky) == problem
