"""Calls logits post-processors between the two halves of a step, on every rank that samples or on the first for all.

Only rows that name one are touched: their logits are copied, in float32, and the copies go through the functions and
into the sampler. Log probabilities and logits that a request asks for are those of the model.

Decisions and their reasons:

*Functions are called where the step runs*, on a CPU on the thread that computes, on a GPU under the step's stream. So
the device has the logits, and nothing waits for it unless a function does.

*They may take as long as they like*: they belong to whoever runs the engine, and the whole step waits for them. Ranks
that one keeps from answering for `worker_heartbeat_timeout_ms` count as hung.

*All ranks agree on what failed.* Each notes which of its calls raised, and the notes are added up over the ranks, as
layers add up their outputs. Where the first rank alone calls, its logits travel in the same sum, to which the others
add zeros. So whose function raised, and on which rank, changes nothing but the rank's log.

Legend: S rows that sample, P rows among them that name a function, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

import inflight_kernels
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.logits_post_processor import BATCHED, LogitsPostProcessorConfig
from inflight.runtime.row_companions import AccompaniedRow, RowCompanions
from inflight.runtime.staging import to_host_tensor
from inflight.scheduler_output import NewSequence, PostProcessing

logger = logging.getLogger(__name__)

FINE, FAILED, UNUSABLE = range(3)
_SENTENCES = {
    FAILED: "the logits post-processor {!r} failed: the log of the engine's ranks says why",
    UNUSABLE: "the logits post-processor {!r} left no token to choose: its logits are NaN, +infinity or all impossible",
}


@dataclass(slots=True)
class Processed:
    """What the host keeps of a row whose logits a function changes."""

    processing: PostProcessing
    token_ids: list[int]
    """Prompt and output, as far as the host knows them."""


ProcessedRow = AccompaniedRow[Processed]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedLogits:
    """What the tokens of a step are chosen from; on the device."""

    logits_SV: Tensor
    """float32; those of other rows are the model's."""
    places_P: Tensor
    failed_P: Tensor
    """bool: some rank's function raised."""

    def faults(self, allowed_SV: Tensor | None) -> Tensor:
        """int8 (P,): FINE, FAILED or UNUSABLE. `allowed_SV`: bool, the tokens that may be sampled; None = all."""
        logits_PV = self.logits_SV.index_select(0, self.places_P)
        # The maximum is NaN if any logit is.
        is_usable_P = torch.isfinite(logits_PV.amax(1))
        if allowed_SV is not None:
            is_possible_PV = allowed_SV.index_select(0, self.places_P) & (logits_PV > float("-inf"))
            is_usable_P &= is_possible_PV.any(1)
        faults_P = torch.where(is_usable_P, FINE, UNUSABLE)
        return faults_P.masked_fill_(self.failed_P, FAILED).to(torch.int8)

    def write_own_log_probs(self, log_probs_S: Tensor, token_ids_S: Tensor, logits_SV: Tensor) -> None:
        """Write into `log_probs_S` those of processed rows under the model's own `logits_SV`."""
        model_PV = logits_SV.index_select(0, self.places_P).float()
        chosen_P = model_PV.gather(1, token_ids_S.index_select(0, self.places_P)[:, None]).squeeze(1)
        log_probs_S.index_copy_(0, self.places_P, chosen_P - inflight_kernels.log_sum_exp(model_PV))


def sentences(rows: list[ProcessedRow], faults: Sequence[int]) -> dict[int, str]:
    """Row -> why it cannot go on. `faults`: see ProcessedLogits."""
    return {
        each.row: _SENTENCES[fault].format(each.companion.processing.name)
        for each, fault in zip(rows, faults, strict=True)
        if fault != FINE
    }


@dataclass(slots=True)
class _Call:
    """What one function gets in a step: of one row, or of all that name the batched one."""

    name: str
    places: list[int] = field(default_factory=list)
    """Among the P rows."""


class LogitsPostProcessing:
    """One on every rank."""

    def __init__(self, processors: LogitsPostProcessorConfig, group: TensorParallelGroup) -> None:
        self._processors = processors
        self._is_called = processors.replicate or group.rank == 0
        self._group = group
        self._rows: RowCompanions[Processed] = RowCompanions(_companion)

    def begin(self, new_sequences: list[NewSequence], sampling_rows: list[int]) -> list[ProcessedRow]:
        """See RowCompanions."""
        return self._rows.begin(new_sequences, sampling_rows, {})

    @staticmethod
    def advance(rows: list[ProcessedRow], token_ids: Sequence[int]) -> None:
        """Take in the tokens of a step, by place."""
        for each in rows:
            each.companion.token_ids.append(token_ids[each.place])

    def apply(self, rows: list[ProcessedRow], logits_SV: Tensor) -> ProcessedLogits:
        """Call the functions of a step's rows, where the step runs. Collective. Changes nothing of `logits_SV`."""
        places = to_host_tensor(np.array([each.place for each in rows], dtype=np.int64), logits_SV.device)
        places_P = places.to(logits_SV.device, non_blocking=True)
        logits_PV = logits_SV.index_select(0, places_P).float()
        failed = np.zeros(len(rows), dtype=np.float32)
        if self._is_called:
            for call in _calls(rows):
                try:
                    self._call(call, rows, logits_PV)
                except Exception:
                    logger.exception("the logits post-processor %s failed", call.name)
                    failed[call.places] = 1.0
        failed_P = to_host_tensor(failed, logits_SV.device).to(logits_SV.device, non_blocking=True)
        if self._group.size > 1:
            logits_PV, failed_P = self._agree(logits_PV, failed_P)
        return ProcessedLogits(
            logits_SV=logits_SV.float().index_copy(0, places_P, logits_PV),
            places_P=places_P,
            failed_P=failed_P > 0,
        )

    def _agree(self, logits_PV: Tensor, failed_P: Tensor) -> tuple[Tensor, Tensor]:
        if self._processors.replicate:
            return logits_PV, self._group.all_reduce(failed_P)
        told = torch.cat([logits_PV, failed_P[:, None]], dim=1)
        if not self._is_called:
            told.zero_()
        told = self._group.all_reduce(told)
        return told[:, :-1], told[:, -1]

    def _call(self, call: _Call, rows: list[ProcessedRow], logits_PV: Tensor) -> None:
        stream = torch.cuda.current_stream().cuda_stream if logits_PV.is_cuda else 0
        companions = [rows[place].companion for place in call.places]
        logits = [logits_PV[place].view(1, 1, -1) for place in call.places]
        # Copies, which a function may keep or change.
        token_ids = [[list(each.token_ids)] for each in companions]
        request_ids = [each.processing.request_id for each in companions]
        client_ids = [each.processing.client_id or None for each in companions]
        if call.name == BATCHED:
            batched = self._processors.processor_batched
            assert batched is not None, "a name that is not offered was not refused"
            returned = batched(request_ids, list(logits), token_ids, stream, client_ids)
            others = [None] * len(logits) if returned is None else list(returned)
        else:
            processor = self._processors.processor_map[call.name]
            others = [processor(request_ids[0], logits[0], token_ids[0], stream, client_ids[0])]
        for given, other in zip(logits, others, strict=True):
            if other is not None and other is not given:
                given.copy_(other.reshape(given.shape), non_blocking=True)


def _companion(new: NewSequence) -> Processed | None:
    return None if new.post_processing is None else Processed(new.post_processing, list(new.token_ids))


def _calls(rows: list[ProcessedRow]) -> list[_Call]:
    """A call for each row, and one for all rows of the batched function."""
    calls: list[_Call] = []
    batched = _Call(BATCHED)
    for place, each in enumerate(rows):
        name = each.companion.processing.name
        if name == BATCHED:
            batched.places.append(place)
        else:
            calls.append(_Call(name, [place]))
    return [*calls, batched] if batched.places else calls
