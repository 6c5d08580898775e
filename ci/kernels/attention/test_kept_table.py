"""What the table of ahead-of-time compiles keeps of attention: how many programs fit on a multiprocessor of Hopper, and
that K and V are copied 16 bytes a thread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "aot_table.json"
# Cases by the beginning of their names, with the default configuration, and how many programs fit at least.
PROGRAMS = {
    "decode b1 32/8 d128 block64": 3,
    "decode b32 32/8 d128 block64": 3,
    "decode b256 32/8 d128 block16": 3,
    "decode b4 9/3 d64 block64": 3,
    "decode b4 32/8 d96 block64": 3,
    "decode b4 64/1 d128 block64": 2,
    "decode b4 8/1 d256 block64": 3,
    "decode b32 32/8 d128 block64 deterministic": 2,
    "prefill 32/8 d128": 2,
    # Two programs that read the scales of slots would spill registers (see `default_config`).
    "prefill 32/8 d128 block64 int8": 1,
    "prefill 32/8 d96": 2,
    "prefill 9/3 d64": 2,
    "prefill short 32/8 d128": 2,
}

LATENTS = "d576:512"
WIDE = (LATENTS, "d512 ")
"""Whose tiles are as wide as four heads: Hopper's matrix unit multiplies none of them yet."""
NARROW_OF_LATENTS = {"fp8": 4, "int8": 8}
"""Copies of at most 8 bytes: of 8 bits the tail of a key has 64, and int8 a scale of 4."""
NARROW_OF_BIAS = 96
"""A bias of scores by distance is read along diagonals, 4 bytes an element; the same case without one has none."""


def _faults(rows: dict[str, dict[str, Any]]) -> list[str]:
    faults = []
    for key, row in rows.items():
        case, kernel, architecture = key.split(" | ")
        if "attention" not in kernel and not kernel.startswith("decode"):
            continue
        # A cache in int8 has two scales of 4 bytes for each key that it has 2 D bytes of, and heads lie between them.
        is_latent = LATENTS in case
        most = NARROW_OF_LATENTS.get(case.rpartition(" ")[2], 0) if is_latent else 0
        if not is_latent and case.endswith("int8"):
            most = row["copies"]
        if kernel.startswith("bidirectional") and case.endswith(" bias"):
            most = NARROW_OF_BIAS
        if row.get("narrow", 0) > most:
            faults.append(f"{key} copies {row['narrow']} times fewer than 16 bytes")
        if architecture != "sm_90" or "fp32" in case:
            continue
        # The longest name counts: a deterministic decode is computed by prefill attention.
        names = [name for name in PROGRAMS if case.startswith(name)]
        if names and row["blocks"] < (wanted := PROGRAMS[max(names, key=len)]):
            faults.append(f"{key}: {row['blocks']} programs fit on a multiprocessor instead of {wanted}")
        if kernel.startswith("prefill") and not any(each in case for each in WIDE) and not row.get("wgmma"):
            faults.append(f"{key} does not use Hopper's matrix unit")
    return faults


def test_programs_fit_and_copies_are_wide() -> None:
    rows = json.loads(TABLE.read_text())["kernels"]
    assert _faults(rows) == []
    for name in PROGRAMS:
        assert any(key.startswith(name) and key.endswith("sm_90") for key in rows), name


def test_a_narrow_copy_and_a_program_less_are_told() -> None:
    decode = {"registers": 150, "shared": 55296, "blocks": 3, "copies": 24}
    key = "decode b32 32/8 d128 block64 fp8 | decode_persistent_kernel | sm_90"
    assert _faults({key: decode}) == []
    [fault] = _faults({key: decode | {"copies": 16, "narrow": 32}})
    assert "copies 32 times fewer than 16 bytes" in fault
    scales = decode | {"copies": 32, "narrow": 8}
    assert len(_faults({key: scales})) == 1 and _faults({key.replace("fp8", "int8"): scales}) == []
    assert len(_faults({key.replace("fp8", "int8"): decode | {"copies": 8, "narrow": 32}})) == 1
    [fault] = _faults({key: decode | {"blocks": 2}})
    assert "2 programs fit on a multiprocessor instead of 3" in fault
    key = "prefill 32/8 d128 block64 | prefill_attention_kernel | sm_90"
    [one, none] = _faults({key: {"blocks": 1}})
    assert "1 programs fit" in one and "does not use Hopper's matrix unit" in none
