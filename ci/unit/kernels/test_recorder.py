"""Recording a network: what C++ has operations for becomes a program, and everything else is a reason.

Run: pytest ci/unit/kernels/test_recorder.py
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from thread_ranks import ThreadCollectives
from torch import Tensor

import inflight_kernels
from inflight_kernels.cpu import Batch, Recording, SharedMemoryCollectives, Unsupported, library, record
from inflight_kernels.cpu.buffers import share_buffers
from inflight_kernels.cpu.operations import GatedLinear, Ids, Linear, RmsNorm
from inflight_kernels.cpu.recorder import Recorder
from inflight_kernels.cpu.recording import Columns
from inflight_kernels.cpu.structures import Place

SIZE, HEADS, KV_HEADS, HEAD_DIM = 64, 2, 1, 32
CACHE = torch.zeros(3, 4, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
COS_SIN = torch.zeros(8, HEAD_DIM)
NORM, QUERY_NORM = torch.ones(SIZE, dtype=torch.bfloat16), torch.ones(HEAD_DIM, dtype=torch.bfloat16)
IMPLEMENTED = (
    "embedding",
    "embedding_rms_norm",
    "linear",
    "gated_linear",
    "activate",
    "activate_and_mul",
    "rms_norm",
    "row_squares",
    "rms_norm_of_part",
    "layer_norm",
    "rope",
    "rope_and_kv_write",
    "decode_attention",
    "prefill_attention",
    "causal_conv",
    "gated_delta_rule",
    "gated_rms_norm",
    "state_space_scan",
)

needs_compiler = pytest.mark.skipif(not library._find_compiler(), reason="there is no C++ compiler")


@functools.cache
def weight(num_outputs: int, num_inputs: int = SIZE) -> Tensor:
    return torch.zeros(num_outputs, num_inputs, dtype=torch.bfloat16)


def norm(x: Tensor) -> Tensor:
    normed = inflight_kernels.rms_norm(x, NORM, 1e-6)
    assert isinstance(normed, Tensor)
    return normed


def qkv(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads = inflight_kernels.linear(x, weight((HEADS + 2 * KV_HEADS) * HEAD_DIM)).view(-1, 4, HEAD_DIM)
    return heads[:, :HEADS], heads[:, HEADS : HEADS + KV_HEADS], heads[:, HEADS + KV_HEADS :]


def rotate(x: Tensor, batch: Batch, **options: object) -> Tensor:
    arguments = {"positions": batch.positions_T, "slot_mapping": batch.blocks[0].slots_T, **options}
    q, k, v = qkv(x)
    return inflight_kernels.rope_and_kv_write(q, k, v, COS_SIN, k_cache=CACHE, v_cache=CACHE, **arguments)  # type: ignore[arg-type]


def attend(q: Tensor, batch: Batch, **options: object) -> Tensor:
    out = torch.empty_like(q)
    num_decodes = batch.decode_rows_N.shape[0]
    if num_decodes:
        arguments = {
            "block_table": batch.blocks[0].block_table,
            "table_rows": batch.decode_rows_N,
            "seq_lens": batch.decode_lens_N,
            "scale": 0.5,
            **options,
        }
        inflight_kernels.decode_attention(q[:num_decodes], CACHE, CACHE, out=out[:num_decodes], **arguments)  # type: ignore[arg-type]
    if len(batch.prefill_rows_P):
        inflight_kernels.prefill_attention(
            q[num_decodes:],
            CACHE,
            CACHE,
            batch.blocks[0].block_table,
            batch.prefill_starts,
            batch.prefill_lens_P,
            5,
            0.5,
            out=out[num_decodes:],
            table_rows=batch.prefill_rows_P,
        )
    return out.view(-1, HEADS * HEAD_DIM)


def mlp(x: Tensor, size: int = 96) -> Tensor:
    gated = inflight_kernels.activate_and_mul(inflight_kernels.linear(x, weight(2 * size)))
    return inflight_kernels.linear(gated, weight(SIZE, size))


def layer(x: Tensor, batch: Batch) -> Tensor:
    attended = inflight_kernels.linear(attend(rotate(norm(x), batch), batch), weight(SIZE))
    normed, total = inflight_kernels.rms_norm(attended, NORM, 1e-6, x)
    return inflight_kernels.rms_norm(mlp(normed), NORM, 1e-6, total)[0]


def kinds(recording: Recording) -> list[str]:
    return [operation.kind.__name__ for operation in recording.operations]


def test_a_layer_becomes_a_program() -> None:
    recording = record(layer, SIZE)
    assert kinds(recording) == [
        "RmsNorm",
        "Linear",
        "RopeAndKvWrite",
        "DecodeAttention",
        "PrefillAttention",
        "Linear",
        "RmsNorm",
        "GatedLinear",
        "Linear",
        "RmsNorm",
    ]
    assert recording.input == 0
    assert recording.output_size == SIZE


def test_token_ids_are_embedded() -> None:
    table = weight(100)
    recording = record(lambda token_ids, _: norm(inflight_kernels.embedding(token_ids, table)))
    assert kinds(recording) == ["Embedding", "RmsNorm"]
    assert recording.input is None


def test_positions_are_embedded_too() -> None:
    def network(token_ids: Tensor, batch: Batch) -> Tensor:
        embedded = inflight_kernels.embedding(token_ids, weight(100))
        return embedded + inflight_kernels.embedding(batch.positions_T, weight(2048)[2:])

    recording = record(network)
    assert kinds(recording) == ["Embedding", "Embedding", "Add"]
    assert [each.fields.get("ids") for each in recording.operations] == [Ids.TOKEN, Ids.POSITION, None]


@pytest.fixture(scope="module")
def collectives() -> Iterator[SharedMemoryCollectives]:
    threads = ThreadCollectives(2)
    yield threads.ranks[1]
    threads.close()


@needs_compiler
def test_a_sum_over_ranks_is_joined_with_the_norm_behind_it(collectives: SharedMemoryCollectives) -> None:
    def network(token_ids: Tensor, _: Batch) -> Tensor:
        hidden = collectives.all_reduce(inflight_kernels.embedding(token_ids, weight(100), 100))
        residual = hidden
        for _ in range(3):
            part = collectives.all_reduce(inflight_kernels.linear(hidden, weight(SIZE)))
            hidden, residual = inflight_kernels.rms_norm(part, NORM, 1e-6, residual)
        return collectives.all_gather(inflight_kernels.linear(hidden, weight(50)))[:, :99]

    recording = record(network)
    assert kinds(recording) == ["Embedding", "Sum", *["Linear", "NormOfSum"] * 3, "Linear", "Gather"]
    assert recording.ranks is not None and (recording.ranks.rank, recording.ranks.size) == (1, 2)
    assert recording.operations[0].fields["first"] == 100
    assert recording.output_size == 99
    buffers = share_buffers(recording)
    assert sorted(buffers.places) == [*[Place.PRIVATE] * 3, *[Place.OWN_AREA] * 2, Place.COMMON_AREA]
    # Others may still read a rank's part when it has come to the next one.
    first, second, third = (buffers.of[recording.operations[at].fields["out"].buffer] for at in (2, 4, 6))  # type: ignore[union-attr]
    assert first == third != second


@needs_compiler
def test_a_part_of_a_value_is_not_summed(collectives: SharedMemoryCollectives) -> None:
    with pytest.raises(Unsupported, match="what ranks sum is not the whole result"):
        record(lambda x, _: collectives.all_reduce(inflight_kernels.linear(x, weight(2 * SIZE))[:, :SIZE]), SIZE)


def test_attention_reads_the_queries_where_they_were_rotated() -> None:
    _, linear, rope, decode, prefill, *_ = record(layer, SIZE).operations
    queries, out = linear.fields["out"], decode.fields["out"]
    assert rope.fields["queries"] == decode.fields["queries"] == prefill.fields["queries"] == queries
    assert isinstance(queries, Columns) and isinstance(out, Columns)
    assert rope.fields["values"] == Columns(queries.buffer, (HEADS + KV_HEADS) * HEAD_DIM)
    assert prefill.fields["out"] == out and out.buffer != queries.buffer


@pytest.mark.parametrize("size", [96, 90])
def test_gate_and_up_are_joined_with_their_activation(size: int) -> None:
    recording = record(lambda x, _: mlp(x, size), SIZE)
    gated, down = recording.operations
    assert (gated.kind, down.kind) == (GatedLinear, Linear)
    assert gated.fields["num_outputs"] == down.weight("weight").num_inputs == 96
    assert gated.fields["out"] == down.fields["x"]


def test_layers_may_differ() -> None:
    def two_norms(x: Tensor, batch: Batch) -> Tensor:
        return inflight_kernels.rms_norm(norm(x), NORM, 0.5)  # type: ignore[return-value]

    assert [operation.fields["eps"] for operation in record(two_norms, SIZE).operations] == [1e-6, 0.5]


@pytest.mark.parametrize("name", IMPLEMENTED)
def test_it_takes_the_arguments_of_the_function_that_it_records(name: str) -> None:
    recorded = inspect.signature(getattr(Recorder, name))
    arguments = list(recorded.parameters.values())[1:]
    assert recorded.replace(parameters=arguments) == inspect.signature(getattr(inflight_kernels, name))


TOKEN_IDS = torch.empty(3, dtype=torch.int64, device="meta")
FP8 = "for products of fp8"
UNIMPLEMENTED: list[tuple[str, Callable[[Tensor], object]]] = [
    (FP8, lambda x: inflight_kernels.rms_norm_quantized(x, NORM, 1e-6)),
    (FP8, lambda x: inflight_kernels.embedding_rms_norm_quantized(TOKEN_IDS, x, NORM, 1e-6)),
    (FP8, inflight_kernels.activate_and_mul_quantized),
    (FP8, inflight_kernels.quantize_per_token),
    ("aten.mul", lambda x: x * x[:, :1]),
    ("aten.mul", lambda x: x * NORM),
    ("aten.add", lambda x: x + 1),
    ("aten.add", lambda x: x + x[:, :1]),
    ("aten.add", lambda x: torch.add(x, x, alpha=2)),
    ("aten.add", lambda x: x + NORM),
    ("aten.add", lambda x: x.view(-1, 2, 32) + x.view(-1, 2, 32)),
    ("aten.add_", lambda x: x.add_(1)),
    ("aten.gelu", F.gelu),
    ("aten.tanh", torch.tanh),
    ("aten.contiguous", lambda x: x.t().contiguous()),
    ("aten.to", lambda x: x.float()),
    ("aten.index", lambda x: x[torch.tensor([1, 0])]),
    ("aten.copy_", lambda x: torch.empty_like(x).copy_(x)),
    ("aten.new_zeros", lambda x: x.new_zeros(3)),
]


@pytest.mark.parametrize(("name", "call"), UNIMPLEMENTED)
def test_an_operation_that_it_has_not_is_the_reason(name: str, call: Callable[[Tensor], object]) -> None:
    def network(x: Tensor, batch: Batch) -> Tensor:
        call(x)
        return norm(x)

    with pytest.raises(Unsupported, match=f"^C\\+\\+ has no operation {name}$"):
        record(network, SIZE)


def spoil(**options: object) -> Callable[[Tensor, Batch], Tensor]:
    """`layer`, whose rotation has other arguments."""
    return lambda x, batch: attend(rotate(x, batch, **options), batch)


def read_twice(x: Tensor, batch: Batch) -> Tensor:
    q, k, v = qkv(x)
    arguments = (COS_SIN, batch.positions_T, CACHE, CACHE, batch.blocks[0].slots_T)
    inflight_kernels.rope_and_kv_write(q, k, v, *arguments)
    return inflight_kernels.rope_and_kv_write(q, k, v, *arguments)


def branch(x: Tensor, batch: Batch) -> Tensor:
    return norm(norm(x)) if len(batch.decode_rows_N) else norm(x)


REFUSED: dict[str, tuple[Callable[[Tensor, Batch], Tensor], str]] = {
    "positions": (spoil(positions=torch.zeros(3, dtype=torch.int64)), "by the step's own positions"),
    "slots": (spoil(slot_mapping=torch.zeros(3, dtype=torch.int64)), "to its own cache slots only"),
    "one norm": (spoil(q_norm_weight=QUERY_NORM), "either both queries and keys"),
    "scaled cache": (spoil(k_scale=2.0), "a KV cache has scales, and is neither fp8 nor int8"),
    "another table": (
        lambda x, batch: attend(rotate(x, batch), batch, block_table=torch.zeros(3, 7)),
        "the step's own sequences only",
    ),
    "sinks of other heads": (
        lambda x, batch: attend(rotate(x, batch), batch, sinks=torch.zeros(3)),
        r"the sinks of attention is not a constant of shape \(2,\)",
    ),
    "another type": (lambda x, _: inflight_kernels.linear(x, weight(SIZE).float()), "a weight is torch.float32"),
    "another bias": (
        lambda x, _: inflight_kernels.linear(x, weight(SIZE), torch.zeros(3, dtype=torch.bfloat16)),
        r"a bias is not a constant of shape \(64,\)",
    ),
    "a weight that is computed": (lambda x, _: inflight_kernels.linear(x, x), "a weight is not a constant"),
    "inputs": (lambda x, _: inflight_kernels.linear(x[:, :40], weight(SIZE, 40)), "40 inputs"),
    "nothing was written": (lambda x, _: norm(torch.empty_like(x)), "input of a norm is not the result of an"),
    "zeros": (lambda x, _: norm(torch.zeros(13, SIZE, dtype=torch.bfloat16, device="meta")), "is not the result"),
    "other ids": (
        lambda x, _: inflight_kernels.embedding(TOKEN_IDS, weight(100)),
        "embeds the step's token ids, positions and types only",
    ),
    "ids are added": (
        lambda x, batch: batch.positions_T + batch.blocks[0].slots_T,
        "C\\+\\+ has no operation aten.add",
    ),
    "a constant is added": (lambda x, _: x + torch.zeros(13, SIZE), "C\\+\\+ has no operation aten.add"),
    "a weight between types": (
        lambda x, _: inflight_kernels.rms_norm(x, NORM.half(), 1e-6),  # type: ignore[return-value]
        "a norm's weight is torch.float16 and not torch.bfloat16",
    ),
    "a float32 weight around the mean": (
        lambda x, _: inflight_kernels.layer_norm(x, NORM.float(), None, 1e-6),  # type: ignore[return-value]
        "a norm's weight is torch.float32 and not torch.bfloat16",
    ),
    "a narrow norm": (
        lambda x, _: inflight_kernels.layer_norm(x[:, :40], NORM[:40], None, 1e-6),  # type: ignore[return-value]
        "a norm has 40 columns, which is not a multiple of 32",
    ),
    "heads as rows": (
        lambda x, _: inflight_kernels.linear(x.view(-1, 32), weight(32, 32)),
        "is not laid out by tokens",
    ),
    "some rows": (lambda x, _: inflight_kernels.linear(x[1:], weight(SIZE)), "is not laid out by tokens"),
    "transposed": (lambda x, _: norm(x.t().t()[:, ::2]), "a norm is not over"),
    "queries again": (read_twice, "the queries is not the result|queries"),
    "paths": (branch, "takes different paths for decodes and for prefills"),
    "a value is read": (lambda x, _: norm(x) if x.sum() > 0 else x, "C\\+\\+ has no operation aten.sum"),
    "an item is read": (
        lambda x, _: inflight_kernels.linear(x, weight(int(x[0, 0].item()))),
        "no operation aten.item|cannot be recorded",
    ),
    "nothing is returned": (lambda x, _: None, "cannot be recorded"),  # type: ignore[dict-item,return-value]
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_has_otherwise_is_the_reason(name: str) -> None:
    network, reason = REFUSED[name]
    with pytest.raises(Unsupported, match=reason):
        record(network, SIZE)


def test_a_constant_may_be_computed() -> None:
    doubled = record(lambda x, _: inflight_kernels.linear(x, WEIGHT[: SIZE // 2]), SIZE)
    assert kinds(doubled) == ["Linear"]
    assert doubled.operations[0].fields["num_outputs"] == SIZE // 2


WEIGHT = weight(SIZE)


def test_meta_tensors_are_refused_when_nobody_records() -> None:
    with pytest.raises(ValueError, match="got one on meta"):
        norm(torch.empty(3, SIZE, dtype=torch.bfloat16, device="meta"))


def test_norms_without_a_residual_read_one_value() -> None:
    alone = record(lambda x, _: norm(x), SIZE).operations[0]
    assert alone.kind is RmsNorm
    assert len(alone.columns(written=False)) == len(alone.columns(written=True)) == 1


def test_groups_of_columns_have_norms_of_their_own_and_no_residual() -> None:
    grouped = record(lambda x, _: norm(x.view(-1, 2, SIZE)).view(-1, 2 * SIZE), 2 * SIZE).operations[0]
    assert (grouped.number("size"), grouped.number("num_groups")) == (SIZE, 2)

    def with_residual(x: Tensor, _: Batch) -> Tensor:
        heads = x.view(-1, 2, SIZE)
        return inflight_kernels.rms_norm(heads, NORM, 1e-6, heads)[0].view(-1, 2 * SIZE)

    with pytest.raises(Unsupported, match="not over the last dimension of its input alone"):
        record(with_residual, 2 * SIZE)


def test_queries_alone_are_rotated_by_the_steps_own_positions_only() -> None:
    with pytest.raises(Unsupported, match="rotates by the step's own positions only"):
        record(lambda x, batch: inflight_kernels.rope(qkv(x)[0], COS_SIN, batch.blocks[0].slots_T).flatten(1), SIZE)
