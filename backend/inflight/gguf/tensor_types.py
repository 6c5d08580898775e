"""The types that ggml stores tensors in: how many elements a block of a row has, and how many bytes.

The numbers are those of a GGUF file, as the documentation of ggml has them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    name: str
    block_size: int
    """Neighbouring elements of a row that are stored together."""
    block_bytes: int

    def row_bytes(self, num_columns: int) -> int:
        """Of a row of a whole number of blocks."""
        return num_columns // self.block_size * self.block_bytes


F32, F16, BF16 = TensorType("F32", 1, 4), TensorType("F16", 1, 2), TensorType("BF16", 1, 2)
Q8_0, Q4_0 = TensorType("Q8_0", 32, 34), TensorType("Q4_0", 32, 18)

TENSOR_TYPES: dict[int, TensorType] = {
    0: F32,
    1: F16,
    2: Q4_0,
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: Q8_0,
    9: TensorType("Q8_1", 32, 40),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: BF16,
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
}
"""Number in a file -> type."""
FLOATS = (F32, F16, BF16)
NOT_READ = frozenset({"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64", "Q1_0"})
"""Names of types that no weight is read from: nobody publishes weights in them, and gguf has no numbers for them."""
