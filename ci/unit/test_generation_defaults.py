"""A checkpoint's generation_config.json: greedy tokens equal transformers' own with the same file, through every front;
what is wrong in it is one sentence, and what is not honoured is told."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import fake_tokenizer
import pytest
import torch
from tiny_checkpoints import TinyCheckpoint, make_checkpoint, make_prompt
from transformers import AutoModelForCausalLM

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError, InvalidRequest
from inflight.executor.generation_executor import GenerationExecutor
from inflight.executor.in_process import InProcessExecutor
from inflight.generation_defaults import GenerationDefaults
from inflight.request_limits import RequestLimits
from inflight.sampling import Sampling
from inflight.sampling_config import SamplingConfig
from inflight.server.request_builder import RequestBuilder
from inflight.server.tensors.client_request import ClientRequest

pytestmark = pytest.mark.slow

NUM_TOKENS = 24
LIMITS = RequestLimits(vocab_size=300, max_seq_len=64, max_input_len=63, kv_cache_tokens=1000)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def configure(folder: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(gpt_model_path=str(folder), device="cpu", max_tokens_in_paged_kv_cache=512, **changes)


def write(folder: Path, values: object, name: str = "generation_config.json") -> EngineConfig:
    (folder / name).write_text(values if isinstance(values, str) else json.dumps(values))
    return configure(folder)


def load(folder: Path, values: object) -> GenerationDefaults:
    return GenerationDefaults.load(write(folder, values))


def resolve(defaults: GenerationDefaults, **said: Any) -> SamplingConfig:
    return defaults.sampling_config(Sampling(**said), num_prompt_tokens=4, max_tokens=16)


SETTINGS = {
    "nothing": {},
    "greedy with a penalty": {"repetition_penalty": 1.3},
    "a penalty below one": {"repetition_penalty": 0.8},
    "no run of two tokens twice": {"repetition_penalty": 0.6, "no_repeat_ngram_size": 2},
    "greedy whatever else is there": {"do_sample": False, "temperature": 0.3, "top_p": 0.5, "repetition_penalty": 1.1},
    # Sampling from one token is no matter of chance.
    "one likeliest token": {"do_sample": True, "top_k": 1, "repetition_penalty": 1.3},
    "hardly any mass": {"do_sample": True, "top_p": 1e-6},
    "the most typical token": {"do_sample": True, "typical_p": 1e-6, "temperature": 0.7, "top_k": 0},
    "as likely as the likeliest": {"do_sample": True, "min_p": 1.0, "temperature": 0.5, "top_k": 0},
}


def transformers_tokens(folder: Path, prompt: list[int]) -> list[int]:
    """What generate() makes of a prompt where nothing but the length is said."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens: list[int] = network.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS)[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("values", SETTINGS.values(), ids=SETTINGS)
def test_tokens_equal_those_of_transformers_with_the_same_file(checkpoint: TinyCheckpoint, values: dict) -> None:
    with GenerationExecutor(InProcessExecutor(write(checkpoint.folder, values))) as executor:
        for length in (1, 9, 17):
            prompt = make_prompt(length)
            expected = transformers_tokens(checkpoint.folder, prompt)
            assert executor.generate_async(prompt, max_tokens=NUM_TOKENS).result().token_ids == expected


@pytest.mark.parametrize("least", [{"min_new_tokens": 12}, {"min_length": 20}, {"min_length": 20, "min_new_tokens": 7}])
def test_an_output_is_as_long_as_transformers_makes_it(checkpoint: TinyCheckpoint, least: dict) -> None:
    prompt = make_prompt(9)
    write(checkpoint.folder, {})
    end = transformers_tokens(checkpoint.folder, prompt)[3]
    config = write(checkpoint.folder, {"eos_token_id": end, **least})
    expected = transformers_tokens(checkpoint.folder, prompt)
    assert len(expected) > least.get("min_new_tokens", 11)
    with GenerationExecutor(InProcessExecutor(config)) as executor:
        assert executor.generate_async(prompt, max_tokens=NUM_TOKENS, end_ids=[end]).result().token_ids == expected


def test_a_library_user_may_say_some_of_it(checkpoint: TinyCheckpoint) -> None:
    config = write(checkpoint.folder, {"do_sample": True, "temperature": 0.5, "repetition_penalty": 1.3})
    with GenerationExecutor(InProcessExecutor(config)) as executor:
        said = executor.sampling_config([1, 2], 8, top_p=0.9, seed=5)
        assert said == SamplingConfig(temperature=0.5, top_k=50, top_p=0.9, seed=5, repetition_penalty=1.3)
        first, second = (executor.generate_async([1, 2], max_tokens=8, sampling_config=said).result() for _ in range(2))
        assert first.outputs == second.outputs


def test_requests_of_clients_are_completed_too(tmp_path: Path) -> None:
    defaults = load(tmp_path, {"do_sample": True, "temperature": 0.5, "repetition_penalty": 1.3, "min_length": 6})
    builder = RequestBuilder(fake_tokenizer.byte_tokenizer(), LIMITS, defaults)
    request = builder.build(ClientRequest(input_ids=[1, 2], max_tokens=16, seed=1), 1, "")
    assert request.sampling_config == SamplingConfig(
        temperature=0.5, top_k=50, seed=1, repetition_penalty=1.3, min_tokens=4
    )
    said = ClientRequest(
        input_ids=[1, 2], max_tokens=16, seed=1, temperature=0.7, top_k=0, repetition_penalty=1.0, min_tokens=0
    )
    assert builder.build(said, 1, "").sampling_config == SamplingConfig(temperature=0.7, seed=1)


def test_a_request_that_asks_for_greedy_gets_it(tmp_path: Path) -> None:
    defaults = load(tmp_path, {"do_sample": True, "temperature": 0.5})
    assert resolve(defaults).temperature == 0.5
    assert resolve(defaults, temperature=0.0).temperature == 0.0
    assert resolve(defaults, top_k=1).temperature == 0.0


def test_what_a_file_names_holds_for_a_request_that_samples_of_itself(tmp_path: Path) -> None:
    """The fifty likeliest are meant by a file that samples, not by one that is silent or names other things."""
    defaults = load(tmp_path, {"temperature": 0.5, "top_p": 0.75})
    assert resolve(defaults).temperature == 0.0
    assert resolve(defaults, min_p=0.5, seed=1) == SamplingConfig(temperature=0.5, top_p=0.75, min_p=0.5, seed=1)
    assert resolve(load(tmp_path, {"eos_token_id": 2}), temperature=0.5, seed=1) == SamplingConfig(
        temperature=0.5, seed=1
    )


def test_no_more_tokens_than_a_request_allows_are_a_must(tmp_path: Path) -> None:
    assert resolve(load(tmp_path, {"min_new_tokens": 100})).min_tokens == 16
    with pytest.raises(InvalidRequest, match=r"min_tokens \(17\) must not be above max_tokens \(16\)"):
        resolve(GenerationDefaults(), min_tokens=17)


def test_the_configuration_may_want_none_of_it(tmp_path: Path) -> None:
    write(tmp_path, {"do_sample": True})
    assert GenerationDefaults.load(configure(tmp_path, generation_config="none")) == GenerationDefaults()
    with pytest.raises(ConfigurationError, match="generation_config must be one of auto, none"):
        configure(tmp_path, generation_config="vllm")


def test_an_old_checkpoint_says_it_in_its_config_json(tmp_path: Path) -> None:
    assert GenerationDefaults.load(configure(tmp_path)) == GenerationDefaults()
    config = write(tmp_path, {"repetition_penalty": 1.5, "vocab_size": 7}, "config.json")
    assert GenerationDefaults.load(config) == GenerationDefaults(repetition_penalty=1.5)
    assert load(tmp_path, {}) == GenerationDefaults()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ("{", "generation_config.json cannot be read"),
        ("[1]", "generation_config.json must hold a JSON object"),
        ({"temperature": "hot"}, 'generation_config.json: temperature must be a number, got "hot"'),
        ({"temperature": True}, "temperature must be a number, got true"),
        ({"top_k": 1.5}, "top_k must be a whole number, got 1.5"),
        ({"do_sample": 1}, "do_sample must be true or false, got 1"),
        ({"no_repeat_ngram_size": 0.5}, "no_repeat_ngram_size must be a whole number, got 0.5"),
        ({"no_repeat_ngram_size": 99}, "generation_config.json: no_repeat_ngram_size must be between 0"),
        ({"min_length": [1]}, r"min_length must be a whole number, got \[1\]"),
        ({"temperature": -1}, "generation_config.json: temperature must be 0"),
        ({"top_p": 1.5}, "generation_config.json: top_p must be above 0"),
        ({"repetition_penalty": 0}, "generation_config.json: repetition_penalty must be between"),
        ('{"temperature": NaN, "do_sample": true}', "generation_config.json: temperature must be 0"),
    ],
)
def test_a_wrong_value_is_one_clear_sentence_before_anything_starts(
    tmp_path: Path, values: object, sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        InProcessExecutor(write(tmp_path, values))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_null_says_nothing(tmp_path: Path) -> None:
    assert load(tmp_path, {"temperature": None, "num_beams": None}) == GenerationDefaults()


def test_what_is_not_honoured_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "inflight")
    load(
        tmp_path,
        {"num_beams": 4, "encoder_no_repeat_ngram_size": 3, "max_new_tokens": 7, "eta_cutoff": 0.0, "my_own": 1},
    )
    (told,) = caplog.messages
    assert told.endswith("asks for what this engine does not do: num_beams 4, encoder_no_repeat_ngram_size 3")
    load(tmp_path, {"max_length": 4096, "num_beams": 1, "do_sample": True, "suppress_tokens": []})
    assert len(caplog.messages) == 1


def test_a_search_for_beams_does_not_sample_unless_told(tmp_path: Path) -> None:
    defaults = load(tmp_path, {"do_sample": True, "temperature": 0.5})
    config = resolve(defaults, beam_width=3)
    assert (config.temperature, config.beam_width, config.length_penalty, config.early_stopping) == (0.0, 3, 1.0, 0)
    assert resolve(defaults, beam_width=3, top_p=0.5).temperature == 0.5, "which is refused for beams"
