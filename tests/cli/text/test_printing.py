from __future__ import annotations

import contextlib
import io
import json

from hypothesis import given
from hypothesis import strategies as st

from kvc_trt.cli.text.printing import print_json

DOCUMENTS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('[]{} ,1\n"'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("[] ,\n"), inner),
)


@given(DOCUMENTS)
def test_printed_json_is_the_same_document(document):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print_json(document)
    assert json.loads(printed.getvalue()) == document


def test_a_list_of_numbers_takes_one_line(capsys):
    print_json({"token_ids": [1, 2, 3], "text": "x [ 1, 2 ]"})
    assert capsys.readouterr().out == '{\n  "token_ids": [1, 2, 3],\n  "text": "x [ 1, 2 ]"\n}\n'
