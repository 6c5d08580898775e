"""Steps of several sequences, for tests of operations that keep a state for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from inflight_kernels import StepSequences

Run = Callable[[Tensor, StepSequences], Tensor]
"""Gives the result (T, columns) of a step's inputs (T, columns), over the state that it was made with."""
Steps = Sequence[Sequence[tuple[int, int]]]
"""Of each step: a sequence, and how many of its next tokens are computed."""
SLOTS, PADDING_SLOT, KEPT_SLOT, NUM_SLOTS = (4, 0, 2), 3, 1, 6
"""Of three sequences; of those that only pad a step; of a state that is kept; and of all. The last one is nobody's."""
PADDING = -1
"""Stands for a sequence of one token that only pads a step."""


def sequences_of(
    chunks: Sequence[tuple[int, int, int]],
    kept: Mapping[tuple[int, int], int] | None = None,
    device: torch.device | str = "cpu",
) -> StepSequences:
    """`chunks`: a slot, the first token's position, and the number of tokens of each sequence. `kept`: slot and
    position of a token -> where the state behind it is kept."""
    counts = torch.tensor([count for _, _, count in chunks])
    tokens = [(slot, position + i) for slot, position, count in chunks for i in range(count)]
    kept_T = torch.tensor([(kept or {}).get(token, -1) for token in tokens], dtype=torch.int32, device=device)
    return StepSequences(
        slots_B=torch.tensor([slot for slot, _, _ in chunks], device=device),
        starts=torch.cat([torch.zeros(1), counts.cumsum(0)]).to(device, torch.int32),
        positions_T=torch.tensor([position for _, position in tokens], device=device),
        kept_T=None if kept is None else kept_T,
    )


def in_steps(
    run: Run, inputs: Sequence[Tensor], steps: Steps, kept: Mapping[tuple[int, int], int] | None = None
) -> list[Tensor]:
    """What `run` gives of each sequence's inputs."""
    device, done = inputs[0].device, [0] * len(inputs)
    results: list[list[Tensor]] = [[] for _ in inputs]
    for step in steps:
        rows, chunks = [], []
        for sequence, count in step:
            if sequence == PADDING:
                rows.append(torch.randn_like(inputs[0][:1]))
                chunks.append((PADDING_SLOT, 0, 1))
                continue
            rows.append(inputs[sequence][done[sequence] : done[sequence] + count])
            chunks.append((SLOTS[sequence], done[sequence], count))
            done[sequence] += count
        found = run(torch.cat(rows), sequences_of(chunks, kept, device)).split([len(row) for row in rows])
        for (sequence, _), of_chunk in zip(step, found, strict=True):
            if sequence != PADDING:
                results[sequence].append(of_chunk)
    return [torch.cat(of_sequence) for of_sequence in results]


def assert_same_in_all_steps(make: Callable[[Tensor], Run], inputs: Sequence[Tensor], state: Tensor) -> list[Tensor]:
    """Three sequences of 9, 4 and 1 tokens have the same bits at once, in chunks, token by token and each alone, and
    leave the same states; what slots held before counts for nothing, and slots of nobody are not written. A state that
    is kept behind a token is that of a sequence that ends there. Returns the results of all at once.

    `make` gives what runs over a state, and `state` is (NUM_SLOTS, …), of any values."""
    assert [len(each) for each in inputs] == [9, 4, 1]
    ways: dict[str, Steps] = {
        "at once": [[(0, 9), (1, 4), (2, 1)]],
        "in chunks": [[(2, 1), (0, 1), (1, 2)], [(0, 3), (PADDING, 1), (1, 1)], [(0, 4), (PADDING, 1), (PADDING, 1)]]
        + [[(1, 1), (0, 1)]],
        "token by token": [[(0, 1), (1, 1), (2, 1)], *[[(0, 1), (1, 1)]] * 3, *[[(0, 1)]] * 5],
        "alone": [[(2, 1)], [(1, 4)], [(0, 9)]],
    }
    slots = torch.tensor(SLOTS, device=state.device)
    expected, states = None, None
    for way, steps in ways.items():
        own = torch.full_like(state, float("nan"))
        found = in_steps(make(own), inputs, steps)
        expected, states = expected or found, own[slots] if states is None else states
        assert not any(bool(each.isnan().any()) for each in found), way
        assert all(map(torch.equal, found, expected)), way
        assert torch.equal(own[slots], states), way
        assert bool(own[[KEPT_SLOT, NUM_SLOTS - 1]].isnan().all()), way
    assert expected is not None and states is not None

    for position in (0, 1, 5):
        ended, own = torch.full_like(state, float("nan")), torch.full_like(state, float("nan"))
        run = make(ended)
        in_steps(run, inputs[:1], [[(0, position + 1)]])
        kept = in_steps(make(own), inputs, [[(0, 2), (1, 4)], [(2, 1), (0, 7)]], {(SLOTS[0], position): KEPT_SLOT})
        assert all(map(torch.equal, kept, expected)) and torch.equal(own[slots], states)
        assert torch.equal(own[KEPT_SLOT], ended[SLOTS[0]]), position
    # From another slot a sequence goes on as it would have from its own.
    moved = torch.full_like(state, float("nan"))
    run = make(moved)
    in_steps(run, inputs[:1], [[(0, 2)]])
    moved[KEPT_SLOT] = moved[SLOTS[0]]
    rest = run(inputs[0][2:], sequences_of([(KEPT_SLOT, 2, 7)], device=state.device))
    assert torch.equal(rest, expected[0][2:]) and torch.equal(moved[KEPT_SLOT], states[0])
    return expected


def assert_same_across_chunks(
    make: Callable[[Sequence[Tensor]], Run], inputs: Sequence[Tensor], states: Sequence[Tensor]
) -> None:
    """As `assert_same_in_all_steps`, of what keeps the state at the last border of a chunk of 16 tokens and the inputs
    behind it: sequences of 37, 16 and 5 tokens have the same bits at once, in steps that begin and end within chunks
    and at their borders, token by token and each alone. From a state that is kept behind a token, and in another slot,
    a sequence goes on with the same bits.

    `make` gives what runs over states, and `states` are (NUM_SLOTS, …), of any values."""
    assert [len(each) for each in inputs] == [37, 16, 5]
    expected = None
    ways: dict[str, Steps] = {
        "at once": [[(0, 37), (1, 16), (2, 5)]],
        "within chunks": [[(2, 1), (0, 1), (1, 5)], [(0, 14), (PADDING, 1), (1, 11), (2, 4)], [(0, 17), (PADDING, 1)]]
        + [[(0, 5)]],
        "at borders": [[(1, 16), (0, 16)], [(0, 16), (2, 4)], [(2, 1), (0, 5)]],
        "token by token": [[(0, 1), (1, 1), (2, 1)]] * 5 + [[(0, 1), (1, 1)]] * 11 + [[(0, 1)]] * 21,
        "alone": [[(2, 5)], [(1, 16)], [(0, 37)]],
    }
    for way, steps in ways.items():
        own = [torch.full_like(state, float("nan")) for state in states]
        found = in_steps(make(own), inputs, steps)
        expected = expected or found
        assert all(map(torch.equal, found, expected)), way
        assert all(bool(state[[KEPT_SLOT, NUM_SLOTS - 1]].isnan().all()) for state in own), way
    assert expected is not None and not any(bool(each.isnan().any()) for each in expected)

    for position in (2, 14, 15, 16, 31, 35):
        own = [torch.full_like(state, float("nan")) for state in states]
        run, behind = make(own), position + 1
        kept = in_steps(run, inputs, [[(0, 2), (1, 16)], [(2, 5), (0, 35)]], {(SLOTS[0], position): KEPT_SLOT})
        assert all(map(torch.equal, kept, expected)), position
        for state in own:
            state[NUM_SLOTS - 1] = state[KEPT_SLOT]
        for slot in (KEPT_SLOT, NUM_SLOTS - 1):
            rest = run(inputs[0][behind:], sequences_of([(slot, behind, 37 - behind)], device=inputs[0].device))
            assert torch.equal(rest, expected[0][behind:]), position
