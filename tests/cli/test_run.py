from __future__ import annotations

import json
import re

import pytest

from kvc_trt import Engine
from kvc_trt.cli.main import run
from tests.readable_model import text, with_tokenizer


@pytest.fixture(scope="module")
def engine(tiny_model, tmp_path_factory):
    """An engine that reads text, for tests that leave it as it is."""
    directory = tmp_path_factory.mktemp("run")
    model = with_tokenizer(tiny_model, directory / "model")
    limits = ("--token-budget", "32", "--max-input-len", "256", "--max-output-len", "32", "--no-verify")
    arguments = ["build", "--model", str(model), *limits]
    assert run([*arguments, "-o", str(directory / "engine")]) == 0
    return str(directory / "engine")


@pytest.fixture(scope="module")
def retrieval_engine(tmp_path_factory):
    """An engine whose vocabulary is some words."""
    directory = tmp_path_factory.mktemp("run") / "retrieval"
    assert run(["build", "--model", "retrieval-tiny", "--no-verify", "-o", str(directory)]) == 0
    return str(directory)


@pytest.fixture
def ids_file(tmp_path):
    def write(content):
        path = tmp_path / "ids.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


PROMPT = "".join(text(3 + i % 40) for i in range(200))


def answer(engine, *arguments, capfd):
    assert run(["run", engine, *arguments]) == 0
    return capfd.readouterr()


def outputs(engine, *arguments, capfd):
    printed = answer(engine, "--json", *arguments, capfd=capfd)
    return json.loads(printed.out)["outputs"]


def failure(engine, *arguments, capfd, code=2):
    capfd.readouterr()
    assert run(["run", engine, *arguments]) == code
    printed = capfd.readouterr()
    assert printed.out == ""
    return printed.err


def test_json_stands_alone_on_stdout(engine, capfd):
    printed = answer(engine, "--prompt", PROMPT, "--max-new-tokens", "5", "--ignore-eos", "--json", capfd=capfd)
    report = json.loads(printed.out)
    assert set(report) == {"outputs", "timings", "kernels"}
    [output] = report["outputs"]
    assert len(output["prompt_token_ids"]) == 200
    assert len(output["token_ids"]) == 5
    assert output["finish_reason"] == "length"
    assert output["cache"]["logical"] == 204
    physical = output["cache"]["physical"]
    assert len(physical) == 2
    assert all(length < 204 for length in physical)
    token = 2 * 2 * 16 * 4  # keys and values, two KV heads of 16, fp32
    assert output["cache"]["full_bytes"] == 204 * 2 * token
    bounds = output["cache"]["bytes"] - sum(physical) * token
    assert 0 < bounds < output["cache"]["bytes"] / 2
    assert report["timings"]["decode_runs"] == 4
    assert report["timings"]["prompt_tokens"] == 200


def test_run_prints_text_to_stdout_and_a_summary_to_stderr(engine, capfd):
    expected = outputs(engine, "--prompt", PROMPT, "--max-new-tokens", "6", "--ignore-eos", capfd=capfd)[0]
    printed = answer(engine, "--prompt", PROMPT, "--max-new-tokens", "6", "--ignore-eos", capfd=capfd)
    assert printed.out == expected["text"] + "\n"
    summary = printed.err.strip().splitlines()[-1]
    physical = expected["cache"]["physical"][0]
    start = f"200 prompt tokens | 6 new (length) | cache {physical} of 205 tokens per layer, "
    assert re.match(re.escape(start) + r"\d+\.\d KiB of \d+\.\d KiB \| prefill ", summary)
    assert summary.endswith("tokens/s")


def test_stream_prints_the_same_text(engine, capfd):
    arguments = ("--prompt", PROMPT, "--max-new-tokens", "9", "--ignore-eos")
    plain = answer(engine, *arguments, capfd=capfd)
    assert answer(engine, *arguments, "--stream", capfd=capfd).out == plain.out


def test_a_prompt_file_equals_its_text(engine, tmp_path, capfd):
    (tmp_path / "long.txt").write_text(PROMPT, encoding="utf-8")
    from_file = outputs(engine, "--prompt-file", str(tmp_path / "long.txt"), capfd=capfd)
    assert from_file == outputs(engine, "--prompt", PROMPT, capfd=capfd)


def test_a_batch_of_token_ids_equals_each_alone(engine, ids_file, capfd):
    batch = [[3, 4, 5], list(range(3, 43)) * 5, [7]]
    options = ("--max-new-tokens", "4", "--temperature", "0.9", "--seed", "3", "--top-k", "20", "--top-p", "0.9")
    together = outputs(engine, "--prompt-ids", ids_file(batch), *options, capfd=capfd)
    alone = [outputs(engine, "--prompt-ids", ids_file(ids), *options, capfd=capfd)[0] for ids in batch]
    assert [output["prompt_token_ids"] for output in together] == batch
    assert together == alone


def test_several_answers_are_told_apart(engine, ids_file, capfd):
    printed = answer(engine, "--prompt-ids", ids_file([[3], [4]]), "--max-new-tokens", "2", capfd=capfd)
    assert [line for line in printed.out.splitlines() if line.startswith("==")] == ["== prompt 0 ==", "== prompt 1 =="]


def test_stop_ends_before_the_text(engine, capfd):
    free = outputs(engine, "--prompt", PROMPT, "--max-new-tokens", "9", "--ignore-eos", capfd=capfd)[0]["text"]
    stop = free[3:6]
    [stopped] = outputs(engine, "--prompt", PROMPT, "--ignore-eos", "--stop", stop, capfd=capfd)
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == free[: free.index(stop)]


def test_penalties_and_bans_change_the_answer_and_logprobs_are_printed(engine, capfd):
    options = ("--prompt", PROMPT, "--max-new-tokens", "9", "--ignore-eos")
    [free] = outputs(engine, *options, "--logprobs", "2", capfd=capfd)
    assert [told["token_id"] for told in free["logprobs"]] == free["token_ids"]
    for told in free["logprobs"]:
        assert [told["token_id"], told["logprob"]] == list(told["top_logprobs"][0].values())
        assert len(told["top_logprobs"]) == 2
    [plain] = outputs(engine, *options, capfd=capfd)
    assert "logprobs" not in plain
    assert plain["token_ids"] == free["token_ids"]
    [banned] = outputs(engine, *options, "--bad-word", free["text"][0], capfd=capfd)
    assert free["text"][0] not in banned["text"]
    for penalty in ("--repetition-penalty", "50"), ("--presence-penalty", "2", "--frequency-penalty", "2"):
        [varied] = outputs(engine, *options, *penalty, capfd=capfd)
        assert len(set(varied["token_ids"])) >= len(set(free["token_ids"]))
    [least] = outputs(engine, *options, "--stop", free["text"][0], "--min-tokens", "4", capfd=capfd)
    assert len(least["token_ids"]) > 4
    [drawn] = outputs(engine, *options, "--temperature", "9", "--min-p", "1", "--seed", "1", capfd=capfd)
    assert drawn["token_ids"] == free["token_ids"]


def test_more_tokens_than_the_cache_holds_end_with_capacity(engine, ids_file, capfd):
    options = ("--prompt-ids", ids_file([3] * 256), "--max-new-tokens", "1000", "--ignore-eos")
    [output] = outputs(engine, *options, capfd=capfd)
    assert output["finish_reason"] == "capacity"
    assert len(output["token_ids"]) == 33
    assert output["cache"]["logical"] == 288


class TestWithoutTokenizer:
    def test_text_without_a_tokenizer_is_refused_with_an_alternative(self, tiny_engine, capfd):
        error = failure(str(tiny_engine), "--prompt", "hello", capfd=capfd)
        assert "has no tokenizer" in error
        assert "--prompt-ids" in error

    def test_token_ids_are_printed(self, tiny_engine, ids_file, capfd):
        arguments = ("--prompt-ids", ids_file([3, 4]), "--max-new-tokens", "3", "--ignore-eos")
        [output] = outputs(str(tiny_engine), *arguments, capfd=capfd)
        assert output["text"] is None
        expected = " ".join(map(str, output["token_ids"]))
        assert answer(str(tiny_engine), *arguments, capfd=capfd).out.strip() == expected
        assert answer(str(tiny_engine), *arguments, "--stream", capfd=capfd).out.strip() == expected

    def test_stop_strings_without_a_tokenizer_are_refused(self, tiny_engine, ids_file, capfd):
        error = failure(str(tiny_engine), "--prompt-ids", ids_file([3]), "--stop", "x", capfd=capfd)
        assert "stop strings need a tokenizer" in error


class TestBadInput:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("[1, 2", "is not valid JSON"),
            ('{"ids": [1]}', "expected a list of token ids, or a list of such lists"),
            ("[[1], 2]", "expected a list of token ids, or a list of such lists"),
            ("[1.5]", "token 0 is 1.5, expected an integer token id"),
            ("[true]", "token 0 is True"),
            ('["a"]', "token 0 is 'a'"),
            ("[3, 50]", "token 1 is 50, expected an id from 0 to 49"),
            ("[[3], [-1]]", "prompt 1: token 0 is -1"),
            ("[]", "prompt is empty, expected 1 to 256 tokens"),
            ("[[3], []]", "prompt 1 is empty"),
            (json.dumps([3] * 257), "prompt has 257 tokens, expected at most 256"),
            ("[" * 100_000, "is not valid JSON"),
        ],
    )
    def test_invalid_token_ids_are_refused(self, engine, ids_file, capfd, content, message):
        assert message in failure(engine, "--prompt-ids", ids_file(content), capfd=capfd)

    def test_invalid_prompts_are_refused(self, engine, tmp_path, capfd):
        assert "the prompt is empty" in failure(engine, "--prompt", "", capfd=capfd)
        assert "prompt has 400 tokens, expected at most 256" in failure(engine, "--prompt", PROMPT * 2, capfd=capfd)
        assert "cannot read" in failure(engine, "--prompt-file", str(tmp_path / "no"), capfd=capfd)
        assert "a directory; expected a regular" in failure(engine, "--prompt-file", str(tmp_path), capfd=capfd)
        (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
        error = failure(engine, "--prompt-file", str(tmp_path / "latin.txt"), capfd=capfd)
        assert "is not UTF-8 text: byte 2 is 0xef" in error

    @pytest.mark.parametrize(
        "arguments",
        [
            (),
            ("--prompt", "a", "--prompt-file", "b"),
            ("--prompt", "a", "--json", "--stream"),
            ("--prompt", "a", "--max-new-tokens", "0"),
            ("--prompt", "a", "--threads", "0"),
            ("--prompt", "a", "--temperature", "-1"),
            ("--prompt", "a", "--temperature", "nan"),
            ("--prompt", "a", "--top-p", "0"),
            ("--prompt", "a", "--top-k", "-1"),
            ("--prompt", "a", "--seed", "-1"),
            ("--prompt", "a", "--repetition-penalty", "0"),
            ("--prompt", "a", "--presence-penalty", "3"),
            ("--prompt", "a", "--frequency-penalty", "nan"),
            ("--prompt", "a", "--min-p", "2"),
            ("--prompt", "a", "--logprobs", "1"),
            ("--prompt", "a", "--logprobs", "99", "--json"),
            ("--prompt", PROMPT, "--min-tokens", "-1"),
            ("--prompt", PROMPT, "--min-tokens", "9", "--max-new-tokens", "8"),
            ("--prompt", PROMPT, "--bad-word", ""),
            ("--prompt", PROMPT, "--stop", ""),
        ],
    )
    def test_invalid_options_are_refused(self, engine, capfd, arguments):
        assert failure(engine, *arguments, capfd=capfd).startswith("error: ")

    def test_streaming_a_batch_is_refused(self, engine, ids_file, capfd):
        assert "one answer" in failure(engine, "--prompt-ids", ids_file([[3], [4]]), "--stream", capfd=capfd)

    def test_a_missing_engine_is_refused(self, tmp_path, capfd):
        assert "does not exist" in failure(str(tmp_path / "none"), "--prompt", "a", capfd=capfd)


def test_a_batch_read_in_slices_has_the_same_answers(engine, ids_file, capfd):
    """More prompts than rows, the later ones while the first are answered."""
    prompts = ids_file([[3 + (i * place) % 40 for place in range(1, 40 * i)] for i in range(1, 5)])
    options = ("--prompt-ids", prompts, "--max-new-tokens", "5", "--ignore-eos")
    together = outputs(engine, *options, capfd=capfd)
    assert outputs(engine, *options, "--prefill-slice-ms", "0.5", capfd=capfd) == together


@pytest.mark.parametrize("arguments", [("--prompt", "a", "--stream"), ("--chat",)])
def test_prefill_slices_without_a_batch_are_refused(engine, arguments, capfd):
    assert "--prefill-slice-ms goes with a batch" in failure(engine, *arguments, "--prefill-slice-ms", "5", capfd=capfd)


def test_a_proof_is_written_to_a_file_or_into_the_json(engine, tmp_path, ids_file, capfd):
    options = ("--prompt", PROMPT, "--max-new-tokens", "3", "--ignore-eos", "--kv-proof")
    file = tmp_path / "proof.json"
    answer(engine, *options, "lists", "-o", str(file), capfd=capfd)
    written = json.loads(file.read_text())
    assert written["kind"] == "lists"
    [output] = outputs(engine, *options, "digest", capfd=capfd)
    assert output["kv_proof"]["root"] == written["root"]
    assert output["kv_proof"]["answer_token_ids"] == output["token_ids"]
    batch = ("--prompt-ids", ids_file([[3] * 90, [4] * 70]), "--max-new-tokens", "2", "--kv-proof", "digest")
    together = outputs(engine, *batch, capfd=capfd)
    assert len({one["kv_proof"]["root"] for one in together}) == 2
    sliced = outputs(engine, *batch, "--prefill-slice-ms", "1", capfd=capfd)
    assert [one["kv_proof"] for one in sliced] == [one["kv_proof"] for one in together]
    assert "proof of one answer, found 2 prompts" in failure(engine, *batch, "-o", str(file), capfd=capfd)
    assert "is a directory" in failure(engine, *options, "digest", "-o", str(tmp_path), capfd=capfd)


def test_a_proof_of_a_conversation_is_refused(engine, tmp_path, capfd):
    said = failure(engine, "--chat", "--kv-proof", "digest", "-o", str(tmp_path / "proof.json"), capfd=capfd)
    assert "--kv-proof proves one answer: give the question with --chat TEXT" in said


@pytest.mark.parametrize("arguments", [("--kv-proof", "digest"), ("-o", "p.json"), ("-o", "p.json", "--json")])
def test_a_proof_needs_a_kind_and_a_place(engine, arguments, capfd):
    assert "--kv-proof goes with -o FILE or --json" in failure(engine, "--prompt", PROMPT, *arguments, capfd=capfd)


@pytest.fixture(scope="module")
def drafting_engine(tiny_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("drafts")
    model = with_tokenizer(tiny_model, directory / "model")
    limits = ("--token-budget", "32", "--max-input-len", "256", "--max-output-len", "32", "--no-verify")
    arguments = ["build", "--model", str(model), "--draft-tokens", "4", *limits]
    assert run([*arguments, "-o", str(directory / "engine")]) == 0
    return str(directory / "engine")


def test_speculating_gives_the_same_answer_and_says_what_it_did(drafting_engine, capfd):
    arguments = ("--prompt", PROMPT, "--max-new-tokens", "30", "--ignore-eos", "--json")
    plain, drafted = (
        json.loads(answer(drafting_engine, *arguments, *more, capfd=capfd).out)
        for more in ((), ("--speculate", "ngram:3"))
    )
    assert drafted["outputs"] == plain["outputs"]
    assert plain["timings"]["draft_runs"] == plain["timings"]["drafted_tokens"] == 0
    assert drafted["timings"]["accepted_tokens"] <= drafted["timings"]["drafted_tokens"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [("tokens", "expected ngram or ngram:TOKENS"), ("ngram:9", "drafts of 9 tokens, expected 1 to 4")],
)
def test_impossible_speculation_is_refused(drafting_engine, capfd, asked, message):
    assert message in failure(drafting_engine, "--prompt", PROMPT, "--speculate", asked, capfd=capfd)


def test_an_engine_without_drafts_says_how_to_build_it(engine, capfd):
    said = failure(engine, "--prompt", PROMPT, "--speculate", "ngram", capfd=capfd)
    assert "the engine has no draft graph" in said
    assert "--draft-tokens 4" in said


def test_a_tokenizer_that_panics_at_the_prompt_is_one_error(tiny_model, tmp_path, capfd):
    """A regular expression of its file backtracks until the library gives up, and gives up by a panic."""
    model = with_tokenizer(tiny_model, tmp_path / "model")
    file = model / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    endless = {"type": "Split", "pattern": {"Regex": f"({text(7)}+)+$"}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [endless, content["pre_tokenizer"]]}
    file.write_text(json.dumps(content))
    limits = ("--token-budget", "32", "--max-input-len", "256", "--max-output-len", "32", "--no-verify")
    assert run(["build", "--model", str(model), *limits, "-o", str(tmp_path / "engine")]) == 0
    said = failure(str(tmp_path / "engine"), "--prompt", text(*[7] * 30, 8), capfd=capfd)
    errors = [line for line in said.splitlines() if line.startswith(("error: ", "hint: "))]
    assert errors == [
        "error: tokenizer.json: the tokenizer cannot read this text: "
        "Onig: Regex search error: retry-limit-in-match over"
    ]
    assert "this is a bug" not in said
    assert outputs(str(tmp_path / "engine"), "--prompt", text(7, 8), "--max-new-tokens", "2", capfd=capfd)


def test_no_longer_engine_is_advised_than_the_model_allows(engine, ids_file, capfd):
    positions = Engine.open(engine).directory.model.max_position_embeddings
    hint = f"shorten it, or build the engine with --max-input-len {positions}"
    assert hint in failure(engine, "--prompt-ids", ids_file([3] * positions), capfd=capfd)
    hint = f"shorten it: no engine of this model takes more than {positions}"
    assert hint in failure(engine, "--prompt-ids", ids_file([3] * (positions + 1)), capfd=capfd)


def test_words_that_the_vocabulary_lacks_are_named_in_one_line(retrieval_engine, capfd):
    said = answer(retrieval_engine, "--prompt", "<record> lamp Where are Alice tiger Where", capfd=capfd).err
    (warning,) = [line for line in said.splitlines() if line.startswith("warning")]
    assert warning.startswith("warning: the model's vocabulary lacks 3 of the prompt's words, which it cannot read: ")
    assert warning.endswith("'Where', 'are', 'Alice'")
    assert "warning" not in answer(retrieval_engine, "--prompt", "<record> lamp tiger", capfd=capfd).err
