"""`ragen serve`: what an OpenAI client sends, and what it gets back."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from asking import (
    ENDLESS,
    MESSAGES,
    OPENED,
    SYSTEM,
    USER,
    ask,
    error_of,
    port_of,
    post,
    raw,
    sent,
    stream,
    text,
    until,
    user_says,
)
from hypothesis import given
from hypothesis import strategies as st
from processes import started
from starlette.responses import JSONResponse

from ragen import serve as served
from ragen.agent.chat_template import ChatTemplate
from ragen.cli import main
from ragen.engine.base import Prompt, Sampled, Sampling
from ragen.engine.native.engine import EngineRun, NativeEngine
from ragen.serve.chat import Renderer, SharedTokenizer
from ragen.serve.completion import Completion, token_bytes
from ragen.serve.engine import Reply
from ragen.serve.web import Server

SOURCE = Path(__file__).parents[2] / "src"


def has_ipv6():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


# --- replies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_reply_is_what_the_native_engine_samples(server, loaded, temperature):
    class One:
        asked, sampled = False, None

        def prompt(self):
            if self.asked:
                return None
            self.asked = True
            return Prompt(tuple(chat.opening_ids(SYSTEM, USER, "<think>")), False, 3)

        def take(self, sampled):
            self.sampled = sampled

    chat, one = ChatTemplate(loaded.tokenizer), One()
    sampling = Sampling(temperature or 1.0, 1.0, -1, temperature == 0, 24, stop_at_answer=True)
    NativeEngine(loaded.model, loaded.tokenizer, chat.end_of_turn_id).run([one], sampling)
    answer = ask(
        server, temperature=temperature, logprobs=True, stop=["</answer>"], include_stop_str_in_output=True,
        add_generation_prompt=False, continue_final_message=True,
    )  # fmt: skip
    ids = one.sampled.ids[:-1] if one.sampled.stopped_by == "end_of_turn" else one.sampled.ids
    assert text(answer) == loaded.tokenizer.decode(ids)
    told = [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]
    assert told == pytest.approx(one.sampled.log_probs, abs=1e-5)
    assert answer["usage"]["completion_tokens"] == len(one.sampled.ids)
    expected = "</answer>" if one.sampled.stopped_by == "answer" else None
    assert answer["choices"][0]["stop_reason"] == expected


def test_a_seed_fixes_the_reply_and_others_differ(server):
    texts = [text(ask(server, temperature=1.5, seed=seed)) for seed in (1, 1, 2, 3, 4)]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


@pytest.mark.parametrize("stop", [None, "</answer>", ["</think>", "zzz"]])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_stream_adds_up_to_the_whole(server, stop, keeps):
    same = {"temperature": 1.0, "stop": stop, "include_stop_str_in_output": keeps, "logprobs": True}
    whole = ask(server, **same)
    chunks = stream(server, **same, stream_options={"include_usage": True})
    pieces = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert "".join(piece["delta"].get("content", "") for piece in pieces) == text(whole)
    assert len(pieces) > 3
    assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == [
        whole["choices"][0]["finish_reason"]
    ]
    assert chunks[-1]["usage"] == whole["usage"]
    logprobs = [entry for piece in pieces for entry in (piece["logprobs"] or {"content": []})["content"]]
    assert [entry["token"] for entry in logprobs] == [
        entry["token"] for entry in whole["choices"][0]["logprobs"]["content"]
    ]
    if stop and not keeps:
        assert not any(word in text(whole) for word in ([stop] if isinstance(stop, str) else stop))


class Bytes:
    """A tokenizer of these tokens; the last id ends a turn."""

    def __init__(self, tokens):
        self.tokens = [*tokens, b"<end>"]

    def decode(self, ids, skip_special_tokens=False):
        return b"".join(self.tokens[id_] for id_ in ids).decode(errors="replace")


def made_up(tokenizer, ids, stops, keeps):
    """A completion whose reply is sampled as these ids, up to where it stops."""
    reply = Reply((0,), 0, len(ids), stops, tokenizer)
    for count, id_ in enumerate(ids, 1):
        stopped_by = "end_of_turn" if id_ == len(tokenizer.tokens) - 1 else reply.ends_at(ids[:count])
        reply.heard(id_, 0.0)
        if stopped_by:
            reply.take(Sampled(tuple(ids[:count]), (0.0,) * count, stopped_by))
            break
    chat = SimpleNamespace(end_of_turn_id=len(tokenizer.tokens) - 1)
    renderer = SimpleNamespace(chat=chat, tokenizer=tokenizer, remember=lambda *args: None)
    request = SimpleNamespace(
        stop=stops, include_stop_str_in_output=keeps, logprobs=False, stream_options={}, messages=[]
    )
    return Completion("x", renderer, request, [reply])


def cut_at_stop(tokenizer, ids, stops, keeps):
    end = len(tokenizer.tokens) - 1
    for count in range(1, len(ids) + 1):
        shown = tokenizer.decode(ids[: count - 1] if ids[count - 1] == end else ids[:count])
        found = [shown.index(stop) for stop in stops if stop in shown]
        if found and ids[count - 1] != end:
            return shown if keeps else shown[: min(found)]
        if ids[count - 1] == end:
            return shown
    return shown


pieces = st.lists(st.sampled_from([b"a", b"b", b"c", b"\xc3", b"\xa9", b"\xe2", b"\xc3\xa9"]), min_size=1, max_size=9)


@given(
    st.lists(pieces.map(b"".join), min_size=1, max_size=6),
    st.lists(st.integers(0, 99), min_size=1, max_size=12),
    st.lists(st.text("abcé", min_size=1, max_size=5), max_size=3).map(tuple),
    st.booleans(),
)
def test_a_stream_adds_up_to_the_whole_for_any_tokens(tokens, numbers, stops, keeps):
    """Stop texts inside a token, over several, and one inside another; characters in parts."""
    tokenizer = Bytes(tokens)
    ids = [number % len(tokenizer.tokens) for number in numbers]

    async def both_ways():
        whole = await made_up(tokenizer, ids, stops, keeps).whole()
        return text(whole), [chunk async for chunk in made_up(tokenizer, ids, stops, keeps).chunks()]

    whole, chunks = asyncio.run(both_ways())
    assert whole == cut_at_stop(tokenizer, ids, stops, keeps)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole


def test_log_probs_are_the_model_s_own(server):
    """Whatever the temperature: here the same tokens, drawn in three ways."""
    told = []
    for way in ({"temperature": 0}, {"temperature": 0.2, "top_k": 1}, {"temperature": 3, "top_k": 1}):
        content = ask(server, logprobs=True, **way)["choices"][0]["logprobs"]["content"]
        told.append([entry["logprob"] for entry in content])
    assert told[1] == pytest.approx(told[0], abs=1e-5) and told[2] == pytest.approx(told[0], abs=1e-5)


def test_the_bytes_of_tokens_add_up_to_the_text(server):
    has_parts = False
    for seed in range(8):
        answer = ask(server, temperature=50, seed=seed, logprobs=True)
        content = answer["choices"][0]["logprobs"]["content"]
        joined = bytes(byte for entry in content for byte in entry["bytes"]).decode(errors="replace")
        assert joined.removesuffix("<|end|>") == text(answer)
        has_parts |= any("\ufffd" in entry["token"] for entry in content)
    assert has_parts


@pytest.mark.parametrize(
    ("spelt", "shown", "expected"),
    [
        ("<0xE2>", "\ufffd", [0xE2]),  # as SentencePiece spells a byte
        ("âĤ", "\ufffd", [0xE2, 0x82]),  # as a byte-level BPE does
        ("ï¿½", "\ufffd", [0xEF, 0xBF, 0xBD]),
        ("\ufffd", "\ufffd", None),
        ("é", "é", [0xC3, 0xA9]),
    ],
)
def test_the_bytes_of_a_part_of_a_character(spelt, shown, expected):
    tokenizer = SimpleNamespace(convert_ids_to_tokens=lambda id_: spelt)
    assert token_bytes(tokenizer, 0, shown) == expected


def test_the_limit_and_several_choices(server):
    answer = ask(server, max_tokens=4, n=3, temperature=9, stop=None)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 3
    assert answer["usage"]["completion_tokens"] == 12
    assert len({text(answer, index) for index in range(3)}) > 1
    assert text(answer) == text(ask(server, max_tokens=4, temperature=9))


def test_requests_at_once_get_what_they_would_get_alone(server):
    bodies = [{"seed": seed, "temperature": temperature} for seed in range(6) for temperature in (0.5, 1.5)]
    alone = [text(ask(server, **body)) for body in bodies]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda body: text(ask(server, **body)), bodies))
    assert together == alone


@pytest.fixture
def begun(server, monkeypatch):
    """The replies of all requests, as they begin."""
    replies, submit = [], server.batcher.submit
    monkeypatch.setattr(server.batcher, "submit", lambda some, how: (replies.extend(some), submit(some, how)))
    return replies


@pytest.mark.parametrize("streams", [False, True])
def test_the_work_for_a_client_that_left_ends(server, begun, streams):
    with sent(server, stream=streams, n=2):
        until(lambda: len(begun) == 2)
    until(lambda: all(reply.sampled for reply in begun))
    assert all(len(reply.sampled.ids) < ENDLESS["max_tokens"] for reply in begun)


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_short_reply_does_not_wait_for_a_long_one(server, begun, temperature):
    """Drawn in the same way, and in another."""
    alone = text(ask(server, temperature=temperature))
    begun.clear()
    with sent(server, stream=True):
        until(lambda: begun and begun[0].has_started)  # by the engine
        assert text(ask(server, temperature=temperature)) == alone
        assert begun[0].sampled is None, "the long one is still on its way"
    until(lambda: begun[0].sampled)


@pytest.mark.parametrize("num_ways", [1, 2])
def test_more_requests_than_rows(loaded, monkeypatch, num_ways):
    with Server(loaded, "pocket") as running:
        bodies = [{"seed": seed, "temperature": 1 + seed % num_ways} for seed in range(6)]
        expected = [text(ask(running, **body)) for body in bodies]
        running.batcher.engine.max_rows = 2
        step = EngineRun.step

        def watched(run):
            assert len(running.batcher._in_flight()) <= 2
            return step(run)

        monkeypatch.setattr(EngineRun, "step", watched)
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(lambda body: text(ask(running, **body)), bodies)) == expected


def test_messages_of_any_order(server):
    assert ask(server, messages=[{"role": "user", "content": "hi"}])["usage"]["prompt_tokens"] < 20
    parts = [{"type": "text", "text": SYSTEM}]
    same = [{"role": "developer", "content": parts}, *OPENED[1:]]
    assert text(ask(server, messages=same)) == text(ask(server))


def test_past_replies_are_the_tokens_that_were_sampled(loaded):
    """Here one that no tokenizer would make of its text."""
    tokenizer, renderer = loaded.tokenizer, Renderer(SharedTokenizer(loaded.tokenizer))
    odd = [id_ for letter in "Up</think>" for id_ in tokenizer.encode(letter, add_special_tokens=False)]
    assert odd != tokenizer.encode("Up</think>", add_special_tokens=False)
    renderer.remember(OPENED, odd, "Up</think>", ended_itself=False)
    longer = [*MESSAGES, {"role": "assistant", "content": "<think>Up</think>"}, {"role": "user", "content": "next"}]
    chat = renderer.chat
    expected = [
        *chat.opening_ids(SYSTEM, USER, "<think>"), *odd, *chat.closing_ids(), *chat.delta_ids("next", "<think>"),
    ]  # fmt: skip
    assert renderer.ids([*longer, {"role": "assistant", "content": "<think>"}]) == expected
    unknown = Renderer(SharedTokenizer(tokenizer)).ids([*longer, {"role": "assistant", "content": "<think>"}])
    assert tokenizer.decode(unknown) == tokenizer.decode(expected) and unknown != expected


# --- other requests -----------------------------------------------------------------------------------------------


def test_models_and_health(server):
    with urllib.request.urlopen(f"{server.base}/models", timeout=60) as response:
        (model,) = json.load(response)["data"]
    assert (model["id"], model["max_model_len"]) == ("pocket", 2048)
    for name in ("pocket", "%70ocket/"):
        with urllib.request.urlopen(f"{server.base}/models/{name}", timeout=60) as response:
            assert json.load(response) == model
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        urllib.request.urlopen(f"{server.base}/models/other", timeout=60)
    caught.value.close()
    with urllib.request.urlopen(server.base.removesuffix("/v1") + "/health", timeout=60) as response:
        assert json.load(response) == {"status": "ok"}


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({"model": "other"}, 404, "model", "model 'other' not found; this server has 'pocket'"),
        ({"model": None}, 400, "model", "model is missing"),
        ({"messages": []}, 400, "messages", "at least 1 item"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role", "'system', 'user' or 'assistant'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages[0].content",
            "must be text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            400,
            "messages[0].content",
            "must be text",
        ),
        (user_says("\ud83d"), 400, None, "not JSON"),
        ({"stop": ["a", "\ud83d"]}, 400, None, "not JSON"),
        ({"temperature": -1}, 400, "temperature", "temperature=-1: must be greater than or equal to 0"),
        ({"top_p": 0}, 400, "top_p", "top_p=0"),
        ({"max_tokens": 1.5}, 400, "max_tokens", "valid integer"),
        ({"max_completion_tokens": 3}, 400, "max_tokens", "keep one of them"),
        ({"n": 0}, 400, "n", "greater than or equal to 1"),
        ({"stop": [""]}, 400, "stop[0]", "at least 1 character"),
        ({"stream": "yes"}, 400, "stream", "valid boolean"),
        ({"stream_options": "usage"}, 400, "stream_options", "must be"),
        ({"stream_options": {"include_usage": 1}}, 400, "stream_options.include_usage", "valid boolean"),
        ({"stream_options": {"include_usage": True, "chunks": 1}}, 400, "stream_options.chunks", "unknown field"),
        ({"tools": [{}]}, 400, "tools", "not supported"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty", "not supported"),
        ({"continue_final_message": False}, 400, "continue_final_message", "not supported"),
        ({"max_tokns": 3}, 400, "max_tokns", "did you mean max_tokens?"),
        ({"max_tokens": 4000}, 400, "messages", "context of 2048"),
    ],
)
def test_errors_are_openai_s(server, body, status, param, words):
    found, error = error_of(server, **body)
    assert (found, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert words in error["message"]


def test_what_changes_nothing_is_taken(server):
    ask(server, presence_penalty=0, frequency_penalty=0.0, response_format={"type": "text"}, user="me", tools=None)


def test_what_common_clients_say_of_prompts_without_an_opening(server):
    for value in (False, True):
        ask(server, messages=MESSAGES, continue_final_message=False, add_generation_prompt=True, stream_options=None,
            logprobs=value)  # fmt: skip


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_a_server_on_ipv6(loaded):
    with Server(loaded, "pocket", host="::1") as running:
        assert running.base.startswith("http://[::1]:")
        assert text(ask(running))


@pytest.mark.parametrize("size", ["\u00b2", "9" * 5000, "-1", "1e3", ""])
def test_a_length_that_is_none(server, size):
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n"
    answer = raw(server, head.encode("latin-1"))
    assert answer.startswith("HTTP/1.1 400 ")
    error = json.loads(answer.partition("\r\n\r\n")[2])["error"]
    assert "Content-Length" in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"{", b"[" * 100_000, b'{"a":' * 100_000])
def test_a_body_that_is_no_json(server, body):
    request = urllib.request.Request(f"{server.base}/chat/completions", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError, match="400") as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as error:
        assert "not JSON" in json.load(error)["error"]["message"]


def test_other_errors(server):
    assert post(server, "/completions")[0] == 404
    assert post(server, kind="text/plain", model="pocket")[0] == 415


def test_a_failing_model_is_an_error_and_not_the_end(server, monkeypatch):
    def fail(*args):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(EngineRun, "decode", fail)
    status, error = error_of(server)
    assert (status, error["message"], error["type"]) == (500, "the model failed: out of luck", "server_error")
    monkeypatch.undo()
    assert text(ask(server))


@pytest.mark.parametrize("streams", [False, True])
def test_an_unexpected_error_is_answered_and_logged(server, monkeypatch, streams, caplog):
    monkeypatch.setattr(Completion, "_finish", lambda *args: 1 / 0)
    status, content = post(server, model="pocket", messages=OPENED, max_tokens=2, stream=streams)
    assert status == (200 if streams else 500), "a stream has begun"
    error = json.loads(content.decode().strip().split("\n\n")[-1].removeprefix("data: "))["error"]
    assert error["type"] == "server_error" and error["message"].startswith("the server failed: ZeroDivisionError")
    until(lambda: "Traceback" in caplog.text and "ZeroDivisionError" in caplog.text)


def test_a_stopping_server_passes_no_half_reply(loaded, monkeypatch):
    server = Server(loaded, "pocket")
    server.batcher.engine.max_rows = 1
    server.__enter__()
    has_stepped, step = threading.Event(), EngineRun.step
    monkeypatch.setattr(EngineRun, "step", lambda run: (step(run), has_stepped.set()))
    done, send = [], JSONResponse.__call__

    async def slowly(*what):
        await asyncio.sleep(0.3)
        await send(*what)
        done.append(what)

    monkeypatch.setattr(JSONResponse, "__call__", slowly)
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(error_of, server, **ENDLESS) for _ in range(2)]
        assert has_stepped.wait(60)
        until(lambda: server.batcher._waiting)
        server.__exit__()
        assert len(done) == 2, "nothing is left unsaid"
        told = [answer.result() for answer in answers]
    assert [(status, error["message"]) for status, error in told] == [(503, "the server is stopping")] * 2


# --- the command --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_process_serves_until_it_is_told_to_end(number):
    command = [sys.executable, "-m", "ragen", "serve", "pocket", "--port", "0", "--name", "mine"]
    environment, pipe = os.environ | {"PYTHONPATH": str(SOURCE)}, subprocess.PIPE
    with started(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        line = process.stdout.readline()
        assert line.startswith("serving mine at http://127.0.0.1:"), process.stderr.read()
        base = line.split()[3]
        with urllib.request.urlopen(f"{base}/models", timeout=60) as response:
            assert json.load(response)["data"][0]["id"] == "mine"
        with sent(SimpleNamespace(base=base), stream=True, model="mine") as connection:
            rest = connection.makefile("rb")
            assert b"200 OK" in rest.readline()
            process.send_signal(number)
            assert b"the server is stopping" in rest.read(), "its clients are told"
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors.strip() == "stopping"


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["pocket", "--dry-run"], 0, "would serve pocket (pocket) at http://127.0.0.1:8000/v1"),
        (["pocket", "--host", "::1", "--dry-run"], 0, "at http://[::1]:8000/v1"),
        (["./nowhere"], 2, "model ./nowhere: "),
        (["pocket", "--port", "70000"], 2, "between 0 and 65535"),
        (["pocket", "--max-model-len", "1"], 2, "at least 2"),
    ],
)
def test_the_words_of_the_command(words, status, says, capsys):
    assert main(["serve", *words]) == status
    captured = capsys.readouterr()
    assert says in captured.out + captured.err


def test_a_taken_port_is_said(server, loaded):
    port = port_of(server)
    with pytest.raises(ValueError, match=f"--port {port}: cannot listen on .*{port}"):
        Server(loaded, "pocket", port=port)


def test_another_host_is_warned_about(capsys):
    assert served.serve("pocket", host="0.0.0.0", dry_run=True) == 0
    assert "no key is required" in capsys.readouterr().err
