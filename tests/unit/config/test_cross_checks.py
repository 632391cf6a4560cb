"""Mistakes in the config: one line that names the key, before anything is planned."""

import json
import shutil

import pytest

from conftest import ROOT
from snakechat.config.errors import ConfigError
from support.configs import load

MY_TOKENIZER = {"train_on": "mine", "vocab_size": 300}
ALL_PHASES = {"sft": 1, "reward": 1, "rlhf": 1}


def with_dataset(stage="sft", **settings):
    """Return a dataset and a recipe that uses it."""
    recipe = {"model": "tiny", "datasets": ["mine"]}
    dataset = {"path": "mine", "format": "plain", **settings}
    return {"datasets": {"mine": dataset}, stage: {"recipes": {"mine": recipe}}}


def tiny(stage, **settings):
    """Return settings of a stage's tiny recipe."""
    return {stage: {"recipes": {"tiny": settings}}}


def judge(**settings):
    """Return an LLM judge with changed settings."""
    entry = {"url": "http://host/v1", "model": "wise", "rubric": "Be kind.", **settings}
    return {"llm_judges": {"wise": entry}}


REWARD_FUNCTIONS = {
    "broken": b"def score(prompts, responses):\n    return (\n",
    "lost": b"from snakechat.shop import is_right\n",
    "scaled": b"def score(prompts, responses, scale=1):\n    return []\n",
    "needs": b"def score(prompts, responses, solution, *, bonus, level=1):\n    return []\n",
}

# Changes to config.yaml, and the key that the error names. One case for each kind of check.
MISTAKES = {
    "gate without a bound": (
        tiny("reward", gate={"metric": "accuracy"}),
        "reward.recipes.tiny.gate",
    ),
    "number as text": (
        tiny("sft", learning_rate="1,0"),
        "sft.recipes.tiny.learning_rate",
    ),
    "unknown model": (tiny("sft", model="tinny"), "sft.recipes.tiny.model"),
    "unknown dataset": (tiny("reward", datasets=["toy", "toys"]), "reward.recipes.tiny.datasets"),
    "unknown recipe": (tiny("rlhf", actor="sft/tinny"), "rlhf.recipes.tiny.actor"),
    "unknown deployment": (tiny("sft", placement="laptop"), "sft.recipes.tiny.placement"),
    "name outside of output": ({"rlhf": {"recipes": {"../x": {}}}}, "rlhf.recipes.../x"),
    "field that the format needs": (
        with_dataset(format="scored", columns={"prompt": "q", "first": "a", "second": "b"}),
        "datasets.mine",
    ),
    "reward model on responses without pairs": (
        with_dataset("reward", format="messages"),
        "reward.recipes.mine.datasets",
    ),
    "recipe on its own responses": (
        {
            "generations": {"recipes": {"mine": {"model": "dpo/mine", "reward": "reward/tiny"}}},
            "datasets": {"mine": {"generations": "mine", "select": "best_and_worst"}},
            "dpo": {"recipes": {"mine": {"datasets": ["mine"]}}},
        },
        "generations.recipes.mine",
    ),
    "tokenizer of generated responses": (
        {
            "models": {"mine": {"init": {"model_type": "opt"}, "tokenizer": MY_TOKENIZER}},
            "datasets": {"mine": {"generations": "tiny", "select": "best"}},
        },
        "models.mine.tokenizer.train_on",
    ),
    "pairs of single responses": (
        {
            "datasets": {"mine": {"generations": "tiny", "select": "best", "split": ALL_PHASES}},
            "dpo": {"recipes": {"mine": {"datasets": ["mine"]}}},
        },
        "dpo.recipes.mine.datasets",
    ),
    "best model without evaluations": (
        tiny("reward", save_strategy="best"),
        "reward.recipes.tiny.save_strategy",
    ),
    "phase without rows": (
        with_dataset("reward", split={"sft": 1, "reward": 0, "rlhf": 0}),
        "reward.recipes.mine.datasets",
    ),
    "dataset twice": (tiny("sft", datasets=["toy", {"toy": 2}]), "sft.recipes.tiny.datasets"),
    "stage of an actor": (tiny("rlhf", actor="reward/tiny"), "rlhf.recipes.tiny.actor"),
    "tokenizer of a model to compare with": (
        tiny("rlhf", compare_with=["dpo/1.3b"]),
        "rlhf.recipes.tiny.compare_with",
    ),
    "tokenizer of ptx": (tiny("rlhf", ptx="125m"), "rlhf.recipes.tiny.ptx"),
    "label smoothing of a loss without it": (
        tiny("dpo", loss="ipo", label_smoothing=0.1),
        "dpo.recipes.tiny.label_smoothing",
    ),
    "k1 in the loss": (
        tiny("rlhf", kl_in="loss", kl_estimator="k1"),
        "rlhf.recipes.tiny.kl_estimator",
    ),
    "batch that separates the responses to a prompt": (
        tiny("rlhf", algorithm="grpo", num_generations=3),
        "rlhf.recipes.tiny.global_batch_size",
    ),
    "preset that does not fit a recipe": (
        {
            "rlhf": {
                "presets": {"mine": {"num_generations": 5}},
                "recipes": {"tiny": {"preset": "mine"}},
            }
        },
        "rlhf.recipes.tiny.global_batch_size",
    ),
    "distillation without a teacher": (
        tiny("rlhf", algorithm="distill"),
        "rlhf.recipes.tiny.teacher",
    ),
    "teacher of an algorithm without one": (
        tiny("rlhf", teacher="dpo/tiny"),
        "rlhf.recipes.tiny.teacher",
    ),
    "teacher that learns from itself": (
        tiny("rlhf", algorithm="distill", teacher="rlhf/tiny"),
        "rlhf.recipes.tiny",
    ),
    "stage of a teacher": (
        tiny("rlhf", algorithm="distill", teacher="reward/tiny"),
        "rlhf.recipes.tiny.teacher",
    ),
    "groups of distillation": (
        tiny("rlhf", algorithm="distill", teacher="dpo/tiny", drop_uniform_groups=True),
        "rlhf.recipes.tiny.drop_uniform_groups",
    ),
    "template argument that every rendering sets": (
        {"models": {"opt-125m": {"template_arguments": {"tools": "none"}}}},
        "models.opt-125m.template_arguments.tools",
    ),
    "nothing that scores": (tiny("rlhf", reward=None), "rlhf.recipes.tiny"),
    "unknown reward function": (
        tiny("rlhf", reward_functions={"shopping": 1}),
        "rlhf.recipes.tiny.reward_functions",
    ),
    "column that no dataset keeps": (
        tiny("rlhf", reward_functions={"needs": {"weight": 1, "arguments": {"bonus": 2}}}),
        "rlhf.recipes.tiny.reward_functions",
    ),
    "argument that a reward function does not take": (
        tiny("rlhf", reward_functions={"needs": {"weight": 1, "arguments": {"bonsu": 2}}}),
        "rlhf.recipes.tiny.reward_functions",
    ),
    "kept columns of the same name": (
        with_dataset(keep=["first.answer", "second.answer"]),
        "datasets.mine.keep",
    ),
    "reward function with a syntax error": (
        tiny("rlhf", reward_functions={"shop": 1, "broken": 1}),
        "rlhf.recipes.tiny.reward_functions",
    ),
    "offloaded optimizer without ZeRO": (
        tiny("sft", placement={"offload": "optimizer"}),
        "sft.recipes.tiny.placement.zero_stage",
    ),
    "password in an address": (judge(url="https://me:secret@host/v1"), "llm_judges.wise.url"),
    "unknown judge as reward": (tiny("rlhf", reward="llm_judges/wise"), "rlhf.recipes.tiny.reward"),
    "labels of responses of a model that they train": (
        judge()
        | {
            "datasets": {"mine": {"label": "toy-round-1", "llm_judge": "wise"}},
            "sft": {"recipes": {"tiny": {"datasets": ["mine"]}}},
        },
        "sft.recipes.tiny",
    ),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A project with the invalid reward functions."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "scripts").symlink_to(ROOT / "scripts")
    shutil.copytree(ROOT / "rewards", folder / "rewards")
    for name, content in REWARD_FUNCTIONS.items():
        (folder / f"rewards/{name}.py").write_bytes(content)
    return folder


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_reported_in_one_line(root, mistake):
    changes, key = MISTAKES[mistake]
    with pytest.raises(ConfigError) as error:
        load(changes, root)
    message = str(error.value)
    assert message.startswith((f"config: {key}: ", f"config: {key} "))
    assert "\n" not in message


@pytest.mark.parametrize("changes", [{}, {"offload": "optimizer"}, {"compile": True}])
def test_a_training_may_choose_its_zero_stage_and_checkpointing(root, changes):
    placement = {"zero_stage": "auto", "activation_checkpointing": "auto", **changes}
    config = load(tiny("sft", placement=placement), root)
    assert config.recipe("sft", "tiny")["placement"].items() >= placement.items()


def test_datasets_of_prompts_and_kept_columns_serve_rlhf(root):
    dataset = {"path": "mine", "format": "prompt", "keep": ["answers.solution"]}
    functions = {"needs": {"weight": 0.5, "arguments": {"bonus": 1}}, "length_bounds": 1}
    recipe = {"datasets": ["toy", "mine"], "reward_functions": functions}
    config = load({"datasets": {"mine": dataset}, **tiny("rlhf", **recipe)}, root)
    assert config.split_weights("mine") == {"sft": 0, "reward": 0, "rlhf": 1}
    assert config.kept_columns("mine") == ["solution"]


def test_a_parameter_with_a_default_is_an_argument_of_a_reward_function(root):
    load(tiny("rlhf", reward_functions={"scaled": {"weight": 1, "arguments": {"scale": 2}}}), root)


def test_a_name_without_a_section_is_an_error_that_lists_the_sections():
    forms = "expected sft/NAME or dpo/NAME or models/NAME"
    with pytest.raises(ConfigError, match=f"^config: rlhf.recipes.tiny.actor names 'a', {forms}$"):
        load(tiny("rlhf", actor="a"))
    with pytest.raises(ConfigError, match=f"names 'lab/a', {forms}: models needs an entry with"):
        load(tiny("rlhf", actor="lab/a"))


def test_dataset_without_pairs_serves_sft_and_rlhf(root):
    load(with_dataset("sft", format="messages"), root)
    changes = with_dataset("rlhf", format="messages")
    changes["rlhf"]["recipes"]["mine"] = {"actor": "sft/tiny", "datasets": ["mine"]}
    load(changes, root)


# Kinds of models in local folders: keys of config.json, and the use that they do not have.
LANGUAGE_MODEL = {"architectures": ["LlamaForCausalLM"]}
CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "SCORE"}}


def load_with(folder, keys, changes):
    """Load the config with models.mine in a folder that has a config.json."""
    (folder / "config.json").write_text(json.dumps(keys))
    load({"models": {"mine": {"path": str(folder)}}, **changes}, ROOT)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            LANGUAGE_MODEL,
            "is no classifier but LlamaForCausalLM: use a sequence classifier with one label, or"
            " train a reward recipe on it",
        ),
        # The default of transformers.
        (
            {"architectures": CLASSIFIER["architectures"]},
            "has 2 labels, expected 1, the score: use another classifier",
        ),
    ],
)
def test_a_local_model_that_cannot_score_is_no_reward_model(keys, problem, tmp_path):
    with pytest.raises(ConfigError) as error:
        load_with(tmp_path, keys, tiny("rlhf", reward="models/mine"))
    assert (
        str(error.value) == f"config: rlhf.recipes.tiny.reward names models/mine, which {problem}"
    )


def test_a_local_classifier_is_no_language_model(tmp_path):
    with pytest.raises(ConfigError) as error:
        load_with(tmp_path, CLASSIFIER, tiny("rlhf", actor="models/mine"))
    assert str(error.value) == (
        "config: rlhf.recipes.tiny.actor names mine, which is a sequence classifier, expected a"
        " language model: use it as a reward model (reward: models/NAME), or use another model here"
    )


def test_models_of_the_right_kind_and_unreadable_ones_are_accepted(tmp_path):
    load_with(tmp_path, CLASSIFIER, tiny("rlhf", reward={"models/mine": 0.5, "reward/tiny": 1}))
    load_with(tmp_path, LANGUAGE_MODEL, tiny("rlhf", actor="models/mine"))
    (tmp_path / "config.json").write_text("{")
    load({"models": {"mine": {"path": str(tmp_path)}}, **tiny("rlhf", reward="models/mine")}, ROOT)
