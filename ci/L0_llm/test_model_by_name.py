"""`inflight serve ORGANISATION/NAME`, from a hub on loopback to golden tokens, and on without the hub."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from loopback_hub import LoopbackHub
from server_process import MODEL_REPOSITORY, ServerProcess
from waiting import until

from inflight_client import Client

CHECKPOINT = MODEL_REPOSITORY / "llm" / "1" / "checkpoint"
PATIENCE = 120.0
GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden/default_model.json").read_text("utf-8"))[0]


def ask(server: ServerProcess) -> list[int]:
    with Client(server.grpc_url, timeout=PATIENCE) as client:
        return list(client.generate(GOLDEN["prompt_ids"], max_tokens=48).token_ids)


def test_a_model_of_the_hub_is_served_and_stays_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its branch moves and the hub goes: a server that is started again has the same files."""
    files = {path.name: path.read_bytes() for path in CHECKPOINT.iterdir()}
    with LoopbackHub() as hub:
        commit = hub.publish("org/stories", files)
        for name, value in {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_test"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        with ServerProcess(checkpoint="org/stories", parameters={"dtype": "float32"}) as server:
            assert ask(server) == GOLDEN["token_ids"]
            assert {each.headers.get("authorization") for each in hub.asked} >= {"Bearer hf_test"}
            with Client(server.grpc_url) as client:
                folder = client.model_config()["parameters"]["gpt_model_path"]["string_value"]
            assert folder == str(tmp_path / "hub" / "models--org--stories" / "snapshots" / commit)
            hub.publish("org/stories", {**files, "config.json": b"{}"})
            hub.close()
            os.kill(server.tritonserver_pid, signal.SIGKILL)
            until(lambda: "serving again" in server.told, "started again")
            assert ask(server) == GOLDEN["token_ids"]
