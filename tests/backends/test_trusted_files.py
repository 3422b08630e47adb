"""Files that kvc-trt executes must belong to the user or to root."""

from __future__ import annotations

import pytest

from kvc_trt.backends.trusted_files import untrusted


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
