"""The trial of a compiled grammar before any request uses it: outputs that follow it along random tokens.

How long a token takes grows with the number of readings that a grammar has for the output so far.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from inflight.guided_decoding import GuidedDecodingParams, GuideType
from inflight.runtime.guided.compiling import TOO_LARGE, GrammarRefused
from inflight.runtime.guided.matchers import Matchers
from inflight.runtime.guided.messages import Advance

TRIAL_TOKENS = 256
FURTHER_TRIAL_TOKENS = 64
"""Of each trial behind the first."""
MAX_TRIALS = 16
TRIAL_SECONDS = 1.0
"""CPU time of a whole trial above which a grammar is refused."""
MAX_TRIAL_STEP_SECONDS = 0.05
"""CPU time of one token of a trial above which a grammar is refused."""
TOO_SLOW = "the grammar is too ambiguous to be followed: finding its next tokens takes too long"
TRIED = -1
"""Name of the matcher."""


def beginnings(params: GuidedDecodingParams) -> list[str]:
    """Texts behind which a grammar is to be tried: random tokens would hardly find the end of free text, or a tag."""
    found = [""]
    reasoning = params.reasoning
    before = ""
    if reasoning is not None:
        before = ("" if reasoning.is_open else reasoning.opening) + reasoning.closing
        found.append(before)
    if params.guide_type is GuideType.STRUCTURAL_TAG:
        found += [before + text for text in islice(_tags(json.loads(params.guide), ""), MAX_TRIALS - len(found))]
    return found


def try_grammar(matchers: Matchers, end_ids: list[int], beginning: str = "") -> None:
    """Follow the grammar behind `beginning`, always in the same way. Raises GrammarRefused if a token takes long.
    Nothing is tried behind a text that does not follow the grammar."""
    try:
        if matchers.begin(TRIED, end_ids, beginning):
            _walk(matchers, end_ids, FURTHER_TRIAL_TOKENS if beginning else TRIAL_TOKENS)
    except (MemoryError, RuntimeError):
        raise GrammarRefused(TOO_LARGE) from None
    finally:
        matchers.close(TRIED)


def _walk(matchers: Matchers, end_ids: list[int], num_tokens: int) -> None:
    choose = random.Random(0)
    token_ids: list[int] = []
    started = time.process_time()
    for _ in range(num_tokens):
        before = time.process_time()
        (mask,) = matchers.advance(Advance(TRIED, token_ids))
        now = time.process_time()
        if now - before > MAX_TRIAL_STEP_SECONDS or now - started > TRIAL_SECONDS:
            raise GrammarRefused(TOO_SLOW)
        if mask.error == TOO_LARGE or (mask.error and not token_ids):
            raise GrammarRefused(mask.error)
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask.bits, dtype=np.uint8), bitorder="little"))
        allowed = np.setdiff1d(allowed, end_ids)
        if not len(allowed):
            break
        token_ids = [int(allowed[choose.randrange(len(allowed))])]


def _tags(form: Any, before: str) -> Iterator[str]:
    """The texts that begin tags, each with those of the tags around it."""
    if isinstance(form, list):
        if len(form) == 2 and isinstance(form[0], str):  # a rule of free text: what begins it, and what follows that
            before += form[0]
        for each in form:
            yield from _tags(each, before)
    elif isinstance(form, dict):
        begin = form.get("begin")
        if isinstance(begin, str) and begin:
            before += begin
            yield before
        if form.get("type") == "sequence" and isinstance(form.get("elements"), list):
            for each in form["elements"]:
                yield from _tags(each, before)
                before += str(each.get("value", "")) if isinstance(each, dict) else ""
            return
        for name in ("format", "content", "tags", "elements", "rules"):
            yield from _tags(form.get(name), before)
