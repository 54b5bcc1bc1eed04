"""Who may use a server: the Host header, the API key, and the warning beyond loopback."""

import json
import sys

import pytest
from asking import port_of, raw

from ragen.cli import main
from ragen.serve import is_loopback
from ragen.serve.limits import Access
from ragen.serve.web import Server


def get(server, path="/v1/models", host="localhost", **headers):
    """The status and the error code, if any."""
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    head, _, body = raw(server, "\r\n".join([*lines, "", ""]).encode("latin-1")).partition("\r\n\r\n")
    return int(head.split()[1]), json.loads(body).get("error", {}).get("code")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "192.168.0.7", "["])
def test_a_foreign_host_is_refused(server, host):
    """A web page that points its own name here (DNS rebinding) gets nothing."""
    assert get(server, host=host.format(port=port_of(server))) == (403, "host_not_allowed")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST.", "localhost:{port}", "127.0.0.1:{port}", "[::1]:{port}"])
def test_this_machine_s_own_names_are_served(server, host):
    assert get(server, host=host.format(port=port_of(server))) == (200, None)


@pytest.mark.parametrize(("bound", "options", "host", "is_served"), [
    ("127.0.0.1", {"allowed_hosts": ["Model.lan"]}, "model.lan:8000", True),
    ("127.0.0.1", {"key": "k"}, "evil.example", False),
    ("10.0.0.5", {}, "10.0.0.5:8000", True),
    ("10.0.0.5", {}, "evil.example", False),
    ("10.0.0.5", {"key": "k"}, "evil.example", True),
    ("0.0.0.0", {}, "10.0.0.5:8000", True),
    ("0.0.0.0", {}, "evil.example", False),
    ("::", {}, "[fe80::7]:8000", True),
])  # fmt: skip
def test_hosts_beyond_loopback(bound, options, host, is_served):
    error = Access(None, bound, **options)._refusal({"host": host, "authorization": "Bearer k"}, "/v1/models")
    assert (error is None) == is_served


@pytest.mark.parametrize("name", ["localhost", "a.localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_loopback_names(name):
    assert is_loopback(name) and not is_loopback(f"x{name}x")


def test_a_required_key(loaded):
    with Server(loaded, "pocket", key="open-sesame") as server:
        assert get(server) == get(server, Authorization="Bearer wrong") == (401, "invalid_api_key")
        assert get(server, Authorization="Bearer \u00fcopen-sesame") == (401, "invalid_api_key")
        assert get(server, "/nowhere") == (401, "invalid_api_key")
        assert get(server, Authorization="Bearer open-sesame") == (200, None)
        assert get(server, "/health") == (200, None)


def test_the_key_comes_from_a_variable(monkeypatch, capsys):
    beyond = ["serve", "pocket", "--host", "0.0.0.0", "--dry-run"]
    assert main(beyond) == 0
    assert "no key is required" in capsys.readouterr().err
    for value in ("", "two words"):
        monkeypatch.setenv("SERVE_KEY", value)
        assert main([*beyond, "--api-key-env", "SERVE_KEY"]) == 2
        assert "--api-key-env SERVE_KEY" in capsys.readouterr().err
    monkeypatch.setenv("SERVE_KEY", "open-sesame")
    assert main([*beyond, "--api-key-env", "SERVE_KEY"]) == 0
    out, err = capsys.readouterr()
    assert "warning" not in err and "open-sesame" not in out + err


def test_what_the_command_is_given_reaches_the_server(loaded, monkeypatch, capsys):
    given = []

    class Watched(Server):
        def __init__(self, *args):
            super().__init__(*args)
            given.extend(args)

        def wait(self):
            raise KeyboardInterrupt

    monkeypatch.setattr("ragen.serve.web.Server", Watched)
    monkeypatch.setenv("SERVE_KEY", "open-sesame")
    words = [
        "serve",
        "pocket",
        "--port",
        "0",
        "--api-key-env",
        "SERVE_KEY",
        "--allowed-host",
        "a",
        "--allowed-host",
        "b",
    ]
    assert main(words) == 0
    assert given[-2:] == ["open-sesame", ["a", "b"]] and "open-sesame" not in capsys.readouterr().out


def test_a_dry_run_needs_no_web_packages(monkeypatch, capsys):
    for name in ("starlette", "uvicorn", "ragen.serve.limits", "ragen.serve.web"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["serve", "pocket", "--dry-run"]) == 0
    assert "would serve pocket" in capsys.readouterr().out
