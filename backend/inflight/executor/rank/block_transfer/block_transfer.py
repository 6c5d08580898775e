"""A rank's part in handing contexts over: what it has for others, what it gets from them, and the leader's orders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from inflight.config import EngineConfig
from inflight.distributed.host_address import address_of
from inflight.distributed.sockets import CurveKeys
from inflight.errors import ConfigurationError
from inflight.executor.rank.block_transfer.receiver import BlockReceiver
from inflight.executor.rank.block_transfer.sender import BlockSender
from inflight.executor.wire.block_messages import BlockOrders

if TYPE_CHECKING:
    from inflight.runtime.prompt_blocks import PromptBlocks

REPORTS = "kv.reports"
"""Socket in the launch's folder."""


class BlockTransfer:
    def __init__(
        self, config: EngineConfig, blocks: PromptBlocks, folder: Path, secret: bytes, *, rank: int, num_ranks: int
    ) -> None:
        """`folder`: of the launch, private, the same for all `num_ranks` ranks of the engine. Raises
        ConfigurationError."""
        self._blocks = blocks
        reports = reports_endpoint(folder)
        keys, timeout_ms = CurveKeys(secret.hex()), config.kv_transfer_timeout_ms
        address = ""
        if config.kv_transfer_interface:
            address = address_of(config.kv_transfer_interface)
            if not address:
                raise ConfigurationError(
                    f"kv_transfer_interface {config.kv_transfer_interface} has no IPv4 address here: name another "
                    "network interface"
                )
        self._receiver = BlockReceiver(blocks, rank=rank, reports=reports, keys=keys, timeout_ms=timeout_ms)
        self._sender = BlockSender(
            blocks,
            folder / f"kv.{rank}",
            address=address,
            keys=keys,
            timeout_ms=timeout_ms,
            is_alone=num_ranks == 1,
        )
        self._receiver.introduce(self._sender.endpoint)

    def follow(self, orders: BlockOrders) -> None:
        """Called by the worker loop."""
        for request_id in orders.drops:
            self._receiver.drop(request_id)
        for fetch in orders.fetches:
            self._receiver.begin(fetch)

    def forget(self, request_id: int) -> None:
        """The request is over."""
        self._receiver.drop(request_id)

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()
        self._blocks.close()


def reports_endpoint(folder: Path) -> str:
    """Where the leader of a launch is told what its ranks have fetched."""
    return f"ipc://{folder / REPORTS}"
