"""The write of latents: kernel against reference, reference against what rotates and normalises apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ci.kernels.kernel_cases import DTYPES, ELEMENTWISE_TOLERANCE, HAS_FLOAT8, assert_near
from inflight_kernels.norm.reference import rms_norm
from inflight_kernels.quantization.reference import quantize_per_token
from inflight_kernels.rope import gpu, reference
from inflight_kernels.rope.gpu.rope_latent_write import CANDIDATES

TOKENS, BLOCK_SIZE, MAX_POSITIONS = 9, 4, 50


def _inputs(num_heads: int, size: int, rotary_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Queries and latents as views of one buffer; one slot is padding."""
    buffer = torch.randn(TOKENS, num_heads * (16 + rotary_dim) + size + rotary_dim).to(dtype)
    angles = torch.arange(MAX_POSITIONS)[:, None] / 100 ** (torch.arange(rotary_dim // 2) / rotary_dim)
    slots = torch.randperm(5 * BLOCK_SIZE)[:TOKENS]
    slots[4] = -1
    return {
        "q": buffer[:, : -(size + rotary_dim)].view(TOKENS, num_heads, -1)[..., 16:],
        "latent": buffer[:, -(size + rotary_dim) :],
        "norm_weight": torch.randn(size).to(dtype),
        "norm_eps": 1e-5,
        "cos_sin": torch.cat([angles.cos(), angles.sin()], 1),
        "positions": torch.randint(0, MAX_POSITIONS, (TOKENS,)),
        "cache": torch.full((5, BLOCK_SIZE, 1, size + rotary_dim), 7.0, dtype=dtype),
        "slot_mapping": slots,
    }


def _on(device: torch.device, inputs: dict[str, Any]) -> dict[str, Any]:
    """Copies there, the views of wider tensors still being such."""
    wide = {"q": inputs["q"]._base, "latent": inputs["latent"]._base}
    moved = {name: (x.to(device).clone() if isinstance(x, Tensor) else x) for name, x in inputs.items()}
    for name, base in wide.items():
        view = inputs[name]
        moved[name] = base.to(device).clone().as_strided(view.shape, view.stride(), view.storage_offset())
    return moved


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "size", "rotary_dim"), [(3, 48, 16), (40, 64, 64), (2, 512, 20)])
@pytest.mark.parametrize("adjacent_pairs", [False, True])
def test_kernel_equals_reference(
    num_heads: int, size: int, rotary_dim: int, adjacent_pairs: bool, dtype: torch.dtype, device: torch.device
) -> None:
    inputs = _inputs(num_heads, size, rotary_dim, dtype)
    wanted_inputs = _on(torch.device("cpu"), inputs)
    wanted = reference.rope_and_latent_write(**wanted_inputs, adjacent_pairs=adjacent_pairs)
    for norm_dtype in {dtype, torch.float32}:
        ours = _on(device, inputs) | {"norm_weight": inputs["norm_weight"].to(device, norm_dtype)}
        out = torch.full((TOKENS, num_heads, rotary_dim + 8), 3.0, dtype=dtype, device=device)
        returned = gpu.rope_and_latent_write(**ours, out=out[..., 8:], adjacent_pairs=adjacent_pairs)
        assert_near(returned, wanted, 2 * ELEMENTWISE_TOLERANCE[dtype])
        assert torch.equal(returned, out[..., 8:]) and bool((out[..., :8] == 3.0).all())
        assert_near(ours["cache"], wanted_inputs["cache"], 3 * ELEMENTWISE_TOLERANCE[dtype])


@pytest.mark.parametrize("adjacent_pairs", [False, True])
def test_reference_is_norm_and_rotation_by_themselves(adjacent_pairs: bool) -> None:
    inputs = _inputs(3, 48, 16, torch.float32)
    key = inputs["latent"][:, None, 48:].clone()
    latent = rms_norm(inputs["latent"][:, :48], inputs["norm_weight"], 1e-5)
    caches = torch.zeros(5, BLOCK_SIZE, 1, 16), torch.zeros(5, BLOCK_SIZE, 1, 16)
    table, positions, slots = (inputs[name] for name in ("cos_sin", "positions", "slot_mapping"))
    rotated = reference.rope_and_kv_write(
        inputs["q"], key, key, table, positions, *caches, slots, adjacent_pairs=adjacent_pairs
    )
    assert torch.equal(reference.rope_and_latent_write(**inputs, adjacent_pairs=adjacent_pairs), rotated)
    rows = inputs["cache"].view(-1, 64)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(rows[slot, :48], latent[token])
            assert torch.equal(rows[slot, 48:], caches[0].view(-1, 16)[slot])
    untouched = set(range(5 * BLOCK_SIZE)) - set(slots.tolist())
    assert bool((rows[sorted(untouched)] == 7.0).all())


@pytest.mark.parametrize("kv_dtype", [torch.int8, *([torch.float8_e4m3fn] if HAS_FLOAT8 else [])], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_of_8_bits_is_the_row_quantised(
    dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> None:
    inputs = _inputs(3, 48, 16, dtype)
    for function, where in (
        (gpu.rope_and_latent_write, device),
        (reference.rope_and_latent_write, torch.device("cpu")),
    ):
        floats = _on(where, inputs)
        function(**floats)
        rows = floats["cache"]
        ours = _on(where, inputs) | {"cache": torch.zeros(rows.shape, device=where).to(kv_dtype)}
        scale: float | Tensor = 0.02 if kv_dtype != torch.int8 else torch.zeros(rows.shape[:3], device=where)
        function(**ours, scale=scale)
        if isinstance(scale, Tensor):
            values, scales = quantize_per_token(rows.cpu(), torch.int8)
        else:
            values, scales = (rows.float().cpu() * (1.0 / scale)).clamp(-448.0, 448.0).to(kv_dtype), None
        for slot in inputs["slot_mapping"].tolist():
            if slot >= 0:
                place = divmod(slot, BLOCK_SIZE)
                assert torch.equal(ours["cache"][place].float().cpu(), values[place].float())
                assert scales is None or torch.equal(scale[place].cpu(), scales[place])  # type: ignore[index]


@pytest.mark.parametrize("config", CANDIDATES)
def test_every_candidate_gives_the_same_bits(config: dict[str, int], device: torch.device) -> None:
    inputs = _inputs(70, 48, 16, torch.float32)
    first, second = _on(device, inputs), _on(device, inputs)
    assert torch.equal(gpu.rope_and_latent_write(**first), gpu.rope_and_latent_write(**second, config=config))
    assert torch.equal(first["cache"], second["cache"])


def test_launcher_refuses_with_words(device: torch.device) -> None:
    inputs = _on(device, _inputs(3, 48, 16, torch.float32))
    for changes, words in (
        ({"latent": inputs["latent"][:, 1:]}, r"latent must have shape \(9, 64\)"),
        ({"cos_sin": inputs["cos_sin"][:, :8]}, "cos_sin must have shape"),
        ({"cache": inputs["cache"][..., :32]}, "does not fit head_dim 64"),
        ({"scale": 2.0}, "scale must be positive, and 1 unless the cache is quantised"),
    ):
        with pytest.raises(ValueError, match=words):
            gpu.rope_and_latent_write(**(inputs | changes))
