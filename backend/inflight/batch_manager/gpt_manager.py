"""The worker loop of every rank: take requests in, run steps, answer.

Its only interfaces are the four callbacks and a Runner. Every rank runs this loop on the same input and takes the same
decisions; the callbacks see to it that only the leader sends responses. Times are recorded for the client and never
affect a decision: what a leader makes of them comes back to every rank as input.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from inflight.batch_manager.active_request import ActiveRequest
from inflight.batch_manager.callbacks import Callbacks
from inflight.batch_manager.scheduler import Scheduler
from inflight.batch_manager.sequence import Sequence
from inflight.batch_manager.statistics import (
    MemoryUsage,
    batching_stats,
    kv_cache_stats,
    request_stats,
    spec_decoding_stats,
)
from inflight.batch_manager_stats import BatchManagerStats
from inflight.errors import DuplicateRequest, RequestError, StepFailed
from inflight.kv_cache_events import KVCacheEvent
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.result import FinishReason
from inflight.runtime.runner import Runner
from inflight.scheduler_output import RowWork, SchedulerOutput
from inflight.speculative_decoding import NO_SPECULATION, SpeculativeDecodingConfig
from inflight.stats import IterationStats, RequestStatsPerIteration

logger = logging.getLogger(__name__)

MAX_OUTSTANDING_STEPS = 2
"""One that the device computes and one queued behind it, so that the device never waits for the host. With more
pipeline stages than that, one for each."""


class GptManager:
    """In-flight batching over one Runner."""

    def __init__(
        self,
        *,
        runner: Runner,
        scheduler: Scheduler,
        callbacks: Callbacks,
        limits: RequestLimits,
        speculative_decoding: SpeculativeDecodingConfig = NO_SPECULATION,
        terminate_request_id: int | None = None,
        raise_on_step_failure: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
        wall_clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`speculative_decoding`: of requests that do not say.

        `terminate_request_id`: a request with this id ends the loop at once; active requests get no response.

        `raise_on_step_failure`: let a step's exception leave the loop instead of failing the requests in it. For more
        than one rank, where an exception on one rank alone would let the ranks drift apart. `clock`: steady, in ns.
        Raises ValueError if one of the two mandatory callbacks is missing.
        """
        if not callable(callbacks.get_inference_requests) or not callable(callbacks.send_response):
            raise ValueError("GptManager needs the callbacks get_inference_requests and send_response")
        self._runner = runner
        self._scheduler = scheduler
        self._callbacks = callbacks
        self._limits = limits
        self._speculative_decoding = speculative_decoding
        self._terminate_request_id = terminate_request_id
        self._raise_on_step_failure = raise_on_step_failure
        self._clock = clock
        self._wall_clock = wall_clock
        self._active: dict[int, ActiveRequest] = {}
        self._num_active_sequences = 0  # that have not had their final result
        self._ready: dict[Sequence, None] = {}  # those with something to answer, in order
        self._max_outstanding = max(MAX_OUTSTANDING_STEPS, scheduler.num_stages)
        self._outstanding: deque[tuple[SchedulerOutput, Any]] = deque()  # with the runner's handle, oldest first
        self._is_sampled = True  # the newest of them
        self._launched: SchedulerOutput | None = None  # what this iteration launched
        self._busy_since_ns = 0  # with the oldest outstanding step
        self._num_iterations = 0
        # Of this iteration, for its statistics.
        self._began_ns = 0
        self._memory_usage = MemoryUsage(runner.memory_usage)
        self._num_accepted = 0
        self._completed: list[ActiveRequest] = []
        self._shutting_down = False
        self._terminated = False

    @property
    def num_active_requests(self) -> int:
        """Requests that were accepted and have not had their final response."""
        return len(self._active)

    def shutdown(self) -> None:
        """Fetch no more requests and return from run() when the active ones are done.

        Every rank must call it in the same iteration: from inside a callback, on what was broadcast.
        """
        self._shutting_down = True

    def note_time(self, now_ms: int) -> None:
        """It is so late on a clock that all ranks share, because it was broadcast: durations of retention count on it.

        Every rank must call it with the same times in the same iterations.
        """
        self._scheduler.kv_cache.note_time(now_ms)

    def limit_tokens(self, num_tokens: int) -> None:
        """From now on a step in which sequences decode has at most so many tokens, as far as prompts can go on.

        Every rank must call it with the same numbers in the same iterations.
        """
        self._scheduler.max_tokens_beside_decodes = num_tokens

    def cancel_sequence(self, request_id: int, index: int) -> None:
        """End one sequence of an active request with its tokens so far, while the others go on. Beams end together
        only: one of them, and what is unknown or has ended, is ignored.

        Every rank must call it in the same iteration: from inside a callback, on what was broadcast.
        """
        active = self._active.get(request_id)
        if active is None or not 0 <= index < len(active.sequences):
            return
        sequence = active.sequences[index]
        if sequence.beams is None and not sequence.is_finished:
            self._finish(sequence, FinishReason.CANCELLED)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until shutdown() is called or the terminating request arrives."""
        while not self._terminated and (self._active or not self._shutting_down):
            self.step()
        while self._outstanding and not self._terminated:
            self._collect_oldest()

    def step(self) -> None:
        """One iteration."""
        self._began_ns, self._num_accepted = self._clock(), 0
        self._scheduler.draft_count.reset()
        if len(self._outstanding) == self._max_outstanding or self._launched is None:
            self._collect_oldest()
        self._launched = None
        if self._outstanding and self._outstanding[-1][0].samples_late:
            self._launch()  # first of all: the device has nothing queued behind a step that was sampled only now
        self._poll_stop_signals()
        self._return_responses()
        if not self._shutting_down:
            self._fetch_new_requests()
        if self._terminated:
            return
        if self._launched is None:
            self._launch()
        self._return_stats()
        self._end_iteration()

    # -- its parts -----------------------------------------------------------------------------------------------------

    def _collect_oldest(self) -> None:
        if not self._outstanding:
            return
        scheduled, handle = self._outstanding.popleft()
        try:
            output = self._runner.collect(handle)
        except Exception as error:
            self._step_failed(error)
            return
        now_ns = self._clock()
        if self._callbacks.step_ended is not None:
            self._callbacks.step_ended(scheduled, now_ns - self._busy_since_ns)
        self._busy_since_ns = now_ns
        progressed = self._scheduler.update(scheduled, output, now_ns)
        self._ready.update(dict.fromkeys(progressed))
        number = self._num_iterations - len(self._outstanding)
        for sequence in progressed:
            sequence.first_iter = sequence.first_iter or number
            sequence.last_iter = number
        self._sample()

    def _poll_stop_signals(self) -> None:
        if self._callbacks.poll_stop_signals is None:
            return
        stops = self._callbacks.poll_stop_signals()
        reasons = stops if isinstance(stops, Mapping) else {}
        for request_id in sorted(stops):
            active = self._active.get(request_id)
            for sequence in active.sequences if active is not None else ():
                if not sequence.is_finished:
                    self._finish(sequence, reasons.get(request_id, FinishReason.CANCELLED))

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._scheduler.stop(sequence, reason)
        self._ready.update(dict.fromkeys(sequence.returned))

    def _return_responses(self) -> None:
        ready, self._ready = self._ready, {}
        for sequence in ready:
            active = self._active.get(sequence.request.request_id)
            if active is None:
                continue  # it ended just now, with the error of another of its sequences
            if sequence.error is not None:
                self._fail(active, sequence.error)
            elif active.request.streaming or sequence.is_finished:
                self._respond(active, sequence)

    def _respond(self, active: ActiveRequest, sequence: Sequence) -> None:
        num_before = active.num_open
        result = active.next_result(sequence)
        self._num_active_sequences -= num_before - active.num_open
        if result.is_final:
            del self._active[active.request.request_id]
            self._completed.append(active)
        self._callbacks.send_response(active.request.request_id, result, result.is_final, None)

    def _fail(self, active: ActiveRequest, error: RequestError) -> None:
        for sequence in active.sequences:
            self._scheduler.stop(sequence, FinishReason.CANCELLED, trusted=False)
        self._num_active_sequences -= active.num_open
        del self._active[active.request.request_id]
        self._completed.append(active)
        self._callbacks.send_response(active.request.request_id, None, True, error)

    def _fetch_new_requests(self) -> None:
        was_idle = not self._active
        if was_idle:
            self._end_iteration()  # the callback may wait for as long as nobody asks for anything
        max_num_requests = max(self._scheduler.max_batch_size - self._num_active_sequences, 0)
        requests = self._callbacks.get_inference_requests(max_num_requests)
        if was_idle:
            self._began_ns = self._clock()
        for request in requests:
            if request.request_id == self._terminate_request_id:
                self._terminated = True
                return
            try:
                self._accept(request)
            except RequestError as error:
                self._callbacks.send_response(request.request_id, None, True, error)
        while was_idle and self._outstanding:
            self._collect_oldest()  # no request waits for these steps; a failure of theirs must not fail the new ones

    def _accept(self, request: Request) -> None:
        """Put a request's sequences into the queue. Raises RequestError."""
        if request.request_id in self._active:
            raise DuplicateRequest(
                f"Cannot process new request:   Request ID {request.request_id} already exist in request table. "
                "Will not be added."
            )
        self._limits.validate(request)
        active = ActiveRequest(
            request,
            max_seq_len=self._scheduler.max_seq_len,
            arrival_time_ns=self._clock(),
            speculative_decoding=self._speculative_decoding,
        )
        for sequence in active.queued:
            self._scheduler.add(sequence)
        self._active[request.request_id] = active
        self._num_active_sequences += active.num_open
        self._num_accepted += 1
        for sequence in active.queued if request.replay is not None else ():
            reason = sequence.reason_to_finish() if sequence.num_output_tokens else FinishReason.NOT_FINISHED
            if reason:
                self._finish(sequence, reason)

    def _launch(self) -> None:
        self._launched = None
        if not self._active:
            return
        scheduled = self._scheduler.schedule(self._clock())
        if scheduled is None:
            return
        try:
            handle = self._runner.forward(scheduled)
        except Exception as error:
            self._step_failed(error)
            return
        if not self._outstanding:
            self._busy_since_ns = self._clock()
        self._outstanding.append((scheduled, handle))
        self._is_sampled = False
        self._launched = scheduled
        self._num_iterations += 1
        self._sample()

    def _sample(self) -> None:
        """Start sampling for the newest step: at once, or, if it depends on earlier tokens, when the host has these."""
        if self._is_sampled:
            return
        scheduled, handle = self._outstanding[-1]
        if scheduled.samples_late and len(self._outstanding) > 1:
            return
        self._is_sampled = True
        try:
            forced = self._runner.sample(handle)
        except Exception as error:
            self._step_failed(error)
            return
        if forced:
            self._scheduler.note_forced(forced)

    def _return_stats(self) -> None:
        send, is_wanted = self._callbacks.return_batch_manager_stats, self._callbacks.wants_batch_manager_stats
        if send is not None and self._active and (is_wanted is None or is_wanted()):
            send(BatchManagerStats.of(self.statistics()).to_json())

    def _end_iteration(self) -> None:
        if self._callbacks.end_iteration is not None and (self._active or self._completed):
            self._callbacks.end_iteration()
        self._completed.clear()

    # -- trouble -------------------------------------------------------------------------------------------------------

    def _step_failed(self, error: Exception) -> None:
        """Fail all requests that depend on an outstanding step, and go on with the others. If no step can run any more,
        the exception leaves the loop instead."""
        if self._raise_on_step_failure or not self._runner.survives(error):
            raise error
        logger.error("a step failed; the requests in it end with an error", exc_info=error)
        while self._outstanding:
            _, handle = self._outstanding.popleft()
            try:
                if not self._outstanding and not self._is_sampled:
                    self._runner.sample(handle)
                self._runner.collect(handle)
            except Exception as consequence:
                if not self._runner.survives(consequence):
                    raise
                logger.debug("a step after the failed one failed too", exc_info=consequence)
        self._is_sampled = True
        lost = self._scheduler.abandon(StepFailed(f"the step that computed the request failed: {error}"))
        self._ready.update(dict.fromkeys(lost))
        self._launched = None

    # -- numbers -------------------------------------------------------------------------------------------------------

    def statistics(self) -> IterationStats:
        """The statistics now. Requests that wait on the leader are not known here."""
        scheduler, now_ns = self._scheduler, self._clock()
        cpu_memory, gpu_memory, pinned_memory = self._memory_usage.at(now_ns)
        return IterationStats(
            timestamp=self._wall_clock().strftime("%m-%d-%Y %H:%M:%S.%f"),
            iter=self._num_iterations,
            iter_latency_ms=(now_ns - self._began_ns) / 1e6,
            num_new_active_requests=self._num_accepted,
            num_active_requests=len(self._active),
            num_completed_requests=len(self._completed),
            max_num_active_requests=scheduler.max_batch_size,
            max_batch_size_static=scheduler.max_batch_size,
            max_batch_size_runtime=scheduler.max_batch_size,
            max_num_tokens_static=scheduler.max_num_tokens,
            max_num_tokens_runtime=scheduler.max_tokens_beside_decodes,
            gpu_mem_usage=gpu_memory,
            cpu_mem_usage=cpu_memory,
            pinned_mem_usage=pinned_memory,
            kv_cache_stats=kv_cache_stats(scheduler.kv_cache),
            inflight_batching_stats=batching_stats(
                self._launched_rows, num_paused=scheduler.num_paused, num_sequences=self._num_active_sequences
            ),
            spec_decoding_stats=spec_decoding_stats(scheduler.draft_count),
        )

    def request_statistics(self) -> RequestStatsPerIteration:
        """Of every sequence that was active in this iteration, in order of acceptance; completed ones come first."""
        rows = frozenset(work.row for work in self._launched_rows)
        requests = [*self._completed, *self._active.values()]
        found = [request_stats(sequence, rows) for active in requests for sequence in active.sequences]
        return RequestStatsPerIteration(iter=self._num_iterations, request_stats=found)

    @property
    def notes_kv_cache_events(self) -> bool:
        """Whether this rank notes what happens to the cached blocks."""
        return self._scheduler.kv_cache.has_event_buffer

    def take_kv_cache_events(self) -> list[KVCacheEvent]:
        """What happened to cached blocks since the last call; always empty on ranks that note no events."""
        return self._scheduler.kv_cache.take_events()

    @property
    def _launched_rows(self) -> list[RowWork]:
        return self._launched.rows if self._launched is not None and self._active else []
