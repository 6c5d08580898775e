"""A conversation with a model: keeps the history, formats it with the checkpoint's chat template, streams the answers.

The template is applied here, with the tokenizer of a checkpoint folder, and token ids are sent: if text were sent, the
server would add special tokens a second time. Templates come from a local folder only, never from a server or a user.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import Unpack

from inflight_client._client import Client
from inflight_client._exceptions import ClientError
from inflight_client._types import GenerationOptions

Message = dict[str, str]
"""{"role": "system" | "user" | "assistant", "content": …}"""

_FILES_OF_A_TOKENIZER = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


class ChatTemplate(Protocol):
    """Formats a conversation as token ids that end where the assistant's answer begins."""

    def __call__(self, messages: list[Message]) -> list[int]: ...


class ChatError(ClientError):
    """This checkpoint cannot be used for a conversation."""


def load_chat_template(folder: Path) -> ChatTemplate:
    """The template of the tokenizer in `folder`. Raises ChatError with the reason."""
    if not any((folder / name).is_file() for name in _FILES_OF_A_TOKENIZER):
        raise ChatError(f"{folder} holds no tokenizer; name the checkpoint folder with --tokenizer")
    # transformers takes a second to import, and nothing else in the client needs it.
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ChatError(f"the tokenizer in {folder} cannot be loaded: {error}") from None
    if not tokenizer.chat_template:
        raise ChatError(f"the tokenizer in {folder} has no chat template; use `inflight generate` with this model")

    def lay_out(messages: list[Message]) -> list[int]:
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
        return [int(token) for token in encoded["input_ids"]]

    return lay_out


def tokenizer_folder(config: dict[str, Any]) -> Path | None:
    """Folder of a served model's tokenizer, according to the model's configuration on the server; None if that folder
    is not on this machine. A relative path starts at a folder of the server that is unknown here, so it gives None:
    another checkpoint's template would make wrong prompts without an error."""
    parameters = config.get("parameters", {})
    for key in ("tokenizer_dir", "gpt_model_path"):
        text = parameters.get(key, {}).get("string_value", "")
        if text and Path(text).is_absolute() and Path(text).is_dir():
            return Path(text)
    return None


class ChatSession:
    """The history of a conversation, and a method to continue it.

    for text in session.say("Who are you?"):
        print(text, end="")
    """

    def __init__(
        self,
        client: Client,
        template: Callable[[list[Message]], list[int]],
        *,
        system: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> None:
        self._client = client
        self._template = template
        self._options = options
        self._preamble: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = list(self._preamble)

    def say(self, text: str) -> Generator[str, None, None]:
        """Pieces of the answer. Question and answer are added to the history, the answer as far as it was read. If the
        answer fails before its first piece, nothing is added."""
        asked = [*self.messages, {"role": "user", "content": text}]
        answer: list[str] = []
        try:
            with self._client.stream(self._template(asked), **self._options) as stream:
                for chunk in stream:
                    answer.append(chunk.text)
                    yield chunk.text
        finally:
            if answer:
                self.messages = [*asked, {"role": "assistant", "content": "".join(answer)}]

    def reset(self) -> None:
        """Forget the conversation except the system message."""
        self.messages = list(self._preamble)
