"""Checks before the first job of a build."""

import shutil

import pytest

from conftest import ROOT
from snakechat.workflow.errors import InputError
from snakechat.workflow.hermetic import import_reward_functions


@pytest.fixture
def sources(tmp_path):
    """Sources whose reward function imports a module that the user has elsewhere."""
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards/mine.py").write_text(
        "import own_words\n\n\ndef score(prompts, responses):\n    return [0.0] * len(responses)\n"
    )
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    return tmp_path


def test_modules_are_found_where_jobs_find_them(sources, tmp_path_factory, monkeypatch):
    with pytest.raises(InputError, match="No module named 'own_words'"):
        import_reward_functions(sources, ["mine"], "auto")
    library = tmp_path_factory.mktemp("library")
    (library / "own_words.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(library))
    for mode in ("auto", "off"):
        import_reward_functions(sources, ["mine"], mode)


def test_a_file_that_does_not_count_is_denied_before_the_first_job(sources):
    (sources / "rewards/mine.py").write_text(f"open({str(sources / 'words.txt')!r})\n")
    (sources / "words.txt").write_text("good")
    with pytest.raises(InputError, match=r"mine.py: line 1: .*words.txt is denied: a job reads"):
        import_reward_functions(sources, ["mine"], "auto")
