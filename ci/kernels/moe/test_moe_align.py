"""Pairs sorted by expert: each valid pair stands in exactly one place of exactly one tile of its expert."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inflight_kernels.moe.gpu._moe_align import align, most_tiles

CASES = {
    "even": lambda: torch.arange(48) % 6,
    "random": lambda: torch.randint(0, 6, (53,)),
    "one pair": lambda: torch.tensor([3]),
    "all to the last expert": lambda: torch.full((37,), 5),
    "some to none": lambda: torch.randint(-1, 7, (41,)),
    "all to none": lambda: torch.full((20,), -1),
}


def check(experts: Tensor, num_experts: int, block_m: int, chunk: int) -> None:
    order, tiles, num_tiles = (x.cpu() for x in align(experts, num_experts, block_m, chunk))
    experts = experts.cpu()
    valid = (experts >= 0) & (experts < num_experts)
    expected = torch.where(valid, experts, num_experts).argsort(stable=True)[: int(valid.sum())]
    assert order[: len(expected)].tolist() == expected.tolist()
    assert 0 <= int(num_tiles) <= most_tiles(len(experts), num_experts, block_m)
    place, last_expert = 0, -1
    for expert, begin, end in tiles[:, : int(num_tiles)].T.tolist():
        assert begin == place and 0 < end - begin <= block_m and expert >= last_expert
        assert experts[expected[begin:end]].eq(expert).all()
        # Only an expert's last tile is not full.
        assert end - begin == block_m or end == len(expected) or experts[expected[end]] != expert
        place, last_expert = end, expert
    assert place == len(expected)


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("name", CASES)
def test_every_pair_is_in_one_tile_of_its_expert(name: str, chunk: int, device: torch.device) -> None:
    check(CASES[name]().int().to(device), num_experts=6, block_m=4, chunk=chunk)


def test_prefix_sums_go_on_over_the_border_of_a_step(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight_kernels.moe.gpu._moe_align.SCAN_ELEMENTS", 16)
    check(torch.randint(0, 6, (100,), dtype=torch.int32, device=device), num_experts=6, block_m=8, chunk=16)


def test_the_bound_on_tiles_is_reached_and_never_passed() -> None:
    # One row in each of 6 experts and 4 full tiles: no routing of 22 pairs needs more tiles of 4.
    assert most_tiles(22, 6, 4) == 10
    assert most_tiles(3, 6, 4) == 3
    assert most_tiles(1, 128, 16) == 1
