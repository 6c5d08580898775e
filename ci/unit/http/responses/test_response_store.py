"""Which responses are kept, for how long, and for whom."""

from __future__ import annotations

from pathlib import Path

import pytest
from openai_server import CLIENT, PlayedEngine, Running, checkpoint_folder, openai_server

from inflight.errors import ConfigurationError
from inflight.http.dialects.openai.responses.store import ResponseStore, StoredResponse
from inflight.openai_options import OpenAIOptions

RESPONSES = "/v1/responses"
KEYS = ("a-key-of-some-length", "another-key-of-some-length")


def stored(size: int, *, tenant: int = 0) -> StoredResponse:
    """Of so many bytes, a part of which are its turns."""
    return StoredResponse(tenant, b"x" * (size - 2), (b"[]",))


def test_the_one_used_the_longest_time_ago_is_given_up() -> None:
    store = ResponseStore(2, 1000)
    store.put("a", stored(10))
    store.put("b", stored(10))
    assert store.find("a", 0) is not None
    store.put("c", stored(10))
    assert [name for name in "abc" if store.find(name, 0)] == ["a", "c"]


def test_bytes_are_bounded_and_counted_back() -> None:
    store = ResponseStore(100, 100)
    store.put("a", stored(60))
    store.put("b", stored(50))
    assert store.find("a", 0) is None
    store.put("c", stored(50))
    assert store.find("b", 0) is not None
    assert store.take("b", 0) is not None
    store.put("d", stored(50))
    assert store.find("c", 0) is not None
    store.put("large", stored(101))
    assert [name for name in ("b", "c", "d", "large") if store.find(name, 0)] == ["c", "d"]


def test_what_belongs_to_another_is_not_there() -> None:
    store = ResponseStore(100, 100)
    store.put("a", stored(10, tenant=1))
    assert store.find("a", 2) is None
    assert store.take("a", 2) is None
    assert store.take("a", 1) is not None
    assert store.find("a", 1) is None


def test_a_key_opens_its_own_responses_alone(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("\n".join(KEYS))
    mine, theirs = ({"Authorization": f"Bearer {key}"} for key in KEYS)
    with openai_server(PlayedEngine(), checkpoint_folder(tmp_path / "c"), api_key_file=str(keys)) as url:
        path = f"{url}{RESPONSES}"
        kept = CLIENT.post(path, json={"input": "hi"}, headers=mine).json()["id"]
        for method in ("GET", "DELETE"):
            assert CLIENT.request(method, f"{path}/{kept}").status_code == 401
            assert CLIENT.request(method, f"{path}/{kept}", headers=theirs).status_code == 404
        stolen = {"input": "what was said?", "previous_response_id": kept}
        assert CLIENT.post(path, json=stolen, headers=theirs).status_code == 400
        assert CLIENT.post(path, json=stolen, headers=mine).status_code == 200
        assert CLIENT.delete(f"{path}/{kept}", headers=mine).json() == {
            "id": kept,
            "object": "response",
            "deleted": True,
        }


def test_a_server_that_keeps_none_says_so(tmp_path: Path) -> None:
    with openai_server(PlayedEngine(), checkpoint_folder(tmp_path), max_stored_responses=0) as url:
        server = Running(url, PlayedEngine())
        answer = server.post(RESPONSES, {"input": "hi"})
        assert answer.status_code == server.post(RESPONSES, {"input": "hi", "store": False}).status_code == 200
        assert server.get(f"{RESPONSES}/{answer.json()['id']}").status_code == 404
        for field, value in (("store", True), ("previous_response_id", answer.json()["id"])):
            error = server.post(RESPONSES, {"input": "hi", field: value}).json()["error"]
            assert error["param"] == field
            assert "max_stored_responses" in error["message"]


def test_a_response_that_is_read_is_the_one_that_was_sent(running: Running) -> None:
    sent = running.post(RESPONSES, {"input": "hi"})
    path = f"{RESPONSES}/{sent.json()['id']}"
    assert running.get(path).content == sent.content
    assert running.get(f"{path}?stream=false").status_code == 200
    assert running.get(f"{path}?stream=true").status_code == 400


def test_bounds_are_numbers_from_0_on() -> None:
    with pytest.raises(ConfigurationError, match="max_stored_responses must not be negative"):
        OpenAIOptions().with_settings({"max_stored_responses": "-1"})
