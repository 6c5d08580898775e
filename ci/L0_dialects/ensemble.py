"""An ensemble of tritonserver's, `of_steps`: preprocessing, tensorrt_llm, postprocessing."""

from __future__ import annotations

OF_STEPS = "of_steps"
TO_PREPROCESSING = {
    "QUERY": "text_input",
    "REQUEST_OUTPUT_LEN": "max_tokens",
    "BAD_WORDS_DICT": "bad_words",
    "STOP_WORDS_DICT": "stop_words",
}
TO_TENSORRT_LLM = {
    "input_ids": "INPUT_ID",
    "input_lengths": "REQUEST_INPUT_LEN",
    "decoder_input_ids": "DECODER_INPUT_ID",
    "decoder_input_lengths": "REQUEST_DECODER_INPUT_LEN",
    "request_output_len": "REQUEST_OUTPUT_LEN",
    "bad_words_list": "BAD_WORDS_IDS",
    "stop_words_list": "STOP_WORDS_IDS",
    "embedding_bias": "EMBEDDING_BIAS",
    "end_id": "OUT_END_ID",
    "pad_id": "OUT_PAD_ID",
}
TO_POSTPROCESSING = {"TOKENS_BATCH": "output_ids", "SEQUENCE_LENGTH": "sequence_length"}


def config() -> str:
    """Its config.pbtxt."""
    kinds = {"max_tokens": "INT32"}
    inputs = [
        f'{{ name: "{name}" data_type: TYPE_{kinds.get(name, "STRING")} dims: [ -1 ] }}'
        for name in TO_PREPROCESSING.values()
    ]
    return f"""
        name: "{OF_STEPS}" platform: "ensemble" max_batch_size: 64
        input [ {", ".join(inputs)} ]
        output [ {{ name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }} ]
        ensemble_scheduling {{
          {_step("preprocessing", TO_PREPROCESSING, TO_TENSORRT_LLM)}
          {_step("tensorrt_llm", TO_TENSORRT_LLM, TO_POSTPROCESSING)}
          {_step("postprocessing", TO_POSTPROCESSING, {"text_output": "OUTPUT"})}
        }}"""


def _step(model: str, inputs: dict[str, str], read: dict[str, str]) -> str:
    """`inputs`: the model's tensors and where they come from. `read`: who reads its outputs, and which."""
    maps = [f'input_map {{ key: "{tensor}" value: "{origin}" }}' for tensor, origin in inputs.items()]
    for name, tensor in read.items():
        value = name if name == "text_output" else tensor
        maps.append(f'output_map {{ key: "{tensor}" value: "{value}" }}')
    return f'step [ {{ model_name: "{model}" model_version: -1 {" ".join(maps)} }} ]'
