"""A prompt that one scheduler computes and another one continues: the same tokens, and no block is lost."""

from __future__ import annotations

import pytest
from fake_network import VOCAB_SIZE
from harness import Harness, make_request
from msgspec import structs

from inflight.config import SchedulerPolicy
from inflight.context_phase import ContextTransfer, RequestType
from inflight.replay import DeliveredSequence, Replay
from inflight.request import Request
from inflight.result import FinishReason

KEY = b"key of the prompt"


def compute_context(harness: Harness, request: Request) -> list[int]:
    """The content of the prompt's blocks, once its first tokens have been answered."""
    context = structs.replace(
        request, request_type=RequestType.CONTEXT_ONLY, context_transfer=ContextTransfer(export_key=KEY)
    )
    harness.serve(context)
    for index in range(request.num_return_sequences):
        assert harness.tokens(request.request_id, index) == harness.expected(request.request_id, index)[:1]
    assert harness.reason(request.request_id) is FinishReason.LENGTH
    assert harness.kv_cache.num_used_blocks == 0
    return harness.runner.exported.pop(KEY)


def arrived(harness: Harness, request: Request, content: list[int]) -> Request:
    """The request as ranks get it that have the blocks of its prompt."""
    harness.runner.arrived[request.request_id] = content
    num_tokens = len(request.input_token_ids)
    return structs.replace(request, context_transfer=ContextTransfer(num_arrived_tokens=num_tokens))


def num_prompt_tokens_computed(harness: Harness) -> int:
    prompts = [len(request.input_token_ids) for request in harness.requests.values()]
    works = [work for step in harness.runner.launched for work in step.rows if work.is_prefill]
    return sum(min(work.start + work.num_tokens, prompts[0]) - work.start for work in works)


@pytest.mark.parametrize(
    ("length", "num_state_slots"), [(1, None), *((n, slots) for slots in (None, 8) for n in (3, 4, 5, 11, 12, 29))]
)
@pytest.mark.parametrize("options", [{}, {"num_return_sequences": 3, "seed": 5}, {"log_probs": True}])
@pytest.mark.parametrize("max_num_tokens", [16, 4], ids=["", "in chunks"])
def test_the_tokens_are_those_of_one_scheduler(
    length: int, num_state_slots: int | None, options: dict[str, int], max_num_tokens: int
) -> None:
    request = make_request(7, length, 9, **options)
    sizes = {"max_num_tokens": max_num_tokens, "num_state_slots": num_state_slots}
    content = compute_context(Harness(**sizes), request)
    second = Harness(**sizes)
    second.serve(arrived(second, request, content))
    for index in range(request.num_return_sequences):
        assert second.tokens(7, index) == second.expected(7, index)
    assert num_prompt_tokens_computed(second) == request.num_return_sequences, "only the last token is computed again"
    assert second.kv_cache.num_used_blocks == 0
    assert not second.runner.arrived or length == 1, "the rank drops at the end what was not needed"


@pytest.mark.parametrize("windows", [(0, 5), (3,), (4, 0, 9)], ids=str)
@pytest.mark.parametrize("length", [1, 4, 5, 12, 29])
@pytest.mark.parametrize("max_num_tokens", [32, 6], ids=["", "in chunks"])
def test_what_windows_have_passed_is_not_handed_over(
    length: int, windows: tuple[int, ...], max_num_tokens: int
) -> None:
    request = make_request(7, length, 9)
    content = compute_context(Harness(windows=windows, max_num_tokens=max_num_tokens), request)
    second = Harness(windows=windows, max_num_tokens=max_num_tokens)
    size = second.kv_cache.block_size
    num_blocks = -(-length // size)
    most = sum(min((window - 1) // size + 2, num_blocks) if window else num_blocks for window in windows)
    assert len(content) <= most * size
    second.serve(make_request(1, request.input_token_ids[: length // 2 + 1], 2))  # of which some blocks are cached
    second.serve(arrived(second, request, content))
    assert second.tokens(7) == second.expected(7) and second.kv_cache.num_used_blocks == 0
    assert length == 1 or any(step.arrivals for step in second.runner.launched)


def test_a_cached_prefix_leaves_a_token_more_to_compute_whose_state_is_handed_over() -> None:
    """13 tokens in blocks of 4, of which the first 12 are cached: the state behind these is kept again."""
    first, second = Harness(num_state_slots=8), Harness(num_state_slots=8)
    request = make_request(7, 13, 9)
    first.serve(make_request(1, [*request.input_token_ids, 5, 6], 2))
    content = compute_context(first, request)
    second.serve(arrived(second, request, content))
    assert second.tokens(7) == second.expected(7) and num_prompt_tokens_computed(second) == 1


def test_a_state_without_a_slot_is_not_handed_over() -> None:
    harness = Harness(num_state_slots=0)
    request = make_request(7, 12, 9)
    transfer = ContextTransfer(export_key=KEY)
    harness.serve(structs.replace(request, request_type=RequestType.CONTEXT_ONLY, context_transfer=transfer))
    assert harness.tokens(7) == harness.expected(7) and not harness.runner.exported


def test_a_state_begins_before_the_last_token_of_the_prompt() -> None:
    """Whatever of the output was delivered before: that is computed again behind it."""
    request = make_request(7, 12, 9)
    content = compute_context(Harness(num_state_slots=4), request)
    delivered = Harness().serve(request)[7][:3]
    second = Harness(num_state_slots=4)
    replay = Replay(sequences=[DeliveredSequence(token_ids=delivered, num_iterations=3)])
    second.serve(arrived(second, structs.replace(request, replay=replay), content))
    assert [*delivered, *second.tokens(7)] == second.expected(7)
    assert [(work.start, work.num_tokens) for work in second.runner.launched[0].rows] == [(11, 4)]


def test_with_its_first_token_it_only_decodes() -> None:
    request = make_request(7, 12, 9)
    content = compute_context(Harness(), request)
    second = Harness()
    first = second.expected(7)[0] if second.requests else Harness().serve(request)[7][0]
    replay = Replay(sequences=[DeliveredSequence(token_ids=[first], num_iterations=1)])
    second.serve(arrived(second, structs.replace(request, replay=replay), content))
    assert [first, *second.tokens(7)] == second.expected(7)
    (step, *_) = second.runner.launched
    assert [(work.start, work.num_tokens) for work in step.rows] == [(12, 1)]


def test_what_is_cached_is_not_copied_and_the_rest_is_cached_for_others() -> None:
    request = make_request(7, 27, 9)
    content = compute_context(Harness(), request)
    second = Harness()
    second.serve(make_request(1, request.input_token_ids[:13], 2))
    second.serve(arrived(second, request, content))
    assert second.tokens(7) == second.expected(7)
    (arrival,) = [arrival for step in second.runner.launched for arrival in step.arrivals]
    assert [index for index, _ in arrival.blocks] == [3, 4, 5, 6]
    second.serve(make_request(8, request.input_token_ids, 9))
    assert second.final(8).request_perf_metrics.num_cached_tokens == 24  # type: ignore[union-attr]


def test_a_pause_computes_again_what_had_arrived() -> None:
    first, second = Harness(), Harness(num_blocks=10, policy=SchedulerPolicy.MAX_UTILIZATION, enable_reuse=False)
    rival, request = make_request(1, 9, 25), make_request(7, 10, 20)
    content = compute_context(first, request)
    second.serve(rival, arrived(second, request, content))
    assert [second.tokens(id_) for id_ in (1, 7)] == [second.expected(id_) for id_ in (1, 7)]
    assert sum(bool(step.arrivals) for step in second.runner.launched) == 1


def test_an_output_that_ends_with_its_first_token_ends_so_in_the_context_phase() -> None:
    harness = Harness()
    request = make_request(7, 12, 9)
    (first, *_) = harness.serve(request)[7]
    harness.serve(
        structs.replace(request, request_id=8, request_type=RequestType.CONTEXT_ONLY, end_ids=[first % VOCAB_SIZE])
    )
    assert harness.reason(8) is FinishReason.END_ID


def test_a_beam_search_computes_its_own_prompt() -> None:
    request = make_request(7, 12, 6, beam_width=3, num_return_sequences=2)
    harness = Harness()
    harness.serve(arrived(harness, request, [0] * 12))
    assert [harness.tokens(7, index) for index in range(2)] == [beam.token_ids for beam in harness.expected_beams(7)]
