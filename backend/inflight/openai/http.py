"""HTTP/1.1 as uvicorn speaks it, with a bound on the length of a request's head, which httptools does not have."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 65_536
"""Of the request line and all headers."""

TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedHttp(HttpToolsProtocol):
    """One connection."""

    _num_head_bytes = 0
    """Received since the last request began; 0 within a body."""
    _is_in_body = False

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_body or self.transport.is_closing():
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self.transport.write(TOO_LONG)
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._is_in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_body, self._num_head_bytes = False, 0
        super().on_message_complete()
