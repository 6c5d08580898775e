"""GGUF files of the hub, by a tag or by their names: which files come, and what costs kilobytes."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hub_fetcher import FILES, NAME, UNREAD, WEIGHTS, Fetcher, files_of
from loopback_hub import Fault, LoopbackHub

HEAD = struct.pack("<4sIQQ", b"GGUF", 3, 0, 0)
"""Of a GGUF file without metadata."""
GGUF_FILES = {
    "m-Q4_K_M.gguf": HEAD + WEIGHTS,
    **{
        name: HEAD + name.encode()
        for name in (
            *("m-BF16.gguf", "m-F16.gguf", "mmproj-F16.gguf", "m-Q4_0.gguf", "m-Q4_0_4_4.gguf", "m-Q8_0.gguf"),
            *("Q6_K/m-Q6_K-00001-of-00002.gguf", "Q6_K/m-Q6_K-00002-of-00002.gguf"),
            *("UD-Q8_0.gguf", "m-IQ1-00002-of-00002.gguf"),
        )
    },
}


@pytest.fixture(autouse=True)
def quantised(hub: LoopbackHub) -> None:
    hub.publish(NAME, GGUF_FILES | UNREAD)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        (f"{NAME}:Q4_K_M", ["m-Q4_K_M.gguf"]),
        (f"{NAME}:q4_0", ["m-Q4_0.gguf"]),
        (f"{NAME}:F16", ["m-F16.gguf"]),
        (f"{NAME}:Q6_K", ["Q6_K/m-Q6_K-00001-of-00002.gguf", "Q6_K/m-Q6_K-00002-of-00002.gguf"]),
        (f"{NAME}/m-BF16.gguf", ["m-BF16.gguf"]),
        (
            f"{NAME}/Q6_K/m-Q6_K-00002-of-00002.gguf@main",
            ["Q6_K/m-Q6_K-00001-of-00002.gguf", "Q6_K/m-Q6_K-00002-of-00002.gguf"],
        ),
    ],
)
def test_one_model_is_fetched_of_all_there_are(fetcher: Fetcher, hub: LoopbackHub, name: str, files: list[str]) -> None:
    path = fetcher.fetch(name)
    folder = fetcher.cache / "models--org--model" / "snapshots" / hub.refs[NAME]["main"]
    assert path == folder / files[0]
    assert files_of(folder) == {file: GGUF_FILES[file] for file in files}
    assert sorted(set(hub.fetched())) == files
    asked = len(hub.asked)
    assert fetcher.fetch(name, is_offline=True) == path and len(hub.asked) == asked


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        (
            ":Q5_K_M",
            "none of its GGUF files has that in its name; behind the colon may stand BF16, F16, IQ1, Q4_0, "
            "Q4_0_4_4, Q4_K_M, Q6_K, Q8_0",
        ),
        ("/m-Q5_K_M.gguf", "none of its GGUF files has that in its name; behind the colon may stand BF16, F16,"),
        (
            ":Q8_0",
            "several of its GGUF files have that in their names; behind a slash name one: UD-Q8_0.gguf, m-Q8_0.gguf",
        ),
        (":IQ1", "it has not all 2 parts of m-IQ1-00001-of-00002.gguf: m-IQ1-00001-of-00002.gguf is missing"),
        ("", "it has no config.json, so it is not a checkpoint of transformers: choose another model, or one of"),
    ],
)
def test_what_is_named_must_be_one_of_them(fetcher: Fetcher, hub: LoopbackHub, wanted: str, sentence: str) -> None:
    assert fetcher.refusal(f"{NAME}{wanted}").startswith(f"{NAME}{wanted} cannot be served: {sentence}")
    assert not hub.fetched()


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        (
            struct.pack("<4sIQQQ20sIQ6s", b"GGUF", 3, 0, 9, 20, b"general.architecture", 8, 6, b"mamba2"),
            "general.architecture 'mamba2' is not supported in GGUF files; these are: llama,",
        ),
        (b"<html>" * 9, "m-Q4_K_M.gguf is not a GGUF file: it begins with b'<htm', not with b'GGUF'"),
    ],
)
def test_the_architecture_is_looked_at_before_the_rest_comes(
    fetcher: Fetcher, hub: LoopbackHub, head: bytes, sentence: str
) -> None:
    hub.publish(NAME, {"m-Q4_K_M.gguf": head + WEIGHTS})
    assert fetcher.refusal(f"{NAME}:Q4_K_M").startswith(f"{NAME}:Q4_K_M was not fetched: {sentence}")
    assert hub.fetched() == ["m-Q4_K_M.gguf"]
    assert not list(fetcher.cache.rglob("blobs/*"))


@pytest.mark.parametrize("name", ["../../x-Q4_K_M.gguf", "/x-Q4_K_M.gguf"])
def test_a_file_outside_its_folder_is_none(fetcher: Fetcher, hub: LoopbackHub, name: str) -> None:
    hub.publish(NAME, {name: HEAD})
    assert f"its '{name}' is no file of its folder" in fetcher.refusal(f"{NAME}:Q4_K_M")


def test_a_repository_without_any(fetcher: Fetcher, hub: LoopbackHub) -> None:
    hub.publish(NAME, FILES)
    assert fetcher.refusal(f"{NAME}:Q4_0").startswith(f"{NAME}:Q4_0 cannot be served: it has no GGUF file")


def test_another_file_of_the_same_commit_is_fetched_too(fetcher: Fetcher, hub: LoopbackHub) -> None:
    name = f"{NAME}:Q4_0@{hub.refs[NAME]['main']}"
    fetcher.fetch(name)
    other = name.replace("Q4_0", "F16")
    assert f"{other} is not in" in fetcher.refusal(other, is_offline=True)
    assert files_of(fetcher.fetch(other).parent).keys() == {"m-Q4_0.gguf", "m-F16.gguf"}


def test_a_connection_that_breaks_is_gone_on_with(fetcher: Fetcher, hub: LoopbackHub) -> None:
    hub.faults["m-Q4_K_M.gguf"] = [Fault(), Fault(bytes_sent=100_000)]
    assert fetcher.fetch(f"{NAME}:Q4_K_M").read_bytes() == HEAD + WEIGHTS
    ranges = [each.headers.get("range") for each in hub.asked if "stored" in each.path]
    assert ranges == ["bytes=0-16383", None, "bytes=100000-"]


def test_what_another_program_fetched_is_served_offline(fetcher: Fetcher, hub: LoopbackHub) -> None:
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        NAME, cache_dir=fetcher.cache, endpoint=hub.endpoint, token=False, allow_patterns=["Q6_K/*"]
    )
    path = fetcher.fetch(f"{NAME}:Q6_K", is_offline=True)
    assert path == Path(folder, "Q6_K", "m-Q6_K-00001-of-00002.gguf")
    path.unlink()
    assert "is not in" in fetcher.refusal(f"{NAME}:Q6_K", is_offline=True)
