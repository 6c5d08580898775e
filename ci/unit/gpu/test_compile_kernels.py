"""Kernels that are compiled without a GPU are those that a launch on it looks for.

Run: pytest ci/unit/gpu/test_compile_kernels.py
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda.device import FakeDevice
from fake_cuda.networks import LLAMA_8B
from triton import knobs
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from ci import compile_kernels
from ci.compile_kernels import GPUS
from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.runtime import decode_graphs, model_runner, state_store
from inflight.runtime.kernel_cache import COMPILED_KERNELS, use_kernel_cache
from inflight.runtime.warmup import warmup_steps

pytestmark = pytest.mark.slow

Launch = tuple[JITFunction[Any], tuple[Any, ...], dict[str, Any]]
TINY = {**LLAMA_8B, "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """Of a small network, whose kernels are kept in a folder of this test."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.delenv(COMPILED_KERNELS, raising=False)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(TINY))
    settings = ["max_batch_size=2", "max_seq_len=128", "max_num_tokens=64", f"kernel_cache_dir={tmp_path / 'kernels'}"]
    return compile_kernels.engine_config(checkpoint, settings)


class CudaDriverWithoutGPU(CudaDriver):  # type: ignore[misc]
    """triton's own, up to what it asks CUDA."""

    def __init__(self, capability: int) -> None:
        self.get_device_capability = lambda _: divmod(capability, 10)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda _: 0


def launches_of(config: EngineConfig) -> list[Launch]:
    noted: list[Launch] = []
    compile_kernels.start_engine(
        config, lambda kernel, *args, **kwargs: noted.append((kernel, args, kwargs)), GPUS["H100"]
    )
    return noted


def tensor_for(value: Any, shift: int = 0) -> Any:
    """A tensor of the host in place of an address of the device: with the same type and as well aligned."""
    if isinstance(value, tuple):
        return tuple(tensor_for(each, shift) for each in value)
    if not hasattr(value, "address"):
        return value
    memory = torch.zeros(256, dtype=torch.uint8)
    begin = -memory.data_ptr() % 16 + value.address % 16 + shift * value.dtype.itemsize
    return memory[begin : begin + 64 // value.dtype.itemsize * value.dtype.itemsize].view(value.dtype)


@contextlib.contextmanager
def on_gpu(capability: int) -> Iterator[list[bool]]:
    """Launches run up to the place where triton would load a compiled kernel. Yields whether each was in its cache."""
    found: list[bool] = []
    before = driver._active, knobs.compilation.listener
    driver.set_active(CudaDriverWithoutGPU(capability))
    knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
    try:
        yield found
    finally:
        driver._active, knobs.compilation.listener = before


def is_found(launch: Launch, change: Callable[[Any], Any] = tensor_for, capability: int = 90, **options: Any) -> bool:
    kernel, args, kwargs = launch
    kernel.device_caches.pop(0, None)  # what this process knows of the GPU
    with on_gpu(capability) as found:
        kernel.run(
            *map(change, args),
            grid=(1,),
            warmup=True,
            **{name: change(each) for name, each in kwargs.items()} | options,
        )
    kernel.device_caches.pop(0, None)
    [is_in_cache] = found
    return is_in_cache


def test_a_launch_finds_what_was_compiled(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a decode step. With real tensors, and with triton's own driver, as far as it goes without a GPU."""
    monkeypatch.setattr(model_runner, "step_bytes", lambda *_, **__: 0)
    monkeypatch.setattr(model_runner, "warmup_steps", lambda *args, **kwargs: warmup_steps(*args, **kwargs)[1:2])
    total, compiled = compile_kernels.compile_kernels(config, GPUS["H100"], jobs=2)
    assert total == compiled > 5
    assert compile_kernels.compile_kernels(config, GPUS["H200"], jobs=2) == (total, 0)
    assert Path(config.kernel_cache_dir).is_dir()

    launches = launches_of(config)
    assert len(launches) == total
    assert all(is_found(launch) for launch in launches)
    # Another GPU, another alignment, another option.
    first = launches[0]
    assert not is_found(first, capability=89)
    assert not is_found(first, lambda value: tensor_for(value, shift=1))
    assert not is_found(first, num_warps=2)

    # A folder of one's own finds what came with an image, and keeps what did not.
    monkeypatch.setenv(COMPILED_KERNELS, config.kernel_cache_dir)
    of_image = set(Path(config.kernel_cache_dir).rglob("*"))
    use_kernel_cache(config.kernel_cache_dir + "-of-container")
    assert all(is_found(launch) for launch in launches)
    assert not is_found(first, num_warps=8)
    assert is_found(first, num_warps=8)
    assert set(Path(config.kernel_cache_dir).rglob("*")) == of_image
    # It is compiled anew once the image has it no longer.
    shutil.move(config.kernel_cache_dir, config.kernel_cache_dir + "-moved")
    assert not is_found(first)
    assert is_found(first)


def compiled_keys(config: EngineConfig, gpu: str, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> set[str]:
    made: list[FakeDevice] = []
    initialise = FakeDevice.__init__

    def noting(self: FakeDevice, **figures: Any) -> None:
        initialise(self, **figures)
        made.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(FakeDevice, "__init__", noting)
        compile_kernels.start_engine(config, lambda *_, **__: None, GPUS[gpu], rank)
    [device] = made
    return device.compiled


class Recording:
    """A CUDA graph of which only the recording is of interest."""

    def recording(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def replay(self) -> None:
        return None


def test_all_ranks_need_the_same_kernels(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a vocabulary whose parts begin at uneven places."""
    change = json.loads(Path(config.gpt_model_path, "config.json").read_text()) | {"vocab_size": 250}
    Path(config.gpt_model_path, "config.json").write_text(json.dumps(change))
    of_two = replace(config, tensor_parallel_size=2)
    assert compiled_keys(of_two, "H100", monkeypatch) == compiled_keys(of_two, "H100", monkeypatch, rank=1)


def test_graphs_and_other_figures_of_a_gpu_need_no_other_kernels(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a folder that was filled for one GPU suits those of the same architecture. Graphs are also recorded where the
    memory of steps is measured, and adapters have graphs of their own."""
    config = replace(config, max_loras=2)
    keys = compiled_keys(config, "H100", monkeypatch)
    with monkeypatch.context() as patch:
        patch.setitem(decode_graphs.GRAPHS, "cuda", lambda: Recording)
        patch.setattr(compile_kernels, "replace", lambda config, **_: config)
        patch.setattr(state_store, "free_memory", lambda *_: 10 << 30)
        assert compiled_keys(config, "H100-PCIe", patch) == keys
    # It would notice more.
    monkeypatch.setattr(model_runner, "warmup_steps", lambda *_, **__: [])
    assert compiled_keys(replace(config, tokens_per_block=32), "H100", monkeypatch) - keys


def test_what_cannot_be_compiled_is_told(config: EngineConfig, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, sentence in (
        (["--gpu", "H1000"], "--gpu takes A100, L4, "),
        (["--gpu", "H100", "--set", "dtype"], "--set takes KEY=VALUE, got 'dtype'"),
        (["--gpu", "H100", "--set", "max_batch=3"], "unknown parameter max_batch; did you mean max_batch_size?"),
        (["--gpu", "H100", "--set", "pipeline_parallel_size=2"], "kernels are compiled ahead for the engine's own"),
        (["--gpu", "H100", "/nowhere"], "/nowhere is not a Hugging Face checkpoint folder"),
    ):
        assert compile_kernels.main(arguments) == 1
        assert capsys.readouterr().err.startswith(sentence)


def test_a_folder_that_cannot_be_written_to_is_named_with_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"kernel_cache_dir .* cannot be made .*; name another folder"):
        use_kernel_cache(str(tmp_path / "file" / "kernels"))
    names = tmp_path / "ahead" / "KEY" / "__grp__kernel.json"
    names.parent.mkdir(parents=True)
    names.write_text("{}")
    monkeypatch.setenv(COMPILED_KERNELS, str(tmp_path / "ahead"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigurationError, match=r"cannot be kept in .*file .*; set kernel_cache_dir to a folder"):
        use_kernel_cache("")
