"""A model that writes text and an encoder in one tritonserver, behind one OpenAI port: what happens to the ranks of one
is no matter of the other."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch
from encoder_checkpoints import TinyEncoder, write_encoder
from fake_tokenizer import byte_tokenizer
from real_engine import CHECKPOINT
from serve_command import inflight
from server_process import ServerProcess, is_rank
from waiting import until

from inflight_client import Client

pytestmark = pytest.mark.long

PROMPT, TEXT = "Once upon a time", "a red animal"
LENGTH = 1200


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> TinyEncoder:
    folder = tmp_path_factory.mktemp("encoder")
    written = write_encoder(folder, "BertModel", vocab_size=300, max_position_embeddings=128)
    byte_tokenizer()._backend.save(str(folder / "tokenizer.json"))
    return written


@pytest.fixture(scope="module")
def server(encoder: TinyEncoder) -> Iterator[ServerProcess]:
    models = [f"story={CHECKPOINT}", f"meaning={encoder.folder}"]
    with ServerProcess(models=models, openai={"port": 0}, parameters={}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.openai_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def launch_of(pid: int) -> dict[str, str]:
    """The engine's parameters, as a rank has them."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    (launch,) = (each for each in variables if each.startswith(b"INFLIGHT_LAUNCH="))
    found: dict[str, str] = json.loads(launch.partition(b"=")[2])["parameters"]
    return found


def ranks_of(server: ServerProcess, folder: Path) -> list[int]:
    return [pid for pid in server.ranks if is_rank(pid) and launch_of(pid)["gpt_model_path"] == str(folder)]


def vector_of(client: openai.OpenAI) -> np.ndarray:
    found = client.embeddings.create(model="meaning", input=TEXT, encoding_format="float").data[0].embedding
    return np.array(found, np.float32)


def expected_vector(encoder: TinyEncoder) -> np.ndarray:
    """As sentence-transformers makes one of a checkpoint without its files: the mean, of length 1."""
    with torch.no_grad():
        states = encoder.model(torch.tensor([list(TEXT.encode())])).last_hidden_state[0]
    mean = states.mean(0)
    return (mean / mean.norm()).numpy()


def test_each_is_a_model_of_tritonserver_and_of_the_openai_server(
    server: ServerProcess, client: openai.OpenAI, encoder: TinyEncoder
) -> None:
    assert [model.id for model in client.models.list()] == ["story", "meaning"]
    np.testing.assert_allclose(vector_of(client), expected_vector(encoder), atol=1e-5)
    answer = client.completions.create(model="story", prompt=PROMPT, max_tokens=24, temperature=0)
    with Client(server.grpc_url, model="story") as theirs:
        assert theirs.generate(PROMPT, max_tokens=24, temperature=0).text == answer.choices[0].text
    asked = {"text_input": TEXT, "max_tokens": 0, "additional_outputs": "hidden_states", "gather_context": True}
    states = httpx.post(f"{server.http_url}/v2/models/meaning/generate", json=asked, timeout=60).json()
    mean = np.array(states["context_hidden_states"], np.float32).reshape(len(TEXT), -1).mean(0)
    np.testing.assert_allclose(mean / np.linalg.norm(mean), expected_vector(encoder), atol=1e-5)
    shown = httpx.get(server.metrics_url).text.splitlines()
    ready = [line for line in shown if line.startswith("inflight_engine_ready")]
    assert all(any(f'model="{name}"' in line for line in ready) for name in ("story", "meaning"))


def test_together_they_have_no_more_threads_than_there_are_cores(server: ServerProcess, encoder: TinyEncoder) -> None:
    launches = [launch_of(pid) for pid in server.ranks]
    assert len(launches) == 2
    threads = [int(launch["num_threads"]) for launch in launches]
    assert min(threads) >= 1 and sum(threads) <= len(os.sched_getaffinity(0))
    assert {launch["memory_share"] for launch in launches} == {"0.5"}


@pytest.mark.parametrize("dying", ["meaning", "story"])
def test_a_stream_of_one_outlives_the_ranks_of_either(
    server: ServerProcess, client: openai.OpenAI, encoder: TinyEncoder, dying: str
) -> None:
    """With the text that it has without that."""
    options = {"model": "story", "prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0}
    extra = {"ignore_eos": True}
    whole = client.completions.create(**options, extra_body=extra).choices[0].text
    others = ranks_of(server, CHECKPOINT if dying == "meaning" else encoder.folder)
    killed = ranks_of(server, encoder.folder if dying == "meaning" else CHECKPOINT)
    assert len(others) == len(killed) == 1
    pieces = []
    for chunk in client.completions.create(**options, stream=True, extra_body=extra):
        pieces.append(chunk.choices[0].text)
        if len(pieces) == 20:
            os.kill(killed[0], signal.SIGKILL)
    assert "".join(pieces) == whole
    until(lambda: (now := server.ranks) and killed[0] not in now and len(now) == 2)
    assert others[0] in server.ranks, "the other engine keeps its ranks"
    np.testing.assert_allclose(vector_of(client), expected_vector(encoder), atol=1e-5)


def test_more_models_than_cores_are_refused_before_anything_starts(encoder: TinyEncoder) -> None:
    cores = len(os.sched_getaffinity(0))
    models = [f"m{index}={encoder.folder}" for index in range(cores + 1)]
    done = inflight("openai", *models, "--port", "0")
    assert done.returncode == 2
    told = " ".join(done.stderr.split())
    assert f"{cores + 1} engines need {cores + 1} cores (m0 1, " in told
    assert f"and there are {cores}: serve fewer" in told
    done = inflight("serve", f"a={encoder.folder}", f"a={CHECKPOINT}")
    assert (done.returncode, "two models are called a" in done.stderr) == (2, True)
