"""Drafts of requests with grammars, those of forced text among them: they change no token, and they save steps.

Run: pytest ci/unit/executor/test_guided_drafts.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from guides import GUIDES, guide
from msgspec import structs
from replays import replay_after

from inflight.config import EngineConfig
from inflight.errors import InvalidRequest
from inflight.executor.front.generation_result import GenerationResult
from inflight.executor.generation_executor import GenerationExecutor
from inflight.executor.in_process import InProcessExecutor
from inflight.guided_decoding import GuideType, Reasoning
from inflight.output_config import OutputConfig
from inflight.result import FinishReason
from inflight.runtime.guided.llguidance_library import TOO_COMPLEX
from inflight.runtime.guided.outputs import Mask, Output
from inflight.sampling_config import SamplingConfig
from inflight.sequence_seed import sequence_seed
from inflight.speculative_decoding import ExternalDraftTokensConfig, NGramDecodingConfig
from inflight.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

CHECKPOINT = Path(__file__).parents[3] / "model_repository/llm/1/checkpoint"
TOKENIZER = Tokenizer.load(CHECKPOINT)
END = 2
PROMPTS = [[1, 20, 30], list(range(40, 90)), [7, 8]]
LOOKUP = NGramDecodingConfig(max_draft_len=8, max_matching_ngram_size=2)

FIELDS = {"identification_number": {"enum": [17, 18]}, "favourite_animal": {"enum": ["elephant", "hippopotamus"]}}
FORM = {
    "type": "array",
    "items": {"type": "object", "properties": FIELDS, "required": list(FIELDS)},
    "minItems": 2,
    "maxItems": 3,
}
TALE = "Once upon a time there (was a (dog|cat)|were two (dogs|cats)) and they lived happily ever after\\."
THOUGHT = Reasoning(opening="<", closing=".", is_open=True)
ALL = {
    "json_schema": GUIDES["json_schema"][0],
    "structural_tag": GUIDES["structural_tag"][0],
    "form": guide(GuideType.JSON_SCHEMA, json.dumps(FORM)),
    "tale": guide(GuideType.REGEX, TALE),
    "behind a reasoning": structs.replace(
        GUIDES["json_schema"][0], reasoning=Reasoning(opening="<", closing=".", is_open=True)
    ),
}


def load(**parameters: str) -> GenerationExecutor:
    config = EngineConfig.from_parameters(
        {
            "gpt_model_path": str(CHECKPOINT),
            "cpu_compile": "false",
            "dtype": "float32",
            "num_threads": "1",
            "max_batch_size": "12",
            "max_num_tokens": "48",
            "max_tokens_in_paged_kv_cache": "2048",
            "tokens_per_block": "8",
            **parameters,
        }
    )
    return GenerationExecutor(InProcessExecutor(config))


def start(service: GenerationExecutor, name: str, seed: int, **options: Any) -> GenerationResult:
    """`name`: of a guide. Seed 0 is greedy."""
    sampling = SamplingConfig(temperature=1.0 if seed else 0.0, seed=seed)
    usual = {"max_tokens": 60, "end_ids": [END], "sampling_config": sampling, "guided_decoding_params": ALL[name]}
    return service.generate_async(
        PROMPTS[seed % 3], output_config=OutputConfig(return_log_probs=True), **{**usual, **options}
    )


def check(result: GenerationResult, plain: GenerationResult) -> None:
    found, expected = result.result(timeout=240), plain.result()
    assert found.token_ids == expected.token_ids and found.finish_reason is expected.finish_reason
    assert found.log_probs == pytest.approx(expected.log_probs, abs=1e-4)


def tokens_of(result: GenerationResult) -> tuple[int, ...]:
    return tuple(result.result(timeout=240).token_ids)


def text_of(tokens: tuple[int, ...]) -> str:
    return str(TOKENIZER.join([TOKENIZER.token(token) for token in tokens if token != END]))


def num_drafts(result: GenerationResult) -> tuple[int, int]:
    """Those that were verified, and accepted."""
    metrics = result.result(timeout=240).request_perf_metrics
    assert metrics is not None
    return metrics.total_draft_tokens, metrics.total_accepted_draft_tokens


CASES = [(name, seed) for name in ALL for seed in range(3)]
Case = tuple[str, int]


@pytest.fixture(scope="module")
def alone() -> Iterator[GenerationExecutor]:
    """A batch of one row, which has no place for drafts."""
    with load(max_batch_size="1") as service:
        yield service


@pytest.fixture(scope="module")
def plain(alone: GenerationExecutor) -> dict[Case, GenerationResult]:
    """What each is answered with without drafts."""
    results = {case: start(alone, *case) for case in CASES}
    assert not any(num_drafts(result)[0] for result in results.values())
    return results


@pytest.fixture(scope="module")
def service() -> Iterator[GenerationExecutor]:
    with load() as service:
        yield service


def drafted(tokens: tuple[int, ...], kind: str) -> dict[str, Any]:
    if kind == "forced":
        return {}
    if kind == "lookup":
        return {"ngram_config": LOOKUP}
    num_right = len(tokens) if kind == "right" else len(tokens) // 2
    drafts = [*tokens[:num_right], *((token + 1) % 2048 for token in tokens[num_right:])]
    return {"external_draft_tokens_config": ExternalDraftTokensConfig(tokens=drafts)}


KINDS = ("forced", "lookup", "right", "half right")


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_token_alone(
    service: GenerationExecutor, plain: dict[Case, GenerationResult], kind: str
) -> None:
    for case in CASES:
        result = start(service, *case, **drafted(tokens_of(plain[case]), kind))
        check(result, plain[case])
        if kind == "right":
            assert num_drafts(result)[1] == num_drafts(result)[0] > 0


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"max_num_tokens": "13"},
        {"batch_scheduler_policy": "max_utilization", "max_tokens_in_paged_kv_cache": "208"},
    ],
    ids=["together", "in chunks", "paused"],
)
def test_drafts_change_no_token_beside_others(plain: dict[Case, GenerationResult], parameters: dict[str, str]) -> None:
    with load(**parameters) as service:
        results = []
        for number, case in enumerate(CASES):
            kind = KINDS[number % len(KINDS)]
            options = drafted(tokens_of(plain[case]), kind)
            results.append((case, start(service, *case, streaming=number % 2 == 0, **options)))
        free = service.generate_async(PROMPTS[1], max_tokens=60, end_ids=[], sampling_config=SamplingConfig())
        for case, result in results:
            check(result, plain[case])
        assert free.result(timeout=240).finish_reason is FinishReason.LENGTH
        num_paused = max(stats.inflight_batching_stats.num_paused_requests for stats in service.get_stats())
        assert bool(num_paused) == ("batch_scheduler_policy" in parameters)


def test_forced_text_saves_steps(service: GenerationExecutor) -> None:
    """Alone. A model that has seen stories writes this one as the tokenizer splits it, most of it."""
    results = [start(service, "tale", seed) for seed in range(4)]
    for result in results:
        assert text_of(tokens_of(result)).endswith("happily ever after.")
    num_verified, num_accepted = (sum(numbers) for numbers in zip(*map(num_drafts, results), strict=True))
    assert num_verified > 20 and num_accepted >= num_verified // 2


def test_a_replay_goes_on_with_the_same_tokens(
    service: GenerationExecutor, plain: dict[Case, GenerationResult]
) -> None:
    for case in (("form", 2), ("tale", 0)):
        whole = tokens_of(plain[case])
        for cut in (1, len(whole) // 2, len(whole) - 1):
            assert tokens_of(start(service, *case, replay=replay_after(whole[:cut]))) == whole[cut:]


def test_several_sequences_have_forced_tokens_each(service: GenerationExecutor, alone: GenerationExecutor) -> None:
    outputs = start(service, "tale", 4, num_return_sequences=3).result(timeout=240).outputs
    for index, output in enumerate(outputs):
        sampling = SamplingConfig(temperature=1.0, seed=sequence_seed(4, index))
        assert tuple(output.token_ids) == tokens_of(start(alone, "tale", 4, sampling_config=sampling))


def test_end_tokens_among_drafts_and_min_tokens_behind_the_end(
    service: GenerationExecutor, alone: GenerationExecutor
) -> None:
    """The grammar is at its end before min_tokens: only end tokens follow, drafted or not."""
    sampling = {"sampling_config": SamplingConfig(temperature=1.0, seed=1, min_tokens=30)}
    expected = tokens_of(start(alone, "structural_tag", 1, **sampling))
    for drafts in ([*expected], [*expected[:12], 9, *expected[13:]]):
        given = ExternalDraftTokensConfig(tokens=drafts)
        result = start(service, "structural_tag", 1, external_draft_tokens_config=given, **sampling)
        assert tokens_of(result) == expected and num_drafts(result)[1] > 5


def test_a_limit_that_is_met_behind_drafts_costs_its_own_request_an_error(
    service: GenerationExecutor, plain: dict[Case, GenerationResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens_of(plain["form", 2])
    masks_behind, met = Output.masks_behind, []

    def meeting(output: Output, drafts: list[int], *rest: Any) -> list[Mask]:
        found = masks_behind(output, drafts, *rest)
        place = next((place for place in range(len(expected)) if list(expected[place:][: len(drafts)]) == drafts), None)
        if met or place is None or len(drafts) < 4:
            return found
        met.append(place)
        return [Mask(b"", TOO_COMPLEX)] * len(drafts)

    monkeypatch.setattr(Output, "masks_behind", meeting)
    beside = start(service, "tale", 2)
    with pytest.raises(InvalidRequest, match="too ambiguous"):
        start(service, "form", 2, **drafted(expected, "right")).result(timeout=240)
    check(beside, plain["tale", 2])
    assert met
    check(start(service, "form", 2), plain["form", 2])
