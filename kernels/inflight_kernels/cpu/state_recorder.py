"""Notes the operations of layers that keep a state for each sequence; see recorder.py.

A state is a constant as a KV cache is one: its memory stays where it is while the program lives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight_kernels.activation.kinds import Activation
from inflight_kernels.cpu.notes import Notes
from inflight_kernels.cpu.operations import CausalConv, GatedDeltaRule, GatedRmsNorm, StateSpaceScan
from inflight_kernels.cpu.recorded_values import HALF_STEP, Unsupported
from inflight_kernels.cpu.recording import ByTap
from inflight_kernels.recurrent.gate import Gate
from inflight_kernels.recurrent.step_sequences import StepSequences

MAX_TAPS = 8
CHUNKS = "C++ computes recurrences token by token, and keeps no inputs of chunks"
KEY_DIMS = STATE_DIMS = range(HALF_STEP, 256 + 1, HALF_STEP)


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

    def gated_delta_rule(
        self,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        state: Tensor,
        sequences: StepSequences,
        key_dim: int,
        chunk: Tensor | None = None,
    ) -> Tensor:
        self._check_sequences(sequences)
        if chunk is not None:
            raise Unsupported(CHUNKS)
        slots, num_heads, _, value_dim = state.shape
        if key_dim not in KEY_DIMS or value_dim % HALF_STEP:
            raise Unsupported(
                f"linear attention has heads of {key_dim} and {value_dim} elements, which are not multiples of "
                f"{HALF_STEP}, those of keys up to {KEY_DIMS[-1]}"
            )
        num_key_heads, rest = divmod(qkv.shape[1] - num_heads * value_dim, 2 * key_dim)
        num_decays = a.shape[1] // num_heads
        is_divided = not rest and num_key_heads > 0 and num_heads % num_key_heads == 0
        if not is_divided or num_decays not in (1, key_dim) or a.shape[1] % num_heads or b.shape[1] != num_heads:
            raise Unsupported("linear attention has columns that are not those of its heads")
        sources = {
            "qkv": self._values.read(qkv, "what linear attention reads"),
            "a": self._values.read(a, "the decays of linear attention"),
            "b": self._values.read(b, "the gates of linear attention"),
        }
        out, written = self._result(num_heads * value_dim)
        self._note(
            GatedDeltaRule,
            ("out",),
            **sources,
            out=written,
            a_log=self._values.constant(a_log, "a_log", (num_heads,), torch.float32),
            dt_bias=self._values.constant(dt_bias, "dt_bias", (num_heads * num_decays,), torch.float32),
            state=self._values.constant(
                state, "the state of linear attention", (slots, num_heads, key_dim, value_dim), torch.float32
            ),
            num_key_heads=num_key_heads,
            num_heads=num_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            num_decays=num_decays,
        )
        return out

    def state_space_scan(
        self,
        x: Tensor,
        b: Tensor,
        c: Tensor,
        dt: Tensor,
        a_log: Tensor,
        d: Tensor,
        dt_bias: Tensor,
        state: Tensor,
        sequences: StepSequences,
        dt_limits: tuple[float, float] = (0.0, float("inf")),
        chunk: Tensor | None = None,
    ) -> Tensor:
        self._check_sequences(sequences)
        if chunk is not None:
            raise Unsupported(CHUNKS)
        slots, num_heads, head_dim, state_dim = state.shape
        if head_dim % HALF_STEP or state_dim not in STATE_DIMS:
            raise Unsupported(
                f"a state space has heads of {head_dim} rows of {state_dim} columns, which are not multiples of "
                f"{HALF_STEP}, columns up to {STATE_DIMS[-1]}"
            )
        num_groups, rest = divmod(b.shape[1], state_dim)
        is_divided = not rest and num_groups > 0 and num_heads % num_groups == 0 and c.shape == b.shape
        if not is_divided or x.shape[1] != num_heads * head_dim or dt.shape[1] != num_heads:
            raise Unsupported("a state space has columns that are not those of its heads")
        sources = {
            name: self._values.read(tensor, f"{name} of a state space")
            for name, tensor in (("x", x), ("b", b), ("c", c), ("dt", dt))
        }
        of_heads = {
            name: self._values.constant(tensor, f"{name} of a state space", (num_heads,), torch.float32)
            for name, tensor in (("a_log", a_log), ("d", d), ("dt_bias", dt_bias))
        }
        out, written = self._result(num_heads * head_dim)
        self._note(
            StateSpaceScan,
            ("out",),
            **sources,
            **of_heads,
            out=written,
            state=self._values.constant(
                state, "the state of a state space", (slots, num_heads, head_dim, state_dim), torch.float32
            ),
            num_heads=num_heads,
            num_groups=num_groups,
            head_dim=head_dim,
            state_dim=state_dim,
            least=dt_limits[0],
            most=dt_limits[1],
        )
        return out

    def gated_rms_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        eps: float,
        activation: Gate = Gate.SILU,
        group_size: int | None = None,
        gate_first: bool = False,
    ) -> Tensor:
        size, weight_size = x.shape[1], weight.shape[0]
        of_group = group_size or weight_size
        if of_group % HALF_STEP or size % of_group or weight_size not in (of_group, size):
            raise Unsupported(
                f"a norm with a gate has {size} columns in groups of {of_group}, which is not a multiple of {HALF_STEP}"
                f" or does not fit a weight of {weight_size}"
            )
        if gate.shape[1:] != (size,):
            raise Unsupported("a norm has a gate of other columns")
        sources = [
            self._values.read(each, what) for each, what in ((x, "the input of a norm"), (gate, "the gate of a norm"))
        ]
        out, written = self._result(size)
        self._note(
            GatedRmsNorm,
            ("out",),
            x=sources[0],
            gate=sources[1],
            out=written,
            weight=self._values.norm_weight(weight, weight_size),
            size=size,
            group_size=of_group,
            weight_size=weight_size,
            activation=activation,
            gate_first=int(gate_first),
            eps=eps,
        )
        return out

    def _by_tap(self, tensor: Tensor, what: str, shape: tuple[int, ...]) -> ByTap:
        is_wide = tensor.dtype == torch.float32
        return ByTap(self._values.constant(tensor, what, shape, torch.float32 if is_wide else None))

    def _check_sequences(self, sequences: StepSequences) -> None:
        if sequences is not self._batch.sequences:
            raise Unsupported("C++ has layers with a state for the step's own sequences only")
