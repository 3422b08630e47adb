from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from kvc_trt.runtime.sampling.text import REPLACEMENT, Detokeniser

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, twice.",
    "  two spaces, then\ta tab\nand a line; don't can't won't",
    "Grüße aus Köln: naïve façade, 1,234.56 €",
    "日本語のテキストと漢字、そして仮名。",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 👍🏽 in between",
    "한국어 문장도 하나",
]
TEXTS = st.one_of(
    st.text(max_size=30),
    st.lists(st.sampled_from(SENTENCES), min_size=1, max_size=3).map(" ".join),
    st.text("aé日👍 \n", max_size=30),
)


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens(["ADDED"])
    return tokenizer


def byte_fallback():
    """Llama 2's decoder: spaces as a mark, unknown characters as bytes, one leading space stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [*"abcdefghijklmnopqrstuvwxyzT.,", "th", "▁th", "qu", "▁t", "▁q", "日", "é"]
    merges = [("t", "h"), ("▁", "th"), ("q", "u"), ("▁", "t"), ("▁", "q")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def metaspace_unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def word_level():
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "cat": 2, "sat": 3, "日本": 4}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def word_piece():
    pieces = ["[UNK]", "play", "##ing", "##ed", "a", "##b", ",", "!"]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


TOKENIZERS = {make.__name__: make() for make in (byte_level, byte_fallback, metaspace_unigram, word_level, word_piece)}
kinds = pytest.mark.parametrize("kind", TOKENIZERS)


def stream(tokenizer, ids):
    detokeniser = Detokeniser(tokenizer)
    return [*(detokeniser.push(token) for token in ids), detokeniser.flush()]


@kinds
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_the_stream_put_together_is_the_whole_text(kind, text):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text).ids
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@kinds
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_tokens_stream_to_the_text_of_the_whole(kind, data):
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=40))
    whole = tokenizer.decode(ids)
    if kind != "byte_fallback" or REPLACEMENT not in whole:
        assert "".join(stream(tokenizer, ids)) == whole


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0x61, 0x81, 0xE3, 0xF0, 0x9F]), max_size=80))
def test_broken_bytes_are_decoded_as_a_whole_would_be(broken):
    tokenizer = TOKENIZERS["byte_level"]
    alphabet = {byte: tokenizer.token_to_id(char) for byte, char in zip(range(256), _byte_characters(), strict=True)}
    ids = [alphabet[byte] for byte in broken]
    assert "".join(stream(tokenizer, ids)) == bytes(broken).decode("utf-8", errors="replace")


def _byte_characters():
    """Return the character for each byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@settings(max_examples=60, deadline=None)
@given(text=st.text("aé日👍", max_size=20))
def test_no_piece_shows_a_broken_character(kind, text):
    pieces = stream(TOKENIZERS[kind], TOKENIZERS[kind].encode(text).ids)
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_character_appears_with_its_last_byte():
    tokenizer = TOKENIZERS["byte_fallback"]
    ids = tokenizer.encode("a👍b").ids
    assert stream(tokenizer, ids) == ["", "a", "", "", "", "👍", "b", ""]


def test_special_tokens_between_words_lose_no_space():
    tokenizer = TOKENIZERS["byte_fallback"]
    end = tokenizer.token_to_id("</s>")
    ids = [tokenizer.token_to_id("▁th"), end, end, tokenizer.token_to_id("▁th")]
    assert "".join(stream(tokenizer, ids)) == "th th"


@pytest.mark.parametrize("token", ["a", "<0xE3>", "</s>"])
def test_the_work_per_token_does_not_grow(token):
    """Counts the tokens that are decoded, over long ordinary, broken and empty text."""
    decoded = []

    class Counting:
        def __init__(self, tokenizer):
            self._tokenizer = tokenizer

        def __getattr__(self, name):
            return getattr(self._tokenizer, name)

        def decode(self, ids, **options):
            decoded.append(len(ids))
            return self._tokenizer.decode(ids, **options)

    tokenizer = TOKENIZERS["byte_fallback"]
    stream(Counting(tokenizer), [tokenizer.token_to_id(token)] * 2000)
    assert max(decoded, default=0) <= 130
    assert sum(decoded) <= 2000 * 130
