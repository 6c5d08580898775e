"""What is read of a PEFT folder and of a request's tensors, and a sentence for everything that is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from inflight.errors import ConfigurationError, InvalidRequest
from inflight.layers.lora import LoraSlots
from inflight.lora import LoraConfig, LoRARequest
from inflight.models.adapter_places import AdapterPlace, AdapterPlaces
from inflight.runtime.adapters.adapter_reader import AdapterReader
from inflight.runtime.adapters.peft_folder import find_folder, read_peft_folder
from inflight.runtime.adapters.request_weights import read_request_weights

LAYER = "model.layers.0.self_attn.q_proj"
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none", "target_modules": "all-linear"}
A, B = torch.arange(6.0).view(2, 3), torch.arange(8.0).view(4, 2)


def places() -> AdapterPlaces:
    found = AdapterPlaces(num_slots=1, max_rank=8)
    place = AdapterPlace(
        num_inputs=3, num_outputs=4, inputs=range(3), outputs=(range(4),), slots=LoraSlots(3, (4,)), index=0
    )
    found.add(LAYER, place)
    found.numbered[1, 0] = LAYER
    return found


def write(folder: Path, config: dict[str, Any] | str = CONFIG, **tensors: torch.Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    named = {
        name.replace("__", "."): tensor.clone() for name, tensor in (tensors or {"lora_A": A, "lora_B": B}).items()
    }
    whole = {
        (f"base_model.model.{LAYER}.{name}.weight" if name.startswith("lora_") else name): tensor
        for name, tensor in named.items()
    }
    save_file(whole, folder / "adapter_model.safetensors")
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "adapter_config.json").write_text(text)
    return folder


def read(folder: Path, within: Path | None = None, max_bytes: int = 10_000) -> Any:
    return read_peft_folder("mine", folder, within, places(), max_bytes)


@pytest.mark.parametrize(("changes", "scale"), [({}, 3.0), ({"use_rslora": True}, 6 / 2**0.5), ({"lora_alpha": 0}, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_matrices_and_scale(tmp_path: Path, changes: dict[str, Any], scale: float, dtype: torch.dtype) -> None:
    (module,) = read(write(tmp_path / "a", CONFIG | changes, lora_A=A.to(dtype), lora_B=B.to(dtype))).modules
    assert (module.name, module.rank, module.dtype) == (LAYER, 2, str(dtype).removeprefix("torch."))
    assert module.scale == pytest.approx(scale)
    assert torch.equal(torch.frombuffer(bytearray(module.a), dtype=dtype).view(2, 3).float(), A)
    assert torch.equal(torch.frombuffer(bytearray(module.b), dtype=dtype).view(4, 2).float(), B)


def test_the_digest_is_of_weights_and_scale(tmp_path: Path) -> None:
    first, same = read(write(tmp_path / "a")), read(write(tmp_path / "b"))
    assert first.digest == same.digest
    assert read(write(tmp_path / "c", CONFIG | {"lora_alpha": 7})).digest != first.digest
    assert read(write(tmp_path / "d", lora_A=A + 1, lora_B=B)).digest != first.digest


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"peft_type": "LOHA"}, 'peft_type in adapter_config.json is not supported except as "LORA"'),
        ({"bias": "all"}, 'bias in adapter_config.json is not supported except as "none"'),
        ({"use_dora": True}, "use_dora in adapter_config.json is not supported except as false"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save in adapter_config.json is not supported except as \[\]"),
        ({"rank_pattern": {"q_proj": 3}}, "rank_pattern in adapter_config.json"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern in adapter_config.json"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights in adapter_config.json is not supported except as true"),
        ({"r": 0}, "r in adapter_config.json must be a whole number"),
        ({"r": "2"}, "r in adapter_config.json must be a whole number"),
        ({"r": 3}, f"the rank of {LAYER} is not the r of adapter_config.json, 3"),
        ({"lora_alpha": True}, "lora_alpha in adapter_config.json must be a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha in adapter_config.json must be a number"),
        ({"use_rslora": 1}, "use_rslora in adapter_config.json must be true or false"),
    ],
)
def test_what_the_config_may_not_say(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^LoRA adapter mine: {sentence}"):
        read(write(tmp_path / "a", CONFIG | changes))


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"lora_A": A}, "lacks base_model.model"),
        ({"lora_A": A[:, :2].contiguous(), "lora_B": B}, r"the matrices of .* are \[2, 2\] and \[4, 2\]"),
        ({"lora_A": A, "lora_B": B[:, :1].contiguous()}, r"asks for \[2, 3\] and \[4, 2\]"),
        ({"lora_A": A, "lora_B": B.double()}, "must both be float32, float16 or bfloat16"),
        ({"lora_A": A / 0, "lora_B": B}, "numbers that are not finite"),
        (
            {"lora_A": A, "lora_B": B, "base_model__model__lm_head__lora_A__weight": A},
            "holds 'base_model.model.lm_head",
        ),
        (
            {
                "lora_A": A,
                "lora_B": B,
                "base_model__model__model__layers__0__mlp__experts__3__up_proj__lora_A__weight": A,
            },
            "holds 'base_model.model.model.layers.0.mlp.experts.3.up_proj.* can be adapted, not a mixture of experts",
        ),
        ({"lora_A": A, "lora_B": B, "lora_magnitude_vector": A[0]}, "holds 'base_model"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, tensors: dict[str, torch.Tensor], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        read(write(tmp_path / "a", **tensors))


def test_broken_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", "[1]")
    with pytest.raises(InvalidRequest, match=r"adapter_config.json is not a JSON object"):
        read(folder)
    with pytest.raises(InvalidRequest, match="larger than lora_cache_host_memory_bytes"):
        large = write(tmp_path / "b", lora_A=torch.zeros(2, 300_000), lora_B=B)
        read(large, max_bytes=10)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    (folder / "adapter_model.safetensors").write_bytes(b"pickle")
    with pytest.raises(InvalidRequest, match="not a whole safetensors file"):
        read(folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(InvalidRequest, match="has no file adapter_model"):
        read(folder)


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    weights = write(tmp_path / "a") / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(InvalidRequest, match="not a whole safetensors file"):
        read(weights.parent)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    """Of a mapped file the tensors would be gone, and whoever touches them ends with SIGBUS."""
    folder = write(tmp_path / "a")

    class Shrinking(dict[str, AdapterPlace]):
        def __contains__(self, name: object) -> bool:
            os.truncate(folder / "adapter_model.safetensors", 0)
            return super().__contains__(name)

    shrinking = places()
    shrinking.places = Shrinking(shrinking.places)
    (module,) = read_peft_folder("mine", folder, None, shrinking, 10_000).modules
    assert np.array_equal(np.frombuffer(module.a, "<f4").reshape(2, 3), A.numpy())


def test_a_rank_above_the_configured_one(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", CONFIG | {"r": 9}, lora_A=torch.zeros(9, 3), lora_B=torch.zeros(4, 9))
    with pytest.raises(InvalidRequest, match="is 9, but this engine takes 1 to lora_cache_max_adapter_size 8"):
        read(folder)


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    AdapterReader(places(), lora_dir=str(tmp_path), max_bytes=1)
    with pytest.raises(ConfigurationError, match=r"lora_dir: .* is not a folder"):
        AdapterReader(places(), lora_dir=str(tmp_path / "nowhere"), max_bytes=1)


def test_names_find_folders_in_the_directory_and_nothing_else(tmp_path: Path) -> None:
    directory, outside = tmp_path / "adapters", write(tmp_path / "outside")
    directory.mkdir()
    inside = write(directory / "inside")
    (directory / "link").symlink_to(outside)
    (directory / "file").write_text("")
    assert find_folder(LoRARequest("inside"), str(directory)) == (inside, inside)
    for name in ("link", "file", "missing"):
        with pytest.raises(InvalidRequest, match=f"^there is no LoRA adapter {name}$"):
            find_folder(LoRARequest(name), str(directory))
    with pytest.raises(InvalidRequest, match="there is no LoRA adapter inside"):
        find_folder(LoRARequest("inside"), "")
    assert find_folder(LoRARequest("x", 0, str(outside)), "") == (outside, None)
    (inside / "adapter_model.safetensors").unlink()
    (inside / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    with pytest.raises(InvalidRequest, match="has no file adapter_model"):
        read(inside, within=inside)


@pytest.mark.parametrize("name", ["..", ".", "a/b", "/etc", "", "a\0", "é", "a" * 129, "-x"])
def test_names_are_no_paths(name: str) -> None:
    with pytest.raises(InvalidRequest, match="lora_name must be 1 to 128 letters"):
        LoRARequest(name).validate()


def request_config(rows: Any, config: Any, dtype: Any = np.float16) -> LoraConfig:
    return LoraConfig.of(7, np.array(rows, dtype), np.array(config, np.int32))


def test_a_requests_tensors() -> None:
    row = [*A.flatten().tolist(), *B.flatten().tolist(), 99.0, 98.0]
    (module,) = read_request_weights(request_config([row], [[1, 0, 2]]), places()).modules
    assert (module.name, module.rank, module.scale, module.dtype) == (LAYER, 2, 1.0, "float16")
    assert np.array_equal(np.frombuffer(module.a, "<f2").reshape(2, 3), A.numpy())
    assert np.array_equal(np.frombuffer(module.b, "<f2").reshape(4, 2), B.numpy())


@pytest.mark.parametrize(
    ("rows", "config", "sentence"),
    [
        ([[0.0] * 14], [[2, 0, 2]], "names module 2 of layer 0, which the network lacks"),
        ([[0.0] * 14], [[1, 5, 2]], "names module 1 of layer 5, which the network lacks"),
        ([[0.0] * 14] * 2, [[1, 0, 2]] * 2, "names module 1 of layer 0 twice"),
        ([[0.0] * 13], [[1, 0, 2]], "a row of lora_weights has 13 elements"),
        ([[0.0] * 14], [[1, 0, 0]], "has rank 0, but it must be 1 to"),
        ([[0.0] * 14], [[1, 0, -3]], "has rank -3, but it must be 1 to"),
        ([[0.0] * 14], [[1, 0, 9]], "has rank 9, but it must be 1 to"),
        ([[float("inf")] * 14], [[1, 0, 2]], "numbers that are not finite"),
    ],
)
def test_tensors_that_are_refused(rows: Any, config: Any, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^LoRA task 7: .*{sentence}"):
        read_request_weights(request_config(rows, config), places())


def test_arrays_that_do_not_belong_together() -> None:
    with pytest.raises(InvalidRequest, match="must be given together"):
        LoraConfig.of(1, np.zeros((1, 4), np.float16), None)
    with pytest.raises(InvalidRequest, match=r"lora_weights must be \[rows, elements\]"):
        LoraConfig.of(1, np.zeros((2, 4), np.float16), np.zeros((1, 3), np.int32))
    with pytest.raises(InvalidRequest, match="must have as many rows as lora_config"):
        read_request_weights(LoraConfig(1, b"123456", [(1, 0, 1), (1, 0, 2)]), places())
