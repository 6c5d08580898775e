"""The console command against a model that is a function: what it prints, what it returns, what it says on failure.

pytest ci/unit/client/test_cli.py
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from inflight_client import Call, Client, MockTransport, Reply, RequestRefused, text_reply
from inflight_client.chat import ChatError, ChatSession, Message, load_chat_template, tokenizer_folder
from inflight_client.cli import app
from inflight_client.terminal import command, converse, greet, how_to_ask, how_to_talk

Connect = Callable[[MockTransport], None]


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Connect:
    """Puts a transport in the place of every server."""

    def replace(transport: MockTransport) -> None:
        monkeypatch.setattr("inflight_client.cli.connect", lambda *_: Client(transport=transport))

    return replace


def run(*arguments: str, input: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=input)


def two_pieces(call: Call) -> Iterator[Reply]:
    yield text_reply("Once", token_ids=(1,))
    yield text_reply(" more", token_ids=(2,), finish_reason="stop", final=True)


def refusing(call: Call) -> Iterator[Reply]:
    raise RequestRefused("Exceeds maximum queue size")
    yield


def test_generate_streams_the_answer(connect: Connect) -> None:
    transport = MockTransport(two_pieces)
    connect(transport)
    result = run("generate", "go on", "-n", "5", "--temperature", "0.5", "--stop", "a", "--stop", "b", "--stats")
    assert (result.exit_code, result.stdout) == (0, "Once more\n")
    assert "2 tokens" in result.stderr
    inputs = transport.calls[0].inputs
    assert inputs["max_tokens"].tolist() == [5]
    assert inputs["stop_words"].tolist() == [b"a", b"b"]
    assert inputs["stream"].tolist() == [True]
    assert "guided_decoding_guide" not in inputs


def test_generate_names_an_adapter(connect: Connect) -> None:
    transport = MockTransport(two_pieces)
    connect(transport)
    assert run("generate", "go on", "--lora", "pirate").exit_code == 0
    assert run("generate", "go on").exit_code == 0
    with_adapter, without = (call.inputs for call in transport.calls)
    assert with_adapter["lora_name"].tolist() == [b"pirate"]
    assert "lora_name" not in without


def test_generate_sends_a_json_schema(connect: Connect, tmp_path: Path) -> None:
    transport = MockTransport(two_pieces)
    connect(transport)
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object"}')
    assert run("generate", "go on", "--json-schema", str(file)).exit_code == 0
    inputs = transport.calls[0].inputs
    assert inputs["guided_decoding_guide_type"].tolist() == [b"json_schema"]
    assert inputs["guided_decoding_guide"].tolist() == [b'{"type": "object"}']
    missing = run("generate", "go on", "--json-schema", str(tmp_path / "none"))
    assert missing.exit_code == 2 and "cannot be read" in missing.stderr


def test_generate_sends_a_table_of_embeddings(connect: Connect, tmp_path: Path) -> None:
    transport = MockTransport(two_pieces)
    connect(transport)
    np.save(tmp_path / "table.npy", np.array([[1.0, 2.0]]))
    assert run("generate", "go on", "--prompt-table", str(tmp_path / "table.npy")).exit_code == 0
    sent = transport.calls[0].inputs["prompt_embedding_table"]
    assert (sent.dtype, sent.tolist()) == (np.float16, [[1.0, 2.0]])
    (tmp_path / "broken.npy").write_bytes(b"")
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object))
    for name in ("none.npy", "broken.npy", "objects.npy"):
        failed = run("generate", "go on", "--prompt-table", str(tmp_path / name))
        assert failed.exit_code == 2 and "cannot be read" in failed.stderr


def test_generate_prints_several_sequences_in_order(connect: Connect) -> None:
    def interleaved(call: Call) -> Iterator[Reply]:
        yield text_reply("b", token_ids=(1,), sequence_index=1)
        yield text_reply(" more", token_ids=(2,), finish_reason="length", sequence_index=1)
        yield text_reply("a", token_ids=(3,), finish_reason="stop", sequence_index=0, final=True)

    transport = MockTransport(interleaved)
    connect(transport)
    result = run("generate", "x", "--num-return-sequences", "2", "--stats")
    assert (result.exit_code, result.stdout) == (0, "[sequence 0]\na\n[sequence 1]\nb more\n")
    assert "3 tokens" in result.stderr and "ended by stop, length" in result.stderr
    assert transport.calls[0].inputs["num_return_sequences"].tolist() == [2]


def test_interrupted_sequences_are_printed_as_far_as_they_have_come(connect: Connect) -> None:
    def break_off(call: Call) -> Iterator[Reply]:
        yield text_reply("whole", finish_reason="stop", sequence_index=1)
        yield text_reply("half", sequence_index=0)
        raise RequestRefused("too busy")

    connect(MockTransport(break_off))
    result = run("generate", "x", "--num-return-sequences", "2")
    assert (result.stdout, result.exit_code) == ("[sequence 0]\nhalf\n[sequence 1]\nwhole\n", 1)
    assert result.stderr == "inflight: too busy\n"


def test_generate_prints_log_probabilities_and_alternatives(connect: Connect) -> None:
    def with_log_probs(call: Call) -> Iterator[Reply]:
        outputs = {
            **text_reply("a", token_ids=(3,), finish_reason="stop").outputs,
            "output_log_probs": np.array([[-1.5]], np.float32),
            "top_token_ids": np.array([[[7, 3]]], np.int32),
            "top_log_probs": np.array([[[-0.5, -1.5]]], np.float32),
        }
        yield Reply(outputs=outputs, final=True)

    transport = MockTransport(with_log_probs)
    connect(transport)
    result = run("generate", "x", "--log-probs", "2")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == "a"
    assert result.stdout.splitlines()[-1].split() == ["3", "-1.500", "7", "-0.500", "3", "-1.500"]
    inputs = transport.calls[0].inputs
    assert (inputs["return_log_probs"].tolist(), inputs["num_log_probs"].tolist()) == ([True], [2])


def test_an_error_before_the_first_piece_prints_no_empty_line(connect: Connect) -> None:
    connect(MockTransport(refusing))
    assert run("generate", "x").stdout == ""


def test_generate_reads_standard_input(connect: Connect) -> None:
    transport = MockTransport(two_pieces)
    connect(transport)
    run("generate", "-", input="from a pipe")
    assert transport.calls[0].inputs["text_input"].tolist() == [b"from a pipe"]


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("generate", "x"), 1, "inflight: Exceeds maximum queue size\n"),
        (("generate", "x", "--seed", "-1"), 2, "inflight: seed must be between 0 and"),
        (("load-test", "--concurrency", "5:1:1"), 2, "inflight: '5:1:1' is not a sweep"),
        (("load-test", "--input-tokens", "5:1"), 2, "inflight: input tokens must be at least 1"),
        (("load-test", "--prompts", "/no/file"), 2, "Invalid value for '--prompts'"),
        (("serve", "--set", "no-value"), 2, "inflight: --set takes KEY=VALUE"),
        (("generate",), 2, "Missing argument"),
    ],
)
def test_failures_are_one_sentence(connect: Connect, arguments: tuple[str, ...], code: int, sentence: str) -> None:
    connect(MockTransport(refusing))
    result = run(*arguments)
    assert result.exit_code == code
    assert sentence in result.stderr and "Traceback" not in result.output


@pytest.mark.parametrize("arguments", [("generate", "x"), ("chat",), ("load-test",)])
def test_no_server_is_told_with_what_to_do(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, "--url", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "inflight: no server answers there: " in result.stderr
    assert result.stderr.endswith("; start one with inflight serve, or name another one with --url\n")


@pytest.mark.parametrize(
    ("arguments", "host"), [(("generate", "x"), "gpu7"), (("chat",), "gpu7"), (("load-test",), "[::1]")]
)
def test_an_address_of_http_is_explained(arguments: tuple[str, ...], host: str) -> None:
    result = run(*arguments, "--url", f"http://{host}:8000/v2")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"inflight: http://{host}:8000/v2 is no gRPC address: write host and port of the server's gRPC endpoint "
        f"without http://, as in {host}:8001\n"
    )


@pytest.mark.parametrize("url", ["localhost", "", ":8001", "localhost:", "localhost:99999", "localhost:eight"])
@pytest.mark.parametrize("arguments", [("generate", "x"), ("chat",), ("load-test",), ("analyze",)])
def test_an_address_without_a_port_is_refused(arguments: tuple[str, ...], url: str) -> None:
    result = run(*arguments, "--url", url)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no gRPC address: write host and port, as in " in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("pieces", "printed"), [(["half"], "half\n"), (["half", ""], "half\n"), (["", ""], ""), (["line\n"], "line\n")]
)
def test_an_answer_that_breaks_off_ends_its_line_before_the_error(
    connect: Connect, pieces: list[str], printed: str
) -> None:
    def break_off(call: Call) -> Iterator[Reply]:
        yield from map(text_reply, pieces)
        raise RequestRefused("too busy")

    connect(MockTransport(break_off))
    result = run("generate", "x")
    assert (result.stdout, result.stderr, result.exit_code) == (printed, "inflight: too busy\n", 1)


def test_a_greeting_that_fails_ends_the_line_of_its_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    with Client(transport=MockTransport(refusing)) as client:
        greet(client=client, grpc="a:1", http="", metrics="a:2", openai="", model="llm", prompt="Once")
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("\nOnce\n", 1)


def test_commands_are_printed_as_this_one_was_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "venv" / "bin" / "inflight"
    script.parent.mkdir(parents=True)
    script.write_text("")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["venv/bin/inflight", "serve"])
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert command() == "venv/bin/inflight"
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    assert command() == "inflight"
    addresses = dict(grpc="localhost:8001", http="", metrics="localhost:8002", openai="", model="llm", prompt="Once")
    assert "  venv/bin/inflight generate 'Once'\n" in how_to_talk(command="venv/bin/inflight", **addresses)


def test_serve_hands_its_options_to_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr("inflight.supervisor.serve.serve", lambda options: given.append(options) or 3)
    sizes = ("-tp", "2", "-pp", "3", "-dp", "4")
    result = run("serve", "/models/m", *sizes, "--set", "device = cpu", "--grpc-port", "0")
    assert result.exit_code == 3
    (options,) = given
    assert options.checkpoint == Path("/models/m")
    assert options.parameters == {
        "tensor_parallel_size": "2",
        "pipeline_parallel_size": "3",
        "data_parallel_size": "4",
        "device": "cpu",
    }
    assert (options.grpc_address, options.grpc_port, options.http_port) == ("127.0.0.1", 0, 8000)
    assert options.on_ready is not None


def test_serve_without_http_shows_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr("inflight.supervisor.serve.serve", lambda options: given.append(options) or 0)
    run("serve", "--no-http", "--open-apis", "--canary-period", "0")
    run("serve", "--api-key-file", "/a/key")
    closed, keyed = given
    assert (closed.allow_http, closed.open_apis, closed.canary_period) == (False, True, 0.0)
    assert (keyed.allow_http, keyed.open_apis, keyed.api_key_file) == (True, False, Path("/a/key"))
    addresses = {
        "command": "inflight",
        "grpc": "localhost:8001",
        "metrics": "localhost:8002",
        "openai": "",
        "model": "llm",
        "prompt": "Once",
    }
    assert "curl" in how_to_talk(http="localhost:8000", **addresses)
    assert "curl" not in how_to_talk(http="", **addresses)


def test_serve_takes_the_options_of_an_openai_server(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr("inflight.supervisor.serve.serve", lambda options: given.append(options) or 0)
    run("serve")
    run("serve", "--openai-port", "0", "--openai-api-key-file", "/a/key", "--openai-set", "served_model_names=a,b")
    without, with_one = given
    assert without.openai is None
    assert (with_one.openai.port, with_one.openai.host, with_one.openai.api_key_file) == (0, "127.0.0.1", "/a/key")
    assert with_one.openai.model_names == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--openai-set", "max_body_bytes=1"), "need --openai-port"),
        (("--openai-port", "0", "--openai-set", "max_bodybytes=1"), "did you mean max_body_bytes?"),
        (("--openai-port", "0", "--openai-set", "max_body_bytes=many"), "is wrong"),
        (("--openai-port", "0", "--openai-set", "max_body_bytes=0"), "at least 1"),
        (("--openai-port", "0", "--openai-set", "max_body_bytes"), "--openai-set takes KEY=VALUE"),
    ],
)
def test_wrong_options_of_an_openai_server_are_explained(arguments: tuple[str, ...], words: str) -> None:
    result = run("serve", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_openai_serves_without_tritonserver(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr("inflight.supervisor.serve.serve", lambda options: given.append(options) or 3)
    keys, times = ("--api-key-file", "/a/key"), ("--drain-timeout", "7", "--adopt-timeout", "8", "--ready-timeout", "9")
    result = run("openai", "/models/m", "-tp", "2", "--set", "device=cpu", "--port", "0", *keys, *times)
    assert result.exit_code == 3
    (options,) = given
    assert not options.allow_tritonserver and options.checkpoint == Path("/models/m")
    assert options.parameters == {"tensor_parallel_size": "2", "device": "cpu"}
    assert (options.openai.port, options.openai.host, options.openai.api_key_file) == (0, "127.0.0.1", "/a/key")
    assert (options.drain_timeout, options.adopt_timeout, options.ready_timeout) == (7, 8, 9)
    asked = how_to_ask(openai="localhost:9000", model="llm", prompt="Once", has_keys=True)
    assert "http://localhost:9000/v1/completions" in asked and "Bearer KEY" in asked
    assert "Bearer" not in how_to_ask(openai="localhost:9000", model="llm", prompt="Once", has_keys=False)


def test_openai_attaches_to_an_engine_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr("inflight.http.serve.serve", lambda options, tells_absence: given.append(options))
    assert run("openai", "/models/m", "--engine", "mine", "--set", "max_seq_len=99").exit_code == 0
    (options,) = given
    assert (options.engine, options.launches_ranks) == ("mine", False)
    assert options.parameters == {"gpt_model_path": "/models/m", "max_seq_len": "99"}


@pytest.mark.parametrize("option", ["--tensor-parallel-size", "--drain-timeout", "--log-file"])
def test_what_only_ranks_have_that_are_started_is_refused_beside_an_engine(option: str) -> None:
    result = run("openai", "--engine", "mine", option, "2")
    assert result.exit_code == 2
    assert f"{option} is not for an engine that runs" in result.stderr


def test_help_does_not_load_what_only_some_commands_need() -> None:
    heavy = ("torch", "transformers", "matplotlib", "inflight")
    code = f"import inflight_client.cli, sys; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": _client_path()}
    )
    assert done.stdout.strip() == "[]", done.stderr


def _client_path() -> str:
    return str(Path(__file__).resolve().parents[3] / "client")


def spell(messages: list[Message]) -> list[int]:
    """A template that anybody can read: the roles' first letters."""
    return [ord(message["role"][0]) for message in messages]


def test_a_conversation_remembers_both_sides() -> None:
    transport = MockTransport(two_pieces)
    session = ChatSession(Client(transport=transport), spell, system="Be brief.", max_tokens=9)
    assert list(session.say("Hello")) == ["Once", " more"]
    list(session.say("Again"))
    assert [message["content"] for message in session.messages] == [
        "Be brief.",
        "Hello",
        "Once more",
        "Again",
        "Once more",
    ]
    assert bytes(transport.calls[1].inputs["input_ids"].tolist()) == b"suau"
    session.reset()
    assert session.messages == [{"role": "system", "content": "Be brief."}]


def test_an_answer_that_is_broken_off_is_cancelled_and_remembered_as_it_stands() -> None:
    transport = MockTransport(two_pieces)
    session = ChatSession(Client(transport=transport), spell)
    pieces = session.say("Hello")
    next(pieces)
    pieces.close()
    assert transport.streams[0].cancelled
    assert session.messages[-1] == {"role": "assistant", "content": "Once"}


def test_a_question_that_fails_leaves_no_trace() -> None:
    session = ChatSession(Client(transport=MockTransport(refusing)), spell)
    with pytest.raises(RequestRefused):
        list(session.say("Hello"))
    assert session.messages == []


def test_a_chat_goes_on_after_a_failure_and_ends_with_the_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["first", "", "/what", "second"])

    def read(prompt: str) -> str:
        for line in lines:
            return line
        raise EOFError

    answers = iter([refusing, two_pieces])
    monkeypatch.setattr("builtins.input", read)
    converse(ChatSession(Client(transport=MockTransport(lambda call: next(answers)(call))), spell))
    output = capsys.readouterr()
    assert "Exceeds maximum queue size" in output.err
    assert "Once more" in output.out


def test_chat_without_a_tokenizer_says_what_to_name(connect: Connect, tmp_path: Path) -> None:
    connect(MockTransport(two_pieces))
    result = run("chat", "--tokenizer", str(tmp_path))
    assert result.exit_code == 2
    assert "--tokenizer" in result.stderr and "Traceback" not in result.output


def test_a_package_of_an_extra_is_asked_for_by_the_extras_name(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect(MockTransport(two_pieces))
    monkeypatch.setitem(sys.modules, "transformers", None)
    folder = Path(__file__).resolve().parents[3] / "model_repository/llm/1/checkpoint"
    result = run("chat", "--tokenizer", str(folder))
    sentence = "inflight: transformers is not installed: pip install 'inflight-client[chat]'\n"
    assert (result.exit_code, result.stderr) == (1, sentence)


def test_the_servers_own_folder_is_taken_if_it_is_here(tmp_path: Path) -> None:
    config = {"parameters": {"gpt_model_path": {"string_value": str(tmp_path)}}}
    assert tokenizer_folder(config) == tmp_path
    for elsewhere in ("checkpoint", "/nowhere/at/all", ""):
        config = {"parameters": {"gpt_model_path": {"string_value": elsewhere}}}
        assert tokenizer_folder(config) is None


def test_the_default_checkpoint_can_chat() -> None:
    folder = Path(__file__).resolve().parents[3] / "model_repository/llm/1/checkpoint"
    template = load_chat_template(folder)
    short = template([{"role": "user", "content": "Hello"}])
    long = template([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}] * 2)
    assert 0 < len(short) < len(long)


def test_a_tokenizer_without_a_template_cannot_chat(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE())).save_pretrained(tmp_path)
    with pytest.raises(ChatError, match="no chat template"):
        load_chat_template(tmp_path)
