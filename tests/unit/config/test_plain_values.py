"""Values that YAML can express and no key of the config can have."""

import datetime
import math

import pytest

from snakechat.config.errors import ConfigError
from snakechat.config.plain_values import MAX_DEPTH, check_plain_values
from support.configs import load


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return {"a": value}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"a": {"b": [1, math.inf]}}, "a.b.1: inf is not a finite number"),
        ({"a": 2**70}, "a: a number of more than 64 bits"),
        ({"a": datetime.date(2026, 1, 2)}, "a: '2026-01-02' is of type date, expected text"),
        ({"a": "x\0y"}, "a: text with a null character"),
        ({"a": {"\ud83d": 1}}, "half of a surrogate pair"),
        ({"a": {1: 2}}, "a.1: the key '1' is of type int, expected text: quote it"),
        (nested(100_000), "more than 50 levels deep"),
    ],
)
def test_other_values_are_an_error_of_one_line(values, message):
    with pytest.raises(ConfigError) as error:
        check_plain_values(values)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_plain_values_are_accepted():
    check_plain_values({"a": [1, 2.5, None, True, "é\n", {"b": {}}], **nested(MAX_DEPTH - 2)})


@pytest.mark.parametrize("value", [math.nan])
def test_a_number_that_is_not_finite_is_reported_with_its_key(value):
    changes = {"rlhf": {"recipes": {"tiny": {"kl_coef": value}}}}
    with pytest.raises(
        ConfigError, match=r"^config: rlhf.recipes.tiny.kl_coef: -?(inf|nan) is not"
    ):
        load(changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"sft": {"recipes": {"mine\n": {}}}},
        {"datasets": {"toy\n": {"path": "a", "format": "plain"}}},
        {"models": {"mine": {"hub": "gpt2\n"}}},
        {"store_max_size": "10G\n"},
    ],
)
def test_a_trailing_line_break_does_not_match_a_pattern(changes):
    with pytest.raises(ConfigError) as error:
        load(changes)
    assert "does not match" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_name_in_other_letters_is_an_error_that_lists_the_allowed_ones():
    with pytest.raises(ConfigError, match=r"models: '小模型' .* \(a name has letters A to Z"):
        load({"models": {"小模型": {"hub": "gpt2"}}})


@pytest.mark.parametrize("revision", [123])
def test_a_revision_that_yaml_reads_as_a_number_has_to_be_quoted(revision):
    with pytest.raises(ConfigError, match=r"models.mine.revision.*quote it"):
        load({"models": {"mine": {"hub": "gpt2", "revision": revision}}})
    command_line = {"models": {"mine": {"hub": "gpt2", "revision": "0123"}}}
    assert load(command_line=command_line).values["models"]["mine"]["revision"] == "0123"
