"""What a front records of one request in flight: the request and what was delivered of it, which outlive the ranks.

When ranks die, each entry either ends, for a reason that its client is told, or waits and becomes the Request that
others go on from (`message`): those of another replica, or new ones. From the record come also the parts of a response
that ranks need not send: the client's own id, and all tokens so far for a request that wants them with every response.
Knows no lock and no socket.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import structs

from inflight.config import EngineConfig
from inflight.context_phase import ContextPhaseParams, RequestType
from inflight.errors import EngineUnavailable, InflightError, RequestCancelled, RequestTimedOut
from inflight.executor.front.phase import Phase, first_phase
from inflight.executor.front.routing import Placement
from inflight.executor.front.suspicion import Suspicion
from inflight.lora import LoraConfig, LoRARequest
from inflight.replay import DeliveredSequence, Replay
from inflight.request import Request
from inflight.result import FinishReason, PerfMetrics, Response, Result

RANKS_LOST = "the engine's ranks died while the request was in flight"
RANKS_REPLACED = "the engine's ranks were replaced while the request was in flight"


@dataclass(slots=True)
class Delivered:
    """What was delivered of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Kept only for a request that wants everything with every response."""
    cum_log_prob: float = 0.0
    num_iterations: int = 0
    is_finished: bool = False
    is_cancelled: bool = False
    """The ranks were asked to end it."""

    def note_state(self, result: Result) -> None:
        """How it stands behind its newest tokens."""
        self.cum_log_prob = result.cum_log_prob
        self.num_iterations = result.decoding_iter
        self.is_finished = result.is_sequence_final


@dataclass(slots=True)
class JournalEntry:
    """One request from its acceptance to its final response."""

    request: Request
    config: EngineConfig
    """Of which the bounds named journal_* are used."""
    adapter: LoraConfig | LoRARequest | None = None
    """What new ranks load its adapter from, where its client relies on the ranks to have it."""
    accepted_at: float = field(default_factory=time.monotonic)
    sequences: dict[int, Delivered] = field(default_factory=dict)
    """By sequence index; a sequence without a result yet is not there."""
    num_replays: int = 0
    placement: Placement | None = None
    """The replica that it was sent to; None = it waits for one."""
    suspicion: Suspicion = field(default_factory=Suspicion)
    """That ranks may have died of it."""
    has_waited: bool = False
    """No ranks served when it was accepted: those that it is sent to later find no queue full for it."""
    phase: Phase = Phase.WHOLE
    """Which part of it the ranks compute that have it, or the next ones."""
    is_handed_over: bool = False
    """Its context phase has just ended, and it waits for a replica that goes on."""
    is_started: bool = False
    """Some ranks have begun it: it ends with its tokens so far, not with an error, if it is cancelled."""
    _started_ns: int = 0
    """When the first ranks began it, and when its first token came; 0 = not yet. time.monotonic_ns(), which the leader
    counts by, too."""
    _first_token_ns: int = 0
    _max_delivered: int = 0
    """Tokens of its output up to which it is not too long."""
    _is_simple: bool = False
    """Its client gets what the ranks of one replica send as it is, and all of it but once."""
    _num_delivered: int = 0
    _num_moves: int = 0
    """Replays because ranks were replaced, which journal_max_replays does not bound."""
    _is_cancelled: bool = False
    _num_cached_tokens: int = 0
    """Of its prompt, where its context phase began."""
    _context_phase_params: ContextPhaseParams | None = None
    """From which the generation phase begins, until ranks have taken it up."""
    _held: list[Result] = field(default_factory=list)
    """Of the context phase of a request that is answered at its end."""

    def __post_init__(self) -> None:
        """Of a request that is resumed its client has something from ranks that this front never had."""
        self.phase = first_phase(self.request, self.config)
        is_changed = self._is_beam_search or self.request.return_all_generated_tokens or self.request.client_id
        self._max_delivered = self.config.journal_max_tokens - len(self.request.input_token_ids)
        self._is_simple = self.phase is Phase.WHOLE and not is_changed
        delivered = [] if self.request.replay is None else self.request.replay.sequences
        for index, each in enumerate(delivered):
            self.is_started = True
            self._num_delivered += len(each.token_ids)
            self.sequences[index] = Delivered(
                token_ids=list(each.token_ids),
                cum_log_prob=each.cum_log_prob,
                num_iterations=each.num_iterations,
                is_finished=each.is_finished,
            )

    # -- responses of ranks --------------------------------------------------------------------------------------------

    def place(self, placement: Placement | None) -> None:
        """It is sent to a replica, or leaves the one that has it."""
        if self.placement is not None:
            self.placement.end()
        self.placement = placement

    def note_started(self) -> None:
        self.is_started = True
        self.suspicion.note_started()
        self._started_ns = self._started_ns or time.monotonic_ns()
        if self.phase is Phase.GENERATION:
            self._context_phase_params = None

    def note_next(self, response: Response) -> bool:
        """Record what nearly every response is: further tokens of a simple request, which goes on. False = it is
        another one, for `note`."""
        result = response.result
        if result is None or result.is_final or not self._is_simple or not self.suspicion.has_progressed:
            return False
        delivered = self.sequences.get(result.sequence_index)
        if delivered is None:
            return False
        self._append(delivered, result)
        delivered.note_state(result)
        return True

    def note(self, response: Response) -> list[Response]:
        """Record a response that is being delivered, and return what the caller receives: usually one response, none if
        the client has had it from earlier ranks."""
        if response.result is None:
            reason = _REASONS.get(response.outcome)
            # The new ranks had not begun it again; for its client it had begun.
            return self.end(reason) if reason is not None and self.is_started else [self._signed(response)]
        if not self.suspicion.is_running:
            self.note_started()
        if self._is_apart and self.phase is Phase.CONTEXT:
            return self._note_context(response.result)
        result = self._note(response.result)
        if result is None:
            return []
        return [self._signed(response if result is response.result else structs.replace(response, result=result))]

    def _note_context(self, result: Result) -> list[Response]:
        """The same of the context phase. What was cut off behind its first token has not ended for its client; a
        request that is answered at its end is told nothing, and gets its first tokens from the ranks that go on."""
        params, reason = result.context_phase_params, result.finish_reason
        self._num_cached_tokens = self._num_cached_tokens or result.num_cached_tokens
        is_over = result.is_final and params is None
        if result.is_final and reason is FinishReason.TIMED_OUT:
            return self.end(reason)
        if self._is_cancelled and (params is not None or reason is FinishReason.CANCELLED):
            return self.end(FinishReason.CANCELLED)
        if reason is FinishReason.LENGTH:
            result = structs.replace(result, finish_reason=FinishReason.NOT_FINISHED, is_sequence_final=False)
        if not self.request.streaming:
            self._held.append(result)
        if params is not None:
            result = structs.replace(result, is_final=False, context_phase_params=None, request_perf_metrics=None)
        results = [result] if self.request.streaming else self._held if is_over else []
        noted = [each for each in map(self._note, results) if each is not None]
        responses = [self._signed(Response(request_id=self.request.request_id, result=each)) for each in noted]
        return responses if params is None else [*responses, *self._hand_over(params)]

    def _hand_over(self, params: ContextPhaseParams) -> list[Response]:
        """Let other ranks go on. Returns the last responses of sequences that were to end."""
        self.place(None)
        self.suspicion.hand_over()
        self._held.clear()
        ended = self._end([index for index in self._open if self._of(index).is_cancelled], FinishReason.CANCELLED)
        if not ended or not ended[-1].is_final:
            self.phase, self.is_handed_over = Phase.GENERATION, True
            self._context_phase_params = params
        return ended

    @property
    def is_second_half(self) -> bool:
        """Whether it goes on behind a context phase that its client does not know of."""
        return self._is_apart and self.phase is Phase.GENERATION

    @property
    def _is_apart(self) -> bool:
        """Whether this front splits it: its client knows of no phases."""
        return self.request.request_type is RequestType.CONTEXT_AND_GENERATION

    def _note(self, result: Result) -> Result | None:
        delivered = self._of(result.sequence_index)
        if self.is_second_half and result.num_cached_tokens:
            # What the ranks of its context phase have handed over was in no cache.
            result = structs.replace(result, num_cached_tokens=self._num_cached_tokens)
        if self._is_beam_search:
            if self.num_replays and result.decoding_iter <= delivered.num_iterations:
                # A replayed search repeats its choices from the first one on.
                return self._last_result(result, delivered) if result.is_sequence_final else None
            delivered.token_ids, delivered.log_probs = list(result.output_token_ids), list(result.log_probs)
        else:
            self._append(delivered, result)
            if self.request.return_all_generated_tokens:
                result = structs.replace(
                    result, output_token_ids=list(delivered.token_ids), log_probs=list(delivered.log_probs)
                )
        self.suspicion.note_progress()
        self._first_token_ns = self._first_token_ns or time.monotonic_ns()
        if (self.num_replays or self.is_second_half) and result.request_perf_metrics is not None:
            result = structs.replace(result, request_perf_metrics=self._since_acceptance(result.request_perf_metrics))
        delivered.note_state(result)
        return result

    def ended_by_itself(self, response: Response) -> list[int] | None:
        """All tokens of the sequence that this response, the newest, has ended, but for the one that did; None if that
        is not how it ended, or they were too many to be kept."""
        result = response.result
        if result is None or not result.is_sequence_final or result.finish_reason is not FinishReason.END_ID:
            return None
        token_ids = self._of(result.sequence_index).token_ids
        return token_ids[:-1] if token_ids else None

    def _append(self, delivered: Delivered, result: Result) -> None:
        num_new = len(result.output_token_ids)
        self._num_delivered += num_new
        if self.placement is not None:
            self.placement.note_tokens(num_new)
        if self.request.return_all_generated_tokens:
            delivered.log_probs += result.log_probs
        elif self._is_too_long:
            delivered.token_ids.clear()
            return
        delivered.token_ids += result.output_token_ids

    @staticmethod
    def _last_result(result: Result, delivered: Delivered) -> Result:
        """Of a search that is ended from outside before it has repeated what the client has."""
        delivered.is_finished = True
        return structs.replace(
            result,
            output_token_ids=list(delivered.token_ids),
            log_probs=list(delivered.log_probs),
            cum_log_prob=delivered.cum_log_prob,
            decoding_iter=delivered.num_iterations,
        )

    # -- responses without ranks ---------------------------------------------------------------------------------------

    def fail(self, error: InflightError) -> Response:
        """The final response of a request that no rank answers."""
        return self._signed(Response.of_error(self.request.request_id, error))

    def end(self, reason: FinishReason) -> list[Response]:
        """Its last responses, if no rank will give any: each sequence ends with its tokens so far. A request that no
        rank has begun ends with an error."""
        if not self.is_started:
            return [self.fail(_ERRORS[reason](_SENTENCES[reason].format(self.request.request_id)))]
        return self._end(range(self.request.num_return_sequences), reason)

    def end_sequence(self, index: int) -> list[Response]:
        """One of its sequences is cancelled while no rank has the request."""
        return self._end([index], FinishReason.CANCELLED) if self._can_end(index) else []

    def cancel(self) -> None:
        """The ranks were asked to end it."""
        self._is_cancelled = True

    def cancel_sequence(self, index: int) -> None:
        """The same of one sequence."""
        if self._can_end(index):
            self._of(index).is_cancelled = True

    def _end(self, indices: Iterable[int], reason: FinishReason) -> list[Response]:
        responses = []
        for index in indices:
            delivered = self._of(index)
            if delivered.is_finished:
                continue
            delivered.is_finished = True
            is_final = not self._open
            has_everything = self._is_beam_search or self.request.return_all_generated_tokens
            result = Result(
                output_token_ids=list(delivered.token_ids) if has_everything else [],
                log_probs=list(delivered.log_probs) if has_everything else [],
                cum_log_prob=delivered.cum_log_prob,
                finish_reason=reason,
                is_final=is_final,
                sequence_index=index,
                is_sequence_final=True,
                decoding_iter=delivered.num_iterations,
                request_perf_metrics=self._since_acceptance(PerfMetrics()) if is_final else None,
            )
            responses.append(self._signed(Response(request_id=self.request.request_id, result=result)))
        return responses

    def _since_acceptance(self, metrics: PerfMetrics) -> PerfMetrics:
        """`metrics` of the last ranks, with the times that began before them."""
        return structs.replace(
            metrics,
            arrival_time_ns=int(self.accepted_at * 1e9),
            first_scheduled_time_ns=self._started_ns,
            first_token_time_ns=self._first_token_ns,
            last_token_time_ns=metrics.last_token_time_ns or self._first_token_ns,
        )

    def _signed(self, response: Response) -> Response:
        client_id = self.request.client_id
        return structs.replace(response, client_id=client_id) if client_id else response

    # -- the death of ranks --------------------------------------------------------------------------------------------

    def ranks_died(self, *, planned: bool = False) -> list[Response]:
        """Its last responses, if it does not wait for other ranks; those of sequences that were to end. `planned`: the
        ranks are ended on purpose, and by nothing that they run."""
        if self.placement is None:
            return []
        self.suspicion.ranks_died(self.placement.replica, planned=planned)
        self.place(None)
        self._held.clear()
        if self._is_cancelled:
            return self.end(FinishReason.CANCELLED)
        responses = self._end([index for index in self._open if self._of(index).is_cancelled], FinishReason.CANCELLED)
        if responses and responses[-1].is_final:
            return responses
        sentence = self._cannot_go_on(planned=planned)
        if sentence:
            return [*responses, self.fail(EngineUnavailable(sentence))]
        self.num_replays += 1
        self._num_moves += planned
        return responses

    def _cannot_go_on(self, *, planned: bool) -> str:
        """Why it is not replayed; empty if it is."""
        config = self.config
        if self._is_too_long:
            how = RANKS_REPLACED if planned else RANKS_LOST
            return f"{how}, and it has more tokens than journal_max_tokens allows ({config.journal_max_tokens})"
        num_deaths = self.suspicion.num_deaths
        if num_deaths >= config.journal_max_deaths:
            return f"{RANKS_LOST}, {num_deaths} times in a row: it may be what they die of (journal_max_deaths)"
        if (replays := self.num_replays - self._num_moves) >= config.journal_max_replays and not planned:
            return f"{RANKS_LOST}, after {replays} replays (journal_max_replays)"
        return ""

    def is_overdue(self, now: float) -> bool:
        """Whether its allotted time has passed; `now`: time.monotonic()."""
        allotted = self.request.allotted_time_ms
        return allotted > 0 and now - self.accepted_at >= allotted / 1000

    def message(self, now: float, *, with_adapter: bool) -> Request:
        """The request as ranks get it that were launched after it was accepted. `now`: time.monotonic().
        `with_adapter`: whether they have not been told yet where to load its adapter from."""
        request = self.request
        if with_adapter and isinstance(self.adapter, LoraConfig):
            request = structs.replace(request, lora_config=self.adapter)
        elif with_adapter and self.adapter is not None:
            request = structs.replace(request, lora_request=self.adapter, lora_config=None)
        waited_ms = int((now - self.accepted_at) * 1000)
        if request.allotted_time_ms and waited_ms:
            request = structs.replace(request, allotted_time_ms=max(request.allotted_time_ms - waited_ms, 1))
        if self._is_apart and self.phase is Phase.CONTEXT:
            request = structs.replace(request, request_type=RequestType.CONTEXT_ONLY)
        elif self._context_phase_params is not None:
            params = self._context_phase_params
            request = structs.replace(request, request_type=RequestType.GENERATION_ONLY, context_phase_params=params)
        # A replay finds no queue full for it.
        if not (self.num_replays or self.has_waited or self.is_second_half):
            return request
        sequences: list[DeliveredSequence] = []
        if not self._is_beam_search and any(each.token_ids or each.is_finished for each in self.sequences.values()):
            sequences = [_replayed(self._of(index)) for index in range(request.num_sequences)]
        suspicion = self.suspicion
        is_suspect = suspicion.is_released or 0 < suspicion.num_deaths >= self.config.journal_max_deaths - 1
        return structs.replace(request, replay=Replay(sequences=sequences, is_suspect=is_suspect))

    # -- the record ----------------------------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Of its prompt, and of what was delivered: what a replica has to compute that takes it over."""
        return len(self.request.input_token_ids) + self._num_delivered

    @property
    def _is_beam_search(self) -> bool:
        """Whether each result holds all tokens so far, in place of those of earlier results."""
        return self.request.sampling_config.beam_width > 1

    @property
    def _is_too_long(self) -> bool:
        return self._num_delivered > self._max_delivered

    @property
    def _open(self) -> list[int]:
        """Indices of the sequences without their last result."""
        return [index for index in range(self.request.num_return_sequences) if not self._of(index).is_finished]

    def _can_end(self, index: int) -> bool:
        is_one = self.is_started and 0 <= index < self.request.num_return_sequences
        return is_one and not self._is_beam_search and not self._of(index).is_finished

    def _of(self, index: int) -> Delivered:
        delivered = self.sequences.get(index)
        if delivered is None:
            delivered = self.sequences[index] = Delivered()
        return delivered


_REASONS = {
    RequestCancelled.outcome: FinishReason.CANCELLED,
    RequestTimedOut.outcome: FinishReason.TIMED_OUT,
}
_ERRORS: dict[FinishReason, type[InflightError]] = {
    FinishReason.CANCELLED: RequestCancelled,
    FinishReason.TIMED_OUT: RequestTimedOut,
}
_SENTENCES = {
    FinishReason.CANCELLED: "request Id {} has been stopped. Request is ignored.",
    FinishReason.TIMED_OUT: "request Id {} waited longer than the time it was allotted",
}


def _replayed(delivered: Delivered) -> DeliveredSequence:
    return DeliveredSequence(
        token_ids=list(delivered.token_ids),
        cum_log_prob=delivered.cum_log_prob,
        num_iterations=delivered.num_iterations,
        is_finished=delivered.is_finished,
    )
