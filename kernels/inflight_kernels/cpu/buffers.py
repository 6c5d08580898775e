"""Decides which values of a recorded network share a buffer: those that are not needed at the same time.

A step's memory is then that of the few values that are alive at once, and mostly in a cache.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from inflight_kernels.cpu.operations import LayerNorm, NormOfSum, RmsNorm
from inflight_kernels.cpu.recording import Recording
from inflight_kernels.cpu.structures import Place


@dataclass(slots=True)
class Buffers:
    """The buffers of a program."""

    of: dict[int, int] = field(default_factory=dict)
    """Buffer of the recording -> buffer of the program."""
    widths: list[int] = field(default_factory=list)
    """Columns of each."""
    places: list[Place] = field(default_factory=list)
    """Of each."""

    def add(self, width: int, place: Place) -> int:
        self.widths.append(width)
        self.places.append(place)
        return len(self.widths) - 1

    def width_at(self, place: Place) -> int:
        """Columns of all buffers at `place`."""
        return sum(width for width, at in zip(self.widths, self.places, strict=True) if at is place)


def share_buffers(recording: Recording) -> Buffers:
    """The result has a buffer of its own, which the caller of the program gets."""
    buffers = Buffers()
    common = {each.value("out").buffer for each in recording.operations if each.kind is NormOfSum}
    free: dict[tuple[int, Place], list[int]] = defaultdict(list)

    def place_of(recorded: int) -> Place:
        return Place.COMMON_AREA if recorded in common else Place.PRIVATE

    def take(recorded: int) -> None:
        width, place = recording.widths[recorded], place_of(recorded)
        if free[width, place] and recorded != recording.output.buffer:
            buffers.of[recorded] = free[width, place].pop()
        else:
            buffers.of[recorded] = buffers.add(width, place)

    def release(place: int, recorded: set[int]) -> None:
        for buffer in sorted(recorded - parts):
            if recording.uses[buffer][-1] == place:
                free[recording.widths[buffer], place_of(buffer)].append(buffers.of[buffer])

    parts = _place_parts(recording, buffers)
    if recording.input is not None:
        take(recording.input)
    for place, operation in enumerate(recording.operations):
        read = operation.buffers(written=False)
        written = operation.buffers(written=True) - read
        # A norm may write over what it reads: it reads an element before it writes there.
        is_norm = operation.kind in (RmsNorm, NormOfSum, LayerNorm)
        if is_norm:
            release(place, read)
        for buffer in sorted(written - buffers.of.keys()):
            take(buffer)
        release(place, written if is_norm else read | written)
    return buffers


def _place_parts(recording: Recording, buffers: Buffers) -> set[int]:
    """Give buffers to what other ranks read, in turns: while one of them still reads a part, this rank may compute the
    next one, but not the one after that. Returns the recorded buffers."""
    made: dict[tuple[int, int], int] = {}
    parts = [each.value("x").buffer for each in recording.operations if each.kind is NormOfSum]
    for number, recorded in enumerate(parts):
        key = recording.widths[recorded], number % 2
        if key not in made:
            made[key] = buffers.add(recording.widths[recorded], Place.OWN_AREA)
        buffers.of[recorded] = made[key]
    return set(parts)
