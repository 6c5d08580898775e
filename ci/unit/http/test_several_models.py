"""A server of several models: whatever dialect a request comes in, it goes to the model that it names.

pytest ci/unit/http/test_several_models.py
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import played_encoder
import pytest
from fake_tokenizer import byte_tokenizer
from openai_server import CLIENT, PlayedEngine, checkpoint_folder, say, serving, wait_until
from prometheus_client.parser import text_string_to_metric_families

from inflight.asking.images import Images
from inflight.config import EngineConfig
from inflight.errors import ConfigurationError, EngineUnavailable
from inflight.executor.front.front import NOT_AVAILABLE, Front
from inflight.http import room as room_module
from inflight.http.model import Model
from inflight.http.model_engine import ModelEngine
from inflight.http.model_names import CONFIG
from inflight.http.room import Needs, Room
from inflight.http.serve import OpenAIServer, listen
from inflight.openai_options import ModelOptions, OpenAIOptions
from inflight.output_config import Pooled
from inflight.request_limits import RequestLimits

GIB = 2**30


class LoadedEngine(PlayedEngine):
    """One whose load the test lets go on, or fail."""

    def __init__(self, loads: Loads, text: str) -> None:
        super().__init__(say(text))
        self._loads = loads
        self.ready = False

    @property
    def limits(self) -> RequestLimits:
        if not self.ready:
            raise EngineUnavailable(NOT_AVAILABLE)
        return super().limits

    def start(self) -> None:
        self._loads.begun += 1
        assert self._loads.may_end.wait(50)
        if self._loads.failure:
            self.shutdown()
            raise ConfigurationError(self._loads.failure)
        self.ready = True

    def shutdown(self) -> None:
        self._loads.ended += self.ready
        super().shutdown()
        self.ready = False


@dataclass
class Loads:
    begun: int = 0
    ended: int = 0
    failure: str = ""
    may_end: threading.Event = field(default_factory=threading.Event)


@dataclass
class Several:
    url: str
    loads: Loads
    """Of the model `late`, which is loaded on demand."""

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return CLIENT.post(f"{self.url}{path}", content=json.dumps(body).encode(), **options)

    def get(self, path: str) -> httpx.Response:
        return CLIENT.get(f"{self.url}{path}")

    def complete(self, model: str, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": model, "prompt": "ab", "max_tokens": 64, **body})


@contextlib.contextmanager
def several(folder: Path, *, adapters: str = "", of_files: Pooled = "", **options: Any) -> Iterator[Several]:
    """A model that writes text, with adapters, one that makes vectors, and one on demand. `of_files`: what the files
    say that they give."""
    names = ("writer", "vectors", "late")
    checkpoint = checkpoint_folder(folder)
    settings = OpenAIOptions(
        port=0,
        drain_seconds=1.0,
        models=[ModelOptions(engine=name, pooled=of_files, is_on_demand=name == "late") for name in names],
        **options,
    )
    models = [
        Model(
            each,
            EngineConfig(gpt_model_path=str(checkpoint), lora_dir=adapters if each.engine == "writer" else ""),
            played_encoder.tokenizer() if each.engine == "vectors" else byte_tokenizer(),
        )
        for each in settings.of_each()
    ]
    loads = Loads()
    played: dict[str, Front] = {"writer": PlayedEngine(say("text of writer")), "vectors": played_encoder.engine()}
    engines = [ModelEngine(name, lambda front=front: front, PlayedEngine) for name, front in played.items()]  # type: ignore[misc]
    late = ModelEngine(
        "late",
        lambda: LoadedEngine(loads, "text of late"),
        PlayedEngine,
        is_on_demand=True,
        keep_seconds=settings.unload_after_seconds or math.inf,
    )
    with serving(OpenAIServer(settings, models), [*engines, late], settings) as url:
        yield Several(url, loads)
        loads.may_end.set()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Several]:
    folder = tmp_path_factory.mktemp("several")
    (folder / "adapters" / "pirate").mkdir(parents=True)
    (folder / "adapters" / "pirate" / CONFIG).write_text("{}")
    with several(folder / "checkpoint", adapters=str(folder / "adapters"), allow_lora_updates=True) as server:
        yield server


class TestRouting:
    def test_openais_clients_reach_each_model(self, shared: Several) -> None:
        with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none") as client:
            completion = client.completions.create(model="writer", prompt="a", max_tokens=64)
            assert completion.choices[0].text == "text of writer"
            vector = client.embeddings.create(model="vectors", input="aab", encoding_format="float").data[0].embedding
            assert vector == pytest.approx([2 / 5**0.5, 1 / 5**0.5, 0, 0])
            listed = {model.id: model for model in client.models.list()}
            assert list(listed) == ["writer", "pirate", "vectors", "late"]
            assert client.models.retrieve("vectors").id == "vectors"
            with pytest.raises(openai.NotFoundError, match="this server has writer, vectors, late"):
                client.models.retrieve("gpt-5")
        cards = {card["id"]: card for card in shared.get("/v1/models").json()["data"]}
        assert cards["pirate"]["parent"] == "writer" and cards["late"]["max_model_len"] is None

    def test_ollamas_clients_see_all_models(self, shared: Several) -> None:
        client = ollama.Client(shared.url)
        assert [model.model for model in client.list().models] == ["writer", "pirate", "vectors", "late"]
        assert [model.model for model in client.ps().models] == ["writer", "vectors"]
        answer = client.chat("writer:latest", [{"role": "user", "content": "hi"}])
        assert answer.message.content == "text of writer"
        assert client.embed("vectors", "b").embeddings == [[0, 1, 0, 0]]
        with pytest.raises(ollama.ResponseError, match="model 'x' not found: this server has writer, vectors, late"):
            client.chat("x", [{"role": "user", "content": "hi"}])

    def test_anthropics_clients_reach_each_model(self, shared: Several) -> None:
        asked: Any = {"max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]}
        with anthropic.Anthropic(base_url=shared.url, api_key="none", max_retries=0) as client:
            (block,) = client.messages.create(model="writer", **asked).content
            assert block.type == "text" and block.text == "text of writer"
            with pytest.raises(anthropic.NotFoundError, match="this server has writer, vectors, late"):
                client.messages.create(model="x", **asked)
            with pytest.raises(anthropic.BadRequestError):
                client.messages.create(model="vectors", **asked)

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/tokenize", "/rerank", "/api/chat"])
    @pytest.mark.parametrize("named", [{}, {"model": None}, {"model": ""}])
    def test_without_a_name_there_is_one_sentence(self, shared: Several, path: str, named: dict[str, Any]) -> None:
        response = shared.post(path, {"prompt": "a", "input": "a", **named})
        assert response.status_code == 400
        assert "model is missing: name one of writer, vectors, late" in response.text

    def test_a_wrong_body_is_refused_as_ever(self, shared: Several) -> None:
        assert CLIENT.post(f"{shared.url}/v1/completions", content=b"{").status_code == 400
        wrong = shared.post("/v1/completions", {"model": 5, "prompt": "a"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "model")
        assert shared.get("/v1/completions").status_code == 405

    def test_an_adapter_is_its_bases(self, shared: Several, tmp_path: Path) -> None:
        answer = shared.complete("pirate").json()
        assert (answer["model"], answer["choices"][0]["text"]) == ("pirate", "text of writer")
        order = {"lora_name": "poet", "lora_path": str(tmp_path)}
        assert "model is missing" in shared.post("/v1/load_lora_adapter", order).text
        assert shared.post("/v1/load_lora_adapter", {**order, "model": "writer"}).status_code == 200
        assert "poet" in [card["id"] for card in shared.get("/v1/models").json()["data"]]
        assert shared.complete("poet").json()["model"] == "poet"
        taken = shared.post("/v1/load_lora_adapter", {**order, "lora_name": "vectors", "model": "writer"})
        assert (taken.status_code, "exists already" in taken.text) == (400, True)
        assert shared.post("/v1/unload_lora_adapter", {"lora_name": "poet"}).status_code == 200
        assert shared.complete("poet").status_code == 404

    def test_a_conversation_may_change_its_model_no_path_its_owner(self, shared: Several) -> None:
        kept = shared.post("/v1/responses", {"model": "writer", "input": "hi"}).json()
        assert shared.get(f"/v1/responses/{kept['id']}").json()["model"] == "writer"
        assert shared.get("/v1/responses/unknown").status_code == 404

    def test_metrics_have_a_label_for_each_model(self, shared: Several) -> None:
        shared.complete("writer", max_tokens=5)
        shared.post("/v1/embeddings", {"model": "vectors", "input": "abc"})
        families = {family.name: family for family in text_string_to_metric_families(shared.get("/metrics").text)}
        tokens = {each.labels["model"]: each.value for each in families["inflight_openai_prompt_tokens"].samples}
        assert tokens["writer"] > 0 and tokens["vectors"] > 0
        generated = {each.labels["model"]: each.value for each in families["inflight_openai_generated_tokens"].samples}
        assert generated["writer"] >= 5 and generated["vectors"] == 0
        described = {each.labels["model"] for each in families["inflight_engine_info"].samples}
        assert described == {"writer", "vectors"}
        text = shared.get("/metrics").text
        assert text.count("# TYPE inflight_guided_answers_checked_total") == 1

    def test_the_page_watches_the_model_that_it_is_asked_for(self, shared: Several) -> None:
        with CLIENT.stream("GET", f"{shared.url}/events?model=vectors") as response:
            assert response.status_code == 200
        unknown = shared.get("/events?model=x")
        assert (unknown.status_code, "there are writer, vectors, late" in unknown.text) == (404, True)


class TestOnDemand:
    def test_first_requests_share_one_load_and_others_do_not_wait(self, tmp_path: Path) -> None:
        with several(tmp_path) as server, ThreadPoolExecutor(4) as threads:
            assert server.get("/health").status_code == 200 and server.loads.begun == 0
            asking = [threads.submit(server.complete, "late") for _ in range(4)]
            wait_until(lambda: server.loads.begun > 0)
            assert server.complete("writer").status_code == 200
            assert not any(each.done() for each in asking)
            server.loads.may_end.set()
            assert [each.result().json()["choices"][0]["text"] for each in asking] == ["text of late"] * 4
            assert server.loads.begun == 1

    def test_a_load_that_fails_is_one_sentence_and_not_tried_at_once(self, tmp_path: Path) -> None:
        with several(tmp_path) as server:
            server.loads.failure = "there is no room"
            server.loads.may_end.set()
            answers = [server.complete("late") for _ in range(6)]
            assert {each.status_code for each in answers} == {503}
            assert {each.json()["error"]["message"] for each in answers} == {
                "the model late was not loaded: there is no room"
            }
            assert server.loads.begun == 2  # after the second one there is a pause
            assert server.complete("writer").status_code == 200

    def test_an_idle_one_is_unloaded_and_loaded_again(self, tmp_path: Path) -> None:
        with several(tmp_path, unload_after_seconds=0.05) as server:
            server.loads.may_end.set()
            for count in (1, 2):
                assert server.complete("late").status_code == 200
                wait_until(lambda: server.loads.ended == server.loads.begun)
                assert server.loads.begun == count
                assert server.get("/health").status_code == 200
            assert server.complete("writer").status_code == 200

    def test_with_it_the_process_ends_that_reads_its_images(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rested: list[Images] = []
        monkeypatch.setattr(Images, "rest", lambda images: rested.append(images))
        with several(tmp_path, unload_after_seconds=0.05) as server:
            server.loads.may_end.set()
            assert server.complete("late").status_code == 200
            wait_until(lambda: len(rested) == 1)

    def test_a_name_that_only_ollamas_clients_may_write_loads_nothing_for_others(self, tmp_path: Path) -> None:
        with several(tmp_path) as server:
            server.loads.may_end.set()
            assert server.complete("late:latest").status_code == 404
            assert server.loads.begun == 0
            asked = {"model": "late:latest", "prompt": "ab", "stream": False, "raw": True}
            assert server.post("/api/generate", asked).json()["response"] == "text of late"

    def test_the_only_model_needs_no_name(self, tmp_path: Path) -> None:
        settings = OpenAIOptions(port=0, models=[ModelOptions(engine="late", is_on_demand=True)])
        config = EngineConfig(gpt_model_path=str(checkpoint_folder(tmp_path)))
        loads = Loads()
        loads.may_end.set()
        late = ModelEngine("late", lambda: LoadedEngine(loads, "text of late"), PlayedEngine, is_on_demand=True)
        server = OpenAIServer(settings, [Model(each, config, byte_tokenizer()) for each in settings.of_each()])
        with serving(server, [late], settings) as url:
            late_alone = Several(url, loads)
            answer = late_alone.post("/v1/completions", {"prompt": "a", "max_tokens": 64}).json()
            assert (answer["model"], answer["choices"][0]["text"]) == ("late", "text of late")
            assert late_alone.complete("x").status_code == 404

    async def test_one_in_use_is_not_unloaded(self) -> None:
        loads = Loads()
        loads.may_end.set()
        engine = ModelEngine("late", lambda: LoadedEngine(loads, ""), PlayedEngine, is_on_demand=True)
        engine.open(asyncio.get_running_loop())
        async with engine.in_use():
            await engine.unload()
            assert engine.is_loaded and engine.is_well() and not engine.seconds_idle()
        await engine.unload()
        assert not engine.is_loaded and engine.is_well() and loads.ended == 1
        await engine.load()
        assert engine.is_loaded and loads.begun == 2
        await engine.close()

    async def test_one_that_is_asked_for_while_it_begins_to_unload_is_loaded_again(self) -> None:
        """What came before the unload has taken its first step must not be given the engine that ends."""
        loads = Loads()
        loads.may_end.set()
        engine = ModelEngine("late", lambda: LoadedEngine(loads, ""), PlayedEngine, is_on_demand=True)
        engine.open(asyncio.get_running_loop())
        await engine.load()

        async def use() -> bool:
            async with engine.in_use():
                await asyncio.sleep(0.01)
                return engine.front.can_enqueue_requests()

        _, could = await asyncio.gather(engine.unload(), use())
        assert could and (loads.begun, loads.ended) == (2, 1)
        await engine.close()

    async def test_a_client_that_gives_up_takes_the_load_from_nobody(self) -> None:
        loads = Loads()
        engine = ModelEngine("late", lambda: LoadedEngine(loads, ""), PlayedEngine, is_on_demand=True)
        engine.open(asyncio.get_running_loop())
        first, second = (asyncio.create_task(engine.load()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        loads.may_end.set()
        await second
        assert engine.is_loaded and loads.begun == 1 and first.cancelled()
        await engine.close()


class TestKeepAlive:
    """As Ollama's clients ask for it."""

    @pytest.fixture
    def server(self, tmp_path: Path) -> Iterator[Several]:
        with several(tmp_path, unload_after_seconds=1000.0) as server:
            server.loads.may_end.set()
            yield server

    def left(self, server: Several) -> float:
        """Seconds until `late` is unloaded, as its client is told."""
        (late,) = (model for model in ollama.Client(server.url).ps().models if model.model == "late")
        assert late.expires_at is not None
        return (late.expires_at - datetime.now(timezone.utc)).total_seconds()

    def test_a_client_is_told_when_its_model_is_unloaded(self, server: Several) -> None:
        client = ollama.Client(server.url)
        client.generate("late", "hi")
        assert 900 < self.left(server) <= 1000
        for asked, seconds in ((30, 30), ("1h30m", 5400), ("1.5s", 1.5)):
            client.generate("late", "hi", keep_alive=asked)
            assert seconds - 100 < self.left(server) <= seconds
        client.generate("late", keep_alive=-1)
        assert self.left(server) > 1e9
        assert next(each for each in client.ps().models if each.model == "writer").expires_at == datetime(
            2200, 1, 1, tzinfo=timezone.utc
        )

    def test_a_client_is_told_how_long_it_was_loaded_for_it(self, server: Several) -> None:
        client = ollama.Client(server.url)
        first, second = client.generate("late", "hi"), client.generate("late", "hi")
        for each in (first, second):
            assert each.load_duration is not None and each.prompt_eval_duration is not None
            assert each.total_duration is not None
            assert 0 <= each.load_duration <= each.total_duration - each.prompt_eval_duration
        assert first.load_duration and first.load_duration > 0

    def test_zero_unloads_it_behind_the_answer(self, server: Several) -> None:
        client = ollama.Client(server.url)
        answer = client.chat("late", [{"role": "user", "content": "hi"}], keep_alive=0)
        assert answer.message.content == "text of late"
        wait_until(lambda: server.loads.ended == 1)
        client.generate("late", "hi")
        assert (server.loads.begun, self.left(server) > 900) == (2, True), "what was asked for is over"

    def test_an_order_loads_or_unloads_it(self, server: Several) -> None:
        client = ollama.Client(server.url)
        assert client.generate("late", keep_alive="0s").done_reason == "unload"
        assert server.loads.begun == 0, "nothing is loaded to be unloaded"
        assert client.chat("late").done_reason == "load"
        assert server.loads.begun == 1
        assert client.chat("late", keep_alive=0).done_reason == "unload"
        wait_until(lambda: server.loads.ended == 1)

    @pytest.mark.parametrize("keep_alive", ["soon", "5", "1h 3m", "9" * 100 + "s"])
    @pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/embed", "/api/embeddings"])
    def test_what_is_no_duration_is_refused(self, shared: Several, path: str, keep_alive: str) -> None:
        said = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a"}
        model = "vectors" if "embed" in path else "writer"
        response = shared.post(path, {"model": model, **said, "keep_alive": keep_alive})
        assert response.status_code == 400
        assert "keep_alive must be a number of seconds or a duration such as 10m" in response.json()["error"]

    def test_one_that_is_not_on_demand_stays(self, shared: Several) -> None:
        client = ollama.Client(shared.url)
        assert client.chat("writer", [{"role": "user", "content": "hi"}], keep_alive=0).message.content
        with pytest.raises(ollama.ResponseError, match=r"keep_alive.*the model writer stays loaded on this server"):
            client.chat("writer", keep_alive=0)

    @pytest.mark.parametrize(("of_files", "capabilities"), [("", ["completion"]), ("vectors", ["embedding"])])
    def test_what_its_files_say_is_shown_without_loading_it(
        self, tmp_path: Path, of_files: Pooled, capabilities: list[str]
    ) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 4096}')
        with several(tmp_path, of_files=of_files) as server:
            shown = ollama.Client(server.url).show("late")
            assert server.loads.begun == 0
        assert shown.capabilities == capabilities
        assert shown.modelinfo is not None and shown.modelinfo["qwen3.context_length"] == 4096
        assert "num_ctx                        4096" in (shown.parameters or "")


class TestRoom:
    @pytest.fixture
    def free(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """GiB of a machine, before the engines take theirs."""
        total = [0]
        monkeypatch.setattr(room_module, "available_memory", lambda: total[0] * GIB)
        return total

    def engines(self, free: list[int], *names: str, num_cores: int = 100) -> tuple[dict[str, ModelEngine], Loads]:
        """Each takes 2 GiB and 2 cores."""
        self.rested: list[str] = []
        loads = Loads()
        loads.may_end.set()
        made = {name: ModelEngine(name, lambda: Sized(loads, free), PlayedEngine, is_on_demand=True) for name in names}
        needs = dict.fromkeys(made, Needs(num_bytes=2 * GIB, num_threads=2))
        room = Room([*made.values()], needs, num_cores)
        for name, engine in made.items():
            engine.open(asyncio.get_running_loop(), room.held, partial(self.rested.append, name))
        return made, loads

    async def test_the_one_idle_longest_is_unloaded_first(self, free: list[int]) -> None:
        free[0] = 5
        made, _ = self.engines(free, "a", "b", "c")
        for name in ("a", "b", "a", "c"):
            async with made[name].in_use():
                pass
        assert [name for name, engine in made.items() if engine.is_loaded] == ["a", "c"]
        await asyncio.gather(*(engine.close() for engine in made.values()))

    async def test_one_that_gives_way_takes_what_belongs_to_it_along(self, free: list[int]) -> None:
        """The process that reads its images, whoever unloads it."""
        free[0] = 3
        made, _ = self.engines(free, "a", "b")
        for name in ("a", "b", "a"):
            async with made[name].in_use():
                pass
        assert self.rested == ["a", "b"]
        await asyncio.gather(*(engine.close() for engine in made.values()))

    async def test_what_is_in_use_stays_and_the_refusal_has_the_figures(self, free: list[int]) -> None:
        free[0] = 3
        made, loads = self.engines(free, "a", "b")
        async with made["a"].in_use():
            with pytest.raises(EngineUnavailable) as caught:
                await made["b"].load()
        assert str(caught.value) == (
            "the model b was not loaded: its weights take 2.00 GiB and 1.00 GiB of memory are available beside the "
            "models that are in use"
        )
        assert made["a"].is_loaded and loads.begun == 1
        await made["b"].load()
        assert made["b"].is_loaded and not made["a"].is_loaded
        await asyncio.gather(*(engine.close() for engine in made.values()))

    async def test_cores_are_given_once(self, free: list[int]) -> None:
        free[0] = 100
        made, _ = self.engines(free, "a", "b", "c", num_cores=5)
        async with made["a"].in_use(), made["b"].in_use():
            with pytest.raises(EngineUnavailable, match="its ranks have 2 threads and 1 cores are free beside"):
                await made["c"].load()
        await made["c"].load()
        assert sum(engine.is_loaded for engine in made.values()) == 2
        await asyncio.gather(*(engine.close() for engine in made.values()))

    @pytest.mark.parametrize(("memory", "cores"), [(3, 100), (100, 3)])
    async def test_two_loads_do_not_get_the_same_room(self, free: list[int], memory: int, cores: int) -> None:
        free[0] = memory
        made, loads = self.engines(free, "a", "b", num_cores=cores)
        results = await asyncio.gather(*(engine.load() for engine in made.values()), return_exceptions=True)
        assert [isinstance(each, EngineUnavailable) for each in results] == [False, True]
        assert loads.begun == 1
        await asyncio.gather(*(engine.close() for engine in made.values()))


class Sized(LoadedEngine):
    """One that takes 2 GiB."""

    def __init__(self, loads: Loads, free: list[int]) -> None:
        super().__init__(loads, "")
        self._free = free

    def start(self) -> None:
        super().start()
        self._free[0] -= 2

    def shutdown(self) -> None:
        self._free[0] += 2 * self.ready
        super().shutdown()


async def test_the_server_ends_if_what_it_loads_at_the_start_fails(tmp_path: Path) -> None:
    settings = OpenAIOptions(port=0, models=[ModelOptions(engine="a"), ModelOptions(engine="b")])
    config = EngineConfig(gpt_model_path=str(checkpoint_folder(tmp_path)))
    loads = Loads(failure="it is too large")
    loads.may_end.set()
    failing = ModelEngine("b", lambda: LoadedEngine(loads, ""), PlayedEngine)
    engines = [ModelEngine("a", PlayedEngine, PlayedEngine), failing]
    server = OpenAIServer(settings, [Model(each, config, byte_tokenizer()) for each in settings.of_each()])
    told: list[str] = []
    words = "the model b was not loaded: it is too large"
    with listen(settings.host, settings.port) as listener, pytest.raises(ConfigurationError, match=words):
        await server.run(engines, listener, told.append)
    assert told == []
