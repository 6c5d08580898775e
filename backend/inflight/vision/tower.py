"""What of a checkpoint turns a picture into rows: its processor, its vision tower, and its projector.

All are transformers' own code with the checkpoint's tensors; the text's are not read. Computed in float32, one picture
at a time, so that its rows depend on nothing but the picture. Code of the checkpoint is never run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from inflight.errors import ConfigurationError
from inflight.vision.processors import LOCAL, Processor, load_processor

if TYPE_CHECKING:
    from PIL.Image import Image

TRIAL_SIZE = (224, 224)
"""Of a picture that is read to see whether processor and network fit each other."""
OF_TEXT = ("language_model.", "text_model.")
"""Beginnings of the names of the text's tensors."""


class SeenImage(NamedTuple):
    text: str
    """See Picture."""
    rows_RD: Tensor
    """float32, one row for each placeholder in `text`."""


class Tower:
    def __init__(self, processor: Processor, network: Any) -> None:
        """`network`: of transformers, with `get_image_features`."""
        self._processor = processor
        self._network = network

    @property
    def image_token(self) -> str:
        """The placeholder."""
        return self._processor.image_token

    @classmethod
    def load(cls, folder: Path) -> Tower:
        """And try it. Raises ConfigurationError, whose message is a clause about the checkpoint."""
        from PIL import Image
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(folder, **LOCAL)
            tower = cls(load_processor(folder, config), _load_network(folder, config))
            tower.see(Image.new("RGB", TRIAL_SIZE))
            return tower
        except ConfigurationError:
            raise
        except Exception as error:  # transformers raises exceptions of many types for files that are wrong
            reason = " ".join(str(error).split())[:400]
            raise ConfigurationError(f"the part of the checkpoint for images cannot be loaded: {reason}") from None

    @torch.inference_mode()
    def see(self, image: Image) -> SeenImage:
        """Raises whatever transformers raises for a picture that it does not take."""
        from transformers.image_utils import load_image

        text, inputs = self._processor.read(load_image(image))
        found = self._network.get_image_features(**inputs, return_dict=True).pooler_output
        parts = [found] if isinstance(found, Tensor) else list(found)
        rows_RD = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
        if len(rows_RD) != text.count(self.image_token):
            raise ValueError(f"{len(rows_RD)} rows for {text.count(self.image_token)} placeholders")
        return SeenImage(text, rows_RD)


def _load_network(folder: Path, config: Any) -> Any:
    """The whole network without layers of text, and with a vocabulary of one."""
    from transformers import AutoModel

    text = config.text_config
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 1, None
    if getattr(text, "layer_types", None):
        text.layer_types = []
    if hasattr(config, "quantization_config"):  # of the text: towers are left as they are
        del config.quantization_config
    network, report = AutoModel.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        use_safetensors=True,
        **LOCAL,
    )
    for names, what in (
        (report["missing_keys"], "are missing"),
        ((name for name, *_ in report["mismatched_keys"]), "have other shapes than config.json says"),
    ):
        if found := sorted(name for name in names if not name.startswith(OF_TEXT)):
            raise ConfigurationError(f"tensors of the checkpoint's part for images {what}: {', '.join(found[:3])}")
    return network.eval()
