"""Logits post-processors that ranks of their own import by name, see ci/L0_executor/test_post_processor_ranks.py."""

from __future__ import annotations

import os
from typing import Any

RANK = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
FAVOURITES = {5: 9.0, 77: 11.0, 300: 10.0}


def favour(request_id: int, logits: Any, token_ids: list[list[int]], stream: int, client_id: str | None) -> None:
    """The same as a logit_bias."""
    for token_id, bias in FAVOURITES.items():
        logits[0, 0, token_id] += bias


def fail_on_follower(
    request_id: int, logits: Any, token_ids: list[list[int]], stream: int, client_id: str | None
) -> None:
    if RANK == 1 and len(token_ids[0]) > 6:
        raise ValueError("only here")


def differ(request_id: int, logits: Any, token_ids: list[list[int]], stream: int, client_id: str | None) -> Any:
    """Every rank would choose another token."""
    logits = logits.clone()
    logits[0, 0, 100 + RANK] += 1000.0
    return logits


def fail(request_id: int, logits: Any, token_ids: list[list[int]], stream: int, client_id: str | None) -> None:
    raise ValueError("everywhere")


def favour_all(
    request_ids: list[int],
    logits: list[Any],
    token_ids: list[list[list[int]]],
    stream: int,
    client_ids: list[str | None],
) -> None:
    for arguments in zip(request_ids, logits, token_ids, client_ids, strict=True):
        favour(arguments[0], arguments[1], arguments[2], stream, arguments[3])
