"""Builds and starts a BackendServer from the arguments that tritonserver passes to initialize()."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inflight.config import EngineConfig
from inflight.errors import ConfigurationError
from inflight.log_output import start_logging
from inflight.numpy_check import check_numpy
from inflight.server.backend_server import BackendServer
from inflight.server.self_unload import is_supervised
from inflight.server.tensors.dialects import DIALECTS, LLM
from inflight.text.tokenizer import Tokenizer


def start_server(pb_utils: Any, args: Mapping[str, str]) -> BackendServer:
    """Read the configuration, launch the engine, start the threads. `args`: what tritonserver passes to initialize().

    Raises ConfigurationError with one sentence, or another InflightError if the engine does not start.
    """
    start_logging()
    check_numpy(Path("/proc/self/exe"))
    # Texts are tokenised one at a time, and the library's own threads would only take cores from the ranks.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    model_config = json.loads(args["model_config"])
    _check_decoupled(model_config)
    parameters = {key: value["string_value"] for key, value in model_config.get("parameters", {}).items()}
    config = EngineConfig.from_parameters(parameters, Path(args["model_repository"], args["model_version"]))
    logging.getLogger("inflight").setLevel(config.log_level)
    tokenizer = Tokenizer.load(config.tokenizer_dir, config.gpt_model_path)

    from inflight.executor.executor import Executor

    # With a supervisor a failed relaunch unloads the model, which is then loaded again as a whole; without one the
    # executor keeps relaunching its ranks.
    deaths: list[str] = []
    executor = Executor(
        config=config,
        name=args["model_name"],
        keep_trying=not is_supervised(),
        # /metrics shows the newest state. Who wants to know each iteration, or KV cache events, attaches a front.
        keeps_statistics=False,
        on_engine_death=deaths.append,
    )
    server = BackendServer(
        pb_utils=pb_utils,
        executor=executor,
        tokenizer=tokenizer,
        dialect=DIALECTS.get(args["model_name"], LLM),
        config=config,
        model_name=args["model_name"],
        model_version=args["model_version"],
        instance=args["model_instance_name"],
        deaths=deaths,
    )
    server.start()
    return server


def _check_decoupled(model_config: Mapping[str, Any]) -> None:
    if not model_config.get("model_transaction_policy", {}).get("decoupled", False):
        raise ConfigurationError("config.pbtxt: set model_transaction_policy { decoupled: true }, streams need it")
