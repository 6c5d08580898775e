"""The worker loop of every rank: take requests in, run steps, answer.

Meets the outside only through the four callbacks and a Runner. Every rank runs this loop on equal input and comes to
equal decisions; that only the leader's answers leave is the callbacks' business. Times are noted for the client
and decide nothing.
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
from inflight.errors import DuplicateRequest, RequestError, StepFailed
from inflight.request import Request, RequestLimits
from inflight.result import FinishReason
from inflight.runtime.runner import Runner
from inflight.scheduler_output import SchedulerOutput
from inflight.stats import IterationStats

logger = logging.getLogger(__name__)

MAX_OUTSTANDING_STEPS = 2
"""One that the device works on and one behind it, so that it never waits for the host."""


class GptManager:
    """In-flight batching over one Runner."""

    def __init__(
        self,
        *,
        runner: Runner,
        scheduler: Scheduler,
        callbacks: Callbacks,
        limits: RequestLimits,
        terminate_request_id: int | None = None,
        raise_on_step_failure: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
        wall_clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`terminate_request_id`: a request with this id ends the loop at once; active requests get no response.

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
        self._terminate_request_id = terminate_request_id
        self._raise_on_step_failure = raise_on_step_failure
        self._clock = clock
        self._wall_clock = wall_clock
        self._active: dict[int, ActiveRequest] = {}
        self._num_active_sequences = 0  # that have not had their final result
        self._ready: dict[Sequence, None] = {}  # those with something to answer, in order
        self._outstanding: deque[tuple[SchedulerOutput, Any]] = deque()  # with the runner's handle, oldest first
        self._is_sampled = True  # the newest of them
        self._launched: SchedulerOutput | None = None  # what this iteration launched
        self._num_iterations = 0
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

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until shutdown() or the terminating request."""
        while not self._terminated and (self._active or not self._shutting_down):
            self.step()
        while self._outstanding and not self._terminated:
            self._collect_oldest()

    def step(self) -> None:
        """One iteration."""
        if len(self._outstanding) == MAX_OUTSTANDING_STEPS or self._launched is None:
            self._collect_oldest()
        self._poll_stop_signals()
        self._return_responses()
        if not self._shutting_down:
            self._fetch_new_requests()
        if self._terminated:
            return
        self._launch()
        self._return_stats()

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
        progressed = self._scheduler.update(scheduled, output, self._clock())
        self._ready.update(dict.fromkeys(progressed))
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
        self._ready[sequence] = None

    def _return_responses(self) -> None:
        ready, self._ready = self._ready, {}
        for sequence in ready:
            active = self._active.get(sequence.request.request_id)
            if active is None:
                continue  # it ended just now, with the error of another of its sequences
            if sequence.error is not None:
                self._fail(active, sequence.error)
            elif sequence.is_finished or active.request.streaming:
                self._respond(active, sequence)

    def _respond(self, active: ActiveRequest, sequence: Sequence) -> None:
        result = active.next_result(sequence)
        self._num_active_sequences -= result.is_sequence_final
        if result.is_final:
            del self._active[active.request.request_id]
        self._callbacks.send_response(active.request.request_id, result, result.is_final, None)

    def _fail(self, active: ActiveRequest, error: RequestError) -> None:
        for sequence in active.sequences:
            self._scheduler.stop(sequence, FinishReason.CANCELLED, trusted=False)
        self._num_active_sequences -= active.num_open
        del self._active[active.request.request_id]
        self._callbacks.send_response(active.request.request_id, None, True, error)

    def _fetch_new_requests(self) -> None:
        was_idle = not self._active
        max_num_requests = max(self._scheduler.max_batch_size - self._num_active_sequences, 0)
        for request in self._callbacks.get_inference_requests(max_num_requests):
            if request.request_id == self._terminate_request_id:
                self._terminated = True
                return
            try:
                self._accept(request)
            except RequestError as error:
                self._callbacks.send_response(request.request_id, None, True, error)
        while was_idle and self._outstanding:
            self._collect_oldest()  # nobody waits for what is left; should it fail, then not with the newcomers

    def _accept(self, request: Request) -> None:
        """Put a request's sequences into the queue. Raises RequestError."""
        if request.request_id in self._active:
            raise DuplicateRequest(
                f"Cannot process new request:   Request ID {request.request_id} already exist in request table. "
                "Will not be added."
            )
        self._limits.validate(request)
        active = ActiveRequest(request, max_seq_len=self._scheduler.max_seq_len, arrival_time_ns=self._clock())
        for sequence in active.sequences:
            self._scheduler.add(sequence)
        self._active[request.request_id] = active
        self._num_active_sequences += len(active.sequences)
        for sequence in active.sequences if request.generated_token_ids else ():
            reason = sequence.reason_to_finish()
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
        self._outstanding.append((scheduled, handle))
        self._is_sampled = False
        self._launched = scheduled
        self._num_iterations += 1
        self._sample()

    def _sample(self) -> None:
        """Start the second half of the newest step: at once, or when the host knows the tokens that it depends on."""
        if self._is_sampled:
            return
        scheduled, handle = self._outstanding[-1]
        if scheduled.samples_late and len(self._outstanding) > 1:
            return
        self._is_sampled = True
        try:
            self._runner.sample(handle)
        except Exception as error:
            self._step_failed(error)

    def _return_stats(self) -> None:
        send, is_wanted = self._callbacks.return_batch_manager_stats, self._callbacks.wants_batch_manager_stats
        if send is not None and self._active and (is_wanted is None or is_wanted()):
            send(self.statistics().to_json())

    # -- trouble -------------------------------------------------------------------------------------------------------

    def _step_failed(self, error: Exception) -> None:
        """Answer everybody whose fate depends on the outstanding steps with an error, and go on without them."""
        if self._raise_on_step_failure:
            raise error
        logger.error("a step failed; the requests in it end with an error", exc_info=error)
        while self._outstanding:
            _, handle = self._outstanding.popleft()
            try:
                if not self._outstanding and not self._is_sampled:
                    self._runner.sample(handle)
                self._runner.collect(handle)
            except Exception as consequence:
                logger.debug("a step after the failed one failed too", exc_info=consequence)
        self._is_sampled = True
        lost = self._scheduler.abandon(StepFailed(f"the step that computed the request failed: {error}"))
        self._ready.update(dict.fromkeys(lost))
        self._launched = None

    # -- numbers -------------------------------------------------------------------------------------------------------

    def statistics(self) -> IterationStats:
        """As of now: the callback is told of iterations with active requests only."""
        kv_cache, num_active = self._scheduler.kv_cache, len(self._active)
        rows = self._launched.rows if self._launched is not None and self._active else []
        prefills = [work for work in rows if work.is_prefill]
        cpu_memory, gpu_memory, pinned_memory = self._runner.memory_usage()
        return IterationStats(
            timestamp=self._wall_clock().strftime("%m-%d-%Y %H:%M:%S.%f"),
            iteration_counter=self._num_iterations,
            active_request_count=num_active,
            max_request_count=self._scheduler.max_batch_size,
            runtime_cpu_memory=cpu_memory,
            runtime_gpu_memory=gpu_memory,
            runtime_pinned_memory=pinned_memory,
            max_kv_cache_blocks=kv_cache.num_blocks,
            free_kv_cache_blocks=kv_cache.num_free_blocks,
            used_kv_cache_blocks=kv_cache.num_used_blocks,
            tokens_per_kv_cache_block=kv_cache.block_size,
            reused_kv_cache_blocks=kv_cache.num_reused_blocks,
            fraction_used_kv_cache_blocks=kv_cache.num_used_blocks / kv_cache.num_blocks,
            scheduled_requests=len(rows),
            context_requests=len(prefills),
            generation_requests=len(rows) - len(prefills),
            total_context_tokens=sum(work.num_tokens for work in prefills),
            micro_batch_id=0,
            paused_requests=self._scheduler.num_paused,
            waiting_requests=self._num_active_sequences - len(rows),
        )
