"""Whether and from where a request goes on that another server had begun: its resume token against the request.

Tokens are what the request would have had undisturbed only where the request is the same, and what computes it. So a
digest of each is part of every resume token, and another one is refused. Knows no tensors and no text.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from msgspec import structs

from inflight.errors import InvalidRequest
from inflight.executor.wire.messages import encode_request
from inflight.replay import DeliveredSequence, Replay
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.result import FinishReason
from inflight.server.resume_token import Head, ResumeToken, ResumeTokenWriter
from inflight.server.tensors.client_request import ClientRequest

DIGEST_BYTES = 8


class Resumption:
    """Of the requests to one engine. Thread safe."""

    def __init__(self, checkpoint: bytes, limits: RequestLimits) -> None:
        """`checkpoint`: see `checkpoint_digest`. `limits`: of the engine."""
        self._checkpoint = checkpoint
        self._limits = limits

    def read(self, client: ClientRequest) -> ResumeToken | None:
        """The resume token that a request brings, if it does. Raises InvalidRequest."""
        if not client.resume_token:
            return None
        num_sequences = min(client.num_return_sequences or 1, self._limits.max_batch_size)
        # Each part holds a token or ends a sequence.
        return ResumeToken.parse(client.resume_token, num_sequences * (self._limits.max_seq_len + 1))

    def begin(self, client: ClientRequest, request: Request) -> ResumeTokenWriter | None:
        """What writes the resume token of a new request; None if it wants none, or is a beam search, no part of which
        is certain before its end."""
        if not client.return_resume_token or request.sampling_config.beam_width > 1:
            return None
        return ResumeTokenWriter(self._head(client, request))

    def resume(
        self, client: ClientRequest, request: Request, token: ResumeToken
    ) -> tuple[Request, list[tuple[DeliveredSequence, FinishReason]], ResumeTokenWriter | None]:
        """The request as the ranks go on with it, what its client has of each sequence and how it ended, and what
        writes the rest of its token. Raises InvalidRequest."""
        if request.sampling_config.beam_width > 1:
            raise InvalidRequest("resume_token is not supported together with beam_width above 1: send it without")
        head = self._head(client, request)
        if token.head.checkpoint != head.checkpoint:
            raise InvalidRequest(
                "resume_token is of another checkpoint, device or data type than this model's, or of other sums below "
                "float32 (layers, deterministic, tensor_parallel_size, moe_expert_parallel_size): it would go on with "
                "other tokens"
            )
        if token.head != head:
            raise InvalidRequest("resume_token is of another request: send it with the same inputs as before")
        sequences, reasons = token.delivered(request.num_return_sequences)
        replay = Replay(sequences=sequences, is_resumed=True) if token.parts else None
        if replay is not None:
            self._limits.validate_replay(request, replay)  # before text is made of it
        writer = ResumeTokenWriter(head, token) if client.return_resume_token else None
        return structs.replace(request, replay=replay), list(zip(sequences, reasons, strict=True)), writer

    def _head(self, client: ClientRequest, request: Request) -> Head:
        seed = request.sampling_config.seed
        return Head(checkpoint=self._checkpoint, request=_digest(client, request), seed=seed)


def seeded(client: ClientRequest, token: ResumeToken) -> ClientRequest:
    """The request with the seed that it got when it was accepted first."""
    return replace(client, seed=token.head.seed) if client.seed is None else client


def _digest(client: ClientRequest, request: Request) -> bytes:
    """Of all that decides a request's output, and whether it is streamed."""
    guide = request.guided_decoding_params
    bare = structs.replace(
        request,
        request_id=0,
        client_id="",
        priority=0.5,
        allotted_time_ms=0,
        cache_salt="",
        # What the guide is translated to is another one in another version.
        guided_decoding_params=None if guide is None else structs.replace(guide, grammar=""),
    )
    digest = hashlib.blake2b(encode_request(bare), digest_size=DIGEST_BYTES)
    digest.update(repr((client.stream, client.stop_words)).encode())
    return digest.digest()
