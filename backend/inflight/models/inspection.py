"""Finds out, by running a network of transformers, what attention it needs and whether our kernels can compute it.

A network with attention that the kernels cannot compute is refused here with the reason, after its weights are read and
before any request is served. Knows no architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from inflight.layers.attention import KeyValueSpec

INSPECTED_ATTENTION = "inflight-inspection"
NUM_TOKENS = 7
"""Tokens in the test input. A number that rarely occurs as another size in a network, so that a dimension of this size
is the number of tokens."""
BIDIRECTIONAL = "its attention is not causal: tokens attend to later ones"
COMPUTED = frozenset({"softcap", "s_aux"})
"""Arguments that change what attention computes, and that the kernels know: see `paged_attention`."""
KNOWN = COMPUTED | {"dropout", "is_causal", "position_ids", "use_cache"}
"""Others are checked separately or have no effect here, like those whose names begin with `output_`."""


class Unfit(Exception):
    """The network cannot be served; the message is a clause about it ("its attention ...", "it has ...")."""


@dataclass(frozen=True, slots=True)
class Findings:
    backbone: str
    """Dotted name of the submodule that computes hidden states."""
    specs: tuple[KeyValueSpec, ...]


@dataclass(slots=True)
class _Inspection:
    max_seq_len: int
    specs: dict[int, KeyValueSpec] = field(default_factory=dict)
    modules: list[nn.Module] = field(default_factory=list)
    """Attention modules, in the order of their calls."""
    windows: list[int | Unfit] = field(default_factory=list)
    """Sliding windows of the masks, in the order in which the masks were created, or why one is no such mask, which
    counts if a layer takes it. Each mask tensor is filled with its index in this list."""

    def window(self, sliding_window: int | None) -> int:
        """The window, or 0 if it is so long that it never hides a key."""
        return sliding_window if sliding_window and sliding_window < self.max_seq_len else 0

    def window_of_layer(self, layer: int, mask: Tensor | None, sliding_window: int | None) -> int:
        """The window of the layer's mask. Raises Unfit if the mask is not ours, or if the layer has another window."""
        asked = self.window(sliding_window)
        if mask is None:
            return asked
        number = int(mask.amin())
        if not 0 <= number == int(mask.amax()) < len(self.windows):
            raise Unfit("it computes attention masks itself")
        window = self.windows[number]
        if isinstance(window, Unfit):
            raise window
        if sliding_window is not None and asked != window:
            raise Unfit(f"its layer {layer} has a mask with a window of {window} and asks for {asked}")
        return window


_INSPECTION: ContextVar[_Inspection] = ContextVar("inspection")


@torch.inference_mode()
def inspect_network(network: Any, max_seq_len: int, device: torch.device) -> Findings:
    """Run `network` with an attention that only records what each layer needs. Raises Unfit."""
    inspection = _Inspection(max_seq_len)
    network.set_attn_implementation(INSPECTED_ATTENTION)
    token = _INSPECTION.set(inspection)
    token_ids = try_token_ids(network, NUM_TOKENS, device)
    positions = torch.arange(NUM_TOKENS, device=device)[None]
    try:
        with first_part_called(network) as names:
            network(input_ids=token_ids, position_ids=positions, use_cache=False)
        attending = inspection.modules
        inspection.specs, inspection.windows, inspection.modules = {}, [], []
        with _counting_refused(attending):
            network(input_ids=token_ids, position_ids=positions, use_cache=False)
    finally:
        _INSPECTION.reset(token)
    if not names:
        raise Unfit("it has no submodule that computes hidden states")
    return Findings(
        names[0], _specs_of_layers(inspection.specs, network.config.get_text_config(decoder=True).num_hidden_layers)
    )


def _specs_of_layers(specs: Mapping[int, KeyValueSpec], num_layers: int) -> tuple[KeyValueSpec, ...]:
    missing = sorted(set(range(num_layers)) - set(specs))
    if missing:
        layers = "its layers" if len(missing) == num_layers else f"its layers {', '.join(map(str, missing))}"
        raise Unfit(f"{layers} do not attend through transformers' attention interface")
    if len(specs) > num_layers:
        raise Unfit(f"it has {num_layers} layers, but {len(specs)} attend")
    return tuple(specs[layer] for layer in range(num_layers))


@contextmanager
def first_part_called(network: nn.Module) -> Iterator[list[str]]:
    """Names of submodules of `network` that are PreTrainedModels, in the order in which they are called."""
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


class _CountingRefused(TorchFunctionMode):
    """Raises Unfit if an attention layer numbers the tokens of its input with torch.arange.

    Such a layer takes a token's index in the row for its position. That is wrong here, because a row is a concatenation
    of sequences.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_attending = False

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(keywords or {}))
        if self.is_attending and function is torch.arange and result.numel() == NUM_TOKENS:
            raise Unfit("its attention numbers the tokens of its input itself instead of using the given positions")
        return result


@contextmanager
def _counting_refused(attending: list[nn.Module]) -> Iterator[None]:
    mode = _CountingRefused()

    def enter(*ignored: Any) -> None:
        mode.is_attending = True

    def leave(*ignored: Any) -> None:
        mode.is_attending = False

    hooks = [module.register_forward_pre_hook(enter) for module in attending]
    hooks += [module.register_forward_hook(leave) for module in attending]
    try:
        with mode:
            yield
    finally:
        for hook in hooks:
            hook.remove()


def try_token_ids(network: Any, length: int, device: torch.device) -> Tensor:
    """Test input, int64 (1, length); all ids differ if the vocabulary is large enough."""
    vocab_size = network.config.get_text_config(decoder=True).vocab_size
    return torch.tensor([[(17 + 31 * place) % vocab_size for place in range(length)]], device=device)


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
    """Attention that returns zeros and records what the layer needs."""
    inspection = _INSPECTION.get()
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise Unfit(f"its {type(module).__name__} does not know which layer it is in")
    if layer in inspection.specs:
        raise Unfit(f"its layer {layer} attends more than once")
    if attention_mask is None and not arguments.get("is_causal", getattr(module, "is_causal", True)):
        raise Unfit(BIDIRECTIONAL)
    _refuse_other_attention(query, key, value, arguments)
    inspection.modules.append(module)
    inspection.specs[layer] = KeyValueSpec(
        num_kv_heads=key.shape[1],
        head_dim=max(key.shape[-1], value.shape[-1]),
        dtype=key.dtype,
        sliding_window=inspection.window_of_layer(layer, attention_mask, sliding_window),
    )
    attended_shape = (*query.transpose(1, 2).shape[:-1], value.shape[-1])
    return query.new_zeros(attended_shape), None


def _refuse_other_attention(query: Tensor, key: Tensor, value: Tensor, arguments: Mapping[str, Any]) -> None:
    if query.shape[-1] != key.shape[-1] or value.shape[:-1] != key.shape[:-1]:
        raise Unfit(f"its queries, keys and values are {list(query.shape)}, {list(key.shape)} and {list(value.shape)}")
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
        raise Unfit(f"its attention takes {', '.join(unknown)}, which the kernels do not compute")


def _inspected_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    device: torch.device,
    **ignored: Any,
) -> Tensor:
    """A tensor in place of the mask, with the mask's shape and filled with its index in `windows`."""
    inspection = _INSPECTION.get()
    try:
        inspection.windows.append(inspection.window(_window_of(mask_function, inspection.max_seq_len, device)))
    except Unfit as reason:
        inspection.windows.append(reason)
    return torch.full((batch_size, 1, q_length, kv_length), len(inspection.windows) - 1, device=device)


def _window_of(mask_function: Callable[..., Tensor], max_seq_len: int, device: torch.device) -> int:
    """The window of a causal or sliding-window mask: the number of keys that the last token attends to.

    Raises Unfit for any other mask. `mask_function` (batch, head, query, key) says which keys are visible; it is
    evaluated for the last query and for queries around powers of two.
    """
    last = max_seq_len - 1
    around = {power + offset for power in (2**exponent for exponent in range(31)) for offset in (-1, 0, 1)}
    keys_S = torch.arange(max_seq_len, device=device)
    zero = torch.tensor(0, device=device)
    window = 0
    for place in sorted({last} | {place for place in around if 0 <= place < last}, reverse=True):
        query = torch.tensor(place, device=device)
        visible_S = mask_function(zero, zero, query, keys_S).expand(max_seq_len)
        if bool((visible_S & (keys_S > query)).any()):
            raise Unfit(BIDIRECTIONAL)
        if place == last:
            window = int(visible_S.sum())
        if not torch.equal(visible_S, (keys_S <= query) & (keys_S > query - window)):
            raise Unfit(
                f"its attention mask is neither causal nor a sliding window for {max_seq_len} positions "
                "(it may be for fewer: key max_seq_len)"
            )
    return window


AttentionInterface.register(INSPECTED_ATTENTION, _inspected_attention)
AttentionMaskInterface.register(INSPECTED_ATTENTION, _inspected_mask)
