"""POST /v1/embeddings: one vector for each text, made by the ranks of the network's hidden states behind its tokens.

The engine generates one token behind a prompt, which is dropped. Vectors have the length 1, as OpenAI's have; shorter
ones are the first features of those, as models with Matryoshka representations (arXiv 2205.13147) are made for.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from inflight.asking.ask import Ask
from inflight.asking.limit import Limit
from inflight.asking.prepared import engines_refusal
from inflight.asking.served import Served
from inflight.asking.show import Show
from inflight.lora import LoRARequest
from inflight.openai.api_error import APIError, in_words, invalid, of_refusal, of_response
from inflight.openai.dispatcher import Mailbox
from inflight.openai.prompts import split_prompts
from inflight.openai.sentence_files import VectorOf
from inflight.output_config import AdditionalModelOutput, OutputConfig
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.sampling import Sampling
from inflight.scheduler_output import POOLED

OUTPUT = "hidden_states"
"""What the network's head turns into logits."""
ENCODINGS = ("float", "base64")
WORDS = {"prompt": "input", "adapter": "model"}
"""Fields of an `Ask`, as this body calls them."""

Vector = npt.NDArray[np.float32]


class EmbeddingBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None


def embedding_requests(
    body: EmbeddingBody, served: Served, limits: RequestLimits, adapter: LoRARequest | None, vector_of: VectorOf
) -> list[Request]:
    """A request for each text. Raises APIError."""
    if body.encoding_format not in (None, *ENCODINGS):
        raise invalid(f"encoding_format must be one of {', '.join(ENCODINGS)}", "encoding_format")
    if body.dimensions is not None and not 1 <= body.dimensions <= limits.hidden_size:
        raise invalid(f"dimensions must be between 1 and {limits.hidden_size}, which this model has", "dimensions")
    if OUTPUT not in limits.model_outputs:
        raise invalid("this model has no embeddings: its network offers no hidden states", "model")
    prompts = split_prompts(body.input, "input")
    if not all(prompts):
        raise invalid("input is empty: give at least one character or token", "input")
    # The token behind the prompt is sampled by its last state.
    output = AdditionalModelOutput(name=OUTPUT, pooling=None if vector_of == "last" else vector_of)
    ask = Ask(
        prompt=prompts,
        adapter=adapter,
        limit=Limit(max_tokens=1),
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


def answer(vectors: list[Vector], model: str, encoding: str | None, num_tokens: int) -> dict[str, Any]:
    """The body of the response."""
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, encoding)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def _encoded(vector: Vector, encoding: str | None) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
