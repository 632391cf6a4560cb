"""Changes between two specs, as sentences."""

import pytest

from snakechat.planning.changes import (
    changed_code,
    changed_settings,
    config_key,
    replaced_inputs,
    spec_changes,
    summarize,
)


def sft_spec(**settings):
    return {
        "rule": "train_sft",
        "name": "tiny",
        "settings": settings,
        "code": {},
        "files": {},
        "requirements": {},
    }


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"a": 1, "b": [1, 2]}, {"b": [1, 2], "a": 1}, []),
        ({"a": 1}, {"a": 1.0}, ["sft.a changed from 1 to 1.0"]),
        ({"a": 1}, {"a": True}, ["sft.a changed from 1 to true"]),
        ({"a": "1"}, {"a": 1}, ['sft.a changed from "1" to 1']),
        ({"a": None}, {}, ["sft.a was removed: null"]),
        (
            {},
            {"a": {"b": 0.5, "c": {}}},
            ["sft.a.b was added: 0.5", "sft.a.c was added: {}"],
        ),
        (
            {"betas": [0.9, 0.95]},
            {"betas": [0.9]},
            ["sft.betas changed from [0.9, 0.95] to [0.9]"],
        ),
        (
            {"datasets": [["a", 1], ["b", 0.5]]},
            {"datasets": [["a", 2], ["b", 1.0]]},
            ["sft.datasets changed from [a, {b: 0.5}] to [{a: 2}, b]"],
        ),
    ],
)
def test_settings_are_compared_by_value_and_printed_as_yaml(old, new, expected):
    assert changed_settings(sft_spec(**old), sft_spec(**new)) == expected


def test_deterministic_is_compared_although_specs_have_it_only_if_it_is_true():
    old = sft_spec()
    new = {**old, "deterministic": True}
    assert spec_changes(old, new, {}) == ["deterministic changed from false to true"]
    assert spec_changes(new, old, {}) == ["deterministic changed from true to false"]


def test_inputs_are_compared_by_job():
    def spec(**inputs):
        names = {key: name.split() for key, name in inputs.items()}
        return {
            "inputs": {key: {"rule": rule, "name": name} for key, (rule, name) in names.items()}
        }

    old = spec(model="init_model tiny", tokens="tokenize_sft a", ptx="tokenize_sft b")
    new = spec(model="fetch_model opt", tokens="tokenize_sft a", reward="train_reward c")
    assert replaced_inputs(old, new) == [
        "reads fetch_model opt instead of init_model tiny",
        "no longer reads tokenize_sft b",
        "now reads train_reward c",
    ]


def test_code_is_compared_by_file():
    old = {"train_sft.py": "1", "snakechat/a.py": "1", "snakechat/b.py": "1", "rewards/x.py": "1"}
    new = {"train_sft.py": "2", "snakechat/a.py": "1", "snakechat/c.py": "1", "rewards/y.py": "1"}
    assert changed_code({"code": old}, {"code": new}) == [
        "reward function rewards/x.py is no longer used",
        "reward function rewards/y.py is now used",
        "module snakechat/b.py is no longer imported",
        "module snakechat/c.py is now imported",
        "program train_sft.py changed",
    ]


def test_a_result_of_another_rule_has_one_change():
    old = {**sft_spec(a=1), "rule": "fetch_model"}
    assert spec_changes(old, sft_spec(a=2), {}) == ["was made by fetch_model before"]


def test_of_many_names_five_are_described():
    names = [f"{number:02}" for number in reversed(range(1_007))]
    lines = summarize(names, "file {}".format, "{} more")
    assert lines == ["file 00", "file 01", "file 02", "file 03", "file 04", "1,002 more"]
    assert summarize(["b", "a"], str.upper, "{} more") == ["A", "B"]


@pytest.mark.parametrize(
    ("rule", "key", "expected"),
    [
        ("generate_responses", "temperature", "generations.temperature"),
        ("score_responses", "reward", "generations.reward"),
        ("tokenize_generations", "max_prompt_length", "generations.max_prompt_length"),
        ("select_responses", "min_margin", "datasets.mine.min_margin"),
        ("compute_reference", "dtype", "dpo.dtype"),
        ("compute_reference", "batches.epochs", "dpo.epochs"),
        ("compute_reference", "batches.seed", "seed"),
    ],
)
def test_the_config_has_the_settings_of_generated_responses(rule, key, expected):
    assert config_key({"rule": rule, "name": "mine"}, key) == expected
