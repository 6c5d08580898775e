"""Greedy tokens of transformers' modelling code with paged attention equal its own, for many classes.

Run: pytest ci/unit/models/test_transformers_decoder.py
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_checkpoints
import torch
from model_driver import Driver, Work
from tiny_checkpoints import TinyCheckpoint, make_prompt, write_checkpoint
from transformers_checkpoints import CONFIGS, GPT2, make_config
from transformers_runner import BLOCK_SIZE, NUM_TOKENS, Sample, load, run

from inflight.models.decoder import Decoder
from inflight.models.transformers_decoder import TransformersDecoder
from inflight.runtime.model_runner import ModelRunner

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=list(CONFIGS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), CONFIGS[request.param], len(request.param))


@pytest.fixture(scope="module")
def runner(checkpoint: TinyCheckpoint, device: str) -> Iterator[ModelRunner]:
    runner = load(checkpoint.folder, device=device, model_impl="transformers")
    assert isinstance(runner._computation.decoder, TransformersDecoder)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def samples(checkpoint: TinyCheckpoint) -> list[Sample]:
    """The longer ones are longer than the windows."""
    return [Sample.of(checkpoint, length) for length in (1, 6, 21, 33)]


def test_alone(runner: ModelRunner, samples: list[Sample]) -> None:
    for sample in samples:
        run(runner, [sample], [sample.work()])


def test_in_a_mixed_batch_in_chunks(runner: ModelRunner, samples: list[Sample]) -> None:
    run(runner, samples, [sample.work(chunk=7, arrives=2 * place) for place, sample in enumerate(samples)])


def test_after_a_pause(runner: ModelRunner, samples: list[Sample]) -> None:
    run(runner, samples, [sample.work(pauses_at=5 * (place % 2)) for place, sample in enumerate(samples)])


def test_with_a_shared_prefix(runner: ModelRunner, samples: list[Sample]) -> None:
    sample = samples[2]
    first = Work(prompt=sample.prompt[: 4 * BLOCK_SIZE] + make_prompt(5, seed=1), max_tokens=NUM_TOKENS, log_probs=True)
    second = sample.work(arrives=4, shares=first, shared_blocks=4)
    Driver(runner).run([first, second])
    sample.check(second)


def test_to_the_last_position(runner: ModelRunner, checkpoint: TinyCheckpoint) -> None:
    """The step that overlap has launched beyond the end disturbs nobody, not even where positions are learnt."""
    full, full_tokens = checkpoint.prompt(96, 5)
    other, other_tokens = checkpoint.prompt(9, 12)
    batch = [Work(prompt=full, max_tokens=6), Work(prompt=other, max_tokens=12)]
    Driver(runner).run(batch)
    assert (batch[0].output[:5], batch[1].output) == (full_tokens, other_tokens)


def test_learnt_positions_end_where_the_table_ends(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, make_config("gpt2", **GPT2, max_position_embeddings=32), 1)
    runner = load(tmp_path, max_seq_len=0)
    assert runner.limits.max_seq_len == 32
    prompt, tokens = checkpoint.prompt(28, 5)
    work = Work(prompt=prompt, max_tokens=6)
    Driver(runner).run([work])
    runner.close()
    assert work.output[:5] == tokens


@pytest.mark.parametrize("name", ["llama-llama3", "mistral-window", "qwen2-window", "qwen3-biases"])
def test_a_native_family_gives_the_same_tokens_both_ways(tmp_path: Path, name: str) -> None:
    checkpoint = tiny_checkpoints.make_checkpoint(tmp_path, name)
    samples = [Sample.of(checkpoint, length) for length in (5, 30)]
    for model_impl, kind in (("transformers", TransformersDecoder), ("native", Decoder), ("auto", Decoder)):
        runner = load(tmp_path, model_impl=model_impl)
        assert isinstance(runner._computation.decoder, kind)
        run(runner, samples, [sample.work(chunk=7) for sample in samples])
        runner.close()


def test_both_ways_declare_the_same_caches(tmp_path: Path) -> None:
    tiny_checkpoints.make_checkpoint(tmp_path, "qwen3-window")
    specs = []
    for model_impl in ("native", "transformers"):
        runner = load(tmp_path, model_impl=model_impl)
        specs.append(runner._computation.decoder.state_specs)
        runner.close()
    assert specs[0] == specs[1]
    assert [spec.window for spec in specs[0]] == [13, 0, 13]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gemma3_text", "gpt2", "gpt_oss"])
def test_half_precision(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    checkpoint = write_checkpoint(tmp_path, CONFIGS[name], 1, dtype=dtype)
    runner = load(tmp_path, dtype=str(dtype).removeprefix("torch."))  # which auto is not on every processor
    work = Work(prompt=make_prompt(20), max_tokens=6, log_probs=True)
    Driver(runner).run([work])
    runner.close()
    assert {spec.tensors[0].dtype for spec in runner._computation.decoder.state_specs} == {dtype}
    with torch.inference_mode():
        logits = checkpoint.model.float()(torch.tensor([work.token_ids])).logits[0]
    reference = logits[19:-1].log_softmax(-1).gather(1, torch.tensor(work.output)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(work.output_log_probs), reference, rtol=0, atol=0.3)


def test_two_networks_in_one_process(tmp_path: Path) -> None:
    """Steps of both are under way at once, on a thread each."""
    checkpoints = [write_checkpoint(tmp_path / name, CONFIGS[name], 1) for name in ("gpt2", "phi3")]
    runners = [load(checkpoint.folder) for checkpoint in checkpoints]
    pairs = [checkpoint.prompt(9, NUM_TOKENS) for checkpoint in checkpoints]
    drivers = [Driver(runner) for runner in runners]
    batches = [[Work(prompt=prompt, max_tokens=NUM_TOKENS)] for prompt, _ in pairs]
    for _ in range(NUM_TOKENS + 2):
        for driver, batch in zip(drivers, batches, strict=True):
            driver._step([work for work in batch if work.row < 0], [work for work in batch if not work.is_done])
    assert [batch[0].output for batch in batches] == [tokens for _, tokens in pairs]
    for runner in runners:
        runner.close()
