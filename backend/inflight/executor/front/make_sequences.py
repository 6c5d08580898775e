"""The sequences of a request in the caller's process, and what makes text of their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.errors import InvalidRequest
from inflight.executor.front.beam_output import BeamOutput
from inflight.executor.front.sequence_output import SequenceOutput
from inflight.request import Request
from inflight.text.detokenizer import Detokenizer
from inflight.text.stop_strings import StopStrings
from inflight.text.text_decoder import make_text_decoder
from inflight.text.tokenizer import Tokenizer


def make_sequences(
    request: Request, stop: Sequence[str], tokenizer: Tokenizer | None, *, reads_text: bool
) -> list[SequenceOutput]:
    """Those of a request. `stop`: texts that end one. `reads_text`: whether text is made here; False = it comes with
    the tokens. Raises InvalidRequest."""
    indices, has_beams = range(request.num_return_sequences), request.sampling_config.beam_width > 1
    if tokenizer is None and stop:
        raise InvalidRequest("stop strings are looked for in text and there is no tokenizer: use stop_words")
    if isinstance(stop, str) or not all(stop):
        raise InvalidRequest("stop must be a list of texts that are not empty")
    if tokenizer is None or not reads_text:
        return [BeamOutput(index) if has_beams else SequenceOutput(index) for index in indices]
    min_tokens = request.sampling_config.min_tokens
    stop_strings = StopStrings(list(stop)) if stop else None

    def make_detokenizer() -> Detokenizer:
        return Detokenizer(make_text_decoder(tokenizer, request.input_token_ids), stop_strings, min_tokens)

    if has_beams:
        return [BeamOutput(index, make_detokenizer) for index in indices]
    return [SequenceOutput(index, make_detokenizer(), has_stop_strings=bool(stop)) for index in indices]
