"""The engine for servers: what is sent, what is done about errors, and what a reply becomes."""

import asyncio
import json
import os
import signal
import threading
import time
from email.utils import formatdate
from itertools import chain, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import raw_server, reply, scripted_server

from ragen.engine.base import Prompt, Sampling
from ragen.errors import ConfigError
from ragen.evaluate.api import ASSISTANT, CUT, END, CharacterChat, ServerEngine, messages_of
from ragen.evaluate.client import Budget, BudgetSpent, Client, Refused, ServerGone, Unanswered, retry_after, run_async

SAMPLING = Sampling(0.7, 0.9, -1, False, 40, True)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


class Talk:
    """A conversation of a fixed number of turns that keeps everything it hears."""

    def __init__(self, turns=1, prefix="<think>"):
        self.chat, self.turns, self.prefix = CharacterChat(), turns, prefix
        self.replies, self.counts, self.failure, self.was_cut = [], [], "", False

    def prompt(self):
        number = len(self.replies)
        if number == self.turns or self.was_cut:
            return None
        if number == 0:
            return Prompt(tuple(self.chat.opening_ids("Play.", "Turn 0", self.prefix)), False, (1 << 64) - 1)
        closing = [] if self.replies[-1].stopped_by == "end_of_turn" else self.chat.closing_ids()
        return Prompt((*closing, *self.chat.delta_ids(f"Turn {number}", self.prefix)), True, number)

    def take(self, sampled):
        self.replies.append(sampled)

    def count(self, num_tokens):
        self.counts.append(num_tokens)

    def fail(self, reason):
        self.failure = reason

    def cut(self):
        self.was_cut = True


def engine_for(server, **options):
    client = {name: options.pop(name) for name in ("patience_s", "budget", "note") if name in options}
    return ServerEngine(
        Client(server.base, "secret", jitter=lambda: 0.0, **client), "m", **{"max_prompt_tokens": 1000} | options
    )


def post(client):
    return run_async(client.post("/chat/completions", {}))


def text_of(sampled):
    return CharacterChat().tokenizer.decode(sampled.ids)


# --- characters ---------------------------------------------------------------------------------------------------


@given(TEXT, st.lists(st.tuples(TEXT, TEXT, st.booleans()), min_size=1, max_size=4), TEXT)
def test_tokens_are_read_back_as_the_messages_that_they_were(system, turns, opening):
    chat = CharacterChat()
    ids = chat.opening_ids(system, turns[0][0], opening)
    expected = [{"role": "system", "content": system}, {"role": "user", "content": turns[0][0]}]
    for user, text, ended_itself in turns[1:]:
        ids += [*map(ord, text), END] if ended_itself else [*map(ord, text), *chat.closing_ids()]
        ids += chat.delta_ids(user, opening)
        expected += [{"role": "assistant", "content": opening + text}, {"role": "user", "content": user}]
    assert messages_of(ids) == [*expected, {"role": "assistant", "content": opening}]
    assert ids.count(ASSISTANT) == len(turns)


# --- what is sent and read ----------------------------------------------------------------------------------------


def test_a_conversation_as_a_server_sees_it():
    answers = iter(["Up.</think><answer>Up</answer>", "Left"])
    with scripted_server(lambda body: (200, reply(next(answers), stop_reason="</answer>"))) as server:
        talk = Talk(turns=2)
        engine_for(server).run([talk], SAMPLING)
    first, second = server.bodies
    assert first["messages"] == [
        {"role": "system", "content": "Play."},
        {"role": "user", "content": "Turn 0"},
        {"role": "assistant", "content": "<think>"},
    ]
    assert first["continue_final_message"] is True and first["add_generation_prompt"] is False
    assert (first["model"], first["max_tokens"], first["temperature"], first["top_p"]) == ("m", 40, 0.7, 0.9)
    assert (first["seed"], second["seed"]) == (-1, 1)
    assert first["stop"] == ["</answer>"] and "top_k" not in first
    assert second["messages"][2:] == [
        {"role": "assistant", "content": "<think>Up.</think><answer>Up</answer>"},
        {"role": "user", "content": "Turn 1"},
        {"role": "assistant", "content": "<think>"},
    ]
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert [sampled.stopped_by for sampled in talk.replies] == ["answer", "end_of_turn"]
    assert talk.replies[1].ids == (*map(ord, "Left"), END)
    assert talk.counts == [5, 5]


@pytest.mark.parametrize(
    ("text", "finish", "more", "seen", "stopped_by"),
    [
        ("a</answer>tail", "stop", {}, "a</answer>", "answer"),
        ("a</answer>\n", "stop", {"stop_reason": "</answer>"}, "a</answer>\n", "answer"),
        ("a</answer>tail", "length", {}, "a</answer>", "answer"),
        ("a", "length", {}, "a", "length"),
        ("", "stop", {}, "", "end_of_turn"),
        ("", "length", {}, "", "length"),
        (None, "length", {}, "", "length"),
        ("a", "max_tokens", {}, "a", "length"),
        ("a", "eos_token", {}, "a", "end_of_turn"),
        ("a", None, {}, "a", "end_of_turn"),
    ],
)
def test_where_a_reply_ends(text, finish, more, seen, stopped_by):
    with scripted_server(lambda body: (200, reply(text, finish, **more))) as server:
        talk = Talk()
        engine_for(server).run([talk], SAMPLING)
    (sampled,) = talk.replies
    assert (text_of(sampled), sampled.stopped_by) == (seen, stopped_by)
    assert len(sampled.ids) == len(sampled.log_probs) > 0
    assert (sampled.ids == (CUT,)) == (seen == "" and stopped_by == "length")


BAD = {"message": "Provider returned error", "code": 502}


@pytest.mark.parametrize(("answer", "says"), [
    ({"choices": [None]}, "the answer has no message"),
    ({"choices": "no"}, "the answer has no message"),
    ({"choices": []}, "the answer has no message"),
    ({}, "the answer has no message"),
    ({"choices": [{"message": "hi", "finish_reason": "stop"}]}, "the answer has no message"),
    (reply(7), "the content of the answer is not text"),
    (reply(None, None), "a reply that ended by None"),
    (reply("a", "abort"), "a reply that ended by abort"),
    ({"error": BAD}, "an error instead of an answer: Provider returned error 502"),
    ([1], "the answer is not a JSON object"),
    (iter([b'{"choices": [{"mess']), "the answer is not a JSON object"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_an_answer_that_cannot_be_read_is_asked_for_again(answer, says):
    answers = chain([(200, answer)], repeat((200, reply("x"))))
    with scripted_server(lambda body: next(answers)) as server:
        told, talk = [], Talk()
        engine = engine_for(server, note=told.append)
        waits = waits_of(engine.client)
        engine.run([talk], SAMPLING)
    assert text_of(talk.replies[0]) == "x" and waits == [0.25]
    assert told == [f"{server.base}: {says}; retrying for up to 600 s"]


def test_an_answer_that_stays_unreadable_is_that_episode_s_failure():
    answers = iter([(200, reply("x")), (200, {"error": BAD}), (200, reply("y"))])
    with scripted_server(lambda body: next(answers)) as server:
        talks = [Talk(), Talk(), Talk()]
        engine_for(server, concurrency=1, patience_s=0.0).run(talks, SAMPLING)
    assert [len(talk.replies) for talk in talks] == [1, 0, 1]
    assert "Provider returned error" in talks[1].failure


def test_a_text_in_parts_and_counts_of_any_form():
    parts = [{"type": "text", "text": "Up"}, {"type": "image"}, "?", {"type": "text", "text": "."}]
    for usage, count in (
        ({"completion_tokens": "7"}, 7), ([1], None), (None, None), ({"completion_tokens": -1}, None),
    ):  # fmt: skip
        with scripted_server(lambda body, usage=usage: (200, reply(parts) | {"usage": usage})) as server:
            talk = Talk()
            engine_for(server).run([talk], SAMPLING)
        assert text_of(talk.replies[0]) == "Up." and talk.counts == [count]


def test_greedy_is_temperature_zero():
    with scripted_server(lambda body: (200, reply("x"))) as server:
        engine_for(server).run([Talk()], Sampling(1.0, 0.5, 7, True, 40, False))
    assert (server.bodies[0]["temperature"], server.bodies[0]["top_p"]) == (0.0, 1.0)
    assert "stop" not in server.bodies[0] and "top_k" not in server.bodies[0]


# --- servers that know less ---------------------------------------------------------------------------------------


def refusing(*fields):
    """A server that refuses these fields by name, as OpenAI's own does."""

    def answer(body):
        for name in fields:
            if name in body:
                return 400, {"error": {"message": f"Unrecognized request argument supplied: {name}", "code": None}}
        return 200, reply("<think>Up.</think><answer>Up</answer> and more")

    return answer


def test_a_server_that_refuses_prefill_gets_none_and_the_opening_is_not_doubled():
    with scripted_server(refusing("continue_final_message", "include_stop_str_in_output")) as server:
        talks = [Talk(), Talk()]
        engine = engine_for(server, concurrency=1)
        engine.run(talks, SAMPLING)
    assert engine.was_refused == ["prefill", "stop text"]
    assert [len(body["messages"]) for body in server.bodies] == [3, 2, 2, 2]
    assert "stop" not in server.bodies[-1]
    for talk in talks:
        assert text_of(talk.replies[0]) == "Up.</think><answer>Up</answer>"
        assert talk.replies[0].stopped_by == "answer" and not talk.failure


@pytest.mark.parametrize(
    ("without", "with_it", "refused"),
    [
        ("<think>Up.</think><answer>Up</answer>", "<think>Up.</think><answer>Up", ["prefill", "stop text"]),
        ("Up.</think><answer>Up</answer>", "Up.</think><answer>Up", ["stop text"]),
        ("<think>Up.</think><answer>Up</answer>", "<think>Up.</think><answer>Up</answer>", ["prefill"]),
    ],
)
def test_a_server_that_ignores_what_it_does_not_know_is_found_out(without, with_it, refused):
    """It takes every field, strips the stop text or begins a new message: the reply is requested again."""
    with scripted_server(lambda body: (200, reply(with_it if "stop" in body else without))) as server:
        talks = [Talk(), Talk()]
        engine = engine_for(server, concurrency=1)
        engine.run(talks, SAMPLING)
    assert engine.was_refused == refused
    assert len(server.bodies) == 3  # once more, and then no more
    for talk in talks:
        assert text_of(talk.replies[0]) == "Up.</think><answer>Up</answer>"


def test_an_empty_reply_does_not_tell_whether_the_opening_is_heeded():
    answers = chain([reply(None)], repeat(reply("<think>Up.</think><answer>Up</answer>")))
    with scripted_server(lambda body: (200, next(answers))) as server:
        talk = Talk(turns=3)
        engine = engine_for(server)
        engine.run([talk], SAMPLING)
    assert engine.was_refused == ["prefill"]
    assert [text_of(sampled) for sampled in talk.replies] == ["", *["Up.</think><answer>Up</answer>"] * 2]


def test_a_model_that_ends_inside_its_answer_is_no_server_that_ignores():
    with scripted_server(lambda body: (200, reply("Up.</think><answer>Up", stop_reason=None))) as server:
        talk = Talk()
        engine = engine_for(server)
        engine.run([talk], SAMPLING)
    assert engine.was_refused == [] and talk.replies[0].stopped_by == "end_of_turn"


def test_the_other_name_of_the_limit_is_tried():
    def answer(body):
        if "max_tokens" in body:
            return 400, {"error": {"message": "Unsupported parameter: use 'max_completion_tokens' instead."}}
        return 200, reply("x")

    with scripted_server(answer) as server:
        engine = engine_for(server)
        engine.run([Talk()], SAMPLING)
    assert server.bodies[-1]["max_completion_tokens"] == 40 and engine.was_refused == []


def test_what_no_server_would_do_stops_everything():
    with (
        scripted_server(lambda body: (401, {"error": {"message": "bad key"}})) as server,
        pytest.raises(ConfigError, match=r"refuses the key.*--api-key-env"),
    ):
        engine_for(server).run([Talk()], SAMPLING)
    unknown = (404, {"error": {"message": "no model m", "code": "model_not_found"}})
    with scripted_server(lambda body: unknown) as server, pytest.raises(ConfigError, match=r"model m.*no model m"):
        engine_for(server).run([Talk()], SAMPLING)
    assert len(server.bodies) == 1


def test_a_single_refusal_later_is_a_failure_of_its_own():
    answers = iter([(200, reply("x")), (400, {"error": {"message": "the content is not allowed"}}), (200, reply("y"))])
    with scripted_server(lambda body: next(answers)) as server:
        talks = [Talk(), Talk(), Talk()]
        engine = engine_for(server, concurrency=1)
        engine.run(talks, SAMPLING)
    assert [len(talk.replies) for talk in talks] == [1, 0, 1]
    assert talks[1].failure == "HTTP 400: the content is not allowed"
    assert engine.was_refused == [] and all("stop" in body and len(body["messages"]) == 3 for body in server.bodies)


def test_a_later_refusal_that_names_what_is_sent_takes_it_away():
    """Several providers may stand behind one address."""
    refusal = (400, {"error": {"message": "continue_final_message is unknown"}})
    answers = chain([(200, reply("x")), refusal], repeat((200, reply("y"))))
    with scripted_server(lambda body: next(answers)) as server:
        talks = [Talk(), Talk()]
        engine = engine_for(server, concurrency=1)
        engine.run(talks, SAMPLING)
    assert engine.was_refused == ["prefill"] and [len(talk.replies) for talk in talks] == [1, 1]


def test_a_refusal_that_stays_without_it_was_not_for_what_is_sent():
    """Nor is it for the whole set-up, where others have been played before: what is left may be refused, all of it."""
    refusal = (400, {"error": {"message": "the content is not allowed"}})
    answers = chain(repeat(refusal, 2), repeat((200, reply("x"))))
    with scripted_server(lambda body: next(answers)) as server:
        talks = [Talk(), Talk()]
        engine = engine_for(server, concurrency=1)
        engine.has_played = True
        engine.run(talks, SAMPLING)
    assert talks[0].failure == "HTTP 400: the content is not allowed" and len(talks[1].replies) == 1
    assert engine.was_refused == [] and engine.prefill and engine.stops


def test_a_filtered_reply_is_a_failure():
    with scripted_server(lambda body: (200, reply("x", "content_filter"))) as server:
        talk = Talk()
        engine_for(server).run([talk], SAMPLING)
    assert talk.failure == "a reply that ended by content_filter" and not talk.replies


def too_long(text):
    return 400, {"error": {"message": text, "code": "context_length_exceeded"}}


@pytest.mark.parametrize("answers", [
    [(200, reply("x", usage=(1001, 2)))],
    [too_long("the prompt has 1010 tokens, and that is more than this model's context of 1040")],
    [too_long("This model's maximum context length is 2048 tokens. However, you requested 2100 tokens.")],
    [(200, reply("x", usage=(990, 12))), too_long("too long")],
])  # fmt: skip
def test_a_prompt_beyond_the_context_ends_the_episode(answers):
    """Ours is 1000 tokens and 40 of a reply; a server with as much refuses no earlier."""
    rest = iter(answers)
    with scripted_server(lambda body: next(rest)) as server:
        talk = Talk(turns=2)
        engine_for(server).run([talk], SAMPLING)
    assert talk.was_cut and len(talk.replies) == len(answers) - 1 and not talk.failure


@pytest.mark.parametrize(("answers", "says"), [
    ([too_long("too long")], "too little context (HTTP 400: too long"),
    ([too_long("more than this model's context of 1039")], "a context of 1039 tokens"),
    ([(400, {"error": {"message": "request (1100 tokens) exceeds the available context size (1024 tokens)"}})],
     "a context of 1024 tokens"),
    ([(200, reply("x", usage=(900, 100))), too_long("This model's maximum context length is 512 tokens")],
     "a context of 512 tokens"),
])  # fmt: skip
def test_a_server_with_too_little_context_is_a_wrong_set_up(answers, says):
    """Neither a lost game nor one failure after the other: long episodes would be missing, and no others."""
    rest = chain(answers, repeat(answers[-1]))
    with scripted_server(lambda body: next(rest)) as server:
        talks = [Talk(turns=2), Talk(turns=2)]
        with pytest.raises(ConfigError) as refused:
            engine_for(server, concurrency=1).run(talks, SAMPLING)
    assert f"{server.base} has {says}" in str(refused.value)
    assert "an episode may take 1040 (actor_rollout_ref.rollout.max_model_len)" in str(refused.value)
    assert "ragen serve --max-model-len 1040" in str(refused.value)
    assert not any(talk.was_cut or talk.failure for talk in talks)


# --- errors that pass ---------------------------------------------------------------------------------------------


def waits_of(client):
    """The pauses that a client makes, without making them."""
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    client.sleep = sleep
    return waits


def test_pauses_grow_and_a_server_s_own_is_honoured():
    answers = iter([(500, {}), (429, {}, {"Retry-After": "7"}), (503, {}), (503, {}), (200, {"fine": True})])
    with scripted_server(lambda body: next(answers)) as server:
        client = Client(server.base, jitter=lambda: 1.0)
        waits = waits_of(client)
        assert post(client) == {"fine": True}
    assert waits == [0.5, 7.0, 2.0, 4.0]
    assert client.budget.num_requests == 5


def test_a_connection_that_breaks_is_tried_again():
    answers = iter([(0, {}), (0, {}), (200, reply("x"))])
    with scripted_server(lambda body: next(answers)) as server:
        told, talk = [], Talk()
        engine = engine_for(server, note=told.append)
        waits = waits_of(engine.client)
        engine.run([talk], SAMPLING)
    assert text_of(talk.replies[0]) == "x" and waits == [0.25, 0.5]
    assert len(told) == 1 and "no connection" in told[0]


def test_jitter_is_half_of_a_pause():
    client = Client("http://127.0.0.1:9", jitter=lambda: 0.0)
    assert [client._pause(attempt) for attempt in (0, 1, 20)] == [0.25, 0.5, 30.0]


def test_retry_after_in_all_its_forms():
    assert retry_after("3", 0.0) == 3.0
    assert retry_after(formatdate(1_000_010, usegmt=True), 1_000_000) == pytest.approx(10.0)
    assert retry_after(formatdate(5, usegmt=True), 1_000_000) == 0.0
    assert retry_after(None, 0.0) is None and retry_after("soon", 0.0) is None


def test_a_server_that_is_gone_is_said_once_and_ends_the_run():
    told = []
    client = Client("http://127.0.0.1:9/v1", patience_s=1.0, note=told.append, jitter=lambda: 0.0)
    waits = waits_of(client)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: sum(waits))
        with pytest.raises(ServerGone, match=r"127\.0\.0\.1:9/v1: no connection: .*tried for 1 s"):
            post(client)
    assert len(told) == 1 and waits == [0.25, 0.5]


@pytest.mark.parametrize(("answer", "kind"), [
    ((500, {}), Unanswered), ((408, {}), Unanswered), ((200, {"error": BAD}), Unanswered),
    ((429, {}), ServerGone), ((502, {}), ServerGone), ((503, {}), ServerGone), ((0, {}), ServerGone),
], ids=str)  # fmt: skip
def test_a_server_that_answers_with_an_error_is_there(answer, kind):
    with scripted_server(lambda body: answer) as server, pytest.raises(kind):
        post(Client(server.base, patience_s=0.0))


def test_an_outage_is_waited_for_once_and_not_by_every_episode(monkeypatch):
    with scripted_server(lambda body: (500, {"error": {"message": "broken"}})) as server:
        talks = [Talk(), Talk(), Talk()]
        engine = engine_for(server, concurrency=1, patience_s=10.0)
        waits = waits_of(engine.client)
        monkeypatch.setattr(time, "monotonic", lambda: sum(waits))
        engine.run(talks, SAMPLING)
    assert waits == [
        0.25,
        0.5,
        1,
        2,
        4,
        0.25,
        0.5,
        1,
        0.25,
    ]  # each one ends where the next pause would lead beyond 10 s
    assert all("HTTP 500: broken (tried for 10 s)" in talk.failure for talk in talks)


def test_a_flaky_server_is_told_of_once_a_minute(monkeypatch):
    answers = chain.from_iterable([(500, {}), (200, {})] for _ in range(8))
    now, told = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with scripted_server(lambda body: next(answers)) as server:
        client = Client(server.base, note=told.append)
        waits_of(client)
        for now[0] in (0.0, 1.0, 30.0, 59.0, 60.0, 61.0, 119.0, 120.0):
            post(client)
    assert len(told) == 3


def test_a_wait_beyond_the_patience_is_said():
    answer = (429, {"error": {"message": "slow down"}}, {"Retry-After": "100"})
    says = r"HTTP 429: slow down \(the server asks to wait 100 s, which is beyond --patience 3\)"
    with scripted_server(lambda body: answer) as server, pytest.raises(ServerGone, match=says):
        post(Client(server.base, patience_s=3.0))


def test_what_a_server_says_is_one_plain_line():
    for answer in (500, {"error": {"message": "one\ntwo\x1b[31m"}}), (413, {"error": "one\r\ntwo\x1b\x00[31m"}):
        with (
            scripted_server(lambda body, answer=answer: answer) as server,
            pytest.raises((Unanswered, Refused), match=r"one two \[31m"),
        ):
            post(Client(server.base, patience_s=0.0))


def test_a_redirect_is_not_followed():
    with scripted_server(lambda body: (200, reply("x"))) as other:
        to_it = (302, {}, {"Location": f"{other.base}/chat/completions"})
        with scripted_server(lambda body: to_it) as server, pytest.raises(ConfigError) as refused:
            post(Client(server.base, "secret"))
    assert f"{server.base} redirects to {other.base}: pass that as --api-base" in str(refused.value)
    assert other.bodies == []


def test_https_to_a_server_without_it_is_a_wrong_address():
    with scripted_server(lambda body: (200, reply("x"))) as server:
        base = server.base.replace("http", "https")
        with pytest.raises(ConfigError, match=f"--api-base {base}: .*WRONG_VERSION_NUMBER"):
            post(Client(base))


def test_an_error_that_stays_is_one_episode_s_while_others_are_answered():
    was_retried, was_answered = threading.Event(), threading.Event()
    num_bad = []

    def answer(body):
        if body["messages"][1]["content"] == "Bad":
            num_bad.append(1)
            if len(num_bad) == 2:
                was_retried.set()
                was_answered.wait(30)
            return 500, {"error": {"message": "broken"}}
        was_retried.wait(30)
        if len(body["messages"]) > 3:  # the second turn: the first was answered
            was_answered.set()
        return 200, reply("x")

    class Bad(Talk):
        def prompt(self):
            found = super().prompt()
            ids = self.chat.opening_ids("Play.", "Bad", "") if found else None
            return found and Prompt(tuple(ids), False, 1)

    with scripted_server(answer) as server:
        talks = [Bad(), *(Talk(turns=2) for _ in range(2))]
        engine_for(server, patience_s=0.3).run(talks, SAMPLING)
    assert "HTTP 500: broken" in talks[0].failure
    assert [len(talk.replies) for talk in talks] == [0, 2, 2]


# --- budget, stop, concurrency ------------------------------------------------------------------------------------


def test_a_budget_of_requests_and_of_tokens():
    with scripted_server(lambda body: (200, reply("x", usage=(20, 5)))) as server:
        for budget, num_played in ((Budget(max_requests=3), 3), (Budget(max_tokens=50), 2)):
            talks = [Talk() for _ in range(6)]
            engine = engine_for(server, budget=budget, concurrency=1)
            engine.run(talks, SAMPLING)
            assert sum(bool(talk.replies) for talk in talks) == num_played
            assert engine.num_left == 6 - num_played
            assert not any(talk.failure for talk in talks)


def test_budget_says_what_is_used_up():
    with pytest.raises(BudgetSpent, match="5 tokens are used up"):
        Budget(max_tokens=5, num_tokens=6).take()


def test_not_one_request_too_many_is_sent_however_many_wait():
    with scripted_server(lambda body: (time.sleep(0.02), (200, reply("x")))[1]) as server:
        engine = engine_for(server, budget=Budget(max_requests=5), concurrency=8)
        engine.run([Talk() for _ in range(20)], SAMPLING)
    assert (len(server.bodies), engine.num_left) == (5, 15)


def test_repetitions_count_and_what_reached_no_server_does_not():
    answers = iter([(503, {}), (0, {}), (200, reply("x"))])
    with scripted_server(lambda body: next(answers)) as server:
        engine = engine_for(server, budget=Budget(max_requests=3))
        waits_of(engine.client)
        engine.run([Talk()], SAMPLING)
    assert engine.client.budget.num_requests == 3 == len(server.bodies)
    client = Client(server.base, patience_s=0.0, budget=Budget(max_requests=1))
    for _ in range(2):
        with pytest.raises(ServerGone):
            post(client)
    assert client.budget.num_requests == 0


def test_a_request_that_is_not_answered_in_time_counts():
    may_end = threading.Event()
    with scripted_server(lambda body: (may_end.wait(60), (200, reply("x")))[1]) as server:
        client = Client(server.base, patience_s=0.0, timeout_s=0.5)
        with pytest.raises(ServerGone, match="timed out"):
            post(client)
        may_end.set()
    assert client.budget.num_requests == 1


def test_a_request_has_so_much_time_however_its_bytes_come():
    def dripped(body):
        for byte in json.dumps(reply("x")).encode():
            time.sleep(0.01)
            yield bytes([byte])

    with scripted_server(lambda body: (200, dripped(body))) as server:
        client = Client(server.base, patience_s=0.0, timeout_s=0.1)
        with pytest.raises(ServerGone, match="timed out"):
            post(client)


def drip_headers(send):
    send(b"HTTP/1.1 200 OK\r\n")
    while True:
        time.sleep(0.01)
        send(b"X: y\r\n")


def drip_one_header(send):
    send(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        time.sleep(0.01)
        send(b"y")


def continue_for_ever(send):
    while True:
        send(b"HTTP/1.1 100 Continue\r\n\r\n")
        time.sleep(0.001)


def say_nothing(send):
    time.sleep(2)


@pytest.mark.parametrize("answer", [drip_headers, drip_one_header, continue_for_ever, say_nothing])
def test_the_timeout_covers_a_whole_request(answer):
    with raw_server(answer) as base:
        client = Client(base, patience_s=0.0, timeout_s=0.2)
        with pytest.raises(ServerGone, match="timed out"):
            post(client)


def test_a_fast_stream_of_continues_ends_too():
    def flood(send):
        while True:
            send(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)

    with raw_server(flood) as base:
        client = Client(base, patience_s=0.0, timeout_s=0.2)
        with pytest.raises(ServerGone, match="no connection"):
            post(client)


@pytest.mark.parametrize("head", [b"", b"Content-Length: 20000000\r\n", b"Transfer-Encoding: chunked\r\n"])
@pytest.mark.parametrize("status", [b"200 OK", b"500 Broken"])
def test_an_endless_answer_is_cut(head, status):
    sent = [0]

    def answer(send):
        send(b"HTTP/1.1 " + status + b"\r\n" + head + b"\r\n")
        while True:
            send(b"10000\r\n" + b" " * 65536 + b"\r\n" if b"chunked" in head else b" " * 65536)
            sent[0] += 65536

    with raw_server(answer) as base, pytest.raises(Unanswered, match="an answer of more than 8 MiB"):
        post(Client(base, patience_s=0.0))
    assert sent[0] < 20_000_000


KEY = 'sk-0123456789abcdef/"x'


@pytest.mark.parametrize("answer", [
    (500, {"error": {"message": f"wrong key {KEY} " + "x" * 600}}),
    (500, {"error": {"message": "x" * 490 + KEY}}),
    (500, {"error": f"Bearer {KEY}"}),
    (500, {"detail": [KEY]}),
    (500, iter([b"no JSON: " + KEY.encode()])),
    (400, {"error": {"message": KEY}}),
    (401, {"error": {"code": KEY}}),
    (307, {}, {"Location": f"http://other.example/{KEY}/chat/completions"}),
    (200, {"error": {"message": f"\x1b{KEY}"}}),
], ids=lambda answer: str(answer[0]))  # fmt: skip
def test_a_key_that_the_server_echoes_is_not_printed(answer):
    told, talk = [], Talk()
    with scripted_server(lambda body: answer) as server:
        client = Client(server.base, KEY, patience_s=0.05, note=told.append, jitter=lambda: 0.0)
        try:
            ServerEngine(client, "m", max_prompt_tokens=1000).run([talk], SAMPLING)
        except (ConfigError, ServerGone) as error:
            told.append(str(error))
    said = f"{told} {talk.failure}"
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in said and KEY[:8] not in said and len(said) > 20


def test_a_key_that_the_server_echoes_is_not_stored():
    answer = reply(f"my key is {KEY}</answer>", stop_reason=KEY)
    with scripted_server(lambda body: (200, answer)) as server:
        talk = Talk()
        client = Client(server.base, KEY)
        ServerEngine(client, "m", max_prompt_tokens=1000).run([talk], SAMPLING)
    assert text_of(talk.replies[0]) == "my key is [API key]</answer>"


def test_a_placeholder_for_a_key_may_be_part_of_a_reply():
    with scripted_server(lambda body: (200, reply("EMPTY"))) as server:
        talk = Talk()
        ServerEngine(Client(server.base, "EMPTY"), "m", max_prompt_tokens=1000).run([talk], SAMPLING)
    assert text_of(talk.replies[0]) == "EMPTY"


ODD = ["9" * 5000, '"' + "9" * 5000 + '"', "-5", "1e999", "NaN", "true", "[]", '"٣"', "1" * 300, '"' + "9" * 19 + '"']


@pytest.mark.parametrize("count", ODD, ids=lambda count: count[:6])
def test_an_odd_usage_figure_is_no_count(count):
    """The budget then estimates: Play., Turn 0, <think> and Up., 21 characters, a third of that in tokens."""
    fields = ", ".join(f'"{name}": {count}' for name in ("prompt_tokens", "completion_tokens", "total_tokens"))
    choices = json.dumps(reply("Up.")["choices"])
    content = f'{{"choices": {choices}, "usage": {{{fields}}}}}'.encode()
    with scripted_server(lambda body: (200, iter([content]))) as server:
        talk = Talk()
        engine = engine_for(server, budget=Budget(max_tokens=100))
        engine.run([talk], SAMPLING)
    expected = 3 if "٣" in count else None
    assert text_of(talk.replies[0]) == "Up." and talk.counts == [expected]
    assert engine.client.budget.num_tokens == (expected or 7)


def test_half_a_character_becomes_a_whole_one():
    with scripted_server(lambda body: (200, reply("Up\ud83d."))) as server:
        talk = Talk()
        engine_for(server).run([talk], SAMPLING)
    assert text_of(talk.replies[0]) == "Up?."


def test_tokens_of_a_server_that_does_not_count_are_estimated():
    """Play., Turn 0, <think> and a reply of 12 characters: 30 in all, a third of that in tokens."""
    silent = reply("x" * 12)
    del silent["usage"]
    with scripted_server(lambda body: (200, silent)) as server:
        budget = Budget(max_tokens=20)
        engine = engine_for(server, budget=budget, concurrency=1)
        engine.run([Talk() for _ in range(4)], SAMPLING)
    assert (budget.num_tokens, budget.num_requests, engine.num_left) == (20, 2, 2)


def test_no_more_requests_at_a_time_than_allowed():
    lock, now, most = threading.Lock(), [0], [0]

    def answer(body):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.01)
        with lock:
            now[0] -= 1
        return 200, reply("x")

    finished = []
    with scripted_server(answer) as server:
        engine_for(server, concurrency=3).run([Talk(turns=2) for _ in range(9)], SAMPLING, finished.append)
    assert most[0] <= 3 and sum(finished) == 9


def test_an_error_ends_the_requests_that_are_under_way():
    """The second answer is a wrong key, while the first one does not come."""
    is_waiting, may_end, was_released = threading.Event(), threading.Event(), []

    def answer(body):
        if not is_waiting.is_set():
            is_waiting.set()
            was_released.append(may_end.wait(60))
        return 401, {"error": {"message": "bad key"}}

    with scripted_server(answer) as server:
        with pytest.raises(ConfigError, match="refuses the key"):
            engine_for(server, concurrency=2).run([Talk(), Talk(), Talk()], SAMPLING)
        assert not was_released
        may_end.set()


def test_ctrl_c_ends_what_is_under_way():
    has_begun, was_cancelled = threading.Event(), threading.Event()

    async def work():
        try:
            has_begun.set()
            await asyncio.sleep(60)
        finally:
            was_cancelled.set()

    def interrupt():
        has_begun.wait(30)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_async(work())
    assert was_cancelled.wait(60)


def test_refusals_carry_their_status():
    with (
        scripted_server(lambda body: (418, {"error": "teapot"})) as server,
        pytest.raises(Refused, match="teapot") as caught,
    ):
        post(Client(server.base))
    assert caught.value.status == 418
