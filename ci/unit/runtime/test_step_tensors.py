"""Logits, hidden states and log probabilities of prompts and outputs, against transformers' own.

Run: pytest ci/unit/runtime/test_step_tensors.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_driver import Driver, Work
from tiny_checkpoints import TinyCheckpoint, make_checkpoint, make_prompt

from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.runtime import step_sizes, step_tensors
from inflight.runtime.model_runner import ModelRunner
from inflight.runtime.step_tensors import LOG_PROBS, served_outputs
from inflight.sampling_config import SamplingConfig
from inflight.scheduler_output import Array
from inflight_kernels import cpu

pytestmark = pytest.mark.slow

ALL = tuple(sorted(served_outputs(["hidden_states"]) - {LOG_PROBS}))
TOLERANCE = {"rtol": 0, "atol": 3e-5}


@pytest.fixture(scope="module", params=["as large as it is", "padded", "transformers"])
def runner(request: pytest.FixtureRequest, checkpoint: TinyCheckpoint) -> Iterator[ModelRunner]:
    config = EngineConfig(
        gpt_model_path=str(checkpoint.folder),
        device="cpu",
        model_impl="transformers" if request.param == "transformers" else "native",
        max_batch_size=8,
        max_num_tokens=128,
        max_seq_len=64,
        tokens_per_block=4,
        max_tokens_in_paged_kv_cache=512,
    )
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "padded":
            patch.setattr(step_sizes, "PADDED_DEVICES", {"cpu"})
        patch.setattr(step_tensors, "HEAD_ROWS", 5)
        loaded = ModelRunner.load(config, SingleRank())
        yield loaded
        loaded.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama")


def expected(checkpoint: TinyCheckpoint, work: Work) -> dict[str, torch.Tensor]:
    """Everything that could be asked of prompt and output, by transformers."""
    length, num_top = len(work.prompt), work.num_log_probs
    tokens = torch.tensor([work.token_ids])
    with torch.inference_mode():
        found = checkpoint.model(tokens, output_hidden_states=True)
    logits, hidden = found.logits[0, :-1], found.hidden_states[-1][0, :-1]
    log_probs = logits.log_softmax(-1)
    top = log_probs.topk(num_top, dim=1)
    of_tokens = log_probs.gather(1, tokens[0, 1:, None])[:, 0]
    return {
        "context_logits": logits[:length],
        "context_hidden_states": hidden[:length],
        "prompt_log_probs": of_tokens[: length - 1],
        "prompt_top_log_probs": top.values[: length - 1],
        "prompt_top_token_ids": top.indices[: length - 1].int(),
        "generation_logits": logits[length - 1 :],
        "hidden_states": hidden[length - 1 :],
        "top_log_probs": top.values[length - 1 :],
        "top_token_ids": top.indices[length - 1 :].int(),
        "beam_log_probs": top.values[length - 1 :],
        "beam_token_ids": top.indices[length - 1 :].int(),
    }


def joined(work: Work) -> dict[str, Array]:
    found: dict[str, list[Array]] = {}
    for tensors in work.tensors:
        for name, array in {**tensors.prompt, **tensors.generated}.items():
            found.setdefault(name, []).append(array)
    return {name: np.concatenate(arrays) for name, arrays in found.items()}


def check(checkpoint: TinyCheckpoint, work: Work, names: set[str]) -> None:
    found, wanted = joined(work), expected(checkpoint, work)
    assert set(found) == names
    for name in names:
        torch.testing.assert_close(torch.from_numpy(found[name].copy()), wanted[name], **TOLERANCE, msg=lambda m: m)


EVERYTHING = {*ALL, "top_token_ids", "prompt_top_token_ids", "beam_token_ids"}


def test_each_row_gets_what_it_asked_for_and_no_other_anything(runner: ModelRunner, checkpoint: TinyCheckpoint) -> None:
    """Prompts whole, in chunks of many tokens and of one; greedy and random rows; rows that join later."""
    works: dict[str, Work] = {
        "whole": Work(prompt=make_prompt(13), max_tokens=6, outputs=ALL, num_log_probs=4),
        "silent": Work(prompt=make_prompt(9), max_tokens=9),
        "chunks": Work(prompt=make_prompt(14), max_tokens=5, outputs=ALL, num_log_probs=20, chunk=3, arrives=1),
        "single tokens": Work(prompt=make_prompt(4), max_tokens=5, outputs=ALL, num_log_probs=1, chunk=1, arrives=2),
        "prompt": Work(prompt=make_prompt(7), max_tokens=3, outputs=("prompt_log_probs",)),
        "logits": Work(prompt=make_prompt(11), max_tokens=8, outputs=("generation_logits",), arrives=3),
        "hidden": Work(prompt=make_prompt(2), max_tokens=7, outputs=("context_hidden_states", "hidden_states")),
        "random": Work(
            prompt=make_prompt(8),
            max_tokens=8,
            outputs=("top_log_probs",),
            num_log_probs=3,
            # What is told is the model's own opinion.
            sampling=SamplingConfig(temperature=1.5, top_k=9, seed=3, logit_bias={5: 4.0}, repetition_penalty=1.3),
        ),
    }
    Driver(runner).run(list(works.values()))
    for name in ("whole", "chunks", "single tokens"):
        check(checkpoint, works[name], EVERYTHING)
    assert works["silent"].tensors == []
    check(checkpoint, works["prompt"], {"prompt_log_probs"})
    check(checkpoint, works["logits"], {"generation_logits"})
    check(checkpoint, works["hidden"], {"context_hidden_states", "hidden_states"})
    check(checkpoint, works["random"], {"top_token_ids", "top_log_probs"})
    assert works["silent"].output == checkpoint.expected(works["silent"].prompt, 9)


def test_asking_changes_no_token_and_neighbours_change_no_number(
    runner: ModelRunner, checkpoint: TinyCheckpoint
) -> None:
    def asking(**options: Any) -> Work:
        return Work(prompt=make_prompt(12), max_tokens=6, outputs=ALL, num_log_probs=5, **options)

    alone = asking()
    Driver(runner).run([alone])
    assert alone.output == checkpoint.expected(alone.prompt, 6)
    beside = asking(arrives=2, chunk=5)
    Driver(runner).run([Work(prompt=make_prompt(14), max_tokens=12, outputs=ALL, num_log_probs=20), beside])
    assert beside.output == alone.output
    found, wanted = joined(beside), joined(alone)
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=3e-5, err_msg=name)


def test_a_row_that_starts_again_tells_nothing_of_its_output_twice(
    runner: ModelRunner, checkpoint: TinyCheckpoint
) -> None:
    """After a pause its generated tokens are prefilled like a prompt's, but they are none."""
    work = Work(prompt=make_prompt(9), max_tokens=8, outputs=("context_logits", "generation_logits"), pauses_at=4)
    Driver(runner).run([work])
    assert [tensors.num_prompt_tokens for tensors in work.tensors if tensors.prompt] == [9, 9]
    wanted = expected(checkpoint, work)
    found = joined(work)
    assert found["generation_logits"].shape[0] == len(work.output) == 8
    np.testing.assert_allclose(found["generation_logits"], wanted["generation_logits"].numpy(), rtol=0, atol=3e-5)
    np.testing.assert_allclose(found["context_logits"][9:], wanted["context_logits"].numpy(), rtol=0, atol=3e-5)


def layer_outputs(checkpoint: TinyCheckpoint, token_ids: list[int]) -> list[torch.Tensor]:
    """Of each layer, (tokens, features), by transformers."""
    outputs: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda module, arguments, output: outputs.append(output))
        for layer in checkpoint.model.model.layers
    ]
    with torch.inference_mode():
        checkpoint.model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return [output[0] for output in outputs]


def test_layers_tell_what_they_put_out(runner: ModelRunner, checkpoint: TinyCheckpoint) -> None:
    """Some of one row's, others of another's, beside one that asks for none."""
    if runner.limits.model_outputs == ["hidden_states"]:
        with pytest.raises(ValueError, match=r"outputs \['hidden_states.1'\] are not served"):
            Driver(runner).run([Work(prompt=[5], outputs=("hidden_states.1",))])
        return
    assert runner.limits.model_outputs == ["hidden_states", "hidden_states.0", "hidden_states.1", "hidden_states.2"]
    first = Work(
        prompt=make_prompt(9),
        max_tokens=5,
        outputs=("hidden_states.0", "hidden_states.2", "context_hidden_states.0", "context_hidden_states.2"),
        chunk=4,
    )
    second = Work(prompt=make_prompt(6), max_tokens=6, outputs=("hidden_states.1", "hidden_states"), arrives=1)
    silent = Work(prompt=make_prompt(11), max_tokens=7)
    Driver(runner).run([silent, first, second])
    for work, numbers in ((first, (0, 2)), (second, (1,))):
        outputs = layer_outputs(checkpoint, work.token_ids)
        found = joined(work)
        for number in numbers:
            wanted = outputs[number][:-1].numpy()
            of_output = found[f"hidden_states.{number}"]
            np.testing.assert_allclose(of_output, wanted[len(work.prompt) - 1 :], rtol=0, atol=3e-5)
            if work is first:
                of_prompt = found[f"context_hidden_states.{number}"]
                np.testing.assert_allclose(of_prompt, wanted[: len(work.prompt)], rtol=0, atol=3e-5)
    assert silent.output == checkpoint.expected(silent.prompt, 7) and not silent.tensors


def test_compiled_layers_give_the_tensors_of_torch(tmp_path: Path) -> None:
    if cpu.unsupported_reason():
        pytest.skip(cpu.unsupported_reason())
    # In 16 bits the last bit of a logit may decide a token, and with it all tensors behind it.
    wide = make_checkpoint(tmp_path, "llama-wide")
    found: list[dict[str, Array]] = []
    for compiled in ("true", "false"):
        config = EngineConfig(
            gpt_model_path=str(wide.folder),
            device="cpu",
            dtype="float32",
            cpu_compile=compiled,
            num_threads=1,
            max_batch_size=8,
            max_num_tokens=64,
            max_seq_len=64,
            max_tokens_in_paged_kv_cache=512,
        )
        runner = ModelRunner.load(config, SingleRank())
        assert "hidden_states.0" in runner.limits.model_outputs
        outputs = (*ALL, "hidden_states.0")
        work = Work(prompt=make_prompt(19), max_tokens=6, outputs=outputs, num_log_probs=3, chunk=7)
        Driver(runner).run([Work(prompt=make_prompt(5), max_tokens=9), work])
        found.append(joined(work))
        runner.close()
    assert set(found[0]) == set(found[1]) > EVERYTHING
    for name in found[0]:
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=0, atol=1e-4, err_msg=name)


def test_a_step_nobody_asks_anything_of_computes_nothing_more(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise AssertionError("computed for nobody")

    for name in ("_of_piece", "_top"):
        monkeypatch.setattr(step_tensors, name, fail)
    work = Work(prompt=make_prompt(9), max_tokens=4, log_probs=True)
    Driver(runner).run([work])
    assert len(work.output) == 4 and work.tensors == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_candidates_have_one_order_whatever_else_is_sought(device: str) -> None:
    """Equal values by token id, forbidden tokens last with -inf; a row's first ones do not depend on the count."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(6, 203, generator=generator) * 2).round().to(device)
    logits[5] = -90.0
    logits[5, 7] = 90.0
    allowed = (torch.rand(6, 203, generator=generator) < 0.3).to(device)
    for mask in (None, allowed):
        log_probs = logits.log_softmax(1)
        if mask is not None:
            log_probs = log_probs.masked_fill(~mask, -torch.inf)
        values, ids = log_probs.sort(dim=1, descending=True, stable=True)
        for count in (1, 4, 150, 500):
            found = step_tensors._candidates(logits, mask, count)
            assert found["beam_token_ids"].tolist() == ids[:, :count].tolist()
            assert torch.equal(found["beam_log_probs"], values[:, :count])
