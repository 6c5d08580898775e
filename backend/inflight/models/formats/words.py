"""Numbers of 4 or 8 bits in words of 32, as AWQ, GPTQ and compressed-tensors store them."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.models.checkpoint import Checkpoint
from inflight.models.formats.reading import read_block

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs each part of an AWQ word holds, from the lowest bits up."""
WORD_DTYPES = ("I32",)


def read_words(
    checkpoint: Checkpoint,
    name: str,
    shape: tuple[int, int],
    starts: tuple[int, int],
    size: tuple[int, int],
    device: torch.device,
) -> Tensor:
    """The block of `size` that begins at `starts` in tensor `name`: int32."""
    return read_block(checkpoint, name, shape, starts, size, torch.int32, WORD_DTYPES, device)


def numbers_of(words: Tensor, bits: int) -> Tensor:
    """(R, W) int32 to (R, 32 / bits * W) uint8: the numbers of each word from the lowest bits up."""
    # Through one dimension, whose elements are neighbours also where a row has one word.
    as_bytes = words.flatten().view(torch.uint8).view(len(words), -1)
    return as_bytes if bits == 8 else torch.stack([as_bytes & 15, as_bytes >> 4], -1).flatten(1)


def in_awq_order(numbers: Tensor) -> Tensor:
    """(R, N) of 4 bits as they lie in words, with the outputs in their order."""
    eights = numbers.view(len(numbers), -1, 8)
    return torch.stack([eights[:, :, AWQ_ORDER.index(output)] for output in range(8)], 2).flatten(1)


def centred(numbers: Tensor, bits: int) -> Tensor:
    """uint8 codes of the whole numbers that are smaller by half of the range: in two's complement."""
    return numbers ^ (1 << (bits - 1))
