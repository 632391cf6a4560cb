"""Checks of the config: mistakes are one line that names the key; values get their types."""

import json
import re
import shutil

import pytest

from conftest import ROOT
from snakechat.config.loading import load_config
from snakechat.config.recipes import RECIPES, ConfigError
from snakechat.config.sections import PlacementKeys
from snakechat.workflow.processes import Placement
from support.configs import config_values, load, tiny

TEXTS = {"datasets": {"texts": {"path": "x", "format": "text"}}}
JUDGE = {"url": "http://host/v1", "model": "wise", "rubric": "Be kind."}


def with_judge(**settings):
    """Return an LLM judge with changed settings."""
    return {"llm_judges": {"wise": {**JUDGE, **settings}}}


def with_dataset(stage="sft", **settings):
    """Return a dataset and a recipe that uses it."""
    recipe = {"model": "tiny", "datasets": ["mine"]}
    dataset = {"path": "mine", "format": "plain", **settings}
    return {"datasets": {"mine": dataset}, stage: {"recipes": {"mine": recipe}}}


REWARD_FUNCTIONS = {
    "broken": b"def score(prompts, responses):\n    return (\n",
    "deep": b"x = 1" + 5000 * b" + 1",
    "reward": b"def score(prompts, responses):\n    return []\n",
    # Its last function counts.
    "scaled": b"def score(p, r, x):\n    return []\n\n\ndef score(p, r, scale=1):\n    return []\n",
    "needs": b"try:\n    from . import x\nexcept ImportError:\n    x = 1\n\n"
    b"def score(prompts, responses, solution, *, bonus, level=1):\n    return []\n",
}

GENERATED = {"generations": "tiny", "select": "best", "split": {"sft": 1, "reward": 1, "rlhf": 1}}
MINE, OF_MINE = {"datasets": {"mine": GENERATED}}, {"datasets": ["mine"]}
OF_GENERATED = {"init": {"model_type": "opt"}, "tokenizer": {"train_on": "mine", "vocab_size": 300}}
LABELS = {"label": "mine", "llm_judge": "wise"}
SFT_ALONE = {"sft": 1, "reward": 0, "rlhf": 0}
TWO_OF_THREE = {"vllm_tensor_parallel_size": 2, "gpus_per_node": 3}

# The key that the error names, and changes to config.yaml. One case for each kind of check.
MISTAKES = [
    # Names that the config does not have, or that are not in the right section.
    ("sft.recipes.tiny.model", tiny("sft", model="tinny")),
    ("rlhf.recipes.tiny.actor", tiny("rlhf", actor="reward/tiny")),
    ("sft.recipes.tiny.placement", tiny("sft", placement="laptop")),
    # Datasets without what a recipe needs.
    ("datasets.mine.columns", with_dataset(format="scored", columns={"first": "a"})),
    ("datasets.mine.keep", with_dataset(keep=["first.answer", "second.answer"])),
    ("sft.recipes.tiny.datasets", tiny("sft", datasets=["toy", {"toy": 2}])),
    ("reward.recipes.mine.datasets", with_dataset("reward", format="messages")),
    ("reward.recipes.mine.datasets", with_dataset("reward", split=SFT_ALONE)),
    ("dpo.recipes.mine.datasets", MINE | {"dpo": {"recipes": {"mine": OF_MINE}}}),
    # Rows of a model that has to be there before.
    ("models.mine.tokenizer.train_on", MINE | {"models": {"mine": OF_GENERATED}}),
    # A dataset that depends on itself.
    ("datasets.mine.label", {**with_judge(), "datasets": {"mine": LABELS}}),
    (
        "rlhf.presets.mine.preset",
        {"rlhf": {"presets": {"mine": {"preset": "ppo"}}, **tiny("rlhf", preset="mine")["rlhf"]}},
    ),
    # Recipes that depend on themselves.
    ("rlhf.recipes.tiny", tiny("rlhf", algorithm="distill", teacher="rlhf/tiny")),
    (
        "sft.recipes.tiny",
        {**with_judge(), "datasets": {"mine": LABELS | {"label": "toy-round-1"}}}
        | tiny("sft", **OF_MINE),
    ),
    # Settings that do not fit each other.
    ("reward.recipes.tiny.save_strategy", tiny("reward", save_strategy="best")),
    ("rlhf.recipes.tiny.compare_with", tiny("rlhf", compare_with=["dpo/1.3b"])),
    ("rlhf.recipes.tiny.ptx", tiny("rlhf", ptx="125m")),
    ("rlhf.recipes.tiny.kl_estimator", tiny("rlhf", kl_in="loss", kl_estimator="k1")),
    ("rlhf.recipes.tiny.global_batch_size", tiny("rlhf", algorithm="grpo", num_generations=3)),
    ("rlhf.recipes.tiny.num_generations", tiny("rlhf", algorithm="grpo", num_generations=1)),
    ("rlhf.recipes.tiny.teacher", tiny("rlhf", algorithm="distill")),
    ("rlhf.recipes.tiny.teacher", tiny("rlhf", teacher="dpo/tiny")),
    ("rlhf.recipes.tiny", tiny("rlhf", reward=None)),
    ("sft.recipes.tiny.placement.zero_stage", tiny("sft", placement={"offload": "optimizer"})),
    (
        "sft.recipes.tiny.placement.compile",
        tiny("sft", placement={"compile": True, "zero_stage": 3}),
    ),
    (
        "models.opt-125m.template_arguments.tools",
        {"models": {"opt-125m": {"template_arguments": {"tools": "none"}}}},
    ),
    ("rlhf.recipes.tiny.datasets", TEXTS | tiny("rlhf", datasets=["texts"])),
    ("sft.recipes.tiny.datasets", TEXTS | tiny("sft", datasets=["texts"], train_on="response")),
    ("llm_judges.wise.parameters", with_judge(parameters={"logprobs": 1})),
    ("llm_judges.wise.scale", with_judge(scale=[1, 1])),
    (
        "benchmarks.mine.metrics.items",
        {"benchmarks": {"mine": {"command": "x {output}", "metrics": {"items": ["x.json"]}}}},
    ),
    ("sft.recipes.tiny.gate", tiny("sft", gate={"metric": "loss", "min": 2, "max": 1})),
    ("datasets.mine.min_margin", {"datasets": {"mine": GENERATED | {"min_margin": 0.5}}}),
    ("models.tiny.template_arguments", {"models": {"tiny": {"template_arguments": {"a": True}}}}),
    (
        "rlhf.recipes.tiny.placement.vllm_tensor_parallel_size",
        tiny("rlhf", generation_backend="vllm", placement=TWO_OF_THREE),
    ),
    # Reward functions: unknown, with a syntax error, nested too deeply, with an unknown argument,
    # without a column, with the name of the reward model in metrics.
    *(
        ("rlhf.recipes.tiny.reward_functions", tiny("rlhf", reward_functions=functions))
        for functions in (
            {"shop": 1, "broken": 1},
            {"deep": 1},
            {"scaled": {"weight": 1, "arguments": {"scle": 2}}},
            {"needs": {"weight": 1, "arguments": {"bonus": 2}}},
            {"reward": 1},
        )
    ),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A project with the invalid reward functions."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "scripts").symlink_to(ROOT / "scripts")
    shutil.copytree(ROOT / "rewards", folder / "rewards")
    for name, content in REWARD_FUNCTIONS.items():
        (folder / f"rewards/{name}.py").write_bytes(content)
    return folder


@pytest.mark.parametrize(("key", "changes"), MISTAKES)
def test_mistake_is_reported_in_one_line(root, key, changes):
    with pytest.raises(ConfigError, match=rf"^config: {key}:? [^\n]*$"):
        load(changes, root)


def test_datasets_of_prompts_and_kept_columns_serve_rlhf(root):
    dataset = {"path": "mine", "format": "prompt", "keep": ["answers.solution"]}
    functions = {"needs": {"weight": 0.5, "arguments": {"bonus": 1}}, "length_bounds": 1}
    # A parameter with a default.
    functions["scaled"] = {"weight": 1, "arguments": {"scale": 2}}
    recipe = {"datasets": ["toy", "mine"], "reward_functions": functions}
    config = load({"datasets": {"mine": dataset}, **tiny("rlhf", **recipe)}, root)
    assert config.split_weights("mine") == {"sft": 0, "reward": 0, "rlhf": 1}


LANGUAGE_MODEL = {"architectures": ["LlamaForCausalLM"]}
# With two labels, the default of transformers.
CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"]}
SCORER = CLASSIFIER | {"id2label": {"0": "SCORE"}}


@pytest.mark.parametrize(
    ("keys", "recipe", "problem"),
    [
        (LANGUAGE_MODEL, {"reward": "models/mine"}, "is LlamaForCausalLM, expected a sequence cl"),
        (CLASSIFIER, {"reward": "models/mine"}, "has 2 labels, expected 1, the score: use"),
        (SCORER, {"actor": "models/mine"}, "is a sequence classifier, expected a language model"),
        (SCORER, {"reward": {"models/mine": 0.5, "reward/tiny": 1}}, None),
        # An unreadable file is not a mistake in the config.
        (None, {"reward": "models/mine"}, None),
    ],
)
def test_a_local_model_is_of_the_kind_that_its_use_needs(keys, recipe, problem, tmp_path):
    (tmp_path / "config.json").write_text("{" if keys is None else json.dumps(keys))
    changes = {"models": {"mine": {"path": str(tmp_path)}}, **tiny("rlhf", **recipe)}
    if problem is None:
        load(changes)
        return
    expected = f"^config: rlhf.recipes.tiny.* names .*mine, .*{problem}"
    with pytest.raises(ConfigError, match=expected):
        load(changes)


# --- types -----------------------------------------------------------------------------------


def dataset(**settings):
    """Return a dataset with changed settings."""
    return {"datasets": {"mine": settings}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (tiny("rlhf", reward=3), "rlhf.recipes.tiny.reward: Input should be a valid string or "),
        (
            tiny("dpo", lerning_rate=1, epchs=1),
            "dpo.recipes.tiny.lerning_rate: unknown key (did you mean learning_rate or"
            " lora_learning_rate?); 'epchs': unknown key (did you mean epochs?)",
        ),
        (tiny("sft", datasets=[{"toy": 0}]), "sft.recipes.tiny.datasets.0.toy: Input should be gr"),
        (dataset(path="x"), "datasets.mine.format: this key is required"),
        (dataset(format="plain"), "datasets.mine: expected path or hub"),
        (dataset(path="x", format="plain", remove="("), "datasets.mine.remove: not a regular exp"),
        (dataset(path="x", format="plain", eval="*.csv"), "datasets.mine.eval: has no effect"),
        (dataset(path="x", generate="shop"), "datasets.mine.generate: an entry has either path"),
        (tiny("sft", lora_rank=True), "sft.recipes.tiny.lora_rank: expected a number, found True"),
        ({"sft": {"recipes": {1.3: {}}}}, "sft.recipes: Input should be a valid string, found 1.3"),
        ({"sft": {"recipes": {"a b": {}}}}, "sft.recipes.a b: expected up to 200 letters"),
        (dataset(hub="a/b/c"), "datasets.mine.hub: expected NAME or OWNER/NAME, found 'a/b/c'"),
    ],
)
def test_a_mistake_in_one_of_several_forms_is_reported_in_that_form(values, message):
    with pytest.raises(ConfigError, match=rf"^config: {re.escape(message)}[^\n]*$"):
        load(values)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
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


@pytest.mark.parametrize(
    ("key", "place"), [("placement", "placement.nodes"), ("algorithm", "algorithm")]
)
def test_a_key_that_the_defaults_lack_is_named(key, place):
    values = config_values()
    del values["rlhf"]["defaults"][key]
    with pytest.raises(ConfigError, match=rf"^config: rlhf\.recipes\.[^:]*\.{place}: this key is"):
        load_config(values, ROOT, ROOT, {})


@pytest.mark.parametrize("glob", ["/data/*.csv", "../*.csv", "data/../../*.csv"])
def test_a_glob_names_files_inside_of_the_source(glob):
    load(dataset(path="x", format="plain", train="a..b/*.csv?download=true"))
    with pytest.raises(ConfigError, match=r"^config: datasets\.mine\.train: "):
        load(dataset(path="x", format="plain", train=glob))


@pytest.mark.parametrize(
    "mistake", [{"url": "https://sk-secret@host/v1"}, {"key_env": "sk-secret"}]
)
def test_a_key_in_place_of_its_variable_or_in_an_address_is_not_printed(mistake):
    place = rf"^config: llm_judges\.wise\.{next(iter(mistake))}: "
    with pytest.raises(ConfigError, match=place) as error:
        load(with_judge(**mistake))
    assert "secret" not in str(error.value)
