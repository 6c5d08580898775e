"""Images in chats of every dialect, through the clients' own packages: the tokens are those of transformers.

Run: pytest ci/unit/http/test_images.py
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest
from hostile_images import HOSTILE
from image_checkpoints import CONFIGS_WITH_IMAGES, ImageCheckpoint, NearTie, file_of, make_image, make_image_checkpoint
from openai_server import CLIENT, PlayedEngine, openai_server

from inflight.config import EngineConfig
from inflight.executor.in_process import InProcessExecutor
from inflight.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

NUM_TOKENS = 10
GREEDY: dict[str, Any] = {"model": "llm", "max_tokens": NUM_TOKENS, "temperature": 0.0}
IDS = {"return_token_ids": True, "ignore_eos": True}


@dataclass(frozen=True)
class Served:
    url: str
    checkpoint: ImageCheckpoint

    def tokens(self, content: list[dict[str, Any]]) -> list[int]:
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0) as client:
            messages: Any = [{"role": "user", "content": content}]
            answer = client.chat.completions.create(messages=messages, extra_body=IDS, **GREEDY)
        found: list[int] = answer.choices[0].model_extra["token_ids"]
        return found


def serve(folder: Path, name: str) -> Iterator[Served]:
    checkpoint = make_image_checkpoint(folder, name)
    config = EngineConfig(
        gpt_model_path=str(folder),
        device="cpu",
        num_threads=1,
        max_seq_len=200,
        tokens_per_block=4,
        max_batch_size=4,
        max_num_tokens=32,
        max_tokens_in_paged_kv_cache=1024,
        cpu_compile="false",
        max_images=3,
    )
    with (
        InProcessExecutor(config) as engine,
        openai_server(engine, folder, config=config, tokenizer=Tokenizer.load(folder)) as url,
    ):
        yield Served(url, checkpoint)


@pytest.fixture(scope="module", params=CONFIGS_WITH_IMAGES)
def each(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(tmp_path_factory.mktemp("checkpoint"), request.param)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(tmp_path_factory.mktemp("checkpoint"), "llava-llama")


def data_url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def image_url(file: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(file)}}


def clear_text(checkpoint: ImageCheckpoint, images: list[Any], *, is_first: bool = True) -> tuple[str, list[int]]:
    """A text beside the images whose answer does not depend on rounding, and that answer."""
    for seed in range(50):
        text = f"what is {seed}?"
        parts = [{"type": "image"}] * len(images)
        content = [*parts, {"type": "text", "text": text}] if is_first else [{"type": "text", "text": text}, *parts]
        try:
            return text, checkpoint.expected(images, content, NUM_TOKENS)
        except NearTie:
            continue
    raise NearTie


def test_the_tokens_are_those_of_transformers(each: Served) -> None:
    wide, tall = make_image(60, 33, seed=1), make_image(30, 70, seed=2)
    for images in ([wide], [tall, wide]):
        text, tokens = clear_text(each.checkpoint, images)
        files = [file_of(image) for image in images]
        content = [*map(image_url, files), {"type": "text", "text": text}]
        assert each.tokens(content) == tokens
        assert each.tokens(content) == tokens, "from the caches"
    text, tokens = clear_text(each.checkpoint, [])
    assert each.tokens([{"type": "text", "text": text}]) == tokens


def test_anthropics_package(llava: Served) -> None:
    file = file_of(make_image(60, 33), "JPEG")
    content: Any = [
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/jpeg", "data": base64.b64encode(file).decode()},
        },
        {"type": "text", "text": "what is it?"},
    ]
    messages: Any = [{"role": "user", "content": content}]
    asked: dict[str, Any] = {"model": "llm", "max_tokens": NUM_TOKENS, "messages": messages}
    asked["extra_body"] = {"temperature": 0}
    with anthropic.Anthropic(base_url=llava.url, api_key="none", max_retries=0) as client:
        answer = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_text()
        count = client.messages.count_tokens(model="llm", messages=messages).input_tokens
    assert answer.content[0].text == streamed == chat_text(llava, [image_url(file), content[1]])
    assert count == answer.usage.input_tokens


def test_ollamas_package(llava: Served) -> None:
    file = file_of(make_image(60, 33))
    client = ollama.Client(llava.url)
    expected = chat_text(llava, [image_url(file), {"type": "text", "text": "what is it?"}])
    options = {"temperature": 0, "num_predict": NUM_TOKENS}
    message = {"role": "user", "content": "what is it?", "images": [file]}
    assert client.chat("llm", [message], options=options).message.content == expected
    assert client.generate("llm", "what is it?", images=[file], options=options).response == expected


def test_the_responses_api(llava: Served) -> None:
    file = file_of(make_image(60, 33))
    content: Any = [
        {"type": "input_image", "image_url": data_url(file), "detail": "auto"},
        {"type": "input_text", "text": "what is it?"},
    ]
    with openai.OpenAI(base_url=f"{llava.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.responses.create(
            model="llm", input=[{"role": "user", "content": content}], max_output_tokens=NUM_TOKENS, temperature=0
        )
    assert answer.output_text == chat_text(llava, [image_url(file), {"type": "text", "text": "what is it?"}])


def chat_text(served: Served, content: list[dict[str, Any]]) -> str:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": content}]
        return client.chat.completions.create(messages=messages, **GREEDY).choices[0].message.content or ""


def test_text_around_images_and_in_several_turns(llava: Served) -> None:
    """Placeholders stand where the images are, also in earlier messages."""
    first, second = make_image(60, 33, seed=1), make_image(30, 70, seed=2)
    body = {"messages": [{"role": "user", "content": [image_url(file_of(first)), {"type": "text", "text": "a"}]}]}
    body["messages"] += [{"role": "assistant", "content": "b"}]
    body["messages"] += [{"role": "user", "content": [{"type": "text", "text": "c"}, image_url(file_of(second))]}]
    found = CLIENT.post(f"{llava.url}/tokenize", json={"model": "llm", **body}).json()["tokens"]
    picture = [256 + 1] * 4
    written = [*b"user: ", *picture, *b"a\nassistant: b\nuser: c", *picture, *b"\nassistant: "]
    assert found == written


def test_equal_images_share_their_blocks_and_others_do_not(llava: Served) -> None:
    def cached(file: bytes) -> int:
        body = {"messages": [{"role": "user", "content": [image_url(file), {"type": "text", "text": "a" * 20}]}]}
        answer = CLIENT.post(f"{llava.url}/v1/chat/completions", json={**GREEDY, **body}).json()
        number: int = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return number

    one, other = file_of(make_image(60, 33, seed=7)), file_of(make_image(60, 33, seed=8))
    assert [cached(one), cached(other), cached(one), cached(other)] == [0, 0, 40, 40]


def refused(served: Served, content: list[dict[str, Any]], status: int = 400) -> str:
    body = {**GREEDY, "messages": [{"role": "user", "content": content}]}
    answer = CLIENT.post(f"{served.url}/v1/chat/completions", json=body)
    assert answer.status_code == status, answer.text
    message: str = answer.json()["error"]["message"]
    assert "\n" not in message
    return message


def test_hostile_images_are_refused_while_a_neighbour_is_served(llava: Served) -> None:
    text, tokens = clear_text(llava.checkpoint, [make_image(50, 50)])
    good = [image_url(file_of(make_image(50, 50))), {"type": "text", "text": text}]
    with ThreadPoolExecutor(4) as clients:
        neighbours = [clients.submit(llava.tokens, good) for _ in range(3)]
        answers = {name: clients.submit(refused, llava, [image_url(file)]) for name, (file, _) in HOSTILE.items()}
        for name, answer in answers.items():
            assert answer.result().startswith("image 1 of messages ") and HOSTILE[name][1] in answer.result(), name
        assert all(neighbour.result() == tokens for neighbour in neighbours)
    assert llava.tokens(good) == tokens


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"url": "http://127.0.0.1/a.png"}, "this server fetches nothing"),
        ({"url": "file:///etc/passwd"}, "this server fetches nothing"),
        ({"url": "data:image/png,raw"}, "must be a data URL with base64"),
        ({"url": "data:image/png;base64,%%"}, "is not valid base64"),
        ({"detail": "low"}, "must be text, or an image_url with a URL"),
    ],
)
def test_urls_that_hold_no_file(llava: Served, part: dict[str, str], words: str) -> None:
    assert words in refused(llava, [{"type": "image_url", "image_url": part}])


def test_bounds_of_a_conversation(llava: Served) -> None:
    file = file_of(make_image(9, 9))
    assert "messages holds 100 images, more than max_images 3" in refused(llava, [image_url(file)] * 100)
    text = {"type": "text", "text": "<image>"}
    assert "writes <image> 2 times for 1 images" in refused(llava, [image_url(file), text])
    long = {"type": "text", "text": "a" * 250}
    assert "maximum context length is 200 tokens" in refused(llava, [image_url(file), long])
    body = {"messages": [{"role": "system", "content": [image_url(file)]}, {"role": "user", "content": "a"}]}
    answer = CLIENT.post(f"{llava.url}/v1/chat/completions", json={**GREEDY, **body})
    assert "an image in a message of the user only" in answer.json()["error"]["message"]


def test_an_operator_who_wants_none(llava: Served) -> None:
    folder = llava.checkpoint.folder
    config = EngineConfig(gpt_model_path=str(folder), max_images=0)
    with openai_server(PlayedEngine(), folder, config=config, tokenizer=Tokenizer.load(folder)) as url:
        said = refused(Served(url, llava.checkpoint), [image_url(file_of(make_image(9, 9)))])
    assert said == "messages holds an image: this model reads text alone"
