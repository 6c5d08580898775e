"""Networks that transformers' modelling code computes on several ranks, each a process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from model_driver import Driver, Work
from rank_processes import PipeGroup, run_on_ranks
from transformers_runner import config_of

from inflight.lora import AdapterOrders, AdapterPart
from inflight.models.replaced_linear import ReplacedLinear
from inflight.models.transformers_decoder import TransformersDecoder
from inflight.models.transformers_sequential import SequentialDecoder
from inflight.runtime.model_runner import ModelRunner


@dataclass(frozen=True, kw_only=True)
class Case:
    """A checkpoint, what is asked of it, all at once, and further options of the EngineConfig."""

    folder: Path
    works: Sequence[Work]
    options: dict[str, Any] = field(default_factory=dict)
    adapters: Sequence[AdapterPart] = ()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Of one rank."""

    works: Sequence[Work]
    num_heads: list[int]
    """Of keys, that each layer keeps."""
    packed: list[str]
    """Linear layers whose weights C++ has packed."""


def serve(cases: Sequence[Case], num_ranks: int = 2) -> list[list[Answer]]:
    """Of each rank those of all cases. Starting ranks takes longest, so they serve all in one life."""
    return run_on_ranks(num_ranks, _serve, list(cases))


def _serve(rank_group: PipeGroup, cases: list[Case]) -> list[Answer]:
    torch.set_num_threads(1)
    return [_answer(rank_group, case) for case in cases]


def _answer(rank_group: PipeGroup, case: Case) -> Answer:
    options = {"model_impl": "transformers", "tensor_parallel_size": rank_group.size, **case.options}
    runner = ModelRunner.load(config_of(case.folder, **options), rank_group)
    if case.adapters:
        assert runner.adapters is not None
        runner.adapters.follow(AdapterOrders(parts=list(case.adapters)))
    Driver(runner).run(list(case.works))
    decoder = runner._computation.decoder
    assert isinstance(decoder, TransformersDecoder | SequentialDecoder)
    layers = {name: each for name, each in decoder.backbone.named_modules() if isinstance(each, ReplacedLinear)}
    answer = Answer(
        works=case.works,
        num_heads=[spec.tensors[0].shape[0] for spec in decoder.state_specs],
        packed=[name for name, each in layers.items() if each._weight is None],
    )
    rank_group.barrier()
    runner.close()
    return answer
