"""Vectors of texts: the requests for them, and what becomes of the engine's rows.

An encoder gives its vector with the step that computes it; another engine generates one token behind a prompt, which
is dropped. Vectors have the length 1; shorter ones are the first features of those, as models with Matryoshka
representations (arXiv 2205.13147) are made for.
"""

from __future__ import annotations

import numpy as np

from inflight.asking.ask import Ask, Prompt
from inflight.asking.limit import Limit
from inflight.asking.refusal import Words
from inflight.asking.served import Served
from inflight.asking.show import Show
from inflight.http.api_error import in_words, invalid
from inflight.http.pooled_rows import Row
from inflight.lora import LoRARequest
from inflight.output_config import AdditionalModelOutput, OutputConfig, Pooling
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.sampling import Sampling
from inflight.scheduler_output import HIDDEN_STATES

WORDS: Words = {"prompt": "input", "adapter": "model"}
"""Fields of an `Ask`, as bodies call them that ask for vectors."""


def embedding_requests(
    prompts: list[Prompt],
    dimensions: int | None,
    served: Served,
    limits: RequestLimits,
    adapter: LoRARequest | None,
    vector_of: Pooling,
    *,
    truncate_prompt_tokens: int | None = None,
    words: Words = WORDS,
) -> list[Request]:
    """A request for each prompt. For `truncate_prompt_tokens` see Limit. Raises APIError."""
    if dimensions is not None and not 1 <= dimensions <= limits.hidden_size:
        raise invalid(f"dimensions must be between 1 and {limits.hidden_size}, which this model has", "dimensions")
    if HIDDEN_STATES not in limits.model_outputs:
        raise invalid("this model has no embeddings: its network offers no hidden states", "model")
    if not all(prompts):
        raise invalid("input is empty: give at least one character or token", "input")
    # Where a token is generated behind the prompt, the prompt's last state is what it is sampled by.
    is_sampled = vector_of == "last" and not limits.pooled
    output = AdditionalModelOutput(name=HIDDEN_STATES, pooling=None if is_sampled else vector_of)
    ask = Ask(
        prompt=prompts,
        adapter=adapter,
        limit=Limit(max_tokens=None if limits.pooled else 1, truncate_prompt_tokens=truncate_prompt_tokens),
        sampling=Sampling(temperature=0.0),
        show=Show(output=OutputConfig(additional_model_outputs=[output])),
    )
    with in_words(words):
        return [prompt.request for prompt in served.prepare(ask, limits).prompts]


def unit_vectors(rows: list[Row], dimensions: int | None) -> list[Row]:
    """The first features of each row, at length 1."""
    return [of_length_1(row[:dimensions]) for row in rows]


def of_length_1(vector: Row) -> Row:
    """In its direction; 0 stays 0."""
    norm = float(np.linalg.norm(vector))
    return vector / np.float32(norm) if norm else vector
