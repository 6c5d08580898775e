"""Arguments of the library as an `Ask`: fields of Request, in the places where every dialect's are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inflight.asking.ask import Ask, Prompt
from inflight.asking.guide import Guide
from inflight.asking.limit import Limit
from inflight.asking.show import Show
from inflight.asking.stop import Stop
from inflight.output_config import OutputConfig
from inflight.sampling import Sampling
from inflight.sampling_config import SamplingConfig

WORDS = {
    "prompt": "the prompt",
    "choices": "num_return_sequences",
    "guide": "guided_decoding_params",
    "adapter": "lora_request",
    "stop_token_ids": "end_ids",
}
"""Field of an `Ask` -> the argument of the library that sets it."""
SAME = {"cache_salt": "cache_salt", "priority": "priority", "num_return_sequences": "choices"}
SAME |= {"lora_request": "adapter", "bad_words": "bad_word_ids"}
"""Field of Request -> that of the `Ask` which holds the same."""


def library_ask(
    prompt: Prompt,
    *,
    max_tokens: int,
    sampling: SamplingConfig | None,
    streaming: bool,
    end_ids: list[int] | None,
    fields: Mapping[str, Any],
) -> Ask:
    """`sampling`: None = as the checkpoint has it. `end_ids`: None = the tokenizer's. `fields`: further ones of
    Request. Stop strings are not in it: they are found in text, where the answer is read."""
    left = dict(fields)
    guide = left.pop("guided_decoding_params", None)
    stop_words: Sequence[list[int]] = left.pop("stop_words", ())
    output = left.pop("output_config", OutputConfig())
    allotted_time_ms = left.pop("allotted_time_ms", 0)
    same = {own: left.pop(name) for name, own in SAME.items() if name in left}
    return Ask(
        prompt=[prompt],
        streaming=streaming,
        sampling=Sampling() if sampling is None else sampling,
        limit=Limit(max_tokens=max_tokens, may_exceed=True, allotted_time_ms=allotted_time_ms),
        stop=Stop(token_ids=end_ids or (), ends_by_itself=end_ids is None, sequences=stop_words),
        guide=None if guide is None else Guide(params=guide),
        show=Show(output=output),
        further=left,
        **same,
    )
