"""A tokenizer that fails at one token, as a stranger's can while an answer is written."""

from __future__ import annotations

from kvc_trt.errors import InputError


class ChokingTokenizer:
    """Its tokens are letters from U+4E00; `decode` fails where `bad` is among them."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def get_added_tokens_decoder(self):
        return {}

    def id_to_token(self, token_id):
        return chr(0x4E00 + token_id)

    def decode(self, ids, skip_special_tokens):
        if self.bad in ids:
            raise InputError("tokenizer.json: the tokenizer cannot write these tokens as text: index out of bounds")
        return "".join(map(self.id_to_token, ids))
