"""A GptManager with a FakeRunner and four recording callbacks: requests in, responses out, every step checked."""

from __future__ import annotations

from typing import Any

from fake_network import VOCAB_SIZE, expected_beams, expected_output
from fake_runner import FakeRunner
from msgspec import structs

from inflight.batch_manager.beam_search import Beam
from inflight.batch_manager.callbacks import Callbacks
from inflight.batch_manager.gpt_manager import GptManager
from inflight.batch_manager.kv_cache_manager import KVCacheManager
from inflight.batch_manager.scheduler import Scheduler
from inflight.batch_manager.state_slots import StateSlots
from inflight.config import SchedulerPolicy
from inflight.context_phase import RequestType
from inflight.errors import RequestError
from inflight.output_config import OutputConfig
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.result import FinishReason, Result, join_tensors
from inflight.sampling_config import SamplingConfig
from inflight.scheduler_output import RowWork, SchedulerOutput
from inflight.speculative_decoding import ExternalDraftTokensConfig

Response = tuple[Result | None, bool, RequestError | None]


def make_request(request_id: int, prompt: list[int] | int, max_tokens: int = 5, **options: Any) -> Request:
    """`prompt`: tokens, or how many of them; options of SamplingConfig go there."""
    if isinstance(prompt, int):
        prompt = [(request_id * 31 + position * 7) % VOCAB_SIZE for position in range(prompt)]
    beams = ("beam_width", "length_penalty", "early_stopping", "beam_width_array", "beam_search_diversity_rate")
    names = ("seed", "min_tokens", *beams)
    sampling = {key: options.pop(key) for key in names if key in options}
    if options.pop("log_probs", False):
        options["output_config"] = OutputConfig(return_log_probs=True)
    if options.pop("logits", False):
        options["output_config"] = OutputConfig(return_context_logits=True, return_generation_logits=True)
    return Request(
        request_id=request_id,
        input_token_ids=prompt,
        max_tokens=max_tokens,
        sampling_config=SamplingConfig(**sampling),
        **options,
    )


def drafts_for(request: Request, kind: str, max_seq_len: int, sequence_index: int = 0) -> list[int]:
    """Of what a request must be answered with: all of it ("right"), or with wrong tokens from the middle or the
    beginning on."""
    tokens = expected_output(request, max_seq_len, sequence_index)
    num_right = {"right": len(tokens), "half right": len(tokens) // 2, "wrong": 0}[kind]
    return [*tokens[:num_right], *((token + 1) % VOCAB_SIZE for token in tokens[num_right:])]


def drafted(number: int, prompt: int, max_tokens: int, kind: str = "right", **options: Any) -> Request:
    """A request with drafts, right or wrong ones as `drafts_for` makes them."""
    request = make_request(number, prompt, max_tokens, **options)
    tokens = drafts_for(structs.replace(request, end_ids=[], stop_words=[]), kind, 64)
    return structs.replace(request, external_draft_tokens_config=ExternalDraftTokensConfig(tokens=tokens))


def prefills(step: SchedulerOutput) -> list[RowWork]:
    return [work for work in step.rows if work.is_prefill]


def decodes(step: SchedulerOutput) -> list[RowWork]:
    return [work for work in step.rows if not work.is_prefill]


class Harness:
    """`queue` is what get_inference_requests returns, `stops` what the next poll_stop_signals returns."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_batch_size: int = 4,
        max_num_tokens: int = 16,
        max_seq_len: int = 64,
        policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT,
        enable_chunked_context: bool = True,
        enable_reuse: bool = True,
        num_adapter_slots: int = 0,
        priority_preemption: bool = False,
        num_stages: int = 1,
        hash_key: bytes = b"key",
        kv_cache: dict[str, Any] | None = None,
        num_state_slots: int | None = None,
        num_host_state_slots: int = 0,
        windows: tuple[int, ...] = (0,),
        state_interval: int = 8,
        runner: dict[str, Any] | None = None,
        runner_type: type[FakeRunner] = FakeRunner,
        **manager: Any,
    ) -> None:
        self.max_seq_len = max_seq_len
        self._preempts = priority_preemption
        self.queue: list[Request] = []
        self.stops: Any = set()
        self.calls: list[str] = []
        self.maxima: list[int] = []
        self.stats: list[str] = []
        self.requests: dict[int, Request] = {}
        self.responses: dict[int, list[Response]] = {}
        kv_cache = kv_cache or {}
        self.kv_cache = KVCacheManager(
            num_blocks=num_blocks,
            block_size=block_size,
            hash_key=hash_key,
            windows=windows,
            max_num_tokens=max_num_tokens,
            enable_reuse=enable_reuse,
            state_slots=StateSlots.beside_rows(max_batch_size, num_state_slots, num_host_state_slots),
            state_interval=state_interval,
            **kv_cache,
        )
        self.scheduler = Scheduler(
            kv_cache=self.kv_cache,
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            max_seq_len=max_seq_len,
            policy=policy,
            enable_chunked_context=enable_chunked_context,
            num_adapter_slots=num_adapter_slots,
            priority_preemption=priority_preemption,
            num_stages=num_stages,
        )
        self.runner = runner_type(
            num_blocks=num_blocks,
            block_size=block_size,
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            num_host_blocks=kv_cache.get("num_host_blocks", 0),
            num_stages=num_stages,
            num_state_slots=num_state_slots,
            num_host_state_slots=num_host_state_slots,
            windows=windows,
            **(runner or {}),
        )
        self.callbacks = Callbacks(
            get_inference_requests=self._get_inference_requests,
            send_response=self._send_response,
            poll_stop_signals=self._poll_stop_signals,
            return_batch_manager_stats=self._return_stats,
        )
        limits = RequestLimits(
            vocab_size=VOCAB_SIZE,
            max_seq_len=max_seq_len,
            max_input_len=max_seq_len - 1,
            kv_cache_tokens=self.kv_cache.groups.most_tokens(num_blocks, max_num_tokens, 2 * max_seq_len),
            max_batch_size=max_batch_size,
            max_context_tokens=max_seq_len,
            has_draft_model=True,
        )
        self.manager = GptManager(
            runner=self.runner, scheduler=self.scheduler, callbacks=self.callbacks, limits=limits, **manager
        )

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.requests.setdefault(request.request_id, request)
            self.queue.append(request)

    def step(self) -> None:
        self.manager.step()
        self.scheduler.check()

    def run_until_idle(self, max_silent: int = 500) -> None:
        """Steps until nothing is active. That this takes finitely many is part of every test: there are only so many
        tokens, and of any `max_silent` steps one answers somebody."""
        num_silent = 0
        while num_silent < max_silent:
            num_calls = len(self.calls)
            self.step()
            if not self.queue and not self.manager.num_active_requests:
                return
            is_silent = not any(call.startswith("send") for call in self.calls[num_calls:])
            num_silent = num_silent + 1 if is_silent else 0
        raise AssertionError(f"{self.manager.num_active_requests} requests starve")

    def serve(self, *requests: Request) -> dict[int, list[int]]:
        self.submit(*requests)
        self.run_until_idle()
        return {request.request_id: self.tokens(request.request_id) for request in requests}

    def tokens(self, request_id: int, sequence_index: int = 0) -> list[int]:
        results = self.results(request_id, sequence_index)
        return [token for result in results for token in result.output_token_ids]

    def results(self, request_id: int, sequence_index: int = 0) -> list[Result]:
        found = [result for result, _, _ in self.responses[request_id]]
        return [result for result in found if result is not None and result.sequence_index == sequence_index]

    def tensors(self, request_id: int, sequence_index: int = 0) -> dict[str, list[int]]:
        """By name, the tokens that they are of, see FakeRunner."""
        joined = join_tensors(self.results(request_id, sequence_index))
        return {name: array[:, 0].astype(int).tolist() for name, array in joined.items()}

    def expected(self, request_id: int, sequence_index: int = 0) -> list[int]:
        request = self.requests[request_id]
        tokens = expected_output(request, self.max_seq_len, sequence_index)
        return tokens[:1] if request.request_type is RequestType.CONTEXT_ONLY else tokens

    def expected_beams(self, request_id: int) -> list[Beam]:
        return expected_beams(self.requests[request_id], self.max_seq_len)

    def final(self, request_id: int) -> Result:
        result, is_final, error = self.responses[request_id][-1]
        assert is_final and error is None and result is not None
        return result

    def reason(self, request_id: int) -> FinishReason:
        return self.final(request_id).finish_reason

    def error(self, request_id: int) -> RequestError:
        result, is_final, error = self.responses[request_id][-1]
        assert is_final and result is None and error is not None
        return error

    def num_finals(self, request_id: int) -> int:
        return sum(is_final for _, is_final, _ in self.responses.get(request_id, []))

    def _get_inference_requests(self, max_num_requests: int) -> list[Request]:
        self.calls.append("get")
        self.maxima.append(max_num_requests)
        if self._preempts:
            max_num_requests = len(self.queue)  # the leader hands over what may displace others
        taken, self.queue = self.queue[:max_num_requests], self.queue[max_num_requests:]
        return taken

    def _send_response(
        self, request_id: int, result: Result | None, is_final: bool, error: RequestError | None
    ) -> None:
        self.calls.append(f"send {request_id}{' final' if is_final else ''}{' error' if error else ''}")
        self.responses.setdefault(request_id, []).append((result, is_final, error))

    def _poll_stop_signals(self) -> Any:
        self.calls.append("poll")
        stops, self.stops = self.stops, set()
        return stops

    def _return_stats(self, json: str) -> None:
        self.calls.append("stats")
        self.stats.append(json)


def tokens_alone(request: Request) -> list[int]:
    """What it is answered with, if nothing else runs."""
    harness = Harness()
    harness.serve(request)
    return harness.tokens(request.request_id)
