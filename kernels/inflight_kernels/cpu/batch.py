"""The tokens of one step, as a program for CPUs takes them.

Legend: T tokens, N decoding rows, P prefilling rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight_kernels.kv_cache.step_blocks import StepBlocks
from inflight_kernels.recurrent.step_sequences import StepSequences


@dataclass(frozen=True, slots=True)
class Choices:
    """The experts that a router outside of a program has chosen, k of each token. What is outside of 0 .. E - 1 adds
    nothing."""

    weights_TK: Tensor
    """float32"""
    experts_TK: Tensor
    """int32"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One token of each decoding row, then the chunks of the prefilling rows."""

    positions_T: Tensor
    """int64, position of each token in its sequence."""
    blocks: tuple[StepBlocks, ...]
    """Of each group of layers."""
    decode_rows_N: Tensor
    """int64, each one's row of the block tables."""
    decode_lens_N: Tensor
    """int32, tokens in the cache after this step; at least 1."""
    prefill_rows_P: Tensor
    """int64, each one's row of the block tables."""
    prefill_lens_P: Tensor
    """int32"""
    prefill_starts: Tensor
    """int32 (P + 1), index of each prefill's first token, counted from the first prefill token."""
    given_T: Tensor | None = None
    """int64, the row of `given_rows` that is a token's embedding instead of the table's; negative = the table's. None =
    for all tokens."""
    given_rows: Tensor | None = None
    """(rows, features), in the type that the program computes in."""
    adapters_T: Tensor | None = None
    """int32, slot of each token's low-rank adapter, -1 where it has none; None = no token has one."""
    sequences: StepSequences | None = None
    """For layers that keep a state for each sequence, or attend in both directions; None = there are none."""
    token_types_T: Tensor | None = None
    """int64, a token's row of a table of types; None = row 0 for all tokens."""
    choices: Choices | None = None
    """For experts whose router is no part of the program; None = there are none."""

    @classmethod
    def meta(cls, num_decodes: int, num_prefills: int, num_groups: int = 1, num_chosen: int = 0) -> Batch:
        """Meta tensors, of chunks of five tokens: the batch that a network is recorded with. `num_chosen`: experts of
        each token that the batch says; 0 = it says none."""

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        num_tokens, num_sequences = num_decodes + 5 * num_prefills, num_decodes + num_prefills
        positions_T = empty(num_tokens, dtype=torch.int64)
        choices = None
        if num_chosen:
            choices = Choices(empty(num_tokens, num_chosen, dtype=torch.float32), empty(num_tokens, num_chosen))
        return cls(
            positions_T=positions_T,
            blocks=tuple(StepBlocks(empty(num_tokens, dtype=torch.int64), empty(9, 7)) for _ in range(num_groups)),
            decode_rows_N=empty(num_decodes, dtype=torch.int64),
            decode_lens_N=empty(num_decodes),
            prefill_rows_P=empty(num_prefills, dtype=torch.int64),
            prefill_lens_P=empty(num_prefills),
            prefill_starts=empty(num_prefills + 1),
            adapters_T=empty(num_tokens),
            sequences=StepSequences(
                slots_B=empty(num_sequences, dtype=torch.int64),
                starts=empty(num_sequences + 1),
                positions_T=positions_T,
                kept_T=empty(num_tokens),
            ),
            token_types_T=empty(num_tokens, dtype=torch.int64),
            choices=choices,
        )

    @classmethod
    def of_choices(cls, choices: Choices) -> Batch:
        """Tokens of no sequence, for experts alone."""
        return cls(
            positions_T=_NO_POSITIONS,
            blocks=(),
            decode_rows_N=_NO_POSITIONS,
            decode_lens_N=_NONE,
            prefill_rows_P=_NO_POSITIONS,
            prefill_lens_P=_NONE,
            prefill_starts=_NONE,
            choices=choices,
        )


_NO_POSITIONS, _NONE = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
