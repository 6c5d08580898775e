"""What the draft model computes in a step: which tokens in which pass, and never anything that waits for the device.

Run: pytest ci/unit/runtime/test_draft_passes.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from inflight.layers.attention import AttentionMetadata
from inflight.runtime.draft_model import DraftModel, place_drafts
from inflight.runtime.drafts import LAST_SAMPLED, fill_in
from inflight.runtime.row_state import RowState
from inflight.runtime.row_table import RowTable
from inflight.runtime.sampler import SampledTokens
from inflight.runtime.sampling_input import SamplingInput
from inflight.runtime.staging import InputBuffer
from inflight.runtime.step_input import StepInput, StepPreparation
from inflight.runtime.step_sizes import StepSizes
from inflight.sampling_config import SamplingConfig
from inflight.scheduler_output import DRAFTED, NewSequence, RowWork, SchedulerOutput
from inflight_kernels import dispatch

VOCAB_SIZE, BLOCK_SIZE, NUM_ROWS, MAX_SEQ_LEN = 50, 4, 12, 31
PROMPTS = {0: [7, 8, 9], 1: [1, 2], 2: [3, 4, 5, 6, 7], 3: [VOCAB_SIZE + 3, 11]}
CPU = torch.device("cpu")


class Passes:
    """A network and a sampler that only note what they are given: the token behind t is t + 1."""

    def __init__(self) -> None:
        self.token_ids: list[Tensor] = []
        self.metadata: list[AttentionMetadata] = []

    state_specs = ()

    def forward(self, token_ids_T: Tensor, caches: Any, metadata: AttentionMetadata) -> Tensor:
        self.token_ids.append(token_ids_T)
        self.metadata.append(metadata)
        return token_ids_T[:, None].float()

    def logits(self, hidden_BD: Tensor) -> Tensor:
        return hidden_BD

    def __call__(self, logits_SV: Tensor, sampling: SamplingInput, state: RowState) -> SampledTokens:
        assert len(sampling.lengths_S) == len(sampling.rows_S) == len(logits_SV)
        return SampledTokens(
            token_ids_S=(logits_SV[:, 0] + 1).long(), log_probs_S=None, is_finite_S=torch.isfinite(logits_SV[:, 0])
        )


def prepared(sizes: StepSizes) -> tuple[StepInput, RowTable]:
    """A prompt beside three rows that get drafts: one that was sampled just now, one that the draft model has to catch
    up with, one whose next token the host knows."""
    table = RowTable(NUM_ROWS, MAX_SEQ_LEN // BLOCK_SIZE + 1, 99)
    preparation = StepPreparation(table, vocab_size=VOCAB_SIZE, sizes=sizes, has_draft_model=True)
    new = [
        NewSequence(
            row=row,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            block_ids=[10 * row, 10 * row + 1, 10 * row + 2],
            sampling_config=SamplingConfig(),
        )
        for row, prompt in PROMPTS.items()
    ]
    rows = [
        RowWork(row=row, start=0, num_tokens=len(prompt), token_ids=prompt) for row, prompt in PROMPTS.items() if row
    ]
    preparation.prepare(SchedulerOutput(new_sequences=new[1:], rows=rows), [])
    rows = [
        RowWork(row=1, start=2, num_tokens=2, token_ids=[DRAFTED], num_sampled=2),
        RowWork(
            row=2,
            start=7,
            num_tokens=4,
            token_ids=[30, *[DRAFTED] * 3],
            num_sampled=4,
            is_chosen=True,
            unseen_token_ids=[20, 21],
        ),
        RowWork(row=0, start=0, num_tokens=3, token_ids=PROMPTS[0]),
        RowWork(row=3, start=2, num_tokens=3, token_ids=[40, DRAFTED, DRAFTED], num_sampled=3, is_chosen=True),
    ]
    return preparation.prepare(SchedulerOutput(new_sequences=new[:1], rows=rows), []), table


def draft(sizes: StepSizes, device: torch.device) -> tuple[Passes, Tensor, StepInput]:
    step, table = prepared(sizes)
    state, passes = RowState(table, MAX_SEQ_LEN, VOCAB_SIZE, device), Passes()
    arrays = InputBuffer(10_000, device, packs=bool(sizes.num_rows)).load(step.arrays)
    model = DraftModel(
        passes,
        [],
        block_size=BLOCK_SIZE,
        state=state,
        sampler=passes,  # type: ignore[arg-type]
        input_buffer=InputBuffer(10_000, device, packs=bool(sizes.num_rows)),
    )
    state.begin(step.new_sequences, arrays)
    state.last_token_R.fill_(25)
    before = state.lengths_R.clone()
    assert step.draft_passes is not None
    drafts = model.draft(step.draft_passes, arrays)
    assert drafts is not None
    if device.type == "cpu":
        assert torch.equal(state.lengths_R, before), "the lengths are those of the network's step"
    return passes, drafts, step


def test_each_pass_computes_what_is_missing() -> None:
    passes, drafts, step = draft(StepSizes(), CPU)
    # The first pass: rows with a single token, then longer ones in the order of the step's prefills and drafts.
    assert [ids.tolist() for ids in passes.token_ids] == [[40, 25, 7, 8, 9, 20, 21, 30], [31, 41], [32]]
    assert [metadata.positions_T.tolist() for metadata in passes.metadata] == [
        [2, 2, 0, 1, 2, 5, 6, 7],
        [8, 3],
        [9],
    ]
    # Most drafts first: row 2, then 3, then 1.
    assert drafts.view(3, 3).tolist() == [[31, 41, 26], [32, 42, 0], [33, 0, 0]]
    assert passes.metadata[2].decode_seq_lens_N.tolist() == [10]

    numbered = {row: list(tokens) for row, tokens in step.drafts.items()}
    fill_in(numbered, drafts.tolist())
    assert numbered == {1: [26], 2: [31, 32, 33], 3: [41, 42]}
    arrays = InputBuffer(0, CPU, packs=False).load(step.arrays)
    place_drafts(arrays, drafts)
    assert arrays["token_ids"].tolist() == [LAST_SAMPLED, 26, 30, 31, 32, 33, 40, 41, 42, 7, 8, 9]


def test_padding_stores_nothing_and_changes_no_draft() -> None:
    passes, drafts, step = draft(StepSizes((1, 2, 4, 8, 12)), CPU)
    assert [len(ids) for ids in passes.token_ids] == [8, 2, 1]
    numbered = {row: list(tokens) for row, tokens in step.drafts.items()}
    fill_in(numbered, drafts.tolist())
    assert numbered == {1: [26], 2: [31, 32, 33], 3: [41, 42]}
    assert len(drafts) == 3 * 4


def test_nothing_depends_on_values_that_the_host_would_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the meta device have no values: what needs one raises."""
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, "meta", "reference")
    _, drafts, _ = draft(StepSizes((1, 2, 4, 8, 12)), torch.device("meta"))
    place_drafts({"token_ids": torch.zeros(3, dtype=torch.int64, device="meta")}, drafts)
