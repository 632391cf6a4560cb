"""The tutorials of docs/*/tutorials, executed: their files, their commands and what they print.

The tutorial of Slurm is executed in tests/cluster.
"""

import re
import sys

import pytest
import yaml

from conftest import ROOT, Workflow, copy_sources
from support.hub import serving_opt
from support.tutorials import blocks_of, commands_of, follow

pytestmark = pytest.mark.slow

PAGES = [f"tutorials/{path.stem}" for path in sorted((ROOT / "docs/en/tutorials").glob("*.md"))]
PAGES.append("api")


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The folder in which the first tutorials were followed, where others continue."""
    folder = tmp_path_factory.mktemp("tutorial") / "snakechat"
    copy_sources(folder)
    # Several tests share the cores.
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("    threads: 2\n", "    threads: 1\n"))
    workflow = Workflow(folder)
    for page in ("own-data", "reward-functions", "report"):
        follow(f"tutorials/{page}", workflow)
    return workflow


def test_tutorials_make_models_and_a_report(followed):
    for model in ("sft/mine", "rlhf/mine-polite", "rlhf/mine-careful"):
        assert (followed.folder / f"output/{model}/model.safetensors").exists()
    assert (followed.folder / "report.html").stat().st_size > 1_000_000


def test_both_languages_have_the_same_reference():
    pages = [(ROOT / "docs" / language / "api.md").read_text() for language in ("en", "zh")]
    modules = [re.findall(r"^(?::::|    ).*$", page, re.MULTILINE) for page in pages]
    assert modules[0] == modules[1]
    assert modules[0]


@pytest.mark.parametrize("page", PAGES)
def test_all_blocks_are_files_or_commands(page):
    blocks = blocks_of(page)
    assert len(blocks) == (ROOT / f"docs/en/{page}.md").read_text().count("\n```") / 2
    for block in blocks:
        assert block.title or commands_of(block), block


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "page", ["tutorials/deepspeed-chat", "tutorials/trl", "tutorials/commands", "api"]
)
def test_pages_that_continue_there(page, followed, tmp_path, monkeypatch):
    # The estimate of a page reads configs of the Hub.
    with serving_opt(tmp_path / "home") as (_, environment):
        monkeypatch.setattr(followed, "environment", environment)
        if page == "tutorials/commands":
            monkeypatch.setattr(followed, "python", sys.executable)
        follow(page, followed)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_defaults_beside_those_of_trl_are_ours(language):
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    text = (ROOT / "docs" / language / "tutorials/trl.md").read_text()
    tables = re.split(r"^\| `\w+Config`.*`(\w+)`.*\|\n", text, flags=re.MULTILINE)[1:]
    stages = dict(zip(tables[::2], tables[1::2], strict=True))
    assert stages.keys() == {"sft", "dpo", "rlhf"}
    for stage, table in stages.items():
        found = re.findall(r"^\|.*\| `(\w+)` \| (.+) \|$", table, re.MULTILINE)
        assert found
        for key, value in found:
            assert config[stage]["defaults"][key] == yaml.safe_load(value), key
