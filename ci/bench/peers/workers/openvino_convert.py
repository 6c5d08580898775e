"""A checkpoint in OpenVINO's format: CHECKPOINT TARGET FORMAT. Of f32, bf16 and int8 only the last changes weights."""

from __future__ import annotations

import sys

from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig


def main(checkpoint: str, target: str, form: str) -> None:
    options = {"quantization_config": OVWeightQuantizationConfig(bits=8)} if form == "int8" else {"load_in_8bit": False}
    OVModelForCausalLM.from_pretrained(checkpoint, export=True, compile=False, **options).save_pretrained(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
