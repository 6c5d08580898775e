"""Tensors that some requests want besides tokens: logits, hidden states, log probabilities of alternatives and prompts.

A step's way: the host plans which tokens of which rows are asked about (`plan_tensors`), the device computes that and
no more (`of_prompts` after the network, `of_samples` beside the sampling), and the host sorts it by row (`by_row`).
Rows that ask for nothing appear in none of it.

Legend: T tokens of the step, S rows that sample, K those of them that ask, C tokens of one row's piece of its prompt,
D hidden size, V vocabulary, N alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import inflight_kernels
from inflight.output_config import MAX_LOG_PROBS, SCORES, Pooling
from inflight.runtime.row_table import WANTS_TENSORS, RowTable
from inflight.runtime.staging import Array, Staging
from inflight.scheduler_output import (
    BEAM_LOG_PROBS,
    CONTEXT,
    GENERATION_LOGITS,
    HIDDEN_STATES,
    LOG_PROBS,
    PROMPT_LOG_PROBS,
    PROMPT_TOP_LOG_PROBS,
    TOP_LOG_PROBS,
    NewSequence,
    RowTensors,
    RowWork,
    layer_output,
    top_names,
)

CONTEXT_LOGITS = CONTEXT + "logits"
LAYER = layer_output(0).removesuffix("0")
"""Beginning of the name of a layer's output."""
PROMPT_OUTPUTS = frozenset({PROMPT_LOG_PROBS, PROMPT_TOP_LOG_PROBS, CONTEXT_LOGITS})
"""Made of logits."""
SAMPLE_OUTPUTS = frozenset({TOP_LOG_PROBS, BEAM_LOG_PROBS, GENERATION_LOGITS})
"""What every network has; see `served_outputs`."""
HEAD_ROWS = 256
"""Most prompt tokens whose logits exist on the device at a time: 128 MiB for a vocabulary of 128k."""

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart:
    """Tokens of one row's prompt that are asked about."""

    row: int
    start: int
    """Position of the first one in the prompt."""
    place: int
    """Place of the first one among the step's T tokens."""
    num_tokens: int
    num_targets: int
    """Those of them that another token of the prompt follows: all but the prompt's last."""
    first_target: int
    """Place of the first one's successor among the staged targets."""
    outputs: frozenset[str]
    num_log_probs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePart:
    """A row whose sampled token is asked about; one that verifies drafts is named once for each of its tokens."""

    row: int
    outputs: frozenset[str]
    num_log_probs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """Which tensors the rows of one step ask for."""

    prompts: list[PromptPart]
    samples: list[SamplePart]
    """In the order of the sampling rows."""

    @property
    def layers(self) -> frozenset[int]:
        """The layers whose output is asked for."""
        parts: list[PromptPart | SamplePart] = [*self.prompts, *self.samples]
        names = {name.removeprefix(CONTEXT) for part in parts for name in part.outputs}
        return frozenset(int(name.removeprefix(LAYER)) for name in names if name.startswith(LAYER))


NO_PLAN = TensorPlan(prompts=[], samples=[])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """Of one step: on the device, and what ResultCopies makes of it on the host. Those of prompts go there at once."""

    prompts: list[list[Tensors]]
    """Of each PromptPart, in pieces of at most HEAD_ROWS tokens."""
    samples: Tensors
    """Of each output, a row for each SamplePart that wants it."""


# -- on the host, before the step --------------------------------------------------------------------------------------


def served_outputs(model_outputs: Iterable[str]) -> frozenset[str]:
    """Names that a row may ask for, of a network that offers `model_outputs`."""
    of_model = frozenset(model_outputs)
    return PROMPT_OUTPUTS | SAMPLE_OUTPUTS | {LOG_PROBS} | of_model | {CONTEXT + name for name in of_model}


def is_of_prompt(output: str) -> bool:
    return output in PROMPT_OUTPUTS or output == SCORES or output.startswith(CONTEXT)


def plan_tensors(staging: Staging, table: RowTable, works: list[RowWork], places: Array) -> TensorPlan:
    """`works` in the order of the batch; `places`: where each one's tokens start among the step's T."""
    asking = [
        (work, int(place)) for work, place in zip(works, places, strict=True) if table.needs[work.row] & WANTS_TENSORS
    ]
    if not asking:
        return NO_PLAN
    prompts: list[PromptPart] = []
    targets: list[int] = []
    for work, place in asking:
        new = _sequence(table, work.row)
        outputs = frozenset(filter(is_of_prompt, new.outputs))
        num_tokens = min(work.start + work.num_tokens, new.num_prompt_tokens) - work.start
        if work.start + num_tokens < new.num_prompt_tokens:
            outputs -= {SCORES}  # they are of the whole prompt
        if not outputs or num_tokens <= 0:
            continue
        following = new.token_ids[work.start + 1 : min(work.start + num_tokens + 1, new.num_prompt_tokens)]
        prompts.append(
            PromptPart(
                row=work.row,
                start=work.start,
                place=place,
                num_tokens=num_tokens,
                num_targets=len(following),
                first_target=len(targets),
                outputs=outputs,
                num_log_probs=new.num_log_probs,
            )
        )
        targets += following
    if targets:
        staging.add("prompt_targets", np.array(targets, dtype=np.int64))
    return TensorPlan(prompts=prompts, samples=_plan_samples(staging, table, works))


def _plan_samples(staging: Staging, table: RowTable, works: list[RowWork]) -> list[SamplePart]:
    samples: list[SamplePart] = []
    places: dict[str, list[int]] = {}
    for place, work in enumerate(work for work in works if work.num_sampled):
        if not table.needs[work.row] & WANTS_TENSORS:
            continue
        new = _sequence(table, work.row)
        outputs = frozenset(name for name in new.outputs if name != LOG_PROBS and not is_of_prompt(name))
        if outputs:
            samples.append(SamplePart(row=work.row, outputs=outputs, num_log_probs=new.num_log_probs))
        for name in outputs:
            places.setdefault(name, []).append(place)
    for name, found in sorted(places.items()):
        staging.add(_places(name), np.array(found, dtype=np.int64))
    return samples


def _places(name: str) -> str:
    """Under which the places of the rows that want output `name` are staged."""
    return f"{name}_places"


def _sequence(table: RowTable, row: int) -> NewSequence:
    sequence = table.sequences[row]
    assert sequence is not None
    return sequence


# -- on the device -----------------------------------------------------------------------------------------------------


def of_prompts(
    plan: TensorPlan,
    staged: Tensors,
    hidden: Tensors,
    head: Callable[[Tensor], Tensor],
    to_host: Callable[[Tensor], Tensor],
    scores_of: Pooling | None = None,
) -> list[list[Tensors]]:
    """What is asked about prompts; see StepTensors.prompts.

    `hidden`: the step's hidden states (T, D) by name. `head` makes logits of the last ones; every rank calls it equally
    often. Each piece goes `to_host` before the next one is computed, so that the device need not hold the logits of a
    long prompt. `scores_of`: which of a prompt's states it makes scores of.
    """
    found: list[list[Tensors]] = []
    scores = iter(() if scores_of is None else _scores(plan, hidden[HIDDEN_STATES], scores_of, head))
    for part in plan.prompts:
        of_part = {name: states_TD[part.place : part.place + part.num_tokens] for name, states_TD in hidden.items()}
        targets_C = None
        if part.num_targets:
            targets_C = staged["prompt_targets"][part.first_target : part.first_target + part.num_targets]
        pieces: list[Tensors] = []
        for start in range(0, part.num_tokens, HEAD_ROWS):
            piece_targets = None if targets_C is None else targets_C[start : start + HEAD_ROWS]
            of_piece = {name: states_CD[start : start + HEAD_ROWS] for name, states_CD in of_part.items()}
            tensors = _of_piece(part, of_piece, piece_targets, head)
            if SCORES in part.outputs and start == 0:
                tensors[SCORES] = next(scores)
            pieces.append({name: to_host(tensor) for name, tensor in tensors.items()})
        found.append(pieces)
    return found


def _scores(
    plan: TensorPlan, hidden_TD: Tensor, scores_of: Pooling, head: Callable[[Tensor], Tensor]
) -> Sequence[Tensor]:
    """Of each part that asks for them, (1, labels). The mean is made of each part's own states alone."""
    parts = [part for part in plan.prompts if SCORES in part.outputs]
    if not parts:
        return ()
    states = [hidden_TD[part.place : part.place + part.num_tokens] for part in parts]
    if scores_of == "mean":
        states_BD = torch.stack([states_CD.float().mean(0).to(hidden_TD.dtype) for states_CD in states])
    else:
        states_BD = torch.stack([states_CD[0 if scores_of == "cls" else -1] for states_CD in states])
    scores_BL = head(states_BD).float()
    return [scores_BL[place : place + 1] for place in range(len(parts))]


def _of_piece(part: PromptPart, hidden: Tensors, targets_C: Tensor | None, head: Callable[[Tensor], Tensor]) -> Tensors:
    tensors: Tensors = {}
    for name, states_CD in hidden.items():
        if CONTEXT + name in part.outputs:
            tensors[CONTEXT + name] = states_CD.float().clone()
    if PROMPT_OUTPUTS.isdisjoint(part.outputs):
        return tensors
    logits_CV = head(hidden[HIDDEN_STATES]).float()
    if CONTEXT_LOGITS in part.outputs:
        tensors[CONTEXT_LOGITS] = logits_CV
    if targets_C is not None and len(targets_C):
        predicted_CV = logits_CV[: len(targets_C)]
        if PROMPT_LOG_PROBS in part.outputs:
            chosen_C = predicted_CV.gather(1, targets_C[:, None]).squeeze(1)
            tensors[PROMPT_LOG_PROBS] = chosen_C - inflight_kernels.log_sum_exp(predicted_CV)
        if PROMPT_TOP_LOG_PROBS in part.outputs:
            tensors.update(_top(predicted_CV, PROMPT_TOP_LOG_PROBS))
    return tensors


def of_samples(
    plan: TensorPlan,
    staged: Tensors,
    logits_SV: Tensor,
    hidden: Tensors,
    find_allowed: Callable[[], Tensor | None],
) -> Tensors:
    """What is asked about sampled tokens; see StepTensors.samples. `hidden`: of the S rows (S, D), by name.

    `find_allowed` gives the tokens that may be sampled, bool (S, V), or None for all; called only if a beam asks.
    """
    tensors: Tensors = {}
    if not plan.samples:
        return tensors
    if _places(TOP_LOG_PROBS) in staged:
        tensors.update(_top(logits_SV.index_select(0, staged[_places(TOP_LOG_PROBS)]).float(), TOP_LOG_PROBS))
    if _places(BEAM_LOG_PROBS) in staged:
        places_K, allowed_SV = staged[_places(BEAM_LOG_PROBS)], find_allowed()
        allowed_KV = None if allowed_SV is None else allowed_SV.index_select(0, places_K)
        count = max(part.num_log_probs for part in plan.samples if BEAM_LOG_PROBS in part.outputs)
        tensors.update(_candidates(logits_SV.index_select(0, places_K).float(), allowed_KV, count))
    if _places(GENERATION_LOGITS) in staged:
        tensors[GENERATION_LOGITS] = logits_SV.index_select(0, staged[_places(GENERATION_LOGITS)]).float()
    for name, states_SD in hidden.items():
        if _places(name) in staged:
            tensors[name] = states_SD.index_select(0, staged[_places(name)]).float()
    return tensors


def _top(logits_KV: Tensor, output: str) -> Tensors:
    """The likeliest tokens, falling, and their log probabilities under the raw distribution, (K, N).

    Always as many as any request may ask for: among equal logits, which one comes first depends on how many are
    sought, and must not depend on who else asks.
    """
    values_KN, ids_KN = logits_KV.topk(min(MAX_LOG_PROBS, logits_KV.shape[1]), dim=1)
    ids, log_probs = top_names(output)
    return {ids: ids_KN.int(), log_probs: values_KN - inflight_kernels.log_sum_exp(logits_KV)[:, None]}


def _candidates(logits_KV: Tensor, allowed_KV: Tensor | None, count: int) -> Tensors:
    """The likeliest allowed tokens, falling, and their log probabilities, (K, count).

    As in transformers' beam search the log probabilities are those of the raw distribution, and forbidden tokens get
    -inf afterwards. Every value is made into a different integer, its order first and then the token's, so that
    the result for one row does not depend on how many are sought for another.
    """
    log_probs_KV = torch.log_softmax(logits_KV, dim=1)
    if allowed_KV is not None:
        log_probs_KV = log_probs_KV.masked_fill(~allowed_KV, float("-inf"))
    vocab_size = logits_KV.shape[1]
    # Floats are ordered as their bits are, negative ones the other way around; + 0.0 makes 0.0 of -0.0.
    bits_KV = (log_probs_KV + 0.0).view(torch.int32)
    order_KV = (bits_KV ^ ((bits_KV >> 31) & 0x7FFFFFFF)).long()
    keys_KV = order_KV * 2**32 + torch.arange(vocab_size - 1, -1, -1, device=logits_KV.device)
    ids_KN = vocab_size - 1 - keys_KV.topk(min(count, vocab_size), dim=1).values.remainder(2**32)
    ids, log_probs = top_names(BEAM_LOG_PROBS)
    return {ids: ids_KN.int(), log_probs: log_probs_KV.gather(1, ids_KN)}


# -- on the host, after the step ---------------------------------------------------------------------------------------


def by_row(plan: TensorPlan, tensors: StepTensors) -> dict[int, RowTensors]:
    """Row -> what it asked for."""
    rows: dict[int, RowTensors] = {}
    for part, pieces in zip(plan.prompts, tensors.prompts, strict=True):
        prompt = {
            name: _cut(name, np.concatenate([piece[name].numpy() for piece in pieces if name in piece]), part)
            for name in pieces[0]
        }
        rows[part.row] = RowTensors(prompt_start=part.start, num_prompt_tokens=part.num_tokens, prompt=prompt)
    taken: dict[str, int] = {}
    for sample in plan.samples:
        generated: dict[str, Array] = {}
        for name in _tensor_names(sample.outputs):
            place = taken[name] = taken.get(name, -1) + 1
            # Copied: a view would keep the whole step's array, on a GPU in pinned memory, until its request has ended.
            generated[name] = _cut(name, tensors.samples[name][place : place + 1].numpy(), sample).copy()
        former = rows.get(sample.row, RowTensors())
        if former.generated:  # of a token before this one, in a row with drafts
            generated = {name: np.concatenate([former.generated[name], generated[name]]) for name in generated}
        rows[sample.row] = RowTensors(
            prompt_start=former.prompt_start,
            num_prompt_tokens=former.num_prompt_tokens,
            prompt=former.prompt,
            generated=generated,
        )
    return rows


def _tensor_names(outputs: Iterable[str]) -> list[str]:
    return [
        name
        for output in sorted(outputs)
        for name in (top_names(output) if output in (TOP_LOG_PROBS, BEAM_LOG_PROBS) else (output,))
    ]


def _cut(name: str, array: Array, part: PromptPart | SamplePart) -> Array:
    """Of the alternatives, as many as its row wants."""
    is_top = any(name in top_names(output) for output in (TOP_LOG_PROBS, PROMPT_TOP_LOG_PROBS, BEAM_LOG_PROBS))
    return array[:, : part.num_log_probs] if is_top else array
