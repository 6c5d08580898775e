"""The opaque part of ContextPhaseParams: where the blocks of a prompt are, and what they were computed of.

It passes through clients, and names endpoints that ranks connect to and memory that becomes keys and values. So it is
sealed: whoever does not know the secret that the two engines share can neither make one nor change it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from array import array
from pathlib import Path

import msgspec

from inflight.context_phase import NOT_PARAMS
from inflight.errors import ConfigurationError, InvalidRequest
from inflight.executor.wire.address import user_directory
from inflight.executor.wire.block_messages import Endpoint
from inflight.request import Request

SEAL_BYTES = 32
SECRET_BYTES = 32
SECRET = "kv_transfer.key"
"""File of the user's engines that are told no other."""


class ContextState(msgspec.Struct, frozen=True, array_like=True):
    layout: bytes
    """Digest of what the blocks are, see `layout_digest`."""
    prompt: bytes
    """Of the tokens that they are of, see `prompt_digest`."""
    adapter: bytes
    """LoadedAdapter.digest of the adapter that they went through; empty = none."""
    num_tokens: int
    key: bytes
    """Under which each rank keeps its part."""
    machine: str
    """Of the ranks, see `distributed.sockets.machine`."""
    endpoints: list[Endpoint]

    def seal(self, secret: bytes) -> bytes:
        packed = msgspec.msgpack.encode(self)
        return hmac.digest(secret, packed, "sha256") + packed

    @classmethod
    def unseal(cls, data: bytes, secret: bytes) -> ContextState:
        """Raises InvalidRequest if it was not sealed with this secret, or by another version of inflight."""
        seal, packed = data[:SEAL_BYTES], data[SEAL_BYTES:]
        if not hmac.compare_digest(seal, hmac.digest(secret, packed, "sha256")):
            raise InvalidRequest(
                f"{NOT_PARAMS}, by an engine of this user or with the same kv_transfer_key_file as this one"
            )
        try:
            return msgspec.msgpack.decode(packed, type=cls)
        except msgspec.DecodeError:
            raise InvalidRequest(f"{NOT_PARAMS}, by this version of inflight") from None


def prompt_digest(request: Request) -> bytes:
    """Of all that its keys and values depend on besides the network and its adapter, and of who may share them."""
    plain = msgspec.structs.replace(request, loaded_adapter=None)
    return hashlib.blake2b(array("q", request.input_token_ids).tobytes(), key=_short(plain.prefix_identity)).digest()


def _short(identity: bytes) -> bytes:
    return hashlib.blake2b(identity, digest_size=16).digest()


def layout_digest(*parts: object) -> bytes:
    """Of what must be equal on both engines for one's blocks to be the other's."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


def read_secret(key_file: str) -> bytes:
    """The secret in this file, or in that of this user's engines. Raises ConfigurationError."""
    path = Path(key_file) if key_file else users_key_file()
    try:
        secret, mode = path.read_bytes(), path.stat().st_mode
    except OSError as error:
        raise ConfigurationError(f"kv_transfer_key_file {path} cannot be read: {error.strerror}") from None
    if len(secret) < SECRET_BYTES or mode & 0o077:
        raise ConfigurationError(
            f"kv_transfer_key_file {path} must hold {SECRET_BYTES} random bytes or more, and be readable by its "
            "owner alone: `head -c 32 /dev/urandom > FILE; chmod 600 FILE`"
        )
    return secret


def users_key_file() -> Path:
    """That of this user's engines on this machine, which the first of them makes. Raises ConfigurationError."""
    path = user_directory() / SECRET
    if not path.exists():
        draft = path.with_name(f".{os.getpid()}.{SECRET}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(os.urandom(SECRET_BYTES))
        try:
            os.link(draft, path)
        except FileExistsError:
            pass  # another engine was first
        finally:
            draft.unlink()
    return path
