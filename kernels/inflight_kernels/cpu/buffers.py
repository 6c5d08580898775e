"""Decides which values of a recorded network share a buffer: those that are not needed at the same time.

A step's memory is then that of the few values that are alive at once, and mostly in a cache.
"""

from __future__ import annotations

from collections import defaultdict

from inflight_kernels.cpu.operations import RmsNorm
from inflight_kernels.cpu.recording import Recording


def share_buffers(recording: Recording) -> tuple[dict[int, int], list[int]]:
    """(recorded buffer -> buffer of the program, columns of each of the latter).

    The result has a buffer of its own, which the caller of the program gets.
    """
    last_use: dict[int, int] = {}
    for place, operation in enumerate(recording.operations):
        for columns in (*operation.columns(written=False), *operation.columns(written=True)):
            last_use[columns.buffer] = place
    widths: list[int] = []
    buffers: dict[int, int] = {}
    free: dict[int, list[int]] = defaultdict(list)

    def take(recorded: int) -> None:
        width = recording.widths[recorded]
        if free[width] and recorded != recording.output.buffer:
            buffers[recorded] = free[width].pop()
        else:
            widths.append(width)
            buffers[recorded] = len(widths) - 1

    def release(place: int, recorded: set[int]) -> None:
        for buffer in sorted(recorded):
            if last_use[buffer] == place and buffer != recording.output.buffer:
                free[recording.widths[buffer]].append(buffers[buffer])

    if recording.input is not None:
        take(recording.input)
    for place, operation in enumerate(recording.operations):
        read = {columns.buffer for columns in operation.columns(written=False)}
        written = {columns.buffer for columns in operation.columns(written=True)} - read
        # A norm may write over what it reads: it reads an element before it writes there.
        if operation.kind is RmsNorm:
            release(place, read)
        for buffer in sorted(written - buffers.keys()):
            take(buffer)
        release(place, written if operation.kind is RmsNorm else read | written)
    return buffers, widths
