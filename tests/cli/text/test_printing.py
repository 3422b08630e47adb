from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from kvc_trt import cli
from kvc_trt.cli.text.printing import answer_text, json_text, print_json, show

DOCUMENTS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('[]{} ,1\n"')
    | st.text(),
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


@settings(max_examples=30)
@given(DOCUMENTS)
def test_json_means_the_same_and_controls_no_terminal(value):
    for indent in (None, 2):
        text = json_text(value, indent=indent)
        assert json.loads(text) == value
        assert all(line.isprintable() for line in text.split("\n"))


def test_lines_for_people_control_no_terminal(capfd):
    show("first\x1b[2J\nsecond\u202e")
    show("third\x07", err=True)
    assert capfd.readouterr() == ("first\\x1b[2J\nsecond\\u202e\n", "third\\x07\n")


ANSWER = "a\tb\n\x1b[31m\x9bc\r\x00שלם\u200f 👩\u200d💻\x7f"


def test_an_answer_reaches_a_file_unchanged(monkeypatch):
    assert answer_text(ANSWER) == ANSWER


def test_an_answer_controls_no_terminal(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert answer_text(ANSWER) == "a\tb\n\\x1b[31m\\x9bc\\r\\x00שלם\u200f 👩\u200d💻\\x7f"


def test_only_the_printing_module_prints():
    """A line that is printed past `show` may control a terminal; answers and exported files are printed whole."""
    printing = {
        (path.name, line.strip())
        for path in Path(cli.__file__).parent.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"click\.(echo|secho)\(|\bprint\(|sys\.std(out|err)\.write\(", line)
    }
    allowed = {"printing.py", "main.py"}
    shown = re.compile(r"click\.echo\(\)|answer_text\(|json_text\(|== prompt|nl=False")
    assert [(name, line) for name, line in printing if name not in allowed and not shown.search(line)] == []
