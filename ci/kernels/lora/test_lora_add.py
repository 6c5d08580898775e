"""Many adapters on one batch: kernels against reference, reference against its formula, rows against their batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ci.kernels.kernel_cases import DTYPES, assert_near
from inflight_kernels.lora import gpu, reference
from inflight_kernels.lora.gpu.lora_add import MAX_RANK

TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
TINY = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "SPLIT_K": 2, "num_warps": 4, "num_stages": 2}


def random_call(
    adapters: Sequence[int], num_adapters: int, in_features: int, widths: Sequence[int], rank: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, out_features = len(adapters), sum(widths)
    y = torch.randn(tokens, out_features).to(dtype)
    x = torch.randn(tokens, in_features).to(dtype)
    a = (torch.randn(num_adapters, len(widths) * rank, in_features) / in_features**0.5).to(dtype)
    b = (torch.randn(num_adapters, out_features, rank) / rank**0.5).to(dtype)
    return y, x, a, b, torch.tensor(adapters, dtype=torch.int32), torch.rand(num_adapters) + 0.5


def run(
    call: tuple[Tensor, ...], device: torch.device, slices: Sequence[int] | None = None, **options: object
) -> Tensor:
    y, *others = (tensor.clone().to(device) for tensor in call)
    result = gpu.lora_add(y, *others, slices, **options)
    assert result is y
    return y


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launcher allocates holds NaN before it is written."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(float("nan")))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("adapters", "num_adapters", "in_features", "widths", "rank"),
    [
        ([2], 3, 40, [24], 4),
        ([0, 2, -1, 2, 0, 1, -1] * 3, 4, 56, [33], 16),
        ([1, 0, 1], 2, 24, [40, 8, 17], 8),
        ([-1, 0, 0, 1], 2, 70, [16, 24], 24),
        ([0] * 18 + [1] * 2, 2, 8, [16], MAX_RANK),
    ],
)
def test_kernels_equal_reference(
    adapters: list[int],
    num_adapters: int,
    in_features: int,
    widths: list[int],
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    call = random_call(adapters, num_adapters, in_features, widths, rank, dtype)
    actual = run(call, device, widths, config=TINY)
    assert_near(actual, reference.lora_add(call[0].clone(), *call[1:], widths), TOLERANCE[dtype])


def test_reference_is_its_formula() -> None:
    y, x, a, b, adapters, scales = random_call([1, -1, 0, 1], 2, 12, [5, 3], 4, torch.float32)
    expected = y.clone().double()
    for row, adapter in enumerate(adapters.tolist()):
        if adapter >= 0:
            for columns, ranks in ((slice(0, 5), slice(0, 4)), (slice(5, 8), slice(4, 8))):
                update = b[adapter, columns].double() @ (a[adapter, ranks].double() @ x[row].double())
                expected[row, columns] += scales[adapter].double() * update
    assert_near(reference.lora_add(y, x, a, b, adapters, scales, [5, 3]), expected, 2e-6)


def test_rows_without_an_adapter_keep_their_bits(device: torch.device) -> None:
    call = random_call([-1, 1, -1, 0], 2, 16, [16], 8, torch.float32)
    call[0][0] = float("nan")
    call[1][2] = float("nan")
    actual = run(call, device, config=TINY).cpu()
    assert actual[0].isnan().all()
    assert torch.equal(actual[2], call[0][2])
    assert actual[[1, 3]].isfinite().all() and not torch.equal(actual[[1, 3]], call[0][[1, 3]])


def test_only_the_columns_of_a_view_are_touched(device: torch.device) -> None:
    call = random_call([0, 1, 0], 2, 16, [20], 8, torch.float32)
    wide = torch.full((3, 40), float("nan"), device=device)
    wide[:, 7:27] = call[0].to(device)
    gpu.lora_add(wide[:, 7:27], *(tensor.to(device) for tensor in call[1:]), config=TINY)
    assert_near(wide[:, 7:27], reference.lora_add(call[0], *call[1:]), TOLERANCE[torch.float32])
    assert wide[:, :7].isnan().all() and wide[:, 27:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype, device: torch.device) -> None:
    call = random_call([0, 1, 1, -1, 2, 0] * 12, 3, 96, [40, 24], 8, dtype)

    def rows(begin: int, end: int) -> Tensor:
        y, x, a, b, adapters, scales = call
        part = (y[begin:end], x[begin:end], a, b, adapters[begin:end], scales)
        return run(part, device, [40, 24], deterministic=True)

    together = rows(0, 72)
    for begin, end in ((0, 1), (70, 71), (5, 9), (20, 72)):
        assert torch.equal(rows(begin, end), together[begin:end])


def test_launcher_checks_its_tensors() -> None:
    y, x, a, b, adapters, scales = random_call([0, 1], 2, 16, [8, 8], 4, torch.float32)
    nothing = gpu.lora_add(y[:0], x[:0], a, b, adapters[:0], scales, [8, 8])
    assert nothing.shape == (0, 16)
    with pytest.raises(ValueError, match=r"1 to 3 widths that sum to 16, got \[8, 4\]"):
        gpu.lora_add(y, x, a, b, adapters, scales, [8, 4])
    with pytest.raises(ValueError, match="a must have shape"):
        gpu.lora_add(y, x, a, b, adapters, scales)
    with pytest.raises(ValueError, match="ranks of 1 to 128, got 129"):
        gpu.lora_add(y, x, torch.zeros(2, 129, 16), torch.zeros(2, 16, 129), adapters, scales)
    with pytest.raises(ValueError, match=r"adapters must be torch\.int32"):
        gpu.lora_add(y, x, a, b, adapters.long(), scales, [8, 8])


def test_known_ranks_change_nothing_where_the_rest_is_zeros(device: torch.device) -> None:
    """A kernel may use them or not."""
    y, x, a, b, adapters, scales = random_call([0, 2, -1, 1, 1], 3, 40, (24, 8), 8, torch.float32)
    ranks = torch.tensor([8, 3, 0], dtype=torch.int32)
    for adapter, rank in enumerate(ranks.tolist()):
        a[adapter].view(2, 8, 40)[:, rank:] = 0
        b[adapter, :, rank:] = 0
    call = (y, x, a, b, adapters, scales)
    expected = reference.lora_add(y.clone(), *call[1:], (24, 8))
    assert_near(reference.lora_add(y.clone(), *call[1:], (24, 8), ranks=ranks), expected, TOLERANCE[y.dtype])
    assert_near(run(call, device, (24, 8), ranks=ranks.to(device)), expected, TOLERANCE[y.dtype])
