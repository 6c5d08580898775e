"""An answer that is sent while it grows: the chunks of one stream, in OpenAI's order.

    the role of each choice, with the first tokens of any; or the prompt that a completion repeats
    deltas, one choice a chunk
    a chunk with the finish reason of each choice, when it ends
    the usage, if that was asked for
    [DONE]

All that has come is made into bytes at once, a chunk for each choice however many tokens it got.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from inflight.http.api_error import APIError
from inflight.http.call import Call
from inflight.http.choice import Choice
from inflight.http.dialects.openai.answer import usage
from inflight.http.dialects.openai.deltas import CONTENT, NOTHING, ROLE, ChatDeltas
from inflight.http.dialects.openai.frames import DONE, Frames, error_frame
from inflight.http.dispatcher import Hear
from inflight.http.generation import Generation, News
from inflight.http.text_stream import FramedText, TextStream

NO_TEXT = b'""'

_encode = msgspec.json.Encoder().encode


class StreamedAnswer:
    """The bytes of one call's stream."""

    def __init__(self, call: Call, generation: Generation) -> None:
        self._call, self._generation = call, generation
        choices = generation.choices
        head = {
            "id": call.answer_id,
            "object": "chat.completion.chunk" if call.is_chat else "text_completion",
            "created": call.created,
            "model": call.model,
            "system_fingerprint": call.system_fingerprint or None,
            **call.notes(),
        }
        self._frames = Frames(head, "delta" if call.is_chat else "text", len(choices))
        self._deltas = [ChatDeltas(call.prepared.format) for _ in choices]
        self._is_plain = call.log_probs is None and not call.ask.show.token_ids
        self._num_chars = [0] * len(choices)
        """Of each choice's text that log probabilities have counted."""

    def open(self) -> bytes:
        """What comes before the first text."""
        call, frames, choices = self._call, self._frames, self._generation.choices
        if call.is_chat:
            chunks = [frames.plain(choice.index, ROLE) for choice in choices]
        else:
            echoes = [call.prepared.prompts[choice.index // call.ask.choices].text for choice in choices]
            chunks = [
                frames.plain(choice.index, _encode(echo)) for choice, echo in zip(choices, echoes, strict=True) if echo
            ]
        if call.ask.show.token_ids and choices:
            nothing = NOTHING if call.is_chat else NO_TEXT
            for number, prompt in enumerate(call.prepared.prompts):
                more = {"prompt_token_ids": prompt.request.input_token_ids}
                chunks.append(frames.detailed(number * call.ask.choices, nothing, None, more))
        return b"".join(chunks)

    def text_stream(self, long_way: Hear, fail: Callable[[Exception], bytes]) -> TextStream | None:
        """The short way for what comes now; None if the chunks hold more than the text of one choice."""
        call, choices = self._call, self._generation.choices
        is_text = self._is_plain and call.prepared.format is None and not call.scores_only
        if not is_text or len(choices) != 1 or not choices[0].is_plain:
            return None
        head, tail = self._frames.around(choices[0].index)
        if call.is_chat:
            head, tail = head + CONTENT, b"}" + tail
        return FramedText(choices[0], head, tail, long_way, fail)

    def add(self, news: News) -> bytes:
        """The chunks of new tokens; with the last of them all that ends the stream."""
        chunks: list[bytes] = []
        for choice, text in news.items():
            if not self._call.scores_only:
                self._write(choice, text, chunks)
            if choice.finish_reason:
                self._finish(choice, chunks)
        if self._generation.is_done:
            if self._call.includes_usage:
                chunks.append(self._frames.usage(usage(self._call, self._generation)))
            chunks.append(DONE)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def fail(self, error: APIError) -> bytes:
        """What ends a stream that cannot go on."""
        return error_frame(error) + DONE

    def _write(self, choice: Choice, text: str, chunks: list[bytes]) -> None:
        index = choice.index
        parts = self._deltas[index].feed(text) if self._call.is_chat else [_encode(text)][: len(text)]
        if self._is_plain:
            for part in parts:
                chunks.append(self._frames.plain(index, part))
            return
        # The first chunk has what belongs to all of these tokens, text or not.
        first, *rest = parts or [NOTHING if self._call.is_chat else NO_TEXT]
        chunks.append(self._detailed(choice, first))
        chunks += [self._frames.plain(index, part) for part in rest]

    def _finish(self, choice: Choice, chunks: list[bytes]) -> None:
        index, nothing, reason = choice.index, NO_TEXT, choice.finish_reason
        if self._call.is_chat:
            nothing = NOTHING
            parts, reason = self._deltas[index].finish(reason)
            chunks += [self._frames.plain(index, part) for part in parts]
        chunks.append(self._frames.finish(index, nothing, reason, choice.stop_reason))

    def _detailed(self, choice: Choice, part: bytes) -> bytes:
        call, entries = self._call, choice.take_log_probs()
        log_probs = None
        if call.log_probs is not None and call.is_chat:
            log_probs = call.log_probs.of_chat(entries)
        elif call.log_probs is not None:
            log_probs = call.log_probs.of_completion(entries, self._num_chars[choice.index])
            self._num_chars[choice.index] += call.log_probs.num_chars(entries)
        more = {"token_ids": choice.take_token_ids()} if call.ask.show.token_ids else {}
        return self._frames.detailed(choice.index, part, log_probs, more)
