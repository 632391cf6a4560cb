"""Checks before the first job of a build."""

import shutil

import pytest

from conftest import ROOT
from snakechat.workflow.errors import InputError
from snakechat.workflow.preflight import import_reward_functions


@pytest.fixture
def sources(tmp_path):
    """Sources whose reward function imports a module that the user has elsewhere."""
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards/mine.py").write_text(
        "import own_words\n\n\ndef score(prompts, responses):\n    return [0.0] * len(responses)\n"
    )
    shutil.copytree(ROOT / "scripts/snakechat", tmp_path / "scripts/snakechat")
    return tmp_path


def test_modules_are_found_where_jobs_find_them(sources, tmp_path_factory, monkeypatch):
    with pytest.raises(InputError, match="No module named 'own_words'"):
        import_reward_functions(sources, ["mine"])
    library = tmp_path_factory.mktemp("library")
    (library / "own_words.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(library))
    import_reward_functions(sources, ["mine"])
