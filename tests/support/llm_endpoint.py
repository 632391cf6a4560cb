"""An OpenAI-compatible endpoint in a thread, and judges that ask it."""

from types import SimpleNamespace

import pytest

from snakechat.algorithms import llm_judge
from snakechat.algorithms.llm_judge import load_judges
from snakechat.config.sections import judge_access, judge_settings
from snakechat.workflow.processes import RunOptions
from support.stub_server import StubServer, running

SECRET = "sk-very-secret"


class Server(StubServer):
    """An endpoint.

    replies: a text, (status, headers, body), or a function of the request's body that returns one
        of these, for each request; the last one repeats.
    requests: path, headers and body of each request.
    """

    def __init__(self):
        super().__init__()
        self.replies, self.requests = ["A"], []

    @property
    def url(self):
        return f"{self.endpoint}/v1"

    @property
    def texts(self):
        """The texts of the requests, after the instructions."""
        return [body["messages"][1]["content"] for _, _, body in self.requests]

    def answer(self, request):
        body = request.json
        self.requests.append((request.path, request.headers, body))
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        reply = reply(body) if callable(reply) else reply
        if isinstance(reply, tuple):
            return reply
        usage = {"prompt_tokens": 100, "completion_tokens": 2}
        return 200, {}, {"choices": [{"message": {"content": reply}}], "usage": usage}


def serving():
    return running(Server())


@pytest.fixture(name="server")
def llm_server(monkeypatch):
    """An endpoint; waits are recorded in server.waits and skipped."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    with serving() as server:
        server.waits = []

        async def sleep(seconds):
            if seconds:
                server.waits.append(seconds)

        monkeypatch.setattr(llm_judge, "sleep", sleep)
        yield server


def judge_entry(server, **settings):
    """Return the entry of `llm_judges` for a judge; requests are sent one after the other.

    A setting of None is not in the entry.
    """
    entry = {"url": server.url, "model": "lab/wise", "rubric": "Be kind.", "key_env": "JUDGE_KEY"}
    entry |= {"concurrency": 1, **settings}
    return {key: value for key, value in entry.items() if value is not None}


def judge_of(server, cache, **settings):
    """Return a judge that asks the endpoint. cache: A store, which has its replies."""
    judges = {"wise": judge_entry(server, **settings)}
    settings, access = judge_settings(judges, judges), judge_access(judges, judges)
    options = RunOptions(llm_judges=access, stores=[str(cache)])
    job = SimpleNamespace(settings=SimpleNamespace(llm_judges=settings), options=options)
    return load_judges(job)["wise"]


def use_judge(job, server, **settings):
    """Give the judge `wise` to a job."""
    judges = {"wise": judge_entry(server, **settings)}
    job.settings.llm_judges = judge_settings(judges, judges)
    job.options = RunOptions(
        llm_judges=judge_access(judges, judges), stores=[str(job.result.parent / "shared")]
    )


def compared_responses(body):
    """Return responses A and B of a request."""
    one, other = body["messages"][1]["content"].split("[RESPONSE A ")[1].split("[RESPONSE B ")
    return one.split("]\n", 1)[1].split("\n[")[0], other.split("]\n", 1)[1].split("\n[")[0]


def prefer_first_in_alphabet(body):
    one, other = compared_responses(body)
    return "A" if one < other else "B"
