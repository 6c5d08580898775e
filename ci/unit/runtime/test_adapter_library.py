"""Which adapters there are: leases, names and numbers, room and eviction, what ranks are told, in which order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from inflight.errors import InvalidRequest
from inflight.lora import AdapterModule, LoraConfig, LoRARequest
from inflight.request import Request
from inflight.runtime.adapters import adapter_library
from inflight.runtime.adapters.adapter_library import Adapter, AdapterLibrary, AdapterState

SIZE = 100


@dataclass
class Weights:
    """Of an adapter of four modules."""

    name: str
    size: int = SIZE

    @property
    def modules(self) -> tuple[AdapterModule, ...]:
        return tuple(
            AdapterModule(f"{self.name}.{n}", 1, 1.0, "float32", b"a" * (self.size // 4), b"") for n in range(4)
        )

    @property
    def digest(self) -> bytes:
        return self.name.encode()

    @property
    def num_bytes(self) -> int:
        return self.size


@dataclass
class Reader:
    """Reads at once, unless told to wait."""

    may_read: threading.Event = field(default_factory=threading.Event)
    reads: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)

    def of_name(self, request: LoRARequest) -> Callable[[], Any]:
        if request.lora_name == "unknown":
            raise InvalidRequest("there is no LoRA adapter unknown")
        return lambda: self._read(request.lora_name)

    def of_tensors(self, config: LoraConfig) -> Callable[[], Any]:
        return lambda: self._read(f"task {config.task_id}")

    def _read(self, name: str) -> Weights:
        assert self.may_read.wait(100)
        self.reads.append(name)
        if name == "broken":
            raise InvalidRequest("it is broken")
        if name == "crash":
            raise RuntimeError("/a/secret/path")
        return Weights(name, self.sizes.get(name, SIZE))


def named(name: str, number: int = 0, path: str = "") -> Request:
    return Request(input_token_ids=[1], max_tokens=1, lora_request=LoRARequest(name, number, path))


def numbered(number: int, weights: bytes = b"") -> Request:
    config = LoraConfig(number, weights, [(1, 0, 1)] if weights else [])
    return Request(input_token_ids=[1], max_tokens=1, lora_config=config)


class Desk:
    def __init__(self, host_bytes: int = 3 * SIZE) -> None:
        self.reader = Reader()
        self.reader.may_read.set()
        reader: Any = self.reader
        self.library = AdapterLibrary(reader, host_bytes=host_bytes)
        self.stored: set[int] = set()

    def settle(self, *adapters: Adapter) -> None:
        """Until these have been read and all orders are taken."""
        for adapter in adapters:
            if adapter.reading is not None:
                adapter.reading.exception(timeout=100)
        self.library.poll()
        while self.library.has_orders:
            orders = self.library.take_orders()
            self.stored -= set(orders.dropped)
            self.stored |= {part.uid for part in orders.parts}

    def use(self, request: Request) -> Adapter:
        """By a request that ends at once."""
        adapter = self.library.lease(request)
        self.settle(adapter)
        self.library.release(adapter)
        self.settle()
        return adapter


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.library.close()


def test_an_adapter_is_read_once_for_all_its_requests(desk: Desk) -> None:
    first, second = desk.library.lease(named("a")), desk.library.lease(named("a"))
    assert first is second
    desk.settle(first)
    assert first.state is AdapterState.READY
    assert desk.use(named("a")) is first
    assert desk.reader.reads == ["a"]
    assert desk.stored == {first.uid}
    assert first.loaded.digest == b"a"


def test_the_least_recently_used_without_a_lease_is_dropped(desk: Desk) -> None:
    adapters = {name: desk.use(named(name)) for name in "abc"}
    desk.use(named("a"))
    held = desk.library.lease(named("b"))
    desk.use(named("d"))
    assert adapters["c"].uid not in desk.stored
    desk.use(named("e"))
    assert adapters["a"].uid not in desk.stored
    assert held.uid in desk.stored
    assert desk.library.num_bytes <= 3 * SIZE
    assert desk.use(named("c")).uid != adapters["c"].uid, "it was read again"


def test_tiny_adapters_are_not_stored_without_number(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_library, "MAX_ADAPTERS", 2)
    used = [desk.use(named(name)) for name in "abc"]
    assert desk.stored == {used[1].uid, used[2].uid}


def test_who_finds_no_room_waits_until_a_lease_ends(desk: Desk) -> None:
    held = [desk.library.lease(named(name)) for name in "abc"]
    desk.settle(*held)
    late = desk.library.lease(named("d"))
    desk.settle(late)
    assert late.state is AdapterState.LOADING
    desk.library.release(held[1])
    desk.settle(late)
    assert late.state is AdapterState.READY
    assert desk.stored == {held[0].uid, held[2].uid, late.uid}


def test_one_without_room_does_not_hold_up_those_that_fit(desk: Desk) -> None:
    desk.reader.sizes["large"] = 2 * SIZE
    held = [desk.library.lease(named(name)) for name in "ab"]
    desk.settle(*held)
    idle = desk.use(named("idle"))
    large, small = desk.library.lease(named("large")), desk.library.lease(named("small"))
    desk.settle(large, small)
    assert (large.state, small.state) == (AdapterState.LOADING, AdapterState.READY)
    assert idle.uid not in desk.stored
    desk.library.release(held[0])
    desk.settle()
    assert large.state is AdapterState.LOADING, "it takes two places"
    assert held[0].uid in desk.stored, "dropping it alone would have helped nobody"
    desk.library.release(small)
    desk.settle()
    assert large.state is AdapterState.READY


@pytest.mark.parametrize("newcomers", [0, 1, 3])
def test_who_waits_for_room_gets_it_though_others_never_stop_coming(desk: Desk, newcomers: int) -> None:
    """Requests of three stored adapters, each begun before the one before it has ended, and of new adapters."""
    desk.reader.sizes["large"] = 2 * SIZE
    held = [desk.library.lease(named(name)) for name in "abc"]
    desk.settle(*held)
    large = desk.library.lease(named("large"))
    for turn in range(4 * adapter_library.MAX_OVERTAKING):
        desk.settle(large)
        if large.state is AdapterState.READY:
            break
        adapter = desk.library.lease(named("abc"[turn % 3]))
        desk.settle(adapter)
        desk.library.release(held.pop(0))
        held.append(adapter)
        for number in range(newcomers):
            desk.use(named(f"new.{turn}.{number}"))
    assert large.state is AdapterState.READY
    assert desk.library.num_bytes <= 3 * SIZE
    desk.library.release(large)
    for adapter in held:
        desk.library.release(adapter)
    desk.settle()
    assert desk.use(named("a")).state is AdapterState.READY, "who was given up is read again"


def test_the_numbers_of_an_adapter_are_not_without_number(desk: Desk) -> None:
    for number in range(1, adapter_library.MAX_NUMBERS + 1):
        desk.use(named("a", number))
    with pytest.raises(InvalidRequest, match="the LoRA adapter a has 16 lora_int_ids already: use one of them"):
        desk.library.lease(named("a", 99))
    assert desk.use(named("a", 7)) is desk.use(numbered(16)) is desk.use(named("a"))
    assert len(desk.library._numbers) == adapter_library.MAX_NUMBERS
    desk.library.forget(named("a"))
    assert not desk.library._numbers
    assert desk.use(named("a", 99)).state is AdapterState.READY


@pytest.mark.parametrize(
    "request_", [named("a" * 300), named("../a"), named("a", -1), numbered(0, b"weights"), numbered(-1)]
)
def test_what_can_be_no_adapter_is_refused_before_it_is_looked_for(desk: Desk, request_: Request) -> None:
    """A front may be a program that validates nothing, and a name that is too long for a path would end the leader."""
    with pytest.raises(InvalidRequest, match="must be"):
        desk.library.lease(request_)
    assert desk.reader.reads == []


def test_what_could_never_fit_is_refused(desk: Desk) -> None:
    desk.reader.sizes["large"] = 4 * SIZE
    adapter = desk.use(named("large"))
    assert adapter.state is AdapterState.BROKEN
    assert adapter.reason == f"the LoRA adapter takes {4 * SIZE} bytes, more than lora_cache_host_memory_bytes 300"


def test_a_broken_adapter_is_tried_anew_and_tells_no_path(desk: Desk) -> None:
    first = desk.use(named("broken"))
    assert (first.state, first.reason) == (AdapterState.BROKEN, "it is broken")
    assert desk.use(named("broken")) is not first
    crashed = desk.use(named("crash"))
    assert crashed.reason == "the LoRA adapter could not be read: RuntimeError"
    assert desk.stored == set()
    with pytest.raises(InvalidRequest, match="there is no LoRA adapter unknown"):
        desk.library.lease(named("unknown"))


def test_a_number_needs_weights_first_and_again_after_its_eviction(desk: Desk) -> None:
    with pytest.raises(InvalidRequest, match="LoRA task 5 is not loaded"):
        desk.library.lease(numbered(5))
    first = desk.use(numbered(5, b"weights"))
    assert desk.use(numbered(5)) is first
    assert desk.use(numbered(5, b"weights")) is first
    with pytest.raises(InvalidRequest, match="loaded with other weights"):
        desk.library.lease(numbered(5, b"others"))
    for name in "abc":
        desk.use(named(name))
    with pytest.raises(InvalidRequest, match="or it was evicted"):
        desk.library.lease(numbered(5))


def test_a_name_may_bring_a_number(desk: Desk) -> None:
    adapter = desk.use(named("a", 3, "/adapters/a"))
    assert desk.use(numbered(3)) is adapter
    with pytest.raises(InvalidRequest, match="lora_int_id 3 belongs to another"):
        desk.library.lease(named("b", 3))
    with pytest.raises(InvalidRequest, match="loaded from another folder"):
        desk.library.lease(named("a", 3, "/adapters/b"))


def test_an_unloaded_adapter_stays_with_who_uses_it(desk: Desk) -> None:
    held = desk.library.lease(named("a", 3))
    desk.settle(held)
    desk.library.forget(named("a"))
    desk.settle()
    assert held.uid in desk.stored
    with pytest.raises(InvalidRequest, match="LoRA task 3 is not loaded"):
        desk.library.lease(numbered(3))
    other = desk.use(named("a"))
    assert other is not held
    desk.library.release(held)
    desk.settle()
    assert desk.stored == {other.uid}
    with pytest.raises(InvalidRequest, match="no such LoRA adapter"):
        desk.library.forget(numbered(3))


def test_one_that_is_unloaded_or_cancelled_while_it_is_read_leaves_nothing(desk: Desk) -> None:
    desk.reader.may_read.clear()
    adapter = desk.library.lease(named("a"))
    desk.library.forget(named("a"))
    desk.library.release(adapter)
    desk.reader.may_read.set()
    desk.settle(adapter)
    assert (desk.stored, desk.library.num_bytes) == (set(), 0)


def test_those_whose_requests_are_cancelled_are_not_kept_unread(desk: Desk) -> None:
    """Each may have megabytes, and nobody counts them before they are stored."""
    desk.reader.may_read.clear()
    for number in range(1, 20):
        desk.library.release(desk.library.lease(numbered(number, b"weights")))
    desk.library.release(desk.library.lease(named("a", 20)))
    assert not desk.library._loading and not desk.library._numbers and not desk.library._names
    desk.reader.may_read.set()
    assert desk.use(named("b")).state is AdapterState.READY
    assert len(desk.reader.reads) <= 2, "those that were not begun were not read"


def test_an_iteration_brings_a_few_bytes_of_a_large_adapter(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_library, "BYTES_AT_ONCE", SIZE // 4)
    adapters = [desk.library.lease(named(name)) for name in "ab"]
    for adapter in adapters:
        assert adapter.reading is not None
        adapter.reading.result(timeout=100)
    desk.library.poll()
    sent = []
    while desk.library.has_orders:
        assert adapters[1].state is AdapterState.LOADING
        (part,) = desk.library.take_orders().parts
        sent += [module.name for module in part.modules]
        assert (adapters[0].state is AdapterState.READY) == (len(sent) >= 4)
    assert sent == [f"{name}.{n}" for name in "ab" for n in range(4)]
