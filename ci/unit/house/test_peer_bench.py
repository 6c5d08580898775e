"""The comparison with other engines: which rows count, and what is said to a worker, here one that computes nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ci.bench.peers.__main__ import measure
from ci.bench.peers.installation import Unavailable, model_of, python_of
from ci.bench.peers.peer import WORKERS, Contender, Peer
from ci.bench.peers.rows import Row, rate_of, show, summarise
from ci.bench.peers.worker_process import Answer, WorkerProcess, foreign_share
from ci.bench.workload import Job

FAKE = f"""
import sys
sys.path.insert(0, {str(WORKERS)!r})
from protocol import serve

def run(jobs):
    print("a library's own words")
    yield 0
    for job in jobs:
        assert job.prompt
        yield from [1] * job.max_tokens

serve(lambda: run)
"""


def _worker(tmp_path: Path, program: str) -> WorkerProcess:
    return WorkerProcess([sys.executable, "-c", program], tmp_path / "log")


def test_load_is_foreign_that_is_not_the_workers_own() -> None:
    assert foreign_share(busy=2.5, own=2.0, seconds=2.5, num_cores=2) == pytest.approx(0.1)
    assert foreign_share(busy=1.99, own=2.0, seconds=1.0, num_cores=2) == 0


def test_disturbed_rows_are_dropped_and_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row("ours", "decode", number, rate, foreign) for number, rate, foreign in ((1, 50, 0.01), (2, 10, 0.3))]
    rows.append(Row("theirs", "decode", 1, 20, 0.4))
    summary = summarise(rows, most_foreign=0.05)
    assert summary["ours"]["decode"] == {"rate": 50, "rows": 1, "dropped": 1, "foreign": 0.01}
    assert summary["theirs"]["decode"] == {"rate": None, "rows": 0, "dropped": 1, "foreign": 0.4}
    show(summary, {"absent": "no wheel [for this]"}, most_foreign=0.05)
    told = capsys.readouterr().out
    assert "2 rows were dropped" in told and "absent was not measured: no wheel [for this]" in told


def test_a_rate_is_of_the_tokens_that_the_case_is_about() -> None:
    answer = Answer(first=2.0, last=4.0, num_tokens=9, foreign=0.0)
    jobs = [Job([1] * 10, 9)]
    assert [rate_of(case, jobs, answer) for case in ("decode", "prefill", "batch")] == [4.0, 5.0, 2.25]


def test_a_worker_answers_each_list_of_jobs_and_ends_with_its_input(tmp_path: Path) -> None:
    worker = _worker(tmp_path, FAKE)
    worker.await_ready()
    for num_tokens in (3, 5):
        answer = worker.ask([Job([1, 2], num_tokens), Job([3], 1)])
        assert answer.num_tokens == num_tokens + 1 and 0 < answer.first <= answer.last
    worker.close()
    assert (tmp_path / "log").read_text() == "a library's own words\n" * 2


def test_an_engine_that_fails_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    workers = {"whole": _worker(tmp_path, FAKE), "short": _worker(tmp_path, FAKE.replace("job.max_tokens", "1"))}
    for worker in workers.values():
        worker.await_ready()
    unavailable: dict[str, str] = {}
    rows = measure(workers, 1, 2, unavailable)
    for worker in workers.values():
        worker.close()
    assert list(unavailable) == ["short"] and "tokens came where" in unavailable["short"]
    assert [(row.contender, row.case) for row in rows] == [("whole", case) for case in ("decode", "batch", "prefill")]


def test_a_worker_that_dies_says_with_which_code(tmp_path: Path) -> None:
    worker = _worker(tmp_path, "raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="code 3"):
        worker.await_ready()
    worker.close()


def test_a_peer_that_cannot_be_installed_or_converted_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ci.bench.peers.installation.LOCAL", tmp_path)
    monkeypatch.setattr("ci.bench.peers.installation.MODELS", tmp_path / "models")
    (tmp_path / "config.json").touch()
    broken = Peer("broken", worker="", formats=("any",), convert="none_convert.py", requirements=("not a requirement",))
    with pytest.raises(Unavailable, match=r"broken\.log"):
        python_of(broken, minutes=1)
    assert not (tmp_path / "broken" / "recipe.json").exists()
    with pytest.raises(Unavailable, match="No such file"):
        model_of(Contender(broken, "any"), Path(sys.executable), tmp_path, minutes=1)


@pytest.mark.parametrize("words", ["nobody:bf16", "llama.cpp:float32", "inflight:bfloat16:sse", "inflight"])
def test_an_unknown_engine_is_refused(words: str) -> None:
    with pytest.raises(ValueError, match="must be one of"):
        Contender.of(words)


def test_an_engine_is_written_as_it_is_read() -> None:
    for words in ("inflight:bfloat16:avx2", "llama.cpp:q4_0", "openvino-genai:int8"):
        assert str(Contender.of(words)) == words
