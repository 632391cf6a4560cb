"""Configs of models of the Hub."""

from snakechat.estimates import inputs
from snakechat.workflow.errors import InputError


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
