"""What ranks are told of a request that earlier ones had begun: immutable values.

Written by the front that keeps the request in its journal (inflight.executor.front.journal), or made from the resume
token that a client sends after its whole server has ended (inflight.server.resume_token).
"""

from __future__ import annotations

import msgspec


class DeliveredSequence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the client has of one sequence. Its tokens count as generated ones, not as prompt, wherever that matters."""

    token_ids: list[int] = []
    """The continuation has the tokens that the earlier ranks would have generated behind these."""
    cum_log_prob: float = 0.0
    """Sum of the log probabilities of `token_ids`, if the request asks for them."""
    num_iterations: int = 0
    """That have brought these tokens; see Result.decoding_iter."""
    is_finished: bool = False
    """The client has its last Result, so nothing of it is computed again."""


NOTHING_DELIVERED = DeliveredSequence()


class Replay(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why and from where a request begins in the middle."""

    sequences: list[DeliveredSequence] = []
    """One for each sequence of the request. Empty: all begin with their first token. So does every beam search, whose
    choices depend on scores that no client has; the front drops what was delivered before."""
    is_suspect: bool = False
    """It may be what the ranks died of: until it has its first tokens nothing else runs beside it."""
    is_resumed: bool = False
    """Its client asks for it anew, with a resume token: as a new request it may find the queue full."""
