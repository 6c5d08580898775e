"""`inflight openai` with ranks of its own, and beside a program that has the engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import openai
import pytest
from real_engine import CHECKPOINT
from server_process import command_of, is_rank
from waiting import until

from inflight import EngineConfig, GenerationExecutor
from inflight.run_directory import RUN_DIRECTORY
from inflight.supervisor import processes

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 180
"""Seconds after which something that should happen counts as never happening."""
KEY, OTHER = "a-key-of-some-length", "another-key-of-some-length"


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the engine's name is found."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("run", numbered=True)
        folder.chmod(0o700)
        patch.setenv(RUN_DIRECTORY, str(folder))
        yield folder


@pytest.fixture(scope="module")
def executor(run_directory: Path) -> Iterator[GenerationExecutor]:
    config = EngineConfig(dtype="float32", num_threads=1, max_batch_size=4)
    with GenerationExecutor.create(CHECKPOINT, config, name="mine", progress=False) as executor:
        yield executor


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        **variables,
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("backend", "kernels", "client")),
    }
    program = [sys.executable, "-m", "inflight_client.cli", "openai", *arguments]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_it_serves_the_programs_engine_until_it_is_told_to_end(executor: GenerationExecutor, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    options = ("--engine", "mine", "--port", "0", "--api-key-file", str(keys), "--openai-set", "served_model_names=a,b")
    options += ("--openai-set", "reasoning_parser=qwen3")
    with start(str(CHECKPOINT), *options) as process:
        assert process.stderr is not None
        url = process.stderr.readline().split()[-1]
        with openai.OpenAI(base_url=url, api_key=KEY) as client:
            answer = client.completions.create(model="b", prompt="Once upon a time", max_tokens=16, temperature=0)
            assert [model.id for model in client.models.list()] == ["a", "b"]
            thinking = client.chat.completions.create(
                model="a",
                messages=[{"role": "user", "content": "Hi."}],
                temperature=0,
                extra_body={"guided_regex": "(yes|no)"},
            )
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="wrong").models.list()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    assert thinking.choices[0].message.content in ("yes", "no"), "the model may think before its answer, and cannot"
    assert answer.choices[0].text == executor.generate("Once upon a time", max_tokens=16).text


def test_a_thousand_prompts_of_one_key_delay_anothers_by_a_turn(executor: GenerationExecutor, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n{OTHER}\n")
    options = {"model": "mine", "max_tokens": 32, "extra_body": {"ignore_eos": True}}
    with start(str(CHECKPOINT), "--engine", "mine", "--port", "0", "--api-key-file", str(keys)) as process:
        assert process.stderr is not None
        url = process.stderr.readline().split()[-1]
        with (
            openai.OpenAI(base_url=url, api_key=KEY) as many,
            openai.OpenAI(base_url=url, api_key=OTHER) as few,
            many.completions.create(prompt=["Once"] * 1000, stream=True, **options) as stream,
        ):
            next(stream)
            for _ in range(3):
                few.completions.create(prompt="Once", **options)
            executor.get_stats()
            assert executor.get_stats(PATIENCE)[-1].num_queued_requests > 500
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


class TestAlone:
    ASKED: ClassVar[dict[str, Any]] = {
        "model": "llm",
        "prompt": "Once upon a time",
        "max_tokens": 200,
        "seed": 3,
        "stream": True,
        "extra_body": {"ignore_eos": True},
    }

    def start(self, tmp_path: Path) -> tuple[subprocess.Popen[str], str, Path]:
        """The supervisor, the server's address, and its directory."""
        options = ("--port", "0", "--dtype", "float32", "--set", "num_threads=1", "--drain-timeout", "120")
        process = start(str(CHECKPOINT), *options, TMPDIR=str(tmp_path), **{RUN_DIRECTORY: ""})
        assert process.stderr is not None and process.stdout is not None
        told = [process.stderr.readline()]
        while "; run directory " not in told[-1]:
            assert told[-1], f"it has ended: {told}"
            told.append(process.stderr.readline())
        shown = next(line for line in process.stdout if "OpenAI's API: " in line)
        return process, shown.split()[2], Path(told[-1].split()[-1])

    def test_ranks_server_and_supervisor_die_and_it_serves_on(self, tmp_path: Path) -> None:
        first, url, run_directory = self.start(tmp_path)
        with first, openai.OpenAI(base_url=url, api_key="none", max_retries=20) as client:
            undisturbed = "".join(piece.choices[0].text for piece in client.completions.create(**self.ASKED))
            everything = processes.marked(run_directory)
            (rank,) = filter(is_rank, everything)

            stream = client.completions.create(**self.ASKED)
            text = next(stream).choices[0].text
            os.kill(rank, signal.SIGKILL)
            assert text + "".join(piece.choices[0].text for piece in stream) == undisturbed

            (server,) = (pid for pid in everything if b"inflight.http" in command_of(pid))
            os.kill(server, signal.SIGKILL)
            until(lambda: health(url) == 200, "the server is started again")

            stream = client.completions.create(**self.ASKED)
            text = next(stream).choices[0].text
            first.kill()
            first.wait()
            second, again, _ = self.start(tmp_path)
            with second:
                assert again == url
                second.send_signal(signal.SIGTERM)
                assert text + "".join(piece.choices[0].text for piece in stream) == undisturbed
                assert second.wait(PATIENCE) == 0
        assert not run_directory.exists() and not processes.marked(run_directory)


def health(url: str) -> int:
    try:
        return httpx.get(f"{url.removesuffix('/v1')}/health", trust_env=False).status_code
    except httpx.TransportError:
        return 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--engine", "a/b"), "cannot be called"),
        (("--engine", "none", "--set", "worker_start_timeout_ms=100"), "no engine called 'none' serves here"),
        (("--api-key-file", "/nowhere"), "cannot be read"),
        (("--engine", "mine", "--api-key-file", "/nowhere"), "cannot be read"),
        (("--openai-set", "tool_parser=nope"), "tool_parser must be one of hermes"),
        (("/nowhere",), "nowhere"),
    ],
)
def test_what_is_missing_is_said_in_a_sentence(run_directory: Path, arguments: tuple[str, ...], words: str) -> None:
    with start("--port", "0", *arguments) as process:
        _, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert words in told
    assert "Traceback" not in told


TEMPLATE = """
{%- if tools %}{{ tools | tojson }}{% endif -%}
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content }}
{%- for call in message.tool_calls %}{{ call.function | tojson }}{% endfor -%}
{%- endfor -%}
<|assistant|>"""
ANIMALS = ("cat", "dog", "fox")
FEED = {
    "type": "function",
    "name": "feed",
    "parameters": {"type": "object", "properties": {"animal": {"enum": ANIMALS}}, "required": ["animal"]},
    "strict": True,
}


def test_a_loop_of_function_calls(executor: GenerationExecutor, tmp_path: Path) -> None:
    """The default model, with a chat template that knows tools."""
    for path in CHECKPOINT.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    arguments = (str(tmp_path), "--engine", "mine", "--port", "0", "--openai-set", "tool_parser=hermes")
    with start(*arguments) as process:
        assert process.stderr is not None
        url = process.stderr.readline().split()[-1]
        with openai.OpenAI(base_url=url, api_key="none") as client:
            options: Any = {"model": "mine", "tools": [FEED], "max_output_tokens": 200, "temperature": 0}
            asked = client.responses.create(
                input="Feed one.", tool_choice="required", parallel_tool_calls=False, **options
            )
            (call,) = asked.output
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "It is fed."}
            with client.responses.stream(
                input=[result], previous_response_id=asked.id, tool_choice="none", **options
            ) as stream:
                events = list(stream)
            sent_back = [{"role": "user", "content": "Feed one."}, *asked.output, result]
            again = client.responses.create(input=sent_back, tool_choice="none", **options)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    assert json.loads(call.arguments)["animal"] in ANIMALS
    ended = events[-1].response
    assert ended.output_text == "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert (again.usage.input_tokens, again.output_text) == (ended.usage.input_tokens, ended.output_text)
