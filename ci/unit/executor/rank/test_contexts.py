"""The leader's half of handing contexts over, without ranks: what it orders, what it waits for, and what it answers."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from calls import until
from harness import make_request
from msgspec import structs

from inflight.block_groups import BlockGroups
from inflight.context_phase import ContextPhaseParams, RequestType
from inflight.errors import InvalidRequest
from inflight.executor.rank.block_transfer.block_transfer import reports_endpoint
from inflight.executor.rank.leader.contexts import Contexts
from inflight.executor.rank.leader.request_book import RequestBook
from inflight.executor.wire.block_messages import (
    NO_BLOCK_ORDERS,
    BlockOrders,
    Endpoint,
    Fetched,
    Serves,
    encode_block_message,
)
from inflight.lora import LoadedAdapter
from inflight.replay import DeliveredSequence, Replay
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.result import FinishReason, Response, Result

NUM_RANKS, MAX_TOKENS = 2, 20
FRONT = b"front"


class Leader:
    """Contexts, and what its ranks say to it."""

    def __init__(self, folder: Path, *, secret: bytes = b"secret", layout: bytes = b"layout") -> None:
        folder.mkdir()
        self.contexts = Contexts(
            folder,
            secret=secret,
            layout=layout,
            groups=BlockGroups(4),
            num_ranks=NUM_RANKS,
            max_tokens=MAX_TOKENS,
        )
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.connect(reports_endpoint(folder))

    def serve(self) -> None:
        """All ranks can be asked for blocks."""
        for rank in range(NUM_RANKS):
            self.say(Serves(rank, Endpoint(f"ipc://{rank}")))
        self.poll_until(lambda: len(self.contexts._endpoints) == NUM_RANKS)

    def say(self, message: Serves | Fetched) -> None:
        self._socket.send(encode_block_message(message))

    def poll_until(self, holds: object) -> None:
        def look() -> bool:
            self.contexts.poll()
            return bool(holds())  # type: ignore[operator]

        until(look, "the report came")

    def close(self) -> None:
        self._context.destroy(linger=0)
        self.contexts.close()


@pytest.fixture
def leaders(tmp_path: Path) -> Iterator[tuple[Leader, Leader]]:
    """Of an engine for prompts, and of one that goes on."""
    both = Leader(tmp_path / "a"), Leader(tmp_path / "b")
    both[0].serve()
    yield both
    for leader in both:
        leader.close()


def context_only(number: int, length: int = 9, **options: object) -> Request:
    return structs.replace(make_request(number, length, 6, **options), request_type=RequestType.CONTEXT_ONLY)


def params_of(leader: Leader, request: Request) -> ContextPhaseParams:
    leader.contexts.take(request)
    sent = leader.contexts.as_ranks_get_it(request)
    assert sent.context_transfer is not None and len(sent.context_transfer.export_key) == 16
    result = Result(output_token_ids=[5], finish_reason=FinishReason.LENGTH, is_final=True, is_sequence_final=True)
    answered = leader.contexts.answered(Response(request_id=request.request_id, result=result)).result
    leader.contexts.release(request.request_id)
    assert answered is not None and answered.context_phase_params is not None
    return answered.context_phase_params


def generation_only(number: int, params: ContextPhaseParams, length: int = 9) -> Request:
    # Requests of make_request differ in their prompts.
    prompt = make_request(1, length).input_token_ids
    return structs.replace(
        make_request(number, prompt, 6), request_type=RequestType.GENERATION_ONLY, context_phase_params=params
    )


def test_a_request_waits_until_every_rank_has_its_part(leaders: tuple[Leader, Leader]) -> None:
    first, second = leaders
    request = generation_only(7, params_of(first, context_only(1)))
    assert second.contexts.take(request)
    (fetch,) = second.contexts.take_orders().fetches
    assert (fetch.request_id, fetch.is_local, fetch.num_blocks) == (7, True, 3)
    assert [endpoint.local for endpoint in fetch.endpoints] == ["ipc://0", "ipc://1"]
    second.say(Fetched(0, 7, fetch.number, True))
    second.poll_until(lambda: second.contexts._arrivals[7].missing == {1})
    assert not second.contexts.is_ready(7)
    second.say(Fetched(1, 7, fetch.number, True))
    second.poll_until(lambda: second.contexts.is_ready(7))
    sent = second.contexts.as_ranks_get_it(request)
    assert sent.num_arrived_tokens == 9 and sent.context_phase_params is None
    second.contexts.begun(7)
    second.contexts.release(7)
    assert second.contexts.take_orders() is NO_BLOCK_ORDERS, "the ranks drop what is left at the request's end"


def test_if_one_rank_misses_its_part_all_compute_the_prompt(leaders: tuple[Leader, Leader]) -> None:
    first, second = leaders
    request = generation_only(7, params_of(first, context_only(1)))
    second.contexts.take(request)
    (fetch,) = second.contexts.take_orders().fetches
    for rank, has_arrived in enumerate((False, True)):
        second.say(Fetched(rank, 7, fetch.number, has_arrived))
    second.poll_until(lambda: second.contexts.is_ready(7))
    assert second.contexts.as_ranks_get_it(request).num_arrived_tokens == 0


def test_another_adapter_of_that_name_computes_the_prompt(leaders: tuple[Leader, Leader]) -> None:
    first, second = leaders
    context = structs.replace(context_only(1), loaded_adapter=LoadedAdapter(3, b"its digest"))
    request = generation_only(7, params_of(first, context))
    second.contexts.take(request)
    second.contexts._arrivals[7].missing.clear()
    for digest, num_tokens in ((b"its digest", 9), (b"another", 0)):
        adapted = structs.replace(request, loaded_adapter=LoadedAdapter(8, digest))
        assert second.contexts.as_ranks_get_it(adapted).num_arrived_tokens == num_tokens


def test_reports_of_a_fetch_that_was_given_up_count_for_no_later_one(leaders: tuple[Leader, Leader]) -> None:
    first, second = leaders
    request = generation_only(7, params_of(first, context_only(1)))
    second.contexts.take(request)
    (old,) = second.contexts.take_orders().fetches
    second.contexts.release(7)
    second.contexts.take(request)
    orders = second.contexts.take_orders()
    assert orders.drops == [7] and len(orders.fetches) == 1
    for number in (old.number, orders.fetches[0].number):
        for rank in range(NUM_RANKS):
            second.say(Fetched(rank, 7, number, number != old.number))
    second.poll_until(lambda: second.contexts.is_ready(7))
    assert second.contexts.as_ranks_get_it(request).num_arrived_tokens == 9


def test_a_fetch_that_no_rank_was_told_of_is_forgotten(leaders: tuple[Leader, Leader]) -> None:
    first, second = leaders
    second.contexts.take(generation_only(7, params_of(first, context_only(1))))
    second.contexts.release(7)
    assert second.contexts.take_orders() == BlockOrders()


def test_no_more_is_fetched_than_there_is_room_for(leaders: tuple[Leader, Leader]) -> None:
    first, second = leaders
    params = params_of(first, context_only(1))
    for number in (7, 8, 9):
        second.contexts.take(generation_only(number, params))
    assert [fetch.request_id for fetch in second.contexts.take_orders().fetches] == [7, 8]
    assert not second.contexts.has_orders
    second.contexts.begun(8)
    assert [fetch.request_id for fetch in second.contexts.take_orders().fetches] == [9]


def test_what_earlier_ranks_have_begun_hands_over_their_first_tokens_too(leaders: tuple[Leader, Leader]) -> None:
    delivered = [DeliveredSequence(token_ids=[4], is_finished=True), DeliveredSequence()]
    request = context_only(1, num_return_sequences=2, replay=Replay(sequences=delivered))
    contexts = leaders[0].contexts
    contexts.take(request)
    last = Result(output_token_ids=[5], sequence_index=1, finish_reason=FinishReason.END_ID, is_final=True)
    answered = contexts.answered(Response(request_id=1, result=last)).result
    assert answered is not None and answered.context_phase_params is not None
    assert answered.context_phase_params.first_gen_tokens == [4, 5]


def test_an_engine_waits_until_its_ranks_can_be_asked(tmp_path: Path) -> None:
    leader = Leader(tmp_path / "c")
    request = context_only(1)
    assert leader.contexts.take(request) and not leader.contexts.is_ready(1)
    leader.serve()
    assert leader.contexts.is_ready(1)
    leader.close()


def test_params_of_strangers_and_of_other_engines_are_refused(leaders: tuple[Leader, Leader], tmp_path: Path) -> None:
    first, second = leaders
    params = params_of(first, context_only(1))
    stranger, other = Leader(tmp_path / "c", secret=b"another"), Leader(tmp_path / "d", layout=b"another")
    for leader, sentence in ((stranger, "must be the bytes"), (other, "give both the same checkpoint")):
        with pytest.raises(InvalidRequest, match=sentence):
            leader.contexts.take(generation_only(7, params))
        leader.close()
    with pytest.raises(InvalidRequest, match="another prompt"):
        second.contexts.take(generation_only(7, params, length=8))


def test_what_was_accepted_goes_on_whatever_its_params_are_of(leaders: tuple[Leader, Leader], tmp_path: Path) -> None:
    params = params_of(leaders[0], context_only(1))
    # Another checkpoint may have been loaded meanwhile, one replica after the other.
    other = Leader(tmp_path / "c", layout=b"another")
    request = structs.replace(generation_only(7, params), replay=Replay())
    assert not other.contexts.take(request) and other.contexts.is_ready(7)
    sent = other.contexts.as_ranks_get_it(request)
    assert sent.num_arrived_tokens == 0 and sent.request_type is RequestType.CONTEXT_AND_GENERATION
    other.contexts.release(7)
    assert not other.contexts.has_orders
    resumed = structs.replace(request, replay=Replay(is_resumed=True))
    with pytest.raises(InvalidRequest, match="give both the same checkpoint"):
        other.contexts.take(resumed)
    other.close()


def test_params_of_another_version_are_refused(leaders: tuple[Leader, Leader]) -> None:
    packed = b"\x90"  # no fields
    params = ContextPhaseParams(
        req_id=1, first_gen_tokens=[], opaque_state=hmac.digest(b"secret", packed, "sha256") + packed
    )
    with pytest.raises(InvalidRequest, match="by this version of inflight"):
        leaders[1].contexts.take(generation_only(7, params))


def test_the_leader_compares_no_prompt_that_cannot_be(leaders: tuple[Leader, Leader]) -> None:
    request = generation_only(7, params_of(leaders[0], context_only(1)))
    limits = RequestLimits(vocab_size=100, max_seq_len=64, max_input_len=63, kv_cache_tokens=64, max_context_tokens=40)
    book = RequestBook(contexts=leaders[1].contexts, limits=limits)
    book.submit(FRONT, structs.replace(request, input_token_ids=[2**63]))
    (refusal,) = book.collect_responses()[FRONT]
    assert "token id" in refusal.error_msg


def test_the_book_hands_over_what_is_ready_and_refuses_the_rest(leaders: tuple[Leader, Leader]) -> None:
    first, second = leaders
    request = generation_only(7, params_of(first, context_only(1)))
    book = RequestBook(contexts=second.contexts)
    book.submit(FRONT, request)
    assert book.is_preparing and book.has_input and book.take(-1) == ([], {})
    (fetch,) = book.take_block_orders().fetches
    for rank in range(NUM_RANKS):
        second.say(Fetched(rank, 7, fetch.number, True))

    def taken() -> list[Request]:
        return book.take(-1)[0]

    found: list[Request] = []
    until(lambda: bool(found) or found.extend(taken()) or bool(found), "it is handed over")
    assert [each.num_arrived_tokens for each in found] == [9]
    book.submit(FRONT, structs.replace(request, request_id=8, context_transfer=found[0].context_transfer))
    (refusal,) = book.collect_responses()[FRONT]
    assert "set by the engine alone" in refusal.error_msg
    plain = RequestBook()
    plain.submit(FRONT, request)
    (refusal,) = plain.collect_responses()[FRONT]
    assert "set its key max_tokens_in_buffer" in refusal.error_msg
