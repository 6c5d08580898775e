"""Values of a program share buffers only while no operation needs both.

Run: pytest ci/unit/kernels/test_buffers.py
"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from inflight_kernels.cpu.buffers import share_buffers
from inflight_kernels.cpu.operations import Linear, RmsNorm
from inflight_kernels.cpu.recording import NOWHERE, Columns, Recorded, Recording


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    """Linear layers and norms, each over earlier values."""
    widths = [draw(st.sampled_from([32, 64]))]
    operations = []
    for _ in range(draw(st.integers(1, 15))):
        x = Columns(draw(st.integers(0, len(widths) - 1)), 0)
        residual = Columns(draw(st.integers(0, len(widths) - 1)), 0)
        out = Columns(len(widths), 0)
        if draw(st.booleans()):
            widths.append(draw(st.sampled_from([32, 64])))
            operations.append(Recorded(Linear, {"x": x, "out": out}, ("out",)))
        else:
            adds = widths[residual.buffer] == widths[x.buffer] and residual != x
            total = Columns(len(widths) + 1, 0) if adds else NOWHERE
            widths += [widths[x.buffer]] * (2 if adds else 1)
            fields = {"x": x, "residual": residual if adds else NOWHERE, "out": out, "sum": total}
            operations.append(Recorded(RmsNorm, fields, ("out", "sum")))
    return Recording(
        dtype=torch.float32,
        operations=tuple(operations),
        widths=tuple(widths),
        input=0,
        output=Columns(draw(st.integers(1, len(widths) - 1)), 0),
        output_size=32,
        ranks=None,
    )


@given(recordings())
def test_every_operation_reads_what_was_written_for_it(recording: Recording) -> None:
    shared = share_buffers(recording)
    buffers, widths = shared.of, shared.widths
    held = {buffers[0]: 0}
    for operation in recording.operations:
        read, written = ([columns.buffer for columns in operation.columns(written)] for written in (False, True))
        assert all(held[buffers[value]] == value for value in read)
        assert len({buffers[value] for value in written}) == len(written)
        if operation.kind is Linear:
            assert buffers[written[0]] not in [buffers[value] for value in read]
        for value in written:
            assert widths[buffers[value]] == recording.widths[value]
            held[buffers[value]] = value
    assert held[buffers[recording.output.buffer]] == recording.output.buffer


def test_a_chain_needs_two_buffers_and_one_for_its_result() -> None:
    chain = tuple(Recorded(Linear, {"x": Columns(i, 0), "out": Columns(i + 1, 0)}, ("out",)) for i in range(9))
    recording = Recording(
        dtype=torch.float32,
        operations=chain,
        widths=(32,) * 10,
        input=0,
        output=Columns(9, 0),
        output_size=32,
        ranks=None,
    )
    assert share_buffers(recording).widths == [32] * 3
