"""What bodies ask of the engine, and what answers hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_executor import STATS
from fake_tokenizer import byte_tokenizer
from openai_server import (
    CHAT,
    CHATS,
    CLIENT,
    COMPLETIONS,
    END_ID,
    TEXT,
    PlayedEngine,
    Running,
    ask,
    checkpoint_folder,
    complete,
    log_probs,
    openai_server,
    say,
    wait_until,
)

from inflight.output_config import MAX_LOG_PROBS
from inflight.sampling_config import MAX_BIAS
from inflight.text.tokenizer import Tokenizer

PROMPT = "user: hi\nassistant: "


def test_a_body_that_says_nothing_is_sampled_and_short(running: Running) -> None:
    running.post(COMPLETIONS, {"prompt": "ab"})
    sent = running.engine.sent
    assert (sent.max_tokens, sent.sampling_config.temperature, sent.sampling_config.top_k) == (16, 1.0, 0)
    assert sent.input_token_ids == [*b"ab"]
    assert (sent.end_ids, sent.streaming, sent.priority, sent.allotted_time_ms) == ([END_ID], False, 0.5, 0)


def test_a_chat_is_the_templates_text_and_may_take_the_rest_of_the_context(running: Running) -> None:
    ask(running)
    sent = running.engine.sent
    assert bytes(sent.input_token_ids).decode() == PROMPT
    assert sent.max_tokens == 512 - len(PROMPT)


def test_sampling_fields_reach_the_engine(running: Running) -> None:
    complete(
        running,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=-1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        min_tokens=3,
        logit_bias={"18": -100, "19": 5.5},
        n=2,
    )
    config = running.engine.sent.sampling_config
    assert (config.temperature, config.top_p, config.top_k, config.min_p) == (0.5, 0.9, 7, 0.1)
    assert (config.seed, config.repetition_penalty, config.min_tokens) == (2**64 - 1, 1.1, 3)
    assert (config.presence_penalty, config.frequency_penalty) == (0.2, 0.3)
    assert config.logit_bias == {18: -100.0, 19: 5.5}
    assert running.engine.sent.num_return_sequences == 2


@pytest.mark.parametrize("off", [0, -1])
def test_a_top_k_of_nothing_is_off(running: Running, off: int) -> None:
    complete(running, top_k=off)
    assert running.engine.sent.sampling_config.top_k == 0


def test_temperature_0_is_greedy(running: Running) -> None:
    complete(running, temperature=0, top_k=5)
    assert running.engine.sent.sampling_config.temperature == 0


def test_other_fields_reach_the_engine(running: Running) -> None:
    complete(running, stop_token_ids=[7], bad_words=["cat"], cache_salt="mine", allotted_time_ms=900, user="me")
    sent = running.engine.sent
    assert (sent.end_ids, sent.cache_salt, sent.allotted_time_ms) == ([END_ID, 7], "mine", 900)
    assert sent.bad_words == byte_tokenizer().encode_spellings(["cat"]) == [[*b"cat"], [*b" cat"]]
    complete(running, ignore_eos=True)
    assert running.engine.sent.end_ids == []


def test_lower_priorities_go_first(running: Running) -> None:
    priorities = []
    for number in (-(2**20), -5, -1, 0, 1, 2, 2**20 - 1, 2**20):
        complete(running, priority=number)
        priorities.append(running.engine.sent.priority)
    assert priorities == sorted(set(priorities), reverse=True)
    assert all(0 < priority < 1 for priority in priorities)


def test_allowed_tokens_leave_no_other(running: Running) -> None:
    complete(running, allowed_token_ids=[65, 66])
    bias = np.frombuffer(running.engine.sent.sampling_config.embedding_bias, "<f4")
    assert np.flatnonzero(bias == 0).tolist() == [65, 66]
    assert set(bias.tolist()) == {0.0, -MAX_BIAS}


def test_prompts_of_every_kind(running: Running) -> None:
    for prompt, sent in (
        ("ab", [[97, 98]]),
        ([97, 98], [[97, 98]]),
        (["a", "b"], [[97], [98]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ):
        running.engine.requests.clear()
        complete(running, prompt)
        assert [request.input_token_ids for request in running.engine.requests] == sent


def test_a_prompt_may_be_truncated_from_the_left(running: Running) -> None:
    complete(running, "abcdef", truncate_prompt_tokens=2)
    assert running.engine.sent.input_token_ids == [*b"ef"]
    complete(running, [*b"x" * 600], truncate_prompt_tokens=-1, max_tokens=100)
    assert len(running.engine.sent.input_token_ids) == 512 - 100


def test_a_stop_string_is_cut_off_and_named_and_ends_the_request(running: Running) -> None:
    running.engine.script, running.engine.cancelled = say("one, two, three", ends=False), []
    choice = complete(running, stop=["nine", ", t"])
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one", "stop", ", t")
    assert running.engine.sent.streaming
    wait_until(lambda: bool(running.engine.cancelled))
    assert running.engine.cancelled == [running.engine.sent.request_id or max(running.engine.enqueued)]
    running.engine.enqueued.clear()


def test_a_stop_string_may_be_kept(running: Running) -> None:
    assert complete(running, stop=", w", include_stop_str_in_output=True)["text"] == "Hello, w"


def test_a_stop_token_is_named_and_cut_off(running: Running) -> None:
    def play(request: Any) -> Any:
        return say("Hell")(request)

    running.engine.script = play
    choice = complete(running, stop_token_ids=[END_ID])
    assert (choice["text"], choice["stop_reason"]) == ("Hell", END_ID)
    choice = complete(running)
    assert (choice["text"], choice["stop_reason"]) == ("Hell", None)


def test_special_tokens_are_shown_if_asked_for(running: Running) -> None:
    choice = complete(running, skip_special_tokens=False, include_stop_str_in_output=True)
    assert choice["text"] == TEXT + "<end>"


def test_log_probabilities_of_a_chat(running: Running) -> None:
    content = ask(running, logprobs=True, top_logprobs=2, max_tokens=2)["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["H", "e"]
    assert [entry["bytes"] for entry in content] == [[72], [101]]
    assert [entry["logprob"] for entry in content] == pytest.approx(log_probs([72, 101]))
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["H", "G"]
    assert ask(running, logprobs=True)["logprobs"]["content"][0]["top_logprobs"] == []
    assert ask(running)["logprobs"] is None


def test_log_probabilities_of_a_completion(running: Running) -> None:
    found = complete(running, logprobs=1, max_tokens=3)["logprobs"]
    assert found["tokens"] == ["H", "e", "l"]
    assert found["token_logprobs"] == pytest.approx(log_probs([*b"Hel"]))
    assert found["text_offset"] == [0, 1, 2]
    assert [*found["top_logprobs"][1]] == ["e"]


def test_offsets_run_on_in_the_chunks_of_a_stream(running: Running) -> None:
    events = running.events(COMPLETIONS, {"prompt": "ab", "max_tokens": 5, "logprobs": 1})
    found = [event["choices"][0]["logprobs"] for event in events[:-2]]
    assert [offset for each in found for offset in each["text_offset"]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("path", "body"), [(CHATS, CHAT), (COMPLETIONS, {"prompt": ["a", "b"]})])
@pytest.mark.parametrize("stop", [None, "lo"])
def test_the_usage_has_the_cached_tokens_of_all_prompts(
    running: Running, path: str, body: dict[str, Any], stop: str | None
) -> None:
    """Also of a text that a stop string ends: the ranks have not told its metrics by then."""
    running.engine.script = say(num_cached=1, ends=stop is None)
    body = {**body, "stop": stop, "n": 2, "max_tokens": 64}
    usage = running.post(path, body).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1 if path == CHATS else 2}
    *_, last, _ = running.events(path, {**body, "stream_options": {"include_usage": True}})
    assert last["usage"] == usage
    running.engine.enqueued.clear()


def test_the_fingerprint_is_the_same_in_answers_and_chunks(running: Running) -> None:
    one, *chunks = running.post(CHATS, CHAT).json(), *running.events(CHATS, CHAT)[:-1]
    assert one["system_fingerprint"].startswith("fp_")
    assert {chunk["system_fingerprint"] for chunk in chunks} == {one["system_fingerprint"]}
    assert running.post(COMPLETIONS, {"prompt": "a"}).json()["system_fingerprint"] == one["system_fingerprint"]


def test_echo_and_no_tokens_scores_the_prompt(running: Running) -> None:
    response = running.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}).json()
    (choice,) = response["choices"]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["token_logprobs"] == [None, *log_probs([*b"bc"])]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert response["usage"]["completion_tokens"] == 0


def test_echo_counts_the_prompt_in_front(running: Running) -> None:
    choice = complete(running, "ab", echo=True, logprobs=0, max_tokens=2)
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("abHe", ["a", "b", "H", "e"])
    assert complete(running, [97, 98], echo=True, max_tokens=2)["text"] == "abHe"


def test_special_tokens_take_no_place_in_offsets(running: Running) -> None:
    found = complete(running, [END_ID, 97], echo=True, logprobs=0, max_tokens=1)
    assert (found["text"], found["logprobs"]["text_offset"]) == ("aH", [0, 0, 1])
    found = complete(running, "abc", echo=True, max_tokens=1, truncate_prompt_tokens=2)
    assert found["text"] == "bcH"


def test_token_ids_can_be_returned(running: Running) -> None:
    choice = complete(running, return_token_ids=True, max_tokens=2)
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([72, 101], [97, 98])
    content = ask(running, logprobs=True, return_tokens_as_token_ids=True, max_tokens=1)["logprobs"]["content"]
    assert content[0]["token"] == "token_id:72"
    events = running.events(COMPLETIONS, {"prompt": "ab", "max_tokens": 2, "return_token_ids": True})
    choices = [event["choices"][0] for event in events[:-1]]
    assert choices[0]["prompt_token_ids"] == [97, 98]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == [72, 101]


def test_the_request_may_name_its_id(running: Running) -> None:
    body = {"prompt": "a", "request_id": "mine-7"}
    assert running.post(COMPLETIONS, body).json()["id"] == "cmpl-mine-7"


def test_messages_of_every_kind(running: Running) -> None:
    messages = [
        {"role": "developer", "content": "short"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "x"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    ask(running, messages=messages)
    text = bytes(running.engine.sent.input_token_ids).decode()
    assert text == 'system: short\nuser: a\nb\nassistant: f{"a": 1}\ntool: 2\nassistant: '


def test_a_final_message_may_be_continued(running: Running) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "I am"}]
    ask(running, messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert bytes(running.engine.sent.input_token_ids).decode() == "user: hi\nassistant: I am"


def test_allowed_template_arguments_reach_the_template(running: Running) -> None:
    ask(running, chat_template_kwargs={"mood": "glad"})
    assert bytes(running.engine.sent.input_token_ids).decode() == PROMPT + "(glad)"


def test_tokens_and_back(running: Running) -> None:
    answer = running.post("/tokenize", {"prompt": "ab", "return_token_strs": True}).json()
    assert answer == {"count": 2, "max_model_len": 512, "tokens": [97, 98], "token_strs": ["a", "b"]}
    answer = running.post("/tokenize", CHAT).json()
    assert bytes(answer["tokens"]).decode() == PROMPT
    assert running.post("/detokenize", {"tokens": [72, 105, END_ID]}).json() == {"prompt": "Hi<end>"}


def test_special_tokens_are_added_as_the_body_says(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a prompt unless it declines, to a chat, whose template writes them, only if it asks."""
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: [1, *self.encode_plain(text)])

    def begun(path: str, body: dict[str, Any]) -> list[bool]:
        bodies = [{**body, **field} for field in ({}, {"add_special_tokens": False}, {"add_special_tokens": True})]
        return [running.post(path, each).json()["tokens"][0] == 1 for each in bodies]

    assert begun("/tokenize", {"prompt": "ab"}) == [True, False, True]
    assert begun("/tokenize", CHAT) == [False, False, True]
    for body, ids in (({}, [1, *b"ab"]), ({"add_special_tokens": False}, [*b"ab"])):
        complete(running, **body)
        assert running.engine.sent.input_token_ids == ids
    ask(running, add_special_tokens=True)
    assert running.engine.sent.input_token_ids == [1, *PROMPT.encode()]


def test_models(running: Running) -> None:
    (card,) = running.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["owned_by"], card["max_model_len"]) == ("llm", "model", "inflight", 512)
    assert running.get("/v1/models/llm").json() == card


def test_the_most_log_probs_are_the_engines(running: Running) -> None:
    assert len(ask(running, logprobs=True, top_logprobs=MAX_LOG_PROBS, max_tokens=1)["logprobs"]["content"]) == 1


@pytest.mark.parametrize("path", ["/metrics", "/health", "/v1/models", "/v1/models/llm", "/"])
def test_head_is_answered_without_a_body(running: Running, path: str) -> None:
    response = CLIENT.head(f"{running.url}{path}")
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-type"] == running.get(path).headers["content-type"]


def test_metrics_count_requests_and_tokens(running: Running) -> None:
    def value(line: str) -> float:
        text = running.get("/metrics").text
        return float(next(each for each in text.splitlines() if each.startswith(line + " ")).rpartition(" ")[2])

    counted = 'inflight_openai_requests_total{path="/v1/completions",status="200"}'
    complete(running)
    generated = 'inflight_openai_generated_tokens_total{model="llm"}'
    before = value(counted), value(generated)
    complete(running, max_tokens=5)
    assert (value(counted), value(generated)) == (before[0] + 1, before[1] + 5)
    assert "inflight_engine_info{" in running.get("/metrics").text
    assert value("inflight_openai_requests_in_progress") == 1  # that of /metrics itself
    assert "inflight_engine_ready" not in running.get("/metrics").text  # tritonserver shows it


def test_metrics_of_an_engine_of_its_own_are_tritonservers(tmp_path: Path) -> None:
    engine = PlayedEngine()
    engine.stats = STATS.to_json()
    with openai_server(engine, checkpoint_folder(tmp_path), launches_ranks=True) as url:
        text = Running(url, engine).get("/metrics").text
        engine.ready = False
        later = Running(url, engine).get("/metrics").text
    for line in (
        'inflight_engine_ready{model="llm"} 1.0',
        'inflight_engine_relaunches_total{model="llm"} 0.0',
        'inflight_kv_blocks_free{model="llm"} 90.0',
        'nv_trt_llm_request_metrics{model="llm",request_type="scheduled"} 2.0',
    ):
        assert line in text
    # What is not told again is what it was, but that nothing is in flight.
    assert 'inflight_engine_ready{model="llm"} 0.0' in later
    assert 'inflight_kv_blocks_free{model="llm"} 100.0' in later
