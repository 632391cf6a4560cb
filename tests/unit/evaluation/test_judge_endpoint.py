"""A judge behind an endpoint: what it is asked, how its replies count, what happens when it fails.

The endpoint is a server of our own on this machine.
"""

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx2
import pytest
import test_evaluate

import evaluate_rlhf
from snakechat.evaluation import judge_endpoint as endpoint
from snakechat.evaluation.judge_endpoint import INSTRUCTIONS, Endpoint
from snakechat.workflow.errors import InputError

# The job of the evaluation's own tests.
job = test_evaluate.job
SECRET = "sk-very-secret"


class Server(ThreadingHTTPServer):
    """An endpoint. replies: what it says in turn, the last one again and again: a text, or (status,
    headers, body). asked: path, headers and body of each request.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies, self.asked = ["A"], []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"

    def reply(self, body):
        """What it says to a request."""
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        reply = reply(body) if callable(reply) else reply
        if isinstance(reply, tuple):
            return reply
        return 200, {}, json.dumps({"choices": [{"message": {"content": reply}}]})


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, dict(self.headers), body))
        status, headers, text = self.server.reply(body)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        """Say nothing."""


@contextmanager
def serving():
    with Server() as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def server(monkeypatch):
    """An endpoint, and waits that are counted instead of waited."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    with serving() as found:
        found.waits = []
        monkeypatch.setattr(endpoint.time, "sleep", found.waits.append)
        yield found


def judge_of(server, key_env="JUDGE_KEY"):
    return Endpoint({"url": server.url, "model": "wise", "key_env": key_env, "prompts": 3})


def test_a_pair_is_shown_in_both_orders_with_model_and_key(server):
    judge = judge_of(server)
    assert judge.judge("\n\nHuman: Hi?", "our response", "their response") == 0.5
    bodies = [body for _, _, body in server.asked]
    texts = [body["messages"][1]["content"] for body in bodies]
    assert [text.index("our response") < text.index("their response") for text in texts] == [
        True,
        False,
    ]
    for (path, headers, body), text in zip(server.asked, texts, strict=True):
        assert path == "/v1/chat/completions"
        assert headers["Authorization"] == f"Bearer {SECRET}"
        assert body["model"] == "wise" and body["temperature"] == 0
        assert body["messages"][0] == {"role": "system", "content": INSTRUCTIONS}
        assert "\n\nHuman: Hi?" in text
    kept = [line["messages"] for line in judge.conversation]
    assert kept == [body["messages"] for body in bodies]
    assert [line["says"] for line in judge.conversation] == ["first", "first"]
    assert SECRET not in json.dumps(judge.conversation)


def test_no_key_is_sent_where_none_is_named(server):
    judge_of(server, key_env=None).judge("?", "a", "b")
    assert all("Authorization" not in headers for _, headers, _ in server.asked)


@pytest.mark.parametrize(
    ("replies", "verdict"),
    [
        (["A", "B"], 1),
        (["B", "A"], 0),
        # The order counted.
        (["A", "A"], 0.5),
        (["B", "B"], 0.5),
        (["C", "C"], 0.5),
        (["A", "C"], 0.5),
        (["C", "A"], 0.5),
        ([" A\n", "B"], 1),
        # What is no letter of the three is not guessed at.
        (["A", "b"], None),
        (["Response A is better.", "B"], None),
        (["", "B"], None),
        ([None, "B"], None),
        (["A", "A and B"], None),
    ],
)
def test_a_judgement_that_changes_with_the_order_is_a_tie(server, replies, verdict):
    server.replies = list(replies)
    judge = judge_of(server)
    assert judge.judge("?", "ours", "theirs") == verdict
    assert [line["reply"] for line in judge.conversation] == [reply or "" for reply in replies]


def test_what_may_pass_is_tried_again(server, capsys):
    busy = (429, {"Retry-After": "7"}, f"slow down, {SECRET}")
    server.replies = [busy, (500, {}, "oh"), (503, {"Retry-After": "9999"}, ""), "A", "B"]
    assert judge_of(server).judge("?", "ours", "theirs") == 1
    # As asked for, as long as that is bounded.
    assert server.waits == [7, 2, endpoint.LONGEST_WAIT]
    said = capsys.readouterr().err
    assert "status 429: slow down, ***; again in 7 s" in said and SECRET not in said


def test_a_connection_that_fails_is_tried_again(server, monkeypatch):
    judge = judge_of(server)
    assert judge.client.timeout == httpx2.Timeout(endpoint.TIMEOUT)
    post, broken = judge.client.post, [httpx2.ReadTimeout("late"), httpx2.ConnectError("refused")]

    def breaking(*args, **kwargs):
        if broken:
            raise broken.pop()
        return post(*args, **kwargs)

    monkeypatch.setattr(judge.client, "post", breaking)
    server.replies = ["A", "B"]
    assert judge.judge("?", "ours", "theirs") == 1
    assert server.waits == [1, 2]


@pytest.mark.parametrize(
    ("reply", "asked", "told"),
    [
        ((500, {}, "out\nof order"), endpoint.ATTEMPTS, "status 500: out of order"),
        ((401, {}, f"no such key: {SECRET}"), 1, r"status 401: no such key: \*\*\*: look at url,"),
        ((404, {}, "no such model"), 1, "status 404: no such model"),
        ((307, {"Location": "/elsewhere"}, ""), 1, "status 307"),
        ((200, {}, "<html>Log in</html>"), 1, "something else than a chat completion: <html>"),
        ((200, {}, '{"choices": []}'), 1, "something else than a chat completion"),
    ],
)
def test_what_does_not_pass_is_told_in_one_line(server, reply, asked, told):
    server.replies = [reply]
    with pytest.raises(InputError, match=told) as error:
        judge_of(server).judge("?", "ours", "theirs")
    assert len(server.asked) == asked and len(server.waits) == asked - 1
    assert sum(server.waits) <= 15
    assert SECRET not in str(error.value) and "\n" not in str(error.value)


def test_an_endpoint_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(endpoint.time, "sleep", lambda _: None)
    with serving() as gone:
        judge = judge_of(gone, key_env=None)
    with pytest.raises(InputError, match="does not judge: ConnectError"):
        judge.judge("?", "ours", "theirs")


@pytest.mark.parametrize("value", [None, " ", "sk-\nsecret", "sk-密"])
def test_a_key_that_is_missing_is_told_by_the_name_of_its_variable(server, monkeypatch, value):
    monkeypatch.delenv("JUDGE_KEY")
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    with pytest.raises(InputError, match="environment variable JUDGE_KEY has no key") as error:
        judge_of(server)
    assert "sk-" not in str(error.value)


# --- in the evaluation ------------------------------------------------------------------------


@pytest.fixture
def judged(job, server):
    """The evaluation with an endpoint."""
    job.settings.endpoint = {"url": server.url, "model": "w", "key_env": "JUDGE_KEY", "prompts": 2}
    job.facts = {}
    return job


def test_the_first_responses_of_rlhf_and_sft_meet(judged, server):
    server.replies = ["A", "B"]
    figures, responses = test_evaluate.evaluated(judged)
    texts = [body["messages"][1]["content"] for _, _, body in server.asked]
    # Two of three prompts, both orders.
    assert len(texts) == 4
    for number, text in enumerate(texts):
        row = number // 2 * 2
        ours, theirs = responses["rlhf"][row], responses["sft"][row]
        first, second = (ours, theirs) if number % 2 == 0 else (theirs, ours)
        assert ours["prompt"] in text
        assert (
            f"[Response A]\n{first['response']}\n\n[Response B]\n{second['response']}\n\n[End]"
            in text
        )
    lines = (judged.result / "endpoint.jsonl").read_text().splitlines()
    assert [json.loads(line)["messages"][1]["content"] for line in lines] == texts
    # A, B, then the last reply again: won, and a tie that was B in both orders.
    won = figures["wins"]["rlhf"]["sft"]["endpoint"]
    assert (won["mean"], won["prompts"], won["unreadable"]) == (0.75, 2, 0)
    assert 0.5 <= won["interval_95"][0] <= 0.75 <= won["interval_95"][1] <= 1
    assert "longer" in won
    assert "another build may differ" in judged.facts["endpoint"]["note"]
    for path in judged.result.iterdir():
        assert SECRET not in path.read_text()


def test_replies_that_cannot_be_read_are_counted_and_left_out(judged, server):
    server.replies = ["I think A.", "B", "B", "A"]
    figures, _ = test_evaluate.evaluated(judged)
    won = figures["wins"]["rlhf"]["sft"]["endpoint"]
    assert (won["mean"], won["interval_95"], won["prompts"], won["unreadable"]) == (0, [0, 0], 1, 1)
    assert (judged.facts["endpoint"]["prompts"], judged.facts["endpoint"]["unreadable"]) == (2, 1)


def test_an_endpoint_whose_replies_cannot_be_read_at_all_is_told(judged, server):
    server.replies = ["Both are fine."]
    with pytest.raises(InputError, match=r"never replies with A, B or C but 'Both are fine\.'"):
        evaluate_rlhf.main(judged)


def test_a_missing_key_is_told_before_any_model_is_loaded(judged, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY")
    monkeypatch.setattr(evaluate_rlhf, "load_causal", None)
    with pytest.raises(InputError, match="JUDGE_KEY"):
        evaluate_rlhf.main(judged)


def test_nobody_is_asked_where_no_endpoint_is_named(job, monkeypatch):
    monkeypatch.setattr(httpx2, "Client", None)
    figures, _ = test_evaluate.evaluated(job)
    assert "endpoint" not in figures["wins"]["rlhf"]["sft"]
    assert not (job.result / "endpoint.jsonl").exists()


@pytest.mark.parametrize("url", ["https://me:pw@judge/v1", "https://judge/v1?key=1"])
def test_a_url_with_secrets_in_it_is_refused(sources, url):
    settings = {"url": url, "model": "w", "key_env": None, "prompts": 2}
    (sources.folder / "mine.yaml").write_text(json.dumps({"evaluation": {"endpoint": settings}}))
    process = sources.snakemake("output/rlhf/tiny", "-n", "--configfile", "mine.yaml")
    assert "error: config: evaluation.endpoint.url: " in process.stdout
