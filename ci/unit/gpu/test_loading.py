"""How weights come to a GPU: each byte once, from pinned memory, to its final place, while the next ones are read.

Each check is shown to notice what it is for.

Run: pytest ci/unit/gpu/test_loading.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from awq_checkpoints import write_awq_checkpoint
from coded_checkpoints import EXPERTS, write_coded_checkpoint
from encoder_checkpoints import write_encoder
from fake_cuda.context import fake_cuda
from fake_cuda.device import CUDA, FakeDevice, StaleCopy
from fake_cuda.networks import FakeNccl
from fp8_checkpoints import BLOCK_CONFIG, write_fp8_checkpoint
from tiny_checkpoints import CONFIGS, make_checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.models import checkpoint as checkpoint_module
from inflight.models import decoder_loading, transformers_loading, upload
from inflight.models.checkpoint import Checkpoint
from inflight.models.config import ModelConfig
from inflight.models.decoder import Decoder
from inflight.models.decoder_loading import load_decoder
from inflight.models.encoder_loading import load_encoder
from inflight.models.upload import BUFFER_BYTES, RING_SIZE, Upload
from inflight.models.weights import WeightLoader

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
NUM_POSITIONS = 65
TURNED_ON_THE_DEVICE = {"gpt-oss", *(name for name, config in CONFIGS.items() if hasattr(config, "kv_lora_rank"))}
"""Experts, and heads of latents, whose matrices the device transposes, which computes nothing here."""
COMPUTED = ("cos_sin", "v_norm")
"""Fields whose tensors the device makes: no file has them."""


class Observed:
    """What is copied to a fake device, where it lies there, and for what the host waits."""

    def __init__(self, device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_copied = 0
        """Bytes."""
        self.num_pinned = 0
        """Bytes."""
        self.faults: list[str] = []
        """Copies for which the host waits."""
        self.waits: list[str] = []
        self._device = device
        self._memory: dict[int, Tensor] = {}
        self._copy, self._pin = device.copy_to_device, device.pinned
        monkeypatch.setattr(device, "copy_to_device", self.copy_to_device)
        monkeypatch.setattr(device, "pinned", self.pinned)
        monkeypatch.setattr(device, "forbid_waiting", self.waits.append)

    def pinned(self, tensor: Tensor) -> Tensor:
        self.num_pinned += tensor.nbytes
        return self._pin(tensor)

    def copy_to_device(self, source: Tensor, target: Tensor, *, non_blocking: bool) -> None:
        if not source.numel():
            return
        if not (non_blocking and self._device.is_pinned(source) and source.is_contiguous()):
            self.faults.append(f"{tuple(source.shape)} {source.dtype}")
        assert source.dtype == target.dtype and source.shape == target.shape and target.is_contiguous()
        self.num_copied += source.nbytes
        memory = self._of(target)
        place = target.storage_offset() * target.dtype.itemsize
        with unset_fake_temporarily():
            memory[place : place + source.nbytes] = source.detach().reshape(-1).view(torch.uint8)
        self._copy(source, target, non_blocking=non_blocking)

    def values(self, tensor: Tensor) -> Tensor:
        """Of a device tensor: what was copied to it, else zeros."""
        place = tensor.storage_offset() * tensor.dtype.itemsize
        part = self._of(tensor)[place : place + tensor.numel() * tensor.dtype.itemsize]
        with unset_fake_temporarily():
            return part.view(tensor.dtype).view(tensor.shape)

    @property
    def num_memories(self) -> int:
        """Device tensors to which something was copied."""
        return len(self._memory)

    def _of(self, tensor: Tensor) -> Tensor:
        number = self._device.storages.number(tensor)
        if number not in self._memory:
            with unset_fake_temporarily():
                self._memory[number] = torch.zeros(tensor.untyped_storage().nbytes(), dtype=torch.uint8)
        return self._memory[number]


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with fake_cuda() as fake:
        yield fake


@pytest.fixture(autouse=True)
def without_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of cosines and sines is computed, and not read."""

    monkeypatch.setattr(decoder_loading, "cos_sin_table", lambda *_: torch.empty(0))
    monkeypatch.setattr(checkpoint_module.ByteProgress, "end", lambda *_: None)


def load(
    folder: Path,
    where: torch.device,
    group: TensorParallelGroup,
    dtype: torch.dtype,
    *,
    whole_experts: bool = False,
) -> Decoder:
    config = ModelConfig.load(folder)
    with Checkpoint(folder) as checkpoint:
        sets = group.size if whole_experts else 1
        loader = WeightLoader(checkpoint, config.weight_format, group, dtype, where, expert_parallel_size=sets)
        load_network = load_decoder if config.family.encoder is None else load_encoder
        return load_network(config, loader, NUM_POSITIONS)


def weights_of(part: Any) -> Iterator[Tensor]:
    """The tensors of a network that are in its files, in order."""
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list | tuple):
        for each in part:
            yield from weights_of(each)
    elif is_dataclass(part):
        for field in fields(part):
            if field.name not in COMPUTED:
                yield from weights_of(getattr(part, field.name))


def num_bytes(decoder: Decoder) -> int:
    """Of all parameters: a tied head counts once."""
    own = {id(weight): weight for weight in weights_of(decoder)}
    return sum(weight.numel() * weight.dtype.itemsize for weight in own.values())


def check(observed: Observed, on_device: Decoder, on_host: Decoder) -> None:
    for ours, theirs in zip(weights_of(on_device), weights_of(on_host), strict=True):
        assert ours.device == CUDA and ours.dtype == theirs.dtype
        assert torch.equal(observed.values(ours), theirs)
    assert observed.num_memories == len({id(weight) for weight in weights_of(on_device)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in TURNED_ON_THE_DEVICE])
def test_a_weight_is_copied_once_to_its_place_and_nothing_waits_for_it(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every family, in the type of its files and in another one, alone and as either of two ranks."""
    folder = make_checkpoint(tmp_path, name).folder
    splits = CONFIGS[name].num_attention_heads % 2 == 0
    check_copies(folder, [None, 0, 1] if splits else [None], dtype, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_encoders_weights_go_the_same_way(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_encoder(tmp_path, "BertForSequenceClassification")
    check_copies(tmp_path, [None, 0, 1], dtype, monkeypatch)


def check_copies(folder: Path, ranks: list[int | None], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in ranks:
        group = TensorParallelGroup() if rank is None else FakeNccl(rank)
        on_host = load(folder, CPU, group, dtype)
        with fake_cuda() as device, monkeypatch.context() as patch:
            observed = Observed(device, patch)
            on_device = load(folder, CUDA, group, dtype)
            check(observed, on_device, on_host)
        # Padding of the vocabulary is not copied.
        assert observed.num_copied == pytest.approx(num_bytes(on_host), rel=0.03)
        assert observed.faults == []
        assert observed.waits == ["Stream.synchronize"], "once, when everything is read"
        assert observed.num_pinned == RING_SIZE * BUFFER_BYTES


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["mixtral-window", "qwen3-moe", "glm4-moe", "gemma4-experts"])
def test_so_are_whole_experts_of_a_rank(name: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, group, dtype = make_checkpoint(tmp_path, name).folder, FakeNccl(rank), torch.bfloat16
    on_host = load(folder, CPU, group, dtype, whole_experts=True)
    with fake_cuda() as device, monkeypatch.context() as patch:
        observed = Observed(device, patch)
        check(observed, load(folder, CUDA, group, dtype, whole_experts=True), on_host)
    assert observed.num_copied == pytest.approx(num_bytes(on_host), rel=0.03)
    assert (observed.faults, observed.waits) == ([], ["Stream.synchronize"])


def test_quantised_weights_are_packed_on_the_device(
    device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_awq_checkpoint(tmp_path).folder
    observed = Observed(device, monkeypatch)
    on_device = load(folder, CUDA, TensorParallelGroup(), torch.float16)
    assert all(weight.device == CUDA for weight in weights_of(on_device))
    assert (folder / "model.safetensors").stat().st_size == pytest.approx(observed.num_copied, rel=0.1)
    assert (observed.faults, observed.waits) == ([], ["Stream.synchronize"])


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_fp8_weights_and_their_scales_are_copied_once_to_their_places(
    rank: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_fp8_checkpoint(tmp_path).folder
    group = TensorParallelGroup() if rank is None else FakeNccl(rank)
    on_host = load(folder, CPU, group, torch.bfloat16)
    assert torch.float8_e4m3fn in {weight.dtype for weight in weights_of(on_host)}
    with fake_cuda() as device, monkeypatch.context() as patch:
        observed = Observed(device, patch)
        check(observed, load(folder, CUDA, group, torch.bfloat16), on_host)
    assert (observed.faults, observed.waits) == ([], ["Stream.synchronize"])


@pytest.mark.parametrize(("rank", "experts"), [(None, False), (0, False), (1, False), (None, True)])
def test_scales_of_blocks_are_laid_out_on_the_device(
    rank: int | None, experts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the values copied to their places."""
    if experts:
        folder = write_coded_checkpoint(tmp_path, "fp8-official", EXPERTS).folder
    else:
        folder = write_fp8_checkpoint(tmp_path, strategy="block", config=BLOCK_CONFIG).folder
    group = TensorParallelGroup() if rank is None else FakeNccl(rank)
    on_host = load(folder, CPU, group, torch.bfloat16)
    with fake_cuda() as device, monkeypatch.context() as patch:
        observed = Observed(device, patch)
        pairs = list(zip(weights_of(load(folder, CUDA, group, torch.bfloat16)), weights_of(on_host), strict=True))
        for ours, theirs in pairs:
            assert (ours.device, ours.dtype, ours.shape) == (CUDA, theirs.dtype, theirs.shape)
            assert theirs.dtype == torch.float32 or torch.equal(observed.values(ours), theirs)
    assert {theirs.dtype for _, theirs in pairs} == {torch.float8_e4m3fn, torch.float32, torch.bfloat16}
    assert (observed.faults, observed.waits) == ([], ["Stream.synchronize"])


def test_parameters_of_transformers_code_go_the_same_way(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    observed = Observed(device, monkeypatch)
    with unset_fake_temporarily():
        network = nn.Sequential(nn.Linear(8, 5), nn.LayerNorm(5))
        network.scale = nn.Parameter(torch.tensor(2.0))
        before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    transformers_loading._upload_parameters(network, CUDA)
    placed = dict(network.named_parameters())
    assert all(torch.equal(observed.values(placed[name]), before[name]) for name in before)
    assert (observed.faults, observed.waits) == ([], ["Stream.synchronize"])


# -- the ring ----------------------------------------------------------------------------------------------------------

SMALL = 4096
"""Bytes: a tensor of these checkpoints takes several such buffers, and a buffer several small tensors."""


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "Upload", lambda device: Upload(device, SMALL))


@pytest.mark.usefixtures("small_buffers")
def test_the_host_waits_once_for_each_buffer(
    device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path, "llama-biases").folder
    on_host = load(folder, CPU, TensorParallelGroup(), torch.float32)
    observed = Observed(device, monkeypatch)
    check(observed, load(folder, CUDA, TensorParallelGroup(), torch.float32), on_host)
    assert observed.num_pinned == RING_SIZE * SMALL
    assert observed.faults == []
    # A buffer is left when no row more, of at most 320 bytes here, finds room.
    assert len(observed.waits) <= observed.num_copied / (SMALL - 320) + 1


@pytest.mark.usefixtures("small_buffers")
def test_a_buffer_that_is_filled_before_it_is_copied_is_noticed(
    device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path, "llama").folder
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda _: None)
    with pytest.raises(StaleCopy, match="changed before they were copied to the device"):
        load(folder, CUDA, TensorParallelGroup(), torch.float32)


@pytest.mark.parametrize("shape", [(), (0, 4), (7,), (3, 5), (2, 3, 40), (2, 2, 3, 40)], ids=str)
def test_rows_longer_than_a_buffer_are_divided(
    shape: tuple[int, ...], device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed = Observed(device, monkeypatch)
    source = torch.rand(shape)
    target = torch.empty(shape, device=CUDA)
    Upload(CUDA, 256).copy(source, target)
    assert torch.equal(observed.values(target), source)


# -- what each check is for --------------------------------------------------------------------------------------------


def test_copies_of_pageable_memory_are_noticed(
    device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload.Upload, "copy", lambda _, source, target: target.copy_(source))
    observed = Observed(device, monkeypatch)
    load(make_checkpoint(tmp_path, "llama").folder, CUDA, TensorParallelGroup(), torch.float32)
    assert observed.faults


def test_a_second_copy_on_the_device_is_noticed(
    device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path, "llama").folder
    on_host = load(folder, CPU, TensorParallelGroup(), torch.float32)
    copy = upload.Upload.copy
    monkeypatch.setattr(
        upload.Upload, "copy", lambda self, source, target: copy(self, source, torch.empty_like(target))
    )
    observed = Observed(device, monkeypatch)
    with pytest.raises(AssertionError):
        check(observed, load(folder, CUDA, TensorParallelGroup(), torch.float32), on_host)
