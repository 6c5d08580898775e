"""The host's half of a step's end: what its sampled tokens mean for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inflight.runtime.drafts import accepted
from inflight.runtime.logits_post_processing import sentences
from inflight.runtime.sampler import SampledTokens
from inflight.runtime.step_handle import StepHandle
from inflight.scheduler_output import NewSequence, RowTensors, StepOutput

NOT_FINITE = "the model's logits are not finite: its weights or its numeric range do not fit this prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFindings:
    output: StepOutput
    broken_rows: list[int]
    """Those whose logits were not finite, so that their blocks may hold NaN."""
    rejected: list[tuple[NewSequence, list[int]]]
    """Sequences with the tokens that they sampled behind their accepted drafts."""

    @classmethod
    def of(
        cls, handle: StepHandle, sampled: SampledTokens, token_ids: list[int], tensors: dict[int, RowTensors]
    ) -> StepFindings:
        """`token_ids`: those of `sampled`, by place. `tensors`: what rows asked for."""
        find = _with_drafts if handle.step.drafts else _without_drafts
        return find(handle, sampled, token_ids, tensors)


def _without_drafts(
    handle: StepHandle, sampled: SampledTokens, token_ids: list[int], tensors: dict[int, RowTensors]
) -> StepFindings:
    rows, order = handle.step.sampling_rows, _answer_order(handle)
    finite: list[bool] = sampled.is_finite_S.tolist()
    errors, refused = _faults(handle, sampled), {rows[place]: reason for place, reason in handle.refused.items()}
    broken_rows = [rows[index] for index in order if not finite[index]]
    errors.update(dict.fromkeys(broken_rows, NOT_FINITE))
    has_token = finite
    if refused or errors:
        has_token = [row not in errors and row not in refused for row in rows]
    log_probs = None
    if sampled.log_probs_S is not None:
        values: list[float] = sampled.log_probs_S.tolist()
        log_probs = [[values[index]] if finite[index] else [] for index in order]
    output = StepOutput(
        token_ids=[[token_ids[index]] if has_token[index] else [] for index in order],
        log_probs=log_probs,
        tensors=tensors,
        errors=errors,
        refused=refused,
    )
    return StepFindings(output=output, broken_rows=broken_rows, rejected=[])


def _with_drafts(
    handle: StepHandle, sampled: SampledTokens, token_ids: list[int], tensors: dict[int, RowTensors]
) -> StepFindings:
    """The same for a step that verifies drafts. What is behind the accepted ones cannot fail a row."""
    rows, drafts = handle.step.sampling_rows, handle.step.drafts
    finite: list[bool] = sampled.is_finite_S.tolist()
    values: list[float] | None = None if sampled.log_probs_S is None else sampled.log_probs_S.tolist()
    errors, broken_rows = _faults(handle, sampled), []
    refused: dict[int, str] = {}
    tokens: list[list[int]] = []
    log_probs: list[list[float]] = []
    rejected: list[tuple[NewSequence, list[int]]] = []
    guesses: dict[int, list[int]] = {}
    for places, kept in accepted(drafts, rows, _answer_order(handle), token_ids):
        row = rows[places[0]]
        if not all(finite[place] for place in places):
            broken_rows.append(row)
        if not all(finite[place] for place in kept):
            errors[row] = NOT_FINITE
        for place in kept:
            if place in handle.refused:
                refused[row] = handle.refused[place]
        if len(kept) < len(places):
            guesses[row] = [token_ids[place] for place in places[len(kept) :]]
            rejected.append((handle.step.drafting[row], guesses[row]))
        has_token = row not in errors and row not in refused
        tokens.append([token_ids[place] for place in kept] if has_token else [])
        log_probs.append([values[place] for place in kept] if values is not None and row not in errors else [])
    output = StepOutput(
        token_ids=tokens,
        log_probs=None if values is None else log_probs,
        tensors=tensors,
        guesses=guesses,
        errors=errors,
        refused=refused,
    )
    return StepFindings(output=output, broken_rows=broken_rows, rejected=rejected)


def _answer_order(handle: StepHandle) -> Sequence[int]:
    return handle.step.answer_order or range(len(handle.step.sampling_rows))


def _faults(handle: StepHandle, sampled: SampledTokens) -> dict[int, str]:
    """Row -> sentence, of rows whose logits post-processors failed."""
    return {} if sampled.faults_P is None else sentences(handle.processed, sampled.faults_P.tolist())
