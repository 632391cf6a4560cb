"""The text of config files, values of the command line, sweeps, and recipes with all settings."""

import datetime
import math
import re

import pytest

from snakechat.config.loading import check_config_files, parse_command_line_values, update
from snakechat.config.recipes import STAGES, ConfigError
from support.configs import load, project_values, tiny

# --- text -------------------------------------------------------------------------------------


NO_MAPPING = 'mapping values are not allowed in this context in "<unicode string>"'
FULL_WIDTH, COLON = "x\uff1ay\n b: 2\n".encode(), "character '\uff1a')"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"seed: 1\nsft: {}\nseed: 2\n", ": seed is written twice, in lines 1 and 3: keep"),
        (b"a: [1\nb: 2\n", " is not YAML: while parsing a flow sequence"),
        (
            FULL_WIDTH,
            f" is not YAML: {NO_MAPPING}, line 2, column 3 (there is the full-width {COLON}",
        ),
        (b"[1]", ": expected sections"),
        (b"seed: 2026-13-01", " cannot be read: month must be in 1..12"),
        (b"a: " + b"[" * 100_000, " cannot be read: values are nested in more than 100 levels"),
        (b"seed: !!python/name:os.system x", " is not YAML: could not determine a constructor"),
        (b"\xff\xfea", " cannot be read: 'utf-8' codec can't decode"),
    ],
)
def test_a_mistake_in_the_text_is_an_error_of_one_line(text, message, tmp_path):
    (tmp_path / "x.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=f"^x.yaml{re.escape(message)}[^\n]*$"):
        check_config_files([tmp_path / "x.yaml"])


def test_merges_and_byte_order_marks_are_accepted(tmp_path):
    text = b"\xef\xbb\xbfa: &x {b: 1}\nc: {<<: *x, <<: *x, b: 2}\n"
    (tmp_path / "x.yaml").write_bytes(text)
    check_config_files([tmp_path / "x.yaml", tmp_path / "y.yaml"])


# --- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2.0e-5", 2e-5),
        ("1e-5", "1e-5"),
        (["2026-02-30", "="], ["2026-02-30", "="]),
        ({"sft": {"defaults": {"epochs": "2"}}}, {"sft": {"defaults": {"epochs": 2}}}),
        ({"hub": "gpt2", "revision": "0012345"}, {"hub": "gpt2", "revision": "0012345"}),
    ],
)
def test_values_of_the_command_line_are_read_as_yaml(text, value):
    parsed = parse_command_line_values(text)
    assert repr(parsed) == repr(value)


@pytest.mark.parametrize("value", [math.inf, datetime.date(2026, 1, 2), "\ud83d"])
def test_a_value_that_a_spec_cannot_have_is_an_error_with_its_key(value):
    arguments = {"shop": {"weight": 1, "arguments": {"sizes": [value]}}}
    place = "rlhf.recipes.tiny.reward_functions"
    with pytest.raises(ConfigError, match=f"^config: {place}: expected text in UTF-8, finite"):
        load(tiny("rlhf", reward_functions=arguments))
    with pytest.raises(ConfigError, match=r"^config: models\.tiny\.init\.size: expected text in"):
        load({"models": {"tiny": {"init": {"size": value}}}})


def test_update_separates_aliases():
    shared = {"deployment": "cpu"}
    values = {}
    update(values, {"a": shared, "b": shared})
    update(values, {"a": {"threads": 8}})
    assert values == {"a": {"deployment": "cpu", "threads": 8}, "b": {"deployment": "cpu"}}


def test_command_line_overrides_config_files():
    changes = {"sft": {"defaults": {"epochs": 2, "seed": 5}}}
    config = load(changes, command_line={"sft": {"defaults": {"epochs": "3"}}, "seed": "7"})
    recipe = config.recipe("sft", "1.3b")
    assert (recipe["epochs"], recipe["seed"], config.values["seed"]) == (3, 5, 7)


def sweep(name="mine", **settings):
    """Return a sweep over the tiny recipe of rlhf."""
    over = {"kl_coef": [0.1, 0.2], "seed": [1, 2]}
    return {"sweeps": {name: {"stage": "rlhf", "recipe": "tiny", "over": over, **settings}}}


def test_sweep_adds_a_recipe_for_each_combination():
    config = load(sweep())
    names = [f"mine-kl_coef-{kl}-seed-{seed}" for kl in (0.1, 0.2) for seed in (1, 2)]
    expected = config.recipe("rlhf", "tiny") | {"kl_coef": 0.2, "seed": 1}
    assert config.recipe("rlhf", names[2]) == expected
    assert config.compared_recipes("rlhf", "mine") == names
    assert config.compared_recipes("rlhf", "tiny-vs-mine") == ["tiny", *names]
    # A name may not contain a slash.
    config = load(sweep(over={"actor": ["models/tiny"]}))
    assert config.origin("rlhf", "mine-actor-models-tiny") == ("models", "tiny")


def test_a_sweep_has_a_name_of_its_own_and_so_have_its_recipes():
    with pytest.raises(ConfigError, match=r"^config: sweeps\.tiny has the name of a recipe"):
        load(sweep("tiny"))
    existing = {"rlhf": {"recipes": {"mine-seed-1": {"actor": "sft/tiny"}}}}
    with pytest.raises(ConfigError, match=r"sweeps\.mine makes recipe mine-seed-1, which exists"):
        load(sweep(over={"seed": [1]}) | existing)


def test_a_log_is_a_column_of_comparisons():
    config = load({"logs": {"original": "training.log"}})
    assert config.compared_recipes("sft", "tiny-vs-original") == ["tiny", "original"]
    for section in ({"logs": {"tiny": "a"}}, {**sweep(), "logs": {"mine": "a"}}):
        with pytest.raises(ConfigError, match=r"logs\.\w+ has the name of a recipe or a sweep"):
            load(section)


# --- recipes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "preset"),
    [(stage, name) for stage in STAGES for name in project_values()[stage]["presets"]],
)
def test_each_preset_of_the_project_is_valid_in_a_recipe(stage, preset):
    recipe = {"preset": preset, "datasets": ["toy"], "global_batch_size": 64}
    recipe |= {"actor": "sft/tiny"} if stage == "rlhf" else {"model": "tiny"}
    assert load({stage: {"recipes": {"mine": recipe}}}).recipe(stage, "mine")["seed"] == 1234


def test_a_recipe_overrides_its_preset_which_overrides_the_defaults():
    own = {"actor": "sft/tiny", "preset": "mine", "clip_range": 0.5}
    defaults = {"gamma": 0.9, "kl_coef": 0.3, "clip_range": 0.3}
    presets = {"mine": {"kl_coef": 0.4, "clip_range": 0.4}}
    changes = {"defaults": defaults, "presets": presets, "recipes": {"mine": own}}
    recipe = load({"rlhf": changes}).recipe("rlhf", "mine")
    assert (recipe["gamma"], recipe["kl_coef"], recipe["clip_range"]) == (0.9, 0.4, 0.5)


@pytest.mark.parametrize(
    ("own", "kl_in", "estimator"),
    [
        ({"algorithm": "ppo"}, "rewards", "k1"),
        ({"algorithm": "rloo", "num_generations": 2}, "loss", "k2"),
        ({"preset": "grpo"}, "loss", "k3"),
    ],
)
def test_the_algorithm_determines_where_the_kl_penalty_applies(own, kl_in, estimator):
    recipe = {**own, "actor": "sft/tiny", "reward": "reward/tiny", "global_batch_size": 64}
    settings = load({"rlhf": {"recipes": {"mine": recipe}}}).program_settings("rlhf", "mine")
    assert (settings["kl_in"], settings["kl_estimator"]) == (kl_in, estimator)


@pytest.mark.parametrize(
    ("default", "own", "changed"),
    [
        ({"deployment": "single_node", "threads": 8}, {}, {"threads": 8}),
        ({"threads": 8}, "single_node", {}),
        ({"threads": 8}, {"deployment": "single_node", "nodes": 2}, {"nodes": 2}),
    ],
)
def test_placement_of_a_recipe_overrides_that_of_the_defaults(default, own, changed):
    recipe = {"model": "tiny", "datasets": ["toy"], "placement": own}
    config = load({"sft": {"defaults": {"placement": default}, "recipes": {"mine": recipe}}})
    expected = config.values["deployments"]["single_node"] | changed
    assert config.recipe("sft", "mine")["placement"] == expected


@pytest.mark.parametrize(
    ("split", "weights"),
    [
        (["reward", "rlhf"], {"sft": 0, "reward": 1, "rlhf": 1}),
        ({"sft": 3, "reward": 0, "rlhf": 1}, {"sft": 3, "reward": 0, "rlhf": 1}),
        (None, {"sft": 1, "reward": 2, "rlhf": 2}),
        ({"sft": 0.1, "reward": 0.2, "rlhf": 0.2}, {"sft": 1, "reward": 2, "rlhf": 2}),
    ],
)
def test_the_split_of_a_dataset_is_phases_or_the_ratio_of_weights(split, weights):
    dataset = {"path": "mine", "format": "instruct", **({"split": split} if split else {})}
    labels = {"label": "mine", "llm_judge": "wise"}
    judge = {"url": "http://host/v1", "model": "wise", "rubric": "Be kind."}
    config = load({"datasets": {"mine": dataset, "labels": labels}, "llm_judges": {"wise": judge}})
    assert config.split_weights("mine") == weights
    assert config.split_weights("labels") == {"sft": 0, "reward": 1, "rlhf": 0}
