"""The program of one postprocessing worker: `python -m inflight.executor.postprocess.worker FD TOKENIZER CHECKPOINT`.

It answers on the socket FD, which it has from the program that started it, and ends when that is closed. Knows text;
nothing of the engine.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

from inflight.executor.postprocess.messages import (
    NOT_STOPPED,
    Close,
    NewTokens,
    Open,
    Piece,
    Pieces,
    Ready,
    encoder,
    to_worker,
)
from inflight.text.detokenizer import Detokenizer
from inflight.text.stop_strings import StopStrings
from inflight.text.text_decoder import make_text_decoder
from inflight.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _OpenRequest:
    has_beams: bool
    make_detokenizer: Callable[[], Detokenizer]
    detokenizers: list[Detokenizer]
    """Of each sequence."""


class TextMaker:
    """The text of all requests that were opened."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._requests: dict[int, _OpenRequest] = {}

    def open(self, message: Open) -> None:
        stop_strings = StopStrings(message.stop) if message.stop else None

        def make_detokenizer() -> Detokenizer:
            decoder = make_text_decoder(self._tokenizer, message.prompt_token_ids)
            return Detokenizer(decoder, stop_strings, message.min_tokens)

        detokenizers = [make_detokenizer() for _ in range(message.num_sequences)]
        self._requests[message.request_id] = _OpenRequest(message.has_beams, make_detokenizer, detokenizers)

    def close(self, message: Close) -> None:
        self._requests.pop(message.request_id, None)

    def read(self, new: NewTokens) -> Piece:
        """The text that these tokens complete. An error concerns this request only."""
        try:
            request = self._requests[new.request_id]
            if request.has_beams:
                request.detokenizers[new.sequence_index] = request.make_detokenizer()
            detokenizer = request.detokenizers[new.sequence_index]
            if detokenizer.is_stopped:
                return Piece()
            text = detokenizer.push(new.token_ids)
            if new.is_last and not detokenizer.is_stopped:
                text += detokenizer.flush()
        except Exception as error:
            return Piece(error=f"{type(error).__name__}: {error}")
        return Piece(text, detokenizer.num_tokens if detokenizer.is_stopped else NOT_STOPPED)


def serve(connection: Connection, tokenizer: Tokenizer) -> None:
    """Answer until the other end is closed."""
    maker = TextMaker(tokenizer)
    try:
        connection.send_bytes(encoder.encode(Ready()))
        while True:
            message = to_worker.decode(connection.recv_bytes())
            if isinstance(message, Open):
                maker.open(message)
            elif isinstance(message, Close):
                maker.close(message)
            else:
                connection.send_bytes(encoder.encode(Pieces([maker.read(new) for new in message.new])))
    except (EOFError, ConnectionError):
        return


def main(descriptor: str, tokenizer_dir: str, checkpoint: str) -> None:
    # Ctrl-C is the program's: it closes the socket when it has read what is left.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(Connection(int(descriptor)), Tokenizer.load(tokenizer_dir, checkpoint))


if __name__ == "__main__":
    main(*sys.argv[1:])
