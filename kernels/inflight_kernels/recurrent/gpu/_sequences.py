"""Checks of what says whose tokens a step has, for the launchers."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_kernels.common.checks import check_dtype, check_shape, check_vector
from inflight_kernels.recurrent.step_sequences import StepSequences


def check_sequences(sequences: StepSequences, num_tokens: int) -> int:
    """How many there are. Raises ValueError unless the tensors are contiguous, of their types, for so many tokens."""
    num_sequences = sequences.slots_B.numel()
    check_vector("slots_B", sequences.slots_B, num_sequences, torch.int64)
    check_vector("starts", sequences.starts, num_sequences + 1, torch.int32)
    check_vector("positions_T", sequences.positions_T, num_tokens, torch.int64)
    if sequences.kept_T is not None:
        check_vector("kept_T", sequences.kept_T, num_tokens, torch.int32)
    return num_sequences


def check_state(name: str, state: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError unless `state` is contiguous (slots, *shape) of `dtype`."""
    check_dtype(name, state, dtype)
    check_shape(name, state, (state.shape[0], *shape))
    if not state.is_contiguous():
        raise ValueError(f"{name} must be contiguous")


def check_chunk(chunk: Tensor | None, state: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Raise ValueError unless it has the slots of `state`."""
    if chunk is None:
        raise ValueError(f"the kernels keep the inputs of incomplete chunks: chunk must have {shape} of each slot")
    check_state("chunk", chunk, shape, dtype)
    check_shape("chunk", chunk, (state.shape[0], *shape))
    return chunk
