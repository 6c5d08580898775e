"""Quantised weights: words lie as they are drawn, and mean what they were packed of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inflight_kernels import Int4Weight, pack_int4, quantize_weight

N, K, GROUP = 24, 160, 32
GROUPS = K // GROUP


def random_parts(lowest_zero: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (N, K), zeros (GROUPS, N) and float16 scales (GROUPS, N)."""
    q = torch.randint(0, 16, (N, K))
    zeros = torch.randint(lowest_zero, 16 + lowest_zero, (GROUPS, N))
    return q, zeros, (torch.rand(GROUPS, N) * 0.02 + 0.001).half()


def test_words_lie_as_drawn() -> None:
    q, zeros, scales = random_parts(lowest_zero=1)
    weight = pack_int4(q, scales.bfloat16(), zeros)
    assert weight.qweight.shape == (2, N, 32)
    for block, n, j in ((0, 0, 0), (0, 5, 31), (1, N - 1, 7)):
        word = int(weight.qweight[block, n, j]) & 0xFFFF
        columns = [128 * block + j + 32 * plane for plane in range(4)]
        assert [word >> 4 * plane & 15 for plane in range(4)] == [int(q[n, k]) if k < K else 0 for k in columns]
    for g, n in ((0, 0), (GROUPS - 1, N - 1)):
        bits = int(weight.scale_zero[g, n])
        scale, zero = torch.tensor([bits >> 16, bits & 0xFFFF]).to(torch.int16).view(torch.bfloat16)
        assert scale == scales[g, n].bfloat16()
        assert zero == 128 + zeros[g, n]
    assert torch.equal(weight.whole_numbers(), q.int())
    assert torch.equal(weight.scales_and_zeros()[1], zeros.int())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dequantising_rounds_once(dtype: torch.dtype) -> None:
    q, zeros, scales = random_parts(lowest_zero=0)
    scales = scales.to(dtype)
    weight: Int4Weight = pack_int4(q, scales, zeros)
    exact = (q - zeros.repeat_interleave(GROUP, 0).T).double() * scales.double().repeat_interleave(GROUP, 0).T
    assert weight.dequantize().dtype == dtype
    assert torch.equal(weight.dequantize(), exact.to(dtype))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.int8, 127.0), (torch.float8_e4m3fn, 448.0)])
def test_quantize_weight(dtype: torch.dtype, limit: float) -> None:
    weight = torch.randn(7, 50) * torch.tensor([1e-3, 1.0, 100.0, 1.0, 1.0, 1.0, 0.0])[:, None]
    q, scale = quantize_weight(weight.bfloat16(), dtype)
    assert q.dtype == dtype and q.shape == weight.shape
    assert scale.dtype == torch.float32 and scale.shape == (7,)
    assert scale[-1] == 1.0 and not q[-1].float().any()
    assert torch.equal(q.float().abs().amax(1)[:-1], torch.full((6,), limit))
    error = (q.float() * scale[:, None] - weight.bfloat16().float()).abs()
    # Half a step: of the whole range for int8, of the value's own power of two for fp8.
    bound = (
        scale[:, None] * 0.501 if dtype == torch.int8 else weight.bfloat16().float().abs() / 15 + scale[:, None] / 512
    )
    assert (error <= bound).all()


def test_refuses_with_words() -> None:
    q, zeros, scales = random_parts(lowest_zero=1)
    with pytest.raises(ValueError, match=r"must be float16 or bfloat16, got torch\.float32"):
        pack_int4(q, scales.float(), zeros)
    with pytest.raises(ValueError, match="needs scales and zeros"):
        pack_int4(q, scales, zeros[:1])
    with pytest.raises(ValueError, match="groups must hold a multiple of 32 columns"):
        pack_int4(q[:, :80], scales, zeros)
    with pytest.raises(ValueError, match="quantised to float8_e4m3fn or int8, not to"):
        quantize_weight(torch.randn(2, 2), torch.int16)
