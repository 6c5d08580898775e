"""Networks that transformers' modelling code computes are split over ranks by their `tp_plan`.

Run: pytest ci/unit/models/test_transformers_ranks.py
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from coded_checkpoints import EXPERTS, write_coded_checkpoint
from lora_adapters import RandomAdapter
from model_driver import Driver, Work
from tiny_checkpoints import make_prompt, write_checkpoint
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers_checkpoints import CONFIGS, GEMMA, LATENT, MIXED, QWEN_EXPERTS, WINDOW, make_config
from transformers_ranks import Answer, Case, serve
from transformers_runner import NUM_TOKENS, Sample, load, refusal

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.models.transformers_plan import NotSplit
from inflight.models.transformers_split import NetworkSplit

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.usefixtures("one_thread")]

PLANS: Mapping[str, PreTrainedConfig] = {
    "heads-and-mlp": CONFIGS["apertus"],
    "tied-head": CONFIGS["cohere2"],
    "scaled-embedding": CONFIGS["gemma3_text"],
    "biases": CONFIGS["starcoder2"],
    "joined-qkv": CONFIGS["gpt_neox"],
    "all-heads": CONFIGS["phi3"],
    "norms-of-all-heads": CONFIGS["olmo2"],
    "gathered-mlp": CONFIGS["glm4"],
    "experts": CONFIGS["qwen3_moe"],
    "experts-beside-all-heads": CONFIGS["olmoe"],
    "experts-without-plan": CONFIGS["qwen2_moe"],
    "shared-experts": make_config("dots1", **MIXED, **QWEN_EXPERTS, n_routed_experts=4, n_shared_experts=1),
    "latent": make_config("deepseek_v2", **LATENT),
    "sinks": make_config("granite_swa", **MIXED),
    "even-vocabulary": make_config("helium", vocab_size=204),
    "one-by-one": make_config("hrm_text"),
    "one-key-head": make_config("gemma3_text", **GEMMA, num_key_value_heads=1),
}
"""By what the plan of each has, or how it is served."""
KEY_HEADS = {"heads-and-mlp": 1, "one-key-head": 1, "experts": 1, "joined-qkv": 2, "latent": 2, "all-heads": 2}
"""Of a rank: half of those of the network, or all two, or the only one."""
ON_FOUR: Mapping[str, tuple[PreTrainedConfig, int, list[int]]] = {
    "one-key-head": (make_config("qwen3_moe", **QWEN_EXPERTS, num_key_value_heads=1), 4, [1, 1, 1]),
    "two-key-heads": (make_config("qwen3_moe", **QWEN_EXPERTS, num_key_value_heads=2), 2, [1, 1, 1]),
    "biases-of-one": (make_config("starcoder2", **WINDOW, num_key_value_heads=1), 1, [1, 1, 1]),
    "one-or-two-by-layer": (
        make_config("mimo_v2_flash", **MIXED, **QWEN_EXPERTS, v_head_dim=8, num_key_value_heads=1),
        1,
        [1, 1, 1],
    ),
}
"""Key heads fewer than ranks: a configuration, its `moe_expert_parallel_size`, and key heads of a rank's layers."""
WHOLE_EXPERTS = ("experts", "shared-experts", "experts-without-plan")
CODED = ("awq", "gptq-8", "int4", "mxfp4")
WIDE = make_config(
    "qwen3_moe",
    **QWEN_EXPERTS | {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 256, "vocab_size": 208},
    intermediate_size=256,
    mlp_only_layers=[1],
)
"""Of whose inputs a rank's share is whole groups."""
QUANTIZED = ("int8", "int4")
ADAPTED = ("heads-and-mlp", "gathered-mlp")
LENGTHS = (1, 8, 21)
WHOLE: dict[str, Any] = {"moe_expert_parallel_size": 2}


@dataclass
class Served:
    """What is expected of ranks, and their answers."""

    case: Case
    samples: list[Sample]
    answers: list[Answer] = field(default_factory=list)

    def check(self) -> None:
        """The tokens of transformers, and the same bits on all ranks."""
        first, *others = self.answers
        for sample, work in zip(self.samples, first.works, strict=True):
            sample.check(work)
        bits = [work.output_log_probs for work in first.works]
        assert others
        assert all(bits == [work.output_log_probs for work in other.works] for other in others)


@pytest.fixture(scope="module")
def served_by_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    folder = tmp_path_factory.mktemp("four-ranks")
    all_of_them = {
        name: _of_plan(folder / name, config, moe_expert_parallel_size=num_sets)
        for name, (config, num_sets, _) in ON_FOUR.items()
    }
    all_of_them["adapter"] = _with_adapter(folder / "adapter", PLANS["one-key-head"])
    _ask(all_of_them.values(), 4)
    return all_of_them


def _ask(of_ranks: Collection[Served], num_ranks: int) -> None:
    for answers in serve([each.case for each in of_ranks], num_ranks):
        for each, answer in zip(of_ranks, answers, strict=True):
            each.answers.append(answer)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    """All that this file asks of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    all_of_them = {
        **{f"plan {name}": _of_plan(folder / name, config) for name, config in PLANS.items()},
        **{f"whole {name}": _of_plan(folder / f"{name}-whole", PLANS[name], **WHOLE) for name in WHOLE_EXPERTS},
        **{f"codes {kind}": _of_codes(folder / kind, kind) for kind in CODED},
        "whole codes": _of_codes(folder / "codes-whole", "awq", **WHOLE),
        "whole quantization": _quantized(folder / "int4-whole", "int4", **WHOLE),
        **{f"quantization {code}": _quantized(folder / f"{code}-made", code) for code in QUANTIZED},
        **{f"adapter {name}": _with_adapter(folder / f"{name}-adapter", PLANS[name]) for name in ADAPTED},
    }
    _ask(all_of_them.values(), 2)
    return all_of_them


def _of_plan(folder: Path, config: PreTrainedConfig, **options: Any) -> Served:
    checkpoint = write_checkpoint(folder, config, 1)
    samples = [Sample.of(checkpoint, length) for length in LENGTHS]
    works = [sample.work(chunk=7, arrives=2 * place) for place, sample in enumerate(samples)]
    works[2].pauses_at = 5
    return Served(Case(folder=folder, works=works, options=options), samples)


def _of_codes(folder: Path, kind: str, **options: Any) -> Served:
    checkpoint = write_coded_checkpoint(folder, kind, EXPERTS)
    samples = [Sample.of(checkpoint, length) for length in LENGTHS]
    works = [sample.work(chunk=7) for sample in samples]
    return Served(Case(folder=checkpoint.folder, works=works, options={"cpu_activations": "keep", **options}), samples)


def _quantized(folder: Path, code: str, **more: Any) -> Served:
    """What one rank gives."""
    write_checkpoint(folder, WIDE, 1)
    options = {"quantization": code, "cpu_activations": "keep"}
    runner = load(folder, model_impl="transformers", **options)
    samples, works = [], []
    for length in LENGTHS:
        work, again = (Work(prompt=make_prompt(length), max_tokens=NUM_TOKENS, log_probs=True) for _ in range(2))
        Driver(runner).run([work])
        samples.append(Sample(work.prompt, work.output, torch.tensor(work.output_log_probs)))
        works.append(again)
    runner.close()
    return Served(Case(folder=folder, works=works, options={**options, **more}), samples)


def _with_adapter(folder: Path, config: PreTrainedConfig) -> Served:
    """Beside a row without it."""
    checkpoint = write_checkpoint(folder, config, 1)
    adapter = RandomAdapter.of(checkpoint, 3)
    with adapter.merged(checkpoint) as merged:
        samples = [Sample.of(checkpoint, 8), Sample.of(merged, 21)]
    works = [samples[0].work(), samples[1].work(chunk=7, adapter=(0, 1))]
    options = {"max_loras": 1, "lora_cache_max_adapter_size": 8}
    return Served(Case(folder=folder, works=works, options=options, adapters=[adapter.part(1)]), samples)


@pytest.mark.parametrize("name", list(PLANS))
def test_two_ranks_give_the_tokens_of_transformers(served: dict[str, Served], name: str) -> None:
    served[f"plan {name}"].check()


@pytest.mark.parametrize("name", list(KEY_HEADS))
def test_a_rank_keeps_keys_of_its_heads(served: dict[str, Served], name: str) -> None:
    for answer in served[f"plan {name}"].answers:
        assert answer.num_heads == [KEY_HEADS[name]] * PLANS[name].num_hidden_layers


@pytest.mark.parametrize("name", list(ON_FOUR))
def test_ranks_have_copies_of_a_key_head(served_by_four: dict[str, Served], name: str) -> None:
    served_by_four[name].check()
    for answer in served_by_four[name].answers:
        assert answer.num_heads == ON_FOUR[name][2]


def test_adapters_change_copies(served_by_four: dict[str, Served]) -> None:
    served_by_four["adapter"].check()


@pytest.mark.parametrize("kind", CODED)
def test_codes_are_split_and_stay_codes(served: dict[str, Served], kind: str) -> None:
    served[f"codes {kind}"].check()
    for answer in served[f"codes {kind}"].answers:
        assert len(answer.packed) == 4 * EXPERTS.num_hidden_layers + 3 * len(EXPERTS.mlp_only_layers)


@pytest.mark.parametrize("name", [*WHOLE_EXPERTS, "codes", "quantization"])
def test_ranks_with_whole_experts_give_the_same_tokens(served: dict[str, Served], name: str) -> None:
    served[f"whole {name}"].check()


@pytest.mark.parametrize("code", QUANTIZED)
def test_ranks_make_the_codes_of_one_rank(served: dict[str, Served], code: str) -> None:
    served[f"quantization {code}"].check()
    for answer in served[f"quantization {code}"].answers:
        assert len(answer.packed) == 4 * WIDE.num_hidden_layers + 3 * len(WIDE.mlp_only_layers)


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_change_the_parts_of_layers(served: dict[str, Served], name: str) -> None:
    served[f"adapter {name}"].check()


class Half(TensorParallelGroup):
    """Of two ranks, of which the other one is not there: nothing is exchanged."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank


def split_of(config: PreTrainedConfig, rank: int = 0, expert_parallel_size: int = 1) -> NetworkSplit:
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(config)
    return NetworkSplit.of(outline, Half(rank), expert_parallel_size)


@pytest.mark.parametrize("name", list(PLANS))
def test_ranks_share_the_weights(name: str) -> None:
    """Each has half of what the plan splits, and all of the rest."""
    whole = AutoModelForCausalLM.from_config(PLANS[name])
    sizes = {each: values.shape for each, values in whole.named_parameters()}
    halves = []
    for rank in (0, 1):
        network = AutoModelForCausalLM.from_config(PLANS[name])
        split_of(PLANS[name], rank).cut(network)
        halves.append({each: values.shape for each, values in network.named_parameters()})
    first, second = halves
    assert {each: shape for each, shape in first.items() if each in second} == second
    for each, shape in first.items():
        unequal = [(own, of_all) for own, of_all in zip(shape, sizes[each], strict=True) if own != of_all]
        assert unequal in ([], [(-(-of_all // 2), of_all) for _, of_all in unequal[:1]])
    assert sum(map(math.prod, first.values())) < 0.75 * sum(map(math.prod, sizes.values()))


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "gpt_oss"])
def test_ranks_divide_whole_experts(name: str) -> None:
    """With their biases, whether weights are transposed or gate and up take turns."""
    whole = AutoModelForCausalLM.from_config(CONFIGS[name])
    halves = []
    for rank in (0, 1):
        network = copy.deepcopy(whole)
        split_of(CONFIGS[name], rank, 2).cut(network)
        halves.append(dict(network.named_parameters()))
    parameters = {each: values for each, values in whole.named_parameters() if ".experts." in each}
    assert parameters
    for each, values in parameters.items():
        assert torch.equal(torch.cat([half[each] for half in halves]), values)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (CONFIGS["nemotron"], "it has no tp_plan in transformers 5.17"),
        (CONFIGS["llama4_text"], "its tp_plan has styles that this engine does not know: packed_rowwise"),
        (
            make_config("apertus", num_attention_heads=6, num_key_value_heads=3),
            "2 ranks do not divide its num_key_value_heads (3)",
        ),
        (make_config("gemma3n_text"), "its MLPs keep the largest of all their features, which its tp_plan splits"),
    ],
)
def test_a_configuration_that_is_not_split_is_refused(tmp_path: Path, config: PreTrainedConfig, reason: str) -> None:
    folder = config_alone(tmp_path, config)
    sentence = refusal(folder, model_impl="transformers", tensor_parallel_size=2)
    assert sentence.endswith(f"(model_impl is transformers): {reason}; set tensor_parallel_size to 1")


def config_alone(folder: Path, config: PreTrainedConfig) -> Path:
    """A checkpoint without weights."""
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            make_config("apertus", intermediate_size=97),
            "tensor_parallel_size 2 does not divide the 97 outputs of model.layers.0.mlp.up_proj",
        ),
        (
            make_config("mixtral", intermediate_size=33),
            "tensor_parallel_size 2 does not divide the 33 features between the products of model.layers.0.mlp.experts",
        ),
    ],
)
def test_sizes_that_ranks_do_not_divide_are_refused(config: PreTrainedConfig, reason: str) -> None:
    with pytest.raises(NotSplit, match=f"^{reason}$"):
        split_of(config)


@pytest.mark.parametrize(
    ("config", "expert_parallel_size", "reason"),
    [
        (
            make_config("mixtral", num_local_experts=5),
            2,
            "moe_expert_parallel_size 2 does not divide the 5 experts of model.layers.0.mlp.experts",
        ),
        (
            make_config("aria_text", moe_num_experts=4),
            2,
            "moe_expert_parallel_size is 2, but it has no experts that this engine computes; set "
            "moe_expert_parallel_size to 1",
        ),
        (
            CONFIGS["gpt_oss"],
            1,
            "of model.layers.0.mlp.experts gate and up take turns, or weights are transposed, and ranks have whole "
            "experts of such alone (moe_expert_parallel_size 2)",
        ),
    ],
)
def test_experts_that_ranks_do_not_divide_are_refused(
    config: PreTrainedConfig, expert_parallel_size: int, reason: str
) -> None:
    with pytest.raises(NotSplit) as caught:
        split_of(config, expert_parallel_size=expert_parallel_size)
    assert str(caught.value) == reason
