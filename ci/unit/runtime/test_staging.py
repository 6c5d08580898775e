"""A step's arrays on the device: equal, aligned, and always in the same place.

Run: pytest ci/unit/runtime/test_staging.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inflight.runtime.staging import ALIGNMENT, Array, InputBuffer

CPU = torch.device("cpu")


def arrays(count: int = 3) -> dict[str, Array]:
    return {
        "rows": np.arange(count),
        "flags": np.array([True, False, True]),
        "probabilities": np.arange(6, dtype=np.float32).reshape(2, 3),
        "nothing": np.zeros(0, dtype=np.int64),
        "a column": np.arange(8).reshape(4, 2)[:, 1],
        "slots": np.array([-1, 7], dtype=np.int32),
    }


@pytest.mark.parametrize("packs", [True, False])
def test_arrays_arrive_as_they_were(packs: bool) -> None:
    loaded = InputBuffer(1000, CPU, packs=packs).load(arrays())
    assert list(loaded) == list(arrays())
    for name, array in arrays().items():
        assert loaded[name].dtype == torch.from_numpy(array).dtype
        assert np.array_equal(loaded[name].numpy(), array)


def test_they_are_packed_and_aligned_at_the_same_addresses() -> None:
    buffer = InputBuffer(1000, CPU, packs=True)
    given = {name: array for name, array in arrays().items() if array.size}
    first = {name: tensor.data_ptr() for name, tensor in buffer.load(given).items()}
    offsets = [address - first["rows"] for address in first.values()]
    assert offsets == sorted(offsets) and offsets[-1] < 200
    assert not any(offset % ALIGNMENT for offset in offsets)
    for _ in range(3):
        again = buffer.load({name: array.copy() for name, array in given.items()})
        assert {name: tensor.data_ptr() for name, tensor in again.items()} == first


def test_what_has_no_room_is_copied_on_its_own() -> None:
    buffer = InputBuffer(100, CPU, packs=True)
    loaded = buffer.load(arrays(count=50))
    assert loaded["rows"].tolist() == list(range(50))
    assert loaded["flags"].tolist() == [True, False, True]
    inside = range(loaded["flags"].data_ptr(), loaded["flags"].data_ptr() + 100)
    assert loaded["slots"].data_ptr() in inside and loaded["rows"].data_ptr() not in inside


def test_what_is_not_packed_stays_where_it_is() -> None:
    given = arrays()
    loaded = InputBuffer(0, CPU, packs=False).load(given)
    given["rows"][0] = 9
    assert loaded["rows"][0] == 9
