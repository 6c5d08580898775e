"""The models of the server as OpenAI's API lists them, and the adapters that clients load, as vLLM has them."""

from __future__ import annotations

import os
from typing import Any

from starlette.types import Receive, Scope, Send

from inflight.http.api_error import APIError, of_response
from inflight.http.dialects.body import decode_body
from inflight.http.dialects.openai.fields import LoadAdapterBody, UnloadAdapterBody
from inflight.http.dispatcher import Mailbox
from inflight.http.endpoint import Handler, read_only, send_bytes, send_json
from inflight.http.service import Service
from inflight.lora import LoRARequest
from inflight.request import Request


class ModelsApi:
    def __init__(self, service: Service, *, allows_lora_updates: bool) -> None:
        self._service = service
        self._allows_lora_updates = allows_lora_updates

    def paths(self) -> dict[str, dict[str, Handler]]:
        return {
            "/v1/models": read_only(self._models),
            "/v1/models/{id:path}": read_only(self._model),
            "/v1/load_lora_adapter": {"POST": self._load_adapter},
            "/v1/unload_lora_adapter": {"POST": self._unload_adapter},
        }

    async def _models(self, scope: Scope, receive: Receive, send: Send) -> int:
        self._service.guard.check_key(scope)
        return await send_json(send, {"object": "list", "data": self._cards()})

    async def _model(self, scope: Scope, receive: Receive, send: Send) -> int:
        self._service.guard.check_key(scope)
        wanted = scope["path_params"]["id"]
        name, _ = (self._service.find(wanted) or self._service).names.find(wanted)
        return await send_json(send, next(card for card in self._cards() if card["id"] == name))

    def _cards(self) -> list[dict[str, Any]]:
        return [card for each in self._service.every for card in each.names.cards(each.max_model_len, each.pools)]

    async def _load_adapter(self, scope: Scope, receive: Receive, send: Send) -> int:
        guard, names = self._service.guard, self._service.names
        with guard.admitted(scope):
            self._check_lora_updates()
            body = decode_body(await guard.read_body(scope, receive), LoadAdapterBody)
            adapter = LoRARequest(body.lora_name, 0, body.lora_path)
            replaces = bool(body.load_inplace) and names.is_loaded(body.lora_name)
            if not replaces:
                names.check_free(body.lora_name)
            if not os.path.isdir(body.lora_path):  # unlike Path.is_dir, false for a path that is too long
                raise APIError(404, "lora_path is no folder of this machine", param="lora_path")
            if replaces:
                await self._order(LoRARequest(body.lora_name), "unload")
            await self._order(adapter, "load")
            names.add(adapter)
            text = f"Success: LoRA adapter '{body.lora_name}' added successfully."
            return await send_bytes(send, text.encode(), "text/plain; charset=utf-8")

    async def _unload_adapter(self, scope: Scope, receive: Receive, send: Send) -> int:
        guard, names = self._service.guard, self._service.names
        with guard.admitted(scope):
            self._check_lora_updates()
            body = decode_body(await guard.read_body(scope, receive), UnloadAdapterBody)
            if not names.is_loaded(body.lora_name):
                raise APIError(404, "no adapter of this name was loaded here", param="lora_name")
            names.remove(body.lora_name)
            await self._order(LoRARequest(body.lora_name), "unload")
            text = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
            return await send_bytes(send, text.encode(), "text/plain; charset=utf-8")

    def _check_lora_updates(self) -> None:
        if not self._allows_lora_updates:
            raise APIError(403, "the operator of this server does not allow to load or unload adapters")

    async def _order(self, adapter: LoRARequest, order: str) -> None:
        """Wait until the engine has loaded or forgotten an adapter. Raises APIError; it is no error to forget one that
        the engine has dropped already."""
        kind: Any = order
        request = Request(input_token_ids=[], max_tokens=1, lora_request=adapter, lora_order=kind)
        mailbox = Mailbox(self._service.dispatcher, tenant=0)
        try:
            mailbox.send([request])
            (response,) = await mailbox.take()
        finally:
            mailbox.close()
        if response.result is None and order == "load":
            raise of_response(response)
