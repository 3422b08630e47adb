from __future__ import annotations

import hashlib
import json

import pytest
from tokenizers import Tokenizer, models

from kvc_trt.errors import InputError
from kvc_trt.tasks.kinds.key_value import UNKNOWN, WORDS
from kvc_trt.tasks.task import TaskSample
from kvc_trt.tasks.tokenizer import TaskTokenizer, load_task_tokenizer, unknown_id
from tests.tasks.conftest import byte_tokenizer, word_tokenizer


def sample(context: str, *answers: str) -> TaskSample:
    return TaskSample("any", 0, 0, context, " Which ?", answers)


def test_a_preset_with_a_shipped_checkpoint_has_a_tokenizer_and_positions():
    found = load_task_tokenizer("retrieval-tiny")
    assert found.vocabulary_size == len(WORDS)
    assert unknown_id(found.tokenizer) == UNKNOWN
    found.require_positions("any", found.positions)
    with pytest.raises(InputError, match=f"any: the target is {found.positions + 1} tokens, the model has"):
        found.require_positions("any", found.positions + 1)


def test_a_tokenizer_loads_from_a_file_or_a_directory_that_holds_one(byte_file, tmp_path):
    from_file = load_task_tokenizer(str(byte_file))
    assert from_file.encode("añ") == byte_tokenizer().encode("añ").ids
    assert from_file.fingerprint == hashlib.sha256(byte_file.read_bytes()).hexdigest()
    assert from_file.positions is None
    from_file.require_positions("any", 10**9)

    checkpoint = byte_file.parent
    (checkpoint / "config.json").write_text(json.dumps({"max_position_embeddings": 77}))
    assert load_task_tokenizer(str(checkpoint)).positions == 77

    engine = tmp_path / "engine"
    (engine / "tokenizer").mkdir(parents=True)
    (engine / "tokenizer" / "tokenizer.json").write_bytes(byte_file.read_bytes())
    (engine / "config.json").write_text(json.dumps({"pretrained_config": {"max_position_embeddings": 88}}))
    found = load_task_tokenizer(str(engine))
    assert (found.fingerprint, found.positions) == (from_file.fingerprint, 88)


def test_truncation_and_padding_of_the_file_do_not_shorten_a_prompt(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=99)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(load_task_tokenizer(str(tmp_path)).encode("twenty characters...")) == 20


def test_files_that_are_no_tokenizers_are_refused_by_name(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json is not a tokenizer"):
        load_task_tokenizer(str(tmp_path))
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match=r"none has no tokenizer\.json"):
        load_task_tokenizer(str(tmp_path / "none"))
    with pytest.raises(InputError, match=r"retrieval-tny is neither .* preset; did you mean 'retrieval-tiny'"):
        load_task_tokenizer("retrieval-tny")
    with pytest.raises(InputError, match=r"preset llama3\.1-8b ships no tokenizer"):
        load_task_tokenizer("llama3.1-8b")


def test_an_empty_vocabulary_is_refused(tmp_path):
    Tokenizer(models.BPE({}, [])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="has an empty vocabulary"):
        load_task_tokenizer(str(tmp_path))


def test_a_byte_tokenizer_can_spell_every_sample():
    TaskTokenizer(byte_tokenizer(), "").check_spelling(sample("The key is 123 .", "123", "The key"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("key", "is", "123", ".", "?", "Which"), "'The' is an unknown token"),
        (("The", "key", "is", ".", "?", "Which"), "'123' is an unknown token"),
        (("The", "key", "is", "123", ".", "Which"), "'?' is an unknown token"),
    ],
)
def test_an_unknown_word_anywhere_in_the_prompt_is_named(words, message):
    with pytest.raises(InputError, match="any: the tokenizer cannot spell this task: ") as caught:
        TaskTokenizer(word_tokenizer(*words), "").check_spelling(sample("The key is 123 .", "123"))
    assert message in caught.value.message


def test_an_answer_that_changes_in_decoding_is_refused():
    spaced = word_tokenizer("The", "key", "is", "12", "-", "3", ".", "?", "Which")
    with pytest.raises(InputError, match="the answer '12-3' comes back as '12 - 3'"):
        TaskTokenizer(spaced, "").check_spelling(sample("The key is 12-3.", "12-3"))
    dropping = Tokenizer(models.BPE({"x": 0}, []))  # without an unknown token, what is unknown disappears
    assert unknown_id(dropping) is None
    with pytest.raises(InputError, match="the answer 'abc' comes back as ''"):
        TaskTokenizer(dropping, "").check_spelling(sample("x", "abc"))


def test_the_unknown_token_of_a_unigram_model_is_found():
    assert unknown_id(Tokenizer(models.Unigram([("a", -1.0), ("?", -2.0)], unk_id=1))) == 1
