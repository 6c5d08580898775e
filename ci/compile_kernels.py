"""Fill triton's cache with the kernels that a configuration needs, for GPUs that this machine does not have.

    python -m ci.compile_kernels --gpu H100,L40S                           the default model
    python -m ci.compile_kernels /models/llama --gpu A100 --set max_batch_size=64

The engine starts on the fake device of `ci/helpers/fake_cuda` with the figures of such a GPU, and takes the steps of
its warm-up: of a checkpoint only config.json is read. Its launches go through triton's own code, up to the compiler,
which writes to the folder that kernel_cache_dir or TRITON_CACHE_DIR names. On such a GPU the same launches find what
they need if inflight, triton, its assembler and the configuration are the same, and the folder is at the same path,
because triton notes full paths. What they do not find is compiled at the start.

The Dockerfile runs it. The C module with which triton talks to the driver is not compiled: that takes a driver.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

sys.path.insert(0, str(Path(__file__).parent / "helpers"))

import torch
import triton
from fake_cuda.context import fake_cuda
from fake_cuda.device import CUDA
from fake_cuda.networks import FakeNccl, FakeRank, NoWeights
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from inflight.config import EngineConfig
from inflight.distributed.parallel_groups import ParallelGroups
from inflight.distributed.rank_group import SingleRank
from inflight.distributed.tensor_parallel import TensorParallelGroup
from inflight.errors import ConfigurationError
from inflight.log_progress import LogProgress
from inflight.model_config import read_engine_config
from inflight.models.implementation import read_config
from inflight.models.transformers_config import TransformersConfig
from inflight.runtime.loading import RankResources
from inflight.runtime.model_runner import ModelRunner
from inflight.supervisor.installation import find_model_repository

logger = logging.getLogger(__name__)

OF_ITS_CHECKPOINT = {"dtype": "auto", "max_loras": "", "lora_dir": ""}
"""Parameters of the default model that suit no other checkpoint, and what `inflight serve` sets in their place."""

Given = ParamSpec("Given")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class GPU:
    name: str
    """As CUDA has it: tables of tuned launch configurations are found by it."""
    capability: int
    """10 times the major number of the compute capability, plus the minor one."""
    multiprocessors: int


GPUS = {
    "A100": GPU("NVIDIA A100-SXM4-80GB", 80, 108),
    "L4": GPU("NVIDIA L4", 89, 58),
    "L40S": GPU("NVIDIA L40S", 89, 142),
    "H100": GPU("NVIDIA H100 80GB HBM3", 90, 132),
    "H100-PCIe": GPU("NVIDIA H100 PCIe", 90, 114),
    "H200": GPU("NVIDIA H200", 90, 132),
    "B200": GPU("NVIDIA B200", 100, 148),
}


class AbsentGPU:
    """In place of triton's driver: names the GPU for which kernels are compiled, and has none."""

    def __init__(self, gpu: GPU) -> None:
        self._target = GPUTarget("cuda", gpu.capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> AbsentGPU:
        """triton keeps what this process has compiled by device: here for each GPU by itself."""
        return self

    def get_current_stream(self, _: Any) -> int:
        return 0


class Inline(Executor):
    """Runs on the caller's thread, which is the one that sees the fake device."""

    def submit(self, function: Callable[Given, Made], /, *args: Given.args, **kwargs: Given.kwargs) -> Future[Made]:
        done: Future[Made] = Future()
        try:
            done.set_result(function(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


def start_engine(config: EngineConfig, launched: Callable[..., None], gpu: GPU, rank: int = 0) -> None:
    """Start one rank of an engine on such a GPU, without weights, and end it. `launched`: called with each launch's
    kernel and arguments, as JITFunction.run has them, tensors as addresses. All ranks need the same kernels. Raises
    ConfigurationError as a start does."""
    if config.pipeline_parallel_size > 1 or isinstance(read_config(config), TransformersConfig):
        raise ConfigurationError(
            "kernels are compiled ahead for the engine's own layers, and not for pipeline stages: these compile theirs "
            "at their first start"
        )
    # Graphs record what the warm-up has launched; replicas launch alike.
    config = replace(config, cuda_graph_mode=False, data_parallel_size=1)
    size = config.tensor_parallel_size
    group = FakeNccl(rank, size, sums_in_order=config.deterministic) if size > 1 else TensorParallelGroup()
    resources = RankResources(
        device=CUDA,
        thread=Inline(),
        groups=ParallelGroups(tensor=group),
        checkpoint=NoWeights(config.gpt_model_path),
    )
    with fake_cuda(name=gpu.name, capability=gpu.capability, multiprocessors=gpu.multiprocessors) as device:
        device.launched = launched
        rank_group = SingleRank() if size == 1 else FakeRank(rank, [], size)
        ModelRunner.load(config, rank_group, resources=resources).close()


def compile_kernels(config: EngineConfig, gpu: GPU, jobs: int) -> tuple[int, int]:
    """Compile what is not in triton's cache. Returns the numbers of kernels that are needed and that were compiled."""
    found: list[bool] = []
    run = JITFunction.run

    def launched(kernel: JITFunction[Any], *args: Any, **kwargs: Any) -> None:
        run(kernel, *args, grid=None, warmup=True, **kwargs)

    def note(*, cache_hit: bool, **_: Any) -> None:
        found.append(cache_hit)

    with ThreadPoolExecutor(jobs) as pool, _compiling_for(gpu, note), triton.AsyncCompileMode(pool) as compiling:
        start_engine(config, launched, gpu)
        total = len(compiling.raw_futures)
        progress = LogProgress(logger, f"kernels for {gpu.name} are compiled", total)
        for number, future in enumerate(as_completed(compiling.raw_futures), 1):
            future.result()
            progress.note(number)
    return total, found.count(False)


@contextlib.contextmanager
def _compiling_for(gpu: GPU, listener: Any) -> Iterator[None]:
    before = driver._active, knobs.compilation.listener
    driver.set_active(AbsentGPU(gpu))  # type: ignore[arg-type]
    knobs.compilation.listener = listener
    try:
        yield
    finally:
        driver._active, knobs.compilation.listener = before


def engine_config(checkpoint: Path | None, settings: list[str]) -> EngineConfig:
    """The configuration of the default model, or of it with another checkpoint. Raises ConfigurationError."""
    values = {} if checkpoint is None else {**OF_ITS_CHECKPOINT, "gpt_model_path": str(checkpoint.resolve())}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigurationError(f"--set takes KEY=VALUE, got {setting!r}")
        values[key] = value
    return read_engine_config(find_model_repository() / "llm", {**values, "device": "cuda"})[1]


def main(options: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "checkpoint", nargs="?", type=Path, help="Hugging Face folder; the default model's unless given"
    )
    parser.add_argument("--gpu", required=True, metavar="NAME,…", help=", ".join(GPUS))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any parameter of the engine")
    parser.add_argument("--jobs", type=int, default=torch.get_num_threads(), help="kernels that are compiled at once")
    arguments = parser.parse_args(options)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        config = engine_config(arguments.checkpoint, arguments.set)
        for name in arguments.gpu.split(","):
            if name not in GPUS:
                raise ConfigurationError(f"--gpu takes {', '.join(GPUS)}, not {name!r}")
            began = time.monotonic()
            total, compiled = compile_kernels(config, GPUS[name], arguments.jobs)
            print(f"{name}: {total} kernels, {compiled} compiled in {time.monotonic() - began:.0f} s", flush=True)
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
