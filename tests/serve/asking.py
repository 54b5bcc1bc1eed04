"""What a client sends to the server, and what it reads.

answer = ask(server, temperature=0)
"""

import json
import socket
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

SYSTEM = "Sokoban. Actions: Up, Down, Left, Right. Up to 2 a turn: <think></think><answer>action || action</answer>"
USER = "turn 1/5\n######\n#__O_#\n#_X__#\n#P___#\n#____#\n######\n10 left"
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}]
OPENED = [*MESSAGES, {"role": "assistant", "content": "<think>"}]
ENDLESS = {  # a reply that only its limit ends
    "model": "pocket",
    "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}],
    "max_tokens": 2000,
    "temperature": 0,
}


def post(server, path="/chat/completions", kind="application/json", **body):
    request = urllib.request.Request(server.base + path, json.dumps(body).encode(), {"Content-Type": kind})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def ask(server, **body):
    status, content = post(server, **{"model": "pocket", "messages": OPENED, "max_tokens": 24, "seed": 3} | body)
    assert status == 200, content
    return json.loads(content)


def error_of(server, **body):
    status, content = post(server, **{"model": "pocket", "messages": OPENED, "max_tokens": 24} | body)
    return status, json.loads(content)["error"]


def user_says(content):
    return {"messages": [{"role": "user", "content": content}]}


def text(answer, index=0):
    return answer["choices"][index]["message"]["content"]


def stream(server, **body):
    status, content = post(
        server, **{"model": "pocket", "messages": OPENED, "max_tokens": 24, "seed": 3, "stream": True} | body
    )
    assert status == 200
    events = [part.removeprefix("data: ") for part in content.decode().split("\n\n") if part]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def port_of(server):
    return int(server.base.rsplit(":", 1)[1].removesuffix("/v1"))


def raw(server, request):
    """The whole answer to these bytes, on a connection of their own."""
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=60) as connection:
        connection.sendall(request)
        return connection.makefile("rb").read().decode()


@contextmanager
def sent(server, **body):
    """A connection on which this was asked."""
    content = json.dumps(ENDLESS | body).encode()
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=60) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
        yield connection


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
