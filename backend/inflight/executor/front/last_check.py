"""The last check of structured output (`guided_decoding_check`): what ended by itself is held against its guide by a
validator that knows nothing of grammars. It changes no answer; what it finds is counted and logged.

JSON, schemas and choices are checked. Expressions, grammars and tags are not: what matches them is known by running
them once more, and an expression of a client's may run for ever. Of a schema that is not strict the answer names what
is not enforced, and JSON alone is checked.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from queue import Full, Queue
from typing import Any, NoReturn

import tokenizers

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.guided_decoding import GuidedDecodingParams, GuideType, Reasoning

logger = logging.getLogger(__name__)

MAX_WAITING = 1_000
"""Answers; further ones are not checked."""
MAX_VALIDATORS = 256
CHECKED = (GuideType.JSON, GuideType.JSON_SCHEMA, GuideType.CHOICE)

Answer = tuple[int, GuidedDecodingParams, tuple[int, ...]]
"""Request, what it follows, and the tokens of one of its sequences."""


class LastCheck:
    """A thread, which begins with the first answer."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigurationError if the validator is not installed, or the tokens' texts are not known."""
        if find_spec("jsonschema_rs") is None:
            raise ConfigurationError(
                "guided_decoding_check needs jsonschema-rs, which is not installed: pip install 'inflight[check]', or "
                "leave the key out"
            )
        self._tokenizer_file = Path(config.tokenizer_dir or config.gpt_model_path, "tokenizer.json")
        if not self._tokenizer_file.is_file():
            raise ConfigurationError(f"guided_decoding_check needs {self._tokenizer_file}, which is not there")
        self._answers: Queue[Answer | None] = Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self.num_checked = 0
        self.num_failed = 0

    def submit(self, request_id: int, params: GuidedDecodingParams, token_ids: Sequence[int]) -> None:
        """An answer that ended by itself. Does not wait."""
        if params.guide_type not in CHECKED:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="inflight-last-check", daemon=True)
            self._thread.start()
        try:
            self._answers.put_nowait((request_id, params, tuple(token_ids)))
        except Full:
            logger.warning("request %d: its answer is not checked, because %d others wait", request_id, MAX_WAITING)

    def end(self) -> None:
        """The thread ends once it has checked what waits. Does not wait for it."""
        with contextlib.suppress(Full):
            self._answers.put_nowait(None)

    def _run(self) -> None:
        tokenizer = tokenizers.Tokenizer.from_file(str(self._tokenizer_file))
        special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        while (answer := self._answers.get()) is not None:
            request_id, params, token_ids = answer
            shown = [each for each in token_ids if each not in special or each in params.shown_token_ids]
            try:
                fault = find_fault(params, tokenizer.decode(shown, skip_special_tokens=False))
            except Exception as error:
                # Its text may hold the answer's.
                logger.warning("request %d: its answer could not be checked: %s", request_id, type(error).__name__)
                continue
            self.num_checked += 1
            if fault:
                self.num_failed += 1
                logger.error("request %d: its answer does not follow its guide: %s", request_id, fault)


def find_fault(params: GuidedDecodingParams, text: str) -> str:
    """Where a whole output breaks its guide, in the guide's words and none of the output's; "" = nowhere."""
    answer = text if params.reasoning is None else behind(params.reasoning, text)
    if params.guide_type is GuideType.CHOICE:
        choices = json.loads(params.guide)
        is_one = answer in choices if params.reasoning is None else answer.strip() in map(str.strip, choices)
        return "" if is_one else "it is none of the choices"
    try:
        value = json.loads(answer, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return "it is not valid JSON"
    if params.guide_type is GuideType.JSON:
        return "" if isinstance(value, dict) else "it is no JSON object"
    return _validator(params.guide)(value) if params.is_strict else ""


def behind(reasoning: Reasoning, text: str) -> str:
    """The answer of an output that may begin with thoughts."""
    if reasoning.before_answer:
        return text.rpartition(reasoning.before_answer)[2]
    if reasoning.is_open or text.startswith(reasoning.opening):
        return text.partition(reasoning.closing)[2]
    return text


@lru_cache(MAX_VALIDATORS)
def _validator(schema: str) -> Any:
    """Of a schema: a function of a value that returns the first fault, or ""."""
    import jsonschema_rs

    # References that lead out of the schema are never fetched.
    validator = jsonschema_rs.validator_for(json.loads(schema), validate_formats=True, offline=True)

    def fault(value: Any) -> str:
        for error in validator.iter_errors(value):
            *place, keyword = map(str, error.schema_path)
            pointer = "".join(f"/{step.replace('~', '~0').replace('/', '~1')}" for step in place)
            return f'{keyword} at "{pointer}" of its schema'
        return ""

    return fault


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
