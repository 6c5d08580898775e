"""RoPE, qk-norm and cache write: kernel against reference, reference against Hugging Face's functions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as apply_rotary_to_adjacent_pairs
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from ci.kernels.kernel_cases import DTYPES, ELEMENTWISE_TOLERANCE, HAS_FLOAT8, assert_near
from inflight_kernels.quantization.reference import quantize_per_token
from inflight_kernels.rope import gpu, reference
from inflight_kernels.rope.gpu.rope_kv_write import default_config

MAX_POSITIONS = 50


def _table(rotary_dim: int) -> Tensor:
    angles = torch.arange(MAX_POSITIONS)[:, None] / 10000 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def _inputs(
    num_tokens: int, num_q_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k and v as views of one buffer, positions, and slots of which one is padding."""
    qkv = torch.randn(num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    heads = qkv.view(num_tokens, -1, head_dim)
    q, k, v = heads.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    positions = torch.randint(0, MAX_POSITIONS, (num_tokens,))
    slots = torch.randperm(5 * block_size)[:num_tokens]
    slots[num_tokens // 2] = -1
    return q, k, v, positions, slots


def _poisoned_caches(block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (5, block_size, num_kv_heads, head_dim)
    return torch.full(shape, 7.0, dtype=dtype), torch.full(shape, -7.0, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "rotary_dim", "block_size"),
    [(4, 4, 32, 32, 8), (9, 3, 64, 64, 16), (8, 2, 80, 32, 8), (8, 1, 96, 96, 16), (16, 2, 128, 128, 64)],
)
@pytest.mark.parametrize("norm_dtype", [None, "as q", torch.float32], ids=str)
@pytest.mark.parametrize("adjacent_pairs", [False, True])
def test_kernel_equals_reference(
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
    adjacent_pairs: bool,
    norm_dtype: torch.dtype | str | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    pairs = {"adjacent_pairs": adjacent_pairs}
    q, k, v, positions, slots = _inputs(9, num_q_heads, num_kv_heads, head_dim, block_size, dtype)
    table = _table(rotary_dim)
    of_norms = norm_dtype if isinstance(norm_dtype, torch.dtype) else dtype
    norms = tuple(torch.randn(2, head_dim).to(of_norms)) if norm_dtype else ()
    wanted_caches = _poisoned_caches(block_size, num_kv_heads, head_dim, dtype)
    wanted = reference.rope_and_kv_write(q, k, v, table, positions, *wanted_caches, slots, *norms, **pairs)

    on_device = q._base.to(device).view(9, -1, head_dim)
    views = on_device.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    caches = tuple(cache.to(device) for cache in _poisoned_caches(block_size, num_kv_heads, head_dim, dtype))
    got = gpu.rope_and_kv_write(
        *views,
        table.to(device),
        positions.to(device),
        *caches,
        slots.to(device),
        *(w.to(device) for w in norms),
        **pairs,
    )
    assert got.is_contiguous() and got.dtype == dtype
    # One more rounding between norm and rotation than elsewhere.
    tolerance = 2 * ELEMENTWISE_TOLERANCE[dtype]
    assert_near(got, wanted, tolerance)
    assert_near(caches[0], wanted_caches[0], tolerance)
    assert torch.equal(caches[1].cpu(), wanted_caches[1])
    of_queries = [table, positions, *norms[:1]]
    alone = gpu.rope(views[0], *(each.to(device) for each in of_queries), **pairs)
    assert torch.equal(alone, got)
    assert torch.equal(reference.rope(q, *of_queries, **pairs), wanted)


@pytest.mark.skipif(not HAS_FLOAT8, reason="this GPU cannot convert to float8_e4m3fn")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "rotary_dim"), [(9, 3, 64, 64), (8, 2, 80, 32), (4, 4, 32, 32)]
)
@pytest.mark.parametrize("with_norm", [False, True])
def test_fp8_cache_is_what_would_have_been_written_over_the_scale(
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    with_norm: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    q, k, v, positions, slots = _inputs(9, num_q_heads, num_kv_heads, head_dim, 8, dtype)
    # Beyond 448 times its scale: cut off.
    v[0] *= 1000.0
    norms = tuple(torch.randn(2, head_dim).to(device, dtype)) if with_norm else ()
    tensors = [tensor.to(device) for tensor in (q, k, v, _table(rotary_dim), positions)]
    slots = slots.to(device)
    full = [cache.to(device) for cache in _poisoned_caches(8, num_kv_heads, head_dim, dtype)]
    wanted = gpu.rope_and_kv_write(*tensors, *full, slots, *norms)
    scales = (0.37, 1.9)
    for function in (gpu.rope_and_kv_write, reference.rope_and_kv_write):
        caches = [torch.full(full[0].shape, 7.0, device=device).to(torch.float8_e4m3fn) for _ in range(2)]
        got = function(*tensors, *caches, slots, *norms, k_scale=scales[0], v_scale=scales[1])
        assert_near(got, wanted, 2 * ELEMENTWISE_TOLERANCE[dtype])
        for cache, values, scale in zip(caches, full, scales, strict=True):
            shrunk = (values.float() * (1.0 / scale)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
            flat, wanted_rows = cache.float().view(-1, num_kv_heads, head_dim), shrunk.float().flatten(0, 1)
            for slot in range(len(flat)):
                if slot not in slots.tolist():
                    assert bool((flat[slot] == 7.0).all())
                elif function is gpu.rope_and_kv_write:
                    assert torch.equal(flat[slot], wanted_rows[slot])
                else:
                    # A last bit of the rotation may decide a rounding: a step of e4m3, an eighth of the value.
                    torch.testing.assert_close(flat[slot], wanted_rows[slot], atol=2**-9, rtol=0.126)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_kv_heads", "head_dim", "rotary_dim"), [(3, 64, 64), (2, 80, 32)])
def test_heads_of_an_int8_cache_are_quantised_by_themselves(
    num_kv_heads: int, head_dim: int, rotary_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    q, k, v, positions, slots = _inputs(9, 9, num_kv_heads, head_dim, 8, dtype)
    v[0] *= 1000.0
    v[1], v[2, 0, 3], k[3, 0, head_dim - 1] = 0.0, float("inf"), float("nan")
    tensors = [tensor.to(device) for tensor in (q, k, v, _table(rotary_dim), positions)]
    slots = slots.to(device)
    full = [cache.to(device) for cache in _poisoned_caches(8, num_kv_heads, head_dim, dtype)]
    wanted = gpu.rope_and_kv_write(*tensors, *full, slots)
    for function in (gpu.rope_and_kv_write, reference.rope_and_kv_write):
        caches = [torch.full(full[0].shape, 7, dtype=torch.int8, device=device) for _ in range(2)]
        scales = [torch.full(full[0].shape[:3], 7.0, device=device) for _ in range(2)]
        got = function(*tensors, *caches, slots, k_scale=scales[0], v_scale=scales[1])
        assert_near(got, wanted, 2 * ELEMENTWISE_TOLERANCE[dtype])
        for cache, scale, exact in zip(caches, scales, full, strict=True):
            values, of_heads = quantize_per_token(exact, torch.int8)
            for slot in range(len(scale.flatten(0, 1))):
                found, wanted_row = cache.flatten(0, 1)[slot], values.flatten(0, 1)[slot]
                found_scale, wanted_scale = scale.flatten(0, 1)[slot], of_heads.flatten(0, 1)[slot]
                if slot not in slots.tolist():
                    assert bool((found == 7).all()) and bool((found_scale == 7.0).all())
                    continue
                finite = wanted_scale.isfinite()
                read = (found * found_scale[:, None])[~finite]
                assert not bool(read.isfinite().any())  # whoever reads it is told
                # A last bit of the reference's rotation may decide a rounding.
                step = 0 if function is gpu.rope_and_kv_write else 1
                difference = found[finite].int() - wanted_row[finite].int()
                assert bool((difference.abs() <= step).all())
                torch.testing.assert_close(found_scale[finite], wanted_scale[finite], atol=0, rtol=step * 2**-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_alone_and_in_a_batch_are_bitwise_the_same(dtype: torch.dtype, device: torch.device) -> None:
    q, k, v, positions, _ = (tensor.to(device) for tensor in _inputs(150, 3, 1, 32, 32, dtype))
    slots = torch.randperm(160, device=device)[:150]
    table, norms = _table(32).to(device), tuple(torch.randn(2, 32).to(device, dtype))

    def run(tokens: slice, config: dict[str, int] | None = None) -> tuple[Tensor, Tensor]:
        caches = [torch.zeros(20, 8, 1, 32, dtype=dtype, device=device) for _ in range(2)]
        chosen = (q[tokens], k[tokens], v[tokens], table, positions[tokens], *caches, slots[tokens], *norms)
        return gpu.rope_and_kv_write(*chosen, config=config), caches[0].view(160, 32)[slots[tokens]]

    together = run(slice(None))
    few = run(slice(None), {**default_config(3, 1, 32), "PROGRAMS_PER_SM": 1})
    assert torch.equal(few[0], together[0]) and torch.equal(few[1], together[1])
    for token in (0, 77, 149):
        alone = run(slice(token, token + 1))
        assert torch.equal(alone[0][0], together[0][token]) and torch.equal(alone[1][0], together[1][token])


def test_reference_writes_each_token_to_its_slot_and_nothing_else() -> None:
    q, k, v, positions, slots = _inputs(6, 2, 1, 32, 8, torch.float32)
    k_cache, v_cache = _poisoned_caches(8, 1, 32, torch.float32)
    reference.rope_and_kv_write(q, k, v, _table(32), positions, k_cache, v_cache, slots)
    flat = v_cache.view(-1, 1, 32)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(flat[slot], v[token])
    assert int((flat == -7.0).all(dim=-1).sum()) == 5 * 8 - int((slots >= 0).sum())


@pytest.mark.parametrize("with_norm", [False, True])
def test_reference_equals_hugging_face(with_norm: bool) -> None:
    q, k, v, positions, slots = _inputs(8, 6, 2, 64, 16, torch.float32)
    table = _table(64)
    k_cache, v_cache = _poisoned_caches(16, 2, 64, torch.float32)
    weights = torch.randn(2, 64)
    hf_q, hf_k = q, k
    if with_norm:
        norms = [Qwen3RMSNorm(64, eps=1e-6) for _ in range(2)]
        for norm, weight in zip(norms, weights, strict=True):
            norm.weight.data = weight
        with torch.no_grad():
            hf_q, hf_k = norms[0](q), norms[1](k)
    cos, sin = (half.repeat(1, 2)[None] for half in table[positions].chunk(2, dim=1))
    hf_q, hf_k = apply_rotary_pos_emb(hf_q.transpose(0, 1)[None], hf_k.transpose(0, 1)[None], cos, sin)
    rotated = reference.rope_and_kv_write(
        q, k, v, table, positions, k_cache, v_cache, slots, *(weights if with_norm else ()), norm_eps=1e-6
    )
    assert_near(rotated, hf_q[0].transpose(0, 1), 1e-6 * 10)
    written = slots >= 0
    assert_near(k_cache.view(-1, 2, 64)[slots[written]], hf_k[0].transpose(0, 1)[written], 1e-6 * 10)


def test_reference_rotates_adjacent_pairs_as_hugging_face_does() -> None:
    q, k, v, positions, slots = _inputs(8, 6, 2, 64, 16, torch.float32)
    table = _table(32)
    cos, sin = (half.repeat(1, 2)[None] for half in table[positions].chunk(2, dim=1))
    hf_q, _ = apply_rotary_to_adjacent_pairs(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    caches = _poisoned_caches(16, 2, 64, torch.float32)
    rotated = reference.rope_and_kv_write(q, k, v, table, positions, *caches, slots, adjacent_pairs=True)
    assert_near(rotated, hf_q[0].transpose(0, 1), 1e-6 * 10)


def test_launcher_refuses_with_words() -> None:
    q, k, v, positions, slots = _inputs(4, 2, 1, 32, 8, torch.float32)
    caches = _poisoned_caches(8, 1, 32, torch.float32)
    with pytest.raises(ValueError, match=r"positions must be torch\.int64"):
        gpu.rope_and_kv_write(q, k, v, _table(32), positions.int(), *caches, slots)
    with pytest.raises(ValueError, match="even rotary_dim of at most 32"):
        gpu.rope_and_kv_write(q, k, v, _table(64), positions, *caches, slots)
    with pytest.raises(ValueError, match="given together"):
        gpu.rope_and_kv_write(q, k, v, _table(32), positions, *caches, slots, torch.randn(32))
    with pytest.raises(ValueError, match=r"are for a cache of torch\.float8_e4m3fn"):
        gpu.rope_and_kv_write(q, k, v, _table(32), positions, *caches, slots, k_scale=2.0)
    with pytest.raises(ValueError, match=r"k_scale of a cache of torch\.int8 must be a tensor"):
        gpu.rope_and_kv_write(q, k, v, _table(32), positions, *(cache.to(torch.int8) for cache in caches), slots)
    with pytest.raises(ValueError, match=r"k_scale of a cache of torch\.float32 must be a number"):
        gpu.rope_and_kv_write(q, k, v, _table(32), positions, *caches, slots, k_scale=torch.ones(1))
    with pytest.raises(ValueError, match="must be positive"):
        float8 = tuple(cache.to(torch.float8_e4m3fn) for cache in caches)
        gpu.rope_and_kv_write(q, k, v, _table(32), positions, *float8, slots, k_scale=0.0)
