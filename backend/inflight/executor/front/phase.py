"""In which phase of its output a request is that replicas for prompts and others for generation share."""

from __future__ import annotations

import enum

from inflight.config import EngineConfig
from inflight.context_phase import RequestType
from inflight.request import Request


class Phase(enum.Enum):
    WHOLE = "whole"
    """One replica computes all of it."""
    CONTEXT = "context"
    """Its prompt and first tokens are computed, or are to be."""
    GENERATION = "generation"
    """The rest, behind the context phase."""


def first_phase(request: Request, config: EngineConfig) -> Phase:
    """In which a request begins. One replica computes what would gain nothing: a single token, a beam search, whose
    beams share a prompt that is theirs, what asks for tensors of its prompt, what is resumed, and orders."""
    if request.request_type is not RequestType.CONTEXT_AND_GENERATION:
        return Phase.CONTEXT if request.request_type is RequestType.CONTEXT_ONLY else Phase.GENERATION
    output, num_tokens = request.output_config, len(request.input_token_ids)
    asks_of_prompt = output.return_prompt_log_probs or output.return_context_logits
    asks_of_prompt |= any(each.is_of_prompt for each in output.additional_model_outputs)
    splits = (
        config.context_replicas > 0
        and not request.lora_order
        and not asks_of_prompt
        and request.replay is None
        and request.max_tokens > 1
        and request.sampling_config.beam_width == 1
        and 1 < num_tokens <= config.max_context_tokens
        # The front must know the first tokens to hand it over.
        and num_tokens + request.num_return_sequences <= config.journal_max_tokens
    )
    return Phase.CONTEXT if splits else Phase.WHOLE
