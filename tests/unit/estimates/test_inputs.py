"""Configs of models that exist."""

import json

from snakechat.estimates import inputs
from snakechat.jobs.planner import Plan, PlannedJob
from support.specs import SMALL

HUB = {"rule": "fetch_model", "settings": {"hub": "someone/away", "revision": "main"}}


def test_a_fetched_model_has_its_own_config(tmp_path):
    path = str(tmp_path)
    plan = Plan({path: PlannedJob(HUB)}, {path})
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    assert json.loads(inputs.model_config(path, plan)) == SMALL
