"""The console command `inflight`: generate, chat, load-test and perf-analyzer here, in `engine_commands` those that run
the engine.

It only parses options. Every command imports what it needs when it runs, so that `inflight --help` answers at once.
Expected failures are reported in one sentence on standard error, with exit code 2 for invalid options or requests and 1
otherwise.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inflight_client.engine_commands import analyze, backend_dir, install_server, openai, serve
from inflight_client.terminal import (
    EXIT_FAILED,
    EXIT_USAGE,
    ServeCommand,
    converse,
    fail,
    failing_in_words,
    write_log_probs,
    write_sequences,
    write_stream,
    write_summary,
)

if TYPE_CHECKING:
    from inflight_client._client import Client
    from inflight_client._types import GenerationOptions

app = typer.Typer(
    name="inflight",
    help="Serve Hugging Face checkpoints with in-flight batching on tritonserver, and talk to them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=ServeCommand)(serve)
app.command()(openai)
app.command("install-server")(install_server)
app.command("backend-dir")(backend_dir)
app.command()(analyze)

Url = Annotated[str, typer.Option("--url", "-u", help="gRPC address of the server, host:port.")]
Model = Annotated[str, typer.Option("--model", "-m", help="Name of the model.")]
Timeout = Annotated[float | None, typer.Option("--timeout", help="Seconds an answer may take.", min=0.0)]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="New tokens at most.", min=1)]
Temperature = Annotated[float | None, typer.Option("--temperature", "-t", help="0 takes the likeliest token.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Choose among the k likeliest tokens.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Total probability of the tokens to choose from.")]
MinP = Annotated[float | None, typer.Option("--min-p", help="Drop tokens below this fraction of the likeliest.")]
Seed = Annotated[int | None, typer.Option("--seed", help="The same seed gives the same text.")]
Repetition = Annotated[float | None, typer.Option("--repetition-penalty", help="Above 1 repeats less.")]
JsonSchema = Annotated[
    Path | None, typer.Option("--json-schema", help="File with a JSON schema that the text follows.", dir_okay=False)
]
PromptTable = Annotated[
    Path | None,
    typer.Option("--prompt-table", help="NumPy file (.npy) of embeddings to stand before the text.", dir_okay=False),
]
Lora = Annotated[str | None, typer.Option("--lora", help="LoRA adapter of the server to generate with.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End where this text appears; may be repeated.")]


Resume = Annotated[
    bool, typer.Option("--resume", help="When the server ends, wait for it and go on behind the last token.")
]


def main() -> None:
    """Entry point of the console command."""
    app()


def connect(url: str, model: str, timeout: float | None = None, resume: bool = False) -> Client:
    """A client for one command. Tests replace this function."""
    from inflight_client._client import Client

    return Client(url, model=model, timeout=timeout, resume=resume)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    url: Url = "localhost:8001",
    model: Model = "llm",
    max_tokens: MaxTokens = 128,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    repetition_penalty: Repetition = None,
    stop: Stop = None,
    json_schema: JsonSchema = None,
    prompt_table: PromptTable = None,
    lora: Lora = None,
    timeout: Timeout = None,
    resume: Resume = False,
    num_return_sequences: Annotated[
        int,
        typer.Option("--num-return-sequences", help="Independent continuations, printed one after the other.", min=1),
    ] = 1,
    log_probs: Annotated[
        int | None,
        typer.Option("--log-probs", help="Print each token's log probability and so many alternatives.", min=0),
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print number of tokens and time, on stderr.")] = False,
) -> None:
    """Continue a text, streamed to the terminal. Ctrl-C cancels."""
    options: GenerationOptions = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "repetition_penalty": repetition_penalty,
        "stop_words": stop,
        "lora_name": lora,
    }
    if json_schema is not None:
        try:
            schema = json_schema.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise fail(f"--json-schema {json_schema} cannot be read: {error}", EXIT_USAGE) from None
        options |= {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": schema}
    if prompt_table is not None:
        import numpy as np

        try:
            options["prompt_embedding_table"] = np.load(prompt_table, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise fail(f"--prompt-table {prompt_table} cannot be read: {error}", EXIT_USAGE) from None
    if num_return_sequences > 1:
        options["num_return_sequences"] = num_return_sequences
    if log_probs is not None:
        options["return_log_probs"] = True
        options["num_log_probs"] = log_probs
    text = sys.stdin.read() if prompt == "-" else prompt
    started = time.monotonic()
    with failing_in_words(), connect(url, model, timeout, resume) as client, client.stream(text, **options) as stream:
        if num_return_sequences > 1:
            write_sequences(stream)
        else:
            write_stream(chunk.text for chunk in stream)
        if log_probs is not None:
            write_log_probs(stream.completion)
        if stats:
            write_summary(stream.completion, time.monotonic() - started)


@app.command()
def chat(
    url: Url = "localhost:8001",
    model: Model = "llm",
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Checkpoint folder whose chat template to use; the served checkpoint's unless given."),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", "-s", help="System message.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    repetition_penalty: Repetition = None,
    stop: Stop = None,
    resume: Resume = False,
) -> None:
    """Talk with a model. Ctrl-C stops the running answer, Ctrl-D ends."""
    from inflight_client.chat import ChatError, ChatSession, load_chat_template, tokenizer_folder

    options: GenerationOptions = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "repetition_penalty": repetition_penalty,
        "stop_words": stop,
    }
    with failing_in_words(), connect(url, model, None, resume) as client:
        folder = tokenizer or tokenizer_folder(client.model_config())
        if folder is None:
            raise ChatError("the served checkpoint is not on this machine; name a copy of it with --tokenizer")
        try:
            template = load_chat_template(folder)
        except ChatError as error:
            raise fail(str(error), EXIT_USAGE if tokenizer else EXIT_FAILED) from None
        converse(ChatSession(client, template, system=system, **options))


@app.command("load-test")
def load_test(
    url: Url = "localhost:8001",
    model: Model = "llm",
    openai_url: Annotated[
        str | None,
        typer.Option("--openai", help="Measure an OpenAI server, by its URL, in place of tritonserver.", metavar="URL"),
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="Of the OpenAI server: chat, or completions for prompts of exact lengths.")
    ] = None,
    api_key: Annotated[
        str, typer.Option(help="For the OpenAI server.", envvar="OPENAI_API_KEY", show_envvar=True)
    ] = "",
    metrics_url: Annotated[
        str, typer.Option(help="Where tritonserver tells its metrics; beside port 8001 it is 8002.")
    ] = "",
    concurrency: Annotated[
        str | None, typer.Option("--concurrency", "-c", help="Levels: 8, or 1:16:5 (from, to, step), or 1,4,16.")
    ] = None,
    request_rate: Annotated[
        str | None, typer.Option("--request-rate", "-r", help="Requests a second, written the same way.")
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests a level; 0 chooses by the load.", min=0)] = 0,
    input_tokens: Annotated[str, typer.Option(help="Length of prompts: 64, or 32:256 for a range.")] = "64",
    output_tokens: Annotated[str, typer.Option(help="Length of answers, written the same way.")] = "64",
    prompts: Annotated[
        Path | None, typer.Option(help="Text prompts, one a line, instead of random ids.", exists=True, dir_okay=False)
    ] = None,
    vocabulary: Annotated[int, typer.Option(help="Random ids are drawn below this.", min=2)] = 256,
    temperature: Annotated[float, typer.Option(help="Of every request.", min=0.0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the prompts and lengths.")] = 0,
    level_timeout: Annotated[float, typer.Option(help="Seconds after which a level is aborted.", min=1.0)] = 900.0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the results.")] = Path("load-test"),
) -> None:
    """Measure a running server under load; 1:16:5 concurrent requests unless told otherwise.

    --concurrency keeps so many requests in flight, --request-rate starts them at Poisson intervals however many are.
    Writes results.json, plot.png and report.html. Percentiles that too few samples would carry are not stated.
    """
    from rich.console import Console

    from inflight_client._grpc import check_url

    with failing_in_words():
        from inflight_client import load_test as testing
        from inflight_client.load_test.progress import ProgressBar, RequestCount

    if concurrency is None and request_rate is None:
        concurrency = "1:16:5"
    if not openai_url:
        with failing_in_words():
            check_url(url)
    sweeps = ((concurrency, testing.LoadMode.CONCURRENCY), (request_rate, testing.LoadMode.REQUEST_RATE))
    if openai_url and metrics_url:
        raise fail("--metrics-url is for tritonserver: an OpenAI server has its metrics beside its API", EXIT_USAGE)
    if endpoint and not openai_url:
        raise fail("--endpoint is of an OpenAI server: name that in --openai", EXIT_USAGE)
    with failing_in_words():
        levels = [
            level
            for text, mode in sweeps
            if text is not None
            for level in testing.parse_sweep(text, mode, num_requests=requests)
        ]
        options = testing.LoadTestOptions(
            levels=levels,
            url=openai_url or url,
            model=model,
            endpoint=testing.parse_endpoint(endpoint or "chat") if openai_url else None,
            api_key=api_key if openai_url else "",
            metrics_url=metrics_url,
            prompts=testing.PromptOptions(
                input_tokens=testing.parse_length(input_tokens),
                output_tokens=testing.parse_length(output_tokens),
                vocabulary=vocabulary,
                prompt_file=prompts,
                temperature=temperature,
                seed=seed,
            ),
            level_timeout=level_timeout,
        )
        count = None if openai_url else RequestCount(url, model)
        with ProgressBar(levels, count=count, console=Console(stderr=True)) as bar:
            report = testing.run_load_test(options, progress=bar)
        testing.write_report(report, output)
        Console().print(testing.table(report))
        typer.echo(f"results.json, plot.png and report.html are in {output}")


@app.command(
    "perf-analyzer",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def perf_analyzer(context: typer.Context) -> None:
    """Run NVIDIA's perf_analyzer with these arguments and the libraries that it needs."""
    import os

    from inflight_client import perf_analyzer_binary

    with failing_in_words():
        binary, environment = perf_analyzer_binary.find(), perf_analyzer_binary.environment()
    os.execve(binary, [str(binary), *context.args], environment)


if __name__ == "__main__":
    main()
