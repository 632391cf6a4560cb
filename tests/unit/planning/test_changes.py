"""Changes between two specs, a line for each."""

import pytest

from snakechat.planning.changes import spec_changes


def spec(settings=(), rule="train_sft", **parts):
    return {
        **{"rule": rule, "name": "tiny", "settings": dict(settings)},
        **{"code": {}, "files": {}, "requirements": {}, "inputs": {}},
        **parts,
    }


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"a": 1, "b": [1, 2]}, {"b": [1, 2], "a": 1}, []),
        ({"a": 1}, {"a": 1.0}, ["a changed from 1 to 1.0"]),
        ({"a": 1}, {"a": True}, ["a changed from 1 to true"]),
        ({"a": "1"}, {"a": 1}, ['a changed from "1" to 1']),
        ({"a": None}, {}, ["a was removed: null"]),
        ({}, {"a": {"b": 0.5, "c": {}}}, ["a.b was added: 0.5", "a.c was added: {}"]),
    ],
)
def test_settings_are_compared_by_value(old, new, expected):
    assert spec_changes(spec(old), spec(new)) == expected


def test_deterministic_is_compared_although_specs_have_it_only_if_it_is_true():
    old, new = spec(), spec(deterministic=True)
    assert spec_changes(old, new) == ["deterministic changed from false to true"]
    assert spec_changes(new, old) == ["deterministic changed from true to false"]


def test_of_files_only_their_names_are_described():
    old = {"train_sft.py": "1" * 64, "snakechat/a.py": "1" * 64, "snakechat/b.py": "1" * 64}
    new = {"train_sft.py": "2" * 64, "snakechat/a.py": "1" * 64, "snakechat/c.py": "1" * 64}
    expected = [
        "snakechat/b.py was removed",
        "snakechat/c.py was added",
        "train_sft.py changed",
    ]
    assert spec_changes(spec(code=old), spec(code=new)) == expected
    assert spec_changes(spec(files=old), spec(files=new)) == expected


def test_inputs_are_compared_by_job():
    old = {"model": {"rule": "init_model", "name": "tiny", "path": "a"}}
    new = {"model": {"rule": "fetch_model", "name": "opt", "path": "b"}}
    expected = ['input model changed from "init_model tiny" to "fetch_model opt"']
    assert spec_changes(spec(inputs=old), spec(inputs=new)) == expected


def test_a_result_of_another_rule_has_one_change():
    assert spec_changes(spec({"a": 1}, "fetch_model"), spec()) == ["was made by fetch_model before"]


def test_of_many_changes_ten_are_described():
    old, new = ({f"{number:04}": version for number in range(1012)} for version in "12")
    *lines, last = spec_changes(spec(requirements=old), spec(requirements=new))
    assert lines == [f'library 000{number} changed from "1" to "2"' for number in range(10)]
    assert last == "1,002 more changes like these"
