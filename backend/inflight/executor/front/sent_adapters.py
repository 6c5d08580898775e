"""Where the adapters came from that a front's requests name, so that every replica and new ranks can load them.

A client sends an adapter's weights, or names its folder, once; later requests give only a number or a name, which dies
with the ranks that have loaded it. Knows no lock and no file.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict

from msgspec import structs

from inflight.lora import LoraConfig, LoRARequest
from inflight.request import Request

Source = LoraConfig | LoRARequest
Key = int | str
"""An adapter's number, or its name."""


class SentAdapters:
    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of all weights that are kept; those not used for the longest time are dropped first."""
        self._max_bytes = max_bytes
        self._sources: OrderedDict[Key, Source] = OrderedDict()
        self._num_bytes = 0
        self._told: defaultdict[int, set[Key]] = defaultdict(set)
        """By replica: adapters whose source its present ranks were told."""

    def note(self, request: Request) -> Source | None:
        """Take in a request that is accepted. Returns the source of the adapter that it names, unless that stands in
        the request, or is not known here: of adapters that the ranks find by themselves, and that other fronts sent."""
        keys = _keys(request)
        if not keys:
            return None
        if request.lora_order == "unload":
            for key in keys:
                self._forget(key)
            return None
        source, known = _source(request), self._sources.get(keys[0])
        if source is None:
            if known is not None:
                self._sources.move_to_end(keys[0])
            return known
        if isinstance(source, LoRARequest) and isinstance(known, LoRARequest) and not source.lora_path:
            source = structs.replace(source, lora_path=known.lora_path)
        for key in keys:
            self._forget(key)
            self._sources[key] = source
            self._num_bytes += _num_bytes(source)
        while self._num_bytes > self._max_bytes:
            self._forget(next(iter(self._sources)))
        return None

    def ranks_died(self, replica: int) -> None:
        self._told[replica].clear()

    def all_ranks_died(self) -> None:
        self._told.clear()

    def must_tell(self, request: Request, replica: int) -> bool:
        """Whether its present ranks were not told yet where to load its adapter from. From now on they were."""
        keys, told = set(_keys(request)), self._told[replica]
        if keys <= told:
            return False
        told |= keys
        return True

    def _forget(self, key: Key) -> None:
        source = self._sources.pop(key, None)
        for told in self._told.values():
            told.discard(key)
        if source is not None:
            self._num_bytes -= _num_bytes(source)


def brings_adapter(request: Request) -> bool:
    """Whether ranks learn something about an adapter from it that later requests rely on."""
    return bool(request.lora_order) or _source(request) is not None


def adapter_order(request: Request, request_id: int) -> Request:
    """What such a request says of its adapter, as an order of its own, which is answered to nobody."""
    return Request(
        request_id=request_id,
        input_token_ids=[],
        max_tokens=1,
        lora_order=request.lora_order or "load",
        lora_config=request.lora_config,
        lora_request=request.lora_request,
    )


def _keys(request: Request) -> list[Key]:
    """By which later requests may call its adapter; the first is the one that it uses itself."""
    if request.lora_config is not None:
        return [request.lora_config.task_id]
    if request.lora_request is not None:
        number = request.lora_request.lora_int_id
        return [request.lora_request.lora_name, *([number] if number else [])]
    return []


def _source(request: Request) -> Source | None:
    if request.lora_config is not None:
        return request.lora_config if request.lora_config.weights else None
    named = request.lora_request
    # A name alone may be that of a folder that the leader knows; a number for it is worth telling again.
    return named if named is not None and (named.lora_path or named.lora_int_id) else None


def _num_bytes(source: Source) -> int:
    return len(source.weights) if isinstance(source, LoraConfig) else 0
