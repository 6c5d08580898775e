"""How a checkpoint wants its tokens chosen where a request does not say: its generation_config.json.

What transformers' generate() would do with the same file, with the words of a request in place of its arguments. A
request that sets any of temperature, top_k, top_p, min_p and typical_p is sampled, and so is each one if the file says
do_sample; all others are greedy. Every front completes its requests here, so that the ranks need to know of no default.
"""

from __future__ import annotations

import json
import logging
import secrets
from pathlib import Path
from typing import TypeVar

import msgspec

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError, InvalidRequest
from inflight.sampling import Sampling
from inflight.sampling_config import MIN_TEMPERATURE, SamplingConfig

logger = logging.getLogger(__name__)

FILES = ("generation_config.json", "config.json")
"""The first that is there: before the former existed, such keys stood in the latter."""
TOP_K_OF_SAMPLING = 50
"""What transformers means by a file that says do_sample and nothing of top_k."""
NOTHING = SamplingConfig()
MAX_SHOWN = 60
"""Characters of a value in a warning."""

NOT_HONOURED: dict[str, object] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "diversity_penalty": 0,
    "length_penalty": 1,
    "early_stopping": False,
    "penalty_alpha": 0,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "top_h": None,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "force_words_ids": None,
    "constraints": None,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1,
    "watermarking_config": None,
    "token_healing": False,
    "stop_strings": None,
    "max_time": None,
}
"""Keys that would change an answer and are not done here, each with the value that asks for nothing; null never does.
Lengths (max_new_tokens, max_length) are not among them: each request brings its own."""


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """None always means that the checkpoint does not say. Without a file all of it is None."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    min_new_tokens: int | None = None
    min_length: int | None = None
    """Prompt included; min_new_tokens goes first."""

    @classmethod
    def load(cls, config: EngineConfig) -> GenerationDefaults:
        """Read those of the checkpoint, unless the configuration wants none, and warn of what is not honoured.

        Raises ConfigurationError naming file and key.
        """
        if config.generation_config == "none":
            return cls()
        for name in FILES:
            path = Path(config.gpt_model_path, name)
            if path.is_file():
                return _read(path)
        return cls()

    def sampling_config(self, said: Sampling, *, num_prompt_tokens: int, max_tokens: int) -> SamplingConfig:
        """Every default resolved for a request that says this; values out of range are left for RequestLimits.

        top_k 1 and a temperature that is 0, or too small to divide by, are greedy too; top_p <= 0 counts as not given.
        A request for beams that names none of these is not sampled, whatever the file says. A sampled request without
        a seed gets a fresh one. Raises InvalidRequest if min_tokens is above `max_tokens`.
        """
        temperature = said.temperature
        if temperature is None and said.is_random:
            temperature = _first(self.temperature, 1.0)
        top_p = said.top_p if said.top_p is not None and said.top_p > 0 else None
        searches = (said.beam_width or 1) > 1
        samples = any((temperature, said.top_k, top_p, said.min_p, said.typical_p))
        samples = samples or (bool(self.do_sample) and not searches)
        temperature = _first(temperature, self.temperature, 1.0)
        top_k = _first(said.top_k, self.top_k, TOP_K_OF_SAMPLING if self.do_sample else 0)
        is_greedy = not samples or 0 <= temperature < MIN_TEMPERATURE or top_k == 1
        return SamplingConfig(
            temperature=0.0 if is_greedy else temperature,
            top_k=top_k,
            top_p=_first(top_p, self.top_p, 1.0),
            top_p_decay=_first(said.top_p_decay, NOTHING.top_p_decay),
            top_p_min=_first(said.top_p_min, NOTHING.top_p_min),
            top_p_reset_ids=_first(said.top_p_reset_ids, NOTHING.top_p_reset_ids),
            min_p=_first(said.min_p, self.min_p, 0.0),
            typical_p=_first(said.typical_p, self.typical_p, 1.0),
            seed=_first(said.seed, 0 if is_greedy else secrets.randbits(64)),
            repetition_penalty=_first(said.repetition_penalty, self.repetition_penalty, 1.0),
            beam_width=_first(said.beam_width, NOTHING.beam_width),
            length_penalty=_first(said.length_penalty, NOTHING.length_penalty),
            early_stopping=_first(said.early_stopping, NOTHING.early_stopping),
            beam_width_array=_first(said.beam_width_array, NOTHING.beam_width_array),
            beam_search_diversity_rate=_first(said.beam_search_diversity_rate, NOTHING.beam_search_diversity_rate),
            presence_penalty=said.presence_penalty or 0.0,
            frequency_penalty=said.frequency_penalty or 0.0,
            min_tokens=self._min_tokens(said.min_tokens, num_prompt_tokens, max_tokens),
            no_repeat_ngram_size=_first(said.no_repeat_ngram_size, self.no_repeat_ngram_size, 0),
            logit_bias=said.logit_bias or {},
            embedding_bias=said.embedding_bias or b"",
        )

    def _min_tokens(self, said: int | None, num_prompt_tokens: int, max_tokens: int) -> int:
        if said is not None:
            if said > max(max_tokens, 0):
                raise InvalidRequest(f"min_tokens ({said}) must not be above max_tokens ({max_tokens})")
            return said
        behind_prompt = max((self.min_length or 0) - num_prompt_tokens, 0)
        return min(_first(self.min_new_tokens, behind_prompt), max(max_tokens, 0))


_T = TypeVar("_T")


def _first(*values: _T | None) -> _T:
    """The first that was said."""
    for value in values:
        if value is not None:
            return value
    raise AssertionError("the last one is always said")


def _read(path: Path) -> GenerationDefaults:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ConfigurationError(f"{path} cannot be read: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} must hold a JSON object")
    known = {key: values[key] for key in GenerationDefaults.__struct_fields__ if values.get(key) is not None}
    for key, value in known.items():
        _check_type(path, key, value)
    defaults = msgspec.convert(known, GenerationDefaults)
    _check_ranges(path, defaults)
    asked = {
        key: values[key] for key, nothing in NOT_HONOURED.items() if values.get(key) not in (None, nothing, [], {})
    }
    if asked:
        shown = ", ".join(f"{key} {json.dumps(value)[:MAX_SHOWN]}" for key, value in asked.items())
        logger.warning("%s asks for what this engine does not do: %s", path, shown)
    return defaults


def _check_type(path: Path, key: str, value: object) -> None:
    if key == "do_sample":
        fits, wanted = isinstance(value, bool), "true or false"
    elif key in ("top_k", "min_new_tokens", "min_length", "no_repeat_ngram_size"):
        fits, wanted = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    else:
        fits, wanted = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    if not fits:
        raise ConfigurationError(f"{path}: {key} must be {wanted}, got {json.dumps(value)[:MAX_SHOWN]}")


def _check_ranges(path: Path, defaults: GenerationDefaults) -> None:
    """By the rules for requests, so that no request is refused for what it did not say."""
    sampling = defaults.sampling_config(
        Sampling(temperature=defaults.temperature), num_prompt_tokens=0, max_tokens=2**31
    )
    try:
        sampling.validate()
    except InvalidRequest as error:
        raise ConfigurationError(f"{path}: {error}") from None
