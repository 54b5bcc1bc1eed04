"""Who may send requests: the Host header and the API key.

    Middleware(Access, host="127.0.0.1", key="", allowed_hosts=())

A web page can point its own domain name at 127.0.0.1 and let the browser talk to this server (DNS rebinding). The Host
header then still carries that name, so only known names are answered. A server beyond loopback that requires a key does
not check this: the page does not have the key.
"""

import secrets
from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ragen.serve.errors import ApiError

EVERY_ADDRESS = ("", "0.0.0.0", "::")
OPEN_PATHS = ("/health",)  # without a key


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
        is_own_address = self.host in EVERY_ADDRESS and _address(name) is not None
        return is_own_address or is_loopback(name) or name in self.allowed


def is_loopback(name: str) -> bool:
    """Whether a host name or address means this machine alone."""
    address = _address(name)
    return address.is_loopback if address else name == "localhost" or name.endswith(".localhost")


def _address(name: str):
    try:
        return ip_address(name)
    except ValueError:
        return None
