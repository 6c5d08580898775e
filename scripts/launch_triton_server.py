#!/usr/bin/env python3
"""Starts tritonserver and the engine's ranks with the options of tensorrtllm_backend's script of this name.

    .venv/bin/python scripts/launch_triton_server.py --world_size 2 --model_repo model_repository

It returns once the server has been started, as that script does, and prints the process that SIGTERM ends gracefully.
With --world_size above 1 the ranks are one MPI job, led by tritonserver's model (`executor` mpi_leader):

    mpiexec -n 1 tritonserver … : -n N-1 python -m inflight.worker

What differs: it listens on loopback unless --host names another interface, and no rank but the first runs a
tritonserver. `inflight serve` is the command that also watches the server and starts it again.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from inflight.errors import ConfigurationError
from inflight.mpi_launcher import find_launcher, launcher_environment, launcher_options
from inflight.supervisor import backend_directory, installation, mpi, processes, repository

PREFIX = "inflight_launch_"
"""Of the server's shared memory, followed by this process's id."""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        _check(options)
        if options.foreground:
            return _run(options)
    except ConfigurationError as error:
        print(f"launch_triton_server.py: {error}", file=sys.stderr)
        return 2
    started = subprocess.Popen([sys.executable, __file__, *arguments, "--foreground"], stdin=subprocess.DEVNULL)
    print(f"tritonserver starts; kill {started.pid} ends it", flush=True)
    started.returncode = 0  # it goes on alone
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raise ConfigurationError for options that do not fit each other, or what is there."""
    if options.world_size < 1:
        raise ConfigurationError(f"--world_size must be at least 1, got {options.world_size}")
    if options.no_mpi and options.world_size > 1:
        raise ConfigurationError(f"--no-mpi starts one process: leave it out for --world_size {options.world_size}")
    if options.multi_model and options.disable_spawn_processes:
        raise ConfigurationError(
            "--disable-spawn-processes needs ranks of several models in one MPI job, and a job has one engine here: "
            "leave it out, and every model starts its own ranks"
        )
    if options.multi_model and options.world_size > 1:
        raise ConfigurationError("--multi-model lets every model start its own ranks: leave out --world_size")
    others = processes.named("tritonserver")
    if others:
        told = f"tritonserver runs already (process {', '.join(map(str, others))})"
        if not options.force:
            raise ConfigurationError(f"{told}: end it, or start another one with --force")
        print(told, file=sys.stderr)
    installation.find(options.tritonserver)
    with tempfile.TemporaryDirectory() as folder:
        _write_repository(options, Path(folder, "models"))
    if options.world_size > 1:
        mpi.check_mpi(find_launcher(Path(sys.executable), one_host=True))


def _run(options: argparse.Namespace) -> int:
    """Start the server, hand SIGTERM and SIGINT on to it, and wait for its end."""
    with tempfile.TemporaryDirectory(prefix="inflight-launch-") as folder:
        laid_out = backend_directory.lay_out(Path(folder, "backends"), options.tritonserver)
        models = _write_repository(options, Path(folder, "models"))
        command = _tritonserver(options, laid_out, models)
        environment = {**os.environ, **laid_out.environment}
        if options.world_size > 1:
            launcher = find_launcher(Path(sys.executable), one_host=True)
            others = ["-n", str(options.world_size - 1), sys.executable, "-m", "inflight.worker"]
            command = [str(launcher), *launcher_options(launcher), "-n", "1", *command, ":", *others]
            environment = launcher_environment(environment, one_host=True)
        print(shlex.join(command), flush=True)
        server = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.send_signal(signal.SIGTERM))
        code = server.wait()
        for left in Path("/dev/shm").glob(f"{PREFIX}{os.getpid()}_*"):
            left.unlink(missing_ok=True)
        return code


def _tritonserver(options: argparse.Namespace, laid_out: backend_directory.BackendDirectory, models: Path) -> list[str]:
    timeout = [f"--exit-timeout-secs={options.exit_timeout}"] if options.exit_timeout is not None else []
    log = ["--log-verbose=3", f"--log-file={options.log_file}"] if options.log else []
    pool = options.multimodal_gpu0_cuda_mem_pool_bytes
    return [
        str(laid_out.tritonserver),
        f"--model-repository={models}",
        f"--backend-directory={laid_out.backends}",
        "--disable-auto-complete-config",
        f"--backend-config=python,shm-region-prefix-name={PREFIX}{os.getpid()}_",
        *(f"--{service}-address={options.host}" for service in ("grpc", "http", "metrics")),
        f"--grpc-port={options.grpc_port}",
        f"--http-port={options.http_port}",
        f"--metrics-port={options.metrics_port}",
        *timeout,
        *log,
        *([f"--cuda-memory-pool-byte-size=0:{pool}"] if pool else []),
    ]


def _write_repository(options: argparse.Namespace, folder: Path) -> Path:
    """The repository to serve, with as many ranks in its configuration as --world_size says; returns `folder`."""
    source = options.model_repo or installation.find_model_repository()
    size = options.world_size
    overrides = {"tensor_parallel_size": str(size), "executor": "mpi_leader"} if size > 1 else {}
    served = repository.write(source, folder, parameters=overrides)
    if size > 1 and served.config is not None and served.config.num_replica_ranks != size:
        stages = served.config.pipeline_parallel_size
        raise ConfigurationError(
            f"--world_size {size} splits every layer over {size} ranks, and {source} has pipeline_parallel_size "
            f"{stages} besides: set that to 1, or start the {size * stages} ranks with mpiexec"
        )
    for name in options.tensorrt_llm_model_name.split(",") if options.tensorrt_llm_model_name else ():
        if not (source / name / repository.CONFIG).is_file():
            raise ConfigurationError(
                f"--tensorrt_llm_model_name: {source} has no model {name}; its engine is {served.engine}"
            )
    return folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Start tritonserver with the engine's ranks, in the background.")
    parser.add_argument("--world_size", type=int, default=1, help="ranks over which every layer is split")
    parser.add_argument("--tritonserver", type=Path, help="the server's binary, if not the installed one")
    parser.add_argument("--model_repo", type=Path, help="model repository, if not inflight's own")
    parser.add_argument("--tensorrt_llm_model_name", default="", help="models with ranks, with commas between them")
    parser.add_argument("--grpc_port", type=int, default=8001)
    parser.add_argument("--http_port", type=int, default=8000)
    parser.add_argument("--metrics_port", type=int, default=8002)
    parser.add_argument("--host", default="127.0.0.1", help="interface to listen on")
    parser.add_argument("--force", "-f", action="store_true", help="start although a tritonserver runs already")
    parser.add_argument("--log", action="store_true", help="log in detail, to --log-file")
    parser.add_argument("--log-file", default="triton_log.txt")
    parser.add_argument("--exit_timeout", type=int, help="seconds that requests have to finish at the end")
    parser.add_argument("--no-mpi", action="store_true", help="one process; so it is anyway with --world_size 1")
    parser.add_argument("--oversubscribe", action="store_true", help="so it is anyway: ranks are bound to no core")
    parser.add_argument("--multi-model", action="store_true", help="every model starts its own ranks")
    parser.add_argument("--disable-spawn-processes", action="store_true", help="refused with --multi-model")
    parser.add_argument(
        "--trtllm_llmapi_launch", action="store_true", help="so it is anyway: the first rank leads the others"
    )
    parser.add_argument(
        "--multimodal_gpu0_cuda_mem_pool_bytes", type=int, default=0, help="of tritonserver's pool on GPU 0"
    )
    parser.add_argument("--foreground", action="store_true", help="wait for the server's end instead of returning")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
