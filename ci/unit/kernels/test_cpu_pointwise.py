"""Activations, norms, sums and embeddings in C++: what torch computes, with the same bits in any batch and by all
variants.

Run: pytest ci/unit/kernels/test_cpu_pointwise.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from compiled_network import IN_ORDER_OF_FMA, force, needs_compiler
from thread_ranks import ThreadCollectives
from torch import Tensor

import inflight_kernels
from inflight.layers.norm_parts import NormPart, NormParts
from inflight_kernels import Activation, PartSquares
from inflight_kernels.cpu import Batch, Program, Unsupported, WeightPacker, load_library, record
from inflight_kernels.kv_cache.step_blocks import StepBlocks

pytestmark = [pytest.mark.slow, needs_compiler]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZE = 96
WITHOUT_GATE = [each for each in Activation if each is not Activation.CLAMPED_SWIGLU]
Network = Callable[[Tensor, Batch], Tensor]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def batch_of(num_tokens: int) -> Batch:
    tokens = torch.arange(num_tokens)
    blocks = (StepBlocks(tokens, torch.zeros(1, 1, dtype=torch.int32)),)
    return replace(Batch.meta(num_tokens, 0), positions_T=tokens * 7 % 50, blocks=blocks)


def compiled(network: Network, input_size: int | None, dtype: torch.dtype) -> Program:
    library, recording = load_library(dtype), record(network, input_size, dtype)
    return Program(library, recording, WeightPacker(library, [recording]))


def by_all_variants(network: Network, x: Tensor, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Its result in C++, which is asserted to be that of each row by itself and that of every variant."""
    expected, batch = None, batch_of(len(x))
    for of_dtype, variant, instruction in IN_ORDER_OF_FMA:
        if of_dtype != dtype:
            continue
        force(monkeypatch, instruction, variant)
        program = compiled(network, None if x.dim() == 1 else x.shape[1], dtype)
        found = program(x, batch)
        expected = found if expected is None else expected
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0)), variant
        for row in range(0, len(x), 5):
            rows = slice(row, row + 1)
            alone = program(x[rows].contiguous(), replace(batch_of(1), positions_T=batch.positions_T[rows]))
            assert torch.equal(alone.nan_to_num(7.0), expected[rows].nan_to_num(7.0)), variant
    assert expected is not None
    return expected


def assert_rounded(found: Tensor, exact: Tensor, error: float) -> None:
    """`exact`, float64, within `error` and what rounding to the type of `found` takes, twice."""
    bound = error + 1.01 * torch.finfo(found.dtype).eps * exact.abs()
    assert found.shape == exact.shape and bool(((found.double() - exact).abs() <= bound).all())


def exactly(activation: Activation, x: Tensor) -> Tensor:
    x = x.double()
    match activation:
        case Activation.SILU:
            return x * torch.sigmoid(x)
        case Activation.GELU:
            return x * torch.special.ndtr(x)
        case Activation.GELU_TANH:
            return F.gelu(x, approximate="tanh")
        case Activation.RELU:
            return x.clamp(min=0.0)
        case _:
            return x.clamp(min=0.0).square()


def inputs(num_columns: int, dtype: torch.dtype) -> Tensor:
    """Of every size that an activation tells apart."""
    x = 3 * random(17, num_columns, dtype=dtype)
    x[3], x[4], x[5] = 0.0, 60.0, -60.0
    x[6] = torch.linspace(-7, 7, num_columns).to(dtype)
    return x


@pytest.mark.parametrize("activation", WITHOUT_GATE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_activation_is_its_formula_within_a_millionth(
    dtype: torch.dtype, activation: Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = inputs(90, dtype)
    found = by_all_variants(lambda x, _: inflight_kernels.activate(x, activation), x, dtype, monkeypatch)
    assert_rounded(found, exactly(activation, x), 1e-6)
    torch.testing.assert_close(found, inflight_kernels.activate(x, activation), atol=1e-6, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_so_is_a_gated_one(dtype: torch.dtype, activation: Activation, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.cat([inputs(90, dtype), 5 * random(17, 90, dtype=dtype)], 1)
    found = by_all_variants(lambda x, _: inflight_kernels.activate_and_mul(x, activation), x, dtype, monkeypatch)
    expected = inflight_kernels.activate_and_mul(x, activation)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_number_stays_none(
    dtype: torch.dtype, activation: Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = random(9, 64, dtype=dtype)
    x[2, 5] = x[7, 40] = float("nan")
    found = by_all_variants(lambda x, _: inflight_kernels.activate_and_mul(x, activation), x, dtype, monkeypatch)
    assert found.isnan().nonzero().tolist() == [[2, 5], [7, 8]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_stands_behind_an_activation_are_zeros(dtype: torch.dtype) -> None:
    up, down = random(90, SIZE, dtype=dtype) / 8, random(SIZE, 90, dtype=dtype) / 8

    def network(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return inflight_kernels.linear(inflight_kernels.activate(inflight_kernels.linear(x, up), Activation.GELU), down)

    own = up.clone(), down.clone()
    program, x = compiled(lambda x, _: network(x, *own), SIZE, dtype), random(33, SIZE, dtype=dtype)
    assert program(torch.full_like(x, float("nan"))).isnan().all()  # in the same memory
    found, exact = program(x), network(x.double(), up.double(), down.double())
    assert (found.double() - exact).norm() < 2 * torch.finfo(dtype).eps * exact.norm()


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("weight_dtype", ["as x", torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_rounds_by_the_type_of_its_weight(
    dtype: torch.dtype, weight_dtype: torch.dtype | str, with_residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random(SIZE, dtype=weight_dtype if isinstance(weight_dtype, torch.dtype) else dtype)

    def network(x: Tensor, _: Batch) -> Tensor:
        residual = x[:, SIZE:] if with_residual else None
        normed = inflight_kernels.rms_norm(x[:, :SIZE], weight, 1e-5, residual)
        return normed if isinstance(normed, Tensor) else normed[0] + normed[1]

    x = random(17, 2 * SIZE, dtype=dtype)
    found, expected = by_all_variants(network, x, dtype, monkeypatch), network(x, batch_of(17))
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    else:
        # Where float32 adds up in another order, a tie may fall otherwise.
        assert (found == expected).float().mean() > 0.99


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm_rounds_once(
    dtype: torch.dtype, with_residual: bool, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = random(SIZE, dtype=dtype), random(SIZE, dtype=dtype).flip(0) if with_bias else None

    def network(x: Tensor, _: Batch) -> Tensor:
        residual = x[:, SIZE:] if with_residual else None
        normed = inflight_kernels.layer_norm(x[:, :SIZE], weight, bias, 1e-5, residual)
        return normed if isinstance(normed, Tensor) else normed[0] + normed[1]

    x = random(17, 2 * SIZE, dtype=dtype) + 3
    found, expected = by_all_variants(network, x, dtype, monkeypatch), network(x, batch_of(17))
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-6)
    else:
        assert (found == expected).float().mean() > 0.99


@pytest.mark.parametrize("weight_dtype", ["as x", torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_so_do_norms_of_heads(
    dtype: torch.dtype, weight_dtype: torch.dtype | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head_dim, angles = 32, random(50, 16)
    of_norms = weight_dtype if isinstance(weight_dtype, torch.dtype) else dtype
    cos_sin, norms = torch.cat([angles.cos(), angles.sin()], 1), random(2, head_dim, dtype=of_norms).unbind()

    def into(keys: Tensor, values: Tensor) -> Network:
        def network(x: Tensor, batch: Batch) -> Tensor:
            q, k, v = x.view(-1, 4, head_dim).split([2, 1, 1], 1)
            positions, slots = batch.positions_T, batch.blocks[0].slots_T
            rotated = inflight_kernels.rope_and_kv_write(q, k, v, cos_sin, positions, keys, values, slots, *norms)
            return rotated.view(-1, 2 * head_dim)

        return network

    caches = [torch.zeros(2, 5, 4, 1, head_dim, dtype=dtype) for _ in range(2)]
    x = random(17, 4 * head_dim, dtype=dtype)
    found = by_all_variants(into(*caches[0]), x, dtype, monkeypatch)
    expected = into(*caches[1])(x, batch_of(17))
    # Rows by themselves have been written to the first slot.
    keys, expected_keys = (each[0].flatten(0, 1)[1:] for each in caches)
    for mine, theirs in ((found, expected), (keys, expected_keys)):
        if dtype == torch.float32:
            torch.testing.assert_close(mine, theirs, atol=2e-6, rtol=1e-6)
        else:
            assert (mine == theirs).float().mean() > 0.98


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_alone_are_normalised_and_rotated_after_norms_of_other_heads(
    dtype: torch.dtype, with_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    head_dim, angles = 32, random(50, 16)
    cos_sin, (norm, other) = torch.cat([angles.cos(), angles.sin()], 1), random(2, head_dim, dtype=dtype).unbind()

    def network(x: Tensor, batch: Batch) -> Tensor:
        heads = x.view(-1, 5, head_dim)
        normed = inflight_kernels.rms_norm(heads[:, 2:], other, 1e-5)
        assert isinstance(normed, Tensor)
        queries = inflight_kernels.rope(heads[:, :2], cos_sin, batch.positions_T, norm if with_norm else None, 1e-5)
        return queries.view(-1, 2 * head_dim) + normed[:, 1:].view(-1, 2 * head_dim)

    x = random(17, 5 * head_dim, dtype=dtype)
    found, expected = by_all_variants(network, x, dtype, monkeypatch), network(x, batch_of(17))
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-6)
    else:
        assert (found == expected).float().mean() > 0.98


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_and_its_position_are_added_to_the_bits_of_torch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, positions = random(60, SIZE, dtype=dtype), random(52, SIZE, dtype=dtype)

    def network(token_ids: Tensor, batch: Batch) -> Tensor:
        of_position = inflight_kernels.embedding(batch.positions_T, positions[2:])
        return inflight_kernels.embedding(token_ids, tokens) + of_position

    token_ids = torch.arange(17) * 11 % 60
    found = by_all_variants(network, token_ids, dtype, monkeypatch)
    assert torch.equal(found, network(token_ids, batch_of(17)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_values_are_multiplied_to_the_bits_of_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def network(x: Tensor, _: Batch) -> Tensor:
        return x[:, :40] * x[:, 60:]

    x = random(17, 100, dtype=dtype)
    assert torch.equal(by_all_variants(network, x, dtype, monkeypatch), network(x, batch_of(17)))


def test_a_given_embedding_takes_the_place_of_a_token_and_not_of_its_position_or_what_does_not_give_way() -> None:
    tokens, others, positions = random(60, SIZE), random(61, SIZE), random(50, SIZE)

    def network(token_ids: Tensor, batch: Batch) -> Tensor:
        of_position = inflight_kernels.embedding(batch.positions_T, positions)
        of_token = inflight_kernels.embedding(token_ids, tokens) + of_position
        return of_token + inflight_kernels.embedding(token_ids, others, gives_way=False)

    given = random(1, SIZE)
    batch = replace(batch_of(3), given_T=torch.tensor([-1, 0, -1]), given_rows=given)
    found = compiled(network, None, torch.float32)(torch.tensor([4, 5, 6]), batch)
    embedded = torch.stack([tokens[4], given[0], tokens[6]]) + positions[batch.positions_T]
    assert torch.equal(found, embedded + others[4:7])


def assert_near(found: Tensor, expected: Tensor) -> None:
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-5)
    else:
        # Where float32 adds up in another order, a tie may fall otherwise.
        assert found.shape == expected.shape and (found == expected).float().mean() > 0.98


@pytest.mark.parametrize("gate", ["none", "before", "behind"])
@pytest.mark.parametrize("weight_dtype", ["as x", torch.float32], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_of_a_part_is_that_part_of_the_norm(
    dtype: torch.dtype, weight_dtype: torch.dtype | str, gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = random(SIZE, dtype=weight_dtype if isinstance(weight_dtype, torch.dtype) else dtype)
    gate_first = gate == "before"

    def network(x: Tensor, _: Batch) -> Tensor:
        first, second, share = x.split(SIZE, 1)
        sums = inflight_kernels.row_squares([first, second], share if gate_first else None)
        squares, shares = PartSquares(sums, range(2), 2 * SIZE), None if gate == "none" else share
        return inflight_kernels.rms_norm_of_part(second, weight, 1e-5, squares, shares, gate_first)

    x = 2 * random(17, 3 * SIZE, dtype=dtype)
    found, columns, shares = by_all_variants(network, x, dtype, monkeypatch), x[:, : 2 * SIZE], x[:, 2 * SIZE :]
    weights = torch.cat([weight, weight])
    if gate == "none":
        expected = inflight_kernels.rms_norm(columns, weights, 1e-5)
    else:
        expected = inflight_kernels.gated_rms_norm(
            columns, torch.cat([shares, shares], 1), weights, 1e-5, gate_first=gate_first
        )
    assert isinstance(expected, Tensor)
    assert_near(found, expected[:, SIZE:])
    assert_near(network(x, batch_of(17)), expected[:, SIZE:])


@pytest.fixture
def threads() -> Iterator[ThreadCollectives]:
    threads = ThreadCollectives(4)
    yield threads
    threads.close()


@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_exchange_the_squares_of_queries_and_keys(
    threads: ThreadCollectives, dtype: torch.dtype, num_tokens: int
) -> None:
    """Four ranks have queries, and each two of them a copy of a key head."""
    queries, keys = random(num_tokens, 4 * SIZE, dtype=dtype), random(num_tokens, 2 * 32, dtype=dtype)
    weights = random(4 * SIZE, dtype=dtype), random(2 * 32, dtype=dtype)
    of_norms = NormPart(range(4), 4 * SIZE), NormPart(range(0, 4, 2), 2 * 32)
    normed = [inflight_kernels.rms_norm(x, weight, 1e-5) for x, weight in zip((queries, keys), weights, strict=True)]

    def compute(rank: int) -> None:
        of_queries, of_keys = slice(rank * SIZE, (rank + 1) * SIZE), slice(rank // 2 * 32, (rank // 2 + 1) * 32)
        x = torch.cat([queries[:, of_queries], keys[:, of_keys]], 1)
        own = weights[0][of_queries].clone(), weights[1][of_keys].clone()
        parts = NormParts(threads.ranks[rank], of_norms)  # type: ignore[arg-type]

        def of_q(x: Tensor, _: Batch) -> Tensor:
            squares, _ = parts.squares((x[:, :SIZE], x[:, SIZE:]))
            return inflight_kernels.rms_norm_of_part(x[:, :SIZE], own[0], 1e-5, squares)

        def of_k(x: Tensor, _: Batch) -> Tensor:
            _, squares = parts.squares((x[:, :SIZE], x[:, SIZE:]))
            return inflight_kernels.rms_norm_of_part(x[:, SIZE:], own[1], 1e-5, squares)

        for network, wanted in ((of_q, normed[0][:, of_queries]), (of_k, normed[1][:, of_keys])):
            assert_near(network(x, batch_of(num_tokens)), wanted)
            assert_near(compiled(network, x.shape[1], dtype)(x), wanted)

    threads.run(compute)


def test_other_columns_are_refused() -> None:
    def network(x: Tensor, _: Batch) -> Tensor:
        squares = PartSquares(inflight_kernels.row_squares([x]), range(1), 24)
        return inflight_kernels.rms_norm_of_part(x, torch.ones(24), 1e-5, squares)

    with pytest.raises(Unsupported, match="a rank has 24 columns of a norm, which is not a multiple of 16"):
        compiled(network, 24, torch.float32)
