"""The written repository is complete and movable, and nothing in a name can change its meaning."""

from __future__ import annotations

import re
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.backends.opening import open_engine
from kvc_trt.errors import InputError
from kvc_trt.serving.engine import ServingSettings
from kvc_trt.serving.fields import FIELDS
from kvc_trt.serving.triton.config import check_model_name
from kvc_trt.serving.triton.config_schema import config_text, new_config, parsed
from kvc_trt.serving.triton.repository import export_model
from kvc_trt.serving.triton.settings import ModelSettings, read_settings
from kvc_trt.serving.triton.tensors import OUTPUTS


@pytest.fixture(scope="module")
def exported(retrieval_engine, tmp_path_factory):
    return export_model(open_engine(retrieval_engine), tmp_path_factory.mktemp("triton") / "new" / "repo", "tiny")


def test_the_exported_configuration_is_complete(exported, retrieval_engine):
    config = parsed((exported / "config.pbtxt").read_text())
    assert (config.name, config.backend, config.max_batch_size) == ("tiny", "python", 1)
    assert config.model_transaction_policy.decoupled
    assert [one.name for one in config.input] == [*FIELDS, "openai_request"]
    assert all(one.optional for one in config.input), "the model itself says what is missing"
    assert [one.name for one in config.output] == list(OUTPUTS)
    assert config.parameters["engine_sha256"].string_value == open_engine(retrieval_engine).digest
    (warmup,) = config.model_warmup
    assert warmup.batch_size == 1, "Triton skips a sample without"
    assert set(warmup.inputs) == {path.name for path in (exported / "warmup").iterdir()}


def test_the_repository_holds_the_whole_engine_and_no_path(exported, retrieval_engine):
    assert open_engine(exported / "1" / "engine").digest == open_engine(retrieval_engine).digest
    for file in ("config.pbtxt", "1/model.py"):
        assert str(exported.parent.parent) not in (exported / file).read_text()


def test_a_moved_repository_is_the_same(exported, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(exported, moved)
    assert open_engine(moved / "1" / "engine").digest == open_engine(exported / "1" / "engine").digest


def test_the_model_file_is_short_and_imports_no_more_than_it_needs(exported):
    text = (exported / "1" / "model.py").read_text()
    assert len(text.splitlines()) < 40
    assert set(re.findall(r"^(?:from|import) (\S+)", text, re.MULTILINE)) == {
        "collections.abc", "typing", "triton_python_backend_utils", "kvc_trt.serving.triton.loading",
    }  # fmt: skip


def test_an_engine_without_a_tokenizer_is_asked_by_token_ids_first(tiny_engine, tmp_path):
    made = export_model(open_engine(tiny_engine), tmp_path / "repo", "tiny")
    assert {path.name for path in (made / "warmup").iterdir()} == {"input_ids", "max_tokens"}


def test_an_existing_model_is_not_replaced(exported, retrieval_engine):
    before = (exported / "config.pbtxt").read_bytes()
    with pytest.raises(InputError, match="exists and is not replaced"):
        export_model(open_engine(retrieval_engine), exported.parent, "tiny")
    assert (exported / "config.pbtxt").read_bytes() == before


def test_nothing_is_left_of_an_export_that_fails(retrieval_engine, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvc_trt.serving.triton.repository.place", full)
    with pytest.raises(OSError, match="No space"):
        export_model(open_engine(retrieval_engine), tmp_path, "tiny")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "a..b", ".hidden", "-x", 'a"b', "a\nb", "a{b", "ä", "a b", "x" * 129]
)
def test_a_name_that_could_be_something_else_is_refused(name):
    with pytest.raises(InputError, match="is not a name for a model"):
        check_model_name(name)


@given(st.text())
def test_a_name_that_is_taken_is_a_plain_directory(name):
    try:
        check_model_name(name)
    except InputError:
        return
    assert re.fullmatch(r"[A-Za-z0-9_.-]+", name)
    assert ".." not in name


@given(st.text(), st.text())
def test_values_cannot_add_to_the_configuration(name, value):
    """Quotes, newlines and braces are kept unchanged."""
    config = new_config()
    config.name = "x"
    config.parameters[name].string_value = value
    again = parsed(config_text(config))
    assert {key: one.string_value for key, one in again.parameters.items()} == {name: value}
    assert again.name == "x"


def test_text_that_no_export_has_written_is_refused():
    with pytest.raises(InputError, match=r"config\.pbtxt"):
        parsed("name: {")


def test_settings_survive_the_configuration():
    settings = ModelSettings("ab", ServingSettings(3, 7, 1 << 30, 12.5, 2, "onnxruntime", 1 << 20))
    parameters = {name: {"string_value": value} for name, value in settings.parameters().items()}
    assert read_settings({"parameters": parameters}) == settings
    assert ModelSettings("ab").parameters() == {"engine_sha256": "ab"}


@pytest.mark.parametrize("name", ["rows", "queue_limit", "memory_bytes", "prefill_slice_ms", "threads"])
def test_a_zero_is_written_and_read_as_zero(name):
    """A zero is none of these defaults, so it must not come back as one."""
    settings = ModelSettings("ab", ServingSettings(**{name: 0}))
    assert settings.parameters()[name] == "0"
    parameters = {key: {"string_value": value} for key, value in settings.parameters().items()}
    assert read_settings({"parameters": parameters}) == settings
