"""The types of the config, and the errors of what does not fit them."""

import pytest

from snakechat.config.schema import RECIPES, ConfigError, checked
from snakechat.config.sections import PlacementKeys, Sections
from snakechat.workflow.placement import Placement
from support.configs import config_values, load, tiny


def dataset(**settings):
    """Return a dataset with changed settings."""
    return {"datasets": {"mine": settings}}


def test_a_mistake_in_one_of_several_forms_is_reported_in_that_form():
    for values, message in (
        (tiny("rlhf", reward=3), "rlhf.recipes.tiny.reward: Input should be a valid string or "),
        (
            tiny("rlhf", reward_functions={"shop": {"wieght": 1}}),
            "rlhf.recipes.tiny.reward_functions.shop.wieght: unknown key (did you mean weight?)",
        ),
        (
            tiny("dpo", lerning_rate=1, epchs=1),
            "dpo.recipes.tiny.lerning_rate: unknown key (did you mean learning_rate or"
            " lora_learning_rate?); 'epchs': unknown key (did you mean epochs?)",
        ),
        (tiny("sft", placement={"offlod": "none"}), "sft.recipes.tiny.placement.offlod: unknown"),
        (tiny("sft", datasets=[{"toy": 0}]), "sft.recipes.tiny.datasets.0.toy: Input should be gr"),
        (dataset(path="x", format="plan"), "datasets.mine.format: Input should be 'plain', "),
        (dataset(path="x", fromat="plain"), "datasets.mine.fromat: unknown key (did you mean form"),
        (dataset(path="x"), "datasets.mine.format: this key is required"),
        (dataset(path="x", format="plain", split=["dpo"]), "datasets.mine.split"),
        (dataset(format="plain"), "datasets.mine: expected path or hub"),
        (dataset(path="x", format="plain", remove="("), "datasets.mine.remove: not a regular exp"),
        (dataset(path="x", format="plain", eval="*.csv"), "datasets.mine.eval: has no effect"),
        (dataset(path="x", format="prompt", remove="a"), "datasets.mine.remove: has no effect"),
        (dataset(path="x", generate="shop"), "datasets.mine.generate: an entry has either path"),
        (tiny("sft", lora_rank=True), "sft.recipes.tiny.lora_rank: expected a number, found True"),
        (tiny("sft", adam_betas=[0.9, False]), "sft.recipes.tiny.adam_betas.1: expected a number"),
        ({"models": {"mine\n": {"hub": "gpt2"}}}, "models.'mine\\n': String should match pattern"),
        ({"models": {"mine": {"hub": "a", "revision": 12}}}, "models.mine.revision: Input should"),
        (tiny("rlhf", preset=3), "rlhf.recipes.tiny.preset: Input should be a valid string"),
        ({"generations": {"recipes": {"tiny": {"preset": "modern"}}}}, "generations.recipes.tiny"),
        ({"sft": {"recipes": {1.3: {}}}}, "sft.recipes: Input should be a valid string, found 1.3"),
    ):
        with pytest.raises(ConfigError) as error:
            load(values)
        assert str(error.value).startswith(f"config: {message}")
        assert "\n" not in str(error.value)


def test_a_key_that_resembles_none_is_reported_with_the_pages_that_have_all():
    with pytest.raises(ConfigError, match=r"sft.unheard_of: unknown key \(docs/en/config.md has"):
        load({"sft": {"unheard_of": {}}})


@pytest.mark.parametrize("section", ["datasets", "models"])
def test_an_unknown_path_of_a_recipe_names_the_section_that_needs_an_entry(section):
    key = {"datasets": {"datasets": ["my/folder"]}, "models": {"model": "my/folder"}}[section]
    with pytest.raises(ConfigError, match=f": {section} needs an entry with the path of your"):
        load(tiny("sft", **key))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("actor_learning_rate", 1, 1.0),
        # As YAML reads it.
        ("actor_learning_rate", "1e-5", 1e-5),
        ("datasets", ["toy", {"gsm8k": 1}], [["toy", 1.0], ["gsm8k", 1.0]]),
        (
            "reward_functions",
            {"shop": 1, "length_bounds": {"weight": 2, "arguments": {"max_characters": 3}}},
            {"shop": 1.0, "length_bounds": {"weight": 2.0, "arguments": {"max_characters": 3}}},
        ),
    ],
)
def test_values_become_those_of_the_type(key, value, expected):
    recipe = load(tiny("rlhf", **{key: value})).recipe("rlhf", "tiny")
    assert repr(recipe[key]) == repr(expected)


@pytest.mark.parametrize("stage", RECIPES)
def test_each_setting_has_a_default_in_the_config(stage):
    recipe = RECIPES[stage]
    keys = recipe.__base__.model_fields.keys() - {*recipe.not_keys, "seed"}
    assert keys <= config_values()[stage]["defaults"].keys()


def test_a_deployment_has_the_keys_of_a_placement():
    assert PlacementKeys.model_fields.keys() == Placement.__dataclass_fields__.keys()


def test_values_of_a_sweep_keep_their_types():
    over = {"kl_coef": [1, 0.5], "algorithm": ["ppo"], "scale_by_std": [True]}
    values = load({"sweeps": {"mine": {"stage": "rlhf", "recipe": "tiny", "over": over}}}).values
    assert repr(values["sweeps"]["mine"]["over"]) == repr(over)


def test_config_is_valid_and_keeps_its_values():
    assert checked(config_values(), Sections) == config_values()


@pytest.mark.parametrize("glob", ["/data/*.csv", "../*.csv", "data/../../*.csv", "data/.."])
def test_a_glob_names_files_inside_of_the_source(glob):
    load(dataset(path="x", format="plain", train="a..b/*.csv?download=true"))
    with pytest.raises(ConfigError, match=r"^config: datasets\.mine\.train: "):
        load(dataset(path="x", format="plain", train=glob))


@pytest.mark.parametrize(
    "mistake", [{"url": "https://sk-secret@host/v1"}, {"key_env": "sk-secret"}]
)
def test_a_key_in_place_of_its_variable_or_in_an_address_is_not_printed(mistake):
    judge = {"url": "http://host/v1", "model": "wise", "rubric": "Be kind.", **mistake}
    with pytest.raises(
        ConfigError, match=rf"^config: llm_judges\.wise\.{next(iter(mistake))}: "
    ) as error:
        load({"llm_judges": {"wise": judge}})
    assert "secret" not in str(error.value)
