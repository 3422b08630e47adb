"""`kvc-trt run --chat` on a terminal: typed lines, commands, Ctrl-C, and a document that is read once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from kvc_trt.cli.asking.commands import COMMANDS
from tests.cli.terminal import CTRL_C, CTRL_D, ENTER, SLOWLY, terminal
from tests.readable_model import text

ANSWER = ("--max-new-tokens", "12", "--ignore-eos")
FIRST, SECOND = text(20, 21, 22), text(23)


@pytest.fixture
def talk(chat_engine):
    def talked(*arguments):
        return terminal(SLOWLY, ["run", str(chat_engine), "--chat", *arguments])

    return talked


@pytest.mark.slow
def test_a_conversation_with_commands_and_an_answer_that_is_stopped(talk, tmp_path):
    document, saved = tmp_path / "log.txt", tmp_path / "saved.json"
    document.write_text(text(30, 31, 32) + "\n", encoding="utf-8")
    with talk("--document", str(document), "--max-new-tokens", "3", "--ignore-eos") as shown:
        shown.expect("/help lists the commands")
        shown.expect("the document ends after 7 tokens")
        shown.press(FIRST + ENTER)
        first = shown.expect("4 tokens read.*3 new .length.*]")
        shown.press("/clear" + ENTER)
        shown.expect("begins again, after the document")
        shown.press(FIRST + ENTER)
        again = shown.expect("4 tokens read.*3 new .length.*]")
        assert said(first) == said(again) != ""
        shown.press("/hlep" + ENTER)
        shown.expect("no such command '/hlep'; did you mean '/help'")
        shown.press("/help" + ENTER)
        for command in COMMANDS:
            shown.expect(command.name)
        shown.press(f"/save {saved}" + ENTER)
        shown.expect("2 messages")
        shown.press(f"/save {saved}" + ENTER)
        shown.expect("error: .* exists and is not replaced")
        shown.press("/save" + ENTER)
        shown.expect("/save: expected FILE after it, found nothing")
        shown.press(text(9) * 300 + ENTER)
        shown.expect("error: .*a turn of 30. tokens")
        shown.press(f"/system {text(40)}" + ENTER)
        shown.expect("the document ends after 9 tokens.*>")  # a key before the prompt is the terminal's own
        shown.press(CTRL_D)
        assert shown.ended() == 0
    question, answer = json.loads(saved.read_text(encoding="utf-8"))
    assert question == {"role": "user", "content": f"{text(30, 31, 32)}\n\n{FIRST}"}
    assert answer["content"] in first


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(talk):
    with talk(FIRST, *ANSWER) as shown:  # the first question is the command's
        shown.expect("[\u4e00-\u9fff]")
        shown.press(CTRL_C)
        shown.expect("6 tokens read.*new .interrupted.*]")
        shown.press(SECOND + ENTER)
        shown.expect(r"\[[45] tokens read.*>")  # its turn: the end of the answer so far, and the question
        shown.press("x" + CTRL_C)  # drops what was typed
        shown.press(CTRL_C)
        assert shown.ended() == 0


def test_sigterm_at_the_prompt_ends_it(talk):
    with talk() as shown:
        shown.expect("/help.*>")
        shown.process.send_signal(signal.SIGTERM)
        assert shown.ended() == 143


def test_piped_lines_are_all_questions_and_need_no_line_editor(chat_engine):
    program = "import sys; from kvc_trt.cli.main import run; run(sys.argv[1:]); print('prompt_toolkit' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program, "run", str(chat_engine), "--chat", "--json", "--max-new-tokens", "2"],
        input=f"{FIRST}\n/help\n", capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    *answers, imported = done.stdout.splitlines()
    assert [json.loads(line)["question"] for line in answers] == [FIRST, "/help"]
    assert imported == "False"


def said(shown: str) -> str:
    """Return the characters of the model's vocabulary that follow the question."""
    return shown.rpartition(FIRST)[2].partition("[")[0].strip()
