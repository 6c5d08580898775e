"""One dialect on a server of several models, or of one that is loaded on demand: each request goes to the model that
it names.

Every model has its dialects, which know of no others. What has no body asks for no model: lists, which each of them
makes of all models, and responses that are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
from starlette.types import Receive, Scope, Send

from inflight.http.api_error import invalid
from inflight.http.dialects.dialect import Dialect
from inflight.http.endpoint import ErrorForm, Handler
from inflight.http.guard import Guard, held
from inflight.http.model_engine import ModelEngine
from inflight.http.service import Service


class _Named(msgspec.Struct):
    """What says in a body which model is meant."""

    model: str | None = None
    name: str | None = None
    """Of older clients of Ollama."""
    lora_name: str | None = None
    """Of an order to unload an adapter."""


class ByModel:
    def __init__(
        self, dialects: Sequence[Dialect], services: Sequence[Service], engines: Sequence[ModelEngine], guard: Guard
    ) -> None:
        """`dialects`: of one kind, one for each model; `services` and `engines`: the models'."""
        self._dialects, self._services, self._engines, self._guard = dialects, services, engines, guard

    @property
    def error_form(self) -> ErrorForm:
        return self._dialects[0].error_form

    @property
    def below(self) -> tuple[str, ...]:
        return self._dialects[0].below

    @property
    def loads_itself(self) -> frozenset[str]:
        return self._dialects[0].loads_itself

    @property
    def name_tag(self) -> str:
        return self._dialects[0].name_tag

    def paths(self) -> Mapping[str, Mapping[str, Handler]]:
        first, *others = (dialect.paths() for dialect in self._dialects)
        routed: dict[str, dict[str, Handler]] = {}
        for path, methods in first.items():
            routed[path] = dict(methods)
            if "POST" in methods:
                handlers = [each[path]["POST"] for each in (first, *others)]
                routed[path]["POST"] = partial(self._answer, handlers, path in self.loads_itself)
        return routed

    async def _answer(
        self, handlers: Sequence[Handler], loads_itself: bool, scope: Scope, receive: Receive, send: Send
    ) -> int:
        with self._guard.admitted(scope) as tenant:
            body = await self._guard.read_body(scope, receive)
            scope, index = held(scope, tenant, body), self._find(body)
            if index is None or loads_itself:
                return await handlers[index or 0](scope, receive, send)
            async with self._engines[index].in_use():
                return await handlers[index](scope, receive, send)

    def _find(self, body: bytes) -> int | None:
        """Which model a body names; None if any dialect refuses it in its words. Raises APIError."""
        try:
            named = msgspec.json.decode(body, type=_Named)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        asked = named.model or named.name
        names = [service.names for service in self._services]
        if asked:
            wanted = (asked, asked.removesuffix(self.name_tag))
            return next((index for name in wanted for index, each in enumerate(names) if each.knows(name)), None)
        if len(names) == 1:
            return 0
        for index, each in enumerate(names):
            if named.lora_name and each.is_adapter(named.lora_name):
                return index
        raise invalid(f"model is missing: name one of {', '.join(each.first for each in names)}", "model")
