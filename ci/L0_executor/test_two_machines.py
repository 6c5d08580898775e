"""Ranks on two machines, by `mpi_hostfile` and `mpi_interface`, and an engine on each of them. The second is a network
namespace of this one."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import far_engine
import psutil
import pytest
from calls import Caller
from outer_jobs import MODEL
from two_machines import second_machine, why_impossible

from inflight.context_phase import RequestType
from inflight.executor.executor import make_launcher
from inflight.executor.front.remote import RemoteFront
from inflight.executor.in_process import InProcessExecutor
from inflight.model_config import read_engine_config
from inflight.request import Request


@pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "it is possible")
def test_ranks_of_two_machines_give_the_tokens_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, alone = read_engine_config(MODEL, {"dtype": "float32", "max_loras": "", "lora_dir": "", "num_threads": "1"})
    with InProcessExecutor(config=alone) as executor:
        expected = tokens_of(Caller(executor))
    with second_machine() as other:
        hostfile = tmp_path / "hosts"
        hostfile.write_text(f"{other.near_address}:1\n{other.address}:1\n")
        monkeypatch.setenv("PATH", f"{other.ssh_folder}:{os.environ['PATH']}")
        # By itself UCX would try shared memory between them, as they have one kernel.
        monkeypatch.setenv("UCX_TLS", "self,tcp")
        split = replace(
            alone, tensor_parallel_size=2, mpi_hostfile=str(hostfile), mpi_interface=other.interface, executor="mpi"
        )
        front = RemoteFront(split, make_launcher(split))
        front.start()
        try:
            assert tokens_of(Caller(front)) == expected
            # Ranks inherit the socket of hydra, which listens on every interface, whatever it is told.
            assert {address.ip for address in listening(front, "python") - listening(front, "mpiexec")} == {
                other.near_address
            }
        finally:
            front.shutdown()
        assert front.engine_pids() == []


@pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "it is possible")
def test_an_engine_of_one_machine_goes_on_from_a_prompt_of_the_other(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    keys = {
        "dtype": "float32",
        "max_loras": "",
        "lora_dir": "",
        "num_threads": "1",
        "max_tokens_in_buffer": "1024",
        "kv_transfer_key_file": str(secret),
    }
    with second_machine() as other:
        near = {**keys, "kv_transfer_interface": other.interface, "kv_transfer_timeout_ms": "300000"}
        _, config = read_engine_config(MODEL, near)
        with InProcessExecutor(config) as executor:
            whole, first = (
                executor.await_responses(executor.enqueue_request(far_engine.request(kind)))[0].result
                for kind in (RequestType.CONTEXT_AND_GENERATION, RequestType.CONTEXT_ONLY)
            )
            assert whole is not None and first is not None and first.context_phase_params is not None
            program = shlex.join([sys.executable, far_engine.__file__, json.dumps(keys)])
            answer = subprocess.run(
                [other.ssh_folder / "ssh", other.address, program],
                input=first.context_phase_params.serialize(),
                capture_output=True,
                check=True,
            )
    found = json.loads(answer.stdout)
    assert found == {"tokens": whole.output_token_ids, "num_cached": len(far_engine.PROMPT) - 1}


def listening(front: RemoteFront, program: str) -> set[Any]:
    """Where the engine's processes of this name on this machine listen."""
    processes = [psutil.Process(pid) for pid in front.engine_pids()]
    return {
        connection.laddr
        for process in processes
        if process.name().startswith(program)
        for connection in process.net_connections("tcp4")
        if connection.status == psutil.CONN_LISTEN
    }


def tokens_of(caller: Caller) -> list[int]:
    request_id = caller.executor.next_request_id()
    caller.send(Request(request_id=request_id, input_token_ids=[1, 1321, 436, 265], max_tokens=32))
    (final,) = caller.wait(request_id)
    assert final.result is not None, final.error_msg
    return caller.tokens[request_id]
