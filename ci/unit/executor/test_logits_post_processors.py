"""Requests with logits post-processors on a whole engine in this process: each gets what it names, nobody else does.

Run: pytest ci/unit/executor/test_logits_post_processors.py
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from guides import GUIDES

from inflight.config import EngineConfig, SchedulerPolicy
from inflight.errors import InvalidRequest, StepFailed
from inflight.executor.front.request_output import RequestOutput
from inflight.executor.generation_executor import GenerationExecutor
from inflight.executor.in_process import InProcessExecutor
from inflight.logits_post_processor import LogitsPostProcessorConfig
from inflight.output_config import OutputConfig
from inflight.sampling_config import SamplingConfig
from inflight.speculative_decoding import ExternalDraftTokensConfig
from inflight.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

CHECKPOINT = Path(__file__).parents[3] / "model_repository/llm/1/checkpoint"
PROMPT, END, NUM_TOKENS = [1, 20, 30, 40, 50], 2, 24
BIAS = {5: 9.0, 77: 11.0, 300: 10.0}
TOKENIZER = Tokenizer.load(CHECKPOINT)


class Functions:
    """Post-processors that record their calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, list[list[int]], str | None]] = []
        self.batches: list[list[int]] = []
        self.may_go_on = threading.Event()
        """While it is not set, steps with the batched function wait in it."""
        self.may_go_on.set()

    def add(self, request_id: int, logits: Any, token_ids: list[list[int]], stream: int, client_id: str | None) -> None:
        assert logits.shape == (1, 1, 2048) and logits.dtype is torch.float32 and stream == 0
        self.calls.append((request_id, token_ids, client_id))
        for token_id, bias in BIAS.items():
            logits[0, 0, token_id] += bias

    def replace(self, request_id: int, logits: Any, *rest: Any) -> Any:
        others = logits.clone()
        self.add(request_id, others, *rest)
        logits.fill_(math.nan)
        return others

    def batched(self, request_ids: list[int], logits: list[Any], token_ids: Any, stream: int, client_ids: Any) -> None:
        assert self.may_go_on.wait(100)
        self.batches.append(request_ids)
        for arguments in zip(request_ids, logits, token_ids, client_ids, strict=True):
            self.add(arguments[0], arguments[1], arguments[2], stream, arguments[3])

    @staticmethod
    def force(request_id: int, logits: Any, token_ids: list[list[int]], *rest: Any) -> None:
        """Each token is the one before, plus 7."""
        logits[0, 0, :] = -math.inf
        logits[0, 0, (token_ids[0][-1] + 7) % 2048] = 0.0

    @staticmethod
    def raise_late(request_id: int, logits: Any, token_ids: list[list[int]], *rest: Any) -> None:
        if len(token_ids[0]) > len(PROMPT) + 3:
            logits.fill_(math.nan)
            raise ValueError("enough")

    @staticmethod
    def fill_nan(request_id: int, logits: Any, token_ids: list[list[int]], *rest: Any) -> None:
        logits[0, 0, 9] = math.nan

    @staticmethod
    def fill_impossible(request_id: int, logits: Any, *rest: Any) -> None:
        logits.fill_(-math.inf)

    @staticmethod
    def wrong_shape(request_id: int, logits: Any, *rest: Any) -> Any:
        return torch.zeros(3)


def serve(functions: Functions, **changes: Any) -> GenerationExecutor:
    config = EngineConfig(
        gpt_model_path=str(CHECKPOINT),
        cpu_compile="false",
        dtype="float32",
        num_threads=1,
        tokens_per_block=8,
        **{"max_batch_size": 8, "max_num_tokens": 64, "max_tokens_in_paged_kv_cache": 1024, **changes},
    )
    names = ("add", "replace", "force", "raise_late", "fill_nan", "fill_impossible", "wrong_shape")
    processors = LogitsPostProcessorConfig(
        processor_map={name: getattr(functions, name) for name in names}, processor_batched=functions.batched
    )
    return GenerationExecutor(InProcessExecutor(config, logits_post_processors=processors))


@pytest.fixture(scope="module")
def functions() -> Functions:
    return Functions()


@pytest.fixture(scope="module")
def service(functions: Functions) -> Iterator[GenerationExecutor]:
    with serve(functions) as service:
        yield service


def start(service: GenerationExecutor, name: str = "", seed: int = 0, **options: Any) -> Any:
    sampling = SamplingConfig(temperature=0.8 if seed else 0.0, seed=seed, **options.pop("sampling", {}))
    options = {"max_tokens": NUM_TOKENS, "end_ids": [END], "sampling_config": sampling, **options}
    return service.generate_async(PROMPT, logits_post_processor_name=name, **options)


def ask(service: GenerationExecutor, name: str = "", seed: int = 0, **options: Any) -> RequestOutput:
    output: RequestOutput = start(service, name, seed, **options).result(timeout=120)
    return output


def biased(service: GenerationExecutor, seed: int, **options: Any) -> RequestOutput:
    return ask(service, "", seed, sampling={"logit_bias": BIAS}, **options)


@pytest.mark.parametrize("name", ["add", "replace", "batched"])
@pytest.mark.parametrize("seed", [0, 3])
def test_what_a_function_adds_is_what_a_bias_adds(service: GenerationExecutor, name: str, seed: int) -> None:
    """And log probabilities are the model's own, as with a bias."""
    wanted = OutputConfig(return_log_probs=True, return_generation_logits=True)
    free = start(service, "", seed)
    result = start(service, name, seed, output_config=wanted)
    output, expected = result.result(timeout=120), biased(service, seed, output_config=wanted)
    assert output.token_ids == expected.token_ids
    assert output.log_probs == pytest.approx(expected.log_probs, abs=1e-5)
    logits = torch.from_numpy(result.tensors()["generation_logits"])
    own = torch.log_softmax(logits, 1).gather(1, torch.tensor(output.token_ids)[:, None]).squeeze(1)
    assert output.log_probs == pytest.approx(own.tolist(), abs=1e-4)
    assert free.result(timeout=120).token_ids == ask(service, "", seed).token_ids != output.token_ids


def test_a_function_sees_all_tokens_before_each_choice(service: GenerationExecutor, functions: Functions) -> None:
    functions.calls.clear()
    output = ask(service, "add", client_id="me", streaming=True)
    seen = [token_ids for _, (token_ids,), client_id in functions.calls if client_id == "me"]
    tokens = [*PROMPT, *output.token_ids]
    assert seen[: len(output.token_ids)] == [tokens[:length] for length in range(len(PROMPT), len(tokens))]
    assert {request_id for request_id, _, _ in functions.calls} == {output.request_id}


def test_each_sequence_of_a_request_is_processed(service: GenerationExecutor) -> None:
    sequences = ask(service, "add", 5, num_return_sequences=3).outputs
    expected = biased(service, 5, num_return_sequences=3).outputs
    assert [each.token_ids for each in sequences] == [each.token_ids for each in expected]


def test_the_batched_function_gets_all_its_rows_at_once(service: GenerationExecutor, functions: Functions) -> None:
    functions.batches.clear()
    functions.may_go_on.clear()
    results = [start(service, "batched", seed, end_ids=[]) for seed in range(4)]
    others = [start(service, "force"), start(service)]
    functions.may_go_on.set()
    tokens = [result.result(timeout=120).token_ids for result in (*results, *others)]
    assert tokens[:4] == [biased(service, seed, end_ids=[]).token_ids for seed in range(4)]
    assert tokens[5] == ask(service).token_ids
    assert any(len(batch) == 4 for batch in functions.batches)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("raise_late", "the logits post-processor 'raise_late' failed"),
        ("wrong_shape", "the logits post-processor 'wrong_shape' failed"),
        ("fill_nan", "left no token to choose"),
        ("fill_impossible", "left no token to choose"),
    ],
)
def test_a_function_that_fails_ends_its_own_request_alone(
    service: GenerationExecutor, name: str, sentence: str
) -> None:
    expected = [ask(service, "", seed).token_ids for seed in range(3)]
    others = [start(service, "", seed) for seed in range(3)]
    failing, forced = start(service, name, 7), start(service, "force")
    with pytest.raises(StepFailed, match=sentence):
        failing.result(timeout=120)
    assert [result.result(timeout=120).token_ids for result in others] == expected
    assert forced.result(timeout=120).token_ids == [(PROMPT[-1] + 7 * n) % 2048 for n in range(1, NUM_TOKENS + 1)]


def test_a_grammar_is_followed_all_the_same(service: GenerationExecutor) -> None:
    params, parses = GUIDES["regex"]
    output = ask(service, "add", 3, guided_decoding_params=params, max_tokens=200)
    text = str(TOKENIZER.join([TOKENIZER.token(token) for token in output.token_ids if token != END]))
    assert output.token_ids[-1] != END or parses(text), text
    with pytest.raises(StepFailed, match="left no token to choose"):
        ask(service, "force", guided_decoding_params=params)


def test_steps_that_verify_drafts_of_others_change_nothing(service: GenerationExecutor) -> None:
    """Neither what a function sees, nor that it fails its own request."""
    expected = ask(service, max_tokens=60, end_ids=[]).token_ids
    drafts = ExternalDraftTokensConfig(tokens=expected)
    drafting = start(service, max_tokens=60, end_ids=[], external_draft_tokens_config=drafts)
    forced, failing = start(service, "force"), start(service, "raise_late", 7)
    assert drafting.result(timeout=120).token_ids == expected
    assert forced.result(timeout=120).token_ids == [(PROMPT[-1] + 7 * n) % 2048 for n in range(1, NUM_TOKENS + 1)]
    with pytest.raises(StepFailed, match="the logits post-processor 'raise_late' failed"):
        failing.result(timeout=120)


def test_pauses_and_chunks_change_nothing() -> None:
    functions = Functions()
    policy = SchedulerPolicy.MAX_UTILIZATION
    with serve(functions) as roomy:
        expected = [ask(roomy, "add", seed, max_tokens=60, end_ids=[]).token_ids for seed in range(6)]
    changes = {"max_tokens_in_paged_kv_cache": 160, "batch_scheduler_policy": policy, "max_num_tokens": 8}
    with serve(functions, **changes) as narrow:
        results = [start(narrow, "add", seed, max_tokens=60, end_ids=[]) for seed in range(6)]
        assert [result.result(timeout=120).token_ids for result in results] == expected


def test_what_cannot_be_is_refused(service: GenerationExecutor) -> None:
    with pytest.raises(InvalidRequest, match=r"'nobody', which this engine does not have; it has: add, .*, batched$"):
        ask(service, "nobody")
    with pytest.raises(InvalidRequest, match="logits_post_processor_name is not supported together with beam_width"):
        ask(service, "add", sampling={"beam_width": 2})
