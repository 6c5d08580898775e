"""With `deterministic` a token of the engine's own layers has the same bits however it comes to be computed, also where
the kernels compute it: in a decode, in a chunk with any borders, beside any others.

`ci/unit/models/test_same_bits.py` is the same test of the compiled layers and of torch's.
"""

from __future__ import annotations

import pytest
import torch
from random_decoders import DecoderOnRanks, RandomHeads
from token_steps import assert_same, at_once, attend_to_exact_keys, compute, in_random_steps, one_by_one

from inflight_kernels import dispatch

HEADS = RandomHeads(seed=4, head_dim=32, num_kv_heads=1, queries_of_key=2, window=20)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the layers are made on the CPU, for the interpreter")


@pytest.mark.parametrize(
    ("lengths", "kv_dtype"),
    [((70, 18), None), ((33, 8), torch.float8_e4m3fn), ((33, 8), torch.int8)],
    ids=["activations' type", "fp8 cache", "int8 cache"],
)
def test_kernels_compute_the_same_bits(
    lengths: tuple[int, ...], kv_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of keys end inside the first sequence."""
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, "cpu", "gpu")
    decoder = DecoderOnRanks(HEADS, deterministic=True, kv_dtype=kv_dtype)
    alone = [compute(decoder, lengths, one_by_one(lengths, sequence)) for sequence in range(len(lengths))]
    for steps in (at_once(lengths), in_random_steps(lengths, 1)):
        together = compute(decoder, lengths, steps)
        for sequence, expected in enumerate(alone):
            assert_same(together, expected, sequence)
    rows = torch.stack([expected.hidden[sequence][-1] for sequence, expected in enumerate(alone)])
    assert torch.equal(decoder.logits(rows)[-1:], decoder.logits(rows[-1:]))


def test_they_would_not_if_a_prompt_attended_to_its_own_keys_before_fp8_rounds_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, "cpu", "gpu")
    attend_to_exact_keys(monkeypatch)
    decoder = DecoderOnRanks(HEADS, deterministic=True, kv_dtype=torch.float8_e4m3fn)
    alone, together = (compute(decoder, (5,), steps) for steps in (one_by_one((5,), 0), at_once((5,))))
    with pytest.raises(AssertionError):
        assert_same(together, alone, 0)
