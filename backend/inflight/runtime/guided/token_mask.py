"""The tokens that grammars allow in one step, on the host as words of bits and on the device applied to the rows.

Legend: S rows that sample, V vocabulary, G rows among them that follow grammars, B bytes of V bits and more. A row that
verifies drafts counts as often as it samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inflight.runtime.staging import Array, to_host_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMask:
    """The masks of one step, on the host: of G rows, over B bytes."""

    places_G: Array
    """int64, places among the rows that sample, in their order."""
    bits_GB: Array
    """uint8, one bit a token, lowest first."""

    @classmethod
    def of(cls, places: list[int], bits: list[bytes]) -> StepMask:
        table = np.frombuffer(b"".join(bits), dtype=np.uint8).reshape(len(bits), -1).copy()
        return cls(places_G=np.array(places, dtype=np.int64), bits_GB=table)

    def to(self, device: torch.device) -> TokenMask:
        """Start the copy, on the stream of the step, without waiting for it."""
        places_G, bits_GB = (
            to_host_tensor(array, device).to(device, non_blocking=True) for array in (self.places_G, self.bits_GB)
        )
        return TokenMask(places_G=places_G, bits_GB=bits_GB)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMask:
    """The masks of one step, on the device."""

    places_G: Tensor
    bits_GB: Tensor

    def restrict(self, allowed_SV: Tensor | None, shape: torch.Size) -> Tensor:
        """bool (S, V): the tokens of `allowed_SV` (None = all) that the grammars allow too.

        Where that leaves a row no token, those that its grammar allows, so that the output follows it in any case.
        """
        grammar_GV = _unpack(self.bits_GB, shape[1])
        if allowed_SV is not None:
            both_GV = allowed_SV.index_select(0, self.places_G) & grammar_GV
            grammar_GV = torch.where(both_GV.any(1, keepdim=True), both_GV, grammar_GV)
        if len(grammar_GV) == shape[0]:
            return grammar_GV  # of all rows, in order
        if allowed_SV is None:
            allowed_SV = torch.ones(shape, dtype=torch.bool, device=grammar_GV.device)
        return allowed_SV.index_copy_(0, self.places_G, grammar_GV)


def _unpack(bits_GB: Tensor, vocab_size: int) -> Tensor:
    """bool (G, V)."""
    if bits_GB.device.type == "cpu":
        # One pass instead of four.
        return torch.from_numpy(np.unpackbits(bits_GB.numpy(), axis=1, count=vocab_size, bitorder="little").view(bool))
    shifts = torch.arange(8, dtype=torch.uint8, device=bits_GB.device)
    bits = bits_GB[:, :, None].bitwise_right_shift(shifts).bitwise_and(1)
    return bits.view(len(bits_GB), -1)[:, :vocab_size].bool()
