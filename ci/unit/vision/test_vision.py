"""The vision process: what kills it, what takes too long, what it keeps.

Run: pytest ci/unit/vision/test_vision.py
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hostile_images import HOSTILE
from image_checkpoints import file_of, make_image, make_image_checkpoint
from PIL import Image

from inflight.errors import QueueFull
from inflight.vision import process as process_module
from inflight.vision import vision as vision_module
from inflight.vision.messages import See, Settings
from inflight.vision.seen import Picture, Seen, Unreadable
from inflight.vision.tower import SeenImage, Tower
from inflight.vision.vision import Unseen, Vision
from inflight.vision.worker import look

pytestmark = pytest.mark.slow

PATIENCE = 180
FILE = file_of(make_image(40, 30))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llava-llama").folder


@pytest.fixture(scope="module")
def vision(folder: Path) -> Iterator[Vision]:
    vision = Vision(Settings(folder=str(folder), max_pixels=2**24, max_seconds=PATIENCE), 2**20)
    yield vision
    vision.close()


def see(vision: Vision, *files: bytes) -> list[Seen]:
    return vision.see(files, "float32").result(PATIENCE)


def picture(vision: Vision, file: bytes = FILE) -> Picture:
    (seen,) = see(vision, file)
    assert isinstance(seen, Picture), seen
    return seen


def test_its_rows_are_the_towers(vision: Vision, folder: Path) -> None:
    expected = Tower.load(folder).see(make_image(40, 30))
    found = picture(vision)
    assert found.text == expected.text
    assert np.array_equal(found.rows.rows(np.arange(found.rows.num_rows)), expected.rows_RD.numpy())
    (rounded,) = vision.see([FILE], "bfloat16").result(PATIENCE)
    assert isinstance(rounded, Picture)
    values = torch.from_numpy(rounded.rows.rows(np.arange(found.rows.num_rows)))
    assert torch.equal(values, expected.rows_RD.bfloat16().float())


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_gets_a_sentence_and_the_process_lives(vision: Vision, name: str) -> None:
    picture(vision)
    pid = vision.pid
    file, words = HOSTILE[name]
    (seen,) = see(vision, file)
    assert isinstance(seen, Unreadable) and words in seen.why and "\n" not in seen.why
    assert vision.find([file], "float32") == [seen], "it need not be opened again"
    picture(vision, file_of(make_image(40, 30, seed=len(name))))
    assert vision.pid == pid


def test_its_memory_is_bounded(vision: Vision) -> None:
    picture(vision)
    limits = Path(f"/proc/{vision.pid}/limits").read_text()
    (line,) = (line for line in limits.splitlines() if line.startswith("Max address space"))
    assert line.split()[3].isdigit()


def test_what_takes_too_much_memory_or_is_not_taken_is_told() -> None:
    class Full:
        def see(self, image: Image.Image) -> SeenImage:
            torch.empty(2**60, dtype=torch.uint8)
            raise AssertionError

    class Strict:
        def see(self, image: Image.Image) -> SeenImage:
            raise ValueError("Unable to infer channel dimension format")

    asked = See(data=FILE, dtype="float32")
    assert look(Full(), asked, 10_000).unreadable == Unreadable(why="takes too much memory to read")
    refused = Unreadable(why="is not taken by the model's image processor")
    assert look(Strict(), asked, 10_000).unreadable == refused


def test_it_gives_way_to_the_ranks(vision: Vision) -> None:
    picture(vision)
    assert vision.pid is not None
    assert os.getpriority(os.PRIO_PROCESS, vision.pid) > os.getpriority(os.PRIO_PROCESS, 0)


def test_a_picture_that_kills_it_is_told_and_another_process_goes_on(vision: Vision) -> None:
    before = picture(vision)
    pid = vision.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    deadly = file_of(make_image(33, 33))
    seeing = vision.see([deadly], "float32")
    os.kill(pid, signal.SIGKILL)
    (seen,) = seeing.result(PATIENCE)
    assert isinstance(seen, Unreadable) and seen.why.endswith("ended with code -9")
    assert picture(vision, deadly), "it is tried again when it comes again"
    assert vision.pid not in (None, pid)
    with pytest.raises(Unseen):
        vision.find([b"never seen"], "float32")
    assert picture(vision) is before, "what has been seen is kept"


def test_no_more_wait_than_can_be_seen_in_time(vision: Vision, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given up before its turn makes room."""
    monkeypatch.setattr(vision_module, "MAX_WAITING", 2)
    picture(vision)
    pid = vision.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    files = [file_of(make_image(30, 40, seed=100 + seed)) for seed in range(3)]
    first = vision.see(files[:1], "float32")
    second = vision.see(files[1:2], "float32")
    with pytest.raises(QueueFull, match="2 images wait to be read"):
        vision.see(files[2:], "float32")
    assert second.cancel()
    third = vision.see(files[2:], "float32")
    os.kill(pid, signal.SIGCONT)
    assert all(isinstance(seeing.result(PATIENCE)[0], Picture) for seeing in (first, third))
    with pytest.raises(Unseen):
        vision.find(files[1:2], "float32")


def test_it_rests_and_comes_back(vision: Vision) -> None:
    """As with a model that is unloaded."""
    before = picture(vision)
    vision.rest()
    assert see(vision, FILE) == [before], "what has been seen needs no process"
    assert vision.pid is None
    assert picture(vision, file_of(make_image(21, 22))) and vision.pid is not None


def test_a_picture_that_takes_too_long_is_told(folder: Path) -> None:
    vision = Vision(Settings(folder=str(folder), max_pixels=2**20, max_seconds=1e-6), 2**20)
    try:
        (seen,) = see(vision, FILE)
    finally:
        vision.close()
    assert seen == Unreadable(why="took longer than 1e-06 s to read (image_timeout_ms)", is_lasting=False)


def test_a_process_that_is_stopped_takes_no_longer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own alarm does not end it: the program does, and those that wait behind get another process."""
    monkeypatch.setattr(process_module, "GRACE_SECONDS", 0.0)
    vision = Vision(Settings(folder=str(folder), max_pixels=2**20, max_seconds=2.0), 2**20)
    try:
        vision.start().result(PATIENCE)
        stopped = vision.pid
        large = FILE + bytes(2**22)  # more than the socket takes while nobody reads
        for file in (FILE, large):
            assert vision.pid is not None
            os.kill(vision.pid, signal.SIGSTOP)
            (seen,) = see(vision, file)
            assert seen == Unreadable(why="took longer than 2 s to read (image_timeout_ms)", is_lasting=False)
            vision.start().result(PATIENCE)
        assert picture(vision) and vision.pid != stopped
    finally:
        vision.close()


def test_a_process_that_is_stopped_does_not_outlive_its_program(folder: Path) -> None:
    settings = Settings(folder=str(folder), max_pixels=2**20, max_seconds=PATIENCE)
    script = (
        "import sys; from inflight.vision.messages import settings_decoder; from inflight.vision.process import "
        "VisionProcess; process = VisionProcess(settings_decoder.decode(sys.argv[1])); process.start(); "
        "print(process.pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, msgspec.json.encode(settings).decode()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        pidfd = os.pidfd_open(pid := int(program.stdout.readline()))
        os.kill(pid, signal.SIGSTOP)
        program.kill()
    try:
        assert select.select([pidfd], [], [], 10)[0]
    finally:
        os.close(pidfd)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_what_has_not_been_used_for_longest_is_given_up(folder: Path) -> None:
    """But for what somebody holds."""
    files = [file_of(make_image(40, 30, seed=seed)) for seed in range(3)]
    vision = Vision(Settings(folder=str(folder), max_pixels=2**20, max_seconds=PATIENCE), 5000)
    try:
        held = see(vision, files[0])
        see(vision, files[1])
        see(vision, files[1], files[0])
        see(vision, files[2])
        gc.collect()
        assert vision.find(files[:1], "float32") == held
        assert vision.find(files[2:], "float32")
        with pytest.raises(Unseen) as unseen:
            vision.find(files[1:2], "float32")
        again = unseen.value.see().result(PATIENCE)
        assert vision.find(files[1:2], "float32") == again
    finally:
        vision.close()


def test_a_checkpoint_that_cannot_be_loaded_is_told_for_ever(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    vision = Vision(Settings(folder=str(tmp_path), max_pixels=2**20, max_seconds=PATIENCE), 2**20)
    try:
        assert "cannot be loaded" in vision.start().result(PATIENCE)
        (seen,) = see(vision, FILE)
        assert isinstance(seen, Unreadable) and seen.why == f"cannot be read: {vision.why_none}"
        assert vision.pid is None
    finally:
        vision.close()
