"""The judge behind an endpoint: requests, verdicts, retries and errors, against a local server."""

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx2
import pytest

import evaluate_rlhf
from snakechat.evaluation import judge_endpoint
from snakechat.evaluation.judge_endpoint import INSTRUCTIONS, JudgeEndpoint
from snakechat.workflow.errors import InputError
from support.evaluation import evaluated, evaluation_job  # noqa: F401

SECRET = "sk-very-secret"


class Server(ThreadingHTTPServer):
    """An endpoint.

    replies: a text or (status, headers, body) for each request; the last one repeats.
    requests: path, headers and body of each request.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies, self.requests = ["A"], []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"

    def reply(self, body):
        """Return (status, headers, body) for a request."""
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        reply = reply(body) if callable(reply) else reply
        if isinstance(reply, tuple):
            return reply
        return 200, {}, json.dumps({"choices": [{"message": {"content": reply}}]})


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, dict(self.headers), body))
        status, headers, text = self.server.reply(body)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        """Log nothing."""


@contextmanager
def serving():
    with Server() as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def server(monkeypatch):
    """An endpoint; waits are recorded and skipped."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    with serving() as server:
        server.waits = []
        monkeypatch.setattr(judge_endpoint.time, "sleep", server.waits.append)
        yield server


def judge_of(server, key_env="JUDGE_KEY"):
    return JudgeEndpoint({"url": server.url, "model": "wise", "key_env": key_env, "prompts": 3})


def test_a_pair_is_shown_in_both_orders_with_model_and_key(server):
    judge = judge_of(server)
    assert judge.compare("\n\nHuman: Hi?", "our response", "their response") == 0.5
    bodies = [body for _, _, body in server.requests]
    texts = [body["messages"][1]["content"] for body in bodies]
    assert [text.index("our response") < text.index("their response") for text in texts] == [
        True,
        False,
    ]
    for (path, headers, body), text in zip(server.requests, texts, strict=True):
        assert path == "/v1/chat/completions"
        assert headers["Authorization"] == f"Bearer {SECRET}"
        assert body["model"] == "wise" and body["temperature"] == 0
        assert body["messages"][0] == {"role": "system", "content": INSTRUCTIONS}
        assert "\n\nHuman: Hi?" in text
    logged = [line["messages"] for line in judge.log]
    assert logged == [body["messages"] for body in bodies]
    assert [line["verdict"] for line in judge.log] == ["first", "first"]
    assert SECRET not in json.dumps(judge.log)


def test_without_key_env_no_key_is_sent(server):
    judge_of(server, key_env=None).compare("?", "a", "b")
    assert all("Authorization" not in headers for _, headers, _ in server.requests)


@pytest.mark.parametrize(
    ("replies", "verdict"),
    [
        (["A", "B"], 1),
        (["B", "A"], 0),
        # The verdict depends on the order.
        (["A", "A"], 0.5),
        (["B", "B"], 0.5),
        (["C", "C"], 0.5),
        (["A", "C"], 0.5),
        (["C", "A"], 0.5),
        ([" A\n", "B"], 1),
        # Other replies are unreadable.
        (["A", "b"], None),
        (["Response A is better.", "B"], None),
        (["", "B"], None),
        ([None, "B"], None),
        (["A", "A and B"], None),
    ],
)
def test_a_verdict_that_depends_on_the_order_is_a_tie(server, replies, verdict):
    server.replies = list(replies)
    judge = judge_of(server)
    assert judge.compare("?", "ours", "theirs") == verdict
    assert [line["reply"] for line in judge.log] == [reply or "" for reply in replies]


def test_temporary_failures_are_retried(server, capsys):
    busy = (429, {"Retry-After": "7"}, f"slow down, {SECRET}")
    server.replies = [busy, (500, {}, "oh"), (503, {"Retry-After": "9999"}, ""), "A", "B"]
    assert judge_of(server).compare("?", "ours", "theirs") == 1
    # Retry-After is bounded.
    assert server.waits == [7, 2, judge_endpoint.MAX_WAIT]
    printed = capsys.readouterr().err
    assert "status 429: slow down, ***; next attempt in 7 s" in printed and SECRET not in printed


def test_failed_connections_are_retried(server, monkeypatch):
    judge = judge_of(server)
    assert judge.client.timeout == httpx2.Timeout(judge_endpoint.TIMEOUT)
    post, broken = judge.client.post, [httpx2.ReadTimeout("late"), httpx2.ConnectError("refused")]

    def breaking(*args, **kwargs):
        if broken:
            raise broken.pop()
        return post(*args, **kwargs)

    monkeypatch.setattr(judge.client, "post", breaking)
    server.replies = ["A", "B"]
    assert judge.compare("?", "ours", "theirs") == 1
    assert server.waits == [1, 2]


@pytest.mark.parametrize(
    ("reply", "num_requests", "message"),
    [
        ((500, {}, "out\nof order"), judge_endpoint.ATTEMPTS, "status 500: out of order"),
        ((401, {}, f"no such key: {SECRET}"), 1, r"status 401: no such key: \*\*\*: check url,"),
        ((404, {}, "no such model"), 1, "status 404: no such model"),
        ((307, {"Location": "/elsewhere"}, ""), 1, "status 307"),
        ((200, {}, "<html>Log in</html>"), 1, "expected a chat completion from .*<html>"),
        ((200, {}, '{"choices": []}'), 1, "expected a chat completion"),
    ],
)
def test_permanent_failures_are_errors_of_one_line(server, reply, num_requests, message):
    server.replies = [reply]
    with pytest.raises(InputError, match=message) as error:
        judge_of(server).compare("?", "ours", "theirs")
    assert len(server.requests) == num_requests
    assert len(server.waits) == num_requests - 1
    assert sum(server.waits) <= 15
    assert SECRET not in str(error.value) and "\n" not in str(error.value)


def test_an_unreachable_endpoint_is_an_error(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(judge_endpoint.time, "sleep", lambda _: None)
    with serving() as gone:
        judge = judge_of(gone, key_env=None)
    with pytest.raises(InputError, match="failed: ConnectError"):
        judge.compare("?", "ours", "theirs")


@pytest.mark.parametrize("value", [None, " ", "sk-\nsecret", "sk-密"])
def test_a_missing_key_is_an_error_that_names_its_variable(server, monkeypatch, value):
    monkeypatch.delenv("JUDGE_KEY")
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    with pytest.raises(InputError, match="environment variable JUDGE_KEY has no key") as error:
        judge_of(server)
    assert "sk-" not in str(error.value)


# In an evaluation.


@pytest.fixture
def endpoint_job(job, server):
    """An evaluation with an endpoint."""
    job.settings.endpoint = {"url": server.url, "model": "w", "key_env": "JUDGE_KEY", "prompts": 2}
    job.facts = {}
    return job


def test_the_first_responses_of_rlhf_and_sft_are_compared(endpoint_job, server):
    server.replies = ["A", "B"]
    metrics, responses = evaluated(endpoint_job)
    texts = [body["messages"][1]["content"] for _, _, body in server.requests]
    # The first and the last of three prompts, both orders; each has two lines of responses.
    assert len(texts) == 4
    for number, text in enumerate(texts):
        row = (0, 4)[number // 2]
        ours, theirs = responses["rlhf"][row], responses["sft"][row]
        first, second = (ours, theirs) if number % 2 == 0 else (theirs, ours)
        assert ours["prompt"] in text
        assert (
            f"[Response A]\n{first['response']}\n\n[Response B]\n{second['response']}\n\n[End]"
            in text
        )
    lines = (endpoint_job.result / "endpoint.jsonl").read_text().splitlines()
    assert [json.loads(line)["messages"][1]["content"] for line in lines] == texts
    # A, B, then B twice: a win, and a tie.
    rates = metrics["wins"]["rlhf"]["sft"]["endpoint"]
    assert (rates["mean"], rates["prompts"], rates["unreadable"]) == (0.75, 2, 0)
    assert 0.5 <= rates["interval_95"][0] <= 0.75 <= rates["interval_95"][1] <= 1
    assert "longer" in rates
    assert "another build may differ" in endpoint_job.facts["endpoint"]["note"]
    for path in endpoint_job.result.iterdir():
        assert SECRET not in path.read_text()


def test_unreadable_replies_are_counted_and_skipped(endpoint_job, server):
    server.replies = ["I think A.", "B", "B", "A"]
    metrics, _ = evaluated(endpoint_job)
    rates = metrics["wins"]["rlhf"]["sft"]["endpoint"]
    assert (rates["mean"], rates["interval_95"], rates["prompts"], rates["unreadable"]) == (
        0,
        [0, 0],
        1,
        1,
    )
    assert (
        endpoint_job.facts["endpoint"]["prompts"],
        endpoint_job.facts["endpoint"]["unreadable"],
    ) == (2, 1)


def test_an_endpoint_without_readable_replies_is_an_error(endpoint_job, server):
    server.replies = ["Both are fine."]
    with pytest.raises(
        InputError, match=r"no reply of w is A, B or C, the first one is 'Both are fine\.'"
    ):
        evaluate_rlhf.main(endpoint_job)


def test_a_missing_key_is_reported_before_any_model_is_loaded(endpoint_job, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY")
    monkeypatch.setattr(evaluate_rlhf, "load_causal", None)
    with pytest.raises(InputError, match="JUDGE_KEY"):
        evaluate_rlhf.main(endpoint_job)


def test_without_an_endpoint_no_request_is_sent(job, monkeypatch):
    monkeypatch.setattr(httpx2, "Client", None)
    metrics, _ = evaluated(job)
    assert "endpoint" not in metrics["wins"]["rlhf"]["sft"]
    assert not (job.result / "endpoint.jsonl").exists()


@pytest.mark.parametrize("url", ["https://me:pw@judge/v1", "https://judge/v1?key=1"])
def test_a_url_with_secrets_is_an_error(sources, url):
    settings = {"url": url, "model": "w", "key_env": None, "prompts": 2}
    (sources.folder / "mine.yaml").write_text(json.dumps({"evaluation": {"endpoint": settings}}))
    process = sources.snakemake("output/rlhf/tiny", "-n", "--configfile", "mine.yaml")
    assert "error: config: evaluation.endpoint.url: " in process.stdout
