"""Builds and starts what serves a model from the arguments that tritonserver passes to initialize()."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight.abandonment import end_when_abandoned
from inflight.asking.prompt_encoder import PromptEncoder
from inflight.asking.sentence_files import Activation, find_activation, find_pooling, find_prompts
from inflight.asking.served import Served
from inflight.asking.text_prompts import NO_PROMPTS, TextPrompts
from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.hub.local_checkpoint import with_local_checkpoint
from inflight.log_output import start_logging
from inflight.numpy_check import check_numpy
from inflight.output_config import Pooling
from inflight.request_spans import open_spans
from inflight.server.backend_server import BackendServer
from inflight.server.dialect_model import DialectModel
from inflight.server.pooled import ASKS, PooledModel
from inflight.server.pooled_server import PooledServer
from inflight.server.processing import PROCESSES
from inflight.server.processing_server import ProcessingServer
from inflight.server.read_limits import read_limits
from inflight.server.self_unload import is_supervised
from inflight.server.tensors.dialects import DIALECTS, LLM
from inflight.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from inflight.asking.pair_template import PairTemplate
    from inflight.executor.front.front import Front

logger = logging.getLogger(__name__)


Server = BackendServer | ProcessingServer | PooledServer


def start_server(pb_utils: Any, args: Mapping[str, str]) -> Server:
    """Read the configuration, launch the engine, start the threads. `args`: what tritonserver passes to initialize().

    Raises ConfigurationError with one sentence, or another InflightError if the engine does not start.
    """
    start_logging()
    end_when_abandoned()
    check_numpy(Path("/proc/self/exe"))
    # Texts are tokenised one at a time, and the library's own threads would only take cores from the ranks.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    model_config = json.loads(args["model_config"])
    parameters = {key: value["string_value"] for key, value in model_config.get("parameters", {}).items()}
    name = args["model_name"]
    attached = DialectModel.from_parameters(parameters, name) if DialectModel.is_meant(parameters) else None
    if attached is None and name in PROCESSES:
        raise ConfigurationError(f"model {name} needs the parameter engine: the model whose tokenizer it uses")
    if attached is None and name in ASKS:
        raise ConfigurationError(f"model {name} needs the parameter engine: the model whose ranks it uses")
    if attached is not None:
        config = attached.find_engine_config()
    else:
        folder = Path(args["model_repository"], args["model_version"])
        config = EngineConfig.from_parameters(with_local_checkpoint(parameters, folder), folder)
    logging.getLogger("inflight").setLevel(config.log_level)
    dialect = DIALECTS.get(name, LLM) if attached is None else attached.dialect
    vector_of, score_of, prompts = _sentence_files(attached, config)
    pair_template = None if attached is None or attached.dialect.name not in ASKS else _pair_template(config)
    deaths: list[str] = []
    # /metrics shows the newest state. Who wants to know each iteration, or KV cache events, attaches a front.
    front_config = replace(config, iter_stats_max_iterations=0, request_stats_max_iterations=0, event_buffer_max_size=0)
    if attached is None:
        executor, tokenizer = _launch(config, name, deaths)
    else:
        tokenizer = _load_tokenizer(config)
        executor = attached.attach(front_config, deaths)
    dialect = dialect.offering({output["name"] for output in model_config["output"]})
    is_unary = not model_config.get("model_transaction_policy", {}).get("decoupled", False)
    server: Server
    if dialect.name in PROCESSES:
        server = ProcessingServer(
            pb_utils=pb_utils,
            executor=executor,
            dialect=dialect,
            process=PROCESSES[dialect.name](tokenizer, executor.limits),
            read_limits=read_limits(config, executor.limits, tokenizer),
            instance=args["model_instance_name"],
            is_unary=is_unary,
        )
    elif dialect.name in ASKS:
        server = PooledServer(
            pb_utils=pb_utils,
            executor=executor,
            dialect=dialect,
            model=PooledModel(
                served=Served(
                    tokenizer,
                    executor.generation_defaults,
                    PromptEncoder(tokenizer, config.max_text_bytes, pair_template),
                ),
                vector_of=vector_of,
                score_of=score_of,
                prompts=prompts,
            ),
            read_limits=read_limits(config, executor.limits, tokenizer),
            instance=args["model_instance_name"],
            is_unary=is_unary,
            cancellation_check_seconds=config.cancellation_check_period_ms / 1000,
        )
    else:
        server = BackendServer(
            pb_utils=pb_utils,
            executor=executor,
            tokenizer=tokenizer,
            dialect=dialect,
            config=config,
            model_name=args["model_name"],
            model_version=args["model_version"],
            instance=args["model_instance_name"],
            deaths=deaths,
            spans=open_spans(config.otlp_traces_endpoint, is_outermost=False),
            is_attached=attached is not None,
            is_unary=is_unary,
        )
    server.start()
    if attached is None:
        logger.info("engine %s: %s", name, executor.description.summary(executor.limits))
    return server


def _sentence_files(attached: DialectModel | None, config: EngineConfig) -> tuple[Pooling, Activation, TextPrompts]:
    """How vectors are made, what becomes of scores and what stands before texts; of models that give none, nobody reads
    it. Raises ConfigurationError."""
    if attached is None or attached.dialect.name not in ASKS:
        return "mean", "identity", NO_PROMPTS
    folder = Path(config.gpt_model_path)
    prompts = find_prompts(folder, is_pooling_set=attached.vector_of is not None)
    return attached.vector_of or find_pooling(folder), find_activation(folder), prompts


def _pair_template(config: EngineConfig) -> PairTemplate | None:
    """Raises ConfigurationError."""
    from inflight.asking.pair_template import find_pair_template  # which loads what chats need

    return find_pair_template(config)


def _load_tokenizer(config: EngineConfig) -> Tokenizer:
    return Tokenizer.load(config.tokenizer_dir, config.gpt_model_path)


def _launch(config: EngineConfig, name: str, deaths: list[str]) -> tuple[Front, Tokenizer]:
    """The engine of a model's own, under the model's name. Its tokenizer is read while the ranks load."""
    from inflight.executor.executor import Executor

    # With a supervisor a failed relaunch unloads the model, which is then loaded again as a whole; without one the
    # executor keeps relaunching its ranks.
    try:
        executor = Executor(
            config=config,
            name=name,
            keep_trying=not is_supervised(),
            keeps_statistics=False,
            on_engine_death=deaths.append,
            waits=False,
        )
    except ConfigurationError:
        _load_tokenizer(config)  # says what is wrong with files that both read
        raise
    try:
        tokenizer = _load_tokenizer(config)
        executor.start()
    except BaseException:
        executor.shutdown()
        raise
    return executor, tokenizer
