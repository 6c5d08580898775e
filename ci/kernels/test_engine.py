"""The engine with the kernels of a GPU chooses the tokens that it chooses with torch: every part, through the packed
and padded input of a GPU, with prompts in chunks, every kind of sampling, and rows that pause and are used again.

The kernels are interpreted, on a CPU. Where there is a GPU, ci/unit/runtime/test_engine.py compares the same.

Run: pytest ci/kernels/test_engine.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from coded_checkpoints import EXPERTS, write_coded_checkpoint
from fp8_checkpoints import BLOCK_CONFIG, GEMMA_CONFIG, add_cache_scales, write_fp8_checkpoint
from model_driver import Driver, Work
from tiny_checkpoints import make_checkpoint, make_prompt

from ci.kernels.kernel_cases import LINEAR_CONFIG
from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.models import branch_loading
from inflight.runtime import model_runner, step_sizes
from inflight.runtime.model_runner import ModelRunner
from inflight.sampling_config import SamplingConfig
from inflight_kernels import dispatch
from inflight_kernels.attention import gpu as attention
from inflight_kernels.common import checks
from inflight_kernels.moe import gpu as moe
from inflight_kernels.norm import gpu as norm
from inflight_kernels.sampling.gpu import sampling
from inflight_kernels.tuning import trying

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")

LLAMA_LIKE = ("llama", "mistral-window", "qwen2-window", "qwen3-window", "phi3-partial-window", "granite-biases")
"""Windows, biases, norms on heads, partly rotated heads, scaled parts, tied embeddings."""
UNLIKE_LLAMA = {
    "gemma2": ("rms_norm", "gated_linear"),
    "olmo2": ("rms_norm", "gated_linear"),
    "cohere2": ("layer_norm", "gated_linear"),
    "gpt-neox": ("layer_norm", "activate"),
    "gpt2": ("layer_norm", "activate"),
    "nemotron": ("layer_norm", "activate"),
}
"""With the norm and the feed-forward of each: soft caps and norms around the branches (Gemma 2); norms behind them, and
of all heads (OLMo 2); one norm of parallel branches, pairs of adjacent elements, layers without rotation (Cohere 2);
norms of their own (GPT-NeoX); learned positions (GPT-2); activations."""
WITH_EXPERTS = ("qwen3-moe", "mixtral-window", "qwen2-moe", "glm4-moe-groups", "gpt-oss")
"""Dense layers beside them; windows; shared experts with a gate; groups, sigmoids, biases of choices; biases of
experts, clamped SwiGLU and sinks."""

WITH_STATES = {"qwen3-next": "gated_delta_rule", "kimi-linear": "gated_delta_rule", "falcon-h1": "state_space_scan"}
"""With the recurrence of each: one decay a head beside experts, a decay of each channel, and a state space beside
attention in one layer."""


NEIGHBOUR = 0.02
"""Bound of the difference between log probabilities in fp8, where one number may be rounded to the next."""


def sequences(*, all_kinds: bool = False) -> list[Work]:
    """A prompt in chunks, one that pauses, and for `all_kinds` one of each kind of sampling."""
    filters: dict[str, Any] = {"temperature": 0.9, "top_k": 7, "top_p": 0.8, "min_p": 0.02, "seed": 3}
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    biased = SamplingConfig(seed=9, temperature=1.1, logit_bias={3: 1.0})
    greedy = [
        Work(prompt=make_prompt(15, 2), max_tokens=3, chunk=8, log_probs=True),
        Work(prompt=make_prompt(7, 6), max_tokens=3, pauses_at=2),
    ]
    if not all_kinds:
        return greedy
    return [
        *greedy,
        Work(prompt=make_prompt(5, 3), max_tokens=3, sampling=SamplingConfig(**filters)),
        Work(prompt=make_prompt(11, 4), max_tokens=3, sampling=SamplingConfig(**penalties), arrives=2),
        Work(prompt=make_prompt(13, 5), max_tokens=3, sampling=biased, bad_words=[[5], [9, 12]], arrives=2),
    ]


def serve(
    folder: Path,
    works: list[Work],
    *,
    kv_cache_dtype: str = "auto",
    deterministic: bool = False,
    model_impl: str = "auto",
) -> list[Work]:
    config = EngineConfig(
        gpt_model_path=str(folder),
        device="cpu",
        dtype="float32",
        max_batch_size=8,
        max_num_tokens=64,
        max_seq_len=64,
        tokens_per_block=4,
        max_tokens_in_paged_kv_cache=256,
        kv_cache_dtype=kv_cache_dtype,
        cpu_compile="false",
        deterministic=deterministic,
        model_impl=model_impl,
    )
    runner = ModelRunner.load(config, SingleRank())
    Driver(runner).run(works)
    runner.close()
    return works


def with_log_probs() -> list[Work]:
    return [replace(work, log_probs=True) for work in sequences()]


def results(works: list[Work]) -> list[tuple[list[int], list[float]]]:
    return [(work.output, work.output_log_probs) for work in works]


def assert_no_bit_depends_on_the_batch(folder: Path) -> None:
    together = serve(folder, with_log_probs(), deterministic=True)
    alone = [work for each in with_log_probs() for work in serve(folder, [each], deterministic=True)]
    assert results(alone) == results(together)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """CPU tensors go to the kernels of a GPU, in the steps that a GPU would get. Counts the calls, by operation."""
    calls: Counter[str] = Counter()

    class Counted:
        def __init__(self, module: Any) -> None:
            self._module = module

        def __getattr__(self, name: str) -> Any:
            calls[name] += 1
            return getattr(self._module, name)

    module = dispatch._module
    monkeypatch.setattr(dispatch, "_module", lambda family, kind: Counted(module(family, kind)))
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, "cpu", "gpu")
    monkeypatch.setattr(step_sizes, "PADDED_DEVICES", frozenset({"cpu"}))
    # No warm-up, fewer programs and shorter tiles: the interpreter takes them one after the other.
    monkeypatch.setattr(model_runner, "warmup_steps", lambda *_, **__: [])
    monkeypatch.setattr(checks, "DEFAULT_MULTIPROCESSORS", 2)
    default = sampling.default_config
    monkeypatch.setattr(sampling, "default_config", lambda size: {**default(size), "BLOCK_V": 256, "MAX_LISTED": 8})
    with trying("linear", LINEAR_CONFIG), trying("gated_linear", LINEAR_CONFIG):
        yield calls


@pytest.mark.parametrize("network", [*LLAMA_LIKE, *UNLIKE_LLAMA])
def test_tokens_are_those_of_torch(network: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder, all_kinds = make_checkpoint(tmp_path, network).folder, network == "llama"
    expected = serve(folder, sequences(all_kinds=all_kinds))
    launched: Counter[str] = request.getfixturevalue("launched")
    found = serve(folder, sequences(all_kinds=all_kinds))
    assert [work.output for work in found] == [work.output for work in expected]
    assert found[0].output_log_probs == pytest.approx(expected[0].output_log_probs, abs=1e-4)
    of_all = {"decode_attention", "prefill_attention", "rope_and_kv_write", "sample"}
    assert of_all.union(UNLIKE_LLAMA.get(network, ("rms_norm", "gated_linear"))) <= launched.keys()


@pytest.mark.parametrize("network", ["qwen3-moe", "gpt-oss"])
def test_experts_of_classes_of_transformers_are_those_of_torch(
    network: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = make_checkpoint(tmp_path, network).folder
    expected = serve(folder, sequences(), model_impl="transformers")
    launched: Counter[str] = request.getfixturevalue("launched")
    found = serve(folder, sequences(), model_impl="transformers")
    assert [work.output for work in found] == [work.output for work in expected]
    assert found[0].output_log_probs == pytest.approx(expected[0].output_log_probs, abs=1e-4)
    assert {"fused_moe", "decode_attention", "prefill_attention"} <= launched.keys()


@pytest.mark.parametrize("network", [*UNLIKE_LLAMA, "qwen2-moe", "glm4-moe-groups", "gpt-oss"])
@pytest.mark.usefixtures("launched")
def test_with_deterministic_no_bit_depends_on_the_batch(
    network: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRunner, "warmup", lambda _: None)
    assert_no_bit_depends_on_the_batch(make_checkpoint(tmp_path, network).folder)


@pytest.mark.parametrize(("kv_cache_dtype", "static"), [("auto", False), ("fp8", False), ("auto", True)])
def test_tokens_of_fp8_weights_are_those_of_torch(
    kv_cache_dtype: str, static: bool, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of an fp8 KV cache. Without a warm-up: the interpreter quantises row by row, and takes a minute for that
    one's."""
    monkeypatch.setattr(ModelRunner, "warmup", lambda _: None)
    folder = write_fp8_checkpoint(tmp_path, static=static).folder
    add_cache_scales(folder)
    expected = serve(folder, sequences(), kv_cache_dtype=kv_cache_dtype)
    launched: Counter[str] = request.getfixturevalue("launched")
    found = serve(folder, sequences(), kv_cache_dtype=kv_cache_dtype)
    assert [work.output for work in found] == [work.output for work in expected]
    # Another order of additions moves a few activations, keys and values to a neighbouring number of fp8.
    assert found[0].output_log_probs == pytest.approx(expected[0].output_log_probs, abs=NEIGHBOUR)
    # Of four products norms and the activation quantise for three.
    apart = launched["quantize_per_token"]
    assert launched["scaled_linear"] == 4 * apart > 0 and launched["activate_and_mul_quantized"] == apart
    assert launched["rms_norm_quantized"] + launched["embedding_rms_norm_quantized"] == 2 * apart
    if kv_cache_dtype == "auto":
        return
    attend = attention.decode_attention
    monkeypatch.setattr(
        attention, "decode_attention", lambda *given, **options: attend(*given, **{**options, "v_scale": 1.0})
    )
    wrong = serve(folder, sequences(), kv_cache_dtype=kv_cache_dtype)
    assert wrong[0].output_log_probs[1:] != pytest.approx(expected[0].output_log_probs[1:], abs=NEIGHBOUR)


@pytest.mark.parametrize("experts", [False, True])
def test_tokens_of_fp8_weights_by_blocks_are_those_of_torch(
    experts: bool, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no bit depends on the batch, with `deterministic`."""
    monkeypatch.setattr(ModelRunner, "warmup", lambda _: None)
    if experts:
        folder = write_coded_checkpoint(tmp_path, "fp8-official", EXPERTS).folder
    else:
        folder = write_fp8_checkpoint(tmp_path, strategy="block", config=BLOCK_CONFIG).folder
    expected = serve(folder, sequences())
    launched: Counter[str] = request.getfixturevalue("launched")
    found = serve(folder, sequences())
    assert [work.output for work in found] == [work.output for work in expected]
    assert found[0].output_log_probs == pytest.approx(expected[0].output_log_probs, abs=NEIGHBOUR)
    # Of four products, or two beside experts, norms and the activation quantise for all but one.
    apart = launched["quantize_per_token"]
    assert apart > 0 and (launched["fused_moe"] > 0) == experts
    assert launched["block_scaled_linear"] == 4 * apart - 2 * launched["fused_moe"]
    assert_no_bit_depends_on_the_batch(folder)


@pytest.mark.parametrize(
    "options",
    [{}, {"static": True}, {"strategy": "block", "config": BLOCK_CONFIG}, {"config": GEMMA_CONFIG}],
    ids=["own", "static", "blocks", "norms around branches"],
)
@pytest.mark.usefixtures("launched")
def test_no_bit_depends_on_which_kernel_quantises(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRunner, "warmup", lambda _: None)
    folder = write_fp8_checkpoint(tmp_path, **options).folder
    fused = serve(folder, sequences())
    monkeypatch.setattr(branch_loading, "fuse_quantization", lambda *parts: parts)
    assert results(serve(folder, sequences())) == results(fused)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.usefixtures("launched")
def test_with_deterministic_no_bit_of_fp8_weights_depends_on_the_batch(
    static: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRunner, "warmup", lambda _: None)
    folder = write_fp8_checkpoint(tmp_path, static=static).folder
    assert_no_bit_depends_on_the_batch(folder)
    # A scale that depended on the number of tokens would be noticed.
    quantize = norm.rms_norm_quantized

    def by_batch(*arguments: Any, **options: Any) -> Any:
        values, scale, *sums = quantize(*arguments, **options)
        return (values, scale * (1 + len(scale) / 1000), *sums)

    monkeypatch.setattr(norm, "rms_norm_quantized", by_batch)
    assert results(serve(folder, with_log_probs()[:1], deterministic=True)) != results(
        serve(folder, with_log_probs(), deterministic=True)[:1]
    )


@pytest.mark.parametrize("network", WITH_EXPERTS)
def test_so_they_are_with_experts(
    network: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense layers beside them, too; and a token that goes to other experts has other log probabilities."""
    monkeypatch.setattr(ModelRunner, "warmup", lambda _: None)  # many steps, and the other families' have been
    folder = make_checkpoint(tmp_path, network).folder
    expected = serve(folder, sequences())
    launched: Counter[str] = request.getfixturevalue("launched")
    found = serve(folder, sequences())
    assert [work.output for work in found] == [work.output for work in expected]
    assert found[0].output_log_probs == pytest.approx(expected[0].output_log_probs, abs=1e-4)
    assert {"route_experts", "fused_moe"} <= launched.keys()
    if network == "qwen3-moe":
        return
    route = moe.route_experts
    monkeypatch.setattr(moe, "route_experts", lambda *logits: (route(*logits)[0], route(*logits)[1].roll(1, dims=1)))
    assert serve(folder, sequences())[0].output_log_probs != pytest.approx(expected[0].output_log_probs, abs=1e-4)


def _across_chunks(most: int) -> list[Work]:
    """Prompts of at most so many tokens a step, one of them on a cached prefix of another that ends within a chunk, and
    one whose output is computed again as a prompt."""
    first = Work(prompt=make_prompt(37, 2), max_tokens=3, chunk=most, log_probs=True)
    again = Work(prompt=make_prompt(13, 6), max_tokens=6, chunk=most, log_probs=True, pauses_at=4)
    shared = first.prompt[:22] + make_prompt(3, 8)
    second = Work(prompt=shared, max_tokens=2, chunk=most, log_probs=True, arrives=7, shares=first, shared_blocks=5)
    return [first, again, second]


@pytest.mark.parametrize(("network", "recurrence"), WITH_STATES.items())
def test_so_they_are_with_states_and_no_bit_depends_on_where_steps_end(
    network: str, recurrence: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRunner, "warmup", lambda _: None)
    folder = make_checkpoint(tmp_path, network).folder
    expected = serve(folder, _across_chunks(64))
    launched: Counter[str] = request.getfixturevalue("launched")
    found = serve(folder, _across_chunks(64), deterministic=True)
    assert [work.output for work in found] == [work.output for work in expected]
    assert found[0].output_log_probs == pytest.approx(expected[0].output_log_probs, abs=1e-4)
    assert launched[recurrence] > 0
    assert results(serve(folder, _across_chunks(7), deterministic=True)) == results(found)
    alone = [replace(work, shares=None, shared_blocks=0, pauses_at=0) for work in _across_chunks(64)]
    assert [each for work in alone for each in results(serve(folder, [work], deterministic=True))] == results(found)


def test_a_wrong_kernel_is_noticed(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes attend to one key less."""
    folder = make_checkpoint(tmp_path, "llama").folder
    expected = serve(folder, sequences())
    request.getfixturevalue("launched")
    attend = attention.decode_attention
    monkeypatch.setattr(
        attention,
        "decode_attention",
        lambda q, k, v, table, lengths, *others, **options: attend(q, k, v, table, lengths - 1, *others, **options),
    )
    found = serve(folder, sequences())
    assert [work.output[0] for work in found] == [work.output[0] for work in expected]
    assert found[0].output_log_probs[1:] != pytest.approx(expected[0].output_log_probs[1:], abs=1e-4)
