"""Published data sets, from small files as they are published: what becomes of them can be read and asked."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from kvc_trt.accuracy.pages.published import published_sets
from kvc_trt.cli.main import run
from kvc_trt.errors import InputError
from kvc_trt.tasks.own.published.ruler_qa import ruler_qa
from kvc_trt.tasks.own.published.source import filled, parameters
from kvc_trt.tasks.own.reader import DataFile, read_data_file
from kvc_trt.tasks.own.sets import tasks_of

CLASSES = ["Number of something", "Date"]


def lines(path: Path, *rows: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def longbench_line(dataset: str, **fields: object) -> dict[str, object]:
    return {
        "input": "Who?", "context": "A story {of} Ann.", "answers": ["Ann"], "length": 4, "dataset": dataset,
        "language": "en", "all_classes": None, "_id": "0", **fields,
    }  # fmt: skip


def converted(tmp_path: Path, *arguments: str) -> DataFile:
    file = tmp_path / "own.jsonl"
    assert run(["tasks", "convert", *arguments, "-o", str(file)]) == 0
    return read_data_file(file)


def test_longbench_has_its_prompts_lengths_and_scores(tmp_path):
    data = tmp_path / "longbench" / "data"
    lines(data / "narrativeqa.jsonl", longbench_line("narrativeqa"), longbench_line("narrativeqa", answers=["Bo", "B"]))
    lines(data / "trec.jsonl", longbench_line("trec", answers=["Date"], all_classes=CLASSES))
    lines(data / "lcc_e.jsonl", longbench_line("lcc_e", input="", context="def f():\n    x", answers=["    return 1"]))
    lines(data / "passage_retrieval_en.jsonl", longbench_line("passage_retrieval_en", answers=["Paragraph 3"]))
    found = converted(tmp_path, "longbench", str(tmp_path / "longbench"))
    assert {name: len(records) for name, records in found.sets.items()} == {
        "narrativeqa": 2, "trec": 1, "passage_retrieval_en": 1, "lcc_e": 1,
    }  # fmt: skip
    story = found.records[0]
    assert story.context.endswith("\n\nStory: A story {of} Ann.")
    assert story.question.startswith("\n\nNow, answer the question")
    assert story.question.endswith("Question: Who?\n\nAnswer:")
    assert (story.score, story.max_new_tokens, story.template) == ("f1", 128, True)
    code = found.sets["lcc_e"][0]
    assert code.context + code.question == "Please complete the code given below. \ndef f():\n    xNext line of code:\n"
    assert (code.question, code.template) == ("    xNext line of code:\n", False)
    kinds = found.sets["trec"][0]
    assert (kinds.classes, kinds.score) == (tuple(CLASSES), "classification:first-line")
    tasks = tasks_of(found)
    assert (tasks["trec"].first_line, tasks["narrativeqa"].scored_by, tasks["trec"].scored_by) == (
        True, "overlap", "answer",
    )  # fmt: skip
    assert tasks["trec"].score("\nDate\nQuestion:", ["Date"]) == 1


def test_every_set_of_longbench_is_known_and_can_be_compared_with_snapkv():
    known = parameters("longbench")
    assert len(known) == 21
    assert all("{context}" in rule["prompt"] for rule in known.values())
    assert {name for name, rule in known.items() if "{input}" not in rule["prompt"]} == {
        "gov_report", "multi_news", "vcsum", "passage_count", "lcc",
    }  # fmt: skip
    assert sum(rule["max_new_tokens"] for rule in known.values()) == 3168
    published = published_sets()
    assert set(published.names) <= set(known)
    assert len(published.names) == 16
    assert len(published.by_model) == 4
    for rows in published.by_model.values():
        assert len(rows) == 5
        assert all(len(scores) == 16 and all(0 <= one <= 100 for one in scores) for scores in rows.values())
    mistral = published.of("mistral-7b-v0.2")
    assert mistral["snapkv:prompt_budget=1024"][published.names.index("passage_retrieval_en")] == 88.56
    assert published.of("smollm2-135m-instruct") == {}


def test_ruler_hides_the_documents_that_answer_among_others(tmp_path):
    paragraphs = [
        {"context": f"Fact {i} of article one.", "qas": [
            {"question": f"What is fact {i}?", "id": str(i), "answers": [{"text": f"fact {i}", "answer_start": 0}],
             "is_impossible": False},
            {"question": "Impossible?", "id": f"no {i}", "answers": [], "is_impossible": True},
        ]} for i in range(3)
    ]  # fmt: skip
    other = {"title": "b", "paragraphs": [{"context": f"Other {i}.", "qas": paragraphs[0]["qas"]} for i in range(40)]}
    squad = {"version": "v2.0", "data": [{"title": "a", "paragraphs": paragraphs}, other]}
    hotpot = [{
        "_id": "5", "question": "Who?", "answer": "Ann", "type": "bridge", "level": "hard", "supporting_facts": [],
        "context": [["Ann", ["Ann is.", " She was."]], ["Bo", ["Bo is."]]],
    }]  # fmt: skip
    (tmp_path / "squad.json").write_text(json.dumps(squad))
    (tmp_path / "hotpotqa.json").write_text(json.dumps(hotpot))

    def words(text: str) -> list[int]:
        return [0] * len(text.split())

    def drawn(target: int, seed: int = 0) -> list[dict[str, object]]:
        return list(ruler_qa(tmp_path, encode=words, target_tokens=target, samples=2, seed=seed))

    first, second, third = drawn(200)
    assert [one["set"] for one in (first, second, third)] == ["qa-1", "qa-1", "qa-2"]
    assert first["answers"] == ["fact 0"]
    assert "Fact 0 of article one." in first["context"]
    assert "Fact 1 of article one." in first["context"]  # of the same article: before any other
    assert "Other " in first["context"]
    assert first["question"].endswith("Question: What is fact 0? Answer:")
    for one in (first, second):
        assert 190 <= len(words(one["context"] + one["question"])) + 32 <= 200
    assert third["context"].count("Document ") == 2
    assert "Ann\nAnn is. She was." in third["context"]
    assert drawn(200) == [first, second, third]
    assert drawn(200, seed=1) != [first, second, third]
    assert len(drawn(140)[0]["context"]) < len(first["context"])
    with pytest.raises(InputError, match="qa-1: the shortest prompt has"):
        drawn(40)


def test_scbench_asks_one_context_several_times(tmp_path):
    turns = [{"input": "Key a?", "answer": "1f"}, {"input": "Key b?", "answer": "2e"}]
    lines(tmp_path / "scbench_kv.jsonl", {"id": 0, "context": '{"a": "1f"}', "multi_turns": turns})
    options = ["red", "blue", "green", "white"]
    choice = [{"input": "Colour?", "answer": "blue", "options": options}]
    lines(tmp_path / "multi_turn_choice_eng.jsonl", {"id": 0, "context": "A book.", "multi_turns": choice})
    lines(tmp_path / "scbench_mf.jsonl", {"id": 0, "context": [3, 9], "multi_turns": [{"input": "Max?", "answer": 9}]})
    both = [
        {"input": "Find f", "answer": "def f(): ...", "task": "scbench_repoqa"},
        {"input": "Key a?", "answer": "1f", "task": "scbench_kv"},
    ]
    lines(tmp_path / "scbench_repoqa_and_kv.jsonl", {"id": 0, "context": "Code.", "multi_turns": both})
    found = converted(tmp_path, "scbench", str(tmp_path))
    assert list(found.sets) == ["kv", "choice_eng", "mf", "repoqa_and_kv-kv"]
    one, two = found.sets["kv"]
    assert one.context == two.context
    assert (one.question, one.answers, two.answers) == ("\n\nKey a?", ("1f",), ("2e",))
    (colour,) = found.sets["choice_eng"]
    assert colour.answers == ("B",)
    assert "\nB. blue\n" in colour.question
    assert found.sets["mf"][0].context == "[3, 9]"

    (tmp_path / "own.jsonl").unlink()
    told = converted(tmp_path, "scbench", str(tmp_path), "--history").sets
    first, second = told["kv"]
    assert [one["role"] for one in second.messages] == ["user", "assistant", "user"]
    assert second.messages[:2] == (first.messages[0], {"role": "assistant", "content": "1f"})
    assert second.messages[2]["content"] == "Key b?"
    assert told["repoqa_and_kv-kv"][0].messages[1]["content"] == "def f(): ..."


def test_csv_and_json_tables_of_texts_and_references_are_converted(tmp_path):
    rows = [{"id": "1", "article": "Long, long text.\nWith a line.", "highlights": "Short."}] * 2
    with (tmp_path / "cnn.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    (tmp_path / "cnn.json").write_text(json.dumps(rows))
    lines(tmp_path / "cnn.jsonl", *rows)
    asked = ["--context", "article", "--answers", "highlights", "--question", "Summary:", "--score", "rouge-2"]
    found = []
    for name in ("cnn.csv", "cnn.json", "cnn.jsonl"):
        found.append(converted(tmp_path, "pairs", str(tmp_path / name), *asked, "--force").records)
    assert found[0] == found[1] == found[2]
    one = found[0][0]
    assert (one.context, one.question) == (rows[0]["article"], "\n\nSummary:")
    assert (one.answers, one.score) == (("Short.",), "rouge-2")
    bare = ["--context", "article", "--question-column", "id", "--force"]
    assert converted(tmp_path, "pairs", str(tmp_path / "cnn.csv"), *bare).records[0].answers is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["longbench", "{tmp}/absent"], "is not a directory"),
        (["longbench", "{tmp}"], "has none of the data set's files: expected narrativeqa.jsonl"),
        (["longbench", "{tmp}/broken"], "qasper.jsonl line 2: missing key 'context'"),
        (["scbench", "{tmp}/broken"], "scbench_kv.jsonl line 1: not JSON"),
        (["pairs", "{tmp}/t.csv", "--context", "txt", "--question", "?"], "line 2: no 'txt'; did you mean 'text'?"),
        (["pairs", "{tmp}/t.csv", "--context", "text"], "--question or --question-column"),
        (["pairs", "{tmp}/t.csv", "--context", "text", "--question", "?", "--score", "f1"], "goes with --answers"),
        (["pairs", "{tmp}/t.csv", "--context", "text", "--question", "?", "--answers", "text", "--score",
          "classification"], "needs the list of all classes"),
        (["scbench", "{tmp}/twice"], "multi_turn_kv.jsonl and scbench_kv.jsonl are the same data set"),
        (["pairs", "{tmp}/empty.jsonl", "--context", "text", "--question", "?"], "the files hold no questions"),
    ],
)  # fmt: skip
def test_files_of_another_form_are_refused_and_nothing_is_written(tmp_path, capsys, arguments, says):
    broken = longbench_line("qasper")
    lines(tmp_path / "broken" / "qasper.jsonl", broken, {"input": "a", "answers": []})
    (tmp_path / "broken" / "scbench_kv.jsonl").write_text("{")
    for name in ("scbench_kv", "multi_turn_kv"):
        lines(tmp_path / "twice" / f"{name}.jsonl", {"context": "a", "multi_turns": [{"input": "b", "answer": "c"}]})
    (tmp_path / "t.csv").write_text("text\nabc\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    file = tmp_path / "own.jsonl"
    given = [one.replace("{tmp}", str(tmp_path)) for one in arguments]
    assert run(["tasks", "convert", *given, "-o", str(file)]) == 2
    assert says in capsys.readouterr().err
    assert not file.exists()


def test_a_filled_template_splits_right_after_the_context():
    assert filled("a {context}b", "x\ny", "") == {"context": "a x\n", "question": "yb"}
    assert filled("a {context}b", "xy", "") == {"context": "", "question": "a xyb"}
    assert filled("{context}\n{input}", "x", "q{}") == {"context": "x", "question": "\nq{}"}
