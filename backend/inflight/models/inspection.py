"""What a network of transformers asks of attention, found by running it once, and whether ours gives it that.

A network that attends in a way that the kernels cannot compute is refused here with the reason, after its weights are
read and before anything is served. Knows no architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from inflight.layers.attention import AttentionMetadata, CacheSpec, LayerCache
from inflight.models.transformers_decoder import PAGED_ATTENTION, TransformersDecoder

INSPECTED_ATTENTION = "inflight-inspection"
LENGTHS = (7, 5)
"""Tokens of the two sequences that are tried."""
BLOCK_SIZE = 4
TOLERANCE = {torch.float32: 1e-2}
HALF_TOLERANCE = 0.1
"""Of the error of a token's logits to their norm; the middle one of all tokens counts. Half precision: another order of
additions gives some percents in a deep network. A mask, a cap or a state that is left out gives some tenths."""

REASONS = {"softcap": "caps its scores", "s_aux": "has sinks", "sinks": "has sinks"}
"""Arguments that change what attention computes, in words. Any other that is not known is named as it is."""
BIDIRECTIONAL = "its attention sees the tokens that follow"
KNOWN = frozenset({"dropout", "is_causal", "position_ids", "use_cache"})
"""Arguments that are looked at, or that change nothing here. So do those whose names begin with `output_`."""


class Unfit(Exception):
    """Why a network cannot be served."""


@dataclass(frozen=True, slots=True)
class Findings:
    backbone: str
    """Dotted name of the part that makes hidden states."""
    cache_specs: tuple[CacheSpec, ...]


@dataclass(slots=True)
class _Inspection:
    max_seq_len: int
    specs: dict[int, CacheSpec] = field(default_factory=dict)
    windows: list[int] = field(default_factory=list)
    """Of the masks, in the order in which they were asked for. A mask is filled with its number in here."""

    def window(self, sliding_window: int | None) -> int:
        """0 where no sequence is long enough for the window to hide a key."""
        return sliding_window if sliding_window and sliding_window < self.max_seq_len else 0

    def window_of_layer(self, layer: int, mask: Tensor | None, sliding_window: int | None) -> int:
        """What the layer's mask hides. Raises Unfit if it is no mask of ours, or the layer itself says otherwise."""
        asked = self.window(sliding_window)
        if mask is None:
            return asked
        number = int(mask.amin())
        if not 0 <= number == int(mask.amax()) < len(self.windows):
            raise Unfit("it makes attention masks of its own")
        if sliding_window is not None and asked != self.windows[number]:
            raise Unfit(f"its layer {layer} has a mask with a window of {self.windows[number]} and asks for {asked}")
        return self.windows[number]


_INSPECTION: ContextVar[_Inspection] = ContextVar("inspection")


@torch.inference_mode()
def inspect(network: Any, max_seq_len: int, device: torch.device) -> Findings:
    """Run `network` once without computing attention. Raises Unfit."""
    inspection = _Inspection(max_seq_len)
    network.set_attn_implementation(INSPECTED_ATTENTION)
    token = _INSPECTION.set(inspection)
    try:
        with _first_part_called(network) as names:
            network(input_ids=_token_ids(network, LENGTHS[0], device), use_cache=False)
    finally:
        _INSPECTION.reset(token)
    num_layers = network.config.num_hidden_layers
    missing = sorted(set(range(num_layers)) - set(inspection.specs))
    if missing:
        layers = "its layers" if len(missing) == num_layers else f"its layers {', '.join(map(str, missing))}"
        raise Unfit(f"{layers} do not attend through transformers' attention interface")
    if len(inspection.specs) > num_layers:
        raise Unfit(f"it has {num_layers} layers, of which {len(inspection.specs)} attend")
    return Findings(names[0], tuple(inspection.specs[layer] for layer in range(num_layers)))


@contextmanager
def _first_part_called(network: nn.Module) -> Iterator[list[str]]:
    """Names of parts of `network` that are networks themselves, in the order in which they are called."""
    names: list[str] = []
    hooks = [
        part.register_forward_pre_hook(lambda part, arguments, name=name: names.append(name))
        for name, part in network.named_modules()
        if name and isinstance(part, PreTrainedModel)
    ]
    try:
        yield names
    finally:
        for hook in hooks:
            hook.remove()


def _token_ids(network: Any, length: int, device: torch.device) -> Tensor:
    return torch.tensor([[(17 + 31 * place) % network.config.vocab_size for place in range(length)]], device=device)


def _inspected_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Zeros, and a note of what the layer asks for."""
    inspection = _INSPECTION.get()
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise Unfit(f"its {type(module).__name__} does not know which layer it is in")
    if layer in inspection.specs:
        raise Unfit(f"its layer {layer} attends more than once")
    _refuse_other_attention(module, query, key, value, arguments)
    inspection.specs[layer] = CacheSpec(
        num_kv_heads=key.shape[1],
        head_dim=key.shape[-1],
        dtype=key.dtype,
        sliding_window=inspection.window_of_layer(layer, attention_mask, sliding_window),
    )
    return query.new_zeros(query.transpose(1, 2).shape), None


def _refuse_other_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, arguments: Mapping[str, Any]
) -> None:
    if not arguments.get("is_causal", getattr(module, "is_causal", True)):
        raise Unfit(BIDIRECTIONAL)
    if query.shape[-1] != key.shape[-1] or value.shape != key.shape:
        raise Unfit(f"its keys have {key.shape[-1]} elements a head and its values {value.shape[-1]}")
    if query.shape[1] % key.shape[1]:
        raise Unfit(f"its {query.shape[1]} query heads do not share {key.shape[1]} key heads evenly")
    if not query.dtype == key.dtype == value.dtype:
        raise Unfit(f"its queries, keys and values are {query.dtype}, {key.dtype} and {value.dtype}")
    unknown = sorted(
        name
        for name, given in arguments.items()
        if given is not None and name not in KNOWN and not name.startswith("output_")
    )
    if unknown:
        reasons = [REASONS[name] for name in unknown if name in REASONS]
        what = reasons[0] if reasons else f"takes {', '.join(unknown)}"
        raise Unfit(f"its attention {what}, which the kernels do not compute")


def _inspected_mask(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Tensor], **ignored: Any
) -> Tensor:
    """Instead of a mask a tensor of its shape that says which one it is, for the layers that are given it."""
    inspection = _INSPECTION.get()
    inspection.windows.append(inspection.window(_window_of(mask_function, inspection.max_seq_len)))
    return torch.full((batch_size, 1, q_length, kv_length), len(inspection.windows) - 1)


def _window_of(mask_function: Callable[..., Tensor], max_seq_len: int) -> int:
    """How many keys the last token sees, if all see as many where there are so many. Raises Unfit otherwise.

    `mask_function` (batch, head, query, key) says what is visible; it is asked for queries around powers of two.
    """
    last = max_seq_len - 1
    around = {power + offset for power in (2**exponent for exponent in range(31)) for offset in (-1, 0, 1)}
    queries_Q1 = torch.tensor(sorted({query for query in around if query < last} | {last}))[:, None]
    keys_S = torch.arange(max_seq_len)[None, :]
    zero = torch.tensor(0)
    visible_QS = mask_function(zero, zero, queries_Q1, keys_S)
    if bool((visible_QS & (keys_S > queries_Q1)).any()):
        raise Unfit(BIDIRECTIONAL)
    window = int(visible_QS[-1].sum())
    if not torch.equal(visible_QS, (keys_S <= queries_Q1) & (keys_S > queries_Q1 - window)):
        raise Unfit(
            f"its attention mask is neither causal nor a sliding window for {max_seq_len} positions "
            "(it may be for fewer: key max_seq_len)"
        )
    return window


AttentionInterface.register(INSPECTED_ATTENTION, _inspected_attention)
AttentionMaskInterface.register(INSPECTED_ATTENTION, _inspected_mask)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Positions [start, end) of one of the tried sequences."""

    sequence: int
    start: int
    end: int


@torch.inference_mode()
def check_tokens(network: Any, decoder: TransformersDecoder, max_seq_len: int, device: torch.device) -> None:
    """Two short sequences, in chunks and side by side, against the class's own attention. Raises Unfit.

    So whatever a network remembers elsewhere than in the caches, or takes from its place in the row, shows.
    """
    first, second = (min(length, max_seq_len) for length in LENGTHS)
    sequences = [_token_ids(network, length, device) for length in (first, second)]
    network.set_attn_implementation("eager")
    expected = [network(input_ids=ids, use_cache=False).logits[0].float() for ids in sequences]
    network.set_attn_implementation(PAGED_ATTENTION)
    blocks = -(-LENGTHS[0] // BLOCK_SIZE)
    caches = [_cache(spec, blocks * len(sequences), device) for spec in decoder.cache_specs]
    table = torch.arange(blocks * len(sequences), dtype=torch.int32, device=device).view(len(sequences), blocks)
    errors: list[Tensor] = []
    for decodes, prefills in (
        ([], [_Chunk(0, 0, first // 2), _Chunk(1, 0, second - 1)]),
        ([_Chunk(1, second - 1, second)], [_Chunk(0, first // 2, first)]),
    ):
        chunks = [*decodes, *prefills]
        token_ids_T = torch.cat([sequences[chunk.sequence][0, chunk.start : chunk.end] for chunk in chunks])
        hidden_TD = decoder.forward(token_ids_T, caches, _metadata(decodes, prefills, table))
        logits_TV = decoder.logits(hidden_TD).float()
        expected_TV = torch.cat([expected[chunk.sequence][chunk.start : chunk.end] for chunk in chunks])
        if logits_TV.shape != expected_TV.shape:
            raise Unfit(f"its head gives logits of shape {tuple(logits_TV.shape)} for {len(expected_TV)} tokens")
        errors.append((logits_TV - expected_TV).norm(dim=1) / expected_TV.norm(dim=1))
    error = float(torch.cat(errors).median())
    if not error < TOLERANCE.get(decoder.cache_specs[0].dtype, HALF_TOLERANCE):
        raise Unfit(f"with paged attention its logits are off by {error:.0%}: it remembers or mixes elsewhere too")


def _cache(spec: CacheSpec, num_blocks: int, device: torch.device) -> LayerCache:
    size = (num_blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    return LayerCache(
        keys=torch.zeros(size, dtype=spec.dtype, device=device),
        values=torch.zeros(size, dtype=spec.dtype, device=device),
    )


def _metadata(decodes: list[_Chunk], prefills: list[_Chunk], block_table: Tensor) -> AttentionMetadata:
    def ints(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=block_table.device)

    chunks = [*decodes, *prefills]
    positions = [(chunk.sequence, place) for chunk in chunks for place in range(chunk.start, chunk.end)]
    # A sequence's blocks lie one behind the other.
    slots = [sequence * block_table.shape[1] * BLOCK_SIZE + place for sequence, place in positions]
    counts = [chunk.end - chunk.start for chunk in prefills]
    return AttentionMetadata(
        positions_T=ints([place for _, place in positions], torch.int64),
        slot_mapping_T=ints(slots, torch.int64),
        num_decodes=len(decodes),
        decode_block_table=block_table[[chunk.sequence for chunk in decodes]],
        decode_seq_lens_N=ints([chunk.end for chunk in decodes]),
        num_prefills=len(prefills),
        prefill_block_table=block_table[[chunk.sequence for chunk in prefills]],
        prefill_seq_lens_P=ints([chunk.end for chunk in prefills]),
        prefill_start_loc=ints([sum(counts[:place]) for place in range(len(counts) + 1)]),
        max_prefill_len=max(counts),
    )
