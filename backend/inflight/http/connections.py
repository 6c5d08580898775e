"""All connections of one server: how many there may be, of everybody and of each address, and which of them rest."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

MAX_REFUSED = 64
"""Connections that are being told that they are refused, at the same time; others are closed at once."""


class Member(Protocol):
    """A connection, as far as the others know it."""

    @property
    def address(self) -> str: ...

    def close_if_idle(self) -> bool:
        """Returns whether it was."""

    def shut_down(self) -> None:
        """What was asked is answered, and then it is closed."""


class Connections:
    """Used on the event loop's thread."""

    def __init__(self, most: int, most_of_address: int) -> None:
        """`most`: at the same time, `most_of_address`: of them from one address."""
        self._most, self._most_of_address = most, most_of_address
        self._members: set[Member] = set()
        self._num_of_address: Counter[str] = Counter()
        self._idle: dict[Member, None] = {}  # the one that has waited longest first
        self._refused: set[Member] = set()  # those that are being told so
        self._gone = asyncio.Event()  # the last one

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members))

    def admit(self, member: Member) -> str:
        """Take it in, in the place of one that is idle if all are taken. Returns why it cannot be, or ""."""
        address = member.address
        own = self._num_of_address[address]
        if own >= self._most_of_address and not self._close_idle(address):
            return f"{own} connections of {address} are in use, max_connections_per_address"
        every = len(self._members)  # without the one that was closed
        if every >= self._most and not self._close_idle():
            return f"{every} connections are in use, max_connections"
        self._members.add(member)
        self._num_of_address[address] += 1
        return ""

    def turn_away(self, member: Member) -> bool:
        """It is closed soon. Returns whether there is time to tell it why."""
        self._refused.add(member)
        return len(self._refused) <= MAX_REFUSED

    def remove(self, member: Member) -> None:
        """Its place is free, even if it is not closed yet. Nothing happens if it has none."""
        self.set_busy(member)
        self._refused.discard(member)
        if member in self._members:
            self._members.remove(member)
            self._num_of_address[member.address] -= 1
            if not self._num_of_address[member.address]:
                del self._num_of_address[member.address]
        if not self._members:
            self._gone.set()

    def set_idle(self, member: Member) -> None:
        """It waits for a head."""
        self._idle[member] = None

    def set_busy(self, member: Member) -> None:
        self._idle.pop(member, None)

    async def wait_until_gone(self) -> None:
        while self._members:
            self._gone.clear()
            await self._gone.wait()

    def _close_idle(self, address: str | None = None) -> bool:
        """Of the connections, of this address if one is given, close the one that has been idle longest. Returns
        whether there is one."""
        for each in list(self._idle):
            if address in (None, each.address):
                del self._idle[each]
                if each.close_if_idle():
                    self.remove(each)
                    return True
        return False


def address_of(peer: object) -> str:
    """What of a socket's peer counts as one client. Whoever has an IPv6 address usually has its 2^64 neighbours."""
    host = str(peer[0]) if isinstance(peer, tuple) and peer else ""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or ipaddress.IPv6Network((address, 64), strict=False))
