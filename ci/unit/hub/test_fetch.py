"""Models by name: the real client against a hub on loopback that truncates, refuses, lies and goes away."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hub_fetcher import FILES, NAME, WEIGHTS, Fetcher, files_of
from loopback_hub import Fault, LoopbackHub

from inflight.errors import ConfigurationError
from inflight.hub.cache import ModelCache
from inflight.hub.client import MAX_LISTING_BYTES
from inflight.hub.model_name import ModelName


def sharded(*shards: str) -> dict[str, bytes]:
    """A model whose weights are several files."""
    index = {"weight_map": {f"layer.{number}": shard for number, shard in enumerate(shards)}}
    files = {name: content for name, content in FILES.items() if name != "model.safetensors"}
    weights = {shard: hashlib.shake_128(shard.encode()).digest(5000) for shard in shards}
    return {**files, **weights, "model.safetensors.index.json": json.dumps(index).encode()}


def test_what_the_engine_reads_is_fetched_and_nothing_else(fetcher: Fetcher, hub: LoopbackHub) -> None:
    folder = fetcher.fetch()
    assert files_of(folder) == FILES
    contents = [FILES[name] for name in hub.fetched()]
    assert sorted(contents) == sorted(set(FILES.values())), "each content once"
    assert folder.name == hub.refs[NAME]["main"]


def test_the_config_is_checked_before_anything_else_comes(fetcher: Fetcher, hub: LoopbackHub) -> None:
    def refuse(folder: Path) -> NoReturn:
        raise ConfigurationError(f"{folder}/config.json: MambaForCausalLM is not supported")

    assert fetcher.refusal(check=refuse) == "org/model was not fetched: MambaForCausalLM is not supported"
    assert hub.fetched() == ["config.json"]


def test_a_model_that_is_there_is_not_checked_again(fetcher: Fetcher) -> None:
    fetcher.fetch()
    fetcher.fetch()
    assert fetcher.checked == [["config.json"]]


def test_shards_are_those_of_the_index(fetcher: Fetcher, hub: LoopbackHub) -> None:
    files = sharded("model-1-of-2.safetensors", "model-2-of-2.safetensors")
    hub.publish(NAME, {**files, "model.safetensors": WEIGHTS})
    assert files_of(fetcher.fetch()) == files
    assert "model.safetensors" not in hub.fetched()


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"README.md": b""}, "it has no config.json, so it is not a checkpoint of transformers"),
        (
            {"config.json": b"{}", "pytorch_model.bin": WEIGHTS, "tokenizer.json": b"{}"},
            "it has no safetensors weights, only pytorch_model.bin: choose a model that has model.safetensors or "
            "model.safetensors.index.json",
        ),
        (
            {**FILES, "model.safetensors.index.json": b"[" * 100_000},
            "its model.safetensors.index.json is not a safetensors index",
        ),
        (sharded("../x.safetensors"), "its model.safetensors.index.json names '../x.safetensors', which is no"),
        (sharded("weights.bin"), "its model.safetensors.index.json names 'weights.bin', which is no safetensors file"),
        (
            {**FILES, "model.safetensors.index.json": b'{"weight_map": {"a": "absent.safetensors"}}'},
            "its model.safetensors.index.json names absent.safetensors, which it does not have",
        ),
    ],
)
def test_what_is_no_checkpoint_costs_kilobytes(
    fetcher: Fetcher, hub: LoopbackHub, files: dict[str, bytes], sentence: str
) -> None:
    hub.publish(NAME, files)
    assert fetcher.refusal().startswith(f"org/model cannot be served: {sentence}")
    assert not [name for name in hub.fetched() if name.endswith(("safetensors", "bin"))]


def test_a_revision_is_a_branch_a_tag_or_a_commit(fetcher: Fetcher, hub: LoopbackHub) -> None:
    newer = FILES | {"model.safetensors": WEIGHTS[::-1]}
    commit = hub.publish(NAME, newer, revision="refs/pr/1")
    assert files_of(fetcher.fetch(f"{NAME}@refs/pr/1")) == newer
    assert files_of(fetcher.fetch(f"{NAME}@{commit}")) == newer
    assert files_of(fetcher.fetch()) == FILES


class TestWhatIsThere:
    def test_a_commit_needs_no_hub(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        name = f"{NAME}@{hub.refs[NAME]['main']}"
        folder = fetcher.fetch(name)
        asked = len(hub.asked)
        assert fetcher.fetch(name) == folder and len(hub.asked) == asked

    def test_a_branch_that_moved_is_fetched_and_the_old_folder_stays(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        old = fetcher.fetch()
        hub.publish(NAME, FILES | {"generation_config.json": b'{"top_k": 3}'})
        hub.asked.clear()
        new = fetcher.fetch()
        assert files_of(old) == FILES and files_of(new)["generation_config.json"] == b'{"top_k": 3}'
        assert "model.safetensors" not in [each.path.split("/")[-1] for each in hub.asked if "stored" in each.path]

    def test_without_a_network_it_is_served_and_the_log_says_so(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        folder = fetcher.fetch()
        fetcher.told.clear()
        hub.close()
        assert fetcher.fetch() == folder
        (line,) = fetcher.told
        assert "cannot be reached" in line and f"so commit {folder.name} of org/model is served" in line

    def test_a_branch_that_moved_without_being_fetched_changes_nothing(
        self, fetcher: Fetcher, hub: LoopbackHub
    ) -> None:
        folder = fetcher.fetch()
        hub.publish(NAME, FILES | {"model.safetensors": WEIGHTS[::-1]})
        hub.faults["model.safetensors"] = [Fault(bytes_sent=10)] * 9
        assert "broke off" in fetcher.refusal()
        hub.close()
        assert fetcher.fetch() == folder

    def test_a_refusal_of_the_hub_does_not_take_it_away(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        folder = fetcher.fetch()
        del hub.commits[NAME]
        assert fetcher.fetch() == folder
        assert "has no model of that name" in fetcher.told[-1]

    def test_offline_it_is_served_without_a_request(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        folder = fetcher.fetch()
        asked = len(hub.asked)
        assert fetcher.fetch(is_offline=True) == folder and len(hub.asked) == asked

    def test_offline_and_not_there(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        refusal = fetcher.refusal(is_offline=True)
        assert refusal.startswith(f"org/model is not in {fetcher.cache}, and HF_HUB_OFFLINE forbids to fetch it")
        assert hub.asked == []

    @pytest.mark.parametrize("name", [NAME, f"{NAME}@COMMIT"])
    @pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
    def test_a_file_that_has_lost_bytes_comes_again(
        self, fetcher: Fetcher, hub: LoopbackHub, name: str, file: str
    ) -> None:
        name = name.replace("COMMIT", hub.refs[NAME]["main"])
        folder = fetcher.fetch(name)
        before = len(hub.fetched())
        os.truncate(folder / file, len(FILES[file]) // 2)
        assert files_of(fetcher.fetch(name)) == FILES
        assert hub.fetched()[before:] == [file]

    def test_what_another_program_fetched_is_completed(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        from huggingface_hub import snapshot_download

        commit = hub.refs[NAME]["main"]
        patterns = ["config.json", "tokenizer.json", "*.safetensors"]
        theirs = snapshot_download(
            NAME, cache_dir=fetcher.cache, endpoint=hub.endpoint, token=False, allow_patterns=patterns
        )
        hub.asked.clear()
        assert files_of(fetcher.fetch(f"{NAME}@{commit}")).items() >= FILES.items()
        assert theirs == str(ModelCache(fetcher.cache, ModelName(NAME)).folder(commit))
        assert not any("stored" in each.path for each in hub.asked)

    def test_another_program_finds_what_was_fetched(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        from huggingface_hub import scan_cache_dir, try_to_load_from_cache

        folder = fetcher.fetch()
        found = try_to_load_from_cache(NAME, "model.safetensors", cache_dir=fetcher.cache)
        assert found == str(folder / "model.safetensors")
        (model,) = scan_cache_dir(fetcher.cache).repos
        assert model.repo_id == NAME and len(model.revisions) == 1


class TestInterruptions:
    def test_a_connection_that_breaks_is_gone_on_with_at_its_byte(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        hub.faults["model.safetensors"] = [Fault(bytes_sent=100_000), Fault(status=503), Fault(bytes_sent=100_000)]
        assert files_of(fetcher.fetch()) == FILES
        ranges = [each.headers.get("range") for each in hub.asked if "stored" in each.path]
        assert ranges == [None, "bytes=100000-", "bytes=100000-", "bytes=200000-"]

    def test_the_next_process_goes_on_there(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        hub.faults["model.safetensors"] = [Fault(bytes_sent=100_000), *[Fault(status=503)] * 6]
        refusal = fetcher.refusal()
        assert refusal.startswith(
            "model.safetensors of org/model broke off: HUB fails with status 503; try again later"
        )
        assert refusal.endswith("0.00 of 0.00 GB stay: start again to go on from there")
        hub.asked.clear()
        assert files_of(fetcher.fetch()) == FILES
        assert [each.headers.get("range") for each in hub.asked if "stored" in each.path] == ["bytes=100000-"]

    def test_a_hub_without_ranges_sends_all_again(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        hub.faults["model.safetensors"] = [Fault(bytes_sent=100_000), Fault(ignores_range=True)]
        assert files_of(fetcher.fetch()) == FILES

    def test_a_file_that_never_gets_further_is_given_up(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        hub.faults["model.safetensors"] = [Fault(bytes_sent=100_000, ignores_range=True)] * 50
        assert "model.safetensors of org/model broke off: HUB cannot be reached" in fetcher.refusal()
        assert len(hub.faults["model.safetensors"]) > 30

    def test_a_killed_process_leaves_what_it_had(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        cache = ModelCache(fetcher.cache, ModelName(NAME))
        part = cache.blob(f"{hashlib.sha256(WEIGHTS).hexdigest()}.incomplete")
        part.parent.mkdir(parents=True)
        part.write_bytes(WEIGHTS[:123_456])
        assert files_of(fetcher.fetch()) == FILES
        assert "bytes=123456-" in [each.headers.get("range") for each in hub.asked]
        assert not part.exists()

    def test_bytes_that_were_damaged_are_not_kept(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        hub.faults["model.safetensors"] = [Fault(body=b"\0" * len(WEIGHTS))]
        assert "model.safetensors of org/model came with another digest than HUB lists" in fetcher.refusal()
        assert files_of(fetcher.fetch()) == FILES


class TestLies:
    def test_a_file_that_is_longer_than_listed(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        hub.sizes["model.safetensors"] = len(WEIGHTS) - 1000
        assert "HUB lists model.safetensors of org/model with 299000 bytes and sends more" in fetcher.refusal()

    def test_a_file_that_is_shorter_than_listed(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        hub.sizes["model.safetensors"] = len(WEIGHTS) + 1000
        assert "HUB has fewer bytes of a file of org/model than it lists" in fetcher.refusal()

    def test_an_address_that_is_no_hub(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        hub.faults["api"] = [Fault(body=b"<html>Log in</html>")]
        assert "HUB does not answer as a hub does" in fetcher.refusal()

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"rfilename": 5}, "does not answer as a hub does"),
            ({"rfilename": {}}, "does not answer as a hub does"),
            ({"blobId": 5}, "does not answer as a hub does"),
            ({"blobId": "../../../../escaped"}, "lists config.json of org/model without a size and a digest"),
            ({"blobId": "a" * 5000}, "lists config.json of org/model without a size and a digest"),
            ({"blobId": "\u0664" * 40}, "lists config.json of org/model without a size and a digest"),
            ({"size": "2"}, "lists config.json of org/model without a size and a digest"),
            ({"size": -1}, "lists config.json of org/model without a size and a digest"),
            ({"size": 2**80}, "lists config.json of org/model without a size and a digest"),
            ({"size": 2**40}, "its config.json has 1099511627776 bytes, more than"),
        ],
    )
    def test_a_listing_of_other_values(
        self, fetcher: Fetcher, hub: LoopbackHub, changes: dict[str, Any], sentence: str
    ) -> None:
        info = json.loads(hub.info(NAME, hub.refs[NAME]["main"]))
        info["siblings"][0] |= changes
        hub.faults["api"] = [Fault(body=json.dumps(info).encode())]
        assert sentence in fetcher.refusal()
        assert hub.fetched() == []

    @pytest.mark.parametrize("name", ["vocab\0.txt", "vocab\n\x1b[2J.txt", "vocab\ud800.txt"])
    def test_a_file_whose_name_cannot_be_shown_is_none_of_the_models(
        self, fetcher: Fetcher, hub: LoopbackHub, name: str
    ) -> None:
        info = json.loads(hub.info(NAME, hub.refs[NAME]["main"]))
        info["siblings"].append(info["siblings"][0] | {"rfilename": name})
        hub.faults["api"] = [Fault(body=json.dumps(info).encode())]
        assert files_of(fetcher.fetch()) == FILES

    def test_a_listing_that_is_nested_without_an_end(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        hub.faults["api"] = [Fault(body=b"[" * 200_000)]
        assert "HUB does not answer as a hub does (RecursionError" in fetcher.refusal()

    def test_a_listing_of_more_bytes_than_any_model_has(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        info = hub.info(NAME, hub.refs[NAME]["main"])
        hub.faults["api"] = [Fault(body=info + b" " * MAX_LISTING_BYTES)]
        assert fetcher.refusal() == (
            f"HUB lists the files of org/model with more than {MAX_LISTING_BYTES} bytes: check HF_ENDPOINT, or name "
            "the folder that is printed by hf download org/model"
        )

    def test_a_listing_that_does_not_come_to_an_end(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        """Whether nothing comes or a byte now and then."""
        hub.faults["api"] = [Fault(waits=True)]
        assert fetcher.refusal(listing_seconds=0.1) == (
            "HUB has not listed the files of org/model within 0.1 s: check network and HF_ENDPOINT, or name the folder "
            "that is printed by hf download org/model"
        )
        assert len(hub.asked) == 1

    def test_an_index_whose_names_cannot_be_shown(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        index = json.dumps({"weight_map": {"a": "x\n\x1b[2J.safetensors"}}).encode()
        hub.publish(NAME, {**FILES, "model.safetensors.index.json": index})
        assert r"names 'x\n\x1b[2J.safetensors', which is no safetensors file" in fetcher.refusal()

    def test_another_commit_than_the_one_that_was_named(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        newer = hub.publish(NAME, FILES | {"generation_config.json": b'{"top_k": 3}'}, revision="newer")
        hub.faults["api"] = [Fault(body=hub.info(NAME, newer))]
        assert "names no commit of org/model" in fetcher.refusal(f"{NAME}@{hub.refs[NAME]['main']}")

    def test_a_wait_that_is_no_number(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        hub.faults["api"] = [Fault(status=429, headers={"Retry-After": "\xb2"})]
        assert files_of(fetcher.fetch()) == FILES

    def test_an_address_that_no_client_takes(self, fetcher: Fetcher) -> None:
        assert "does not answer as a hub does (InvalidURL" in fetcher.refusal(endpoint="http://\0")


class TestRefusals:
    def test_a_gated_model(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        hub.tokens[NAME] = {"hf_known"}
        gated = "org/model is gated at HUB/org/model: accept its terms there"
        assert fetcher.refusal() == f"{gated} and set HF_TOKEN to your token"
        assert fetcher.refusal(token="hf_other") == gated
        assert files_of(fetcher.fetch(token="hf_known")) == FILES
        sent = {each.headers.get("authorization") for each in hub.asked if "stored" in each.path}
        assert sent == {None}, "another host is not given the token"

    @pytest.mark.parametrize(
        ("token", "reason"), [(None, "it is private and HF_TOKEN is not set"), ("hf_x", "your token may not see it")]
    )
    def test_no_such_model(self, fetcher: Fetcher, token: str | None, reason: str) -> None:
        refusal = fetcher.refusal("org/mistyped", token=token)
        assert refusal == f"there is no folder org/mistyped, and HUB has no model of that name, or {reason}"

    def test_no_such_revision(self, fetcher: Fetcher) -> None:
        assert fetcher.refusal(f"{NAME}@v9").startswith("HUB/org/model has no revision v9: name a branch, a tag or a")

    @pytest.mark.parametrize("status", [401, 403])
    def test_a_token_that_may_not(self, fetcher: Fetcher, hub: LoopbackHub, status: int) -> None:
        hub.faults["config.json"] = [Fault(status=status)]
        assert "set HF_TOKEN to a token that may read it" in fetcher.refusal(token="hf_x")

    def test_too_many_requests(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        hub.faults["api"] = [Fault(status=429, headers={"Retry-After": "2"})]
        assert files_of(fetcher.fetch()) == FILES

    def test_a_wait_that_nobody_would_wait_for(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        hub.faults["api"] = [Fault(status=429, headers={"Retry-After": "86400"})]
        refusal = fetcher.refusal()
        assert "HUB has had too many requests (429); try again in 86400 s, or set HF_TOKEN" in refusal
        assert len(hub.asked) <= 2

    def test_no_network(self, fetcher: Fetcher, hub: LoopbackHub) -> None:
        hub.close()
        assert re.match(
            r"org/model could not be looked up: HUB cannot be reached \(\w+: .*\): check network", fetcher.refusal()
        )

    def test_a_disk_without_room(self, fetcher: Fetcher, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 1000))  # type: ignore[attr-defined]
        refusal = fetcher.refusal()
        assert refusal.startswith("org/model needs 0.27 GB more in") and "0.00 GB are free: make room there" in refusal
        assert hub.fetched() == ["config.json"]

    def test_a_disk_that_fills_meanwhile(self, fetcher: Fetcher, tmp_path: Path) -> None:
        cache = ModelCache(fetcher.cache, ModelName(NAME))
        cache.blob("").mkdir(parents=True)
        cache.blob(f"{hashlib.sha256(WEIGHTS).hexdigest()}.incomplete").symlink_to("/dev/full")
        refusal = fetcher.refusal()
        assert "cannot be written to" in refusal and "(No space left on device): make room there or set" in refusal

    def test_a_cache_that_cannot_be_written(self, fetcher: Fetcher) -> None:
        fetcher.cache.write_text("a file")
        assert f"org/model cannot be written to {fetcher.cache} (Not a directory): set HF_HOME" in fetcher.refusal()


def test_the_variables_of_the_hubs_own_tools_count(hub: LoopbackHub, tmp_path: Path) -> None:
    """In a process of its own: they are read once."""
    hub.tokens[NAME] = {"hf_known"}
    program = (
        "from inflight.hub.local_checkpoint import local_checkpoint; import inflight.hub.local_checkpoint as module; "
        "module.check_config = lambda *_: None; "
        f"print(local_checkpoint({NAME!r}, tell=print))"
    )

    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS"))}
        environment |= {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.endpoint, **variables}
        return subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=150, check=False
        )

    assert "is not in" in run(HF_TOKEN="hf_known", HF_HUB_OFFLINE="1").stderr
    assert not hub.asked
    done = run(HF_TOKEN="hf_known")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.splitlines()[-1])
    assert folder.is_relative_to(tmp_path / "home" / "hub") and files_of(folder) == FILES
    assert Path(run(HF_HUB_OFFLINE="1").stdout.splitlines()[-1]) == folder


def test_one_process_fetches_and_the_others_wait(fetcher: Fetcher, hub: LoopbackHub) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(3) as threads:
        folders = {each.result() for each in [threads.submit(fetcher.fetch) for _ in range(3)]}
    assert [files_of(folder) for folder in folders] == [FILES]
    assert len(hub.fetched()) == len(set(FILES.values()))


def test_how_far_it_is_stands_in_the_log(fetcher: Fetcher, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.hub.transfer.SECONDS_BETWEEN_LINES", 0.0)
    with contextlib.suppress(AttributeError):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    fetcher.fetch()
    assert any(line.startswith("fetching org/model: 0.00 of 0.00 GB") for line in fetcher.told)
