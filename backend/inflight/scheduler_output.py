"""One step: the scheduler's instructions to the model runner, and the runner's results.

Lists of plain integers, no tensors: every rank's scheduler makes an equal SchedulerOutput from equal input. A running
sequence owns a *row* (0 <= row < max_batch_size) of the runner's persistent tensors from its first step to its last;
the scheduler sends the difference, never the state: a sequence in full when it takes its row, then new blocks only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy.typing as npt

from inflight.errors import InvalidRequest, RequestError, StepFailed
from inflight.guided_decoding import GuidedDecodingParams
from inflight.prompt_tuning import EmbeddingTable
from inflight.sampling_config import SamplingConfig
from inflight.speculative_decoding import ExternalDraftTokensConfig

NO_DRAFT = -1
NO_BLOCK = -1
"""Stands among the blocks of a row where it has none."""
NO_SLOT = -1
"""Index that means no adapter."""
DRAFTED = -2
"""Stands for a draft that the runner's draft model makes, among a row's token ids."""
LOG_PROBS = "log_probs"
"""Name of the output that `StepOutput.log_probs` holds."""

TOP_LOG_PROBS = "top_log_probs"
"""The likeliest tokens beside each sampled one. This and all below come in `StepOutput.tensors`."""
BEAM_LOG_PROBS = "beam_log_probs"
"""The likeliest tokens of those that are allowed, equal ones by token id: what a beam search chooses from. A row that
asks for it is told each token by the host, and what it sampled itself is not used."""
GENERATION_LOGITS = "generation_logits"
HIDDEN_STATES = "hidden_states"
"""What the head makes logits of: after the last layer and its norm. `layer_output` names those behind a layer."""
PROMPT_LOG_PROBS = "prompt_log_probs"
PROMPT_TOP_LOG_PROBS = "prompt_top_log_probs"
CONTEXT = "context_"
"""Before the name of an output that is wanted of the prompt's tokens: context_logits, context_hidden_states."""
POOLED = "pooled_"
"""Before the name of one that all of the prompt's tokens have together."""

Array = npt.NDArray[Any]


def layer_output(number: int) -> str:
    """Name of the hidden states behind layer `number`, counted from 0, before any norm."""
    return f"{HIDDEN_STATES}.{number}"


def top_names(output: str) -> tuple[str, str]:
    """Names of the two tensors of an output whose name ends with log_probs: token ids, log probabilities."""
    return output.replace("log_probs", "token_ids"), output


class PostProcessing(msgspec.Struct, frozen=True):
    """Which logits post-processor a row goes through, and what that is told of the request."""

    name: str
    request_id: int
    client_id: str = ""


class NewSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence that takes a row in this step: everything the runner must know of it."""

    row: int
    token_ids: list[int]
    """All tokens known so far: the prompt, and what was generated before a pause or by ranks that died."""
    num_prompt_tokens: int
    block_ids: list[int]
    """Blocks that already belong to it (cached prefix and first allocation), in order. Where groups of layers have
    blocks of their own, each block of tokens has one for each group, side by side, or NO_BLOCK."""
    sampling_config: SamplingConfig
    end_ids: list[int] = []
    bad_words: list[list[int]] = []
    outputs: tuple[str, ...] = ()
    """Names of what is wanted besides the tokens, such as LOG_PROBS. A runner refuses a name that it does not serve."""
    num_log_probs: int = 0
    """Alternatives of TOP_LOG_PROBS and PROMPT_TOP_LOG_PROBS, or of BEAM_LOG_PROBS."""
    adapter_slot: int = NO_SLOT
    """Which of the runner's adapters the row's tokens go through. Refused by a runner without adapters."""
    guided_decoding_params: GuidedDecodingParams | None = None
    """The grammar that `token_ids` after the prompt, and every token that the row samples, follow."""
    post_processing: PostProcessing | None = None
    second_text_start: int = 0
    """See Request."""
    embedding_table: EmbeddingTable | None = None
    """The embeddings of the prompt's token ids beyond the vocabulary, from its size on."""
    weighed_drafts: ExternalDraftTokensConfig | None = None
    """How its output may begin: drafts that are accepted by their probability, see `RowWork.draft_index`."""


class RowWork(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The work of one row in one step: `num_tokens` tokens from position `start` on.

    A chunk of a prompt, a single token, or a token and the drafts behind it: there is no other difference between them
    than these numbers.
    """

    row: int
    start: int
    """Position of the first token = tokens whose keys and values are in the cache before the step."""
    num_tokens: int
    token_ids: list[int] = []
    """The tokens, as far as the host knows them: all, or all but the first. The first is then what the row sampled
    last, which may still be on the device only. Drafts are either given here, or each of them is DRAFTED."""
    new_block_ids: list[int] = []
    """Appended to the row's blocks, see NewSequence.block_ids."""
    passed_blocks: list[int] = []
    """Places among the row's blocks that hold none any more: no token of this step or of later ones sees them."""
    num_sampled: int = 1
    """Number of last tokens after which a token is sampled: 0 for a chunk of a prompt that is not the last, otherwise
    1; `num_tokens` if all but the first are drafts to be verified. `is_chosen` is then set for the row's next work."""

    is_chosen: bool = False
    """It decodes, although the host knows all its tokens: a beam, whose token was chosen among the candidates of its
    last step, or of another row's; or a row that follows drafts, of which the host has seen how many were accepted."""

    draft_index: int = NO_DRAFT
    """Which of the sequence's `weighed_drafts` is to be accepted or rejected by its first sampled token; the next ones
    by the next. NO_DRAFT = none: the output does not begin with them, or has reached their end. The host knows all
    tokens before the first sampled one."""
    kept_states: list[tuple[int, int]] = []
    """(index of a token, slot) pairs: the state of the sequence behind this token is written to the slot too."""
    unseen_token_ids: list[int] = []
    """Of a row whose drafts are DRAFTED: the tokens before `start` that the draft model has not computed, because it
    had no part in the steps that did. Where some are left out its drafts are worse."""

    @property
    def drafts(self) -> list[int]:
        """Those of its tokens that are guessed: each is kept if it equals what is sampled after the one before."""
        return self.token_ids[1 - self.num_sampled :] if self.num_sampled > 1 else []

    @property
    def is_prefill(self) -> bool:
        """All its tokens were known when the sequence took the row: the prompt's, and those from before a pause."""
        return len(self.token_ids) == self.num_tokens and not self.is_chosen


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """What other ranks have computed of a request's prompt. What is not copied of it is not needed any more."""

    request_id: int
    blocks: list[tuple[int, int]]
    """(index, block) pairs; the index counts those that were handed over."""
    slots: list[int] = []
    """To each of which the state of the sequence behind the prompt but for one token is copied, if there is one."""


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """What other ranks are to get of a prompt."""

    key: bytes
    blocks: list[int]
    """See BlockGroups.handed_over."""
    slot: int = NO_SLOT
    """Of the state behind the prompt but for one token; NO_SLOT = no layer keeps one."""


class SchedulerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one step computes. The order of rows has no meaning except that results have the same order."""

    new_sequences: list[NewSequence]
    rows: list[RowWork]
    """Each row at most once."""
    block_copies: list[tuple[int, int]] = []
    """(source, destination) blocks, copied before anything else of the step is computed: for sequences that diverge
    within a block. No destination appears twice, and none is a source."""
    state_copies: list[tuple[int, int]] = []
    """(source, row) slots of sequences' states, copied before anything else of the step is computed. No row is also a
    source. Slots beyond those of rows and of padding are for what `RowWork.kept_states` keeps."""
    state_offloads: list[tuple[int, int]] = []
    """(slot, host slot) pairs: as `offloads`, for states that are given up on the device but kept."""
    state_onboards: list[tuple[int, int]] = []
    """(host slot, row) pairs, copied behind `state_offloads` and before `state_copies`. Host slots are numbered from 0.
    No row is in `state_copies`."""
    offloads: list[tuple[int, int]] = []
    """(block, host block) pairs, copied before all other copies: blocks that are given up on the device but kept."""
    onboards: list[tuple[int, int]] = []
    """(host block, block) pairs, copied next. Host blocks are numbered from 0."""
    scrubbed_block_ids: list[int] = []
    """Blocks in which NaN and infinity are replaced by 0 behind all copies: what was copied holds tokens of other
    requests behind those that are shared."""
    arrivals: list[Arrival] = []
    """What came from other ranks of prompts, copied to the device behind all other copies."""
    exports: list[Export] = []
    """Of prompts, copied to host memory behind all that the step computes, for other ranks."""
    adapter_loads: list[tuple[int, int]] = []
    """(slot, uid of a stored adapter): put into the slot before the step. No row of an earlier step that was not
    launched yet uses the slot."""
    samples_late: bool = False
    """True if sampling needs, on the host, the tokens of the previous step, because a row's mask or its logits
    post-processor depends on them."""

    @property
    def num_tokens(self) -> int:
        return sum(work.num_tokens for work in self.rows)

    @property
    def sampling_rows(self) -> list[int]:
        """Rows that get new tokens: the order of StepOutput.token_ids."""
        return [work.row for work in self.rows if work.num_sampled]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTensors:
    """What one step found of the tensors that a row asked for. The first dimension of each array are tokens."""

    prompt_start: int = 0
    """Position of the first token that `prompt` is of."""
    num_prompt_tokens: int = 0
    prompt: dict[str, Array] = field(default_factory=dict)
    """Of log probabilities there is one less where the prompt's last token is among them: nothing follows it."""
    generated: dict[str, Array] = field(default_factory=dict)


class StepOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What a step found, one entry for each of SchedulerOutput.sampling_rows, on the host."""

    token_ids: list[list[int]]
    """New tokens of each row: one, and before it the drafts that were accepted; empty where `errors` or `refused` names
    the row."""
    log_probs: list[list[float]] | None = None
    """Log probabilities of those tokens; None if no row of the step asked."""
    tensors: dict[int, RowTensors] = {}
    """Row -> what it asked for. Rows that do not sample in the step may be among them. Of a row with drafts they are of
    every place that was sampled, also behind the last new token."""
    guesses: dict[int, list[int]] = {}
    """Row -> what it sampled behind its last new token, where a draft was wrong: one token for each later position.
    Each was chosen as if the drafts before it were right, so it is no token of the row, but may guess one."""
    errors: dict[int, str] = {}
    """Row -> sentence, for a row that cannot go on (its logits were not finite, or their post-processor failed)."""
    refused: dict[int, str] = {}
    """Row -> sentence, for a row that cannot go on because of what its request asks (its grammar takes too long)."""

    def error(self, row: int) -> RequestError | None:
        """Why a row cannot go on."""
        if row in self.refused:
            return InvalidRequest(self.refused[row])
        return StepFailed(self.errors[row]) if row in self.errors else None
