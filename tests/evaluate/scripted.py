"""Servers that answer as a test says.

with scripted_server(lambda body: (200, reply("Up"))) as server:
    server.base, server.bodies
with raw_server(lambda send: send(b"HTTP/1.1 100 Continue\\r\\n\\r\\n")) as base: …
"""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Scripted:
    """An OpenAI-like server: `answer(body)` gives a status (0: none at all), a JSON body or its bytes, and headers."""

    def __init__(self, answer, port=0):
        self.answer, self.bodies, self.headers = answer, [], []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                outer.headers.append(dict(self.headers))
                status, content, *headers = outer.answer(body)
                if status == 0:  # killed: the connection ends without a word
                    return
                parts = content if isinstance(content, Iterator) else [json.dumps(content).encode()]
                self.send_response(status)
                for name, value in (headers[0] if headers else {}).items():
                    self.send_header(name, value)
                self.end_headers()
                try:
                    for part in parts:
                        self.wfile.write(part)
                except OSError:  # nobody listens any more
                    pass

            def log_message(self, *args):
                pass

        self.web = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.base = f"http://127.0.0.1:{self.web.server_address[1]}/v1"


@contextmanager
def scripted_server(answer, port=0):
    server = Scripted(answer, port)
    thread = threading.Thread(target=server.web.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.web.shutdown()
        server.web.server_close()


@contextmanager
def raw_server(answer):
    """Reads a request and then calls `answer(send)`, where `send` takes bytes and fails once the client has left."""

    def serve(connection):
        with connection, suppress(OSError):  # the client has left
            connection.recv(1 << 16)
            answer(connection.sendall)

    def accept():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        listener.shutdown(socket.SHUT_RDWR)


def reply(text, finish="stop", usage=(20, 5), **more):
    """The body of an ordinary answer."""
    counts = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish} | more
    return {"choices": [choice], "usage": counts}
