"""Pictures in a conversation: parts of messages, and what stands for them in the prompt.

The chat template writes a placeholder for each; it becomes the text that the checkpoint's processor puts there, and its
tokens become ids beyond the vocabulary, which are rows of the request's own embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from inflight.asking.refusal import Kind, Refusal
from inflight.config import EngineConfig
from inflight.errors import InvalidRequest
from inflight.prompt_tuning import EmbeddingTable, EmbeddingType, PromptTuningConfig
from inflight.request_limits import RequestLimits
from inflight.text.safe_text import safe_text
from inflight.text.tokenizer import Tokenizer
from inflight.vision.families import TEXT_ALONE, why_text_alone
from inflight.vision.messages import Settings
from inflight.vision.seen import Picture, Unreadable
from inflight.vision.vision import Vision

IMAGE, FILE = "image", "file"
"""Type of a part that is a picture, and the key under which the part has its file."""
Messages = list[dict[str, Any]]


def image_part(data: bytes) -> dict[str, Any]:
    """`data`: a file."""
    return {"type": IMAGE, FILE: data}


def files_in(messages: Messages) -> list[bytes]:
    """Of all pictures, in their order."""
    return [
        part[FILE]
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == IMAGE
    ]


def without_files(messages: Messages) -> Messages:
    """As chat templates take them."""
    return [
        {**message, "content": [{"type": IMAGE} if part["type"] == IMAGE else part for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


class Images:
    """How one model reads pictures. Safe to use from several threads."""

    def __init__(
        self,
        vision: Vision | None,
        tokenizer: Tokenizer,
        *,
        why_none: str = TEXT_ALONE,
        dtype: Callable[[], EmbeddingType] = lambda: "float32",
        max_images: int = 0,
        max_image_bytes: int = 0,
    ) -> None:
        """`vision`: None = no pictures are read, `why_none` is the sentence about it. `dtype`: tells that of the
        engine's rows. The bounds: of the pictures of one prompt, and of each one's file."""
        self._vision = vision
        self._tokenizer = tokenizer
        self._why_none = why_none
        self._dtype = dtype
        self._max_images, self._max_image_bytes = max_images, max_image_bytes

    @classmethod
    def of(cls, config: EngineConfig, tokenizer: Tokenizer, dtype: Callable[[], EmbeddingType]) -> Images:
        """As the configuration and the checkpoint's files say. To be closed."""
        why_none = why_text_alone(Path(config.gpt_model_path)) if config.max_images else TEXT_ALONE
        settings = Settings(
            folder=config.gpt_model_path,
            max_pixels=config.max_image_pixels,
            max_seconds=config.image_timeout_ms / 1000,
        )
        return cls(
            None if why_none else Vision(settings, config.max_image_cache_bytes),
            tokenizer,
            why_none=why_none,
            dtype=dtype,
            max_images=config.max_images,
            max_image_bytes=config.max_image_bytes,
        )

    def start(self) -> None:
        """Start the process that reads them now, and not with the first one."""
        if self._vision is not None:
            self._vision.start()

    def rest(self) -> None:
        """End that process until there is another picture."""
        if self._vision is not None:
            self._vision.rest()

    def close(self) -> None:
        if self._vision is not None:
            self._vision.close()

    def seen(self, files: Sequence[bytes], limits: RequestLimits) -> list[Picture]:
        """Raises Refusal, and Unseen if they have to be seen first."""
        vision = self._vision
        if vision is None:
            raise not_read(self._why_none)
        if vision.why_none:
            raise not_read(f"{TEXT_ALONE}: {vision.why_none}")
        if not limits.embedding_size:
            raise not_read("this engine takes no embeddings, which images become")
        if len(files) > self._max_images:
            sentence = "{0} holds {count} images, more than max_images {most}"
            raise Refusal("prompt", sentence, count=len(files), most=self._max_images)
        for number, data in enumerate(files, 1):
            if len(data) > self._max_image_bytes:
                sentence = "image {number} of {0} has {count} bytes, more than max_image_bytes {most}"
                most = self._max_image_bytes
                raise Refusal("prompt", sentence, kind=Kind.TOO_LARGE, number=number, count=len(data), most=most)
        pictures = []
        for number, seen in enumerate(vision.find(files, self._dtype()), 1):
            if isinstance(seen, Unreadable):
                raise Refusal("prompt", "image {number} of {0} {why}", number=number, why=safe_text(seen.why))
            pictures.append(seen)
        num_bytes = sum(len(picture.rows.data) for picture in pictures)
        if num_bytes > limits.max_prompt_embedding_bytes:
            raise Refusal(
                "prompt",
                "the images of {0} take {count} bytes as embeddings, more than max_prompt_embedding_bytes {most}: give "
                "fewer or smaller ones",
                count=num_bytes,
                most=limits.max_prompt_embedding_bytes,
            )
        return pictures

    def written(self, text: str, pictures: Sequence[Picture]) -> str:
        """`text`: what the chat template makes of a conversation with these pictures. Raises Refusal."""
        pieces = text.split(self._placeholder)
        if len(pieces) != len(pictures) + 1:
            raise Refusal(
                "prompt",
                "the chat template writes {token} {count} times for {images} images: it takes images elsewhere, or a "
                "text holds {token}",
                token=safe_text(self._placeholder),
                count=len(pieces) - 1,
                images=len(pictures),
            )
        written = [pieces[0]]
        for picture, piece in zip(pictures, pieces[1:], strict=True):
            written += (picture.text, piece)
        return "".join(written)

    def with_rows(
        self, token_ids: list[int], pictures: Sequence[Picture], limits: RequestLimits
    ) -> tuple[list[int], PromptTuningConfig]:
        """`token_ids`: of what `written` returns. Raises InvalidRequest."""
        placeholder = self._tokenizer.encode_plain(self._placeholder)
        places = [place for place, token in enumerate(token_ids) if [token] == placeholder]
        table = joined([picture.rows for picture in pictures])
        if len(places) != table.num_rows:
            raise InvalidRequest(
                f"the prompt has {len(places)} tokens for {table.num_rows} rows of its images: the checkpoint's "
                "tokenizer and its processor do not fit each other"
            )
        own = [*token_ids]
        for row, place in enumerate(places):
            own[place] = limits.vocab_size + row
        return own, PromptTuningConfig(embedding_table=table)

    @property
    def _placeholder(self) -> str:
        assert self._vision is not None
        return self._vision.image_token


def joined(tables: Sequence[EmbeddingTable]) -> EmbeddingTable:
    """One below the other: all have the same type and features."""
    if len(tables) == 1:
        return tables[0]
    return EmbeddingTable(
        dtype=tables[0].dtype,
        shape=(sum(table.num_rows for table in tables), tables[0].shape[1]),
        data=b"".join(table.data for table in tables),
    )


def not_read(why: str) -> Refusal:
    """Of a conversation with pictures that this model never reads. `why`: a sentence."""
    return Refusal("prompt", "{0} holds an image: {why}", kind=Kind.UNSUPPORTED, why=why)
