"""What a step may hold besides the next token of each row: copies of blocks, rows in any order, padding.

Run: pytest ci/unit/runtime/test_row_work.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from model_driver import Driver, Work, launch
from tiny_checkpoints import TinyCheckpoint, make_checkpoint, make_prompt

from inflight.config import EngineConfig
from inflight.distributed.rank_group import SingleRank
from inflight.layers.attention import AttentionMetadata
from inflight.models.decoder import Decoder
from inflight.runtime import step_sizes
from inflight.runtime.model_runner import ModelRunner
from inflight.runtime.step_sizes import StepSizes
from inflight.sampling_config import SamplingConfig
from inflight.scheduler_output import NewSequence, RowWork, SchedulerOutput

pytestmark = pytest.mark.slow

BLOCK_SIZE, NUM_BLOCKS = 4, 128


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3")


def load(checkpoint: TinyCheckpoint) -> ModelRunner:
    config = EngineConfig(
        gpt_model_path=str(checkpoint.folder),
        device="cpu",
        max_batch_size=8,
        max_num_tokens=64,
        max_seq_len=64,
        tokens_per_block=BLOCK_SIZE,
        max_tokens_in_paged_kv_cache=NUM_BLOCKS * BLOCK_SIZE,
        cpu_compile="false",
    )
    return ModelRunner.load(config, SingleRank())


@pytest.fixture(scope="module")
def runner(checkpoint: TinyCheckpoint) -> Iterator[ModelRunner]:
    runner = load(checkpoint)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def padded_runner(checkpoint: TinyCheckpoint) -> Iterator[ModelRunner]:
    """Pads on a CPU what is padded on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_sizes, "PADDED_DEVICES", {"cpu"})
        runner = load(checkpoint)
    yield runner
    runner.close()


def new_sequence(row: int, token_ids: list[int], block_ids: list[int], **options: Any) -> NewSequence:
    return NewSequence(
        row=row,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        block_ids=block_ids,
        **{"sampling_config": SamplingConfig(), **options},
    )


def whole(row: int, token_ids: list[int]) -> RowWork:
    return RowWork(row=row, start=0, num_tokens=len(token_ids), token_ids=token_ids)


def run(runner: ModelRunner, rows: list[RowWork], new: list[NewSequence] | None = None, **options: Any) -> list[int]:
    output = runner.collect(launch(runner, SchedulerOutput(new_sequences=new or [], rows=rows, **options)))
    return [token for tokens in output.token_ids for token in tokens]


# -- copies of blocks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_copy", [True, False])
def test_a_sequence_is_forked_by_a_copy_of_its_last_block(
    runner: ModelRunner, checkpoint: TinyCheckpoint, with_copy: bool
) -> None:
    """Two rows share the full blocks; each goes on in a last block of its own, and both get the same tokens."""
    prompt, expected = checkpoint.prompt(10, 3)
    last = 8 if with_copy else 12  # never written before
    parent, fork = [5, 9, 3], [5, 9, last]
    tokens = run(runner, [whole(0, prompt)], [new_sequence(0, prompt, parent)])
    known = prompt + tokens
    step = [RowWork(row=0, start=10, num_tokens=1), RowWork(row=1, start=10, num_tokens=1, token_ids=known[10:])]
    copies = [(3, last)] if with_copy else []
    pairs = [run(runner, step, [new_sequence(1, known, fork)], block_copies=copies)]
    pairs.append(run(runner, [RowWork(row=row, start=11, num_tokens=1) for row in (0, 1)]))
    assert [first for first, _ in pairs] == expected[1:3]
    assert ([second for _, second in pairs] == expected[1:3]) == with_copy


def test_copies_come_before_the_step_writes(runner: ModelRunner, checkpoint: TinyCheckpoint) -> None:
    """The source's owner goes on in the same step: what it writes there is not copied, nor is it disturbed."""
    prompt, expected = checkpoint.prompt(5, 3)
    tokens = run(runner, [whole(0, prompt)], [new_sequence(0, prompt, [20, 21])])
    run(runner, [RowWork(row=0, start=5, num_tokens=1)], block_copies=[(21, 22)])
    assert tokens == expected[:1]
    cache = runner._store.states[-1]["keys"]
    assert torch.equal(cache[21, :1], cache[22, :1]) and cache[21, 1].any()
    assert not torch.equal(cache[21, 1], cache[22, 1])


def test_copies_that_depend_on_their_order_fail_the_step(runner: ModelRunner) -> None:
    handle = launch(runner, SchedulerOutput(new_sequences=[], rows=[], block_copies=[(1, 2), (2, 3)]))
    with pytest.raises(ValueError, match="both copied from and copied to"):
        runner.collect(handle)


# -- rows in any order -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_answers_come_in_the_order_of_the_rows(
    runner: ModelRunner, checkpoint: TinyCheckpoint, order: tuple[int, ...]
) -> None:
    """A whole prompt, a single token, an unfinished chunk and a prompt of one token share a step."""
    prompts, expected = zip(*(checkpoint.prompt(length, 2) for length in (9, 6, 12, 1)), strict=True)
    blocks = [list(range(30 + 4 * row, 34 + 4 * row)) for row in range(4)]
    new = [new_sequence(row, prompts[row], blocks[row]) for row in range(4)]
    assert run(runner, [whole(1, prompts[1])], [new[1]]) == expected[1][:1]
    rows = [
        whole(0, prompts[0]),
        RowWork(row=1, start=6, num_tokens=1),
        RowWork(row=2, start=0, num_tokens=5, token_ids=prompts[2][:5], num_sampled=0),
        whole(3, prompts[3]),
    ]
    wanted = {0: expected[0][0], 1: expected[1][1], 3: expected[3][0]}
    found = run(runner, [rows[index] for index in order], [new[0], new[2], new[3]])
    assert found == [wanted[index] for index in order if index != 2]
    rest = RowWork(row=2, start=5, num_tokens=7, token_ids=prompts[2][5:])
    assert run(runner, [rest, RowWork(row=0, start=9, num_tokens=1)]) == [expected[2][0], expected[0][1]]


def test_a_single_token_of_a_chunk_samples_nothing(runner: ModelRunner, checkpoint: TinyCheckpoint) -> None:
    prompt, expected = checkpoint.prompt(3, 1)
    parts = [RowWork(row=4, start=i, num_tokens=1, token_ids=[prompt[i]], num_sampled=int(i == 2)) for i in range(3)]
    outputs = [run(runner, [part], [new_sequence(4, prompt, [50])] if not part.start else []) for part in parts]
    assert outputs == [[], [], expected]


# -- what is not served ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "work", "words"),
    [
        ({"outputs": ("log_probs", "logits")}, {}, r"outputs \['logits'\] are not served"),
        ({"adapter_slot": 0}, {}, "0 adapters are served"),
        ({}, {"num_sampled": 2}, "not a token and its drafts"),
    ],
)
def test_what_the_runner_does_not_serve_is_refused(
    runner: ModelRunner, checkpoint: TinyCheckpoint, options: dict[str, Any], work: dict[str, Any], words: str
) -> None:
    prompt, expected = checkpoint.prompt(6, 2)
    run(runner, [whole(0, prompt)], [new_sequence(0, prompt, [60, 61])])
    asking = new_sequence(1, prompt, [62, 63], **options)
    part = RowWork(row=1, start=0, num_tokens=6, token_ids=prompt, **work)
    with pytest.raises(ValueError, match=words):
        runner.forward(SchedulerOutput(new_sequences=[asking], rows=[part]))
    assert run(runner, [RowWork(row=0, start=6, num_tokens=1)]) == expected[1:], "nothing was started"


def test_more_drafts_than_the_batch_has_places_are_refused(runner: ModelRunner, checkpoint: TinyCheckpoint) -> None:
    prompt, expected = checkpoint.prompt(6, 2)
    run(runner, [whole(0, prompt)], [new_sequence(0, prompt, [60, 61, 62, 63])])
    too_many = RowWork(row=0, start=6, num_tokens=9, token_ids=[1] * 8, num_sampled=9)
    with pytest.raises(ValueError, match="9 places of a batch of 8"):
        runner.forward(SchedulerOutput(new_sequences=[], rows=[too_many]))
    assert run(runner, [RowWork(row=0, start=6, num_tokens=1)]) == expected[1:], "nothing was started"


# -- padding -----------------------------------------------------------------------------------------------------------


def test_sizes() -> None:
    sizes = StepSizes.of("cuda", 20)
    assert sizes.num_rows == (1, 2, 4, 8, 16, 20)
    assert [sizes.padded(count) for count in (0, 1, 3, 8, 9, 17, 20)] == [0, 1, 4, 8, 16, 20, 20]
    assert StepSizes.of("cuda", 1).num_rows == (1,)
    without = StepSizes.of("cpu", 20)
    assert not without.pads and without.padded(17) == 17


def mixed_work() -> list[Work]:
    """All that a row may ask of its tokens, at different times, one of them paused: three to six rows at once."""
    random = SamplingConfig(temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, seed=3)
    penalised = SamplingConfig(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
    return [
        Work(prompt=make_prompt(9, seed=1), max_tokens=20),
        Work(prompt=make_prompt(21, seed=2), max_tokens=9, chunk=8, arrives=1),
        Work(prompt=make_prompt(5, seed=3), max_tokens=14, sampling=random, log_probs=True),
        Work(prompt=make_prompt(13, seed=4), max_tokens=11, sampling=penalised, arrives=2, pauses_at=4),
        Work(prompt=make_prompt(1, seed=5), max_tokens=12, bad_words=[[5], [9, 12], [40, 41, 42]], arrives=3),
        Work(prompt=make_prompt(17, seed=6), max_tokens=5, sampling=SamplingConfig(min_tokens=4), end_ids=[7, 9]),
    ]


def test_padding_changes_no_token(runner: ModelRunner, padded_runner: ModelRunner) -> None:
    plain, padded = mixed_work(), mixed_work()
    Driver(runner).run(plain)
    Driver(padded_runner).run(padded)
    assert [work.output for work in padded] == [work.output for work in plain]
    for mine, theirs in zip(padded, plain, strict=True):
        assert mine.output_log_probs == pytest.approx(theirs.output_log_probs, abs=1e-5)


def test_padded_steps_have_few_shapes_and_always_the_same_memory(
    padded_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[AttentionMetadata] = []
    numbers: set[int] = set()
    computation = padded_runner._computation
    forward, load_arrays = Decoder.forward, computation.input.load

    def watched(decoder: Decoder, token_ids: torch.Tensor, caches: Any, metadata: AttentionMetadata) -> torch.Tensor:
        seen.append(metadata)
        return forward(decoder, token_ids, caches, metadata)

    def watched_load(*arguments: Any) -> dict[str, torch.Tensor]:
        arrays = load_arrays(*arguments)
        numbers.add(arrays["rows"].data_ptr())
        return arrays

    monkeypatch.setattr(Decoder, "forward", watched)
    monkeypatch.setattr(computation.input, "load", watched_load)
    state = computation.state
    addresses = [t.data_ptr() for t in (state.lengths_R, state.block_tables, state.last_token_R)]
    Driver(padded_runner).run(mixed_work())
    assert {metadata.num_decodes for metadata in seen} <= {0, 1, 2, 4, 8}
    assert {metadata.blocks[0].block_table.data_ptr() for metadata in seen} == {state.block_tables.data_ptr()}
    padded = [m for m in seen if 0 in m.decode_seq_lens_N.tolist()]
    assert padded, "some steps were meant to be padded"
    for metadata in padded:
        lengths = metadata.decode_seq_lens_N
        assert (metadata.blocks[0].slots_T[: len(lengths)][lengths == 0] == -1).all()
        assert (metadata.blocks[0].slots_T[: len(lengths)][lengths > 0] >= 0).all()
    assert len(numbers) == 1
    assert addresses == [t.data_ptr() for t in (state.lengths_R, state.block_tables, state.last_token_R)]
    assert state.lengths_R[state.padding_row] == 0
    assert not padded_runner._store.states[0]["keys"][padded_runner._store.filler_block].any()


def test_the_largest_step_fits_into_the_input_buffer(padded_runner: ModelRunner) -> None:
    """Seven decoding rows, padded to eight, beside a prompt that fills the step."""
    new = [new_sequence(row, [row + 1], [64 + row]) for row in range(7)]
    run(padded_runner, [whole(row, [row + 1]) for row in range(7)], new)
    prompt = make_prompt(57)
    rows = [*(RowWork(row=row, start=1, num_tokens=1) for row in range(7)), whole(7, prompt)]
    assert len(run(padded_runner, rows, [new_sequence(7, prompt, list(range(80, 96)))])) == 8
