"""A ModelRunner on a fake device, and one step of it as a Trace."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from fake_cuda.device import CUDA, FakeDevice
from fake_cuda.networks import LLAMA_8B, FakeRanks, make_network
from fake_cuda.trace import Trace
from inflight.distributed.parallel_groups import ParallelGroups
from inflight.distributed.rank_group import SingleRank
from inflight.engine_description import EngineDescription
from inflight.logits_post_processor import LogitsPostProcessorConfig
from inflight.lora import AdapterModule, AdapterOrders, AdapterPart
from inflight.models.adapter_places import AdapterPlaces
from inflight.output_config import SCORES
from inflight.request_limits import RequestLimits
from inflight.runtime.adapters.adapter_store import AdapterStore
from inflight.runtime.guided.grammars import GrammarState
from inflight.runtime.guided.outputs import Mask
from inflight.runtime.host_units import HostUnits
from inflight.runtime.model_runner import ModelRunner
from inflight.runtime.state_store import StateShape, StateStore
from inflight.scheduler_output import HIDDEN_STATES, SchedulerOutput, StepOutput, layer_output
from inflight_kernels.common.last_program import counters

BLOCK_SIZE = 16
MAX_SEQ_LEN = 4096
NUM_BLOCKS = 4096
NUM_SNAPSHOTS = 8
"""Of networks that keep states of sequences."""
ADAPTER_UID = 1
POST_PROCESSOR = "scaled"


class AnyText:
    """Grammars that allow everything. Stands for Grammars, Grammar and Output in one."""

    state = GrammarState.READY

    def __init__(self, vocab_size: int) -> None:
        self._bits = b"\xff" * (-(-vocab_size // 32) * 4)

    def find(self, *_: Any) -> AnyText:
        return self

    def start(self, *_: Any) -> AnyText:
        return self

    def wait(self, count: int) -> list[Mask]:
        return [Mask(self._bits)] * count

    def __getattr__(self, name: str) -> Any:
        """begin, begin_step, advance, submit, close"""
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_: None


class FakeEngine:
    def __init__(
        self,
        device: FakeDevice,
        folder: Path,
        values: dict[str, Any] = LLAMA_8B,
        *,
        rank: int | None = None,
        ranks: FakeRanks | None = None,
        max_batch_size: int = 16,
        block_size: int = BLOCK_SIZE,
        with_options: bool = False,
        with_draft_model: bool = False,
        deterministic: bool = False,
        kv_dtype: torch.dtype | None = None,
        warms_up: bool = False,
        records_graphs: bool = False,
    ) -> None:
        """`rank`: of two, which `ranks` are; None = alone. `with_options`: it serves adapters, post-processors and
        blocks on the host. `kv_dtype`: of the KV cache; None = that of the activations."""
        sizes = {"rank": rank, "max_seq_len": MAX_SEQ_LEN, "deterministic": deterministic, "kv_dtype": kv_dtype}
        network = make_network(folder, values, takes_adapters=with_options, **sizes)
        networks, scores = [network], network.config.family.scores
        if with_draft_model:
            networks.append(make_network(folder, {**values, "num_hidden_layers": 1}, **sizes))
        specs = tuple(spec for each in networks for spec in each.decoder.state_specs)
        shape = StateShape(specs=specs, block_size=block_size)
        num_snapshots = NUM_SNAPSHOTS if shape.slot_bytes else None
        num_slots = 0 if num_snapshots is None else max_batch_size + 1 + num_snapshots
        cache = StateStore(shape, NUM_BLOCKS, CUDA, num_slots)
        processors = LogitsPostProcessorConfig(processor_map={POST_PROCESSOR: _halve} if with_options else {})
        adapters: AdapterStore | None = None
        if with_options:
            network.adapters.allocate(2, 16, torch.bfloat16, CUDA)
            adapters = AdapterStore(network.adapters, CUDA)
            adapters.follow(AdapterOrders(parts=[AdapterPart(uid=ADAPTER_UID, modules=_adapter(network.adapters))]))
        self.device = device
        self.runner = ModelRunner(
            decoder=network.decoder,
            store=cache,
            block_size=block_size,
            limits=RequestLimits(
                vocab_size=network.config.vocab_size,
                max_seq_len=MAX_SEQ_LEN,
                max_input_len=MAX_SEQ_LEN - 1,
                kv_cache_tokens=NUM_BLOCKS * block_size,
                max_batch_size=max_batch_size,
                hidden_size=network.config.hidden_size,
                embedding_size=0 if network.config.pooled else network.config.hidden_size,
                model_outputs=[HIDDEN_STATES, layer_output(0), *([SCORES] if scores else [])],
                pooled=network.config.pooled,
                has_token_types=network.config.has_token_types,
                num_adapter_slots=network.adapters.num_slots,
                logits_post_processors=processors.names,
            ),
            max_batch_size=max_batch_size,
            max_num_tokens=8192,
            groups=ParallelGroups(tensor=network.group),
            device=CUDA,
            description=EngineDescription(device="cuda"),
            thread=ThreadPoolExecutor(1),
            rank_group=SingleRank() if ranks is None or rank is None else ranks.rank(rank),
            grammars=None if rank else AnyText(network.config.vocab_size),  # type: ignore[arg-type]
            post_processors=processors,
            host_blocks=HostUnits(cache.block_tensors, 4, CUDA) if with_options else None,
            adapters=adapters,
            num_snapshots=num_snapshots,
            draft_network=networks[1].decoder if with_draft_model else None,
            records_graphs=records_graphs,
            scores_of=None if scores is None else scores.pooling,
        )
        counters(1, CUDA)  # made once for a stream, by the first kernel that needs them
        if warms_up:
            self.runner.warmup()

    def step(self, scheduled: SchedulerOutput) -> tuple[Trace, StepOutput]:
        """Both halves of a step, in which nothing may wait, and then its results."""
        with self.device.tracing() as trace:
            handle = self.runner.forward(scheduled)
            self.runner.sample(handle)
        return trace, self.runner.collect(handle)


def _halve(request_id: int, logits: Any, token_ids: Any, stream: int, client_id: Any) -> None:
    logits *= 0.5


def _adapter(places: AdapterPlaces) -> list[AdapterModule]:
    """Rank 8, for every layer."""
    return [
        AdapterModule(
            name=name,
            rank=8,
            scale=1.0,
            dtype="float16",
            a=bytes(2 * 8 * place.num_inputs),
            b=bytes(2 * 8 * place.num_outputs),
        )
        for name, place in places.places.items()
    ]
