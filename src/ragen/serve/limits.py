"""What a connection may cost: the size of a request, and how long it may stay silent.

content = await read_body(request)                   # raises ApiError: 413 too large, 408 too slow, 415 not JSON
"""

import asyncio

import h11
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from ragen.serve.errors import ApiError

MAX_BODY_BYTES = 32_000_000
BODY_TIMEOUT_S = 600
IDLE_TIMEOUT_S = 600  # between requests, and within the head of one
SHUTDOWN_TIMEOUT_S = 5  # to send the last answers
MAX_CHOICES = 128
MAX_STOPS, MAX_STOP_LENGTH = 64, 1000


async def read_body(request: Request) -> bytes:
    """The body of a JSON request. One that is too large is read to its end and dropped: the client reads no answer
    while it still sends."""
    content, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                content += part if size <= MAX_BODY_BYTES else b""
    except TimeoutError:
        raise ApiError(f"the body did not arrive within {BODY_TIMEOUT_S} s", status=408) from None
    if size > MAX_BODY_BYTES:
        raise ApiError(f"the body must have at most {MAX_BODY_BYTES} bytes", status=413)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # A web page elsewhere cannot send this type without asking first.
        raise ApiError("Content-Type must be application/json", status=415)
    return bytes(content)


class Protocol(H11Protocol):
    """HTTP/1.1. Silent connections are closed, and what is not HTTP gets a JSON error too."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._start_timer()

    def _start_timer(self) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(IDLE_TIMEOUT_S, self.timeout_keep_alive_handler)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else an answer is already being sent
            text = "not an HTTP request: check the request line, Host, Content-Length and Transfer-Encoding"
            response = ApiError(text, code="invalid_http").response()
            headers = [*response.raw_headers, (b"connection", b"close")]
            head = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()
