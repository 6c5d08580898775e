"""Records the operations of a network, by calling it once with tensors that have no memory (meta tensors).

While it records, the functions of inflight_kernels called with meta tensors are the methods of the recorder
(recorder.py). Everything else that torch is asked to compute with such a tensor, but for views of it, raises
Unsupported. So nothing of a network can be left out of a program: what C++ has no operation for, or has it with other
options, is the reason why the network cannot run there.

What a recording cannot show is a forward pass that takes another path for another batch. Therefore `record` compares
the recordings of three batches: decodes, prefills, and both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inflight_kernels.cpu.batch import Batch
from inflight_kernels.cpu.fusions import fuse
from inflight_kernels.cpu.operations import DecodeAttention, PrefillAttention
from inflight_kernels.cpu.recorded_values import Unsupported
from inflight_kernels.cpu.recorder import Recorder
from inflight_kernels.cpu.recording import Recording
from inflight_kernels.cpu.torch_operations import TorchOperations
from inflight_kernels.dispatch import recording


def record(
    network: Callable[[Tensor, Batch], Tensor],
    input_size: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    num_groups: int = 1,
    num_chosen: int = 0,
) -> Recording:
    """The operations of `network`, which computes in `dtype`, called with an input and a batch.

    Its input is (T, input_size), or, with None, token ids (T,), int64. `num_groups`: of layers with own blocks.
    `num_chosen`: experts of each token that the batch says, of a network without routers. Raises Unsupported.
    """
    batches = tuple(Batch.meta(*counts, num_groups, num_chosen) for counts in ((3, 2), (3, 0), (0, 2)))
    mixed, *others = (record_plain(network, input_size, dtype, batch) for batch in batches)
    for other, missing in zip(others, (PrefillAttention, DecodeAttention), strict=True):
        expected = tuple(operation for operation in mixed.operations if operation.kind is not missing)
        if other.operations != expected:
            raise Unsupported("the network's forward pass takes different paths for decodes and for prefills")
    return fuse(mixed)


@torch.inference_mode()
def record_plain(
    network: Callable[[Tensor, Batch], Tensor], input_size: int | None, dtype: torch.dtype, batch: Batch
) -> Recording:
    """What `network` calls with one batch, as plain operations. See `record`."""
    num_tokens = batch.positions_T.shape[0]
    if input_size is None:
        x = torch.empty(num_tokens, dtype=torch.int64, device="meta")
    else:
        x = torch.empty((num_tokens, input_size), dtype=dtype, device="meta")
    recorder = Recorder(x, batch, dtype)
    with recording(recorder), TorchOperations(recorder.scale, recorder.add, recorder.mul):
        try:
            result = network(x, batch)
            return recorder.finish(result)
        except (RuntimeError, TypeError, AttributeError) as error:
            # Values cannot be read while recording; torch says so in exceptions of several types.
            reason = " ".join(str(error).split())
            raise Unsupported(f"the network's forward pass cannot be recorded: {reason}") from error
