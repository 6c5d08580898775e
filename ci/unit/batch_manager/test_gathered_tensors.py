"""Tensors on their way through the loop: every token once, in the right Result, through pauses and shared prefixes."""

from __future__ import annotations

import numpy as np
import pytest
from fake_network import VOCAB_SIZE
from harness import Harness, make_request
from replays import replay_after

from inflight.batch_manager.gathered_tensors import GatheredTensors
from inflight.config import SchedulerPolicy
from inflight.errors import InvalidRequest
from inflight.output_config import AdditionalModelOutput, OutputConfig, Pooling
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.scheduler_output import LOG_PROBS, RowTensors


def test_results_hold_the_tensors_of_their_tokens() -> None:
    """A stream's first one those of the prompt, which took several steps; then each those of its own tokens."""
    harness = Harness(max_num_tokens=4)
    harness.serve(make_request(1, 11, 5, streaming=True, logits=True), make_request(2, 3, 5, streaming=True))
    first, *others = harness.results(1)
    assert [tensor.name for tensor in first.tensors] == ["context_logits", "generation_logits"]
    assert all([tensor.name for tensor in result.tensors] == ["generation_logits"] for result in others)
    for result in (first, *others):
        assert result.tensors[-1].array()[:, 0].tolist() == result.output_token_ids
    assert harness.tensors(1)["context_logits"] == harness.requests[1].input_token_ids
    assert not any(result.tensors for result in harness.results(2))


def test_one_result_holds_everything_without_streaming() -> None:
    harness = Harness()
    harness.serve(make_request(1, 6, 5, logits=True))
    (result,) = harness.results(1)
    assert harness.tensors(1) == {
        "context_logits": harness.requests[1].input_token_ids,
        "generation_logits": result.output_token_ids,
    }


@pytest.mark.parametrize("num_blocks", [6, 8])
@pytest.mark.parametrize("max_num_tokens", [4, 7, 64])
def test_a_paused_sequence_tells_every_token_once(num_blocks: int, max_num_tokens: int) -> None:
    harness = Harness(policy=SchedulerPolicy.MAX_UTILIZATION, num_blocks=num_blocks, max_num_tokens=max_num_tokens)
    requests = [make_request(i, 2 + i, 12, streaming=i % 2 == 0, seed=i, logits=i % 3 < 2) for i in range(8)]
    harness.submit(*requests)
    num_paused = 0
    while harness.queue or harness.manager.num_active_requests:
        harness.step()
        num_paused += harness.scheduler.num_paused
    assert num_paused
    for request in requests:
        wanted = {}
        if request.output_config.return_context_logits:
            wanted = {
                "context_logits": request.input_token_ids,
                "generation_logits": harness.tokens(request.request_id),
            }
        assert harness.tokens(request.request_id) == harness.expected(request.request_id)
        assert harness.tensors(request.request_id) == wanted


def test_a_prompt_that_is_asked_about_is_computed_although_it_is_cached() -> None:
    harness = Harness()
    prompt = list(range(17))
    harness.serve(make_request(1, prompt))
    harness.serve(make_request(2, prompt, logits=True), make_request(3, prompt))
    of_prompt = {i: harness.final(i).request_perf_metrics.kv_cache_reused_blocks for i in (1, 2, 3)}  # type: ignore[union-attr]
    assert of_prompt == {1: 0, 2: 0, 3: 4}
    assert harness.tensors(2)["context_logits"] == prompt
    assert harness.tokens(2) == harness.tokens(1)


def test_what_is_asked_of_the_output_alone_reuses_the_prefix() -> None:
    harness = Harness()
    prompt = list(range(17))
    harness.serve(make_request(1, prompt))
    harness.serve(make_request(2, prompt, output_config=OutputConfig(num_log_probs=3)))
    metrics = harness.final(2).request_perf_metrics
    assert metrics is not None and metrics.kv_cache_reused_blocks == 4


def test_a_request_that_ranks_took_over_does_not_tell_its_prompt_again() -> None:
    """Its client has had that with the first token."""
    harness = Harness()
    whole = harness.serve(make_request(1, 9, 8))[1]
    taken_over = make_request(2, harness.requests[1].input_token_ids, 8, replay=replay_after(whole[:3]), logits=True)
    assert harness.serve(taken_over)[2] == whole[3:]
    assert harness.tensors(2) == {"generation_logits": whole[3:]}


def test_runners_are_asked_by_name() -> None:
    harness = Harness()
    everything = OutputConfig(
        return_log_probs=True,
        num_log_probs=2,
        return_prompt_log_probs=True,
        return_context_logits=True,
        return_generation_logits=True,
    )
    harness.serve(make_request(1, 3, output_config=everything), make_request(2, 3))
    asked, silent = harness.runner.launched[0].new_sequences
    assert asked.outputs == (
        LOG_PROBS,
        "prompt_log_probs",
        "prompt_top_log_probs",
        "context_logits",
        "top_log_probs",
        "generation_logits",
    )
    assert (asked.num_log_probs, silent.outputs) == (2, ())


LIMITS = RequestLimits(
    vocab_size=VOCAB_SIZE,
    max_seq_len=64,
    max_input_len=63,
    kv_cache_tokens=640,
    hidden_size=8,
    model_outputs=["hidden_states"],
    max_tensor_bytes=4 * (5 * 8 + 10 * VOCAB_SIZE),
)


def asking(config: OutputConfig, num_prompt: int = 5, max_tokens: int = 10) -> Request:
    return make_request(1, num_prompt, max_tokens, output_config=config)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (OutputConfig(num_log_probs=21), "num_log_probs must be between 0 and 20, got 21"),
        (OutputConfig(num_log_probs=-1), "num_log_probs must be between 0 and 20, got -1"),
        (
            OutputConfig(additional_model_outputs=[AdditionalModelOutput(name="attention")]),
            "additional_outputs names 'attention', which this model does not offer; it offers: hidden_states",
        ),
        (
            OutputConfig(additional_model_outputs=[AdditionalModelOutput(name="hidden_states")] * 2),
            "additional_outputs names an output twice",
        ),
    ],
)
def test_what_cannot_be_given_is_refused(config: OutputConfig, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        LIMITS.validate(asking(config))


def test_a_request_may_ask_for_so_many_bytes_and_no_more() -> None:
    hidden = AdditionalModelOutput(name="hidden_states", gather_context=True)
    LIMITS.validate(asking(OutputConfig(return_generation_logits=True)))
    LIMITS.validate(asking(OutputConfig(additional_model_outputs=[hidden], return_log_probs=True)))
    with pytest.raises(InvalidRequest, match=r"take \d+ bytes, more than max_tensor_bytes_per_request 4040"):
        LIMITS.validate(asking(OutputConfig(return_generation_logits=True, additional_model_outputs=[hidden])))
    with pytest.raises(InvalidRequest, match="ask for fewer of them or for fewer tokens"):
        LIMITS.validate(asking(OutputConfig(return_context_logits=True), num_prompt=11))


@pytest.mark.parametrize("pooling", ["mean", "weighted_mean"])
def test_one_row_is_made_of_a_prompts_and_no_bit_depends_on_its_pieces(pooling: Pooling) -> None:
    states = np.random.default_rng(7).standard_normal((41, 5), np.float32)
    weights = np.arange(1, 42) if pooling == "weighted_mean" else np.ones(41)
    found = []
    for length in (1, 3, 16, 41):
        asked = AdditionalModelOutput(name="hidden_states", pooling=pooling)
        config = OutputConfig(additional_model_outputs=[asked])
        gathered = GatheredTensors.wanted_by(config, len(states), with_prompt=True)
        assert gathered is not None and gathered.outputs == ("context_hidden_states",)
        for start in range(0, len(states), length):
            assert gathered.take() == []
            piece = states[start : start + length]
            gathered.add_prompt(
                RowTensors(prompt_start=start, num_prompt_tokens=len(piece), prompt={"context_hidden_states": piece})
            )
        (tensor,) = gathered.take()
        assert tensor.name == "pooled_hidden_states" and gathered.take() == []
        found.append(tensor.array())
    np.testing.assert_allclose(found[0], np.average(states, axis=0, weights=weights)[None], atol=1e-6)
    assert all((each == found[0]).all() for each in found)
