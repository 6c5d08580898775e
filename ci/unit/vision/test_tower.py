"""Pictures as rows: those of transformers' own networks, with what its own processors write into prompts.

Run: pytest ci/unit/vision/test_tower.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from image_checkpoints import CONFIGS_WITH_IMAGES, file_of, make_image, make_image_checkpoint
from PIL import Image
from safetensors.torch import load_file, save_file

from inflight.errors import ConfigurationError
from inflight.vision.families import READ, why_text_alone
from inflight.vision.opening import open_image
from inflight.vision.tower import Tower

pytestmark = pytest.mark.slow

SIZES = ((60, 33), (30, 70), (56, 56), (14, 100))


@pytest.mark.parametrize("name", CONFIGS_WITH_IMAGES)
def test_rows_and_text_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    checkpoint = make_image_checkpoint(tmp_path, name)
    assert why_text_alone(tmp_path) == ""
    tower = Tower.load(tmp_path)
    for width, height in SIZES:
        image = make_image(width, height)
        seen = tower.see(open_image(file_of(image), 10_000))
        question = checkpoint.processor(images=[image], text=[tower.image_token], return_tensors="pt")
        written = checkpoint.processor.tokenizer(seen.text)["input_ids"]
        assert written == question["input_ids"][0].tolist()
        inputs = {name: value for name, value in question.items() if name not in ("input_ids", "attention_mask")}
        with torch.inference_mode():
            expected = checkpoint.model.get_image_features(**inputs).pooler_output
        rows = torch.cat([part.reshape(-1, part.shape[-1]) for part in expected])
        torch.testing.assert_close(seen.rows_RD, rows, rtol=0, atol=0)


def test_formats_and_colours_of_files(tmp_path: Path) -> None:
    """Whatever its file is like, a picture is seen as transformers loads it: turned as its camera says, without
    transparency."""
    make_image_checkpoint(tmp_path, "llava-llama")
    tower = Tower.load(tmp_path)
    image = make_image(40, 30)
    plain = tower.see(image).rows_RD
    for kind, options in (("PNG", {}), ("WEBP", {"lossless": True}), ("GIF", {})):
        torch.testing.assert_close(tower.see(open_image(file_of(image, kind, **options), 10_000)).rows_RD, plain)
    for mode in ("L", "RGBA", "P", "1", "CMYK"):
        converted = image.convert(mode)
        file = file_of(converted, "JPEG" if mode == "CMYK" else "PNG")
        assert torch.isfinite(tower.see(open_image(file, 10_000)).rows_RD).all()
    turned = Image.Exif()
    turned[0x0112] = 3
    upside_down = file_of(image.rotate(180), "PNG", exif=turned)
    torch.testing.assert_close(tower.see(open_image(upside_down, 10_000)).rows_RD, plain)


@pytest.mark.parametrize("change", ["missing", "misshapen"])
def test_a_checkpoint_without_its_tower_is_refused(tmp_path: Path, change: str) -> None:
    make_image_checkpoint(tmp_path, "llava-llama")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "multi_modal_projector" in name and name.endswith("linear_1.weight"))
    if change == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:, :3].contiguous()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"tensors of the checkpoint's part for images .*linear_1"):
        Tower.load(tmp_path)


def test_a_processor_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    """It writes other numbers of placeholders than there are rows."""
    make_image_checkpoint(tmp_path, "llava-llama")
    file = tmp_path / "processor_config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "num_additional_image_tokens": 9}))
    with pytest.raises(ConfigurationError, match=r"cannot be loaded: 4 rows for 12 placeholders"):
        Tower.load(tmp_path)


def test_what_reads_text_alone_says_why(tmp_path: Path) -> None:
    def why(architecture: str) -> str:
        (tmp_path / "config.json").write_text(f'{{"architectures": ["{architecture}"]}}')
        return why_text_alone(tmp_path)

    assert why("LlamaForCausalLM") == "this model reads text alone"
    assert "in both directions" in why("Gemma3ForConditionalGeneration")
    assert "two dimensions" in why("Qwen3_5ForConditionalGeneration")
    assert all("no preprocessor_config.json" in why(name) for name in READ)
    (tmp_path / "config.json").write_text("[")
    assert why_text_alone(tmp_path) == "this model reads text alone"
