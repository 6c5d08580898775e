"""A GGUF file of bfloat16 as one of another format: SOURCE TARGET FORMAT. Quantised formats are llama.cpp's own."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import llama_cpp

FORMATS = {
    "f16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
}


def main(source: str, target: str, form: str) -> None:
    if form == "bf16":
        Path(target).hardlink_to(source)
        return
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = FORMATS[form]
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(options)):
        raise RuntimeError(f"llama.cpp made no {form} of {source}")


if __name__ == "__main__":
    main(*sys.argv[1:])
