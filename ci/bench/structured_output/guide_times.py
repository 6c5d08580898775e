"""One core's time in a guide's life: translated by the front, compiled by the engine, then a mask for a token."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from time import process_time
from typing import Any

import msgspec
import numpy as np
from sampled_answers import Draws
from schema_generator import SchemaGenerator

from inflight.errors import InvalidRequest
from inflight.guided_decoding import GuidedDecodingParams, GuideType
from inflight.guides.translate import translate
from inflight.runtime.guided.library import Compiled, GrammarRefused
from inflight.runtime.guided.llguidance_library import LlguidanceLibrary
from inflight.runtime.guided.vocabulary import Vocabulary

WALK_TOKENS = 64
BATCH = 64
BATCH_STEPS = 60
BATCH_SCHEMAS = (1, 8, BATCH)
"""Different ones among the outputs of a batch, all new."""
MAX_BATCHES = 8
"""Of each number of schemas."""
UNITS = {
    "translate": "front: guide to grammar",
    "compile": "engine: grammar, with the first mask of all",
    "first mask": "first mask of an output",
    "mask": "masks along random walks",
    "batch": f"masks of {BATCH} outputs, of all schemas in turn",
    **{f"batch of {count}": f"masks of {BATCH} outputs, schemas people use: {count}" for count in BATCH_SCHEMAS},
}
"""What is timed -> what it is called."""


def guide_times(schemas: Iterable[Any], vocabulary: Vocabulary, seed: int) -> dict[str, Any]:
    """Of each thing that is timed: count, and microseconds of CPU time of half of them (p50), of 99 % (p99) and of all
    (longest) at most. Schemas that are refused are left out."""
    library, draws = warm_library(vocabulary), Draws(vocabulary, seed)
    times: dict[str, list[float]] = defaultdict(list)
    grammars: list[Compiled] = []
    for schema in schemas:
        if grammar := _made(library, schema, times):
            grammars.append(grammar)
            _walk(library, grammar, draws, times)
    _walk_together(library, grammars, draws, times["batch"])
    generator = SchemaGenerator(seed)
    of_people = [generator.schema() for _ in range(MAX_BATCHES * BATCH)]
    for count in BATCH_SCHEMAS:
        for first in range(0, MAX_BATCHES * count, count):
            new = [_made(library, schema, defaultdict(list)) for schema in of_people[first : first + count]]
            _walk_together(library, [grammar for grammar in new if grammar], draws, times[f"batch of {count}"])
    return {name: _shares(times[name]) for name in UNITS}


def _made(library: LlguidanceLibrary, schema: Any, times: dict[str, list[float]]) -> Compiled | None:
    """None: it is refused."""
    params = GuidedDecodingParams(guide_type=GuideType.JSON_SCHEMA, guide=json.dumps(schema))
    start = process_time()
    try:
        translated = translate.__wrapped__(params)
    except InvalidRequest:
        return None
    finally:
        times["translate"].append(process_time() - start)
    params = msgspec.structs.replace(params, grammar=translated.grammar)
    start = process_time()
    try:
        return library.compile(params)
    except GrammarRefused:
        return None
    finally:
        times["compile"].append(process_time() - start)


def warm_library(vocabulary: Vocabulary) -> LlguidanceLibrary:
    """That has read its vocabulary, which it does once; as the front's process has imported what it needs."""
    library = LlguidanceLibrary(vocabulary, num_threads=1)
    params = GuidedDecodingParams(guide_type=GuideType.JSON)
    library.compile(msgspec.structs.replace(params, grammar=translate(params).grammar))
    return library


def _walk(library: LlguidanceLibrary, grammar: Compiled, draws: Draws, times: dict[str, list[float]]) -> None:
    """Until the output cannot go on."""
    state, words = grammar.start(), _words(1, draws)
    for place in range(WALK_TOKENS):
        start = process_time()
        library.fill([state], words)
        times["mask" if place else "first mask"].append(process_time() - start)
        token = draws.token(words[0], place)
        if token is None:
            return
        state.accept(token)


def _walk_together(library: LlguidanceLibrary, grammars: Sequence[Compiled], draws: Draws, times: list[float]) -> None:
    """One output that ends makes room for one of the next schema."""
    if not grammars:
        return
    words = _words(BATCH, draws)
    states = [grammars[place % len(grammars)].start() for place in range(BATCH)]
    lengths = [0] * BATCH
    following = BATCH
    for _ in range(BATCH_STEPS):
        start = process_time()
        library.fill(states, words)
        times.append(process_time() - start)
        for place, state in enumerate(states):
            token = draws.token(words[place], lengths[place])
            if token is not None:
                state.accept(token)
                lengths[place] += 1
                continue
            states[place], lengths[place] = grammars[following % len(grammars)].start(), 0
            following += 1


def _words(rows: int, draws: Draws) -> Any:
    return np.zeros((rows, -(-len(draws.texts) // 32)), dtype=np.uint32)


def _shares(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {"count": 0, "p50": 0.0, "p99": 0.0, "longest": 0.0}
    p50, p99, longest = (round(float(np.quantile(seconds, share)) * 1e6, 1) for share in (0.5, 0.99, 1))
    return {"count": len(seconds), "p50": p50, "p99": p99, "longest": longest}
