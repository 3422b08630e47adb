"""The options of a run are the keywords of `Engine.open`, with the same defaults."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

from kvc_trt import Engine
from kvc_trt.backends.run_options import RunOptions
from kvc_trt.errors import InputError

WRITTEN_OTHERWISE = {"speculate": "speculation"}
"""Keyword -> field, where callers write text that is parsed into an object."""


def test_every_option_is_a_keyword_of_engine_open():
    given = inspect.signature(Engine.open).parameters.values()
    keywords = {WRITTEN_OTHERWISE.get(one.name, one.name): one.default for one in given}
    own = {"path": inspect.Parameter.empty, "progress": None, "sealed": False}  # of opening, not of running
    assert keywords == {**own, **{one.name: one.default for one in fields(RunOptions)}}


def test_invalid_run_options_are_refused_when_the_engine_is_opened(tiny_engine):
    with pytest.raises(InputError, match="speculate is 'draft', expected ngram"):
        Engine.open(tiny_engine, speculate="draft")
    with pytest.raises(InputError, match="does not run on backend tensorrt-llm"):
        Engine.open(tiny_engine, backend="tensorrt-llm")
