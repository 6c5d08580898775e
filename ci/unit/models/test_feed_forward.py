"""The feed-forward half of a layer with any activation and weight, with a gate and without one, and norms around the
mean: as parts in torch, and recorded and computed in C++.

Run: pytest ci/unit/models/test_feed_forward.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from compiled_network import Step, needs_compiler
from random_decoders import ALONE
from torch import Tensor

import inflight_kernels
from inflight.layers.fp8 import Fp8GatedMLP, fuse_quantization
from inflight.layers.linear import ColumnParallelLinear, RowParallelLinear
from inflight.layers.mlp import MLP, GatedMLP
from inflight.layers.norm import LayerNorm, RMSNorm
from inflight.layers.weight import CodedGroups, DenseWeight, Fp8BlockWeight, Fp8Weight, Int4Groups, Weight
from inflight_kernels import Activation, BlockScaledWeight, Code, CodedWeight, pack_int4, quantize_weight
from inflight_kernels.cpu import Batch, Program, Recording, WeightPacker, load_library, record

SIZE, INNER = 128, 160
WITHOUT_GATE = [each for each in Activation if each is not Activation.CLAMPED_SWIGLU]
METADATA = Step(decodes=[1] * 5).metadata()


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def coded(values_OI: Tensor) -> Weight:
    codes, scale_O = quantize_weight(values_OI, torch.int8)
    return CodedGroups(CodedWeight(Code.INT8, codes.view(torch.uint8), scale_O[:, None], None, values_OI.shape[1]))


def int4(values_OI: Tensor) -> Weight:
    scales_GO = values_OI.abs().amax(1)[None] / 7
    q_OI = (values_OI / scales_GO[0][:, None]).round().int() + 8
    return Int4Groups(pack_int4(q_OI, scales_GO.half(), torch.full_like(scales_GO, 8, dtype=torch.int32)))


def fp8(values_OI: Tensor) -> Weight:
    return Fp8Weight(*quantize_weight(values_OI, torch.float8_e4m3fn))


def fp8_blocks(values_OI: Tensor) -> Weight:
    num_outputs, num_inputs = values_OI.shape
    scales = torch.full((-(-num_outputs // 128), -(-num_inputs // 128)), 2.0**-10)
    packed = BlockScaledWeight((values_OI * 2**10).clamp(-448, 448).to(torch.float8_e4m3fn), scales, 128)
    return Fp8BlockWeight(packed)


WEIGHTS: dict[str, tuple[Callable[[Tensor], Weight], torch.dtype]] = {
    "dense": (DenseWeight, torch.float32),
    "int8 codes": (coded, torch.float32),
    "int4": (int4, torch.float16),
    "fp8": (fp8, torch.float32),
    "fp8 by blocks": (fp8_blocks, torch.float32),
}


def layers(make: Callable[[Tensor], Weight], num_outputs: int) -> tuple[ColumnParallelLinear, RowParallelLinear]:
    up, down = random(num_outputs, SIZE) / 12, random(SIZE, INNER) / 12
    return ColumnParallelLinear(make(up), None), RowParallelLinear(make(down), None, ALONE)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_activation_stands_between_products_of_any_weight(name: str, activation: Activation) -> None:
    make, dtype = WEIGHTS[name]
    gate_up, down = layers(make, 2 * INNER)
    x = random(5, SIZE).to(dtype)
    expected = down(inflight_kernels.activate_and_mul(gate_up(x, METADATA), activation), METADATA)
    assert torch.equal(GatedMLP(gate_up, down, activation)(x, METADATA), expected)
    if activation in WITHOUT_GATE:
        up, down = layers(make, INNER)
        expected = down(inflight_kernels.activate(up(x, METADATA), activation), METADATA)
        assert torch.equal(MLP(up, down, activation)(x, METADATA), expected)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("make", [fp8, fp8_blocks])
def test_and_before_what_it_computes_is_handed_over_in_fp8(
    make: Callable[[Tensor], Weight], activation: Activation
) -> None:
    norm, mlp, x = RMSNorm(random(SIZE), 1e-5), GatedMLP(*layers(make, 2 * INNER), activation), random(5, SIZE)
    fused_norm, fused = fuse_quantization(norm, mlp)
    assert isinstance(fused, Fp8GatedMLP)
    assert torch.equal(fused(fused_norm(x, METADATA), METADATA), mlp(norm(x, METADATA), METADATA))


@pytest.mark.parametrize("bias", [None, random(SIZE).flip(0)], ids=["no bias", "bias"])
def test_a_norm_around_the_mean_has_the_face_of_the_others(bias: Tensor | None) -> None:
    norm, (x, residual) = LayerNorm(random(SIZE), bias, 1e-5), random(2, 5, SIZE)
    expected = F.layer_norm(x, (SIZE,), norm.weight_D, bias, 1e-5)
    assert torch.equal(norm(x, METADATA), expected)
    normed, total = norm.add(x, residual, METADATA)
    assert torch.equal(total, x + residual) and torch.equal(normed, norm(total, METADATA))
    table, ids = random(30, SIZE), torch.tensor([3, 0, 29])
    normed, rows = norm.of_embeddings(ids, table)
    assert torch.equal(rows, table[ids]) and torch.equal(normed, norm(rows, METADATA))


def compiled(network: Callable[[Tensor, Batch], Tensor], dtype: torch.dtype) -> tuple[Program, Recording]:
    library, recording = load_library(dtype), record(network, None, dtype)
    return Program(library, recording, WeightPacker(library, [recording])), recording


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("make", [DenseWeight, coded])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_such_layers_are_compiled(make: Callable[[Tensor], Weight], dtype: torch.dtype) -> None:
    def parts(dtype: torch.dtype) -> Callable[[Tensor, Batch], Tensor]:
        def of_type(values: Tensor) -> Weight:
            return make(values.to(dtype) if make is DenseWeight else values)

        first, second = (LayerNorm(1 + random(SIZE).to(dtype), random(SIZE).to(dtype), 1e-5) for _ in range(2))
        mlps = (
            MLP(*layers(of_type, INNER), Activation.GELU),
            GatedMLP(*layers(of_type, 2 * INNER), Activation.GELU_TANH),
        )
        table = random(30, SIZE).to(dtype)

        def network(token_ids: Tensor, batch: Batch) -> Tensor:
            normed, stream = first.of_embeddings(token_ids, table)
            normed, stream = second.add(mlps[0](normed, METADATA), stream, METADATA)
            return mlps[1](normed, METADATA) + stream

        return network

    token_ids = torch.arange(40) % 30
    program, recording = compiled(parts(dtype), dtype)
    assert [operation.kind.__name__ for operation in recording.operations] == [
        *("Embedding", "LayerNorm", "Linear", "Activate", "Linear", "LayerNorm", "GatedLinear", "Linear", "Add")
    ]
    found, expected = program(token_ids), parts(torch.float32)(token_ids, Batch.meta(40, 0))
    assert (found.float() - expected).norm() < 8 * torch.finfo(dtype).eps * expected.norm()
    for count in (1, 7, 33):
        assert torch.equal(program(token_ids[:count]), found[:count])
