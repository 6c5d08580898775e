"""The leader's socket, with fronts that behave and fronts that do not."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from calls import until
from harness import make_request
from iteration_stats import iteration_stats

from inflight.engine_description import EngineDescription
from inflight.executor.front.link import EngineLink
from inflight.executor.rank.leader.leader_socket import LeaderSocket
from inflight.executor.wire.messages import (
    MAX_MESSAGE_BYTES,
    Cancel,
    Fatal,
    FromLeader,
    Goodbye,
    Heartbeat,
    Hello,
    Iterations,
    Occupied,
    RankInput,
    Received,
    Responses,
    Shutdown,
    Stats,
    Submit,
    Welcome,
)
from inflight.replay import Replay
from inflight.request import Request
from inflight.request_limits import RequestLimits
from inflight.result import FinishReason, Response, Result
from inflight.stats import RequestStatsPerIteration

LIMITS = RequestLimits(vocab_size=97, max_seq_len=64, max_input_len=63, kv_cache_tokens=256)


class Scene:
    """A server and its fronts. `inputs`: what the ranks would have heard. `room`: how many requests they take."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.server = LeaderSocket(
            path, limits=LIMITS, description=EngineDescription(device="cpu"), max_in_flight=3, tick_seconds=1000
        )
        self.links: list[EngineLink] = []
        self.heard: dict[EngineLink, list[FromLeader]] = {}
        self.inputs: list[RankInput] = []
        self.room = 8

    def front(self, **wishes: bool) -> EngineLink:
        link = EngineLink(self.path, Hello(front_id=len(self.links) + 1, pid=1, **wishes))
        self.links.append(link)
        self.heard[link] = []
        self.serve_until(lambda: any(isinstance(message, Welcome) for message in self.heard[link]))
        return link

    def serve_until(self, condition: object) -> None:
        assert callable(condition)

        def serve() -> bool:
            self.inputs.append(self.server.next_input(self.room, may_block=False))
            for link in self.links:
                self.heard[link] += link.receive_all()
            return bool(condition())

        until(serve, "the server has done it")

    def requests(self) -> list[Request]:
        return [request for rank_input in self.inputs for request in rank_input.requests]

    def stops(self) -> dict[int, FinishReason]:
        return {key: value for rank_input in self.inputs for key, value in rank_input.stops.items()}

    def responses(self, link: EngineLink) -> list[list[Response]]:
        return [message.responses for message in self.heard[link] if isinstance(message, Responses)]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path / "s")
    yield scene
    for link in scene.links:
        link.close()
    scene.server.close()


def test_the_socket_is_for_this_user_only(scene: Scene) -> None:
    mode = scene.path.stat().st_mode
    assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600


def test_fronts_are_welcomed_with_the_limits(scene: Scene) -> None:
    first, second = scene.front(), scene.front()
    welcomes = [message for link in (first, second) for message in scene.heard[link]]
    assert [(w.limits, w.max_in_flight) for w in welcomes if isinstance(w, Welcome)] == [(LIMITS, 3)] * 2


def test_an_id_belongs_to_one_front_until_that_leaves(scene: Scene) -> None:
    first = scene.front()
    second = EngineLink(scene.path, Hello(front_id=1, pid=1))
    scene.links.append(second)
    scene.heard[second] = []
    scene.serve_until(lambda: Occupied() in scene.heard[second])
    first.send(Goodbye())

    def is_welcome() -> bool:
        # Messages of two sockets may arrive in either order, so the first Hello may come before the Goodbye.
        if Occupied() in scene.heard[second]:
            scene.heard[second].clear()
            second.send(Hello(front_id=1, pid=2))
        return any(isinstance(message, Welcome) for message in scene.heard[second])

    scene.serve_until(is_welcome)


def test_a_front_that_says_goodbye_has_its_requests_cancelled(scene: Scene) -> None:
    staying, leaving = scene.front(), scene.front()
    for number, link in enumerate((staying, leaving)):
        link.send(Submit([make_request(number, 2)]))
    scene.serve_until(lambda: len(scene.requests()) == 2)
    leaving.send(Goodbye())
    scene.serve_until(lambda: scene.stops() == {1: FinishReason.CANCELLED})


def test_what_the_queue_cannot_take_is_refused_before_it_delays_others(scene: Scene) -> None:
    """A raw front may send anything that is a Request."""
    link = scene.front()
    wrong = {
        1: {"num_return_sequences": 10**9},
        2: {"num_return_sequences": -5},
        3: {"priority": float("nan")},
        4: {"allotted_time_ms": -1},
        5: {"beam_width": 10**9},
        -6: {},
    }
    for request_id, fields in wrong.items():
        link.send(Submit([make_request(request_id, 2, **fields)]))
    link.send(Submit([make_request(7, 2)]))

    def answers() -> dict[int, str]:
        return {each.request_id: each.error_code for batch in scene.responses(link) for each in batch}

    scene.serve_until(lambda: scene.requests() and len(answers()) == len(wrong))
    assert [request.request_id for request in scene.requests()] == [7]
    assert answers() == dict.fromkeys(wrong, "INVALID_ARGUMENT")


def test_a_front_that_comes_late_hears_the_latest_statistics(scene: Scene) -> None:
    early = scene.front()
    for json in ("{}", '{"Iteration Counter": 1}'):
        scene.server.report_stats(json)
        scene.serve_until(lambda json=json: Stats(json) in scene.heard[early])
    late = scene.front()
    scene.serve_until(lambda: len(scene.heard[late]) > 1)
    assert scene.heard[late][1:] == [Stats('{"Iteration Counter": 1}')]


def test_statistics_are_wanted_when_there_is_a_front_and_some_time_has_passed(scene: Scene) -> None:
    assert not scene.server.wants_stats()
    link = scene.front()
    scene.serve_until(scene.server.wants_stats)
    scene.server._stats_seconds = 3600.0
    scene.server.report_stats("{}")
    scene.serve_until(lambda: Stats("{}") in scene.heard[link])
    assert not scene.server.wants_stats()
    scene.server.report_stats('{"n": 2}')
    turns = len(scene.inputs) + 3
    scene.serve_until(lambda: len(scene.inputs) == turns)
    scene.server.report_stats('{"n": 3}')
    scene.server._next_stats = 0.0
    scene.serve_until(lambda: Stats('{"n": 3}') in scene.heard[link])
    assert Stats('{"n": 2}') not in scene.heard[link], "it was sent before the time had come"


def test_every_iteration_is_told_to_whoever_wants_that(scene: Scene) -> None:
    plain = scene.front()
    assert not scene.server.wants_iteration_stats and not scene.server.wants_request_stats
    curious = scene.front(wants_iteration_stats=True)
    thorough = scene.front(wants_iteration_stats=True, wants_request_stats=True)
    assert scene.server.wants_iteration_stats and scene.server.wants_request_stats
    plain.send(Submit([make_request(n, 2) for n in (1, 2)]))
    scene.room = 1
    scene.serve_until(lambda: len(scene.requests()) == 1)
    scene.room = 0
    for number in (1, 2):
        requests = RequestStatsPerIteration(iter=number, request_stats=[])
        scene.server.report_iteration(iteration_stats(iter=number), requests)

    def heard(link: EngineLink) -> list[Iterations]:
        return [message for message in scene.heard[link] if isinstance(message, Iterations)]

    scene.serve_until(lambda: heard(curious) and heard(thorough))
    (told,) = heard(curious)
    assert [(stats.iter, stats.num_queued_requests) for stats in told.iteration_stats] == [(1, 1), (2, 1)]
    assert told.request_stats == []
    (told,) = heard(thorough)
    assert [stats.iter for stats in told.request_stats] == [1, 2] and len(told.iteration_stats) == 2
    assert heard(plain) == []
    for link in (curious, thorough):
        link.send(Goodbye())
    scene.serve_until(lambda: not scene.server.wants_iteration_stats)


def test_the_statistics_say_how_many_wait_on_the_leader(scene: Scene) -> None:
    link = scene.front()
    link.send(Submit([make_request(n, 2) for n in (1, 2, 3)]))
    scene.room = 0
    scene.serve_until(lambda: scene.server._book.num_queued == 3)
    scene.room = 1
    scene.serve_until(lambda: len(scene.requests()) == 1)
    scene.room = 0
    scene.server.report_stats("{}")
    scene.serve_until(lambda: Stats("{}", 2) in scene.heard[link])


def test_an_iterations_responses_are_one_message_for_each_front(scene: Scene) -> None:
    first, second = scene.front(), scene.front()
    first.send(Submit([make_request(1, 2), make_request(2, 2)]))
    second.send(Submit([make_request(3, 2)]))
    scene.serve_until(lambda: len(scene.requests()) == 3)
    for request_id in (1, 2, 3):
        scene.server.respond(Response(request_id=request_id, result=Result(output_token_ids=[request_id])))
    scene.serve_until(lambda: scene.responses(first) and scene.responses(second))
    assert [[r.request_id for r in message] for message in scene.responses(first)] == [[1, 2]]
    assert [[r.request_id for r in message] for message in scene.responses(second)] == [[3]]


def test_a_front_confirms_what_it_was_sent_before_ranks_may_die_of_the_next_request(scene: Scene) -> None:
    front = scene.front()
    replay = Replay(is_suspect=True)
    front.send(Submit([make_request(1, 2), *(make_request(number, 2, replay=replay) for number in (2, 3))]))

    def begun() -> list[int]:
        return [request.request_id for rank_input in scene.inputs for request in rank_input.requests]

    scene.room = 1
    for number, last in ((2, False), (3, True)):
        scene.serve_until(lambda number=number: number in begun())  # type: ignore[misc]
        scene.server.respond(Response(request_id=number, result=Result(is_final=True)))
        scene.serve_until(lambda number=number: answered(scene, front) == number)  # type: ignore[misc]
        if not last:
            assert 3 not in begun()
            front.send(Received())
    scene.serve_until(lambda: begun() == [2, 3, 1])


def answered(scene: Scene, front: EngineLink) -> int:
    """The request of the last response; it is to be confirmed if others wait that ranks may have died of."""
    messages = [message for message in scene.heard[front] if isinstance(message, Responses)]
    assert [message.to_be_confirmed for message in messages] == [True, False][: len(messages)]
    return messages[-1].responses[-1].request_id if messages else 0


def test_a_full_engine_refuses_whoever_comes_next(scene: Scene) -> None:
    first, second = scene.front(), scene.front()
    first.send(Submit([make_request(n, 2) for n in (1, 2, 3)]))
    scene.serve_until(lambda: len(scene.requests()) == 3)
    second.send(Submit([make_request(4, 2)]))
    scene.serve_until(lambda: scene.responses(second))
    ((response,),) = scene.responses(second)
    assert (response.error_code, response.error_msg) == ("UNAVAILABLE", "Exceeds maximum queue size")


def test_cancel_shutdown_heartbeat_stats_and_last_words(scene: Scene) -> None:
    link = scene.front()
    link.send(Submit([make_request(1, 2), make_request(2, 2)]))
    scene.serve_until(lambda: len(scene.requests()) == 2)
    link.send(Cancel([1]))
    scene.serve_until(lambda: scene.stops() == {1: FinishReason.CANCELLED})
    link.send(Shutdown())
    scene.serve_until(lambda: scene.inputs[-1].shutdown)
    assert 2 in scene.stops()
    scene.server.all_ranks_answered()
    scene.server.report_stats('{"n": 1}')
    scene.server.fail("a sentence")
    scene.serve_until(
        lambda: all(each in scene.heard[link] for each in (Heartbeat(), Stats('{"n": 1}'), Fatal("a sentence")))
    )


def test_a_front_that_is_gone_has_its_requests_stopped(scene: Scene) -> None:
    leaver, stayer = scene.front(), scene.front()
    leaver.send(Submit([make_request(1, 2)]))
    stayer.send(Submit([make_request(2, 2)]))
    scene.serve_until(lambda: len(scene.requests()) == 2)
    scene.links.remove(leaver)
    leaver.close()

    def stopped() -> bool:
        scene.server.all_ranks_answered()
        return 1 in scene.stops()

    scene.serve_until(stopped)
    assert 2 not in scene.stops()


def test_what_is_no_message_is_dropped_and_the_others_are_served(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    link = scene.front()
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.connect(f"ipc://{scene.path}")
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(scene.path))
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 8)
        stranger.send(b"\xff\x00 the secret prompt")
        stranger.send(b"\x91" * 1_000_000)
        stranger.send(b"")
        stranger.send_multipart([b"two", b"frames"])
        stranger.send(bytes.fromhex("81a474797065a653756d626974"))
        link.socket.send(b"garbage from a friend")
        link.send(Submit([make_request(1, 2)]))
        scene.serve_until(lambda: scene.server._num_bad_messages >= 6 and len(scene.requests()) == 1)
    assert "secret" not in caplog.text
    stranger.close(linger=0)


def test_a_message_beyond_the_bound_costs_its_sender_the_connection(scene: Scene) -> None:
    link = scene.front()
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    stranger.connect(f"ipc://{scene.path}")
    stranger.send(bytes(MAX_MESSAGE_BYTES + 1))
    scene.serve_until(lambda: monitor.poll(0))
    stranger.disable_monitor()
    stranger.close(linger=0)
    link.send(Submit([make_request(1, 2)]))
    scene.serve_until(lambda: len(scene.requests()) == 1)
    assert scene.server._num_bad_messages == 0


def test_an_idle_server_ticks(tmp_path: Path) -> None:
    server = LeaderSocket(tmp_path / "s", limits=LIMITS, description=EngineDescription(device="cpu"), tick_seconds=0.01)
    assert server.next_input(8, may_block=True) == RankInput(tick=True)
    server.close()
