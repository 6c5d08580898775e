"""How a checkpoint's pictures become tensors, and what stands for them in prompts: transformers' processors.

Two of them are not offered by transformers without torchvision, which they hardly need, and SmolVLM's needs a package
for its videos: of these the parts for pictures are used.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from PIL.Image import Image

IDEFICS = {
    "idefics3": ("transformers.models.idefics3.image_processing_pil_idefics3", "Idefics3ImageProcessorPil"),
    "smolvlm": ("transformers.models.smolvlm.image_processing_pil_smolvlm", "SmolVLMImageProcessorPil"),
}
"""By model_type: where the image processor is. What both write is the same."""
PIXTRAL = ("transformers.models.pixtral.image_processing_pil_pixtral", "PixtralImageProcessorPil")
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


class ReadImage(NamedTuple):
    text: str
    """See Picture."""
    inputs: dict[str, Any]
    """Tensors for the network's get_image_features."""


class Processor(Protocol):
    @property
    def image_token(self) -> str:
        """The placeholder."""

    def read(self, image: Image) -> ReadImage:
        """Raises whatever transformers raises for a picture that it does not take."""


class OwnProcessor:
    """The checkpoint's, which writes the text itself."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.image_token: str = processor.image_token

    def read(self, image: Image) -> ReadImage:
        read = self._processor(
            images=[image], text=[self.image_token], return_tensors="pt", return_text_replacement_offsets=True
        )
        ((replaced,),) = read.pop("text_replacement_offsets")
        inputs = {name: value for name, value in read.items() if name not in ("input_ids", "attention_mask")}
        return ReadImage(replaced["replacement"], inputs)


class PixtralProcessor:
    """A placeholder for each square of patches, with a token behind each line of them and another one at the end."""

    LINE_END, END = "[IMG_BREAK]", "[IMG_END]"
    image_token = "[IMG]"

    def __init__(self, processor: Any, square: int) -> None:
        """`processor`: of images. `square`: pixels of a side."""
        self._processor = processor
        self._square = square

    def read(self, image: Image) -> ReadImage:
        read = self._processor([image], patch_size=self._square, return_tensors="pt")
        ((height, width),) = read["image_sizes"].tolist()
        line = self.image_token * (width // self._square)
        return ReadImage(self.LINE_END.join([line] * (height // self._square)) + self.END, dict(read))


def load_processor(folder: Path, config: Any) -> Processor:
    """`config`: of the checkpoint in `folder`, as transformers reads it."""
    from transformers import AutoProcessor, AutoTokenizer, Idefics3Processor

    if config.model_type in IDEFICS:
        images = _class_of(IDEFICS[config.model_type]).from_pretrained(folder, local_files_only=True)
        settings, _ = Idefics3Processor.get_processor_dict(folder, local_files_only=True)
        length = {key: settings[key] for key in ("image_seq_len",) if key in settings}
        tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL)
        return OwnProcessor(Idefics3Processor(images, tokenizer, **length))
    if config.vision_config.model_type == "pixtral":
        images = _class_of(PIXTRAL).from_pretrained(folder, local_files_only=True)
        return PixtralProcessor(images, config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1))
    return OwnProcessor(AutoProcessor.from_pretrained(folder, **LOCAL))


def _class_of(place: tuple[str, str]) -> Any:
    return getattr(import_module(place[0]), place[1])
