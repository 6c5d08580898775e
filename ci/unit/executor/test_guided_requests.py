"""Requests with grammars on a whole engine in this process: every output parses, and nobody else notices them.

Run: pytest ci/unit/executor/test_guided_requests.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from guides import BOMBS, GUIDES, HEAVY, guide
from replays import replay_after

from inflight.config import EngineConfig
from inflight.errors import InvalidRequest, RequestTimedOut
from inflight.executor.front.generation_result import GenerationResult
from inflight.executor.generation_executor import GenerationExecutor
from inflight.executor.in_process import InProcessExecutor
from inflight.guided_decoding import GuideType
from inflight.result import FinishReason
from inflight.sampling_config import SamplingConfig
from inflight.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

CHECKPOINT = Path(__file__).parents[3] / "model_repository/llm/1/checkpoint"
END = 2
PROMPTS = [[1, 20, 30], list(range(40, 90)), [7, 8]]
TOKENIZER = Tokenizer.load(CHECKPOINT)
WORDY = [[i] for i in range(7, 2048) if not set(TOKENIZER.token(i) or "x") <= set('{}[]":,.0123456789') or i > 106]
"""All but single signs. Otherwise a model that has never seen JSON fills the first string with stories."""


def load(**parameters: str) -> GenerationExecutor:
    config = EngineConfig.from_parameters(
        {
            "gpt_model_path": str(CHECKPOINT),
            "cpu_compile": "false",
            "dtype": "float32",
            "num_threads": "1",
            "max_batch_size": "8",
            "max_num_tokens": "32",
            "max_tokens_in_paged_kv_cache": "1024",
            "tokens_per_block": "8",
            **parameters,
        }
    )
    return GenerationExecutor(InProcessExecutor(config))


@pytest.fixture(scope="module")
def service() -> Iterator[GenerationExecutor]:
    with load() as service:
        yield service


def start(service: GenerationExecutor, seed: int, name: str = "", **options: Any) -> GenerationResult:
    """`name`: of a guide; "" = none. Seed 0 is greedy."""
    if name:
        options = {"guided_decoding_params": GUIDES[name][0], **options}
    if name == "json":
        options = {"bad_words": WORDY, **options}
    sampling = SamplingConfig(temperature=1.0 if seed else 0.0, seed=seed)
    options = {"max_tokens": 250, "end_ids": [END], "sampling_config": sampling, **options}
    return service.generate_async(PROMPTS[seed % 3], **options)


def text(tokens: list[int] | tuple[int, ...]) -> str:
    return str(TOKENIZER.join([TOKENIZER.token(token) for token in tokens if token != END]))


def check(name: str, result: GenerationResult) -> bool:
    """Whether it came to its end; then it must parse."""
    output = result.result(timeout=240)
    if output.finish_reason is FinishReason.LENGTH:
        return False
    assert output.finish_reason is FinishReason.END_ID and output.token_ids[-1] == END
    assert GUIDES[name][1](text(output.token_ids)), text(output.token_ids)
    return True


@pytest.mark.parametrize("name", GUIDES)
def test_every_output_parses(service: GenerationExecutor, name: str) -> None:
    results = [start(service, seed, name) for seed in range(16)]
    assert sum(check(name, result) for result in results) >= (8 if name == "json" else 12)


def test_free_rows_beside_guided_ones_get_the_tokens_that_they_get_alone(service: GenerationExecutor) -> None:
    free = [start(service, seed, max_tokens=60).result(timeout=240).token_ids for seed in range(4)]
    guided = {name: start(service, 3, name).result(timeout=240).token_ids for name in GUIDES}
    mixed = [start(service, seed, max_tokens=60) for seed in range(4)]
    beside = {name: start(service, 3, name) for name in GUIDES}
    assert [result.result(timeout=240).token_ids for result in mixed] == free
    assert {name: result.result(timeout=240).token_ids for name, result in beside.items()} == guided


def test_pauses_change_no_token(service: GenerationExecutor) -> None:
    """Room for two or three sequences at their full length, so that the others are paused again and again."""
    expected = [start(service, seed, "json_schema").result(timeout=240).token_ids for seed in range(8)]
    with load(batch_scheduler_policy="max_utilization", max_tokens_in_paged_kv_cache="336") as short:
        results = [start(short, seed, "json_schema") for seed in range(8)]
        assert [result.result(timeout=240).token_ids for result in results] == expected


@pytest.mark.parametrize("name", GUIDES)
def test_a_replay_goes_on_with_the_same_tokens(service: GenerationExecutor, name: str) -> None:
    whole = start(service, 5, name).result(timeout=240).token_ids
    for cut in {1, len(whole) // 2, len(whole) - 1}:
        rest = start(service, 5, name, replay=replay_after(whole[:cut]))
        assert tuple(rest.result(timeout=240).token_ids) == tuple(whole[cut:])


def test_an_output_that_max_tokens_cuts(service: GenerationExecutor) -> None:
    output = start(service, 2, "json", max_tokens=4).result(timeout=240)
    assert output.finish_reason is FinishReason.LENGTH and len(output.token_ids) == 4
    assert text(output.token_ids).lstrip().startswith("{")


def test_the_grammar_wins_over_words_that_leave_it_nothing(service: GenerationExecutor) -> None:
    """Every token that holds a digit is forbidden, which the expression cannot do without."""
    digits = [[i] for i in range(7, 2048) if any(c.isdigit() for c in TOKENIZER.token(i) or "")]
    results = [start(service, seed, "regex", bad_words=digits) for seed in range(3)]
    assert all([check("regex", result) for result in results])


def test_min_tokens_leave_an_output_that_parses(service: GenerationExecutor) -> None:
    """More tokens than the grammar has: end tokens follow."""
    sampling = SamplingConfig(temperature=1.0, seed=1, min_tokens=40)
    output = start(service, 1, "structural_tag", sampling_config=sampling).result(timeout=240)
    assert GUIDES["structural_tag"][1](text(output.token_ids)) and len(output.token_ids) == 41


@contextmanager
def no_grammar_is_compiled(service: GenerationExecutor) -> Iterator[None]:
    """Requests with new guides wait for theirs."""
    executor = service._executor
    assert isinstance(executor, InProcessExecutor)
    grammars = executor._leader._book._leases._grammars
    assert grammars is not None
    goes_on = Event()
    grammars._compiling.submit(goes_on.wait)
    try:
        yield
    finally:
        goes_on.set()


def test_cancelling_while_it_waits_and_while_it_runs(service: GenerationExecutor) -> None:
    running = start(service, 1, "json", streaming=True)
    next(iter(running))
    running.abort()
    assert running.result(timeout=240).finish_reason in (FinishReason.CANCELLED, FinishReason.END_ID)
    with no_grammar_is_compiled(service):
        waiting = start(service, 1, guided_decoding_params=guide(GuideType.REGEX, "b{7}"))
        waiting.abort()
        with pytest.raises(Exception, match="stopped"):
            waiting.result(timeout=240)


def test_a_deadline_holds_while_its_grammar_is_compiled(service: GenerationExecutor) -> None:
    slow = guide(GuideType.REGEX, "c{7}")
    with no_grammar_is_compiled(service), pytest.raises(RequestTimedOut, match="allotted"):
        start(service, 1, guided_decoding_params=slow, allotted_time_ms=50).result(timeout=240)


def test_bombs_cost_their_senders_an_error_and_nobody_a_token(service: GenerationExecutor) -> None:
    free = start(service, 1, max_tokens=60).result(timeout=240).token_ids
    beside = [start(service, 1, max_tokens=60), start(service, 2, "json_schema")]
    heavy = [start(service, 1, guided_decoding_params=params, max_tokens=60) for params in HEAVY.values()]
    for seed, bomb in enumerate(BOMBS.values()):
        with pytest.raises(InvalidRequest, match=r"gramm|guide"):
            start(service, seed, guided_decoding_params=bomb)
    for result in heavy:
        with suppress(InvalidRequest):
            result.result(timeout=240)
    assert beside[0].result(timeout=240).token_ids == free
    check("json_schema", beside[1])


def test_nothing_is_left(service: GenerationExecutor) -> None:
    """After all of the above: no grammar is leased."""
    executor = service._executor
    assert isinstance(executor, InProcessExecutor)
    start(service, 1, max_tokens=2).result(timeout=240)
    book = executor._leader._book
    leases = book._leases
    assert not leases._guided and not book._preparing and leases._grammars is not None
    for grammar in leases._grammars._grammars.values():
        assert grammar.num_leases == 0
