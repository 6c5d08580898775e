"""Vectors of texts: the requests for them, and what becomes of the engine's rows.

An encoder gives its vector with the step that computes it; another engine generates one token behind a prompt, which
is dropped. Vectors have the length 1; shorter ones are the first features of those, as models with Matryoshka
representations (arXiv 2205.13147) are made for.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from msgspec import structs

from inflight.asking.ask import Ask, Prompt
from inflight.asking.limit import Limit
from inflight.asking.prompt_encoder import PromptEncoder
from inflight.asking.refusal import Refusal
from inflight.asking.served import Served
from inflight.asking.show import Show
from inflight.asking.text_prompts import ChosenPrompt, check_kept
from inflight.lora import LoRARequest
from inflight.output_config import SCORES, AdditionalModelOutput, OutputConfig, Pooling
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.result import Array, Result
from inflight.sampling import Sampling
from inflight.scheduler_output import HIDDEN_STATES, POOLED

Row = npt.NDArray[np.float32]
"""What the engine gives of a prompt in the place of tokens: a vector's features, or a score for each label."""
NAMES = (HIDDEN_STATES, POOLED + HIDDEN_STATES, SCORES)
"""Of the tensors whose first row is meant."""


def embedding_requests(
    prompts: list[Prompt],
    dimensions: int | None,
    served: Served,
    limits: RequestLimits,
    adapter: LoRARequest | None,
    vector_of: Pooling,
    *,
    limit: Limit | None = None,
    before: ChosenPrompt | None = None,
    begin_with: ChosenPrompt | None = None,
) -> list[Request]:
    """A request for each prompt. `limit`: what it says of new tokens is not read. `before`: what is put before each
    text; None = nothing. `begin_with`: what all prompts begin with already. Raises Refusal."""
    if dimensions is not None and not 1 <= dimensions <= limits.hidden_size:
        raise Refusal("dimensions", "{0} must be between 1 and {most}, which this model has", most=limits.hidden_size)
    if HIDDEN_STATES not in limits.model_outputs:
        raise Refusal("model", "this model has no embeddings: its network offers no hidden states")
    if not all(prompts):
        raise Refusal("prompt", "{0} is empty: give at least one character or token")
    limit, before = limit or Limit(), before or ChosenPrompt()
    check_kept(before.text, limit, limits)
    # Where a token is generated behind the prompt, the prompt's last state is what it is sampled by.
    is_sampled = vector_of == "last" and not limits.pooled
    output = AdditionalModelOutput(name=HIDDEN_STATES, pooling=None if is_sampled else vector_of)
    ask = Ask(
        prompt=before.put_before(prompts),
        adapter=adapter,
        limit=structs.replace(limit, max_tokens=None if limits.pooled else 1),
        sampling=Sampling(temperature=0.0),
        show=Show(output=OutputConfig(additional_model_outputs=[output])),
    )
    requests = [prompt.request for prompt in served.prepare(ask, limits).prompts]
    num_left_out = [served.num_left_out(each) for each in (before, begin_with or ChosenPrompt())]
    return [
        _from(request, num_left_out[0] * isinstance(prompt, str) + num_left_out[1])
        for request, prompt in zip(requests, prompts, strict=True)
    ]


def _from(request: Request, first: int) -> Request:
    """With a vector of the tokens from place `first` on. Raises Refusal if there are none."""
    if not first:
        return request
    if first >= len(request.input_token_ids):
        raise Refusal("prompt", "{0} has no token behind the model's prompt, whose own are left out of vectors")
    (output,) = request.output_config.additional_model_outputs
    outputs = OutputConfig(additional_model_outputs=[structs.replace(output, first=first)])
    return structs.replace(request, output_config=outputs)


def cut_at_end(text: str, encoder: PromptEncoder, limits: RequestLimits, most: int | None = None) -> list[int]:
    """The leading tokens of a text, as many as the engine takes and at most `most`. Raises Refusal."""
    longest = limits.max_input_len
    if not limits.pooled:  # it generates a token behind them
        longest = min(longest, limits.max_seq_len - 1, limits.kv_cache_tokens)
    return encoder.encode_beginning(text, limits, longest if most is None else min(longest, most))


def row_of(result: Result) -> Row | None:
    """None if the result has none."""
    return row_among({tensor.name: tensor.array() for tensor in result.tensors if tensor.name in NAMES})


def row_among(tensors: Mapping[str, Array]) -> Row | None:
    """None if there is none. `tensors`: of one prompt, by name."""
    return next((tensor[0] for name, tensor in tensors.items() if name in NAMES), None)


def unit_vectors(rows: list[Row], dimensions: int | None) -> list[Row]:
    """The first features of each row, at length 1."""
    return [of_length_1(row[:dimensions]) for row in rows]


def of_length_1(vector: Row) -> Row:
    """In its direction; 0 stays 0."""
    norm = float(np.linalg.norm(vector))
    return vector / np.float32(norm) if norm else vector
