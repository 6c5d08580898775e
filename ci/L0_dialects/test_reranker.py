"""`rerank` beside an `llm` that answers yes or no, in plain tensors: held against transformers. It has a server of its
own, because the shared one serves another kind of checkpoint.

pytest ci/L0_dialects/test_reranker.py
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import numpy as np
import torch
import tritonclient.grpc as grpcclient
from fake_tokenizer import byte_tokenizer_with
from server_process import ServerProcess
from tiny_checkpoints import COMPILED_CONFIGS, write_checkpoint

TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message['role'] }}: {{ message['content'] }}
{% endfor %}{# "query", "document" #}{% if add_generation_prompt %}<|im_end|>{% endif %}"""
QUERY, PASSAGES = "what is a fox?", ["a red animal", "a ship", "a red animal that " + "runs and " * 20]


def test_scores_of_a_reranker_that_is_a_language_model(tmp_path: Path) -> None:
    config = type(COMPILED_CONFIGS["qwen3-wide"])(**{**COMPILED_CONFIGS["qwen3-wide"].to_dict(), "vocab_size": 300})
    model = write_checkpoint(tmp_path, config, 5).model
    tokenizer = byte_tokenizer_with("<|im_start|>", "<|im_end|>")._backend
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    no, yes = (tokenizer.token_to_id(letter) for letter in "ny")

    def tokens(passage: str) -> list[int]:
        ids: list[int] = tokenizer.encode(
            f"<|im_start|>query: {QUERY}\n<|im_start|>document: {passage}\n<|im_end|>"
        ).ids
        return ids

    def logit(passage: str) -> float:
        with torch.inference_mode():
            logits = model(torch.tensor([tokens(passage)])).logits[0, -1]
        return float(logits[yes] - logits[no])

    expected = np.array([logit(passage) for passage in PASSAGES])
    parameters = {"dtype": "float32", "score_tokens": "n,y", "max_num_tokens": "64"}
    with ServerProcess(checkpoint=tmp_path, apis=["embedding"], parameters=parameters, openai={}) as server:
        inputs = []
        for name, texts in (("query", [QUERY]), ("passage", PASSAGES)):
            array = np.array([[text.encode() for text in texts]], object)
            inputs.append(grpcclient.InferInput(name, array.shape, "BYTES"))
            inputs[-1].set_data_from_numpy(array)
        with grpcclient.InferenceServerClient(server.grpc_url) as client:
            answer = client.infer("rerank", inputs)
        body = json.dumps({"query": QUERY, "documents": PASSAGES, "use_activation": False}).encode()
        assert server.endpoints is not None and server.endpoints.pooled == "scores"
        url = f"http://{server.endpoints.openai}/v1/rerank"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            results = json.load(response)["results"]
    np.testing.assert_allclose(answer.as_numpy("logit")[0], expected, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(answer.as_numpy("scores")[0], 1 / (1 + np.exp(-expected)), atol=1e-3)
    assert answer.as_numpy("token_count").tolist() == [sum(len(tokens(passage)) for passage in PASSAGES)]
    found = {each["index"]: each["relevance_score"] for each in results}
    assert [np.float32(found[place]) for place in range(3)] == answer.as_numpy("logit")[0].tolist(), "the same bits"
