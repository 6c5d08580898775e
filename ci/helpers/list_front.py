"""A Front that sends into lists, and requests and answers for it."""

from __future__ import annotations

from inflight.config import EngineConfig
from inflight.engine_description import EngineDescription
from inflight.executor.front.engine_state import EngineState
from inflight.executor.front.front import Front
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.result import FinishReason, Response, Result

LIMITS = RequestLimits(vocab_size=100, max_seq_len=16, max_input_len=15, kv_cache_tokens=160)
LATER = RequestLimits(vocab_size=100, max_seq_len=8, max_input_len=7, kv_cache_tokens=80)


class ListFront(Front):
    """Sends into lists."""

    def __init__(self, max_in_flight: int = 0, config: EngineConfig | None = None, num_replicas: int = 1) -> None:
        super().__init__(config, num_replicas=num_replicas)
        self._max_in_flight = max_in_flight
        self.sent: list[object] = []
        self.messages: dict[int, Request] = {}
        """By id, as it was sent last."""
        self.replica_of: dict[object, int] = {}
        """By what was sent: to which replica, the last time."""
        self.cancelled: list[int] = []
        self.cancelled_sequences: list[tuple[int, int]] = []

    def start(self) -> None:
        for replica in range(self.num_replicas):
            self.recover(replica=replica)

    def lose(self, state: EngineState = EngineState.RELAUNCHING, replica: int = 0) -> None:
        self._replica_lost(state, "the ranks died", replica)

    def recover(self, limits: RequestLimits = LIMITS, replica: int = 0, layers: str = "compiled") -> None:
        self._replica_ready(limits, EngineDescription(device="cpu", layers=layers), self._max_in_flight, replica)

    def say(self, *responses: Response) -> None:
        self._deliver(responses)

    def shutdown(self) -> None:
        self._replica_lost(EngineState.CLOSED, "the engine was shut down")

    def _encode(self, request: Request) -> object:
        self.messages[request.request_id] = request
        return request.request_id

    def _send_request(self, replica: int, request_id: int, encoded: object) -> None:
        self.sent.append(encoded)
        self.replica_of[encoded] = replica

    def _send_cancel(self, replica: int, request_id: int) -> None:
        self.cancelled.append(request_id)

    def _send_cancel_sequence(self, replica: int, request_id: int, sequence_index: int) -> None:
        self.cancelled_sequences.append((request_id, sequence_index))

    def _drop_unsent(self, replica: int) -> None:
        self.sent = [encoded for encoded in self.sent if self.replica_of[encoded] != replica]


def submit(front: ListFront, prompt: tuple[int, ...] = (1, 2), max_tokens: int = 4) -> int:
    request_id = front.next_request_id()
    front.enqueue_request(Request(request_id=request_id, input_token_ids=list(prompt), max_tokens=max_tokens))
    return request_id


def token(request_id: int, finish: FinishReason = FinishReason.NOT_FINISHED) -> Response:
    final = finish is not FinishReason.NOT_FINISHED
    return Response(request_id=request_id, result=Result(output_token_ids=[5], finish_reason=finish, is_final=final))
