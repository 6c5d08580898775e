"""A decoder and its cache, run on hand-made steps, for tests that compare compiled layers with torch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from tiny_checkpoints import TinyCheckpoint
from torch import Tensor

from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.layers.attention import AttentionMetadata
from inflight.layers.gated_delta_net import RECURRENCE
from inflight.layers.given_embeddings import GivenEmbeddings
from inflight.layers.mamba import STATE_SPACE
from inflight.layers.state import CONVOLUTION
from inflight.models import network
from inflight.models.adapter_places import AdapterPlaces
from inflight.runtime import loading
from inflight.runtime.state_store import StateStore
from inflight_kernels.cpu import (
    Instruction,
    Instructions,
    Program,
    Variant,
    instructions,
    unsupported_reason,
    variants,
    variants_here,
)
from inflight_kernels.cpu.structures import NativeProgram
from inflight_kernels.kv_cache.step_blocks import StepBlocks
from inflight_kernels.recurrent.step_sequences import StepSequences

BLOCK_SIZE = 4
CACHED = ("keys", "values", "latents", CONVOLUTION, RECURRENCE, STATE_SPACE)
"""What layers keep of tokens, and of sequences."""

needs_compiler = pytest.mark.skipif(bool(unsupported_reason()), reason=f"cannot compile here: {unsupported_reason()}")
HAS_AMX = variants.AMX in variants_here()
INSTRUCTIONS = [
    pytest.param(
        instruction,
        marks=pytest.mark.skipif(
            not instruction.needs <= variants.processor_flags(), reason=f"this processor has no {instruction.value}"
        ),
    )
    for instruction in Instruction
]
"""That multiply bfloat16, to force each of them."""
IN_ORDER_OF_FMA = [
    (dtype, variant, instruction)
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for variant in variants_here()
    if variant is not variants.AVX2_VNNI
    and (dtype == torch.bfloat16 or not variants.AVX512_BF16.needs <= variant.needs)
    for instruction in (Instruction.FMA, Instruction.VDPBF16PS)
    if instruction is Instruction.FMA or (dtype == torch.bfloat16 and instruction.needs <= variant.needs)
]
"""All that a machine can compute with, but for the order of AMX's sums: of a type, all give the same bits. Libraries
for VNNI and AMX have nothing of their own for floats, but of bfloat16."""


def force(
    monkeypatch: pytest.MonkeyPatch, instruction: Instruction | None = None, variant: Variant | None = None
) -> None:
    """What networks that are compiled from now on multiply bfloat16 with, and are compiled for; None = what is best."""
    for name, forced in (
        (instructions.VARIABLE, instruction and instruction.value),
        (variants.VARIABLE, variant and variant.name),
    ):
        if forced is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, forced)


def force_in(program: Program | None, instruction: Instruction, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program multiplies with from now on."""
    assert program is not None
    # A copy: what ctypes gives of a structure inside another one is that very memory, and could not be put back.
    forced = NativeProgram.from_buffer_copy(program._native)
    forced.instructions = Instructions.only(instruction).to_native()
    monkeypatch.setattr(program, "_native", forced)


def config_of(checkpoint: TinyCheckpoint, cpu_compile: str, **options: str) -> EngineConfig:
    return EngineConfig.from_parameters(
        {
            "gpt_model_path": str(checkpoint.folder),
            "device": "cpu",
            "max_batch_size": "8",
            "max_num_tokens": "256",
            "max_seq_len": "0",
            "tokens_per_block": str(BLOCK_SIZE),
            "max_tokens_in_paged_kv_cache": "4096",
            "cpu_compile": cpu_compile,
            "num_threads": "2",
            **options,
        }
    )


@dataclass(frozen=True)
class Step:
    """Contexts of decoding rows, this step's token included; (computed before, tokens of the chunk) of prefills."""

    decodes: Sequence[int] = ()
    prefills: Sequence[tuple[int, int]] = ()

    @property
    def contexts(self) -> list[int]:
        return [*self.decodes, *(before + count for before, count in self.prefills)]

    def metadata(self, given: GivenEmbeddings | None = None, num_groups: int = 1) -> AttentionMetadata:
        """The step's metadata; block ids are in scrambled order. `num_groups`: of layers with own blocks."""
        counts = [1] * len(self.decodes) + [count for _, count in self.prefills]
        width = -(-max(self.contexts) // BLOCK_SIZE)
        generator = torch.Generator().manual_seed(1)
        table = torch.randperm(len(counts) * width, generator=generator, dtype=torch.int32).view(len(counts), width)
        positions, slots = [], []
        for row, (context, count) in enumerate(zip(self.contexts, counts, strict=True)):
            for place in range(context - count, context):
                positions.append(place)
                slots.append(int(table[row, place // BLOCK_SIZE]) * BLOCK_SIZE + place % BLOCK_SIZE)
        num_decodes, lens = len(self.decodes), torch.tensor(self.contexts, dtype=torch.int32)
        starts = torch.tensor([0, *counts[num_decodes:]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return AttentionMetadata(
            positions_T=torch.tensor(positions),
            blocks=tuple(
                StepBlocks(torch.tensor(slots) + first * BLOCK_SIZE, table + first)
                for first in range(0, num_groups * table.numel(), table.numel())
            ),
            num_decodes=num_decodes,
            decode_rows_N=torch.arange(num_decodes),
            decode_seq_lens_N=lens[:num_decodes],
            num_prefills=len(self.prefills),
            prefill_rows_P=torch.arange(num_decodes, len(counts)),
            prefill_seq_lens_P=lens[num_decodes:],
            prefill_start_loc=starts,
            max_prefill_len=max(counts[num_decodes:], default=0),
            given=given,
            sequences=StepSequences(
                slots_B=torch.arange(len(counts)),
                starts=torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32),
                positions_T=torch.tensor(positions),
            ),
        )


@dataclass
class Network:
    """One decoder and its cache, filled with a context that all of them share."""

    decoder: network.Network
    cache: StateStore
    adapters: AdapterPlaces = field(default_factory=AdapterPlaces)

    @classmethod
    def load(cls, checkpoint: TinyCheckpoint, cpu_compile: str, dtype: str, **options: str) -> Network:
        engine = loading.load_engine(config_of(checkpoint, cpu_compile, dtype=dtype, **options), SingleRank())
        return cls(engine.decoder, engine.store, engine.adapters)

    def fill_cache(self) -> None:
        for number, layer in enumerate(self.cache.states):
            generator = torch.Generator().manual_seed(number)
            for name in filter(layer.__contains__, CACHED):
                layer[name].copy_(torch.randn(layer[name].shape, generator=generator).bfloat16())

    @torch.inference_mode()
    def logits(self, step: Step, given: GivenEmbeddings | None = None, slots: Sequence[int] | None = None) -> Tensor:
        """`slots`: of the adapter of each token, -1 = none."""
        return self.decoder.logits(self.hidden_states(step, given, slots)).float()

    @torch.inference_mode()
    def hidden_states(
        self, step: Step, given: GivenEmbeddings | None = None, slots: Sequence[int] | None = None
    ) -> Tensor:
        """What the head gets, or the next pipeline stage."""
        self.fill_cache()
        metadata = step.metadata(given, len(self.cache.windows))
        if slots is not None:
            metadata = replace(metadata, adapters_T=torch.tensor(slots, dtype=torch.int32))
        return self.decoder.forward(self._token_ids(metadata), self.cache.states, metadata)

    @torch.inference_mode()
    def layers(self, step: Step, wanted: frozenset[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """The same, and outputs of layers."""
        assert isinstance(self.decoder, network.LayeredNetwork)
        self.fill_cache()
        metadata = step.metadata(num_groups=len(self.cache.windows))
        return self.decoder.forward_layers(self._token_ids(metadata), self.cache.states, metadata, wanted)

    @staticmethod
    def _token_ids(metadata: AttentionMetadata) -> Tensor:
        return torch.randint(0, 203, metadata.positions_T.shape, generator=torch.Generator().manual_seed(2))
