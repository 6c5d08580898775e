"""Notes the operations of layers that keep a state for each sequence; see recorder.py.

A state is a constant as a KV cache is one: its memory stays where it is while the program lives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_kernels.activation.kinds import Activation
from inflight_kernels.cpu.notes import Notes
from inflight_kernels.cpu.operations import CausalConv
from inflight_kernels.cpu.recorded_values import Unsupported
from inflight_kernels.cpu.recording import ByTap
from inflight_kernels.recurrent.step_sequences import StepSequences

MAX_TAPS = 8


class StateRecorder(Notes):
    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        sequences: StepSequences,
        activation: Activation | None = None,
    ) -> Tensor:
        self._check_sequences(sequences)
        size, num_taps = weight.shape
        if num_taps > MAX_TAPS:
            raise Unsupported(f"a short convolution is over {num_taps} tokens, and C++ has those up to {MAX_TAPS}")
        if x.shape[1:] != (size,):
            raise Unsupported("a short convolution is not over all columns of its input")
        source = self._values.read(x, "the input of a short convolution")
        out, written = self._result(size)
        self._note(
            CausalConv,
            ("out",),
            x=source,
            out=written,
            weight=self._by_tap(weight, "the weight of a short convolution", (size, num_taps)),
            bias=None if bias is None else self._by_tap(bias, "the bias of a short convolution", (size,)),
            state=self._values.constant(
                state, "the state of a short convolution", (state.shape[0], num_taps - 1, size)
            ),
            size=size,
            num_taps=num_taps,
            activates=int(activation is not None),
            activation=activation,
        )
        return out

    def _by_tap(self, tensor: Tensor, what: str, shape: tuple[int, ...]) -> ByTap:
        is_wide = tensor.dtype == torch.float32
        return ByTap(self._values.constant(tensor, what, shape, torch.float32 if is_wide else None))

    def _check_sequences(self, sequences: StepSequences) -> None:
        if sequences is not self._batch.sequences:
            raise Unsupported("C++ has layers with a state for the step's own sequences only")
