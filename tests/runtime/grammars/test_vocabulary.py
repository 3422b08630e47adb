"""The bytes of tokens, for each kind of tokenizer that writes pieces of text; others are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import kvc_trt
from kvc_trt.errors import InputError
from kvc_trt.runtime import Grammar
from kvc_trt.runtime.grammar.compiler import Grammars
from kvc_trt.runtime.grammar.vocabulary import Vocabulary
from tests.runtime.grammars.byte_tokenizer import byte_tokenizer

CHECKPOINTS = Path(kvc_trt.__file__).parent / "models" / "checkpoints"
TEXTS = ("", "a", '{"a": [1, 2.5, true]}', "é☃你\n", "<end>", " x  y", "<call>")


def sentence_piece():
    """Return a tokenizer like Llama 2's: a space is part of the word that follows, and each byte has a token."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", *"abcdefg", "▁a", "▁b", "ab", "{", "}", '"']
    tokenizer = Tokenizer(
        models.BPE(
            {word: number for number, word in enumerate(words)},
            [("▁", "a"), ("▁", "b"), ("a", "b")],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<call>", normalized=False)])
    return tokenizer


@pytest.mark.parametrize("made", [byte_tokenizer, sentence_piece])
@pytest.mark.parametrize("text", TEXTS)
def test_tokens_write_the_text_that_they_are_of(made, text):
    tokenizer = made()
    vocabulary = Vocabulary(tokenizer, tokenizer.get_vocab_size())
    ids = vocabulary.encode(text)
    assert b"".join(vocabulary.tokens[token] for token in ids) == text.encode()
    assert not set(ids) & set(vocabulary.special)
    assert tokenizer.decode([tokenizer.token_to_id("a"), *ids]).removeprefix("a") == text


def test_a_word_after_another_has_no_space_of_its_own():
    tokenizer = sentence_piece()
    ids = Vocabulary(tokenizer, tokenizer.get_vocab_size()).encode("ab")
    assert [tokenizer.id_to_token(token) for token in ids] == ["ab"]


@pytest.mark.parametrize("made", [byte_tokenizer, sentence_piece])
@pytest.mark.parametrize("grammar", [Grammar.choice(["ab", "é☃"]), Grammar.json_schema({"enum": [{"é": [" a"]}]})])
def test_an_answer_is_written_token_by_token(made, grammar):
    tokenizer = made()
    matcher = Grammars(tokenizer, tokenizer.get_vocab_size() + 9).matcher(grammar, (), "row")
    ids = []
    while not matcher.is_complete:
        ids.append(int(matcher.allowed().nonzero()[0][-1]))
        matcher.advance(ids[-1])
    text = b"".join(Vocabulary(tokenizer, tokenizer.get_vocab_size()).tokens[token] for token in ids).decode()
    assert text.replace(" ", "").replace("\n", "") in ("ab", "é☃", '{"é":["a"]}')


def test_special_tokens_are_never_text():
    tokenizer = byte_tokenizer()
    matcher = Grammars(tokenizer, tokenizer.get_vocab_size()).matcher(Grammar.regex("<[a-z]+>"), (), "row")
    allowed = {tokenizer.id_to_token(int(token)) for token in matcher.allowed().nonzero()[0]}
    assert allowed == {"<", "<call>"}, "<end> is special, <call> is text that has a token of its own"


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ((CHECKPOINTS / "retrieval-tiny" / "tokenizer.json"), "has no decoder"),
        ((CHECKPOINTS / "retrieval-text" / "tokenizer.json"), "has no token for '!', so it cannot write JSON"),
    ],
    ids=["retrieval-tiny", "retrieval-text"],
)
def test_a_tokenizer_that_cannot_write_json_is_refused_by_name(tokenizer, message):
    found = Tokenizer.from_file(str(tokenizer))
    with pytest.raises(InputError, match=message):
        Grammars(found, found.get_vocab_size()).check(Grammar.json_object(), "prompt")


def test_a_decoder_that_joins_words_is_refused_by_name():
    found = Tokenizer(models.WordPiece({"a": 0, "##b": 1}, unk_token="a"))
    found.decoder = decoders.WordPiece()
    with pytest.raises(InputError, match="has the decoder 'WordPiece'"):
        Grammars(found, 2).check(Grammar.json_object(), "prompt")


def test_words_that_are_pieces_of_text_can_be_chosen():
    found = Tokenizer.from_file(str(CHECKPOINTS / "retrieval-text" / "tokenizer.json"))
    grammars = Grammars(found, found.get_vocab_size())
    grammars.check(Grammar.choice([" 0", " 1"]), "prompt")
    with pytest.raises(InputError, match="the list of choices lets an answer begin with no token of the tokenizer"):
        grammars.check(Grammar.choice(["☃"]), "prompt")
