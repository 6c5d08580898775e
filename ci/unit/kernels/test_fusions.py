"""Rules that join recorded operations: each by itself, where it fits and where it must not, and all of them in C++.

Run: pytest ci/unit/kernels/test_fusions.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from compiled_network import needs_compiler
from thread_ranks import ThreadCollectives
from torch import Tensor

import inflight_kernels
from inflight_kernels import Activation, Code, CodedWeight
from inflight_kernels.cpu import Batch, Program, Recording, Unsupported, WeightPacker, fusions, load_library
from inflight_kernels.cpu.collectives import RankPlace
from inflight_kernels.cpu.draft import Draft
from inflight_kernels.cpu.fusions import Rule
from inflight_kernels.cpu.operations import GatedLinear, Linear, Lora, NormOfSum
from inflight_kernels.cpu.record import record_plain
from inflight_kernels.cpu.recording import NOWHERE, Bias
from inflight_kernels.dispatch import recorder_of

Network = Callable[[Tensor, Batch], Tensor]

SIZE = 64
PLACE = RankPlace(address=0, rank=0, size=2, memory=None)


def constant(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def linear(x: Tensor, num_outputs: int = SIZE) -> Tensor:
    weight, bias = constant(num_outputs, x.shape[1], dtype=x.dtype), constant(num_outputs, dtype=x.dtype)
    return inflight_kernels.linear(x, weight / 8, bias)


def adapt(y: Tensor, x: Tensor, batch: Batch) -> Tensor:
    """Adds adapters of rank 8, of two slots."""
    a, b = constant(2, 8, x.shape[1], dtype=x.dtype), constant(2, 8, y.shape[1], dtype=x.dtype).transpose(1, 2)
    scales, ranks = torch.tensor([0.1, 0.2]), torch.tensor([8, 5], dtype=torch.int32)
    assert batch.adapters_T is not None
    return inflight_kernels.lora_add(y, x, a, b, batch.adapters_T, scales, ranks=ranks)


def all_reduce(x: Tensor) -> Tensor:
    summed: Tensor = recorder_of(x).all_reduce(x, PLACE)
    return summed


def all_gather(x: Tensor) -> Tensor:
    gathered: Tensor = recorder_of(x).all_gather(x, PLACE)
    return gathered


def norm(x: Tensor) -> Tensor:
    normed = inflight_kernels.rms_norm(x, constant(SIZE), 1e-6)
    assert isinstance(normed, Tensor)
    return normed


def add_and_norm(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    normed, total = inflight_kernels.rms_norm(x, constant(SIZE), 1e-6, residual)
    return normed, total


def plain(network: Network, dtype: torch.dtype = torch.bfloat16) -> Recording:
    return record_plain(network, SIZE, dtype, Batch.meta(3, 2))


def apply(rule: Rule, recording: Recording) -> Recording:
    draft = Draft(recording)
    fusions.apply(rule, draft)
    rewritten = draft.recording()
    # A draft knows the uses of every value after each step, by places that have stayed.
    places = {place: number for number, place in enumerate([*draft.operations, len(recording.operations)])} | {-1: -1}
    assert {buffer: tuple(places[use] for use in uses) for buffer, uses in draft.uses.items()} == rewritten.uses
    return rewritten


def kinds(recording: Recording) -> list[str]:
    return [operation.kind.__name__ for operation in recording.operations]


def activate(x: Tensor, batch: Batch, activation: Activation = Activation.SILU) -> Tensor:
    """Another layer with the same input stands between."""
    gate_up = linear(x, 2 * 90)
    linear(x)
    return linear(inflight_kernels.activate_and_mul(gate_up, activation))


def reorder(x: Tensor, batch: Batch) -> Tensor:
    """A product of codes whose columns are in another order."""
    codes, scales = torch.zeros(SIZE, 45, dtype=torch.uint8), torch.ones(SIZE, 1)
    weight = CodedWeight(Code.INT4, codes, scales, None, 96, permutation=torch.arange(90).int())
    return inflight_kernels.coded_linear(linear(x, 90), weight)


def activate_without_gate(x: Tensor, batch: Batch) -> Tensor:
    return linear(inflight_kernels.activate(linear(x, 90), Activation.GELU))


@pytest.mark.parametrize("which", [Activation.SILU, Activation.GELU_TANH])
def test_a_linear_layer_computes_activate_and_mul_of_its_result(which: Activation) -> None:
    recording = plain(lambda x, batch: activate(x, batch, which))
    assert kinds(recording) == ["Linear", "Linear", "ActivateAndMul", "Linear"]
    joined = apply(fusions.join_activation, recording)
    assert kinds(joined) == ["GatedLinear", "Linear", "Linear"]
    layer, activation, gated = recording.operations[0], recording.operations[2], joined.operations[0]
    weight, bias = layer.weight("weight"), layer.fields["bias"]
    assert isinstance(bias, Bias)
    assert gated.fields == {
        **layer.fields,
        "out": activation.fields["out"],
        "weight": replace(weight, gated=True),
        "bias": Bias(bias.constant, gated=True),
        "num_outputs": 96,
        "num_deltas": 90,
        "activation": which,
    }


def activate_and_read(read: Network) -> Network:
    def network(x: Tensor, batch: Batch) -> Tensor:
        gate_up = linear(x, 2 * SIZE)
        linear(inflight_kernels.activate_and_mul(gate_up))
        return read(gate_up, batch)

    return network


def activate_a_sum(x: Tensor, batch: Batch) -> Tensor:
    return inflight_kernels.activate_and_mul(all_reduce(linear(x, 2 * SIZE)))


@pytest.mark.parametrize(
    "network",
    [
        activate_and_read(lambda gate_up, _: linear(gate_up)),
        activate_and_read(lambda gate_up, _: gate_up),
        lambda x, _: inflight_kernels.activate_and_mul(linear(x, 3 * SIZE)[:, : 2 * SIZE]),
        lambda x, _: inflight_kernels.activate_and_mul(norm(x)),
        lambda x, _: inflight_kernels.activate_and_mul(x),
        activate_a_sum,
        activate_without_gate,
    ],
    ids=["read again", "the result", "a part", "of a norm", "of the input", "changed before", "without a gate"],
)
def test_an_activation_of_anything_else_is_by_itself(network: Network) -> None:
    recording = plain(network)
    assert apply(fusions.join_activation, recording) == recording


def test_a_linear_layer_adds_the_deltas_of_its_adapters() -> None:
    def network(x: Tensor, batch: Batch) -> Tensor:
        y = linear(x, 3 * SIZE)
        other = linear(x)
        return linear(adapt(y, other, batch))

    recording = plain(network)
    assert kinds(recording) == ["Linear", "Linear", "Lora", "AddDelta", "Linear"]
    joined = apply(fusions.join_adapters, recording)
    assert kinds(joined) == ["Linear", "Lora", "Linear", "Linear"]
    lora, layer = joined.operations[1:3]
    assert layer.fields == {**recording.operations[0].fields, "delta": lora.fields["delta"]}


def adapt_what_is_read(x: Tensor, batch: Batch) -> Tensor:
    y = linear(x)
    linear(y)
    return adapt(y, x, batch)


def adapt_after_a_sum(x: Tensor, batch: Batch) -> Tensor:
    y = linear(x)
    all_reduce(x)
    return adapt(y, x, batch)


def adapt_a_part(x: Tensor, batch: Batch) -> Tensor:
    y = linear(x, 2 * SIZE)
    adapt(y[:, :SIZE], x, batch)
    return y


@pytest.mark.parametrize(
    "network",
    [
        adapt_what_is_read,
        adapt_after_a_sum,
        adapt_a_part,
        lambda x, batch: adapt(norm(x), x, batch),
        lambda x, batch: adapt(x, x, batch),
    ],
    ids=["read before", "another input since", "a part", "of a norm", "of the input"],
)
def test_deltas_of_anything_else_are_added_by_themselves(network: Network) -> None:
    recording = plain(network)
    assert apply(fusions.join_adapters, recording) == recording


def test_a_layer_adds_the_deltas_of_one_adapter() -> None:
    joined = apply(fusions.join_adapters, plain(lambda x, batch: adapt(adapt(linear(x), x, batch), x, batch)))
    assert kinds(joined) == ["Lora", "Linear", "Lora", "AddDelta"]


@pytest.mark.parametrize("network", [activate, activate_without_gate, reorder])
def test_zeros_behind_an_activation_are_read(network: Network) -> None:
    recording = plain(network)
    *_, layer = apply(fusions.read_padding, recording).operations
    before = recording.operations[-1].weight("weight")
    assert before.num_inputs == 90
    assert layer.fields == {**recording.operations[-1].fields, "weight": replace(before, num_inputs=96)}


@pytest.mark.parametrize(
    "network",
    [
        lambda x, _: linear(x[:, :40]),
        lambda x, _: linear(linear(x, 90)),
        lambda x, _: linear(inflight_kernels.activate_and_mul(linear(x, 2 * SIZE))[:, :40]),
        lambda x, _: linear(inflight_kernels.activate_and_mul(linear(x, 2 * 90))[:, 6:]),
        lambda x, _: linear(inflight_kernels.activate(linear(x), Activation.RELU)[:, :40]),
    ],
    ids=["of the input", "of a layer", "not all of it", "not from its start", "not all of it, without a gate"],
)
def test_other_numbers_of_inputs_stay_as_they_are(network: Network) -> None:
    recording = plain(network)
    assert apply(fusions.read_padding, recording) == recording
    with pytest.raises(Unsupported, match="which is not a multiple of 32"):
        fusions.fuse(recording)


def sum_thrice(x: Tensor, _: Batch) -> Tensor:
    hidden = residual = x
    for _ in range(3):
        part = linear(hidden)
        linear(hidden)
        hidden, residual = add_and_norm(all_reduce(part), residual)
    return hidden


def test_a_norm_reads_the_parts_of_a_sum_over_ranks() -> None:
    recording = plain(sum_thrice)
    assert kinds(recording) == ["Linear", "Linear", "Sum", "RmsNorm"] * 3
    joined = apply(fusions.join_sum, recording)
    assert kinds(joined) == ["Linear", "Linear", "NormOfSum"] * 3
    assert [each.fields for each in joined.operations if each.kind is NormOfSum] == [
        each.fields for each in recording.operations[3::4]
    ]


def test_a_network_may_end_with_the_residual() -> None:
    recording = plain(lambda x, _: add_and_norm(all_reduce(linear(x)), x)[1])
    joined = apply(fusions.join_sum, recording)
    assert kinds(joined) == ["Linear", "NormOfSum"]
    last = joined.operations[-1]
    assert last.fields == {**recording.operations[-1].fields, "weight": None}
    assert joined.output == last.fields["out"]


def sum_and_read(read: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Network:
    """`read`: of what was summed, of the norm and of the sum with the residual."""

    def network(x: Tensor, _: Batch) -> Tensor:
        part = all_reduce(linear(x))
        return read(part, *add_and_norm(part, x))

    return network


def sum_two_parts(x: Tensor, _: Batch) -> Tensor:
    first, second = linear(x), linear(x)
    _, total = add_and_norm(all_reduce(first), x)
    return add_and_norm(all_reduce(second), total)[0]


@pytest.mark.parametrize(
    "network",
    [
        sum_and_read(lambda part, normed, total: linear(part)),
        sum_and_read(lambda part, normed, total: part),
        lambda x, _: add_and_norm(*[all_reduce(linear(x))] * 2)[0],
        sum_and_read(lambda part, normed, total: linear(total)),
        sum_and_read(lambda part, normed, total: add_and_norm(linear(normed), total)[0]),
        sum_and_read(lambda part, normed, total: (linear(normed), total)[1]),
        sum_and_read(lambda part, normed, total: all_reduce(normed)),
        lambda x, _: norm(all_reduce(linear(x))),
        lambda x, _: inflight_kernels.layer_norm(all_reduce(linear(x)), constant(SIZE), constant(SIZE), 1e-6, x)[0],
        lambda x, _: add_and_norm(all_reduce(x), norm(x))[0],
        lambda x, _: add_and_norm(all_reduce(linear(x, 2 * SIZE))[:, :SIZE], x)[0],
        lambda x, _: add_and_norm(linear(x), x)[0],
        sum_two_parts,
    ],
    ids=[
        "the sum is read",
        "the sum is the result",
        "the sum is its own residual",
        "the residual is read",
        "the residual of a norm of one rank",
        "both are needed",
        "the norm is changed",
        "no residual",
        "a norm around the mean",
        "of the input",
        "a part",
        "no sum",
        "others met since",
    ],
)
def test_other_sums_and_norms_are_by_themselves(network: Network) -> None:
    recording = plain(network)
    assert apply(fusions.join_sum, recording) == recording


def adapted_mlp(x: Tensor, batch: Batch, activation: Activation = Activation.SILU) -> Tensor:
    gate_up = adapt(linear(x, 2 * 90), x, batch)
    return linear(inflight_kernels.activate_and_mul(gate_up, activation))


def test_rules_work_together() -> None:
    fused = fusions.fuse(plain(lambda x, batch: add_and_norm(all_reduce(adapted_mlp(x, batch)), x)[0]))
    assert [each.kind for each in fused.operations] == [Lora, GatedLinear, Linear, NormOfSum]
    lora, gated, down, _ = fused.operations
    assert gated.fields["delta"] == lora.fields["delta"] != NOWHERE
    assert gated.fields["num_outputs"] == down.weight("weight").num_inputs == 96


def programs(recording: Recording) -> list[Program]:
    """Of the operations by themselves, but for the zeros that products need, and of those that are joined."""
    recordings = [apply(fusions.read_padding, recording), fusions.fuse(recording)]
    library = load_library(recording.dtype)
    packer = WeightPacker(library, recordings)
    return [Program(library, each, packer) for each in recordings]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_joined_operations_give_the_same_bits(dtype: torch.dtype, activation: Activation, num_tokens: int) -> None:
    x = constant(num_tokens, SIZE, dtype=dtype)
    adapters = torch.arange(num_tokens, dtype=torch.int32) % 3 - 1
    batch = replace(Batch.meta(num_tokens, 0), adapters_T=adapters)
    recording = plain(lambda x, batch: adapted_mlp(x, batch, activation), dtype)
    by_themselves, joined = (program(x, batch) for program in programs(recording))
    assert torch.equal(by_themselves, joined)
    assert joined.isfinite().all() and joined.any(1).all()


@pytest.fixture
def threads() -> Iterator[ThreadCollectives]:
    threads = ThreadCollectives(2)
    yield threads
    threads.close()


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("ends_with", ["a norm", "the residual"])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_sums_over_ranks_give_the_same_bits_with_their_norms(
    threads: ThreadCollectives, num_tokens: int, ends_with: str
) -> None:
    x = constant(num_tokens, SIZE)

    def compute(rank: int) -> Sequence[Tensor]:
        def network(x: Tensor, _: Batch) -> Tensor:
            hidden = residual = x
            for _ in range(3):
                part = inflight_kernels.linear(hidden, constant(SIZE, SIZE + rank)[:, :SIZE].contiguous())
                hidden, residual = add_and_norm(threads.ranks[rank].all_reduce(part), residual)
            return hidden if ends_with == "a norm" else residual

        return [program(x) for program in programs(plain(network))]

    (by_themselves, joined), others = threads.run(compute)
    assert torch.equal(by_themselves, joined)
    assert torch.equal(joined, others[1]) and joined.isfinite().all()


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_a_norm_around_the_mean_of_a_sum_over_ranks_is_that_of_one_rank(
    threads: ThreadCollectives, num_tokens: int
) -> None:
    x, weights = constant(num_tokens, SIZE), [constant(SIZE, SIZE + rank)[:, :SIZE].contiguous() for rank in range(2)]

    def layer_norm(total: Tensor, x: Tensor) -> Tensor:
        normed = inflight_kernels.layer_norm(total, constant(SIZE), constant(SIZE), 1e-6, x)
        return normed[0] + normed[1]

    def compute(rank: int) -> Sequence[Tensor]:
        def network(x: Tensor, _: Batch) -> Tensor:
            return layer_norm(threads.ranks[rank].all_reduce(inflight_kernels.linear(x, weights[rank].clone())), x)

        return [program(x) for program in programs(plain(network))]

    (by_themselves, joined), others = threads.run(compute)
    assert torch.equal(by_themselves, joined) and torch.equal(joined, others[1])
    exact = layer_norm(sum(x.float() @ weight.float().T for weight in weights).bfloat16(), x)  # type: ignore[union-attr]
    assert (joined.float() - exact.float()).norm() < 2**-7 * exact.float().norm()
