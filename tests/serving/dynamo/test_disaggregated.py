"""Prefill and decode in processes of their own, on loopback: equal answers from a compressed cache; processes die."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from kvc_trt import Sampling
from tests.serving.dynamo.served import LONG, Served, eventually
from tests.serving.http.in_process import InProcess
from tests.serving.transcript import COMPLETIONS, RECORD, REQUESTS, answer_of

pytestmark = [pytest.mark.dynamo, pytest.mark.slow]

ROLES = ("prefill", "decode")


class Apart:
    """A frontend, a prefill worker and a decode worker, each under a `kvc-trt serve` of its own."""

    def __init__(self, engine, store) -> None:
        self.engine, self.store = engine, store
        self.parts = {"frontend": Served("--role", "frontend", "--port", "0", "--store", str(store))}
        for role in ROLES:
            self.start(role)
        for role in ROLES:
            self.parts[role].until("worker is ready")
        self.client = self.parts["frontend"].client()
        eventually(self.works, 30)

    def start(self, role: str, key: str | None = None) -> Served:
        one = Served(str(self.engine), "--role", role, "--store", str(self.store), "--threads", "1")
        self.parts[key or role] = one
        return one

    def works(self) -> bool:
        return self.client.ask("/health")[0] == 200

    def worker(self, role: str):
        (found,) = self.parts[role].children("dynamo.worker")
        return found

    def count(self, name: str, component: str = "") -> float:
        text = self.client.ask("/metrics")[1]
        lines = [line for line in text.splitlines() if line.partition("{")[0] == f"kvc_trt_{name}"]
        return sum(float(line.rpartition(" ")[2]) for line in lines if f'dynamo_component="{component}' in line)

    def end(self) -> None:
        for one in reversed(self.parts.values()):
            assert one.end(signal.SIGINT) == 0


@pytest.fixture(scope="module")
def apart(demo_engine, tmp_path_factory):
    one = Apart(demo_engine, tmp_path_factory.mktemp("store"))
    yield one
    one.end()


def text_of(answer):
    return answer["choices"][0]["text"].strip()


def bytes_of(engine_path, prompt):
    from kvc_trt import Engine

    return Engine.open(engine_path, threads=1).context(prompt).nbytes


def test_an_answer_is_that_of_the_engine_alone_and_says_what_was_moved(apart, answers, needle, demo_engine):
    before = apart.count("handoffs_total", "prefill"), apart.count("handoffs_total", "decode")
    answer, alone = apart.client.complete("demo", needle, max_tokens=12), answers(needle, 12)
    assert text_of(answer) == alone.text
    assert answer["choices"][0]["finish_reason"] == alone.finish_reason
    assert answer["usage"]["prompt_tokens"] == len(needle)
    assert answer["usage"]["completion_tokens"] == len(alone.token_ids)
    kept = sum(alone.physical_lengths) / len(alone.physical_lengths)
    moved = bytes_of(demo_engine, needle)
    assert answer["choices"][0]["kvc"] == {
        "logical_tokens": alone.logical_length,
        "kept_tokens_per_cache": round(kept, 1),
        "moved_bytes": moved,
    }
    after = apart.count("handoffs_total", "prefill"), apart.count("handoffs_total", "decode")
    assert after == (before[0] + 1, before[1] + 1), "prefill ran, and decode did not read the prompt itself"


def test_nothing_listens_beyond_this_machine(apart):
    """NIXL listens too, so that others can read from here."""
    processes = [
        one
        for part in apart.parts.values()
        for one in (psutil.Process(part.process.pid), *psutil.Process(part.process.pid).children(recursive=True))
    ]
    listening = {
        one.laddr.ip for process in processes for one in process.net_connections("all") if one.status == "LISTEN"
    }
    assert len(processes) == 6
    assert listening
    assert listening <= {"127.0.0.1", "::1"}


def test_workers_that_wait_take_no_processor(apart):
    """NIXL's own thread would take half of one."""
    workers = [apart.worker(role) for role in ROLES]
    before = [sum(one.cpu_times()[:2]) for one in workers]
    time.sleep(2)
    assert all(sum(one.cpu_times()[:2]) - then < 0.5 for one, then in zip(workers, before, strict=True))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("role", ROLES)
def test_a_killed_worker_gives_its_clients_right_answers_or_errors(apart, answers, needle, role):
    """Killed among many requests, some of them being read, handed over or answered: right answers, or errors."""
    alone = answers(needle, 40, ignore_eos=True).text
    body = {"model": "demo", "prompt": needle, "max_tokens": 40, "ignore_eos": True}
    with ThreadPoolExecutor(12) as threads:
        asked = [threads.submit(apart.client.ask, "/v1/completions", body) for _ in range(12)]
        eventually(lambda: any(one.done() for one in asked))
        apart.worker(role).kill()
        found = [one.result() for one in asked]
    assert {status for status, _ in found} <= {200, 500, 503}
    assert all(text_of(answer) == alone for status, answer in found if status == 200)
    assert all(answer["error"]["type"] == "server_error" for status, answer in found if status != 200)
    eventually(apart.works, 60)
    assert text_of(apart.client.complete("demo", RECORD, max_tokens=8)) == "scarlet tiger lagos eight"
    eventually(lambda: apart.count("handoff_slots_held", "prefill") == 0, 40)


def test_streams_seeds_and_penalties_go_on_where_prefill_ended(apart, answers, needle):
    rules = {"temperature": 1.3, "top_k": 30, "seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.5}
    alone = answers(needle, 20, ignore_eos=True, sampling=Sampling(**rules))
    body = {"model": "demo", "prompt": needle, "max_tokens": 20, "ignore_eos": True, **rules}
    events = list(apart.client.stream("/v1/completions", body))
    assert "".join(event["choices"][0]["text"] for event in events).strip() == alone.text
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_many_requests_at_once_are_answered_as_each_alone(apart, answers, needle):
    prompts = [RECORD, needle, needle[:1] + needle[400:], RECORD.replace("lamp", "fork")] * 5
    alone = {str(prompt): answers(prompt, 10).text for prompt in prompts}
    with ThreadPoolExecutor(len(prompts)) as threads:
        asked = [threads.submit(apart.client.complete, "demo", prompt, max_tokens=10) for prompt in prompts]
        assert [text_of(one.result()) for one in asked] == [alone[str(prompt)] for prompt in prompts]
    eventually(lambda: apart.count("handoff_slots_held", "prefill") == 0)
    assert apart.count("handoffs_refused_total", "decode") == 0


def test_every_completion_has_the_light_servers_answer(apart, demo_engine):
    """Texts, counts, log-probabilities and refusals, but for the bytes that were moved."""
    asked = {kind: one for kind, one in REQUESTS.items() if one[0] == COMPLETIONS and one[1]["model"] == "demo"}
    with InProcess({"demo": demo_engine}) as light:
        alone = {kind: answer_of(light.client(), *one) for kind, one in asked.items()}
    found = {kind: without_moved(answer_of(apart.client, *one)) for kind, one in asked.items()}
    assert found == alone


def without_moved(found):
    if isinstance(found, dict):
        return {name: without_moved(value) for name, value in found.items() if name != "moved_bytes"}
    return type(found)(map(without_moved, found)) if isinstance(found, (list, tuple)) else found


def test_clients_cannot_bring_a_handoff(apart):
    made_up = {"disaggregated_params": {"kvc": {"version": 1, "address": 0, "tag": "0" * 32}}}
    body = {"model": "demo", "prompt": RECORD, "max_tokens": 4, "prefill_result": made_up}
    assert apart.client.ask("/v1/completions", body)[0] == 400


def test_clients_that_leave_free_their_rows_and_slots(apart, needle):
    body = {"model": "demo", "prompt": needle, "max_tokens": LONG, "ignore_eos": True, "stream": True}
    for wait in (0.0, 0.02, 0.2):
        connection = apart.client.open("/v1/completions", body)
        time.sleep(wait)
        connection.sock.close()
        connection.close()
    eventually(lambda: apart.count("running", "decode") + apart.count("running", "prefill") == 0)
    eventually(lambda: apart.count("handoff_slots_held", "prefill") == 0, 40)
    assert apart.works()


def test_prefill_that_is_killed_breaks_what_it_has_not_handed_over(apart, needle, answers):
    """Before the handoff: an error; after it: the answer goes on."""
    assert apart.parts["prefill"].end() == 0  # it was killed once; a third time within a minute is one too many
    apart.start("prefill").until("worker is ready")
    eventually(apart.works, 60)
    body = {"model": "demo", "prompt": needle, "max_tokens": 400, "ignore_eos": True, "stream": True}
    connection = apart.client.open("/v1/completions", body)
    answer = connection.getresponse()
    first = answer.readline()
    apart.worker("prefill").kill()
    whole = first + answer.read()
    connection.close()
    texts = [json.loads(line[6:]) for line in whole.split(b"\n") if line.startswith(b"data: {")]
    assert "".join(one["choices"][0]["text"] for one in texts).strip() == answers(needle, 400, ignore_eos=True).text
    eventually(apart.works, 60)
    apart.worker("prefill").kill()
    status, error = apart.client.ask("/v1/completions", {"model": "demo", "prompt": needle, "max_tokens": 4})
    assert status in (404, 500, 503), error
    eventually(apart.works, 60)
    assert any("is started again" in line for line in apart.parts["prefill"].lines)
    assert text_of(apart.client.complete("demo", RECORD, max_tokens=8)) == "scarlet tiger lagos eight"


def test_decode_that_is_killed_breaks_its_answers_and_leaks_nothing(apart, needle):
    body = {"model": "demo", "prompt": needle, "max_tokens": LONG, "ignore_eos": True, "stream": True}
    connection = apart.client.open("/v1/completions", body)
    answer = connection.getresponse()
    answer.readline()
    apart.worker("decode").kill()
    assert '"error":{"message"' in answer.read().decode()
    connection.close()
    eventually(apart.works, 60)
    assert text_of(apart.client.complete("demo", RECORD, max_tokens=8)) == "scarlet tiger lagos eight"
    eventually(lambda: apart.count("handoff_slots_held", "prefill") == 0, 40)


def test_a_second_decode_worker_reads_from_the_same_prefill(apart, answers, needle):
    apart.start("decode", "second").until("worker is ready")
    alone = answers(needle, 8).text
    eventually(lambda: apart.count("handoff_slots_free", "decode") > 8, 10)
    before = apart.count("handoffs_total", "decode")
    assert [text_of(apart.client.complete("demo", needle, max_tokens=8)) for _ in range(6)] == [alone] * 6
    assert apart.count("handoffs_total", "decode") == before + 6
    assert apart.parts.pop("second").end() == 0
    eventually(apart.works, 30)


def test_a_frontend_that_is_killed_finds_both_again(apart, needle):
    body = {"model": "demo", "prompt": needle, "max_tokens": LONG, "ignore_eos": True, "stream": True}
    connection = apart.client.open("/v1/completions", body)
    answer = connection.getresponse()
    answer.readline()
    (frontend,) = apart.parts["frontend"].children("dynamo.frontend")
    frontend.kill()
    assert "the frontend does not answer" in answer.read().decode()
    connection.close()
    eventually(apart.works, 60)
    eventually(lambda: apart.count("running", "decode") == 0)
    assert text_of(apart.client.complete("demo", RECORD, max_tokens=8)) == "scarlet tiger lagos eight"


@pytest.mark.exhaustive
def test_workers_of_another_engine_never_meet(apart, tmp_path):
    """Workers of another engine have another namespace, because the policy's settings differ."""
    from kvc_trt.cli.main import run

    other = tmp_path / "demo"
    arguments = ["--token-budget", "32", "--max-input-len", "1024", "--max-output-len", "512", "--no-verify"]
    assert run(["build", "--model", "retrieval-tiny", "--policy", "rocketkv", *arguments, "-o", str(other)]) == 0
    assert apart.parts["decode"].end(signal.SIGTERM) == 0
    one = Served(f"demo={other}", "--role", "decode", "--store", str(apart.store), "--threads", "1")
    one.until("worker is ready")
    status, _ = apart.client.ask("/v1/completions", {"model": "demo", "prompt": RECORD, "max_tokens": 4})
    assert status in (404, 500, 503), "there is no decode worker for what prefill makes"
    assert one.end() == 0
    apart.start("decode").until("worker is ready")
    eventually(apart.works, 60)
