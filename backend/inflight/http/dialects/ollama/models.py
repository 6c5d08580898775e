"""The models of the server as Ollama's API lists and describes them, and the version of that API."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone
from typing import Any

from starlette.types import Receive, Scope, Send

from inflight.http.api_error import APIError, invalid
from inflight.http.dialects.body import decode_body
from inflight.http.dialects.ollama.fields import ShowBody
from inflight.http.endpoint import Handler, read_only, send_json
from inflight.http.service import Service
from inflight.lora import LoRARequest
from inflight.scheduler_output import HIDDEN_STATES
from inflight.text.safe_text import safe_text

API_VERSION = "0.12.11"
"""Of Ollama, the one that brought the last field that is known here, logprobs. Clients compare it with the version that
brought what they need, and read it as three numbers."""
LATEST = ":latest"
"""The tag that clients add to names without one."""
NEVER = "2200-01-01T00:00:00Z"
"""When a model is unloaded that stays. Ollama's own programs take a time that is far away for never, and none for the
past."""
OF_CONFIG = {
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
"""GGUF's name of a size -> that of config.json."""
OF_DEFAULTS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repeat_penalty": "repetition_penalty",
}
"""Option -> what GenerationDefaults calls it."""


class OllamaModels:
    def __init__(self, service: Service) -> None:
        self._service = service

    def paths(self) -> dict[str, dict[str, Handler]]:
        return {
            "/api/tags": read_only(self._tags),
            "/api/ps": read_only(self._ps),
            "/api/show": {"POST": self._show},
            "/api/version": read_only(self._version),
        }

    def find(self, name: str) -> tuple[str, LoRARequest | None]:
        """See ModelNames.find. Raises APIError in Ollama's words, which its clients search for."""
        try:
            return self._service.names.find(name.removesuffix(LATEST))
        except APIError as error:
            instead = self._service.names.instead
            raise APIError(error.status, f"model '{safe_text(name)}' not found{instead}") from None

    async def _tags(self, scope: Scope, receive: Receive, send: Send) -> int:
        self._service.guard.check_key(scope)
        return await send_json(send, {"models": [entry for each in self._every() for entry in await each.entries()]})

    async def _ps(self, scope: Scope, receive: Receive, send: Send) -> int:
        self._service.guard.check_key(scope)
        return await send_json(send, {"models": [entry for each in self._every() for entry in await each.running()]})

    async def _show(self, scope: Scope, receive: Receive, send: Send) -> int:
        service = self._service
        with service.guard.admitted(scope):
            body = decode_body(await service.guard.read_body(scope, receive), ShowBody)
            asked = body.model or body.name
            if not asked:
                raise invalid("model is required", "model")
            name, _ = self.find(asked)
            card = next(card for card in self._cards() if card["id"] == name)
            return await send_json(
                send,
                {
                    "parameters": self._parameters(),
                    "template": service.served.chats.template,
                    "details": self._details(card),
                    "model_info": self._model_info(card),
                    "capabilities": self._capabilities(),
                    "modified_at": _modified_at(card),
                },
            )

    async def _version(self, scope: Scope, receive: Receive, send: Send) -> int:
        self._service.guard.check_key(scope)
        return await send_json(send, {"version": API_VERSION})

    # -- what is known of a model --------------------------------------------------------------------------------------

    def _every(self) -> list[OllamaModels]:
        """This, and those of the server's other models."""
        return [OllamaModels(service) for service in self._service.every]

    async def entries(self) -> list[dict[str, Any]]:
        """One for each name of the model, and for each adapter."""
        digest = await self._digest()
        return [{**self._entry(card, digest), "modified_at": _modified_at(card)} for card in self._cards()]

    async def running(self) -> list[dict[str, Any]]:
        """The names of the engine's own model while it serves: which adapters are loaded, the ranks alone know."""
        service = self._service
        if not service.front.is_ready():
            return []
        digest = await self._digest()
        of_gpu = service.checkpoint.num_bytes if service.front.description.device == "cuda" else 0
        return [
            {
                **self._entry(card, digest),
                "expires_at": _expires_at(service.engine.seconds_left()),
                "size_vram": of_gpu,
                "context_length": self._context_length(),
            }
            for card in self._cards()
            if card["parent"] is None
        ]

    def _cards(self) -> list[dict[str, Any]]:
        return self._service.names.cards(self._service.max_model_len)

    async def _digest(self) -> str:
        """Of the checkpoint, and of how it is computed: Ollama's programs need one. It is the system_fingerprint."""
        # The first one reads the ends of all files.
        fingerprint = await self._service.threads.run(0, self._service.fingerprint)
        return fingerprint.removeprefix("fp_")

    def _entry(self, card: dict[str, Any], digest: str) -> dict[str, Any]:
        return {
            "name": card["id"],
            "model": card["id"],
            "size": self._service.checkpoint.num_bytes,
            "digest": digest,
            "details": self._details(card),
        }

    def _details(self, card: dict[str, Any]) -> dict[str, Any]:
        checkpoint = self._service.checkpoint
        return {
            "parent_model": card["parent"] or "",
            "format": "gguf" if checkpoint.is_gguf else "safetensors",
            "family": self._family(),
            "families": [self._family()],
            "parameter_size": "" if checkpoint.num_parameters is None else as_size(checkpoint.num_parameters),
            "quantization_level": self._service.front.description.weight_dtype,
        }

    def _family(self) -> str:
        return self._service.checkpoint.model_type or self._service.front.description.architecture

    def _context_length(self) -> int | None:
        """That of an engine that has not been loaded yet is the checkpoint's; None = it does not say."""
        limits = self._service.known_limits
        if limits is None:
            return self._service.checkpoint.size("max_position_embeddings")
        return limits.max_input_len if limits.pooled else limits.max_seq_len

    def _model_info(self, card: dict[str, Any]) -> dict[str, Any]:
        """With GGUF's names. The context is that of this server, which may be shorter than the checkpoint's."""
        family, limits, checkpoint = self._family(), self._service.known_limits, self._service.checkpoint
        sizes = {
            "context_length": self._context_length(),
            "embedding_length": (limits and limits.hidden_size) or checkpoint.size("hidden_size"),
            "vocab_size": checkpoint.size("vocab_size") if limits is None else limits.vocab_size,
            **{name: checkpoint.size(theirs) for name, theirs in OF_CONFIG.items()},
        }
        known = {f"{family}.{name}": size for name, size in sizes.items() if size is not None}
        if checkpoint.num_parameters is not None:
            known["general.parameter_count"] = checkpoint.num_parameters
        return {"general.architecture": family, "general.basename": card["root"], **known}

    def _parameters(self) -> str:
        """A line for each option: what requests have that do not say it."""
        defaults = self._service.front.generation_defaults
        values = {name: getattr(defaults, ours) for name, ours in OF_DEFAULTS.items()}
        lines = {"num_ctx": self._context_length(), **values}
        return "\n".join(f"{name:30} {value}" for name, value in lines.items() if value is not None)

    def _capabilities(self) -> list[str]:
        """Of a network that writes text, embedding only if its checkpoint is made for vectors: clients take a model
        with it for one of embeddings."""
        service = self._service
        limits, chats, writes = service.known_limits, service.served.chats, not service.pools
        makes_vectors = limits is None or HIDDEN_STATES in limits.model_outputs
        has = {
            "completion": writes,
            "embedding": makes_vectors and (not writes or service.checkpoint.is_for_vectors),
            "tools": writes and chats.reads_calls,
            "thinking": writes and chats.splits_reasoning,
        }
        return [name for name, is_so in has.items() if is_so]


def _expires_at(seconds: float) -> str:
    if seconds == math.inf:
        return NEVER
    return (datetime.now(timezone.utc) + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


def _modified_at(card: dict[str, Any]) -> str:
    return datetime.fromtimestamp(card["created"], timezone.utc).isoformat().replace("+00:00", "Z")


def as_size(count: int) -> str:
    """As Ollama writes numbers of parameters: 7.6B, 22.57M, 137K, 12."""
    for unit, letter, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if count >= unit:
            return f"{count / unit:.{0 if count % unit == 0 else digits}f}{letter}"
    return str(count)
