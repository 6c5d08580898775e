"""Requests that choose tokens in every way and ask for everything: each is answered as it is alone, whoever shares the
engine with it, in chunks, after pauses and on cached prompts. To the last bit of every number, where C++ computes.

Run: pytest ci/unit/executor/test_requests_of_all_kinds.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from request_kinds import ADAPTERS, CHECKPOINT, ENGINE, KINDS, NUM_TOKENS, PROMPT, TOKENIZER, RequestKind
from transformers import AutoModelForCausalLM

from inflight.config import EngineConfig, SchedulerPolicy
from inflight.executor.front.generation_result import GenerationResult
from inflight.executor.generation_executor import GenerationExecutor
from inflight.executor.in_process import InProcessExecutor
from inflight.output_config import AdditionalModelOutput, OutputConfig
from inflight.sampling_config import SamplingConfig
from inflight_kernels.cpu import unsupported_reason

pytestmark = pytest.mark.slow

EXACT = not unsupported_reason()
"""Whether C++ can serve, in bfloat16: there a token has the same bits however it is computed. Else torch serves, in
float32, whose sums depend on the number of rows."""
BLOCK = 4
SMALL_CACHE = 44 * BLOCK
"""Tokens of a KV cache that two requests of these do not fit into."""


def serve(**changes: Any) -> GenerationExecutor:
    usual = {
        "max_batch_size": 8,
        "max_num_tokens": 128,
        "max_seq_len": 256,
        "max_tokens_in_paged_kv_cache": 1024,
        "enable_kv_cache_reuse": False,
        "dtype": "bfloat16" if EXACT else "float32",
        "cpu_compile": "true" if EXACT else "false",
    }
    config = EngineConfig(
        gpt_model_path=str(CHECKPOINT),
        device="cpu",
        num_threads=1,
        tokens_per_block=BLOCK,
        max_loras=2,
        lora_dir=str(ADAPTERS),
        **{**usual, **ENGINE, **changes},
    )
    return GenerationExecutor(InProcessExecutor(config), TOKENIZER)


def start(service: GenerationExecutor, kind: RequestKind, **changes: Any) -> GenerationResult:
    return service.generate_async(kind.prompt, **{**kind.python(), **changes})


def assert_equal(result: GenerationResult, alone: GenerationResult, feature: str, *, is_exact: bool = EXACT) -> None:
    found, wanted = result.result(), alone.result()
    assert [output.token_ids for output in found.outputs] == [output.token_ids for output in wanted.outputs], feature
    assert [output.finish_reason for output in found.outputs] == [output.finish_reason for output in wanted.outputs]
    if is_exact:
        for output, other in zip(found.outputs, wanted.outputs, strict=True):
            assert output.log_probs == other.log_probs, feature
            assert output.cumulative_logprob == other.cumulative_logprob, feature
    for index in range(len(wanted.outputs)):
        tensors, expected = result.tensors(index), alone.tensors(index)
        assert set(tensors) == set(expected), feature
        for name, array in expected.items():
            atol = 0 if is_exact else 2e-4
            np.testing.assert_allclose(tensors[name], array, rtol=0, atol=atol, err_msg=f"{feature}: {name}")


def answers_alone(**changes: Any) -> dict[str, GenerationResult]:
    """Of each kind, by feature."""
    with serve(**changes) as service:
        results = {}
        for kind in KINDS:
            results[kind.feature] = start(service, kind)
            results[kind.feature].result()
        return results


@pytest.fixture(scope="module")
def alone() -> dict[str, GenerationResult]:
    return answers_alone()


def test_the_kinds_differ(alone: dict[str, GenerationResult]) -> None:
    """What a kind asks for is seen: in its tokens, or in what comes beside them."""

    def outcome(result: GenerationResult) -> list[Any]:
        return [(output.token_ids, bool(output.log_probs)) for output in result.result().outputs]

    unseen = [
        feature
        for feature, result in alone.items()
        if outcome(result) == outcome(alone["greedy"]) and not result.tensors()
    ]
    assert unseen == [kind.feature for kind in KINDS if kind.equals_greedy]


@pytest.mark.parametrize(
    "changes", [{}, {"max_num_tokens": 9}, {"max_batch_size": 3}], ids=["together", "in chunks", "in turns"]
)
def test_each_is_answered_as_it_is_alone(alone: dict[str, GenerationResult], changes: dict[str, Any]) -> None:
    with serve(**changes) as service:
        results = [(kind.feature, start(service, kind)) for kind in (*KINDS, *reversed(KINDS))]
        for feature, result in results:
            assert_equal(result, alone[feature], feature)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
def test_so_is_each_with_keys_and_values_of_8_bits(kv_cache_dtype: str) -> None:
    """To the last bit, in C++, and in torch where nothing can compile it: beside all others, in chunks, and on cached
    prompts."""
    rounded = {"kv_cache_dtype": kv_cache_dtype, "deterministic": True, "dtype": "float32", "cpu_compile": "auto"}
    alone = answers_alone(**rounded)
    with serve(max_num_tokens=24, enable_kv_cache_reuse=True, **rounded) as service:
        results = [(kind.feature, start(service, kind)) for kind in (*KINDS, *reversed(KINDS))]
        for feature, result in results:
            assert_equal(result, alone[feature], feature, is_exact=True)


@pytest.mark.parametrize("kind", KINDS, ids=[kind.feature for kind in KINDS])
def test_a_paused_one_goes_on(small: GenerationExecutor, alone: dict[str, GenerationResult], kind: RequestKind) -> None:
    """An earlier request grows until there are too few blocks, and pauses this one, which started last."""
    start(small, kind).result()  # a grammar is then ready: both start together
    options = kind.python()
    rows = max(kind.num_sequences, options["sampling_config"].beam_width)
    own = rows * -(-(len(kind.prompt) + 2) // BLOCK) * BLOCK
    rival = [5] * (SMALL_CACHE - own - options["max_tokens"] + 2)
    small.get_stats()
    first = small.generate_async(
        rival, max_tokens=SMALL_CACHE - len(rival), end_ids=[], sampling_config=SamplingConfig()
    )
    assert_equal(start(small, kind), alone[kind.feature], kind.feature)
    first.result()
    assert max(stats.inflight_batching_stats.num_paused_requests for stats in small.get_stats()) > 0


def test_each_gives_way_to_more_important_ones(alone: dict[str, GenerationResult]) -> None:
    """All at the lowest priority, while others that need every row come and go."""
    with serve(priority_preemption=True, max_batch_size=8, max_beam_width=4) as service:
        results = [(kind.feature, start(service, kind, priority=0.0)) for kind in KINDS]
        num_paused = 0
        while not all(result.done for _, result in results):
            urgent = {"max_tokens": 3, "end_ids": [], "priority": 1.0}
            for each in [service.generate_async([5, number], **urgent) for number in range(8)]:  # type: ignore[arg-type]
                each.result()
            stats = service.get_stats()
            num_paused = max([num_paused, *(each.inflight_batching_stats.num_paused_requests for each in stats)])
        assert num_paused > 0
        for feature, result in results:
            assert_equal(result, alone[feature], feature)


@pytest.fixture(scope="module")
def small() -> Any:
    with serve(
        max_tokens_in_paged_kv_cache=SMALL_CACHE, batch_scheduler_policy=SchedulerPolicy.MAX_UTILIZATION
    ) as service:
        yield service


@pytest.mark.parametrize("kind", KINDS, ids=[kind.feature for kind in KINDS])
def test_one_on_a_cached_prompt(
    reusing: GenerationExecutor, alone: dict[str, GenerationResult], kind: RequestKind
) -> None:
    """The second of two equal requests reuses the first one's blocks, unless the kind computes its prompt always."""
    start(reusing, kind).result()
    result = start(reusing, kind)
    assert_equal(result, alone[kind.feature], kind.feature)
    metrics = result.result().request_perf_metrics
    assert metrics is not None
    assert (metrics.kv_cache_reused_blocks > 0) == ("prefix reuse" not in kind.exceptions)


@pytest.fixture(scope="module")
def reusing() -> Any:
    with serve(enable_kv_cache_reuse=True) as service:
        yield service


def test_scores_are_those_of_transformers() -> None:
    """Logits as generate() has them in `logits`, and the numbers that follow from them."""
    hidden = AdditionalModelOutput(name="hidden_states", gather_context=True)
    everything = OutputConfig(
        return_log_probs=True,
        num_log_probs=5,
        return_prompt_log_probs=True,
        return_context_logits=True,
        return_generation_logits=True,
        additional_model_outputs=[hidden],
    )
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    generated = model.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    with serve(dtype="float32", cpu_compile="false") as service:
        pending = service.generate_async(
            PROMPT, max_tokens=NUM_TOKENS, end_ids=[], sampling_config=SamplingConfig(), output_config=everything
        )
        result, tensors = pending.result(), pending.tensors()
    assert result.token_ids == generated.sequences[0, len(PROMPT) :].tolist()
    logits = torch.cat(generated.logits)
    close = {"rtol": 0, "atol": 2e-4}
    np.testing.assert_allclose(tensors["generation_logits"], logits.numpy(), **close)
    log_probs = logits.log_softmax(-1)
    np.testing.assert_allclose(result.log_probs, log_probs.amax(1).numpy(), **close)
    top = log_probs.topk(5)
    np.testing.assert_array_equal(tensors["top_token_ids"], top.indices.numpy())
    np.testing.assert_allclose(tensors["top_log_probs"], top.values.numpy(), **close)
    with torch.inference_mode():
        of_prompt = model(torch.tensor([PROMPT])).logits[0]
    np.testing.assert_allclose(tensors["context_logits"], of_prompt.numpy(), **close)
    expected = of_prompt[:-1].log_softmax(-1).gather(1, torch.tensor(PROMPT)[1:, None])[:, 0]
    np.testing.assert_allclose(tensors["prompt_log_probs"], expected.numpy(), **close)
    assert tensors["hidden_states"].shape == (NUM_TOKENS, model.config.hidden_size)
    assert tensors["context_hidden_states"].shape == (len(PROMPT), model.config.hidden_size)


def test_states_of_a_prompt_are_pooled_whatever_its_chunks() -> None:
    prompt = PROMPT * 4

    def tensors(service: GenerationExecutor, output: AdditionalModelOutput) -> dict[str, Any]:
        asked = OutputConfig(additional_model_outputs=[output])
        pending = service.generate_async(prompt, max_tokens=1, end_ids=[], output_config=asked)
        pending.result()
        return pending.tensors()

    name = "hidden_states"
    with serve() as whole, serve(max_num_tokens=9) as chunked:
        states = tensors(whole, AdditionalModelOutput(name=name, gather_context=True))[f"context_{name}"]
        expected = tensors(whole, AdditionalModelOutput(name=name, pooling="mean"))
        found = tensors(chunked, AdditionalModelOutput(name=name, pooling="mean"))
    assert [*found] == [f"pooled_{name}"]
    np.testing.assert_allclose(found[f"pooled_{name}"], states.mean(axis=0, keepdims=True), atol=1e-5)
    if EXACT:
        np.testing.assert_array_equal(found[f"pooled_{name}"], expected[f"pooled_{name}"])
