"""Two ranks of an encoder: scores are those of one, and requests survive a rank's death.

pytest ci/L0_executor/test_encoders.py
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from encoder_checkpoints import TinyEncoder, token_ids, write_encoder
from real_engine import PATIENCE, StartEngine

from inflight.output_config import SCORES, AdditionalModelOutput, OutputConfig
from inflight.scheduler_output import HIDDEN_STATES

pytestmark = pytest.mark.long

ASKED = OutputConfig(
    additional_model_outputs=[
        AdditionalModelOutput(name=SCORES),
        AdditionalModelOutput(name=HIDDEN_STATES, pooling="cls"),
    ]
)


def test_texts_get_their_scores_whichever_ranks_die(tmp_path: Path, start_engine: StartEngine) -> None:
    encoder: TinyEncoder = write_encoder(tmp_path, "BertForSequenceClassification")
    engine = start_engine(
        gpt_model_path=str(tmp_path), tensor_parallel_size="2", executor="multiproc", max_num_tokens="64"
    )
    texts = [token_ids(length, number) for number, length in enumerate([40, 7, 33, 1] * 10)]
    found = []
    for dies in (False, True):
        ids = [engine.submit(text, 0, output_config=ASKED, second_text_start=len(text) // 2) for text in texts]
        if dies:
            os.kill(engine.rank_pid(1), signal.SIGKILL)
            assert engine.deaths.acquire(timeout=PATIENCE)
        found.append([engine.tensors(id_) for id_ in ids])
    for text, before, after in zip(texts, *found, strict=True):
        assert before.keys() == after.keys() == {"scores", "pooled_hidden_states"}
        for name, tensor in before.items():
            assert tensor.tobytes() == after[name].tobytes()
        second = len(text) // 2
        np.testing.assert_allclose(before["scores"][0], encoder.scores(text, second), rtol=1e-3, atol=1e-3)
        states = encoder.states(text, second)
        np.testing.assert_allclose(before["pooled_hidden_states"][0], states[0], rtol=1e-3, atol=1e-3)
