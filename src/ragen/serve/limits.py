"""What a client may do: who may send requests, how large they are, how long a connection stays silent; and its errors.

    Middleware(Access, host="127.0.0.1", key="", allowed_hosts=())
    content = await read_body(request)                   # raises ApiError: 413 too large, 408 too slow, 415 not JSON

A web page can point its own domain name at 127.0.0.1 and let the browser talk to this server (DNS rebinding). The Host
header then still carries that name, so only known names are answered. A server beyond loopback that requires a key does
not check this: the page does not have the key.
"""

import asyncio
import secrets
from collections.abc import Sequence
from urllib.parse import urlsplit

import h11
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ragen.serve import address_of, is_loopback

EVERY_ADDRESS = ("", "0.0.0.0", "::")
OPEN_PATHS = ("/health",)  # without a key
MAX_BODY_BYTES = 32_000_000
BODY_TIMEOUT_S = 600
IDLE_TIMEOUT_S = 600  # between requests, and within the head of one
SHUTDOWN_TIMEOUT_S = 5  # to send the last answers


class ApiError(Exception):
    """An OpenAI error object with its HTTP status."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, {"WWW-Authenticate": "Bearer"} if self.status == 401 else None)


class Access:
    """Answers 403 to an unknown Host and 401 without the key; passes every other request on."""

    def __init__(self, app: ASGIApp, host: str, key: str = "", allowed_hosts: Sequence[str] = ()):
        self.app, self.host, self.key = app, host, key
        self.allowed = {name.lower() for name in (host, *allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["path"] = scope["path"].rstrip("/") or "/"
        error = self._refusal(Headers(scope=scope), scope["path"])
        await (error.response() if error else self.app)(scope, receive, send)

    def _refusal(self, headers: Headers, path: str) -> ApiError | None:
        if not ((self.key and not is_loopback(self.host)) or self._knows(headers.get("host", self.host))):
            message = "this Host is not served here: start the server with --allowed-host NAME to allow it"
            return ApiError(message, code="host_not_allowed", status=403)
        given = headers.get("authorization", "").encode("latin-1")
        if self.key and path not in OPEN_PATHS and not secrets.compare_digest(given, f"Bearer {self.key}".encode()):
            return ApiError("the API key is missing or wrong: Authorization: Bearer KEY", None, "invalid_api_key", 401)
        return None

    def _knows(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        # A server on every address answers to each of them: a rebinding page has a name, never an address.
        is_own_address = self.host in EVERY_ADDRESS and address_of(name) is not None
        return is_own_address or is_loopback(name) or name in self.allowed


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
