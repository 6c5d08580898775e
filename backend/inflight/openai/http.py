"""HTTP/1.1 as uvicorn speaks it, with a bound on the length of a request's head, which httptools does not have."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 65_536
"""Of the request line and all headers."""

TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedHttp(HttpToolsProtocol):
    """One connection."""

    _num_head_bytes = 0
    """Received of a head that is not complete."""
    _has_more_than_head = False
    """Whether the bytes that came last belong to a body, or end a head."""
    _is_in_body = False

    def data_received(self, data: bytes) -> None:
        self._has_more_than_head = self._is_in_body
        super().data_received(data)
        self._num_head_bytes = 0 if self._has_more_than_head else self._num_head_bytes + len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(TOO_LONG)
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._is_in_body = self._has_more_than_head = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_body = False
        super().on_message_complete()
