"""The tokens of a step: kernel and reference against each row written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from inflight_kernels.kv_cache import gpu, reference
from inflight_kernels.kv_cache.gpu.advance_rows import MAX_TOKENS

NUM_ROWS, NUM_GROUPS, WIDTH, BLOCK_SIZE = 9, 3, 5, 16
PADDING = NUM_ROWS - 1
KERNEL_AND_REFERENCE = pytest.mark.parametrize("advance_rows", [gpu.advance_rows, reference.advance_rows])


def state(device: torch.device) -> dict[str, Any]:
    """Of rows of any length; the padding row has none."""
    lengths = torch.randint(0, WIDTH * BLOCK_SIZE - 8, (NUM_ROWS,))
    lengths[PADDING] = 0
    return {
        "lengths": lengths.to(device),
        "last_tokens": torch.randint(0, 1000, (NUM_ROWS,)).to(device),
        "block_tables": torch.randint(0, 2**20, (NUM_ROWS, NUM_GROUPS, WIDTH), dtype=torch.int32).to(device),
        "block_size": BLOCK_SIZE,
        "padding_row": PADDING,
    }


def numbers(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


@KERNEL_AND_REFERENCE
@pytest.mark.parametrize("knows_tokens", [False, True])
def test_every_row_is_advanced_and_padding_goes_nowhere(
    advance_rows: Any, knows_tokens: bool, device: torch.device
) -> None:
    own = state(device)
    lengths, last_tokens, tables = (own[name].tolist() for name in ("lengths", "last_tokens", "block_tables"))
    rows, given = [4, 0, 7, 2, PADDING, PADDING], [-1, 55, -3, 0, -1, -1]
    tokens = advance_rows(
        numbers(rows, device),
        numbers([1, 1, 1, 1, 0, 0], device),
        **own,
        token_ids=numbers(given, device) if knows_tokens else None,
    )
    expected_ids = [last_tokens[row] for row in rows]
    if knows_tokens:
        expected_ids[1], expected_ids[3] = 55, 0
    assert tokens.token_ids.tolist() == expected_ids
    assert tokens.rows.tolist() == rows
    assert tokens.positions.tolist() == [lengths[row] for row in rows]
    for group, slots in enumerate(tokens.slots):
        for row, slot in zip(rows[:4], slots.tolist(), strict=False):
            position = lengths[row]
            assert slot == tables[row][group][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        assert slots.tolist()[4:] == [-1, -1]
    for row in rows[:4]:
        lengths[row] += 1
    assert tokens.ends.tolist() == tokens.seq_lens.tolist() == [lengths[row] for row in rows]
    assert tokens.seq_lens.dtype == torch.int32 and tokens.ends.dtype == torch.int64
    assert own["lengths"].tolist() == lengths


@KERNEL_AND_REFERENCE
def test_a_row_with_drafts_stands_in_several_places(advance_rows: Any, device: torch.device) -> None:
    own = state(device)
    length = int(own["lengths"][3])
    tokens = advance_rows(
        numbers([3, 3, 3, 5], device),
        numbers([1, 2, 3, 1], device),
        **own,
        offsets=numbers([0, 1, 2, 0], device),
        token_ids=numbers([-1, 8, 9, -1], device),
    )
    assert tokens.positions.tolist()[:3] == [length, length + 1, length + 2]
    assert tokens.ends.tolist()[:3] == tokens.seq_lens.tolist()[:3] == [length + 1, length + 2, length + 3]
    assert tokens.token_ids.tolist()[1:3] == [8, 9]
    assert int(own["lengths"][3]) in range(length + 1, length + 4)


@KERNEL_AND_REFERENCE
def test_longer_rows_have_places(advance_rows: Any, device: torch.device) -> None:
    own = state(device)
    first, second = (int(own["lengths"][row]) for row in (1, 6))
    tokens = advance_rows(
        numbers([1, 6], device),
        numbers([1, 3], device),
        **own,
        offsets=numbers([0, 0, 1, 2], device),
        places=numbers([0, 1, 1, 1], device),
    )
    assert tokens.rows.tolist() == [1, 6, 6, 6]
    assert tokens.positions.tolist() == [first, second, second + 1, second + 2]
    assert tokens.ends.tolist() == [first + 1, second + 1, second + 2, second + 3]
    assert tokens.seq_lens.tolist() == [first + 1, second + 3]
    assert own["lengths"][[1, 6]].tolist() == [first + 1, second + 3]


@pytest.mark.parametrize("count", [0, 1, 33, MAX_TOKENS, MAX_TOKENS + 1])
def test_any_number_of_rows(count: int, device: torch.device) -> None:
    both = []
    lengths, last_tokens = torch.randint(0, 60, (2000,)), torch.randint(0, 9, (2000,))
    tables = torch.randint(0, 99, (2000, 2, 4), dtype=torch.int32)
    rows = torch.randperm(2000)[:count]
    for advance_rows in (gpu.advance_rows, reference.advance_rows):
        own = [tensor.clone().to(device) for tensor in (lengths, last_tokens, tables)]
        tokens = advance_rows(rows.to(device), torch.ones_like(rows).to(device), *own, BLOCK_SIZE)
        both.append([*tokens._replace(slots=torch.stack(tokens.slots)), own[0]])
    assert all(torch.equal(*pair) for pair in zip(*both, strict=True))


def test_launcher_refuses_with_words(device: torch.device) -> None:
    rows = numbers([1, 2], device)
    with pytest.raises(ValueError, match=r"counts must be torch\.int64"):
        gpu.advance_rows(rows, rows.int(), **state(device))
    with pytest.raises(ValueError, match="lengths must have shape"):
        gpu.advance_rows(rows, rows, **state(device) | {"lengths": rows})
