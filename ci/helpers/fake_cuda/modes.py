"""Requests of every kind of sampling, and the steps that serve them: a prefill, decodes, both together, drafts.

Knows no device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fake_cuda.engine import ADAPTER_UID, POST_PROCESSOR
from inflight.guided_decoding import GuidedDecodingParams, GuideType
from inflight.prompt_tuning import EmbeddingTable
from inflight.sampling_config import SamplingConfig
from inflight.scheduler_output import (
    BEAM_LOG_PROBS,
    CONTEXT,
    DRAFTED,
    GENERATION_LOGITS,
    HIDDEN_STATES,
    LOG_PROBS,
    PROMPT_LOG_PROBS,
    PROMPT_TOP_LOG_PROBS,
    TOP_LOG_PROBS,
    NewSequence,
    PostProcessing,
    RowWork,
    SchedulerOutput,
    layer_output,
)
from inflight.speculative_decoding import ExternalDraftTokensConfig

RANDOM = {"temperature": 0.8, "seed": 3}
NUM_ROWS, PROMPT_LEN, BLOCKS_OF_ROW = 3, 40, 8
VOCAB_SIZE, HIDDEN_SIZE = 128256, 4096
ALL_TENSORS = (
    LOG_PROBS, TOP_LOG_PROBS, GENERATION_LOGITS, HIDDEN_STATES, layer_output(0), PROMPT_LOG_PROBS,
    PROMPT_TOP_LOG_PROBS, CONTEXT + "logits", CONTEXT + HIDDEN_STATES,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How the rows of a step are sampled."""

    sampling: dict[str, Any] = field(default_factory=dict)
    new: dict[str, Any] = field(default_factory=dict)
    """Further fields of NewSequence."""
    is_told: bool = False
    """The host chooses each token: a beam."""
    has_drafts: bool = True
    """Its rows may verify drafts."""
    draft_index: bool = False
    loads_adapter: bool = False


MODES: dict[str, Mode] = {
    "greedy": Mode(),
    "random": Mode(sampling=RANDOM),
    "filters": Mode(sampling={**RANDOM, "top_k": 20, "top_p": 0.9, "min_p": 0.01}),
    "typical_p": Mode(sampling={**RANDOM, "typical_p": 0.8}),
    "top_p decay": Mode(sampling={**RANDOM, "top_p": 0.9, "top_p_decay": 0.9, "top_p_min": 0.2, "top_p_reset_ids": 5}),
    "penalties": Mode(
        sampling={**RANDOM, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.1}
    ),
    "logit bias": Mode(sampling={"logit_bias": {3: 2.0, 7: -5.0}}),
    "embedding bias": Mode(sampling={"embedding_bias": np.zeros(VOCAB_SIZE, dtype="<f4").tobytes()}),
    "bad words": Mode(new={"bad_words": [[5], [9, 12]]}),
    "no repeated n-gram": Mode(sampling={"no_repeat_ngram_size": 2}),
    "min tokens": Mode(sampling={"min_tokens": 9}, new={"end_ids": [2, 7]}),
    "guided": Mode(
        sampling=RANDOM,
        new={"guided_decoding_params": GuidedDecodingParams(guide_type=GuideType.JSON)},
    ),
    "post-processor": Mode(
        new={"post_processing": PostProcessing(name=POST_PROCESSOR, request_id=1), "outputs": (LOG_PROBS,)},
        has_drafts=False,
    ),
    "log probabilities": Mode(sampling=RANDOM, new={"outputs": (LOG_PROBS,)}),
    "all tensors": Mode(new={"outputs": ALL_TENSORS, "num_log_probs": 4}),
    "beams": Mode(new={"outputs": (BEAM_LOG_PROBS,), "num_log_probs": 4}, is_told=True, has_drafts=False),
    "adapter": Mode(new={"adapter_slot": 1}, loads_adapter=True),
    "embeddings": Mode(new={"embedding_table": EmbeddingTable.of(np.zeros((4, HIDDEN_SIZE), dtype=np.float16))}),
    "weighed drafts": Mode(
        sampling=RANDOM,
        new={"weighed_drafts": ExternalDraftTokensConfig(tokens=list(range(9)), acceptance_threshold=0.5)},
        draft_index=True,
    ),
}


def prompt_of(mode: Mode) -> list[int]:
    """Of the ids beyond the vocabulary some, if it brings embeddings."""
    own = [VOCAB_SIZE + 1] if "embedding_table" in mode.new else [1]
    return own + list(range(2, PROMPT_LEN + 1))


def begin(mode: Mode, rows: range, num_tokens: int = PROMPT_LEN, *, is_last: bool = True) -> SchedulerOutput:
    """Sequences take these rows; the first `num_tokens` tokens of each are computed."""
    prompt = prompt_of(mode)
    return SchedulerOutput(
        new_sequences=[
            NewSequence(
                row=row,
                token_ids=prompt,
                num_prompt_tokens=len(prompt),
                block_ids=list(range(row * BLOCKS_OF_ROW, (row + 1) * BLOCKS_OF_ROW)),
                sampling_config=SamplingConfig(**mode.sampling),
                **mode.new,
            )
            for row in rows
        ],
        rows=[
            RowWork(
                row=row,
                start=0,
                num_tokens=num_tokens,
                token_ids=prompt[:num_tokens],
                num_sampled=int(is_last),
                draft_index=0 if mode.draft_index and is_last else -1,
            )
            for row in rows
        ],
        adapter_loads=[(1, ADAPTER_UID)] if mode.loads_adapter else [],
    )


def decodes(mode: Mode, rows: range, start: int, *, num_drafts: int = 0, draft: int | None = 0) -> list[RowWork]:
    """One token for each row, and drafts behind it. The first row gets a block."""
    token = [0] if mode.is_told or mode.draft_index else []
    return [
        RowWork(
            row=row,
            start=start,
            num_tokens=1 + num_drafts,
            token_ids=[*token, *[draft] * num_drafts],
            num_sampled=1 + num_drafts,
            is_chosen=bool(token),
            new_block_ids=[1000 + row] if row == rows[0] else [],
            draft_index=start - PROMPT_LEN + 1 if mode.draft_index else -1,
        )
        for row in rows
    ]


def steps_of(mode: Mode) -> Iterator[tuple[str, SchedulerOutput]]:
    """Names and steps, one after the other: a prefill, a decode, a decode beside a chunk of a new prompt, drafts."""
    rows = range(NUM_ROWS)
    yield "prefill", begin(mode, rows)
    yield "decode", SchedulerOutput(new_sequences=[], rows=decodes(mode, rows, PROMPT_LEN))
    chunk = begin(mode, range(NUM_ROWS, NUM_ROWS + 1), 20, is_last=False)
    yield (
        "mixed",
        SchedulerOutput(new_sequences=chunk.new_sequences, rows=[*decodes(mode, rows, PROMPT_LEN + 1), *chunk.rows]),
    )
    if mode.has_drafts:
        drafts = decodes(mode, rows, PROMPT_LEN + 2, num_drafts=2)
        yield "drafts", SchedulerOutput(new_sequences=[], rows=drafts)


def steps_of_draft_model(mode: Mode) -> Iterator[tuple[str, SchedulerOutput]]:
    """Those in which a draft model makes the drafts."""
    rows = range(NUM_ROWS)
    yield "prefill, draft model", begin(mode, rows)
    drafts = decodes(mode, rows, PROMPT_LEN, num_drafts=2, draft=DRAFTED)
    yield "drafts, draft model", SchedulerOutput(new_sequences=[], rows=drafts)


def steps_of_blocks() -> Iterator[tuple[str, SchedulerOutput]]:
    """A step that moves blocks: to the host, from there, within the device, and scrubs what was copied."""
    rows = range(NUM_ROWS)
    yield "prefill", begin(MODES["greedy"], rows)
    yield (
        "decode, blocks move",
        SchedulerOutput(
            new_sequences=[],
            rows=decodes(MODES["greedy"], rows, PROMPT_LEN),
            offloads=[(100, 0), (101, 1)],
            onboards=[(0, 102)],
            block_copies=[(3, 103), (4, 104)],
            scrubbed_block_ids=[103],
        ),
    )
