"""The last check of structured output (`guided_decoding_check`): what ended by itself is held against its guide by a
validator that knows nothing of grammars (inflight.guides.last_check), and so are parts of answers that a front knows to
have guides of their own. It changes no answer; what it finds is counted and logged.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from queue import Full, Queue
from typing import NamedTuple

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.executor.front.journal_entry import JournalEntry
from inflight.guided_decoding import GuidedDecodingParams, GuideType
from inflight.request import Request
from inflight.result import Response
from inflight.text.safe_text import safe_text

logger = logging.getLogger(__name__)

MAX_WAITING = 1_000
"""Answers; further ones are not checked."""
CHECKED = (GuideType.JSON, GuideType.JSON_SCHEMA, GuideType.CHOICE)


class _Answer(NamedTuple):
    name: str
    """For the log."""
    params: GuidedDecodingParams
    read: Callable[[], str]
    """Its text."""


class LastCheck:
    """A thread, which begins with the first answer."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigurationError if the validator is not installed, or the tokens' texts are not known."""
        if find_spec("jsonschema_rs") is None:
            raise ConfigurationError(
                "guided_decoding_check needs jsonschema-rs, which is not installed: pip install 'inflight[check]', or "
                "leave the key out"
            )
        from inflight.text.tokenizer import Tokenizer  # brings the tokenizers library, which few fronts need

        self._tokenizer = Tokenizer.load(config.tokenizer_dir or config.gpt_model_path, config.gpt_model_path)
        self._answers: Queue[_Answer | None] = Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self.num_checked = 0
        self.num_failed = 0

    def note(self, entry: JournalEntry, responses: Iterable[Response]) -> None:
        """Check the answers of the request that these, its newest responses, have ended. Does not wait."""
        params = entry.request.guided_decoding_params
        if params is None or params.guide_type not in CHECKED:
            return
        for response in responses:
            token_ids = entry.ended_by_itself(response)
            if token_ids is not None:
                read = functools.partial(self._text, entry.request, params, token_ids)
                self._submit(_Answer(f"request {entry.request.request_id}: its answer", params, read))

    def note_text(self, name: str, params: GuidedDecodingParams, text: str) -> None:
        """Check a text that has a guide of its own. `name`: it, for the log. Does not wait."""
        self._submit(_Answer(name, params, lambda: text))

    def _submit(self, answer: _Answer) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="inflight-last-check", daemon=True)
                self._thread.start()
        try:
            self._answers.put_nowait(answer)
        except Full:
            logger.warning("%s is not checked, because %d wait", answer.name, MAX_WAITING)

    def end(self) -> None:
        """The thread ends once it has checked what waits. Does not wait for it."""
        with contextlib.suppress(Full):
            self._answers.put_nowait(None)

    def _run(self) -> None:
        while (answer := self._answers.get()) is not None:
            try:
                self._check(answer)
            except BaseException as error:  # a panic of a library is no Exception
                # Its text may hold the answer's.
                logger.warning("%s could not be checked: %s", answer.name, type(error).__name__)

    def _text(self, request: Request, params: GuidedDecodingParams, token_ids: list[int]) -> str:
        """`token_ids`: of one of its sequences, without the token that ended it."""
        from inflight.text.text_decoder import make_text_decoder

        shown = frozenset(params.shown_token_ids)
        decoder = make_text_decoder(self._tokenizer, request.input_token_ids, shown=shown)
        return "".join(map(decoder.push, token_ids)) + decoder.flush()

    def _check(self, answer: _Answer) -> None:
        from inflight.guides.last_check import NotChecked, find_breach  # with the library that may not be there

        try:
            breach = find_breach(answer.params, answer.read())
        except NotChecked:
            return
        self.num_checked += 1
        if breach is not None:
            self.num_failed += 1
            logger.error(
                '%s does not follow its guide: %s at "%s"',
                answer.name,
                safe_text(breach.keyword),
                safe_text(breach.pointer),
            )
