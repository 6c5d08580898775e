"""How a server is watched and brought back: health, canaries, models that went down, pauses between tries."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from inflight.backoff import LONGEST, STEADY, Backoff
from inflight.supervisor import health, metrics
from inflight.supervisor.canary import LOOKS_PER_PERIOD, Canary
from inflight.supervisor.health import PERIOD, STRIKES, TIMEOUT, Health
from inflight.supervisor.models import LOOK_PERIOD, LOOK_TIMEOUT, UNLOADED_GRACE, Models
from inflight.supervisor.supervisor import TICK

PATIENCE = 100.0


class Clock:
    """Stands still until it is set forward."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeAdmin:
    """A server that answers as it is told to."""

    def __init__(self) -> None:
        self.is_deaf = False
        self.model_states: dict[str, set[str]] = {}
        self.loaded: list[str] = []
        self.unloaded: list[str] = []
        self.refusal = ""

    def check_live(self, timeout: float) -> None:
        if self.is_deaf:
            raise OSError("Deadline Exceeded")

    def states(self, timeout: float) -> dict[str, set[str]]:
        self.check_live(timeout)
        return self.model_states

    def is_model_ready(self, model: str) -> bool:
        return False

    def unload(self, model: str) -> str:
        self.unloaded.append(model)
        return ""

    def load(self, model: str, *, timeout: float) -> str:
        self.loaded.append(model)
        return self.refusal


class TestHealth:
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def admin(self) -> FakeAdmin:
        return FakeAdmin()

    def failures(self, watched: Health, clock: Clock, checks: int) -> list[str]:
        found = []
        for _ in range(checks):
            clock.now += PERIOD
            found.append(watched.failure())
        return found

    def test_a_server_that_is_deaf_for_a_while_counts_as_hung(self, admin: FakeAdmin, clock: Clock) -> None:
        watched = Health(admin, "", clock)  # type: ignore[arg-type]
        assert self.failures(watched, clock, 2) == ["", ""]
        admin.is_deaf = True
        *before, last = self.failures(watched, clock, STRIKES)
        assert before == [""] * (STRIKES - 1)
        assert last == "tritonserver does not answer over gRPC"

    def test_one_answer_forgives_what_was_missed(self, admin: FakeAdmin, clock: Clock) -> None:
        watched = Health(admin, "", clock)  # type: ignore[arg-type]
        for is_deaf in [True] * (STRIKES - 1) + [False] + [True] * (STRIKES - 1):
            admin.is_deaf = is_deaf
            assert self.failures(watched, clock, 1) == [""]
            assert watched.is_good is not is_deaf

    def test_a_dead_http_is_seen_while_grpc_answers(
        self, admin: FakeAdmin, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Somebody listens there and says nothing."""
        monkeypatch.setattr(health, "TIMEOUT", 0.05)
        with socket.create_server(("127.0.0.1", 0)) as mute:
            watched = Health(admin, f"127.0.0.1:{mute.getsockname()[1]}", clock)  # type: ignore[arg-type]
            assert self.failures(watched, clock, STRIKES)[-1] == "tritonserver does not answer over HTTP"

    def test_between_checks_nobody_is_asked(self, admin: FakeAdmin, clock: Clock) -> None:
        watched = Health(admin, "", clock)  # type: ignore[arg-type]
        self.failures(watched, clock, 1)
        admin.is_deaf = True
        assert watched.failure() == ""
        assert watched.is_good

    def test_a_hang_is_certain_within_ten_seconds(self) -> None:
        """It hangs after a good check: two looks at other things are in vain, then come the checks, a tick apart."""
        other_looks = metrics.SIGNS_TIMEOUT + LOOK_TIMEOUT
        assert other_looks + STRIKES * (max(PERIOD, TIMEOUT) + TICK) + TIMEOUT <= 10


class TestCanary:
    PERIOD = 8.0

    class Engine:
        """Its work is a number; a request to it is answered once somebody says so."""

        def __init__(self) -> None:
            self.work = 0
            self.blind = False
            self.asked = 0
            self.arrived = threading.Semaphore(0)
            self.answer: threading.Semaphore = threading.Semaphore(0)
            self.breaks = False

        def ask(self) -> None:
            self.asked += 1
            self.arrived.release()
            assert self.answer.acquire(timeout=PATIENCE)
            if self.breaks:
                raise OSError("the connection ended")

        def signs(self) -> int:
            if self.blind:
                raise OSError("no metrics")
            return self.work

    @pytest.fixture
    def engine(self) -> Engine:
        return self.Engine()

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def watched(self, engine: Engine, clock: Clock) -> Canary:
        return Canary(engine.ask, engine.signs, self.PERIOD, clock)

    def looks(self, watched: Canary, clock: Clock, periods: float, each: Callable[[], None] = lambda: None) -> bool:
        """Whether it ever counted as dead in this time."""
        dead = False
        for _ in range(round(periods * LOOKS_PER_PERIOD)):
            clock.now += self.PERIOD / LOOKS_PER_PERIOD
            each()
            dead = watched.is_dead() or dead
        return dead

    def settle(self, watched: Canary, engine: Engine) -> None:
        """Let the request be answered, or broken off, and be done with."""
        engine.answer.release()
        assert watched._asking is not None
        watched._asking.join(PATIENCE)

    def test_an_engine_that_works_is_left_alone(self, watched: Canary, engine: Engine, clock: Clock) -> None:
        def work() -> None:
            engine.work += 1

        assert not self.looks(watched, clock, 10, work)
        assert engine.asked == 0

    def test_an_idle_engine_is_asked_once_a_period_and_lives(
        self, watched: Canary, engine: Engine, clock: Clock
    ) -> None:
        for number in range(1, 4):
            assert not self.looks(watched, clock, 1.25)
            assert engine.arrived.acquire(timeout=PATIENCE)
            assert engine.asked == number
            self.settle(watched, engine)

    def test_an_engine_that_leaves_it_unanswered_is_dead(self, watched: Canary, engine: Engine, clock: Clock) -> None:
        assert not self.looks(watched, clock, 1.25)
        assert engine.arrived.acquire(timeout=PATIENCE)
        assert not self.looks(watched, clock, 0.75)
        assert self.looks(watched, clock, 0.5)
        assert engine.asked == 1
        self.settle(watched, engine)

    def test_a_long_queue_is_no_death(self, watched: Canary, engine: Engine, clock: Clock) -> None:
        """The request waits behind all others, and they make steps, for longer than any period."""
        assert not self.looks(watched, clock, 1.25)
        assert engine.arrived.acquire(timeout=PATIENCE)

        def work() -> None:
            engine.work += 1

        assert not self.looks(watched, clock, 10, work)
        self.settle(watched, engine)
        assert engine.asked == 1

    def test_a_request_whose_connection_ended_is_made_again(
        self, watched: Canary, engine: Engine, clock: Clock
    ) -> None:
        assert not self.looks(watched, clock, 1.25)
        engine.breaks = True
        self.settle(watched, engine)
        assert not self.looks(watched, clock, 0.25)
        assert engine.arrived.acquire(timeout=PATIENCE) and engine.arrived.acquire(timeout=PATIENCE)
        engine.breaks = False
        self.settle(watched, engine)
        assert not self.looks(watched, clock, 1)

    def test_an_engine_to_which_no_request_gets_through_is_dead(
        self, watched: Canary, engine: Engine, clock: Clock
    ) -> None:
        """As where tritonserver itself answers that the stub is not healthy."""
        engine.breaks = True

        def let_it_break() -> None:
            if watched._asking is not None and watched._asking.is_alive():
                self.settle(watched, engine)

        assert not self.looks(watched, clock, 2, let_it_break)
        assert self.looks(watched, clock, 0.5, let_it_break)
        assert engine.asked > 2
        self.settle(watched, engine)

    def test_whoever_cannot_see_the_work_judges_nothing(self, watched: Canary, engine: Engine, clock: Clock) -> None:
        assert not self.looks(watched, clock, 1.25)
        engine.blind = True
        assert not self.looks(watched, clock, 10)
        self.settle(watched, engine)

    def test_a_period_of_0_never_asks(self, engine: Engine, clock: Clock) -> None:
        assert not self.looks(Canary(engine.ask, engine.signs, 0.0, clock), clock, 10)
        assert engine.asked == 0


def test_the_signs_of_work_are_the_models_own_series() -> None:
    text = (
        'inflight_requests_total{model="llm",outcome="completed",version="1"} 3.000000\n'
        'inflight_requests_total{model="llm2",outcome="completed",version="1"} 4.000000\n'
        'nv_trt_llm_general_metrics{general_type="iteration_counter",model="llm",version="1"} 7\n'
        'nv_trt_llm_request_metrics{model="llm",request_type="active",version="1"} 1\n'
        'inflight_engine_relaunch_seconds_total{model="llm",version="1"} 0.5\n'
    )
    assert [line.split()[-1] for line in metrics.find_signs(text, "llm")] == ["3.000000", "7", "0.5"]


class TestModels:
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def admin(self) -> FakeAdmin:
        admin = FakeAdmin()
        admin.model_states = {"llm": {"READY"}, "ensemble": {"READY"}}
        return admin

    @pytest.fixture
    def models(self, admin: FakeAdmin, tmp_path: Path, clock: Clock) -> Models:
        return Models(admin, ("llm", "ensemble"), tmp_path, clock)  # type: ignore[arg-type]

    def down(self, models: Models, clock: Clock, seconds: float) -> list[tuple[str, str]]:
        """All that is told in this time."""
        found: list[tuple[str, str]] = []
        for _ in range(round(seconds / TICK)):
            clock.now += TICK
            found += models.down()
        return found

    def test_a_dialect_model_is_unloaded_when_its_engine_is_not_ready(
        self, admin: FakeAdmin, clock: Clock, tmp_path: Path
    ) -> None:
        models = Models(
            admin,  # type: ignore[arg-type]
            ("llm", "vllm_model", "ensemble"),
            tmp_path,
            clock,
            attached={"vllm_model": "llm", "ensemble": "llm"},
        )
        admin.model_states = {"llm": {"READY"}, "vllm_model": {"READY"}, "ensemble": {"READY"}}
        assert self.down(models, clock, 2 * LOOK_PERIOD) == [] and admin.unloaded == []
        admin.model_states["llm"] = {"UNLOADING"}
        admin.model_states["ensemble"] = {"UNLOADING"}
        self.down(models, clock, LOOK_PERIOD)
        assert admin.unloaded == ["vllm_model"]

    def test_a_stubs_note_is_told_once_and_at_once(
        self, models: Models, admin: FakeAdmin, clock: Clock, tmp_path: Path
    ) -> None:
        assert self.down(models, clock, 10) == []
        (tmp_path / "llm").write_text("rank 1 was killed\n")
        (tmp_path / "somebody else's").touch()
        admin.model_states["llm"] = {"UNAVAILABLE"}
        assert self.down(models, clock, TICK) == [("llm", "rank 1 was killed")]

    @pytest.mark.parametrize("state", [{"UNAVAILABLE"}, {"UNLOADING"}, set()])
    def test_a_model_that_somebody_unloaded_is_told_after_a_while(
        self, models: Models, admin: FakeAdmin, clock: Clock, state: set[str]
    ) -> None:
        assert self.down(models, clock, 10) == []
        admin.model_states["ensemble"] = state
        assert self.down(models, clock, UNLOADED_GRACE - LOOK_PERIOD) == []
        told = self.down(models, clock, 2 * LOOK_PERIOD + UNLOADED_GRACE)
        assert set(told) == {("ensemble", "it was unloaded, and not by this supervisor")}

    def test_a_model_without_a_stub_is_unloaded_and_told_once(
        self, models: Models, admin: FakeAdmin, clock: Clock
    ) -> None:
        models.lose("ensemble", "its stub process ensemble_0_0 ended")
        assert admin.unloaded == ["ensemble"]
        assert self.down(models, clock, 10) == [("ensemble", "its stub process ensemble_0_0 ended")]

    def test_a_model_that_is_being_loaded_is_not_lost(self, models: Models, admin: FakeAdmin, clock: Clock) -> None:
        admin.model_states["llm"] = {"LOADING"}
        assert self.down(models, clock, 60) == []

    def test_a_deaf_server_has_not_lost_its_models(self, models: Models, admin: FakeAdmin, clock: Clock) -> None:
        admin.is_deaf = True
        assert self.down(models, clock, 60) == []

    def test_a_load_that_fails_says_why(self, models: Models, admin: FakeAdmin) -> None:
        admin.refusal = "failed to load"
        loading = models.load("llm", 5.0)
        loading._thread.join(PATIENCE)
        assert loading.is_over
        assert (admin.loaded, loading.failure) == (["llm"], "failed to load")


class TestBackoff:
    def test_pauses_grow_to_a_longest_and_go_on(self) -> None:
        backoff = Backoff(Clock())
        assert [backoff.failed() for _ in range(7)] == [0, 1, 2, 4, 8, 16, 32]
        assert {backoff.failed() for _ in range(100)} == {LONGEST}

    def test_service_is_what_forgives_and_the_time_to_come_up_is_none(self) -> None:
        clock = Clock()
        backoff = Backoff(clock)
        for expected in (0, 1, 2, 4):
            assert backoff.failed() == expected
            clock.now += 10 * STEADY  # it loads for so long
            backoff.succeeded()
            clock.now += STEADY / 2  # and serves for so long
        clock.now += STEADY
        assert backoff.failed() == 0
