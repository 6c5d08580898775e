"""Which values a weight can have, in every type that a checkpoint stores."""

from __future__ import annotations

import math

import pytest
import torch

from inflight.models.usable_values import why_unusable

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("place", [0, 17, 4098])
@pytest.mark.parametrize(("value", "word"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_one_among_many_is_found(dtype: torch.dtype, place: int, value: float, word: str) -> None:
    values = torch.randn(4099).to(dtype)
    assert why_unusable(values, dtype) == ""
    values[place] = value
    assert why_unusable(values, dtype).startswith(f"holds {word}, which is no weight: the file is damaged")


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_number_of_a_type_is_one(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    assert why_unusable(torch.tensor([most, -most, 0.0, torch.finfo(dtype).tiny], dtype=dtype), dtype) == ""


@pytest.mark.parametrize("value", [65520.0, -1e30])
def test_float16_cannot_have_what_others_can(value: float) -> None:
    values = torch.tensor([1.0, value])
    assert why_unusable(values, torch.float16).startswith(f"holds {value:g}, and float16 has no numbers beyond 65504")
    assert why_unusable(values, torch.bfloat16) == ""


def test_in_fp8_only_two_bytes_are_no_number() -> None:
    for byte in range(256):
        values = torch.tensor([0, 1, byte, 0xFE, 0x7E], dtype=torch.uint8).view(torch.float8_e4m3fn)
        is_number = bool(torch.isfinite(values.float()).all())
        assert (why_unusable(values, torch.float8_e4m3fn) == "") == is_number
        assert is_number == (byte not in (0x7F, 0xFF))


def test_whole_numbers_and_nothing_at_all_are_fine() -> None:
    assert why_unusable(torch.tensor([-1, 2**31 - 1], dtype=torch.int32), torch.int32) == ""
    assert why_unusable(torch.empty(0, 3), torch.float16) == ""
