"""Weights that are made where they are used, in place of those of a checkpoint's files: 16 GB in a second, and no disk.

All numbers are random, but so small in the layers that the embedding outweighs them. The head has the embedding's rows,
one row further down. So the greedy output counts on from the prompt's last token, or repeats it where the embeddings
are tied: NaN, rows that are mixed up and tokens of a step before show, errors of the layers' results do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from inflight.models import implementation
from inflight.models.checkpoint import Checkpoint

SCALE = 0.005
"""Standard deviation of the weights of linear layers; that of the embedding is 1."""
SEED = 4


class MadeCheckpoint(Checkpoint):
    """Has every tensor that it is asked for, of every shape."""

    def __init__(self, folder: str | Path, *, is_read: bool = True) -> None:
        self.folder = Path(folder)
        self.is_read = is_read

    def __enter__(self) -> MadeCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __contains__(self, _: str) -> bool:
        """What a checkpoint may lack: scales of the KV cache."""
        return False

    @property
    def names(self) -> tuple[str, ...]:
        return ()

    def dtype_of(self, _: str) -> str:
        """Every layer of an fp8 network is quantised."""
        return "F8_E4M3"

    def check(self, *_: Any) -> None:
        return None

    def check_scales(self, _: str, shape: tuple[int, ...]) -> Tensor:
        return torch.full(shape, SCALE)

    def refuse_leftovers(self, *_: Any) -> None:
        return None

    @torch.no_grad()
    def copy_into(self, target: Tensor, name: str, *_: Any, **__: Any) -> None:
        if target.is_meta:
            return
        if name.endswith("embed_tokens.weight"):
            _fill_embedding(target)
        elif name.endswith("lm_head.weight"):
            _fill_embedding(target)
            target.copy_(target.roll(1, dims=0))
        elif name.endswith(".bias"):
            target.zero_()
        elif name.endswith(".weight_scale"):
            target.fill_(SCALE)
        elif target.dtype == torch.float8_e4m3fn:
            target.copy_(torch.randn(target.shape, device=target.device))
        elif target.dim() == 1:
            target.fill_(1.0)
        else:
            target.normal_(0.0, SCALE)


def _fill_embedding(target: Tensor) -> None:
    target.normal_(generator=torch.Generator(target.device).manual_seed(SEED))


@contextmanager
def made_weights() -> Iterator[None]:
    """Engines that are loaded meanwhile, on one rank and by the native layers, read config.json and no weights."""
    with mock.patch.object(implementation, "open_checkpoint", MadeCheckpoint):
        yield
