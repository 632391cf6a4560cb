"""Changes between two specs, a line for each."""

from pathlib import Path

import pytest

from snakechat.jobs.stale_causes import lacking_configfiles, spec_changes
from snakechat.workflow.digests import sealed_json
from support.specs import EMPTY_SPEC

ONE, TWO = "1" * 64, "2" * 64
OLD_FILES = {"train_sft.py": ONE, "snakechat/a.py": ONE, "snakechat/b.py": ONE}
NEW_FILES = {"train_sft.py": TWO, "snakechat/a.py": ONE, "snakechat/c.py": ONE}
OF_FILES = ["snakechat/b.py was removed", "snakechat/c.py was added", "train_sft.py changed"]


@pytest.mark.parametrize(
    ("part", "old", "new", "expected"),
    [
        ("settings", {"a": 1, "b": [1, 2]}, {"b": [1, 2], "a": 1}, []),
        ("settings", {"a": 1}, {"a": 1.0}, ["a changed from 1 to 1.0"]),
        ("settings", {"a": "1"}, {"a": True}, ['a changed from "1" to true']),
        ("settings", {"a": None}, {}, ["a was removed: null"]),
        ("settings", {}, {"a": {"b": 0.5, "c": {}}}, ["a.b was added: 0.5", "a.c was added: {}"]),
        # Specs have it only if it is true.
        ("deterministic", False, True, ["deterministic changed from false to true"]),
        ("code", OLD_FILES, NEW_FILES, OF_FILES),
        ("files", OLD_FILES, NEW_FILES, OF_FILES),
        (
            "inputs",
            # Recorded specs have no names.
            {"model": {"rule": "init_model"}},
            {"model": {"rule": "fetch_model", "name": "opt", "path": "b"}},
            ['input model changed from "init_model" to "fetch_model"'],
        ),
        # A result of another rule has one change.
        ("rule", "fetch_model", "init_model", ["was made by fetch_model before"]),
    ],
)
def test_the_parts_of_a_spec_are_compared_by_value(part, old, new, expected):
    before, after = (EMPTY_SPEC | {"rule": "train_sft", part: value} for value in (old, new))
    if old is False:
        del before[part]
    assert spec_changes(before, after) == expected


def test_of_many_changes_ten_are_described():
    old, new = ({f"{number:04}": version for number in range(1012)} for version in "12")
    specs = (EMPTY_SPEC | {"rule": "train_sft", "requirements": each} for each in (old, new))
    *lines, last = spec_changes(*specs)
    assert lines == [f'library 000{number} changed from "1" to "2"' for number in range(10)]
    assert last == "1,002 more changes like these"


def test_a_forgotten_config_file_is_named_however_a_command_spells_the_others(tmp_path):
    words = ["--configfile=mine.yaml", "--config", "seed=3", "--configfile", "/a/run/more.yaml"]
    (tmp_path / "run.json").write_text(sealed_json({"spec": "", "options": {"snakemake": words}}))
    (tmp_path / "link.yaml").symlink_to("more.yaml")
    for more in (Path("../run/more.yaml"), Path("/a/run/more.yaml"), tmp_path / "link.yaml"):
        assert lacking_configfiles(tmp_path, [more]) == [
            "it was built with --configfile mine.yaml, which this command lacks"
        ]
        assert lacking_configfiles(tmp_path, [more, Path("mine.yaml")]) == []
