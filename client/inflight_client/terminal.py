"""Output of the command line: streamed answers, error messages, the chat, the greeting of a new server."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from inflight_client import encoder_examples
from inflight_client._exceptions import ClientError, ConnectError, InvalidRequest, UsageError

if TYPE_CHECKING:
    from inflight_client._client import Client
    from inflight_client._types import Chunk, Completion
    from inflight_client.chat import ChatSession

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_EXTRAS = {
    "aiohttp": "load-test",
    "jinja2": "chat",
    "matplotlib": "load-test",
    "prometheus_client": "load-test",
    "transformers": "chat",
}
"""Package that a command imports when it runs -> the extra of the client's wheel that has it."""

_CHAT_HELP = "/reset forgets the conversation, /quit or Ctrl-D ends, Ctrl-C stops the running answer"


class ServeCommand(TyperCommand):
    """A command whose arguments behind a -- are for another program: `context.args`. (typer's type of a context is
    private.)"""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        rest = super().parse_args(ctx, args[:end])
        ctx.args = args[end + 1 :]
        return rest

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- TRITON_OPTIONS]"]


@contextlib.contextmanager
def failing_in_words() -> Iterator[None]:
    """Reports expected failures in one red sentence on standard error and ends the program."""
    try:
        yield
    except (InvalidRequest, UsageError) as error:
        raise fail(str(error), EXIT_USAGE) from None
    except ConnectError as error:
        is_grpc = bool(error.code)  # a load test of an OpenAI server has named its address itself
        remedy = "; start one with inflight serve, or name another one with --url" if is_grpc else ""
        raise fail(f"{error}{remedy}") from None
    except ClientError as error:
        raise fail(str(error)) from None
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        raise fail(f"{error.name} is not installed: pip install 'inflight-client[{_EXTRAS[error.name]}]'") from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of the pipe has exited, as `head` does. Discard further output, or the flush at exit would fail
        # too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_FAILED) from None


def fail(sentence: str, code: int = EXIT_FAILED) -> typer.Exit:
    """Print the sentence and return the exception to raise."""
    typer.secho(f"inflight: {' '.join(sentence.split())}", fg=typer.colors.RED, err=True)
    return typer.Exit(code)


def write_stream(pieces: Iterable[str], *, begun: bool = False) -> None:
    """Print each piece as it arrives, then a newline, also if the answer is interrupted within a line. `begun`: the
    line has text already."""
    try:
        for piece in pieces:
            typer.echo(piece, nl=False)
            sys.stdout.flush()
            begun = not piece.endswith("\n") if piece else begun
    except (ClientError, KeyboardInterrupt) as error:
        if begun or isinstance(error, KeyboardInterrupt):
            typer.echo()
        raise
    typer.echo()


def write_sequences(chunks: Iterable[Chunk]) -> None:
    """Print each sequence under its index, in the order of the indices, as soon as it and those before it are
    whole; if the answer is interrupted, the rest as far as it has come."""
    texts: dict[int, list[str]] = {}
    finished: set[int] = set()
    shown = 0
    try:
        for chunk in chunks:
            texts.setdefault(chunk.sequence_index, []).append(chunk.text)
            if chunk.finish_reason is not None:
                finished.add(chunk.sequence_index)
            while shown in finished:
                _write_sequence(shown, texts.pop(shown))
                shown += 1
    finally:
        for index in sorted(texts):
            _write_sequence(index, texts[index])


def write_log_probs(completion: Completion) -> None:
    """Print a line for each token: its id and log probability, then the most likely tokens in its place."""
    for index, sequence in enumerate(completion.sequences):
        if len(completion.sequences) > 1:
            _write_index(index)
        typer.secho("  token  log prob" + ("   most likely" if sequence.top_log_probs else ""), dim=True)
        tops = sequence.top_log_probs or ((),) * len(sequence.token_ids)
        for token, log_prob, top in zip(sequence.token_ids, sequence.log_probs, tops, strict=True):
            alternatives = "".join(f"   {other.token_id} {other.log_prob:.3f}" for other in top)
            typer.echo(f"{token:7d} {log_prob:9.3f}{alternatives}")


def _write_sequence(index: int, pieces: list[str]) -> None:
    _write_index(index)
    typer.echo("".join(pieces))


def _write_index(index: int) -> None:
    typer.secho(f"[sequence {index}]", bold=True)


def write_summary(completion: Completion, seconds: float) -> None:
    counts = f"{completion.num_output_tokens} tokens in {seconds:.2f} s"
    if completion.num_input_tokens is not None:
        counts = f"{completion.num_input_tokens} prompt tokens, {counts}"
    reasons = ", ".join(sequence.finish_reason or "the server" for sequence in completion.sequences)
    typer.secho(f"{counts}, ended by {reasons}", dim=True, err=True)


def converse(session: ChatSession) -> None:
    """Read questions from the terminal and print the answers, until end of input (Ctrl-D)."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (importing it gives input() its line editing)
    typer.secho(_CHAT_HELP, dim=True)
    while True:
        try:
            text = input("\n> ").strip()
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.secho("\nCtrl-D ends the chat", dim=True)
            continue
        if text == "/quit":
            return
        if text == "/reset":
            session.reset()
            typer.secho("[forgotten]", dim=True)
        elif text.startswith("/"):
            typer.secho(_CHAT_HELP, dim=True)
        elif text:
            _answer(session, text)


def _answer(session: ChatSession, text: str) -> None:
    """Print one answer; a failure is reported and the conversation continues."""
    try:
        with contextlib.closing(session.say(text)) as pieces:
            write_stream(pieces)
    except KeyboardInterrupt:
        typer.secho("[stopped]", dim=True)
    except ClientError as error:
        fail(str(error))


def greet(*, client: Client, grpc: str, http: str, metrics: str, openai: str, model: str, prompt: str) -> None:
    """Show that a new server works by streaming one completion, and how to use it."""
    typer.secho(f"\n{prompt}", bold=True, nl=False)
    try:
        with client.stream(prompt, max_tokens=64, timeout=60) as stream:
            write_stream((chunk.text for chunk in stream), begun=True)
    except ClientError as error:
        fail(f"the server is up, but its first answer failed: {error}")
        return
    typer.secho("\nServing. Talk to it:\n", bold=True)
    typer.echo(
        how_to_talk(command=command(), grpc=grpc, http=http, metrics=metrics, openai=openai, model=model, prompt=prompt)
    )


def command() -> str:
    """How this program was called, for commands that are printed to be copied: by its name if the shell finds it."""
    called = Path(sys.argv[0])
    if called.suffix == ".py":
        return f"{sys.executable} -m inflight_client.cli"
    found = shutil.which(called.name)
    return called.name if found and called.exists() and Path(found).samefile(called) else str(called)


def how_to_ask(*, openai: str, model: str, prompt: str, has_keys: bool, pooled: str = "") -> str:
    """An example command for an OpenAI server without tritonserver, and where else to look. `pooled`: what the model
    gives of a text if it writes none."""
    key = " -H 'Authorization: Bearer KEY'" if has_keys else ""
    call = f"""\
  curl -N http://{openai}/v1/completions -H 'Content-Type: application/json'{key} \\
       -d '{{"model": "{model}", "prompt": "{prompt}", "max_tokens": 64, "stream": true}}'"""
    if pooled:
        call = encoder_examples.of_openai(openai, model, pooled, has_keys=has_keys)
    return f"""
Serving. Ask it{":" if pooled else f", or talk to it at http://{openai}/"}

{call}

  OpenAI's API: http://{openai}/v1      metrics: http://{openai}/metrics      Ctrl-C stops the server
"""


def how_to_ask_several(models: Sequence[str], *, openai: str, metrics: str) -> str:
    """Where a server of several models is asked. `openai`: "" if it has no OpenAI server."""
    api = f"  OpenAI's API: http://{openai}/v1, where /v1/models lists them\n" if openai else ""
    return f"\nServing {', '.join(models)}.\n\n{api}  metrics: http://{metrics}/metrics      Ctrl-C stops the server\n"


def how_to_ask_an_encoder(
    *, http: str, metrics: str, openai: str, model: str, name: str, pooled: str, has_keys: bool, has_api: bool
) -> str:
    """Example commands for a server whose model writes no text. `name`: that of the model on the OpenAI server.
    `has_api`: whether the models of --api embedding are served."""
    calls = [encoder_examples.of_openai(openai, name, pooled, has_keys=has_keys)] if openai else []
    if http and (has_api or not openai):
        calls.append(encoder_examples.of_tritonserver(http, model, pooled, has_api=has_api))
    more = "" if openai or has_api else "\n  Vectors and scores of whole texts: --openai-port 9000, or --api embedding"
    api = f"\n  OpenAI's API: http://{openai}/v1" if openai else ""
    shown = "".join(f"{call}\n\n" for call in calls)
    return f"""
Serving.{" Ask it:" if calls else ""}

{shown}  metrics: http://{metrics}/metrics      Ctrl-C stops the server{api}{more}
"""


def how_to_talk(*, command: str, grpc: str, http: str, metrics: str, openai: str, model: str, prompt: str) -> str:
    """Example commands for a server, which begin with `command`. `http` is "" if the server has no HTTP endpoint,
    `openai` if it has no OpenAI server."""
    url = "" if grpc in ("127.0.0.1:8001", "localhost:8001") else f" --url {grpc}"
    named = "" if model == "llm" else f" --model {model}"
    curl = f"""
  curl -N {http}/v2/models/{model}/generate_stream \\
       -d '{{"text_input": "{prompt}", "max_tokens": 64, "stream": true}}'
"""
    api = f"\n  OpenAI's API: http://{openai}/v1"
    return f"""\
  {command} generate {prompt!r}{url}{named}
  {command} chat{url}{named}
{curl if http else ""}
  from inflight_client import Client
  with Client("{grpc}", model="{model}") as client:
      for chunk in client.stream("{prompt}", max_tokens=64):
          print(chunk.text, end="", flush=True)

  metrics: http://{metrics}/metrics      Ctrl-C stops the server{api if openai else ""}
"""
