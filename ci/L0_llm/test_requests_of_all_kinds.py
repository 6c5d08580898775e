"""Requests of every kind as tensors, all at once, to one rank and to two: each gets the tokens that it gets alone, from
the library.

pytest ci/L0_llm/test_requests_of_all_kinds.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import request_kinds
from raw_stream import Answer, RawStream
from request_kinds import ADAPTERS, CHECKPOINT, ENGINE, KINDS, TOKENIZER
from server_process import ServerProcess

from inflight.config import EngineConfig
from inflight.executor.generation_executor import GenerationExecutor
from inflight.executor.in_process import InProcessExecutor

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[int]]]:
    """Feature -> the tokens of each sequence."""
    config = EngineConfig(
        gpt_model_path=str(CHECKPOINT),
        device="cpu",
        dtype="float32",
        num_threads=1,
        max_loras=2,
        lora_dir=str(ADAPTERS),
        **ENGINE,
    )
    with GenerationExecutor(InProcessExecutor(config), TOKENIZER) as service:
        outputs = {kind.feature: service.generate_async(kind.prompt, **kind.python()).result() for kind in KINDS}
    return {feature: [each.token_ids for each in output.outputs] for feature, output in outputs.items()}


@pytest.fixture(scope="module", params=["1", "2"], ids=["one rank", "two ranks"])
def float32_server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """In float32: the order of a sum decides the last digit, which in bfloat16 is coarse enough to change a token."""
    parameters = {
        "tensor_parallel_size": request.param,
        "dtype": "float32",
        **{key: str(value) for key, value in ENGINE.items()},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(request_kinds.__file__).parent))
        with ServerProcess(parameters=parameters) as running:
            yield running


def tokens(answer: Answer, num_sequences: int) -> list[list[int]]:
    """Of each sequence, in order."""
    found: list[list[int]] = [[] for _ in range(num_sequences)]
    for response in answer.responses:
        index = int(response["sequence_index"][0]) if "sequence_index" in response else 0
        found[index] += response["output_ids"][0].tolist()
    return found


def test_each_gets_as_tensors_what_it_gets_from_the_library_alone(
    float32_server: ServerProcess, alone: dict[str, list[list[int]]]
) -> None:
    with RawStream(float32_server.grpc_url) as stream:
        answers = [(kind, stream.send(kind.inputs())) for kind in (*KINDS, *reversed(KINDS))]
        stream.collect(*(answer for _, answer in answers))
    assert {kind.feature: answer.error for kind, answer in answers if answer.error} == {}
    found = [(kind.feature, tokens(answer, kind.num_sequences)) for kind, answer in answers]
    assert found == [(kind.feature, alone[kind.feature]) for kind, _ in answers]
    assert {answer.num_finals for _, answer in answers} == {1}
