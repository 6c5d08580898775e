"""Notes mixtures of experts; see recorder.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inflight_kernels.activation.kinds import Activation
from inflight_kernels.cpu.batch import Batch
from inflight_kernels.cpu.notes import Notes
from inflight_kernels.cpu.operations import Experts
from inflight_kernels.cpu.recorded_values import STEP, Unsupported, storage_of
from inflight_kernels.cpu.recording import NOWHERE, Field
from inflight_kernels.matmul.coded_weight import CodedWeight
from inflight_kernels.matmul.weight_formats import BlockScaledWeight
from inflight_kernels.moe import ExpertWeights
from inflight_kernels.moe.routing import Routing


@dataclass(frozen=True, slots=True)
class _Routed:
    """What a router has chosen."""

    weights: Tensor
    experts: Tensor
    fields: Mapping[str, Field]
    """Of `Experts`: how it chose."""
    num_experts: int | None = None
    """Of which; None = a router elsewhere knows."""
    first_expert: int = 0
    """From which they are counted."""


class ExpertRecorder(Notes):
    def __init__(self, x: Tensor, batch: Batch, dtype: torch.dtype) -> None:
        super().__init__(x, batch, dtype)
        self._routed: dict[int, _Routed] = {}
        """By storage of the chosen experts."""
        if (given := batch.choices) is not None:
            fields: dict[str, Field] = {"logits": NOWHERE, "num_chosen": given.experts_TK.shape[1]}
            self._routed[storage_of(given.experts_TK)] = _Routed(given.weights_TK, given.experts_TK, fields)

    def route_experts(
        self,
        router_logits: Tensor,
        routing: Routing,
        bias: Tensor | None = None,
        factors: Tensor | None = None,
        first_expert: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Noted with the experts."""
        num_experts = router_logits.shape[1]
        if fault := routing.fault(num_experts):
            raise Unsupported(fault)
        weights, experts = (torch.empty((self._num_tokens, routing.num_chosen), device="meta") for _ in range(2))
        fields: dict[str, Field] = {
            "logits": self._values.read(router_logits, "the logits of a router"),
            "num_chosen": routing.num_chosen,
            "scores": routing.scores,
            "group_score": routing.group_score,
            "num_groups": routing.num_groups,
            "num_chosen_groups": routing.num_chosen_groups,
            "choice_bias": self._values.optional(bias, "the bias of a choice", (num_experts,), torch.float32),
            "renormalizes": int(routing.renormalize),
            "epsilon": routing.epsilon,
            "scale": routing.scale,
            "factors": self._values.optional(factors, "the factors of experts", (num_experts,), torch.float32),
        }
        self._routed[storage_of(experts)] = _Routed(weights, experts, fields, num_experts, first_expert)
        return weights, experts

    def fused_moe(
        self,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        w_gate_up: ExpertWeights,
        w_down: ExpertWeights,
        out: Tensor | None = None,
        deterministic: bool = False,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        activation: Activation = Activation.SILU,
    ) -> Tensor:
        routed = self._routed.get(storage_of(experts))
        if routed is None or routed.weights is not weights or out is not None:
            raise Unsupported("C++ computes experts that a router of the step or the batch has chosen only")
        if isinstance(w_gate_up, BlockScaledWeight) or isinstance(w_down, BlockScaledWeight):
            raise Unsupported("C++ has no operation for products of fp8")
        num_own, size, inner_size = w_down.shape
        if (last := routed.first_expert + num_own) > (routed.num_experts or last):
            raise Unsupported(f"a router has logits of {routed.num_experts} experts, and {last} are chosen from")
        if size % STEP:
            raise Unsupported(f"experts have {size} features, which is not a multiple of {STEP}")
        source = self._values.read(x, "the input of experts")
        w_gate_up, columns = self._in_order(w_gate_up)
        w_down, inner_columns = self._in_order(w_down)
        out, written = self._result(size)
        is_gated, inner_width = w_gate_up.shape[1] > inner_size, -(-inner_size // STEP) * STEP
        shape = (num_own, 2 * inner_size if is_gated else inner_size, size)
        if not is_gated and (gate_up_bias is not None or activation is Activation.CLAMPED_SWIGLU):
            raise Unsupported("C++ has experts without gates without biases only, and without what clamps gates")
        self._note(
            Experts,
            ("out",),
            x=source,
            out=written,
            gate_up=self._values.weight(w_gate_up, "gate and up of experts", shape, gated=is_gated),
            down=replace(self._values.weight(w_down, "down of experts", w_down.shape), num_inputs=inner_width),
            columns=columns,
            inner_columns=inner_columns,
            is_gated=int(is_gated),
            gate_up_bias=self._bias(gate_up_bias, "a bias of gate and up", (num_own, 2 * inner_size), gated=True),
            down_bias=self._bias(down_bias, "a bias of down", (num_own, size)),
            activation=activation,
            size=size,
            inner_size=inner_width,
            num_inner=inner_size,
            num_experts=routed.num_experts or num_own,
            first_expert=routed.first_expert,
            num_own=num_own,
            **routed.fields,
        )
        return out

    def _in_order(self, weight: ExpertWeights) -> tuple[ExpertWeights, Field]:
        """Weights of experts, and the order of each one's inputs, if it is another one."""
        if not isinstance(weight, CodedWeight) or weight.permutation is None:
            return weight, None
        shape = weight.shape[0], weight.shape[2]
        order = self._values.constant(weight.permutation, "an order of columns of experts", shape, torch.int32)
        return weight._replace(permutation=None), order
