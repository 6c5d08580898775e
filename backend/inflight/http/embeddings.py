"""Vectors of texts: the requests for them, and what the engine answers.

An encoder gives its vector with the step that computes it; another engine generates one token behind a prompt, which
is dropped. Vectors have the length 1; shorter ones are the first features of those, as models with Matryoshka
representations (arXiv 2205.13147) are made for.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from inflight.asking.ask import Ask, Prompt
from inflight.asking.limit import Limit
from inflight.asking.prepared import engines_refusal
from inflight.asking.refusal import Words
from inflight.asking.served import Served
from inflight.asking.show import Show
from inflight.http.api_error import APIError, in_words, invalid, of_refusal, of_response
from inflight.http.dispatcher import Mailbox
from inflight.lora import LoRARequest
from inflight.output_config import AdditionalModelOutput, OutputConfig, Pooling
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.sampling import Sampling
from inflight.scheduler_output import POOLED

OUTPUT = "hidden_states"
"""What the network's head turns into logits."""
WORDS: Words = {"prompt": "input", "adapter": "model"}
"""Fields of an `Ask`, as bodies call them that ask for vectors."""

Vector = npt.NDArray[np.float32]


def embedding_requests(
    prompts: list[Prompt],
    dimensions: int | None,
    served: Served,
    limits: RequestLimits,
    adapter: LoRARequest | None,
    vector_of: Pooling,
) -> list[Request]:
    """A request for each prompt. Raises APIError."""
    if dimensions is not None and not 1 <= dimensions <= limits.hidden_size:
        raise invalid(f"dimensions must be between 1 and {limits.hidden_size}, which this model has", "dimensions")
    if OUTPUT not in limits.model_outputs:
        raise invalid("this model has no embeddings: its network offers no hidden states", "model")
    if not all(prompts):
        raise invalid("input is empty: give at least one character or token", "input")
    # Where a token is generated behind the prompt, the prompt's last state is what it is sampled by.
    is_sampled = vector_of == "last" and not limits.pooled
    output = AdditionalModelOutput(name=OUTPUT, pooling=None if is_sampled else vector_of)
    ask = Ask(
        prompt=prompts,
        adapter=adapter,
        limit=Limit(max_tokens=None if limits.pooled else 1),
        sampling=Sampling(temperature=0.0),
        show=Show(output=OutputConfig(additional_model_outputs=[output])),
    )
    with in_words(WORDS):
        return [prompt.request for prompt in served.prepare(ask, limits).prompts]


async def collect_vectors(mailbox: Mailbox, request_ids: list[int], dimensions: int | None) -> list[Vector]:
    """The vector of each request, in their order. Raises APIError and ClientGone."""
    found: dict[int, Vector] = {}
    missing = set(request_ids)
    while missing:
        for response in await mailbox.take():
            if response.result is None:
                raise of_response(response, of_refusal(engines_refusal(response.error_msg), WORDS).param)
            for tensor in response.result.tensors:
                if tensor.name in (OUTPUT, POOLED + OUTPUT):
                    found[response.request_id] = of_length_1(tensor.array()[0, :dimensions])
            if response.is_final and response.request_id not in found:
                raise APIError(504, "the engine's time for this request was over, or it was shut down")
            if response.is_final:
                missing.discard(response.request_id)
    return [found[request_id] for request_id in request_ids]


def of_length_1(vector: Vector) -> Vector:
    """In its direction; 0 stays 0."""
    norm = float(np.linalg.norm(vector))
    return vector / np.float32(norm) if norm else vector
