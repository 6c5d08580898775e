"""Requests with low-rank adapters get the tokens of transformers' generate with merged weights: alone, mixed, chunked,
paused, with shared prefixes; by name and by number; on one rank in this process.

Run: pytest ci/unit/executor/test_lora.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_adapters import RandomAdapter
from tiny_checkpoints import TinyCheckpoint, make_checkpoint

from inflight.config import EngineConfig, SchedulerPolicy
from inflight.errors import ConfigurationError, InvalidRequest
from inflight.executor.generation_executor import GenerationExecutor
from inflight.executor.in_process import InProcessExecutor
from inflight.lora import LoraConfig, LoRARequest
from inflight.request import Request
from inflight.result import Response
from inflight.sampling_config import SamplingConfig

pytestmark = pytest.mark.slow

NUM_TOKENS = 12
FAMILIES = [
    *("qwen3", "phi3", "granite", "llama-one-kv-head", "qwen3-moe", "gemma3", "gemma4", "gemma4-experts", "cohere2"),
    "olmo2",
]


class Case:
    """A checkpoint, three adapters of it in a folder, and what each makes of some prompts."""

    def __init__(self, folder: Path, name: str) -> None:
        self.checkpoint: TinyCheckpoint = make_checkpoint(folder / "checkpoint", name)
        self.lora_dir = folder / "adapters"
        self.adapters = {
            "all": RandomAdapter.of(self.checkpoint, 1),
            "some": RandomAdapter.of(
                self.checkpoint, 2, rank=7, use_rslora=True, targets=("v_proj", "down_proj", "qkv_proj")
            ),
            "wide": RandomAdapter.of(self.checkpoint, 3, rank=24, targets=("o_proj", "up_proj", "gate_up_proj")),
        }
        for name_of, adapter in self.adapters.items():
            adapter.save(self.lora_dir / name_of)
        self.prompts: list[list[int]] = []
        self.expected: dict[str, list[list[int]]] = {}
        lengths = (3, 9, 21)
        pairs = [self.checkpoint.prompt(length, NUM_TOKENS) for length in lengths]
        self.prompts, self.expected[""] = [p for p, _ in pairs], [t for _, t in pairs]
        for name_of, adapter in self.adapters.items():
            with adapter.merged(self.checkpoint) as merged:
                merged = replace(merged, margin=0.0)
                self.expected[name_of] = [merged.expected(prompt, NUM_TOKENS) for prompt in self.prompts]

    def config(self, **options: Any) -> EngineConfig:
        defaults: dict[str, Any] = {
            "device": "cpu",
            "model_impl": "native",
            "cpu_compile": "false",
            "max_batch_size": 8,
            "max_num_tokens": 64,
            "max_seq_len": 64,
            "tokens_per_block": 4,
            "max_tokens_in_paged_kv_cache": 1024,
            "max_loras": 3,
            "lora_cache_max_adapter_size": 24,
            "lora_dir": str(self.lora_dir),
        }
        return EngineConfig(gpt_model_path=str(self.checkpoint.folder), **{**defaults, **options})


def by_name(name: str) -> dict[str, Any]:
    return {"lora_request": LoRARequest(name)} if name else {}


class Asked:
    """An executor in this process, and the requests that were sent to it."""

    def __init__(self, case: Case, **options: Any) -> None:
        self.case = case
        self.executor = InProcessExecutor(case.config(**options))
        self.executor.start()

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *_: object) -> None:
        self.executor.shutdown()

    def send(self, prompt: list[int], max_tokens: int = NUM_TOKENS, **options: Any) -> int:
        return self.executor.enqueue_request(Request(input_token_ids=prompt, max_tokens=max_tokens, **options))

    def final(self, request_id: int) -> Response:
        (response,) = self.executor.await_responses(request_id, timeout=150)
        return response

    def tokens(self, request_id: int) -> list[int]:
        response = self.final(request_id)
        assert response.result is not None, response.error_msg
        return response.result.output_token_ids

    def error(self, request_id: int) -> str:
        response = self.final(request_id)
        assert response.error_code == "INVALID_ARGUMENT", response
        return response.error_msg

    def order(self, what: str, **options: Any) -> Response:
        order: Any = what
        request = Request(input_token_ids=[], max_tokens=1, lora_order=order, **options)
        return self.final(self.executor.enqueue_request(request))

    def check(self, names: list[str]) -> None:
        """All prompts with each of these adapters, all in flight at once."""
        sent = [
            (self.send(prompt, **by_name(name)), self.case.expected[name][index])
            for index, prompt in enumerate(self.case.prompts)
            for name in names
        ]
        assert [self.tokens(request_id) for request_id, _ in sent] == [tokens for _, tokens in sent]


@pytest.fixture(scope="module", params=FAMILIES)
def any_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def asked(case: Case) -> Iterator[Asked]:
    with Asked(case) as asked:
        yield asked


def test_adapters_change_the_tokens(any_case: Case) -> None:
    assert len({str(tokens) for tokens in any_case.expected.values()}) == 4


def test_tokens_are_those_of_merged_weights_alone_and_mixed(any_case: Case) -> None:
    with Asked(any_case) as asked:
        for name in ("all", "some", "wide"):
            asked.check([name])
        asked.check(["", "all", "some", "", "wide"])


@pytest.mark.parametrize("cpu_compile", ["auto", "false"])
def test_transformers_code_takes_them_too(tmp_path: Path, cpu_compile: str) -> None:
    case = Case(tmp_path, "gemma3" if cpu_compile == "auto" else "qwen3-moe")
    with Asked(case, model_impl="transformers", cpu_compile=cpu_compile) as asked:
        asked.check(["", "all", "some", "", "wide"])
        numbered = asked.send(case.prompts[1], lora_config=case.adapters["all"].lora_config(5))
        assert asked.tokens(numbered) == case.expected["all"][1]
        head = RandomAdapter.of(case.checkpoint, 4, targets=("lm_head",)).save(case.lora_dir / "head")
        assert "only the linear layers" in asked.error(asked.send([1], lora_request=LoRARequest("head", 8, str(head))))


def test_in_chunks_of_few_tokens(case: Case) -> None:
    with Asked(case, max_num_tokens=8, max_batch_size=5, enable_kv_cache_reuse=False) as asked:
        asked.check(["", "all", "wide"])


def test_after_pauses(case: Case) -> None:
    options = {"batch_scheduler_policy": SchedulerPolicy.MAX_UTILIZATION, "max_tokens_in_paged_kv_cache": 80}
    with Asked(case, request_stats_max_iterations=1000, **options) as asked:
        asked.check(["all", "", "some"])
        stats = [each for step in asked.executor.get_latest_request_stats() for each in step.request_stats]
        assert any(each.paused for each in stats)


def test_more_adapters_than_slots_take_turns(case: Case) -> None:
    with Asked(case, max_loras=1) as asked:
        asked.check(["all", "some", "", "wide", "all"])


def test_prefixes_are_shared_within_an_adapter_only(case: Case) -> None:
    prompt = case.prompts[2]
    with Asked(case) as asked:

        def num_reused(name: str) -> int:
            response = asked.final(asked.send(prompt, **by_name(name)))
            assert response.result is not None and response.result.request_perf_metrics is not None
            assert response.result.output_token_ids == case.expected[name][2]
            return response.result.request_perf_metrics.kv_cache_reused_blocks

        assert [num_reused(name) for name in ("", "all", "some")] == [0, 0, 0]
        assert [num_reused(name) for name in ("all", "", "some")] == [5, 5, 5]


def test_several_sequences_and_beams_use_the_adapter(case: Case, asked: Asked) -> None:
    request_id = asked.send(case.prompts[1], num_return_sequences=2, **by_name("all"))
    results = [r.result for r in [*asked.executor.await_responses(request_id, timeout=150)] if r.result]
    while not results[-1].is_final:
        results += [r.result for r in asked.executor.await_responses(request_id, timeout=150) if r.result]
    assert [result.output_token_ids for result in results] == [case.expected["all"][1]] * 2
    with case.adapters["all"].merged(case.checkpoint) as merged:
        inputs = torch.tensor([case.prompts[1]])
        best = merged.model.generate(inputs, max_new_tokens=NUM_TOKENS, num_beams=3, do_sample=False)[0]
    beams = asked.send(case.prompts[1], sampling_config=SamplingConfig(beam_width=3), **by_name("all"))
    assert asked.tokens(beams) == best[len(case.prompts[1]) :].tolist()


def test_a_number_brings_weights_first_and_needs_none_later(case: Case, asked: Asked) -> None:
    adapter = case.adapters["some"]
    unknown = asked.error(asked.send(case.prompts[0], lora_config=LoraConfig(77)))
    assert unknown.startswith("LoRA task 77 is not loaded: its weights were never sent, or it was evicted")
    first = asked.send(case.prompts[0], lora_config=adapter.lora_config(77))
    later = [asked.send(prompt, lora_config=LoraConfig(77)) for prompt in case.prompts]
    again = asked.send(case.prompts[1], lora_config=adapter.lora_config(77))
    expected = case.expected["some"]
    assert [asked.tokens(id_) for id_ in (first, *later, again)] == [expected[0], *expected, expected[1]]
    others = asked.send(case.prompts[0], lora_config=case.adapters["all"].lora_config(77))
    assert "loaded with other weights" in asked.error(others)


def test_a_path_is_loaded_once_and_its_number_is_a_second_name(case: Case, tmp_path: Path) -> None:
    folder = case.adapters["wide"].save(tmp_path / "elsewhere")
    with Asked(case, lora_dir="") as asked:
        request = LoRARequest("mine", 5, str(folder))
        first = asked.send(case.prompts[1], lora_request=request)
        assert asked.tokens(first) == case.expected["wide"][1]
        by_number = asked.send(case.prompts[2], lora_config=LoraConfig(5))
        assert asked.tokens(by_number) == case.expected["wide"][2]
        assert asked.error(asked.send([1], lora_request=LoRARequest("other"))) == "there is no LoRA adapter other"
        moved = asked.send([1], lora_request=LoRARequest("mine", 5, str(tmp_path)))
        assert "was loaded from another folder" in asked.error(moved)


def test_load_and_unload(case: Case, tmp_path: Path) -> None:
    folder = case.adapters["all"].save(tmp_path / "adapter")
    with Asked(case) as asked:
        mine = LoRARequest("mine", lora_path=str(folder))
        assert not asked.order("load", lora_request=mine).has_error
        assert asked.tokens(asked.send(case.prompts[1], lora_request=LoRARequest("mine"))) == case.expected["all"][1]
        assert not asked.order("unload", lora_request=LoRARequest("mine")).has_error
        assert asked.error(asked.send([1], lora_request=LoRARequest("mine"))) == "there is no LoRA adapter mine"
        assert "no such LoRA adapter" in asked.order("unload", lora_request=LoRARequest("mine")).error_msg
        # The same name may stand for other weights now, which share no prefix with the former ones.
        other = LoRARequest("mine", lora_path=str(case.adapters["some"].save(tmp_path / "other")))
        assert asked.tokens(asked.send(case.prompts[1], lora_request=other)) == case.expected["some"][1]


def test_an_adapter_that_is_not_used_is_evicted_for_another(case: Case) -> None:
    names = ["all", "some", "wide"]
    sizes = [sum(a.numel() + b.numel() for a, b in case.adapters[name].matrices.values()) * 4 for name in names]
    with Asked(case, lora_cache_host_memory_bytes=max(sizes) + 64) as asked:
        first = asked.send(case.prompts[0], lora_config=case.adapters["all"].lora_config(9))
        assert asked.tokens(first) == case.expected["all"][0]
        asked.check(["wide"])
        assert "was evicted" in asked.error(asked.send(case.prompts[0], lora_config=LoraConfig(9)))
        asked.check(names)  # by name they are read again, one after the other


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora_request": LoRARequest("../all")}, "lora_name must be"),
        ({"lora_request": LoRARequest("")}, "lora_name must be"),
        ({"lora_request": LoRARequest("all", lora_ckpt_source="nemo")}, "lora_ckpt_source must be hf"),
        ({"lora_config": LoraConfig(0)}, "lora_task_id must be from 1"),
        ({"lora_request": LoRARequest("all"), "lora_config": LoraConfig(1)}, "two adapters"),
        ({"lora_order": "load"}, "needs an adapter"),
    ],
)
def test_what_names_no_adapter_is_refused_at_once(asked: Asked, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        asked.send([1], **options)


def test_an_engine_without_slots_refuses_adapters(case: Case) -> None:
    with Asked(case, max_loras=0) as asked:
        with pytest.raises(InvalidRequest, match="serves no LoRA adapters"):
            asked.send([1], **by_name("all"))
        asked.check([""])


def test_a_fraction_of_the_memory_says_how_many_run_at_once(case: Case) -> None:
    with Asked(case, max_loras=0, lora_cache_gpu_memory_fraction=0.5) as asked:
        assert asked.executor.limits.num_adapter_slots == 8, "not more than rows"
        asked.check(["all", "some", "wide"])
    with pytest.raises(ConfigurationError, match=r"max_loras 4 takes .* GiB of memory in each rank"):
        Asked(case, max_loras=4, lora_cache_gpu_memory_fraction=1e-12)


def test_the_library_loads_and_unloads(case: Case, tmp_path: Path) -> None:
    mine = LoRARequest("mine", 4, str(case.adapters["wide"].save(tmp_path / "mine")))
    with GenerationExecutor(InProcessExecutor(case.config())) as executor:
        executor.load_lora(mine)
        output = executor.generate(case.prompts[0], max_tokens=NUM_TOKENS, lora_config=LoraConfig(4))
        assert output.token_ids == case.expected["wide"][0]
        executor.unload_lora(LoRARequest("mine"))
        with pytest.raises(InvalidRequest, match="no such LoRA adapter"):
            executor.unload_lora(LoRARequest("mine"))
        with pytest.raises(InvalidRequest, match="there is no LoRA adapter mine"):
            executor.generate(case.prompts[0], max_tokens=1, lora_request=LoRARequest("mine"))
