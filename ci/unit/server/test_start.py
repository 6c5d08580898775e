"""The programs that launch an engine read its checkpoint's tokenizer while the ranks load.

Run: pytest ci/unit/server/test_start.py
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_pb_utils as pb
import pytest
from real_engine import CHECKPOINT

from inflight.errors import ConfigurationError
from inflight.http.__main__ import WRONG, main
from inflight.openai_options import OpenAIOptions
from inflight.run_directory import RUN_DIRECTORY
from inflight.server.start import start_server

pytestmark = pytest.mark.slow


@pytest.fixture
def run_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="run-"))  # a name that is short enough for a socket's address
    monkeypatch.setenv(RUN_DIRECTORY, str(path))
    for program in ("server.start", "http.engine_front"):  # later tests of this process read its log
        monkeypatch.setattr(f"inflight.{program}.start_logging", lambda *libraries: None)
    for program in ("server.start", "http.engine_front"):
        monkeypatch.setattr(f"inflight.{program}.end_when_abandoned", lambda: None)
    yield path
    shutil.rmtree(path)


def start_stub(checkpoint: Path, folder: Path) -> str:
    config = {"parameters": {"gpt_model_path": {"string_value": str(checkpoint)}}, "output": []}
    args = {"model_config": json.dumps(config), "model_repository": str(folder), "model_version": "1"}
    with pytest.raises(ConfigurationError) as caught:
        start_server(pb, args | {"model_name": "llm", "model_instance_name": "llm_0_0"})
    return str(caught.value)


def start_openai_server(checkpoint: Path, folder: Path) -> str:
    options = OpenAIOptions(launches_ranks=True, port=0, parameters={"gpt_model_path": str(checkpoint)})
    options.write(folder / "openai.json")
    assert main(str(folder / "openai.json")) == WRONG
    return ""


@pytest.mark.parametrize("start", [start_stub, start_openai_server])
@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", None, "holds no tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be read as a tokenizer"),
        ("generation_config.json", "{", "generation_config.json is not JSON"),
    ],
)
def test_a_damaged_checkpoint_is_told_by_the_front_and_leaves_no_ranks(
    start: Callable[[Path, Path], str],
    file: str,
    content: str | None,
    words: str,
    tmp_path: Path,
    run_directory: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = Path(shutil.copytree(CHECKPOINT, tmp_path / "checkpoint"))
    Path(checkpoint, file).unlink()
    if content is None:
        Path(checkpoint, "tokenizer_config.json").unlink()
    else:
        Path(checkpoint, file).write_text(content)
    assert words in start(checkpoint, tmp_path) + capsys.readouterr().err
    assert list(run_directory.glob("engine-*")) == [], "a launch's folder goes when its last process has"
