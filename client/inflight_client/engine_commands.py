"""The commands of `inflight` that run the engine of this machine: serve, openai, install-server, backend-dir, analyze.
They only parse options.

The package `inflight` need not be installed beside the client; without it they say so.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inflight_client._exceptions import UsageError
from inflight_client.model_arguments import assignments, by_model, model_of, served
from inflight_client.terminal import (
    EXIT_USAGE,
    fail,
    failing_in_words,
    greet,
    how_to_ask,
    how_to_ask_an_encoder,
    how_to_ask_several,
)

if TYPE_CHECKING:
    from inflight.openai_options import OpenAIOptions
    from inflight_client.analyze import Target

_DEMO_PROMPT = "Once upon a time"
_MODEL = (
    "Checkpoint folder, GGUF file, or a model of the Hugging Face hub, ORG/NAME[:QUANTISATION][@REVISION]; the "
    "repository's unless given."
)

OpenAISet = Annotated[
    list[str] | None,
    typer.Option(
        "--openai-set",
        metavar="[NAME:]KEY=VALUE",
        help="Any setting of the OpenAI server, or of one of its models; may be repeated.",
    ),
]
Model = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL)]
Models = Annotated[
    list[str] | None,
    typer.Argument(metavar="MODEL…", help=f"{_MODEL} NAME=MODEL names it; several are served side by side."),
]
Share = Annotated[
    list[str] | None,
    typer.Option("--share", metavar="NAME=WEIGHT", help="A model's part of cores and memory; 1 unless given."),
]
TensorParallelSize = Annotated[
    int | None, typer.Option("--tensor-parallel-size", "-tp", help="Ranks that share every layer.", min=1)
]
MoeExpertParallelSize = Annotated[
    int | None, typer.Option("--moe-expert-parallel-size", "-ep", help="Sets of ranks that divide experts.", min=1)
]
PipelineParallelSize = Annotated[
    int | None, typer.Option("--pipeline-parallel-size", "-pp", help="Stages that share the layers.", min=1)
]
DataParallelSize = Annotated[
    int | None, typer.Option("--data-parallel-size", "-dp", help="Replicas that share the requests.", min=1)
]
Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")]
Quantization = Annotated[
    str | None, typer.Option(help="none, int8, int4 or fp8: what weights of floats become while they are read.")
]
KvCacheDtype = Annotated[str | None, typer.Option(help="auto, fp8 or int8.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
MaxBatchSize = Annotated[int | None, typer.Option(help="Sequences in one step.", min=1)]
MaxNumTokens = Annotated[int | None, typer.Option(help="Tokens in one step.", min=1)]
MaxSeqLen = Annotated[int | None, typer.Option(help="Prompt plus new tokens of a sequence.", min=1)]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="[NAME:]KEY=VALUE", help="Any parameter of the engines, or of one; may be repeated."),
]
Host = Annotated[str, typer.Option(help="Interface to listen on; loopback unless told otherwise.")]
ReadyTimeout = Annotated[float, typer.Option(help="Seconds until the model must be ready.", min=1.0)]
DrainTimeout = Annotated[float, typer.Option(help="Seconds to finish requests after Ctrl-C.", min=0.0)]
AdoptTimeout = Annotated[
    float,
    typer.Option(
        help="Seconds that the server goes on if this process is killed, for the next one to adopt it; 0 ends it.",
        min=0.0,
    ),
]
LogFile = Annotated[Path | None, typer.Option(help="Write the server's whole log here.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the server's whole log.")]


def serve(
    context: typer.Context,
    models: Models = None,
    tensor_parallel_size: TensorParallelSize = None,
    moe_expert_parallel_size: MoeExpertParallelSize = None,
    pipeline_parallel_size: PipelineParallelSize = None,
    data_parallel_size: DataParallelSize = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    kv_cache_dtype: KvCacheDtype = None,
    device: Device = None,
    max_batch_size: MaxBatchSize = None,
    max_num_tokens: MaxNumTokens = None,
    max_seq_len: MaxSeqLen = None,
    set_: Set = None,
    share: Share = None,
    api: Annotated[
        list[str] | None,
        typer.Option(
            "--api",
            metavar="NAME,…",
            help="Serve other backends' models too: tensorrtllm, llmapi, vllm, unary, embedding; or NAME-unary. "
            "MODEL:NAME is one of several models'.",
        ),
    ] = None,
    model_repository: Annotated[Path | None, typer.Option(help="Serve this repository, not inflight's own.")] = None,
    tritonserver: Annotated[Path | None, typer.Option(help="tritonserver's binary, if not the installed one.")] = None,
    host: Host = "127.0.0.1",
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
    ready_timeout: ReadyTimeout = 900.0,
    drain_timeout: DrainTimeout = 30.0,
    adopt_timeout: AdoptTimeout = 60.0,
    canary_period: Annotated[
        float, typer.Option(help="Idle seconds before an engine is checked with one token; 0 never.", min=0.0)
    ] = 30.0,
    log_file: LogFile = None,
    verbose: Verbose = False,
    demo: Annotated[bool, typer.Option(help="Stream one completion once the server is ready.")] = True,
) -> None:
    """Serve a checkpoint until Ctrl-C. Needs the engine (package inflight) and a tritonserver on this machine.

    What stands behind a -- are options of tritonserver, such as --trace-config or --rate-limit.
    """
    of_all, of_models = by_model(set_)
    parameters = _parameters(context, of_all)
    settings, of_served = by_model(openai_set)
    if openai_port is None and (openai_api_key_file or openai_set):
        raise fail("--openai-api-key-file and --openai-set need --openai-port", EXIT_USAGE)
    try:
        from inflight.supervisor.options import Endpoints, ServeOptions
        from inflight.supervisor.serve import serve as run
    except ImportError as error:
        raise fail(f"the engine is not installed beside this client: {error}", EXIT_USAGE) from None

    def show(endpoints: Endpoints) -> None:
        from inflight_client._client import Client

        if endpoints.models:
            typer.echo(how_to_ask_several(endpoints.models, openai=endpoints.openai, metrics=endpoints.metrics))
            return
        if endpoints.pooled:
            typer.echo(
                how_to_ask_an_encoder(
                    http=endpoints.http,
                    metrics=endpoints.metrics,
                    openai=endpoints.openai,
                    model=endpoints.model,
                    name=_first_name(options.openai, endpoints.model),
                    pooled=endpoints.pooled,
                    has_keys=openai_api_key_file is not None,
                    has_api=any(name.removesuffix("-unary") == "embedding" for name in options.apis),
                )
            )
            return
        with Client(endpoints.grpc, model=endpoints.model) as client:
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
        **served(models, share, of_models, of_served),
        model_repository=model_repository,
        apis=tuple(name.strip() for names in api or () for name in names.split(",") if name.strip()),
        tritonserver=tritonserver,
        server_arguments=tuple(context.args),
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
        else _openai_options(settings, host=host, port=openai_port, api_key_file=str(openai_api_key_file or "")),
        open_apis=open_apis,
        api_key_file=api_key_file,
        ready_timeout=ready_timeout,
        drain_timeout=drain_timeout,
        adopt_timeout=adopt_timeout,
        canary_period=canary_period,
        log_file=log_file,
        verbose=verbose,
        on_ready=show if demo else None,
    )
    raise typer.Exit(run(options))


def openai(
    context: typer.Context,
    models: Models = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Start no ranks: serve the engine that a program of this user has started under this name."),
    ] = None,
    tensor_parallel_size: TensorParallelSize = None,
    moe_expert_parallel_size: MoeExpertParallelSize = None,
    pipeline_parallel_size: PipelineParallelSize = None,
    data_parallel_size: DataParallelSize = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    kv_cache_dtype: KvCacheDtype = None,
    device: Device = None,
    max_batch_size: MaxBatchSize = None,
    max_num_tokens: MaxNumTokens = None,
    max_seq_len: MaxSeqLen = None,
    set_: Set = None,
    share: Share = None,
    load_on_demand: Annotated[
        bool, typer.Option("--load-on-demand", help="Load a model when somebody asks for it.")
    ] = False,
    unload_after: Annotated[
        float, typer.Option(help="Idle seconds until a model that was loaded on demand is unloaded; 0 never.", min=0.0)
    ] = 0.0,
    pin: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Load this one at the start, for good; may be repeated."),
    ] = None,
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 9000,
    host: Host = "127.0.0.1",
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the keys of clients, one a line; none are needed unless given.")
    ] = None,
    openai_set: OpenAISet = None,
    ready_timeout: ReadyTimeout = 900.0,
    drain_timeout: DrainTimeout = 30.0,
    adopt_timeout: AdoptTimeout = 60.0,
    log_file: LogFile = None,
    verbose: Verbose = False,
) -> None:
    """Serve OpenAI's API alone until Ctrl-C, without tritonserver. `inflight serve --openai-port` serves both."""
    of_all, of_models = by_model(set_)
    parameters = _parameters(context, of_all)
    settings = {"host": host, "port": port, "api_key_file": str(api_key_file or "")}
    of_server, of_served = by_model(openai_set)
    if engine is not None:
        _refuse_beside_engine(context)
        if len(models or []) > 1 or of_models or of_served:
            raise fail("--engine names one engine that runs: give one model, without a name", EXIT_USAGE)
        model = models[0] if models else None
        _attach(model, _openai_options(of_server, engine=engine, parameters=parameters, **settings))
        return
    if unload_after and not load_on_demand:
        raise fail("--unload-after is for models of --load-on-demand", EXIT_USAGE)
    try:
        from inflight.supervisor.options import Endpoints, ServeOptions
        from inflight.supervisor.serve import serve as run
    except ImportError as error:
        raise fail(f"the engine is not installed beside this client: {error}", EXIT_USAGE) from None
    options = _openai_options(of_server, **settings)

    def show(endpoints: Endpoints) -> None:
        if endpoints.models:
            typer.echo(how_to_ask_several(endpoints.models, openai=endpoints.openai, metrics=endpoints.metrics))
            return
        typer.echo(
            how_to_ask(
                openai=endpoints.openai,
                model=_first_name(options, endpoints.model),
                prompt=_DEMO_PROMPT,
                has_keys=bool(options.api_key_file),
                pooled=endpoints.pooled,
            )
        )

    raise typer.Exit(
        run(
            ServeOptions(
                **served(models, share, of_models, of_served, on_demand=load_on_demand, pinned=pin or ()),
                unload_after=unload_after,
                parameters=parameters,
                allow_tritonserver=False,
                openai=options,
                ready_timeout=ready_timeout,
                drain_timeout=drain_timeout,
                adopt_timeout=adopt_timeout,
                log_file=log_file,
                verbose=verbose,
                on_ready=show,
            )
        )
    )


def _first_name(options: OpenAIOptions | None, model: str) -> str:
    """That of the model on the OpenAI server. `model`: its name without one."""
    names = None if options is None else options.served_model_names
    return names[0] if names else model


def _attach(checkpoint: str | None, options: OpenAIOptions) -> None:
    """Serve an engine that another program has started, in this process."""
    try:
        from msgspec import structs

        from inflight.errors import ConfigurationError
        from inflight.gguf.folder import with_folders
        from inflight.http.serve import serve as run
        from inflight.hub.local_checkpoint import local_checkpoint
        from inflight.supervisor.installation import find_model_repository
    except ImportError as error:
        raise fail(f"the engine is not installed beside this client: {error}", EXIT_USAGE) from None
    try:
        model = checkpoint or find_model_repository() / "llm" / "1" / "checkpoint"
        path = local_checkpoint(model, options.parameters).absolute()
        parameters = with_folders({"gpt_model_path": str(path), **options.parameters}, ".")
        run(structs.replace(options, parameters=parameters), tells_absence=True)
    except ConfigurationError as error:
        raise fail(str(error), EXIT_USAGE) from None


_OF_STARTED_RANKS = (
    "share",
    "load_on_demand",
    "unload_after",
    "pin",
    "ready_timeout",
    "drain_timeout",
    "adopt_timeout",
    "log_file",
    "verbose",
)
_OF_CONFIGURATION = (
    "tensor_parallel_size",
    "moe_expert_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "device",
    "max_batch_size",
    "max_num_tokens",
    "max_seq_len",
)
"""Options that are keys of the engine's configuration."""


def _parameters(context: typer.Context, settings: list[str] | None) -> dict[str, str]:
    """The engine's, as options and --set name them."""
    named = {key: context.params[key] for key in _OF_CONFIGURATION}
    return {key: str(value) for key, value in named.items() if value is not None} | assignments(settings or [])


def _refuse_beside_engine(context: typer.Context) -> None:
    """What only ranks have that are started here."""
    for name in (*_OF_CONFIGURATION, *_OF_STARTED_RANKS):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise fail(f"--{name.replace('_', '-')} is not for an engine that runs, which --engine names", EXIT_USAGE)


def install_server() -> None:
    """Install tritonserver beside the engine, in this Python's environment; once is enough."""
    try:
        from inflight.errors import ConfigurationError
        from inflight.supervisor.install_server import install_server as run
    except ImportError as error:
        raise fail(f"the engine is not installed beside this client: {error}", EXIT_USAGE) from None
    try:
        typer.echo(run())
    except ConfigurationError as error:
        raise fail(str(error), EXIT_USAGE) from None


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
        typer.echo(lay_out(directory, tritonserver).commands)
    except ConfigurationError as error:
        raise fail(str(error), EXIT_USAGE) from None


def analyze(
    checkpoint: Model = None,
    max_batch_size: Annotated[str, typer.Option(help="Values to compare, with commas between them.")] = "16,64",
    max_num_tokens: Annotated[str, typer.Option(help="Likewise.")] = "512,2048",
    batch_scheduler_policy: Annotated[str, typer.Option(help="Likewise.")] = "guaranteed_no_evict,max_utilization",
    tokens_per_block: Annotated[str, typer.Option(help="Likewise.")] = "16,32",
    concurrency: Annotated[str, typer.Option("--concurrency", "-c", help="Concurrent requests to measure.")] = "1,8,32",
    requests: Annotated[
        int, typer.Option(help="Requests of each of a measurement's three windows; 0 chooses.", min=0)
    ] = 0,
    input_tokens: Annotated[str, typer.Option(help="Length of prompts: 64, or 32:256 for a range.")] = "64",
    output_tokens: Annotated[str, typer.Option(help="Length of answers, written the same way.")] = "64",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other parameter of the engine; may be repeated."),
    ] = None,
    model_repository: Annotated[Path | None, typer.Option(help="The model's repository, not inflight's own.")] = None,
    tritonserver: Annotated[Path | None, typer.Option(help="tritonserver's binary, if not the installed one.")] = None,
    url: Annotated[
        str | None, typer.Option("--url", "-u", help="Analyse the server with this gRPC address instead, host:port.")
    ] = None,
    metrics_url: Annotated[str | None, typer.Option(help="Where that server's metrics are.")] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="Name of that server's model.")] = "llm",
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with that server's key, as inflight serve --api-key-file has it.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="New folder for the results.")] = Path("analysis"),
) -> None:
    """Find a good configuration with NVIDIA's Model Analyzer: it compares every combination of some parameters.

    It starts servers of its own, on free ports; or, with --url, it loads the model of a running one again and again,
    which that server's clients notice. Writes results.json, plot.png and Model Analyzer's report.
    """
    from rich.console import Console

    from inflight_client import analyze as analysis
    from inflight_client.load_test import PromptOptions, parse_length

    console = Console(stderr=True)
    with failing_in_words(), _sigterm_as_ctrl_c():
        options = analysis.AnalysisOptions(
            variants=analysis.make_variants(
                {
                    "max_batch_size": max_batch_size,
                    "max_num_tokens": max_num_tokens,
                    "batch_scheduler_policy": batch_scheduler_policy,
                    "tokens_per_block": tokens_per_block,
                }
            ),
            levels=analysis.parse_levels(concurrency),
            num_requests=requests,
            prompts=PromptOptions(input_tokens=parse_length(input_tokens), output_tokens=parse_length(output_tokens)),
        )
        target: contextlib.AbstractContextManager[Target]
        if url is None:
            if metrics_url or api_key_file:
                raise UsageError("--metrics-url and --api-key-file belong to the server of --url, and there is none")
            # The first variant is what Model Analyzer finds, so that it measures nothing in vain.
            parameters = assignments(set_ or []) | analysis.FIXED | options.variants[0]
            target = _started_servers(checkpoint, model_repository, tritonserver, parameters)
        else:
            if checkpoint or model_repository or tritonserver or set_:
                raise UsageError("MODEL, --set, --model-repository and --tritonserver are not for a server that runs")
            target = _running_server(url, metrics_url, model, api_key_file)
        with target as subject, console.status("Model Analyzer starts") as status:
            report = analysis.run_analysis(options, subject, output, progress=status.update)
        Console().print(analysis.table(report))
        typer.echo(f"results.json, plot.png and Model Analyzer's reports are in {output}")


@contextlib.contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """So that SIGTERM, too, ends everything that was started."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _started_servers(
    checkpoint: str | None, model_repository: Path | None, tritonserver: Path | None, parameters: dict[str, str]
) -> Iterator[Target]:
    try:
        from inflight.errors import ConfigurationError
        from inflight.supervisor import tool_server
        from inflight.supervisor.options import ServeOptions
    except ImportError as error:
        raise UsageError(f"the engine is not installed beside this client: {error}") from None
    from inflight_client.analyze.target import LocalTarget

    options = ServeOptions(
        checkpoint=model_of(checkpoint),
        model_repository=model_repository,
        tritonserver=tritonserver,
        parameters=parameters,
    )
    try:
        with tool_server.prepare(options, partial(typer.echo, err=True)) as server:
            yield LocalTarget(
                model=server.model,
                grpc=server.grpc,
                http=server.http,
                metrics=server.metrics,
                parameters=server.parameters,
                repository=server.repository,
                tritonserver=server.tritonserver,
                flags=server.flags,
                environment=server.environment,
                check=server.check,
            )
    except ConfigurationError as error:
        raise UsageError(str(error)) from None


def _running_server(
    url: str, metrics_url: str | None, model: str, api_key_file: Path | None
) -> contextlib.AbstractContextManager[Target]:
    from inflight_client.analyze import RemoteTarget

    key = ""
    if api_key_file is not None:
        try:
            key = api_key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--api-key-file {api_key_file} cannot be read: {error}") from None
    host = url.rpartition(":")[0]
    return RemoteTarget(grpc=url, metrics_url=metrics_url or f"http://{host}:8002/metrics", model=model, api_key=key)


def _openai_options(settings: list[str] | None, **fields: Any) -> OpenAIOptions:
    """Settings from the command line, and further fields of OpenAIOptions."""
    from inflight.errors import ConfigurationError
    from inflight.openai_options import OpenAIOptions

    try:
        return OpenAIOptions(**fields).with_settings(assignments(settings or [], "--openai-set"))
    except ConfigurationError as error:
        raise fail(str(error), EXIT_USAGE) from None
