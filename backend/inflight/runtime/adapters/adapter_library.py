"""The adapters of an engine, on its leader rank: by which names requests find them, and what the ranks store of them.

A request leases its adapter while it is in flight. Adapters without a lease are kept for later requests until the room
of the host's cache is needed: the one used least recently goes first.

An adapter that was read is stored as soon as there is room for it. Where there is none, because requests lease too much
of the cache, it waits, and the first that waits has the next turn: others are read and stored where they fit, and
requests of stored adapters go on, but when MAX_OVERTAKING of both together have overtaken it, no other adapter is
stored before it, and as many of the stored ones as it takes are given up, those without a lease first. Their names are
free from then on: a later request reads such an adapter again, in its turn, and who has a lease keeps it. So the
adapter that waited is stored once requests have ended that were in flight when its turn came, whatever comes later.

Used on the worker loop's thread alone, but for reading, which has a thread of its own.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from typing import TYPE_CHECKING

from inflight.errors import InflightError, InvalidRequest
from inflight.lora import AdapterModule, AdapterOrders, AdapterPart, LoadedAdapter, LoraConfig, LoRARequest
from inflight.request import Request

if TYPE_CHECKING:
    # They import torch, which the rank's other modules need not wait for.
    from inflight.runtime.adapters.adapter_reader import AdapterReader
    from inflight.runtime.adapters.adapter_weights import AdapterWeights

BYTES_AT_ONCE = 8 * 2**20
"""Of weights that one iteration brings to the ranks. They take each of them about as many milliseconds."""

MAX_ADAPTERS = 2**14
"""That the ranks store. Tiny ones take more memory than their bytes, and the loop looks through all of them."""

MAX_NUMBERS = 16
"""By which requests may call one adapter. Programs that do not know of each other may number a folder differently."""

MAX_OVERTAKING = 64
"""Requests of stored adapters, and adapters stored, while one waits for room."""


class AdapterState(Enum):
    LOADING = "loading"
    READY = "ready"
    """The ranks have it, or will have it with the next orders."""
    BROKEN = "broken"


class Adapter:
    """The leader's record of one adapter."""

    def __init__(self, uid: int, source: object, reading: Future[AdapterWeights]) -> None:
        self.uid = uid
        self.source = source
        """What its name stands for: the path that a request named, or a digest of a request's weights."""
        self.state = AdapterState.LOADING
        self.reason = ""
        """Why it is broken, as a sentence."""
        self.num_leases = 0
        self.num_bytes = 0
        """In the host's cache."""
        self.digest = b""
        self.name = ""
        self.numbers: list[int] = []
        self.is_named = True
        """False: no request can find it any more."""
        self.num_overtaking = 0
        """Requests and adapters that have found room while it was the first to wait for some."""
        self.reading: Future[AdapterWeights] | None = reading
        self.unsent: deque[AdapterModule] = deque()

    @property
    def loaded(self) -> LoadedAdapter:
        return LoadedAdapter(self.uid, self.digest)


class AdapterLibrary:
    def __init__(self, reader: AdapterReader, *, host_bytes: int) -> None:
        """`host_bytes`: of all adapters that the ranks store."""
        self._reader = reader
        self._host_bytes = host_bytes
        self._thread = ThreadPoolExecutor(1, "inflight-adapters")
        self._num_uids = 0
        self._names: dict[str, Adapter] = {}
        self._numbers: dict[int, Adapter] = {}
        self._loading: list[Adapter] = []  # in the order of their first requests
        self._waiting: Adapter | None = None  # the first of them that was read and found no room
        self._stored: OrderedDict[int, Adapter] = OrderedDict()  # by uid; least recently used first
        self._sending: deque[Adapter] = deque()
        self._dropped: list[int] = []

    def lease(self, request: Request) -> Adapter:
        """A request needs its adapter from now on. To be followed by exactly one `release`. Raises InvalidRequest."""
        if request.lora_request is not None:
            request.lora_request.validate()
            adapter = self._by_name(request.lora_request)
        else:
            assert request.lora_config is not None
            request.lora_config.validate()
            adapter = self._by_number(request.lora_config)
        adapter.num_leases += 1
        if adapter.uid in self._stored:
            self._stored.move_to_end(adapter.uid)
            self._note_overtaking()
        return adapter

    def release(self, adapter: Adapter) -> None:
        """A request that had leased it has ended."""
        adapter.num_leases -= 1
        if adapter.num_leases:
            return
        if adapter.reading is not None:
            # Nobody waits for it any more: what was read would lie here, uncounted, until somebody waits for another.
            adapter.reading.cancel()
            self._unname(adapter)
        if not adapter.is_named or adapter.state is AdapterState.BROKEN:
            self._drop(adapter)

    def forget(self, request: Request) -> None:
        """No later request finds the adapter that this one names. Raises InvalidRequest if none is loaded."""
        by_name, by_number = request.lora_request, request.lora_config
        adapter = self._names.get(by_name.lora_name) if by_name is not None else None
        if by_number is not None:
            adapter = self._numbers.get(by_number.task_id)
        if adapter is None:
            raise InvalidRequest("there is no such LoRA adapter to unload: it was never loaded, or was evicted")
        self._unname(adapter)
        if not adapter.num_leases:
            self._drop(adapter)

    def poll(self) -> None:
        """See to what was read: make room for it, and send it. The module's docstring has the order."""
        self._waiting = None
        for adapter in list(self._loading):
            weights = self._weights(adapter)
            if weights is None:
                continue
            if self._make_room(weights.num_bytes):
                self._store(adapter, weights)
                self._note_overtaking()
            elif self._waiting is None:
                self._waiting = adapter
            if self._waiting is adapter and adapter.num_overtaking >= MAX_OVERTAKING:
                self._give_up_for(weights.num_bytes)
                return

    @property
    def has_orders(self) -> bool:
        return bool(self._sending or self._dropped)

    def take_orders(self) -> AdapterOrders:
        """What the ranks are to do next. An adapter is READY when the last of it was taken."""
        dropped, self._dropped = self._dropped, []
        parts: list[AdapterPart] = []
        room = BYTES_AT_ONCE
        while self._sending and room > 0:
            adapter, modules = self._sending[0], []
            while adapter.unsent and room > 0:
                modules.append(adapter.unsent.popleft())
                room -= modules[-1].num_bytes
            parts.append(AdapterPart(adapter.uid, modules))
            if not adapter.unsent:
                self._sending.popleft()
                adapter.state = AdapterState.READY
        return AdapterOrders(parts, dropped)

    @property
    def num_bytes(self) -> int:
        """Bytes that the ranks store of all adapters."""
        return sum(adapter.num_bytes for adapter in self._stored.values())

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _weights(self, adapter: Adapter) -> AdapterWeights | None:
        """What was read of it; None if it is still being read, or is broken from now on."""
        if adapter.reading is None or not adapter.reading.done():
            return None
        try:
            weights = adapter.reading.result()
        except InflightError as error:
            self._break(adapter, str(error))
            return None
        except Exception as error:
            self._break(adapter, f"the LoRA adapter could not be read: {type(error).__name__}")
            return None
        if weights.num_bytes > self._host_bytes:
            needed = f"the LoRA adapter takes {weights.num_bytes} bytes"
            self._break(adapter, f"{needed}, more than lora_cache_host_memory_bytes {self._host_bytes}")
            return None
        return weights

    # -- names ---------------------------------------------------------------------------------------------------------

    def _by_name(self, request: LoRARequest) -> Adapter:
        name, number = request.lora_name, request.lora_int_id
        adapter = self._names.get(name)
        if number and self._numbers.get(number, adapter) is not adapter:
            raise InvalidRequest(f"lora_int_id {number} belongs to another LoRA adapter")
        if adapter is None:
            adapter = self._begin(request.lora_path, self._reader.of_name(request))
            adapter.name = name
            self._names[name] = adapter
        elif request.lora_path not in ("", adapter.source):
            raise InvalidRequest(f"the LoRA adapter {name} was loaded from another folder: unload it first")
        if number and number not in adapter.numbers:
            self._add_number(adapter, number)
        return adapter

    def _add_number(self, adapter: Adapter, number: int) -> None:
        if len(adapter.numbers) == MAX_NUMBERS:
            raise InvalidRequest(
                f"the LoRA adapter {adapter.name} has {MAX_NUMBERS} lora_int_ids already: use one of them, or none"
            )
        adapter.numbers.append(number)
        self._numbers[number] = adapter

    def _by_number(self, config: LoraConfig) -> Adapter:
        adapter = self._numbers.get(config.task_id)
        if not config.weights:
            if adapter is None:
                raise InvalidRequest(
                    f"LoRA task {config.task_id} is not loaded: its weights were never sent, or it was evicted; send "
                    "lora_weights and lora_config with the request"
                )
            return adapter
        sent = hashlib.sha256(repr((config.config, config.weights_dtype)).encode() + config.weights).digest()
        if adapter is None:
            adapter = self._begin(sent, self._reader.of_tensors(config))
            self._add_number(adapter, config.task_id)
        elif adapter.source != sent:
            raise InvalidRequest(f"LoRA task {config.task_id} is loaded with other weights: unload it first")
        return adapter

    def _unname(self, adapter: Adapter) -> None:
        if not adapter.is_named:
            return
        adapter.is_named = False
        self._names.pop(adapter.name, None)
        for number in adapter.numbers:
            del self._numbers[number]

    # -- the host's cache ----------------------------------------------------------------------------------------------

    def _begin(self, source: object, read: Callable[[], AdapterWeights]) -> Adapter:
        self._num_uids += 1
        adapter = Adapter(self._num_uids, source, self._thread.submit(read))
        self._loading.append(adapter)
        return adapter

    def _store(self, adapter: Adapter, weights: AdapterWeights) -> None:
        self._loading.remove(adapter)
        adapter.reading = None
        adapter.num_bytes, adapter.digest = weights.num_bytes, weights.digest
        adapter.unsent.extend(weights.modules)
        self._stored[adapter.uid] = adapter
        self._sending.append(adapter)

    def _break(self, adapter: Adapter, reason: str) -> None:
        """Its requests are refused with the reason; later ones begin anew."""
        self._loading.remove(adapter)
        self._unname(adapter)
        adapter.state, adapter.reason, adapter.reading = AdapterState.BROKEN, reason, None

    def _make_room(self, num_bytes: int) -> bool:
        """Drop adapters without a lease until there is room for one of so many bytes; none if that is not enough."""
        leased = [each.num_bytes for each in self._stored.values() if each.num_leases]
        if sum(leased) + num_bytes > self._host_bytes or len(leased) >= MAX_ADAPTERS:
            return False
        while self.num_bytes + num_bytes > self._host_bytes or len(self._stored) >= MAX_ADAPTERS:
            idle = next(each for each in self._stored.values() if not each.num_leases)
            self._unname(idle)
            self._drop(idle)
        return True

    def _note_overtaking(self) -> None:
        if self._waiting is not None:
            self._waiting.num_overtaking += 1

    def _give_up_for(self, num_bytes: int) -> None:
        """Let no request begin with the adapters in whose place one of so many bytes will be stored."""
        kept = sorted((each for each in self._stored.values() if each.is_named), key=lambda each: each.num_leases > 0)
        room = self._host_bytes - sum(each.num_bytes for each in kept)
        while kept and (room < num_bytes or len(kept) >= MAX_ADAPTERS):
            given_up = kept.pop(0)
            room += given_up.num_bytes
            self._unname(given_up)
            if not given_up.num_leases:
                self._drop(given_up)

    def _drop(self, adapter: Adapter) -> None:
        """Forget an adapter that has neither lease nor name any more."""
        if adapter in self._loading:
            self._loading.remove(adapter)
        if adapter is self._waiting:
            self._waiting = None
        if adapter in self._sending:
            self._sending.remove(adapter)
        if self._stored.pop(adapter.uid, None) is not None:
            self._dropped.append(adapter.uid)
