"""What `inflight serve` and `inflight openai` show after the start of a model that writes no text.

pytest ci/unit/client/test_encoder_examples.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inflight.supervisor.options import Endpoints
from inflight_client.cli import app

ENCODER: dict[str, Any] = {"grpc": "", "metrics": "a:2", "model": "llm", "run_directory": Path(), "openai": ""}


@pytest.mark.parametrize(
    ("pooled", "arguments", "addresses", "shown"),
    [
        ("vectors", ("openai",), {"openai": "a:9"}, ["a:9/v1/embeddings"]),
        ("scores", ("openai", "--api-key-file", "/a/key"), {"openai": "a:9"}, ["a:9/rerank"]),
        ("scores", ("serve", "--openai-port", "9"), {"openai": "a:9", "http": "a:0"}, ["a:9/rerank"]),
        ("vectors", ("serve", "--api", "vllm,embedding"), {"http": "a:0"}, ["a:0/v2/models/embedding/infer"]),
        ("scores", ("serve", "--api", "embedding-unary"), {"http": "a:0"}, ["a:0/v2/models/rerank/infer"]),
        ("scores", ("serve",), {"http": "a:0"}, ["a:0/v2/models/llm/generate"]),
        (
            "vectors",
            ("serve", "--api", "embedding", "--openai-port", "9", "--openai-set", "served_model_names=bert"),
            {"openai": "a:9", "http": "a:0"},
            ["a:9/v1/embeddings", "a:0/v2/models/embedding/infer"],
        ),
        ("vectors", ("serve", "--no-http"), {}, []),
    ],
)
def test_of_an_encoder_calls_are_shown_that_it_answers(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pooled: Any,
    arguments: tuple[str, ...],
    addresses: dict[str, str],
    shown: list[str],
) -> None:
    given: list[Any] = []
    monkeypatch.setattr("inflight.supervisor.serve.serve", lambda options: given.append(options) or 0)
    assert CliRunner().invoke(app, arguments).exit_code == 0
    given[0].on_ready(Endpoints(**{"http": "", **ENCODER, **addresses, "pooled": pooled}))
    told = capsys.readouterr().out
    commands = re.findall(r"curl http://(\S+)(.*) \\\n +-d '(.*)'\n", told)
    assert [where for where, _, _ in commands] == shown
    assert all(json.loads(body) for _, _, body in commands)
    for where, headers, body in commands:
        assert ("Bearer KEY" in headers) is ("--api-key-file" in arguments)
        if where.startswith("a:9"):
            assert json.loads(body)["model"] == ("bert" if "--openai-set" in arguments else "llm")
    assert "Ctrl-C stops the server" in told
    assert not any(words in told for words in ("completions", 'max_tokens": 64', "talk to it"))
    says_more = arguments in (("serve",), ("serve", "--no-http"))
    assert ("--openai-port 9000, or --api embedding" in told) is says_more
