"""Requests to an endpoint: retries, limits, errors, the cache and the counts, on a local server."""

import contextlib
import errno
import gzip
import os
import socket
import time
from threading import Barrier, Thread

import pytest

from snakechat.algorithms import chat_client
from snakechat.algorithms.chat_client import Reply, find_reply, store_reply
from snakechat.workflow.errors import InputError
from support.llm_endpoint import SECRET, judge_of, llm_server  # noqa: F401

# 600 MB, compressed.
BOMB = gzip.compress(bytes(100 << 20), 1) * 6


def ask(client, *texts, is_readable=lambda _: True):
    return client.replies([[{"role": "user", "content": text}] for text in texts], is_readable)


def test_requests_are_concurrent_equal_ones_sent_once_and_replies_in_order(server, tmp_path):
    # Each of three requests is answered when all three have arrived.
    arrived = Barrier(3, timeout=30)

    def reply(body):
        arrived.wait()
        return body["messages"][0]["content"].upper()

    server.replies = [reply]
    texts = ["b", "a", "b", "c", "a"]
    assert ask(judge_of(server, tmp_path, concurrency=3), *texts) == ["B", "A", "B", "C", "A"]
    assert len(server.requests) == 3


def test_replies_of_the_cache_cost_no_request(server, tmp_path):
    server.replies = ["one", "two"]
    first = judge_of(server, tmp_path)
    assert ask(first, "a", "b") == ["one", "two"]
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    # Another address and another key, as if a server had moved.
    second = judge_of(server, tmp_path, url="http://nowhere/v1", key_env=None)
    assert ask(second, "b", "a") == ["two", "one"]
    assert len(server.requests) == 2
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == files
    assert all(path.parent.parent == first.folder for path in files)
    assert all(SECRET.encode() not in data for data in files.values())
    assert (first.counts["requests"], second.counts["requests"]) == (2, 0)
    assert (first.counts["cache_hits"], second.counts["cache_hits"]) == (0, 2)
    assert first.counts["prompt_tokens"] == 200 and second.counts["prompt_tokens"] == 0


def test_unreadable_replies_are_requested_again_a_few_times(server, tmp_path):
    server.replies = ["hm", "hm", "yes", "no", "no", "no", "too late"]
    readable = {"is_readable": lambda reply: reply == "yes"}
    assert ask(judge_of(server, tmp_path), "a", "b", **readable) == ["yes", "no"]
    assert len(server.requests) == 6
    # The last reply counts, in other runs too.
    assert ask(judge_of(server, tmp_path), "a", "b", **readable) == ["yes", "no"]
    assert len(server.requests) == 6


def test_temporary_failures_are_retried(server, tmp_path, capsys):
    server.replies = [
        (429, {"Retry-After": "7"}, f"slow down, {SECRET}\x1b[2J"),
        (500, {}, "oh"),
        (503, {"Retry-After": "9999"}, ""),
        (408, {}, ""),
        "yes",
    ]
    client = judge_of(server, tmp_path)
    assert ask(client, "a") == ["yes"]
    # Retry-After is bounded.
    assert server.waits == [7, 2, chat_client.MAX_WAIT, 8]
    printed = capsys.readouterr().err
    assert "llm_judges.wise: http" in printed
    assert "status 429: slow down, ***\\x1b[2J; next attempt in 7 s" in printed
    assert SECRET not in printed
    assert (client.counts["requests"], client.counts["retries"]) == (5, 4)


@pytest.mark.parametrize(
    ("reply", "num_requests", "message"),
    [
        ((500, {}, "out\nof order"), chat_client.ATTEMPTS, "status 500: out of order"),
        ((401, {}, f"no such key: {SECRET}"), 1, r"status 401: no such key: \*\*\*: check url,"),
        ((307, {"Location": "http://localhost/elsewhere"}, ""), 1, "status 307"),
        ((200, {}, '{"choices": []}'), 1, "expected a chat completion"),
        ((200, {}, "[" * 100_000), 1, "expected a chat completion"),
        ((200, {"Content-Encoding": "gzip"}, BOMB), 1, "its response has more than 16 MiB"),
    ],
)
def test_permanent_failures_are_errors_of_one_line(server, tmp_path, reply, num_requests, message):
    server.replies = [reply]
    with pytest.raises(InputError, match=message) as error:
        ask(judge_of(server, tmp_path), "a")
    assert str(error.value).startswith("llm_judges.wise: ")
    assert len(server.requests) == num_requests
    assert len(server.waits) == num_requests - 1
    assert SECRET not in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.rglob("*.json"))


# What a server sends first, and then again and again.
DRIPS = {
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X: a\r\n"),
    "gzip file name": (
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n\x1f\x8b\x08\x08" + bytes(6),
        b"a",
    ),
}


@pytest.mark.parametrize("drip", DRIPS)
def test_a_request_ends_at_the_deadline_whatever_the_server_sends(
    drip, server, tmp_path, monkeypatch
):
    monkeypatch.setattr(chat_client, "DEADLINE", 0.2)
    start, more = DRIPS[drip]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(start)
                for _ in range(600):
                    time.sleep(0.02)
                    connection.sendall(more)

        Thread(target=serve, daemon=True).start()
        client = judge_of(server, tmp_path, url=f"http://127.0.0.1:{listener.getsockname()[1]}/v1")
        started = time.monotonic()
        with pytest.raises(InputError, match=r"llm_judges.wise: .* failed: "):
            ask(client, "a")
    assert time.monotonic() - started < 8


@pytest.mark.parametrize(
    "sent",
    [
        *(SECRET, SECRET.upper(), r"sk-very-\u0073ecret", "sk%2dvery%2Dsecret", "sk-\nvery-secret"),
        *(r"sk-very\\u002d\\u0073ecret", "sk%252dvery-secret", "sk&#45;very&#x2D;secret"),
    ],
)
def test_a_key_that_the_endpoint_sends_back_is_not_stored(sent, server, tmp_path):
    server.replies = [f"Your key is {sent}."]
    assert ask(judge_of(server, tmp_path), "a") == ["Your key is ***."]
    [path] = tmp_path.rglob("*.json")
    assert SECRET not in path.read_text()


def test_what_an_endpoint_may_not_send_is_left_out(server, tmp_path):
    reply = {"choices": [{"message": {"content": "yes\ud800"}}]}
    reply["usage"] = {"prompt_tokens": 10**40, "completion_tokens": -3}
    server.replies = [(429, {"Retry-After": "\xb2"}, ""), (200, {}, reply)]
    client = judge_of(server, tmp_path)
    assert ask(client, "a") == ["yes?"] and server.waits == [1]
    assert client.counts["prompt_tokens"] == client.counts["completion_tokens"] == 0


def test_a_key_of_two_lines_is_an_error_that_names_its_variable(server, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-\nsecret")
    match = "llm_judges.wise.key_env: environment variable JUDGE_KEY has no key"
    with pytest.raises(InputError, match=match) as error:
        judge_of(server, tmp_path)
    assert "sk-" not in str(error.value)


def test_requests_per_minute_are_paced_and_shared_by_processes(server, tmp_path, monkeypatch):
    monkeypatch.setattr(chat_client.time, "monotonic", lambda: 1000.0)
    ask(judge_of(server, tmp_path, requests_per_minute=30), "a", "b", "c")
    assert server.waits == [2, 4]
    monkeypatch.setenv("WORLD_SIZE", "4")
    client = judge_of(server, tmp_path, requests_per_minute=60, concurrency=8)
    assert (client.interval, client.concurrency) == (4, 2)


def test_requests_have_model_parameters_and_key_and_nothing_of_the_environment(
    server, tmp_path, monkeypatch
):
    for name in ("API_KEY", "ADMIN_KEY", "ORG_ID", "PROJECT_ID"):
        monkeypatch.setenv(f"OPENAI_{name}", "private")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Team: private\nAuthorization: private")
    ask(judge_of(server, tmp_path / "other", key_env=None), "Hi?")
    [(_, headers, _)] = server.requests
    assert "private" not in str(headers) and "Authorization" not in headers
    server.requests.clear()
    ask(judge_of(server, tmp_path), "Hi?")
    parameters = {"temperature": 0, "max_tokens": 4}
    # With other parameters, the stored reply does not count.
    assert ask(judge_of(server, tmp_path, parameters=parameters), "Hi?") == ["A"]
    [_, (path, headers, body)] = server.requests
    assert "private" not in str(headers) and "stainless" not in str(headers).lower()
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == f"Bearer {SECRET}"
    expected = {"model": "lab/wise", "messages": [{"role": "user", "content": "Hi?"}]}
    assert body == {**expected, **parameters}


# --- stored replies -------------------------------------------------------------------------------

REQUEST = {"model": "lab/wise", "messages": [{"role": "user", "content": "é?"}]}
FIRST, SECOND = Reply("7", 10, 1), Reply("8", 0, 0)


@pytest.mark.parametrize("has_links", [True, False])
def test_the_first_reply_counts_and_a_damaged_one_is_replaced(has_links, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EPERM, "no links")

    if not has_links:
        monkeypatch.setattr(os, "link", fail)
    assert find_reply(tmp_path, REQUEST) is None
    assert store_reply(tmp_path, REQUEST, FIRST) == FIRST
    # Another process may ask the same at the same time: both go on with one reply.
    assert store_reply(tmp_path, REQUEST, SECOND) == FIRST
    assert find_reply(tmp_path, {**REQUEST, "temperature": 0}) is None
    [file] = (path for path in tmp_path.rglob("*") if path.is_file())
    for text in ("{", "[]", '{"text": "7"}'):
        file.write_text(text)
        assert find_reply(tmp_path, REQUEST) is None
        assert store_reply(tmp_path, REQUEST, SECOND) == SECOND == find_reply(tmp_path, REQUEST)


def test_a_full_or_read_only_folder_is_one_warning(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    assert store_reply(file, REQUEST, FIRST) == FIRST
    assert store_reply(file, REQUEST, SECOND) == SECOND
    assert capsys.readouterr().err.count("warning: replies are not stored in") == 1
