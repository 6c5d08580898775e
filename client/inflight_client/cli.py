"""The console command `inflight`: serve, openai, backend-dir, generate, chat, load-test. It only parses options.

Every command imports what it needs when it runs, so that `inflight --help` answers at once. Expected failures are
reported in one sentence on standard error, with exit code 2 for invalid options or requests and 1 otherwise.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inflight_client.terminal import (
    EXIT_FAILED,
    EXIT_USAGE,
    converse,
    fail,
    failing_in_words,
    greet,
    write_log_probs,
    write_sequences,
    write_stream,
    write_summary,
)

if TYPE_CHECKING:
    from inflight.openai_options import OpenAIOptions
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

_DEMO_PROMPT = "Once upon a time"

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
OpenAISet = Annotated[
    list[str] | None,
    typer.Option("--openai-set", metavar="KEY=VALUE", help="Any setting of the OpenAI server; may be repeated."),
]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End where this text appears; may be repeated.")]


def main() -> None:
    """Entry point of the console command."""
    app()


def connect(url: str, model: str, timeout: float | None = None) -> Client:
    """A client for one command. Tests replace this function."""
    from inflight_client._client import Client

    return Client(url, model=model, timeout=timeout)


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
    with failing_in_words(), connect(url, model, timeout) as client, client.stream(text, **options) as stream:
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
    with failing_in_words(), connect(url, model) as client:
        folder = tokenizer or tokenizer_folder(client.model_config())
        if folder is None:
            raise ChatError("the served checkpoint is not on this machine; name a copy of it with --tokenizer")
        try:
            template = load_chat_template(folder)
        except ChatError as error:
            raise fail(str(error), EXIT_USAGE if tokenizer else EXIT_FAILED) from None
        converse(ChatSession(client, template, system=system, **options))


@app.command()
def serve(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            metavar="[MODEL_DIR]", help="Hugging Face checkpoint folder; the model repository's unless given."
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option("--tensor-parallel-size", "-tp", help="Ranks that share every layer.", min=1)
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    max_batch_size: Annotated[int | None, typer.Option(help="Sequences in one step.", min=1)] = None,
    max_num_tokens: Annotated[int | None, typer.Option(help="Tokens in one step.", min=1)] = None,
    max_seq_len: Annotated[int | None, typer.Option(help="Prompt plus new tokens of a sequence.", min=1)] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any parameter of the engine; may be repeated."),
    ] = None,
    api: Annotated[
        list[str] | None,
        typer.Option(
            "--api",
            metavar="NAME,…",
            help="Serve other backends' models too: tensorrtllm, llmapi, vllm, unary; or NAME-unary.",
        ),
    ] = None,
    model_repository: Annotated[Path | None, typer.Option(help="Serve this repository, not inflight's own.")] = None,
    tritonserver: Annotated[Path | None, typer.Option(help="tritonserver's binary, if not the installed one.")] = None,
    host: Annotated[str, typer.Option(help="Interface to listen on; loopback unless told otherwise.")] = "127.0.0.1",
    http: Annotated[bool, typer.Option("--http/--no-http", help="Serve HTTP in addition to gRPC.")] = True,
    http_port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8001,
    metrics_port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8002,
    openai_port: Annotated[
        int | None, typer.Option(help="Serve OpenAI's API here as well; 0 takes a free one.", min=0, max=65535)
    ] = None,
    openai_api_key_file: Annotated[
        Path | None,
        typer.Option(help="File with the keys of OpenAI clients, one a line; none are needed unless given."),
    ] = None,
    openai_set: OpenAISet = None,
    open_apis: Annotated[
        bool,
        typer.Option("--open-apis", help="Let every client load models, register shared memory, set logs and traces."),
    ] = False,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the key to those APIs; a random key unless given.")
    ] = None,
    ready_timeout: Annotated[float, typer.Option(help="Seconds until the model must be ready.", min=1.0)] = 900.0,
    drain_timeout: Annotated[float, typer.Option(help="Seconds to finish requests after Ctrl-C.", min=0.0)] = 30.0,
    canary_period: Annotated[
        float, typer.Option(help="Idle seconds before an engine is checked with one token; 0 never.", min=0.0)
    ] = 30.0,
    log_file: Annotated[Path | None, typer.Option(help="Write tritonserver's whole log here.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show tritonserver's whole log.")] = False,
    demo: Annotated[bool, typer.Option(help="Stream one completion once the server is ready.")] = True,
) -> None:
    """Serve a checkpoint until Ctrl-C. Needs the engine (package inflight) and a tritonserver on this machine."""
    named = {
        "tensor_parallel_size": tensor_parallel_size,
        "dtype": dtype,
        "device": device,
        "max_batch_size": max_batch_size,
        "max_num_tokens": max_num_tokens,
        "max_seq_len": max_seq_len,
    }
    parameters = {key: str(value) for key, value in named.items() if value is not None} | _assignments(set_ or [])
    if openai_port is None and (openai_api_key_file or openai_set):
        raise fail("--openai-api-key-file and --openai-set need --openai-port", EXIT_USAGE)
    try:
        from inflight.supervisor.options import Endpoints, ServeOptions
        from inflight.supervisor.serve import serve as run
    except ImportError as error:
        raise fail(f"the engine is not installed beside this client: {error}", EXIT_USAGE) from None

    def show(endpoints: Endpoints) -> None:
        with connect(endpoints.grpc, endpoints.model) as client:
            greet(
                client=client,
                grpc=endpoints.grpc,
                http=endpoints.http,
                metrics=endpoints.metrics,
                openai=endpoints.openai,
                model=endpoints.model,
                prompt=_DEMO_PROMPT,
            )

    options = ServeOptions(
        checkpoint=checkpoint,
        model_repository=model_repository,
        apis=tuple(name.strip() for names in api or () for name in names.split(",") if name.strip()),
        tritonserver=tritonserver,
        parameters=parameters,
        allow_http=http,
        grpc_address=host,
        http_address=host,
        metrics_address=host,
        grpc_port=grpc_port,
        http_port=http_port,
        metrics_port=metrics_port,
        openai=None
        if openai_port is None
        else _openai_options(openai_set, host=host, port=openai_port, api_key_file=str(openai_api_key_file or "")),
        open_apis=open_apis,
        api_key_file=api_key_file,
        ready_timeout=ready_timeout,
        drain_timeout=drain_timeout,
        canary_period=canary_period,
        log_file=log_file,
        verbose=verbose,
        on_ready=show if demo else None,
    )
    raise typer.Exit(run(options))


@app.command()
def openai(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(metavar="[MODEL_DIR]", help="The engine's checkpoint folder; the default model's unless given."),
    ] = None,
    engine: Annotated[str, typer.Option(help="Name under which its program has started it.")] = "llm",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 9000,
    host: Annotated[str, typer.Option(help="Interface to listen on; loopback unless told otherwise.")] = "127.0.0.1",
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the keys of clients, one a line; none are needed unless given.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="The engine's parameters, as it has them; may be repeated."),
    ] = None,
    openai_set: OpenAISet = None,
) -> None:
    """Serve OpenAI's API on an engine that runs on this machine already. `inflight serve --openai-port` does both."""
    try:
        from inflight.errors import ConfigurationError
        from inflight.openai.serve import serve as run
        from inflight.supervisor.installation import find_model_repository
    except ImportError as error:
        raise fail(f"the engine is not installed beside this client: {error}", EXIT_USAGE) from None
    parameters = _assignments(set_ or [])
    try:
        folder = checkpoint or find_model_repository() / "llm" / "1" / "checkpoint"
        parameters.setdefault("gpt_model_path", str(folder.resolve()))
        run(
            _openai_options(
                openai_set,
                engine=engine,
                parameters=parameters,
                host=host,
                port=port,
                api_key_file=str(api_key_file or ""),
            )
        )
    except ConfigurationError as error:
        raise fail(str(error), EXIT_USAGE) from None


@app.command("backend-dir")
def backend_dir(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to make; it must not exist or be empty.")],
    tritonserver: Annotated[Path | None, typer.Option(help="tritonserver's binary, if not the installed one.")] = None,
) -> None:
    """Lay out a backend directory for a tritonserver of your own, and print how to start it."""
    try:
        from inflight.errors import ConfigurationError
        from inflight.supervisor.backend_directory import lay_out
    except ImportError as error:
        raise fail(f"the engine is not installed beside this client: {error}", EXIT_USAGE) from None
    try:
        typer.echo(lay_out(directory, tritonserver))
    except ConfigurationError as error:
        raise fail(str(error), EXIT_USAGE) from None


@app.command("load-test")
def load_test(
    url: Url = "localhost:8001",
    model: Model = "llm",
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
    """Measure a running server under load with perf_analyzer; 1:16:5 concurrent requests unless told otherwise.

    Writes results.json, plot.png and report.html.
    """
    from rich.console import Console

    from inflight_client import load_test as testing
    from inflight_client.load_test.progress import ProgressBar

    if concurrency is None and request_rate is None:
        concurrency = "1:16:5"
    sweeps = ((concurrency, testing.LoadMode.CONCURRENCY), (request_rate, testing.LoadMode.REQUEST_RATE))
    with failing_in_words():
        levels = [
            level
            for text, mode in sweeps
            if text is not None
            for level in testing.parse_sweep(text, mode, num_requests=requests)
        ]
        options = testing.LoadTestOptions(
            levels=levels,
            url=url,
            model=model,
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
        with ProgressBar(levels, url=url, model=model, console=Console(stderr=True)) as bar:
            report = testing.run_load_test(options, progress=bar)
        testing.write_report(report, output)
        Console().print(testing.table(report))
        typer.echo(f"results.json, plot.png and report.html are in {output}")


def _openai_options(settings: list[str] | None, **fields: Any) -> OpenAIOptions:
    """Settings from the command line, and further fields of OpenAIOptions."""
    from inflight.errors import ConfigurationError
    from inflight.openai_options import OpenAIOptions

    try:
        return OpenAIOptions(**fields).with_settings(_assignments(settings or [], "--openai-set"))
    except ConfigurationError as error:
        raise fail(str(error), EXIT_USAGE) from None


def _assignments(texts: list[str], option: str = "--set") -> dict[str, str]:
    """{"KEY": "VALUE"} of KEY=VALUE texts."""
    assigned = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key.strip() and equals):
            raise fail(f"{option} takes KEY=VALUE, got {text!r}", EXIT_USAGE)
        assigned[key.strip()] = value.strip()
    return assigned


if __name__ == "__main__":
    main()
