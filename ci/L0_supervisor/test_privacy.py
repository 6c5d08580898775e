"""What only the operator can do to a server, or see of it, over every protocol.

pytest ci/L0_supervisor/test_privacy.py
"""

from __future__ import annotations

import base64
import json
import stat
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import tritonclient.grpc as grpc
from server_process import ServerProcess
from toy_client import TOY_REPOSITORY, Stream
from tritonclient.utils import InferenceServerException
from waiting import until

Open = Callable[[ServerProcess], Stream]

PROGRAM = (TOY_REPOSITORY / "toy" / "1" / "model.py").read_bytes()
CONFIG = json.dumps({"name": "toy", "backend": "python"})
UPLOAD = {"parameters": {"config": CONFIG, "file:1/model.py": base64.b64encode(PROGRAM).decode()}}

OVER_HTTP = {
    "index": ("/v2/repository/index", {}),
    "upload": ("/v2/repository/models/mine/load", UPLOAD),
    "unload": ("/v2/repository/models/toy/unload", {}),
    "system shared memory": ("/v2/systemsharedmemory/region/r/register", {"key": "/k", "byte_size": 8}),
    "cuda shared memory": ("/v2/cudasharedmemory/unregister", {}),
    "log": ("/v2/logging", {"log_verbose_level": 1}),
    "trace": ("/v2/trace/setting", {"trace_level": ["OFF"]}),
    "a model's trace": ("/v2/models/toy/trace/setting", {"trace_level": ["OFF"]}),
}

OVER_GRPC: dict[str, Callable[[grpc.InferenceServerClient], object]] = {
    "index": lambda client: client.get_model_repository_index(),
    "upload": lambda client: client.load_model("mine", config=CONFIG, files={"file:1/model.py": PROGRAM}),
    "unload": lambda client: client.unload_model("toy"),
    "system shared memory": lambda client: client.register_system_shared_memory("r", "/k", 8),
    "cuda shared memory": lambda client: client.unregister_cuda_shared_memory(),
    "log": lambda client: client.update_log_settings({"log_verbose_level": 1}),
    "trace": lambda client: client.update_trace_settings(settings={"trace_level": ["OFF"]}),
}


def post(url: str, body: object) -> int:
    """As a page in a browser could send it."""
    headers = {"Content-Type": "text/plain", "Origin": "http://somewhere.else"}
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=180) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_what_could_take_the_server_over_is_closed(server: ServerProcess, open_stream: Open) -> None:
    stubs = server.stub_pids
    assert {name: post(server.http_url + path, body) for name, (path, body) in OVER_HTTP.items()} == dict.fromkeys(
        OVER_HTTP, 403
    )
    with grpc.InferenceServerClient(server.grpc_url) as client:
        for call in OVER_GRPC.values():
            with pytest.raises(InferenceServerException, match="restricted"):
                call(client)
        assert client.is_server_ready() and client.is_model_ready("toy")
        assert client.get_model_config("toy").config.name == "toy"
        assert client.get_inference_statistics("toy").model_stats
    stream = open_stream(server)
    stream.ask("still here", 2)
    assert stream.rest() == ["still here"] * 2
    assert server.stub_pids == stubs


def test_the_key_is_in_nobodys_command_line(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("a-key-that-is-nobody-elses")
    with ServerProcess(model_repository=TOY_REPOSITORY, api_key_file=key) as server:
        command_lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.pids]
        assert any(b"--grpc-restricted-protocol=" in words for words in command_lines)
        assert not any(b"nobody-elses" in words for words in command_lines)
        assert "nobody-elses" not in server.log + server.told


def test_prompts_are_for_this_user_alone(server: ServerProcess, open_stream: Open) -> None:
    """In the regions of the start, after one has grown, and in those of a model that was loaded again."""

    def is_private() -> bool:
        return all(stat.S_IMODE(region.stat().st_mode) == 0o600 for region in server.shared_memory)

    assert server.shared_memory
    until(is_private, "only the owner may read")
    first = set(server.shared_memory)
    stream = open_stream(server)
    stream.ask("y" * 3_000_000)
    stream.rest()
    assert is_private()
    stream = open_stream(server)
    stream.ask("lose")
    stream.rest()
    until(lambda: set(server.shared_memory) - first, "a new region")
    until(is_private, "only the owner may read")
