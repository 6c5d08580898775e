"""Requests that go on where their clients have something of them already."""

from __future__ import annotations

from inflight.replay import DeliveredSequence, Replay


def replay_after(*sequences: list[int], cum_log_prob: float = 0.0) -> Replay:
    """`sequences`: the tokens that were delivered of each, one in an iteration."""
    return Replay(
        sequences=[
            DeliveredSequence(token_ids=list(tokens), cum_log_prob=cum_log_prob, num_iterations=len(tokens))
            for tokens in sequences
        ]
    )
