"""Questions of one's own under several policies: right answers, and faithfulness where none is known."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvc_trt.accuracy.cell import Cell
from kvc_trt.accuracy.draw import FileDraw
from kvc_trt.accuracy.grid import QuestionGroup, Variant
from kvc_trt.accuracy.pages.followed import followed
from kvc_trt.accuracy.pages.html_page import html_page
from kvc_trt.accuracy.pages.report import Bars
from kvc_trt.accuracy.questions import ModelVocabulary, Question, ask
from kvc_trt.cli.main import run
from kvc_trt.errors import InputError
from kvc_trt.progress import NullProgress
from kvc_trt.tasks.own.reader import read_data_file
from kvc_trt.tasks.tokenizer import load_task_tokenizer
from tests.accuracy.cells import SETTINGS, cell, report
from tests.accuracy.key_value import generate_key_value

POLICIES = ["--policies", "hybrid,tova", "--budgets", "32"]
MODEL = ["verify", "--level", "tasks", "--model", "retrieval-tiny", *POLICIES, "--modes", "query-aware"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three questions with answers, of different lengths, and three without."""
    encode = load_task_tokenizer("retrieval-tiny").encode
    path = tmp_path_factory.mktemp("data") / "own.jsonl"
    lines = []
    for index in range(6):
        one = generate_key_value(seed=0, index=index, target_tokens=120 + 8 * index, encode=encode)
        line = {"id": index, "context": one.context, "question": one.question, "max_new_tokens": 5}
        lines.append(line if index % 2 else {**line, "answers": list(one.answers), "score": "exact"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def asked(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a measurement of all six."""
    folder = tmp_path_factory.mktemp("asked")
    assert run([*MODEL, "--data", str(file), "--output-dir", str(folder), "-o", str(folder / "found.json")]) == 0
    return folder


def cells_of(folder: Path) -> dict[tuple[str, str], dict[str, object]]:
    found = json.loads((folder / "found.json").read_text())
    return {(one["task"], one["policy"]): one for one in found["cells"]}


def test_right_answers_are_scored_and_others_followed(file, asked):
    settings = json.loads((asked / "found.json").read_text())["settings"]
    assert (settings["data"], settings["data_sha256"]) == ("own.jsonl", read_data_file(file).digest)
    cells = cells_of(asked)
    assert {task for task, _ in cells} == {"own-exact", "own-unanswered"}
    full, hybrid = cells["own-exact", "full"], cells["own-exact", "hybrid"]
    assert (full["accuracy"], full["evidence"], full["samples"]) == (1.0, True, 3)
    assert full["length"] == hybrid["length"] == 164  # the longest prompt, its seam and its answer
    whole, other = cells["own-unanswered", "full"], cells["own-unanswered", "tova"]
    assert (whole["divergence"], whole["equal_tokens"], whole["first_differences"]) == (0.0, 1.0, [None] * 3)
    assert whole["row_bytes"] > other["row_bytes"] > 0
    assert other["divergence"] > 0
    assert other["divergence_low"] <= other["divergence"] <= other["divergence_high"]
    assert len(other["scores"]) == len(other["equal"]) == len(other["first_differences"]) == 3
    for share, first in zip(other["equal"], other["first_differences"], strict=True):
        assert (share == 1) == (first is None)
    page = (asked / "report.html").read_text()
    for name, value in (("samples", "all"), ("truncate", "none"), ("max new tokens", "the task&#39;s own")):
        assert f'<td class="text">{name}</td><td class="text">{value}</td>' in page
    assert "Faithfulness to the whole cache" in page
    assert "closest" in page
    rows = {(row["task"], row["policy"]): row for row in csv.DictReader((asked / "accuracy.csv").open())}
    assert float(rows["own-unanswered", "tova"]["divergence"]) == other["divergence"]
    assert rows["own-exact", "tova"]["divergence"] == ""


def test_a_second_run_asks_nothing_and_another_policy_follows_the_same_answers(file, asked, tmp_path, capsys):
    stored = asked / "results.jsonl"
    before = stored.read_bytes()
    again = [*MODEL, "--data", str(file), "--output-dir", str(asked)]
    assert run(again) == 0
    assert stored.read_bytes() == before
    text = capsys.readouterr().out
    assert "questions of own.jsonl (" in text
    assert "nats, 100.0 % equal" in text
    alone = tmp_path / "alone"
    only = ["--policies", "tova", "--tasks", "own-unanswered"]
    assert run([*again[:-2], *only, "--output-dir", str(alone), "-o", str(tmp_path / "found.json")]) == 0
    found = {one["policy"]: one for one in json.loads((tmp_path / "found.json").read_text())["cells"]}
    known = cells_of(asked)["own-unanswered", "tova"]
    assert found["tova"]["scores"] == known["scores"]


def test_a_changed_data_file_is_refused_in_an_old_output_directory(file, asked, tmp_path, capsys):
    changed = tmp_path / "own.jsonl"
    changed.write_text(file.read_text().replace('"id": 0', '"id": "zero"'))
    assert run([*MODEL, "--data", str(changed), "--output-dir", str(asked)]) == 2
    assert "holds results of other settings: data_sha256" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--lengths", "100"], "own.jsonl line 1: the prompt has 119 tokens, expected at most 95"),
        (["--lengths", "5"], "own-exact: an answer may have 5 tokens, which leaves no room for a prompt in 5"),
        (["--samples", "0"], "samples: expected at least 1, found 0"),
        (["--seed", "3"], "seed 3 goes with generated tasks"),
        (["--tasks", "own-exakt"], "has no set 'own-exakt'; did you mean 'own-exact'?"),
        (["--max-new-tokens", "own=3"], "has no set 'own'"),
        (["--framing", "chat"], "no chat template"),
        (["--modes", "stored-context", "--tasks", "own-unanswered"], "is not answered in words"),
    ],
)
def test_impossible_options_are_refused(file, tmp_path, capsys, arguments, says):
    request = [*MODEL, "--tasks", "own-exact", "--data", str(file), "--output-dir", str(tmp_path)]
    if "--tasks" in arguments:
        del request[request.index("--tasks") : request.index("--tasks") + 2]
    assert run([*request, *arguments]) == 2
    assert says in capsys.readouterr().err


def test_an_engine_is_asked_beside_its_twin_and_takes_no_longer_prompts(file, tmp_path, capsys):
    build = ["build", "--model", "retrieval-tiny", "--token-budget", "32", "--max-input-len", "160", "--no-verify"]
    assert run([*build, "--max-output-len", "16", "-o", str(tmp_path / "engine")]) == 0
    asked = ["verify", str(tmp_path / "engine"), "--level", "tasks", "--data", str(file), "--modes", "query-aware"]
    assert run([*asked, "--output-dir", str(tmp_path / "out")]) == 2
    assert "own.jsonl line 6: prompt and answer take 164 tokens" in capsys.readouterr().err
    found = tmp_path / "found.json"
    cut = [*asked, "--truncate", "middle", "--output-dir", str(tmp_path / "out"), "-o", str(found)]
    assert run(cut) == 0
    (record,) = json.loads((tmp_path / "engine" / "verification.json").read_text())["verifications"]
    assert (record["level"], record["samples"]) == ("tasks", 3)
    cells = json.loads(found.read_text())["cells"]
    assert [(one["task"], one["policy"], one["length"]) for one in cells] == [
        ("own-exact", "full", 160), ("own-exact", "rocketkv", 160),
        ("own-unanswered", "full", 160), ("own-unanswered", "rocketkv", 160),
    ]  # fmt: skip


def test_truncate_without_data_is_refused(tmp_path, capsys):
    assert run([*MODEL, "--truncate", "middle", "--output-dir", str(tmp_path)]) == 2
    assert "--truncate goes with --data" in capsys.readouterr().err


def test_long_prompts_are_cut_in_the_middle(file, tmp_path):
    cut = ["--truncate", "middle", "--lengths", "100", "--policies", "tova", "--tasks", "own-exact", "--samples", "2"]
    assert run([*MODEL, "--data", str(file), *cut, "--output-dir", str(tmp_path), "-o", str(tmp_path / "f.json")]) == 0
    found = json.loads((tmp_path / "f.json").read_text())
    assert (found["settings"]["truncate"], {one["samples"] for one in found["cells"]}) == ("middle", {2})


def test_a_set_is_asked_as_often_as_it_has_questions(file):
    draw = FileDraw(read_data_file(file), samples=2, max_new_tokens={"own-exact": 3})
    assert (draw.count_of("own-exact"), draw.answer_room("own-exact"), draw.answer_room("own-unanswered")) == (2, 3, 5)
    assert FileDraw(draw.data).count_of("own-exact") == 3
    with pytest.raises(InputError, match="has no set"):
        draw.task("passkey")


def test_an_answer_ends_at_its_own_limit_and_where_only_a_first_line_counts_with_it(tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    (tmp_path / "tokenizer.json").write_text(library.to_str())
    path = tmp_path / "own.jsonl"
    asked = {"context": "Ann is 7.", "question": " How old?", "answers": ["7"]}
    lines = [{**asked, "max_new_tokens": 9}, {**asked, "max_new_tokens": 2}, {**asked, "score": "f1:first-line"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    draw, vocabulary = FileDraw(read_data_file(path)), ModelVocabulary(load_task_tokenizer(str(tmp_path)), 256)

    def questions(name: str, mode: str) -> list[Question]:
        group = QuestionGroup(name, mode, 100)
        return ask(group, draw.data_set(group, vocabulary), vocabulary, draw.task(name)).flat

    def says(text: str) -> list[int]:
        return list(library.encode(text).ids)

    long, short = questions("own-f1", "query-aware")
    assert (long.is_answered(says("seven...")), long.is_answered(says("seven\n and"))) == (False, True)
    assert (short.is_answered(says("7")), short.is_answered(says("7 "))) == (False, True)
    (first,) = questions("own-f1:first-line", "query-agnostic")
    assert (first.is_answered(says("\n\n7")), first.is_answered(says("\n7\n"))) == (False, True)
    assert library.decode(first.prompt_ids) + library.decode(first.continuation_ids) == "Ann is 7. How old?"
    assert library.decode(long.prompt_ids) == "Ann is 7. How old?"
    (turn, _) = questions("own-f1", "stored-context")
    assert (library.decode(turn.turn_ids), turn.is_answered(says("a" * 9))) == (" How old?", True)


def test_a_conversation_for_a_model_without_a_template_is_refused(tmp_path, capsys):
    path = tmp_path / "own.jsonl"
    told = [{"role": "user", "content": "Who?"}]
    path.write_text(json.dumps({"context": "", "question": "lamp"}) + "\n" + json.dumps({"messages": told}) + "\n")
    assert run([*MODEL, "--data", str(path), "--output-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"{path} line 2: a conversation takes a chat template" in error
    assert "--framing chat" in error


class Notes(NullProgress):
    """Keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def test_truncated_prompts_are_reported(file):
    vocabulary, told = ModelVocabulary(load_task_tokenizer("retrieval-tiny"), 0), Notes()
    draw = FileDraw(read_data_file(file), truncate="middle")
    assert draw.length(["own-exact"], vocabulary, "plain", 140, told) == 140
    assert told.notes == ["1 of 3 prompts lose their middle: 140 tokens fit"]
    assert draw.length(["own-exact"], vocabulary, "plain", 999, told) == 156
    with pytest.raises(InputError, match="line 5: prompt and answer take 156 tokens"):
        replace(draw, truncate=None).length(["own-exact"], vocabulary, "plain", 140, told)


def following(policy: str, scores: tuple[float, ...], first: int | None = 4) -> Cell:
    one = cell(policy, None if policy == "full" else 64)
    equal = tuple(1.0 if score == 0 else 0.5 for score in scores)
    places = tuple(None if score == 0 else first for score in scores)
    return replace(
        one, scored_by="faithfulness", scores=scores, full_scores=(), depths=(), equal=equal, first_differences=places
    )


def test_the_report_names_caches_that_chance_may_explain():
    scores = tuple(0.1 + 0.01 * (i % 5) for i in range(20))
    cells = [
        following("full", (0.0,) * 20),
        following("tova", tuple(one + 0.2 for one in scores), first=2),
        following("hybrid", tuple(one + 0.001 * (-1) ** i for i, one in enumerate(scores))),
        following("rocketkv", scores),
    ]
    ((_, found),) = followed(report(cells=cells))
    assert found[0].behind is None
    by_policy = {one.variant.policy: one for one in found}
    assert by_policy["tova"].distinguishable
    assert by_policy["tova"].first_difference == 2
    assert by_policy["tova"].behind[0] == pytest.approx(0.2, abs=0.001)
    assert sum(one.distinguishable for one in found) == 1
    page = html_page(report(cells=cells), {}).decode()
    assert "less close" in page
    assert "not distinguishable" in page


def test_bars_do_not_judge_answers_without_a_known_right_one():
    cells = [following("full", (0.0,) * 20), following("tova", (0.1,) * 20)]
    (failure,) = report(cells=cells, bars=Bars(maximum_loss=0.1)).failures
    assert failure.endswith("or no answer is known to be right")
    assert report(cells=cells).passed


def test_a_cell_of_followed_answers_is_read_as_it_was_written():
    one = following("tova", (0.0, 0.5))
    stored = json.loads(json.dumps(one.to_json()))
    assert Cell.from_json(stored) == one
    assert one.figure.endswith("nats, 75.0 % equal")
    for broken in ({"equal": [1.0]}, {"first_differences": []}):
        with pytest.raises(InputError, match="not a cell of results"):
            Cell.from_json({**stored, **broken})


def test_answers_that_only_overlap_count_without_being_perfect():
    one = replace(cell("rocketkv", 64), scored_by="overlap", scores=(0.3,) * 20, full_scores=(0.4,) * 20)
    full = replace(cell("full"), scored_by="overlap", scores=(0.4,) * 20, full_scores=(0.4,) * 20)
    assert one.evidence
    assert one.on_answered is None
    assert one.lost.value == pytest.approx(0.1)
    found = report(cells=[full, one], bars=Bars(minimum_accuracy=0.8))
    assert found.average("query-aware", one.length, Variant("rocketkv", 64))[0].value == pytest.approx(0.3)
    assert found.failures == [f"rocketkv 64 on {one.group}: 75.0 % of the full cache's score, expected at least 80 %"]
    assert not report(cells=[full, one], bars=Bars(minimum_accuracy=0.7)).failures
    assert not replace(one, full_scores=(0.0,) * 20).evidence


def test_a_mean_over_sets_of_other_sizes_is_one_of_their_means():
    small = replace(cell("full", task="a"), scores=(1.0,) * 2, full_scores=(1.0,) * 2, depths=())
    large = replace(cell("full", task="b"), scores=(0.5,) * 16, full_scores=(1.0,) * 16, depths=())
    mean, count = report(cells=[small, large]).average("query-aware", small.length, Variant("full", None))
    assert (mean.value, count, mean.samples) == (0.75, 2, 18)


def test_snapkvs_table_is_shown_beside_its_data_sets():
    of = {"task": "qasper", "mode": "query-aware"}
    cells = [
        replace(cell("full", **of), scored_by="overlap"),
        replace(cell("snapkv:prompt_budget=1024", 64, 5, **of), scored_by="overlap"),
    ]
    page = html_page(report(settings={**SETTINGS, "model": "mistral-7b-v0.2"}, cells=cells), {}).decode()
    assert "SnapKV, arXiv 2404.14469" in page
    assert "29.51<small>here 25.0" in page
    assert "SnapKV, arXiv" not in html_page(report(cells=cells), {}).decode()
