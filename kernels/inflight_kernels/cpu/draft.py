"""A recording while rules rewrite it (fusions.py): what is where, and what uses it, after each step of theirs."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import replace

from inflight_kernels.cpu.operations import Operation
from inflight_kernels.cpu.recording import Columns, Recorded, Recording


class Draft:
    """Operations by their places, which stay what they are when others are removed."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.operations = dict(enumerate(recording.operations))
        self.uses = {buffer: list(places) for buffer, places in recording.uses.items()}
        """As of the recording: the input is written at -1, and the result is read behind the last operation."""
        self.output = recording.output

    def recording(self) -> Recording:
        return replace(self._recording, operations=tuple(self.operations.values()), output=self.output)

    def width_of(self, value: Columns) -> int:
        """Columns of its buffer."""
        return self._recording.widths[value.buffer]

    def kinds(self, places: Iterable[int]) -> list[type[Operation] | None]:
        """Of the operations there; None where there is none, as where the input comes in and the result goes out."""
        return [self.operations[place].kind if place in self.operations else None for place in places]

    def writers(self, buffer: int) -> list[int]:
        """Places of the operations that write it, in order."""
        return [
            place
            for place in self.uses[buffer]
            if place in self.operations and buffer in self.operations[place].buffers(written=True)
        ]

    def put(self, place: int, operation: Recorded) -> None:
        """Instead of the one there."""
        for buffer in self.operations[place].buffers():
            self.uses[buffer].remove(place)
        for buffer in operation.buffers():
            insort(self.uses[buffer], place)
        self.operations[place] = operation

    def remove(self, place: int) -> None:
        for buffer in self.operations.pop(place).buffers():
            self.uses[buffer].remove(place)

    def end_with(self, output: Columns) -> None:
        """The result of the network is there instead."""
        self.uses[output.buffer].append(self.uses[self.output.buffer].pop())
        self.output = output
