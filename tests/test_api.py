"""The Python API: its guide and its docstrings run, its types are real, and it agrees with the command line."""

from __future__ import annotations

import doctest
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvc_trt
from kvc_trt import api
from kvc_trt.api import engine as api_engine
from kvc_trt.backends import host_memory
from kvc_trt.backends.opening import open_engine
from kvc_trt.cli.main import run
from kvc_trt.errors import BarePromptWarning, InputError, KvcError, UnsupportedEnvironment, VerificationFailed
from kvc_trt.models.sources.tokenizer import TOKENIZER_FILES
from kvc_trt.runtime import Request
from kvc_trt.verify.checks import Rung, at_most
from kvc_trt.verify.report import Report
from tests.readable_model import text

GUIDE = Path(__file__).parent.parent / "docs" / "python.md"
LAMP = "<record> lamp scarlet tiger lagos eight <query> lamp"
ANSWER = "scarlet tiger lagos eight"


@pytest.fixture(scope="module")
def retrieval(tmp_path_factory):
    """An engine of the shipped model, unverified."""
    path = tmp_path_factory.mktemp("api") / "engine"
    return kvc_trt.build("retrieval-tiny", token_budget=64, output=path, verify=False)


@pytest.fixture
def _small_copies(monkeypatch):
    """A profile measures the copy bandwidth twice; its figure is not what these tests are about."""
    monkeypatch.setattr(host_memory, "LEAST_BUFFER", 16 << 20)
    monkeypatch.setattr(host_memory, "LARGEST_BUFFER", 16 << 20)


def _runs(example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed: list[str] = []
    found = doctest.DocTestRunner(verbose=False).run(example, out=printed.append)
    assert found.attempted > 0
    assert found.failed == 0, "".join(printed)


def test_a_scheduler_refuses_what_its_memory_does_not_hold(retrieval):
    scheduler = retrieval.scheduler(memory_bytes=1000)
    with pytest.raises(InputError, match=r"a prompt of 20 tokens needs .* expected at most 1000 B"):
        scheduler.submit(Request([5] * 20))
    assert retrieval.scheduler(memory_bytes=1 << 30).submit(Request([5] * 20)).done is False


@pytest.mark.slow
@pytest.mark.as_users
@pytest.mark.usefixtures("_small_copies")
def test_the_guide_runs_from_beginning_to_end(tmp_path, monkeypatch):
    blocks = re.findall(r"^```pycon\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    example = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "docs/python.md", str(GUIDE), 0)
    _runs(example, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.as_users
@pytest.mark.usefixtures("_small_copies")
def test_the_readmes_five_lines_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    readme = (GUIDE.parent.parent / "README.md").read_text(encoding="utf-8")
    [code] = re.findall(r"^```python\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    lines = [line for line in code.splitlines() if line]
    assert (lines[0], len(lines)) == ("import kvc_trt", 6)
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("scarlet tiger lagos eight\nverify engines/demo")
    assert "PASSED in" in printed


DOCSTRINGS = [
    example for module in (api, api_engine) for example in doctest.DocTestFinder().find(module) if example.examples
]


@pytest.mark.parametrize("example", DOCSTRINGS, ids=lambda example: example.name)
def test_the_examples_of_the_docstrings_run(example, tmp_path, monkeypatch):
    _runs(example, tmp_path, monkeypatch)


def test_a_context_of_a_prompt_that_begins_with_a_shared_text_is_whole(retrieval):
    with kvc_trt.Engine.open(retrieval.path, threads=1, prefix_bytes=1 << 20) as engine:
        prefix = engine.context("<record> lamp scarlet tiger lagos eight")
        engine.share(prefix)
        context = engine.context(LAMP)
        assert context.logical_length == prefix.logical_length + 2
        assert engine.generate("", context=context).text == ANSWER
        assert engine.generate(LAMP).reused_tokens == prefix.logical_length


def test_a_context_of_two_prompts_is_refused(retrieval):
    with pytest.raises(InputError, match="a context is of one prompt, found a list of 2"):
        retrieval.context([LAMP, LAMP])


def test_an_engine_without_bytes_for_prefixes_refuses_to_share(retrieval):
    with pytest.raises(InputError, match="does not fit in 0 B") as caught:
        retrieval.share(retrieval.context(LAMP))
    assert caught.value.hint == "open the engine with more prefix_bytes"


def test_the_package_is_imported_light_and_knows_its_names():
    heavy = ("torch", "onnx", "onnxruntime", "numpy", "pydantic")
    code = f"import kvc_trt, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
    assert all(getattr(kvc_trt, name) is not None for name in kvc_trt.__all__)
    assert set(kvc_trt.__all__) <= set(dir(kvc_trt))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        kvc_trt.nonsense  # noqa: B018


@pytest.mark.parametrize("prompt", [LAMP, "ids", "array"])
def test_text_and_token_ids_are_answered_alike(prompt, retrieval):
    ids = retrieval.session().tokenizer.encode(LAMP).ids
    prompt = {"ids": ids, "array": np.array(ids)}.get(prompt, prompt)
    assert retrieval.generate(prompt).text == ANSWER


def test_a_batch_is_answered_in_its_order_whatever_its_kind(retrieval):
    ids = retrieval.session().tokenizer.encode(LAMP).ids
    other = LAMP.replace("scarlet", "golden")
    assert [output.text for output in retrieval.generate([other, LAMP])] == [
        ANSWER.replace("scarlet", "golden"),
        ANSWER,
    ]
    assert [output.text for output in retrieval.generate([ids])] == [ANSWER]
    assert [output.text for output in retrieval.generate(np.array([ids, ids]))] == [ANSWER, ANSWER]
    assert len(retrieval.generate([ids] * 9)) == 9  # more than rows


def test_answers_obey_their_rules(retrieval):
    assert retrieval.generate(LAMP, max_new_tokens=2).finish_reason == "length"
    assert retrieval.generate(LAMP, stop="tiger").text == "scarlet "
    seeded = [retrieval.generate(LAMP, sampling=kvc_trt.Sampling(temperature=5.0, seed=3)) for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert "scarlet" not in retrieval.generate(LAMP, bad_words="scarlet", max_new_tokens=4).text
    assert len(retrieval.generate(LAMP, min_tokens=9, max_new_tokens=9).token_ids) == 9
    assert len(retrieval.generate(LAMP, logprobs=3).logprobs[0].top) == 3
    for event in retrieval.stream(LAMP, logprobs=0):
        assert event.logprobs.logprob <= 0
        assert event.logprobs.top == ()
    assert retrieval.generate(LAMP, temperature=5.0, seed=3) == seeded[0]


@pytest.mark.parametrize(
    ("keyword", "meant"),
    [
        ("max_new_token", "max_new_tokens"),
        ("max_tokens", "max_new_tokens"),  # OpenAI's name
        ("stop_strings", "stop"),
        ("temperatur", "temperature"),
    ],
)
def test_an_unknown_keyword_names_the_nearest_rule(keyword, meant, retrieval):
    with pytest.raises(TypeError, match=f"unknown keyword '{keyword}'; did you mean '{meant}'\\?"):
        retrieval.generate(LAMP, **{keyword: 1})
    with pytest.raises(TypeError, match="unknown keyword 'x', expected one of max_new_tokens, temperature"):
        retrieval.generate(LAMP, x=1)


def test_sampling_and_its_parts_together_are_refused(retrieval):
    with pytest.raises(InputError, match="sampling and top_k are both given"):
        retrieval.generate(LAMP, sampling=kvc_trt.Sampling(temperature=1.0), top_k=3)


def test_a_stream_is_the_answer_in_pieces_and_ends_when_it_is_left(retrieval):
    pieces = list(retrieval.stream([LAMP, LAMP]))
    assert {event.row for event in pieces} == {0, 1}
    assert "".join(event.text for event in pieces if event.row == 1) == ANSWER
    assert [event.output.text for event in pieces if event.output] == [ANSWER, ANSWER]
    for _ in retrieval.stream(LAMP):
        break
    assert retrieval.generate(LAMP).text == ANSWER
    unfinished = retrieval.stream(LAMP)
    next(unfinished)
    with pytest.raises(InputError, match="generate needs an idle session") as busy:
        retrieval.generate(LAMP)
    assert "close the conversation" in busy.value.hint
    unfinished.close()
    assert retrieval.generate(LAMP).text == ANSWER


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "prompt is empty"),
        ([1, "x"], "token 1 is 'x'"),
        ([[1], [99999]], "prompt 1: token 0 is 99999"),
        ([1] * 3000, "expected at most 2048"),
        ([1.5, 2], "a prompt is 1.5, expected text or token ids"),
        (["lamp", b"lamp"], "a prompt is b'lamp', expected text or token ids"),
        (["lamp", None], "a prompt is None"),
        ("lamp \ud800", "the prompt is not valid Unicode: character 5 is half of one"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_runs(prompt, message, retrieval):
    with pytest.raises(InputError, match=message):
        retrieval.generate(prompt)


def test_an_engine_without_a_tokenizer_reads_token_ids_alone(tiny_engine):
    engine = kvc_trt.Engine.open(tiny_engine)
    with pytest.raises(InputError, match="has no tokenizer"):
        engine.generate("text")
    assert engine.generate([1, 5, 6], max_new_tokens=2).text is None


class TestChat:
    QUESTION = text(20, 21, 22)
    USER = {"role": "user", "content": QUESTION}  # noqa: RUF012
    ASKED = (3, 5, 20, 21, 22, 6)

    def test_chat_answers_a_question_a_conversation_and_a_batch(self, chat_engine):
        engine = kvc_trt.Engine.open(chat_engine)
        asked = [engine.chat(messages, max_new_tokens=2) for messages in (self.QUESTION, [self.USER], (self.USER,))]
        assert [output.prompt_token_ids for output in asked] == [self.ASKED] * 3
        assert asked[0] == engine.generate(list(self.ASKED), max_new_tokens=2)
        assert engine.chat_prompt(self.QUESTION, system=text(30)) == [3, 4, 30, *self.ASKED[1:]]
        batch = engine.chat([[self.USER], [self.USER, {"role": "assistant", "content": text(40)}]], max_new_tokens=2)
        assert [output.prompt_token_ids for output in batch] == [self.ASKED, (*self.ASKED, 40, 6)]

    def test_an_answer_comes_in_pieces(self, chat_engine):
        engine = kvc_trt.Engine.open(chat_engine)
        pieces = engine.stream(engine.chat_prompt(self.QUESTION), max_new_tokens=5, ignore_eos=True)
        expected = engine.chat(self.QUESTION, max_new_tokens=5, ignore_eos=True)
        assert "".join(piece.text for piece in pieces) == expected.text

    def test_invalid_conversations_are_refused_before_anything_is_loaded(self, chat_engine, retrieval, monkeypatch):
        engine = kvc_trt.Engine.open(chat_engine)
        monkeypatch.setattr(engine, "session", None)
        for messages, message in (
            ([], "messages: there is no message"),
            ("", "message 0: content of the user's message is empty"),
            (None, "messages: expected a list of messages, found None"),
            (5, "messages: expected a list of messages, found 5"),
            (self.USER, "messages: expected a list of messages, found {'role'"),
            ([[self.USER], []], "conversation 1: there is no message"),
            ([{"role": "robot", "content": "a"}], "role is 'robot'"),
            ([{"role": "tool", "content": "a"}], "refuses these messages: no tools here"),
        ):
            with pytest.raises(InputError, match=message):
                engine.chat(messages)
        with pytest.raises(InputError, match="has no chat template: its model came without one"):
            retrieval.chat("hello")

    def test_text_that_bypasses_the_template_is_warned_about(self, chat_engine, retrieval, recwarn):
        engine = kvc_trt.Engine.open(chat_engine)
        for ask in (engine.generate, engine.stream):
            with pytest.warns(BarePromptWarning, match="this prompt bypasses it: .* Engine.chat asks") as caught:
                ask(self.QUESTION, max_new_tokens=2)
            assert caught[0].filename == __file__
        assert not recwarn
        engine.generate(list(self.ASKED), max_new_tokens=2)
        engine.chat(self.QUESTION, max_new_tokens=2)
        retrieval.generate(LAMP)
        assert not recwarn

    def test_text_is_answered_although_the_template_cannot_be_read(self, chat_engine, monkeypatch):
        engine = kvc_trt.Engine.open(chat_engine)
        monkeypatch.setitem(TOKENIZER_FILES, "chat_template.jinja", 1)
        with pytest.warns(BarePromptWarning):
            assert engine.generate(self.QUESTION, max_new_tokens=2).token_ids


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"stop": 5}, "stop_strings is 5, expected texts"),
        ({"bad_words": [5]}, "bad_words is 5, expected texts"),
        ({"sampling": "greedy"}, "sampling is 'greedy', expected a Sampling"),
        ({"max_new_tokens": 1.5}, "max_new_tokens is 1.5, expected an integer"),
        ({"logprobs": True}, "logprobs is True, expected an integer"),
        ({"context": "x"}, "context is 'x', expected a Context"),
    ],
)
def test_rules_of_a_wrong_type_are_refused(rules, message, retrieval):
    with pytest.raises(InputError, match=message):
        retrieval.generate("lamp", **rules)


@pytest.mark.parametrize("prompts", [None, 5, {"text": "a"}, b"lamp", {"lamp"}, np.array(3)])
def test_invalid_prompts_are_refused(prompts, retrieval):
    with pytest.raises(InputError, match="prompts: expected text, token ids or a list of prompts, found"):
        retrieval.generate(prompts)


def test_another_backend_runs_an_engine_or_is_refused(retrieval):
    with kvc_trt.Engine.open(retrieval.path, backend="torch", threads=1) as engine:
        assert engine.generate(LAMP).text == ANSWER
    with pytest.raises(InputError, match="does not run on backend tensorrt") as caught:
        kvc_trt.Engine.open(retrieval.path, backend="tensorrt")
    assert "kvc-trt build --config ENGINE_DIR/config.json --backend tensorrt" in (caught.value.hint or "")


def test_a_build_is_the_command_lines(tmp_path, capfd):
    arguments = ["--model", "retrieval-tiny", "--token-budget", "64", "--set", "page_size=4"]
    assert run(["build", *arguments, "--no-verify", "-o", str(tmp_path / "cli")]) == 0
    capfd.readouterr()
    built = kvc_trt.build("retrieval-tiny", token_budget=64, page_size=4, output=tmp_path / "api", verify=False)
    assert built.directory.config == open_engine(tmp_path / "cli").config
    streams = capfd.readouterr()
    assert streams.out == streams.err == ""
    again = kvc_trt.build(config=tmp_path / "cli" / "config.json", output=tmp_path / "again", verify=False)
    assert again.directory.config == built.directory.config
    with pytest.raises(InputError, match="exists and is not replaced"):
        kvc_trt.build("retrieval-tiny", token_budget=32, output=tmp_path / "api", verify=False)
    replaced = kvc_trt.build("retrieval-tiny", token_budget=32, output=tmp_path / "api", verify=False, force=True)
    assert replaced.parameters.token_budget == 32


def test_a_build_that_fails_its_check_raises_and_leaves_the_engine(tmp_path, monkeypatch):
    about = {"backend": "onnxruntime", "seed": 0, "samples": 1, "steps": 1}
    wrong = Rung("logits", [at_most("max logit error", "1 row", 3.0, 1.0)])
    report = Report("engine", "quick", about, {}, rungs=[wrong])
    monkeypatch.setattr("kvc_trt.verify.ladder.verify", lambda engine, **asked: report)
    with pytest.raises(VerificationFailed, match="did not pass verification: logits: max logit error is 3"):
        kvc_trt.build("retrieval-tiny", token_budget=64, output=tmp_path / "engine")
    assert kvc_trt.Engine.open(tmp_path / "engine").generate(LAMP).text == ANSWER


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: kvc_trt.build(), InputError),
        (lambda: kvc_trt.build("no-such-model"), InputError),
        (lambda: kvc_trt.build("retrieval-tiny", backend="tensorrt"), UnsupportedEnvironment),
        (lambda: kvc_trt.plan("retrieval-tiny", policy="rocketkw"), InputError),
        (lambda: kvc_trt.plan("retrieval-tiny", compare=True, top_k=3), InputError),
        (lambda: kvc_trt.Engine.open("nowhere"), InputError),
    ],
)
def test_errors_have_the_types_of_the_command_line(call, error):
    with pytest.raises(error) as caught:
        call()
    assert isinstance(caught.value, KvcError)


@pytest.mark.slow
def test_accuracy_is_measured_of_an_engine_as_of_its_model(tmp_path):
    engine = kvc_trt.build("retrieval-text", token_budget=64, output=tmp_path / "engine", verify=False)
    asked = {"tasks": ["lines"], "lengths": [384], "modes": ["query-aware"], "samples": 2}
    own = engine.measure_accuracy(**asked, directory=tmp_path / "own", minimum_accuracy=0.5)
    assert own.passed
    assert (tmp_path / "own" / "report.html").is_file()
    model = kvc_trt.measure_accuracy(
        "retrieval-text", policies=["rocketkv"], budgets=[64], **asked, directory=tmp_path / "model"
    )
    assert [cell.mean for cell in model.cells] == [cell.mean for cell in own.cells]


def test_an_unknown_task_is_refused(retrieval):
    with pytest.raises(InputError, match="no-such-task"):
        retrieval.measure_accuracy(max_new_tokens={"no-such-task": 3})


def test_memory_may_be_a_number_of_bytes_or_text():
    asked = {"policy": "tova", "kv_cache": "auto"}
    assert kvc_trt.plan("llama3.1-8b", memory="64MiB", **asked) == kvc_trt.plan("llama3.1-8b", memory=64 << 20, **asked)
    for wrong in ("lots", "", 1.5, True):
        with pytest.raises(InputError, match="memory: expected a number of bytes, or a text such as '60MiB', found"):
            kvc_trt.plan("llama3.1-8b", memory=wrong, **asked)
        with pytest.raises(InputError, match="memory: expected a number of bytes, or a text such as '60MiB', found"):
            kvc_trt.tune("retrieval-tiny", "own.jsonl", wrong)


@pytest.mark.parametrize("name", ["rows", "samples", "max_new_tokens", "minutes", "max_step_ms"])
@pytest.mark.parametrize("value", ["3", 0, -1])
def test_invalid_numbers_of_tune_are_refused(name, value):
    with pytest.raises(InputError, match=f"{name}: expected (at least 1|more than 0), found '?{value}"):
        kvc_trt.tune("retrieval-tiny", "own.jsonl", "1MiB", **{name: value})


@pytest.mark.parametrize(
    ("call", "keyword", "meant"),
    [
        (lambda **asked: kvc_trt.tune("retrieval-tiny", "own.jsonl", "1MiB", **asked), "row", "rows"),
        (lambda **asked: kvc_trt.tune("retrieval-tiny", "own.jsonl", "1MiB", **asked), "weight", "weights"),
        (lambda **asked: kvc_trt.measure_accuracy("retrieval-tiny", **asked), "length", "lengths"),
    ],
    ids=("tune's field", "tune's own", "accuracy"),
)
def test_unknown_keywords_name_the_nearest(call, keyword, meant):
    with pytest.raises(TypeError, match=f"unknown keyword '{keyword}'; did you mean '{meant}'\\?"):
        call(**{keyword: 3})


def test_a_plan_is_the_command_lines(capfd):
    flags = ["--policy", "rocketkv", "--token-budget", "512"]
    for extra, compare in (([], False), (["--compare"], True)):
        assert run(["plan", "--model", "llama3.1-8b", *flags, *extra, "--json"]) == 0
        printed = json.loads(capfd.readouterr().out)
        planned = kvc_trt.plan("llama3.1-8b", policy="rocketkv", token_budget=512, compare=compare)
        assert json.loads(json.dumps(planned)) == printed


@pytest.mark.slow
def test_mypy_reads_the_types_of_the_api(tmp_path):
    """Reads what `make types` has left in mypy's cache; without it, all of the package's types are read anew."""
    source = tmp_path / "user.py"
    source.write_text(
        "import kvc_trt\n"
        "engine = kvc_trt.build('retrieval-tiny', token_budget=64)\n"
        "reveal_type(engine.generate('text'))\n"
        "reveal_type(engine.generate(['text']))\n"
        "reveal_type(engine.generate([[1, 2]]))\n"
        "reveal_type(kvc_trt.models.load_preset('x'))\n"
        "kvc_trt.nonsense\n"
    )
    command = [sys.executable, "-m", "mypy", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=GUIDE.parent.parent)
    revealed = re.findall(r'Revealed type is "([^"]+)"', done.stdout)
    assert [name.replace("builtins.", "") for name in revealed] == [
        "kvc_trt.runtime.request.Output",
        "list[kvc_trt.runtime.request.Output]",
        "list[kvc_trt.runtime.request.Output]",
        "kvc_trt.models.presets.Preset",
    ], done.stdout
    assert 'Module has no attribute "nonsense"' in done.stdout
