"""Load on a model of tritonserver, by NVIDIA's perf_analyzer over gRPC streams."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from inflight_client._client import Client
from inflight_client._exceptions import LoadTestError, RequestError, Unavailable
from inflight_client.load_test.perf_analyzer import MeasurementsLost, PerfAnalyzer
from inflight_client.load_test.profile import read_level
from inflight_client.load_test.prompts import PromptOptions, make_prompts
from inflight_client.load_test.results import LevelResult
from inflight_client.load_test.server_facts import ServerFacts, read_engine, usual_metrics_address
from inflight_client.load_test.sweep import Level, LoadMode
from inflight_client.load_test.tensor_requests import RequestForm, make_requests, write_requests

READY_TIMEOUT = 30.0
WARM_UP_TOKENS = 4
ATTEMPTS = 4
"""Maximum number of runs of one level; see MeasurementsLost."""
_WARM_UP = Level(LoadMode.CONCURRENCY, 1, 1)

Analyzer = Callable[[Path], PerfAnalyzer]


class GrpcLoad:
    """See Load. `scratch`: a folder for inputs and exports. `client` is connected to the same `url` and `model`."""

    def __init__(
        self,
        *,
        url: str,
        model: str,
        prompts: PromptOptions,
        level_timeout: float,
        metrics_url: str,
        scratch: Path,
        client: Client,
        analyzer: Analyzer,
    ) -> None:
        """`metrics_url`: "" = at the usual port, if `url` is."""
        self._url = url
        self._model = model
        self._prompts = prompts
        self._level_timeout = level_timeout
        self._metrics_url = metrics_url or usual_metrics_address(url)
        self._inputs = scratch / "inputs.json"
        self._client = client
        self._analyzer = analyzer(scratch)
        self._form = RequestForm.LLM

    def warm_up(self) -> None:
        with contextlib.suppress(Unavailable):  # a loading model is worth waiting for; a missing server or model is not
            self._client.model_config()
        self._client.wait_until_ready(READY_TIMEOUT)
        inputs = [tensor["name"] for tensor in self._client.model_config().get("input", ())]
        self._form = RequestForm.of(self._model, inputs) if inputs else RequestForm.LLM
        longest = replace(
            self._prompts,
            input_tokens=(self._prompts.input_tokens[1],) * 2,
            output_tokens=(WARM_UP_TOKENS,) * 2,
        )
        if self._form is not RequestForm.LLM:  # whose tensors our client does not have
            with contextlib.suppress(MeasurementsLost):  # nobody reads them
                self._run(_WARM_UP, longest, "warm-up")
            return
        (prompt,) = make_prompts(longest, 1, level="warm-up")
        try:
            self._client.generate(prompt.content, max_tokens=WARM_UP_TOKENS, end_id=-1, timeout=READY_TIMEOUT)
        except RequestError as error:
            raise LoadTestError(f"the server refuses the load test's requests: {error}") from None

    def server_facts(self) -> ServerFacts:
        return replace(read_engine(self._metrics_url, self._model), tritonserver=_server_version(self._url))

    def measure(self, level: Level, number: int) -> LevelResult:
        """Once more with other prompts if the measurements were lost."""
        for attempt in range(ATTEMPTS):
            try:
                return read_level(self._run(level, self._prompts, f"{number}.{attempt}"), level, self._form)
            except MeasurementsLost:
                if attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    def _run(self, level: Level, options: PromptOptions, key: str) -> Path:
        prompts = make_prompts(options, level.num_requests, level=key, as_text=not self._form.takes_token_ids)
        write_requests(make_requests(prompts, options.temperature, self._form), self._inputs)
        return self._analyzer.run(
            level, url=self._url, model=self._model, inputs=self._inputs, timeout=self._level_timeout
        )


def _server_version(url: str) -> str:
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    client = InferenceServerClient(url)
    try:
        return str(client.get_server_metadata(client_timeout=READY_TIMEOUT).version)
    except InferenceServerException:
        return ""
    finally:
        client.close()
