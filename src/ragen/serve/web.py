"""HTTP for one model: `/v1/chat/completions` (whole or as a stream), `/v1/models`, `/v1/models/NAME`, `/health`.

with Server(loaded, "pocket", "127.0.0.1", 8000) as server:
    server.base                                        # http://127.0.0.1:8000/v1
"""

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ragen.errors import ConfigError
from ragen.evaluate.models import max_positions
from ragen.model.load import LoadedModel
from ragen.serve import base_of
from ragen.serve.chat import Renderer, SharedTokenizer
from ragen.serve.completion import Completion
from ragen.serve.engine import Batcher, Reply, StreamingEngine
from ragen.serve.limits import IDLE_TIMEOUT_S, SHUTDOWN_TIMEOUT_S, Access, ApiError, Protocol, read_body
from ragen.serve.request import ChatRequest, read_request

DEFAULT_CONTEXT = 4096  # tokens, for a model whose configuration does not state its context
EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
UVICORN: dict[str, Any] = {
    **{"http": Protocol, "ws": "none", "loop": "asyncio", "lifespan": "off", "proxy_headers": False},
    **{"log_config": None, "log_level": "error", "access_log": False, "server_header": False},
    **{"timeout_keep_alive": IDLE_TIMEOUT_S, "timeout_graceful_shutdown": SHUTDOWN_TIMEOUT_S},
}


class Server:
    """Serves in a thread while the `with` block runs."""

    def __init__(
        self,
        loaded: LoadedModel,
        name: str,
        host: str = "127.0.0.1",
        port: int = 0,
        max_model_len: int | None = None,
        key: str = "",
        allowed_hosts: Sequence[str] = (),
    ):
        self.name, self.names = name, {name, loaded.source.name}
        self.renderer = Renderer(SharedTokenizer(loaded.tokenizer))
        self.limit = max_model_len or max_positions(loaded.source.model_folder) or DEFAULT_CONTEXT
        self.batcher = Batcher(StreamingEngine(loaded.model, loaded.tokenizer, self.renderer.chat.end_of_turn_id))
        self.model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "ragen"}
        self.model["max_model_len"] = self.limit
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            reason = (error.strerror or str(error)).partition(" (while ")[0]
            raise ConfigError(f"--port {port}: cannot listen on {host}:{port}: {reason}") from error
        self.base = base_of(host, self._socket.getsockname()[1])
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", lambda request: JSONResponse({"object": "list", "data": [self.model]})),
                Route("/v1/models/{name:path}", self._model),
                Route("/health", lambda request: JSONResponse({"status": "ok"})),
            ],
            middleware=[Middleware(Access, host=host, key=key, allowed_hosts=allowed_hosts)],
            exception_handlers={
                ApiError: lambda request, error: error.response(),
                HTTPException: _no_route,
                ClientDisconnect: lambda request, error: Response(status_code=499),  # nobody reads it
                Exception: lambda request, error: _failure(error).response(),  # uvicorn logs the traceback
            },
        )
        app.router.redirect_slashes = False
        self._uvicorn = uvicorn.Server(uvicorn.Config(app, **UVICORN))
        self._thread = threading.Thread(target=self._uvicorn.run, args=([self._socket],), name="web", daemon=True)

    def __enter__(self) -> "Server":
        self.batcher.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Unfinished requests are answered with 503 before the connections close."""
        self.batcher.__exit__()
        self._uvicorn.should_exit = True
        self._thread.join()

    def wait(self) -> None:
        """Until interrupted."""
        while self._thread.is_alive():
            time.sleep(0.5)  # after an interrupted `join`, Python takes the thread for ended

    def read(self, content: bytes) -> tuple[ChatRequest, tuple[int, ...]]:
        """A request and the tokens of its prompt. Raises `ApiError`."""
        request = read_request(content)
        self._check_name(request.model)
        num_wanted = request.max_tokens or 1
        num_tokens = self.renderer.min_tokens(request.messages)
        ids: tuple[int, ...] = ()
        if num_tokens + num_wanted <= self.limit:
            ids = tuple(self.renderer.ids(request.messages))
            num_tokens = len(ids)
        if num_tokens + num_wanted > self.limit:
            message = (
                f"the prompt has {'' if ids else 'at least '}{num_tokens} tokens, and with the {num_wanted} of the "
                f"reply that is more than this model's context of {self.limit}"
            )
            raise ApiError(message, "messages", "context_length_exceeded")
        return request, ids

    async def _chat(self, http: Request) -> Response:
        request, ids = await run_in_threadpool(self.read, await read_body(http))
        max_tokens = request.max_tokens or self.limit - len(ids)
        replies = [Reply(ids, key, max_tokens, request.stop, self.renderer.tokenizer) for key in request.draw_keys()]
        self.batcher.submit(replies, request.sampling())
        completion = Completion(self.name, self.renderer, request, replies)
        if request.stream:
            end = BackgroundTask(completion.cancel)  # also when the client leaves
            return StreamingResponse(_events(completion), headers=EVENTS, background=end)
        whole, left = asyncio.create_task(completion.whole()), asyncio.create_task(_client_leaves(http))
        try:
            await asyncio.wait((whole, left), return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                raise ClientDisconnect
            return JSONResponse(whole.result())
        finally:
            completion.cancel()
            whole.cancel()
            left.cancel()

    async def _model(self, http: Request) -> Response:
        self._check_name(http.path_params["name"])
        return JSONResponse(self.model)

    def _check_name(self, name: str) -> None:
        if name not in self.names:
            message = f"model {name!r} not found; this server has {self.name!r}"
            raise ApiError(message, "model", "model_not_found", 404)


async def _events(completion: Completion) -> AsyncIterator[str]:
    try:
        async for chunk in completion.chunks():
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"
    except ApiError as error:  # too late for a status
        yield f"data: {json.dumps(error.body)}\n\n"
    except Exception as error:
        logging.getLogger(__name__).exception("a stream failed")
        yield f"data: {json.dumps(_failure(error).body)}\n\n"


async def _client_leaves(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _no_route(http: Request, error: Exception) -> Response:
    known = "POST /v1/chat/completions, GET /v1/models, GET /health"
    return ApiError(f"{http.method} {http.url.path}: there is only {known}", None, "not_found", 404).response()


def _failure(error: Exception) -> ApiError:
    return ApiError(f"the server failed: {type(error).__name__}: {error}", status=500)
