"""Configs of models: of those that exist, and of the Hub."""

import json

from snakechat.estimates import inputs
from snakechat.jobs.planner import Plan, PlannedJob
from snakechat.workflow.errors import InputError
from support.specs import SMALL

HUB = {"rule": "fetch_model", "settings": {"hub": "someone/away", "revision": "main"}}


def test_a_hub_that_does_not_answer_is_asked_once_for_each_model(monkeypatch, capsys):
    calls = []

    def fetch(name, *_):
        calls.append(name)
        raise InputError("the hub is unavailable")

    monkeypatch.setattr("snakechat.data.hub.fetch", fetch)
    for _ in range(2):
        assert str(inputs.hub_config("someone/away", "main")) == "the hub is unavailable"
    assert calls == ["someone/away"]
    assert "reading config.json of someone/away from the Hub" in capsys.readouterr().err


def test_a_fetched_model_has_its_own_config(tmp_path):
    path = str(tmp_path)
    plan = Plan({path: PlannedJob(HUB)}, {path})
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    assert json.loads(inputs.model_config(path, plan)) == SMALL
