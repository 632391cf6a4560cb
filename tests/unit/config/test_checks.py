"""Mistakes in the config: one line that names the key, before anything is planned."""

import json
import shutil

import pytest
import yaml

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
    "bytes": b"NAME = '\xc3('\n",
    "lost": b"from snakechat.shop import is_right\n",
    "needs": b"def score(prompts, responses, solution, *, bonus, level=1):\n    return []\n",
}

# Changes to config.yaml, and the start of the error.
MISTAKES = {
    "gate without a bound": (
        tiny("reward", gate={"metric": "accuracy"}),
        "config: reward.recipes.tiny.gate: {'metric': 'accuracy'} is not valid: expected min or"
        " max",
    ),
    "minimum above the maximum": (
        tiny("dpo", gate={"metric": "accuracy", "min": 0.9, "max": 0.6}),
        "config: dpo.recipes.tiny.gate: min is more than max: swap them",
    ),
    "bound that is not a number": (
        tiny("sft", gate={"metric": "after.perplexity", "max": "low"}),
        "config: sft.recipes.tiny.gate.max: 'low'",
    ),
    "deterministic kernels with vllm": (
        {"deterministic": True, **tiny("rlhf", generation_backend="vllm")},
        "config: deterministic: true, and rlhf.recipes.tiny has generation_backend: vllm",
    ),
    "unknown key": (
        tiny("sft", learning_rat=0.1),
        "config: sft.recipes.tiny: Additional properties are not allowed ('learning_rat'",
    ),
    "number as text": (
        yaml.safe_load("sft: {recipes: {tiny: {learning_rate: 1e-5}}}"),
        "config: sft.recipes.tiny.learning_rate: '1e-5' is not of type 'number'"
        " (YAML reads 1e-5 as text: write 1.0e-5)",
    ),
    "nullable number as text": (
        yaml.safe_load("sft: {recipes: {tiny: {lora_learning_rate: 1e-5}}}"),
        "config: sft.recipes.tiny.lora_learning_rate: '1e-5' is not of type 'number', 'null'"
        " (YAML reads 1e-5 as text: write 1.0e-5)",
    ),
    "fraction for an integer": (
        {"rlhf": {"defaults": {"epochs": 1.5}}},
        "config: rlhf.defaults.epochs: 1.5 is not of type 'integer'",
    ),
    "float for an integer": (
        {"rlhf": {"defaults": {"epochs": 2.0}}},
        "config: rlhf.defaults.epochs: 2.0 is not of type 'integer'",
    ),
    "boolean for a number": (
        tiny("sft", weight_decay=True),
        "config: sft.recipes.tiny.weight_decay: True is not of type 'number'",
    ),
    "null for an optional placement key": (
        tiny("rlhf", placement={"critic_zero_stage": None}),
        "config: rlhf.recipes.tiny.placement.critic_zero_stage: None is not one of [0, 1, 2, 3]",
    ),
    "template in a recipe": (
        tiny("sft", template="chat"),
        "config: sft.recipes.tiny: Additional properties are not allowed ('template'",
    ),
    "unknown model": (
        tiny("sft", model="tinny"),
        "config: sft.recipes.tiny.model names 'tinny', which is not under models (did you mean",
    ),
    "unknown dataset": (
        tiny("reward", datasets=["toy", "toys"]),
        "config: reward.recipes.tiny.datasets names 'toys', which is not under datasets",
    ),
    "unknown recipe": (
        tiny("rlhf", actor="tinny"),
        "config: rlhf.recipes.tiny.actor names 'tinny', which is not under sft.recipes (did you"
        " mean tiny? available: 1.3b, 1.3b-single-node,",
    ),
    "unknown deployment": (
        tiny("sft", placement="laptop"),
        "config: sft.recipes.tiny.placement names 'laptop', which is not under deployments",
    ),
    "dataset of a tokenizer": (
        {"models": {"tiny": {"tokenizer": {"train_on": "toys"}}}},
        "config: models.tiny.tokenizer names 'toys', which is not under datasets",
    ),
    "name outside of output": (
        {"rlhf": {"recipes": {"../x": {"actor": "tiny"}}}},
        "config: rlhf.recipes: '../x' does not match",
    ),
    "name of a manifest": (
        {"rlhf": {"recipes": {"x.json": {"actor": "tiny"}}}},
        "config: rlhf.recipes: 'x.json' does not match",
    ),
    "glob outside of the dataset": (
        with_dataset(train="../*.parquet"),
        "config: datasets.mine",
    ),
    "unknown format": (with_dataset(format="plane"), "config: datasets.mine"),
    "no source": (
        {"datasets": {"mine": {"format": "plain"}}},
        "config: datasets.mine: {'format': 'plain'} is not valid: expected path or hub",
    ),
    "eval without train": (with_dataset(eval="*.csv"), "config: datasets.mine"),
    "invalid regular expression": (with_dataset(remove="[0-9"), "config: datasets.mine"),
    "unknown on_bad_row": (with_dataset(on_bad_row="ignore"), "config: datasets.mine"),
    "field that the format does not have": (
        with_dataset(columns={"promt": "q", "prompt": "q", "chosen": "a"}),
        "config: datasets.mine: format plain ",
    ),
    "field that the format needs": (
        with_dataset(format="scored", columns={"prompt": "q", "first": "a", "second": "b"}),
        "config: datasets.mine: format scored ",
    ),
    "reward model on responses without pairs": (
        with_dataset("reward", format="messages"),
        "config: reward.recipes.mine.datasets names mine, which has no rejected responses (format"
        " messages): use it for sft or rlhf",
    ),
    "reward model on unpaired preferences": (
        with_dataset("reward", format="kto"),
        "config: reward.recipes.mine.datasets names mine, which has no rejected responses (format",
    ),
    "pairwise loss on unpaired preferences": (
        with_dataset("dpo", format="kto"),
        "config: dpo.recipes.mine.datasets names mine, whose responses are not paired (format kto):"
        " set loss: kto, or use pairs",
    ),
    "recipe on its own responses": (
        {
            "generations": {"recipes": {"mine": {"model": "dpo/mine", "reward": "tiny"}}},
            "datasets": {"mine": {"generations": "mine", "select": "best_and_worst"}},
            "dpo": {"recipes": {"mine": {"datasets": ["mine"]}}},
        },
        "config: dpo.recipes.mine depends on itself: dpo/mine -> generations/mine -> dpo/mine",
    ),
    "recipe that starts from itself": (
        {"dpo": {"recipes": {"mine": {"model": "dpo/mine"}}}},
        "config: dpo.recipes.mine depends on itself: dpo/mine -> dpo/mine",
    ),
    "tokenizer of generated responses": (
        {
            "models": {
                "mine": {"init": {"model_type": "opt"}, "tokenizer": MY_TOKENIZER},
            },
            "datasets": {"mine": {"generations": "tiny", "select": "best"}},
        },
        "config: models.mine.tokenizer.train_on names mine, whose responses a model generates",
    ),
    "unknown recipe of generations": (
        {"datasets": {"mine": {"generations": "none", "select": "best"}}},
        "config: datasets.mine.generations names 'none', which is not under generations.recipes",
    ),
    "pairs of single responses": (
        {
            "datasets": {"mine": {"generations": "tiny", "select": "best", "split": ALL_PHASES}},
            "dpo": {"recipes": {"mine": {"datasets": ["mine"]}}},
        },
        "config: dpo.recipes.mine.datasets names mine, which has no rejected responses (select:"
        " best): set select: best_and_worst",
    ),
    "margin of single responses": (
        {"datasets": {"mine": {"generations": "tiny", "select": "best", "min_margin": 1.0}}},
        "config: datasets.mine.min_margin has no effect on select: best",
    ),
    "generations without scores": (
        {"generations": {"recipes": {"mine": {"model": "sft/tiny", "reward": None}}}},
        "config: generations.recipes.mine: reward is null and reward_functions is empty",
    ),
    "generations of a reward model": (
        {"generations": {"recipes": {"mine": {"model": "reward/tiny"}}}},
        "config: generations.recipes.mine.model names 'reward/tiny'",
    ),
    "best model without evaluations": (
        tiny("reward", save_strategy="best"),
        "config: reward.recipes.tiny.save_strategy: best needs evaluations during training: set"
        " eval_steps, or save_strategy: last",
    ),
    "early stopping without evaluations": (
        tiny("dpo", early_stopping_patience=2),
        "config: dpo.recipes.tiny.early_stopping_patience: 2 needs evaluations",
    ),
    "best model by scores whose scale changes": (
        tiny("rlhf", save_strategy="best", eval_steps=5, standardize_scores="running"),
        "config: rlhf.recipes.tiny.save_strategy: best compares scores of different steps",
    ),
    "reward model on columns without rejected": (
        with_dataset("reward", columns={"prompt": "q", "chosen": "a"}),
        "config: reward.recipes.mine.datasets names mine, which has no rejected responses (format",
    ),
    "phase without rows": (
        with_dataset("reward", split={"sft": 1, "reward": 0, "rlhf": 0}),
        "config: reward.recipes.mine.datasets names mine, whose split gives no rows to reward",
    ),
    "dpo without rows of the reward phase": (
        with_dataset("dpo", split={"sft": 1, "reward": 0, "rlhf": 0}),
        "config: dpo.recipes.mine.datasets names mine, whose split gives no rows to reward",
    ),
    "split without any weight": (
        {"split": {"weights": {"sft": 0, "reward": 0, "rlhf": 0}}},
        "config: split.weights",
    ),
    "weight of zero": (
        tiny("sft", datasets=[{"toy": 0}]),
        "config: sft.recipes.tiny.datasets.0",
    ),
    "dataset twice": (
        tiny("sft", datasets=["toy", {"toy": 2}]),
        "config: sft.recipes.tiny.datasets names a dataset twice",
    ),
    "unknown actor of models": (
        tiny("rlhf", actor="models/tinny"),
        "config: rlhf.recipes.tiny.actor names 'tinny', which is not under models (did you mean",
    ),
    "unknown actor of dpo": (
        tiny("rlhf", actor="dpo/tinny"),
        "config: rlhf.recipes.tiny.actor names 'tinny', which is not under dpo.recipes (did you",
    ),
    "stage of an actor": (
        tiny("rlhf", actor="reward/tiny"),
        "config: rlhf.recipes.tiny.actor names 'reward/tiny', expected NAME, sft/NAME, dpo/NAME or"
        " models/NAME",
    ),
    "unknown reward model of models": (
        tiny("rlhf", reward={"tiny": 1, "models/tinny": 1}),
        "config: rlhf.recipes.tiny.reward names 'tinny', which is not under models (did you mean",
    ),
    "stage of a reward model": (
        tiny("rlhf", reward="sft/tiny"),
        "config: rlhf.recipes.tiny.reward names 'sft/tiny', expected NAME, reward/NAME,"
        " models/NAME or llm_judges/NAME",
    ),
    "reward model with random weights": (
        tiny("rlhf", reward="models/tiny"),
        "config: rlhf.recipes.tiny.reward names models/tiny, which is no classifier but a language"
        " model with random weights: use a reward recipe or a sequence classifier",
    ),
    "reward models that do not count": (
        tiny("rlhf", reward={"tiny": 0, "judge": 0.0}),
        "config: rlhf.recipes.tiny.reward: all weights are 0, expected another one",
    ),
    "no reward models": (
        tiny("rlhf", reward={}),
        "config: rlhf.recipes.tiny.reward: {} ",
    ),
    "weight of a reward model as text": (
        tiny("rlhf", judge={"tiny": "1e-1"}),
        "config: rlhf.recipes.tiny.judge",
    ),
    "unknown judge": (
        tiny("rlhf", judge="tinny"),
        "config: rlhf.recipes.tiny.judge names 'tinny', which is not under reward.recipes (did you",
    ),
    "unknown model to compare with": (
        tiny("rlhf", compare_with=["dpo/tinny"]),
        "config: rlhf.recipes.tiny.compare_with names 'tinny', which is not under dpo.recipes",
    ),
    "stage of a model to compare with": (
        tiny("rlhf", compare_with=["reward/tiny"]),
        "config: rlhf.recipes.tiny.compare_with.0: 'reward/tiny' does not match",
    ),
    "tokenizer of a model to compare with": (
        tiny("rlhf", compare_with=["dpo/1.3b"]),
        "config: rlhf.recipes.tiny.compare_with: dpo/1.3b and tiny have different tokenizers",
    ),
    "unknown ptx": (
        tiny("rlhf", ptx="tinny"),
        "config: rlhf.recipes.tiny.ptx names 'tinny', which is not under sft.recipes (did you mean",
    ),
    "tokenizer of ptx": (
        tiny("rlhf", ptx="125m"),
        "config: rlhf.recipes.tiny.ptx names 125m, which has the tokenizer of opt-125m; the actor"
        " has that of tiny",
    ),
    "label smoothing of a loss without it": (
        tiny("dpo", loss="ipo", label_smoothing=0.1),
        "config: dpo.recipes.tiny.label_smoothing: 0.1 has no effect on loss: ipo, only on dpo and"
        " robust: set label_smoothing: 0 or another loss",
    ),
    "margin of a loss without it": (
        tiny("dpo", margin=0.5),
        "config: dpo.recipes.tiny.margin: 0.5 has no effect on loss: dpo, only on simpo",
    ),
    "uniform groups of ppo": (
        tiny("rlhf", drop_uniform_groups=True),
        "config: rlhf.recipes.tiny.drop_uniform_groups: ppo does not compare responses",
    ),
    "k1 in the loss": (
        tiny("rlhf", kl_in="loss", kl_estimator="k1"),
        "config: rlhf.recipes.tiny.kl_estimator: k1 has no effect in the loss, because the mean of"
        " its gradient is 0: use k2 or k3",
    ),
    "overlong buffer": (
        tiny("rlhf", overlong_buffer=25),
        "config: rlhf.recipes.tiny.overlong_buffer: 25 is more than max_response_length (24)",
    ),
    "unknown preset": (
        tiny("rlhf", preset="deepspeed"),
        "config: rlhf.recipes.tiny.preset names 'deepspeed', which is not under rlhf.presets"
        " (did you mean deepspeed_chat? available: dapo,",
    ),
    "preset of a preset": (
        {"rlhf": {"presets": {"mine": {"preset": "deepspeed_chat"}}}},
        "config: rlhf.presets.mine: Additional properties are not allowed ('preset'",
    ),
    "one response to compare": (
        tiny("rlhf", algorithm="rloo"),
        "config: rlhf.recipes.tiny.num_generations: rloo compares responses to the same prompt and"
        " needs at least 2, not 1",
    ),
    "batch that separates the responses to a prompt": (
        tiny("rlhf", algorithm="grpo", num_generations=3),
        "config: rlhf.recipes.tiny.global_batch_size: 128 is not a multiple of num_generations (3)",
    ),
    "preset that does not fit a recipe": (
        {
            "rlhf": {
                "presets": {"mine": {"num_generations": 5}},
                "recipes": {"tiny": {"preset": "mine"}},
            }
        },
        "config: rlhf.recipes.tiny.global_batch_size: 128 is not a multiple of num_generations (5)",
    ),
    "nothing that scores": (
        tiny("rlhf", reward=None),
        "config: rlhf.recipes.tiny: reward is null and reward_functions is empty: nothing scores",
    ),
    "unknown reward function": (
        tiny("rlhf", reward_functions={"shopping": 1}),
        "config: rlhf.recipes.tiny.reward_functions: rewards/shopping.py does not exist (available:"
        " broken, bytes, exact_match, format_match,",
    ),
    "column that no dataset keeps": (
        tiny("rlhf", reward_functions={"needs": {"weight": 1, "arguments": {"bonus": 2}}}),
        "config: rlhf.recipes.tiny.reward_functions: rewards/needs.py requires solution: name this"
        " column in `keep` of the recipe's datasets, or set it in `arguments`",
    ),
    "argument that a reward function does not take": (
        tiny("rlhf", reward_functions={"needs": {"weight": 1, "arguments": {"bonsu": 2}}}),
        "config: rlhf.recipes.tiny.reward_functions: rewards/needs.py takes no argument bonsu"
        " (available: bonus, level, solution)",
    ),
    "argument that is a column": (
        {
            "datasets": {"mine": {"path": "x", "format": "prompt", "keep": ["solution"]}},
            **tiny(
                "rlhf",
                datasets=["mine"],
                reward_functions={"needs": {"weight": 1, "arguments": {"solution": 2, "bonus": 1}}},
            ),
        },
        "config: rlhf.recipes.tiny.reward_functions: argument solution of needs is also a column",
    ),
    "reward function without a weight": (
        tiny("rlhf", reward_functions={"shop": {"arguments": {}}}),
        "config: rlhf.recipes.tiny.reward_functions.shop: ",
    ),
    "kept column with an invalid name": (
        with_dataset(keep=["the answer"]),
        "config: datasets.mine.keep: 'the answer' is not a valid name of a parameter in Python",
    ),
    "kept column that functions receive anyway": (
        with_dataset(keep=["chat.messages"]),
        "config: datasets.mine.keep: messages is what reward functions receive anyway",
    ),
    "kept columns of the same name": (
        with_dataset(keep=["first.answer", "second.answer"]),
        "config: datasets.mine.keep: two columns have the name answer",
    ),
    "prompts for sft": (
        with_dataset(format="prompt", split={"sft": 1, "reward": 1, "rlhf": 1}),
        "config: sft.recipes.mine.datasets names mine, which has no responses (format prompt): use"
        " it for rlhf",
    ),
    "reward function outside of its folder": (
        tiny("rlhf", reward_functions={"../shop": 1}),
        "config: rlhf.recipes.tiny.reward_functions: '../shop' does not match",
    ),
    "reward function with a syntax error": (
        tiny("rlhf", reward_functions={"shop": 1, "broken": 1}),
        "config: rlhf.recipes.tiny.reward_functions: rewards/broken.py is not valid Python (line 2:"
        " '(' was never closed)",
    ),
    "reward function that is not UTF-8": (
        tiny("rlhf", reward_functions={"bytes": 1}),
        "config: rlhf.recipes.tiny.reward_functions: rewards/bytes.py is not valid Python (",
    ),
    "reward function with an import that fails": (
        tiny("rlhf", reward_functions={"lost": 1}),
        "config: rlhf.recipes.tiny.reward_functions: rewards/lost.py imports a module that does not"
        " exist (",
    ),
    "offloaded optimizer without ZeRO": (
        tiny("sft", placement={"offload": "optimizer"}),
        "config: sft.recipes.tiny.placement.zero_stage: 0 is less than the minimum of 1",
    ),
    "offloaded parameters in stage 2": (
        tiny("sft", placement={"offload": "parameters", "zero_stage": 2}),
        "config: sft.recipes.tiny.placement.zero_stage: 3 was expected",
    ),
    "offloaded optimizer of a critic without ZeRO": (
        tiny("rlhf", placement={"offload": "optimizer", "zero_stage": 1, "critic_zero_stage": 0}),
        "config: rlhf.recipes.tiny.placement.critic_zero_stage: 0 is less than the minimum of 1",
    ),
    "compiled layers with ZeRO 3": (
        tiny("sft", placement={"compile": True, "zero_stage": 3}),
        "config: sft.recipes.tiny.placement.compile: true needs zero_stage: 0, 1 or 2, not 3:",
    ),
    "compiled layers of a critic with ZeRO 3": (
        tiny("rlhf", placement={"compile": True, "critic_zero_stage": 3}),
        "config: rlhf.recipes.tiny.placement.compile: true needs critic_zero_stage: 0, 1 or 2",
    ),
    "tensor parallelism over other GPUs than those of a node": (
        tiny("rlhf", placement={"gpus_per_node": 8, "vllm_tensor_parallel_size": 3}),
        "config: rlhf.recipes.tiny.placement.vllm_tensor_parallel_size: 3 does not divide the 8",
    ),
    "unknown offload": (
        tiny("sft", placement={"offload": "disk"}),
        "config: sft.recipes.tiny.placement.offload: 'disk' is not one of",
    ),
    "key of the critic outside of rlhf": (
        tiny("sft", placement={"critic_zero_stage": 1}),
        "config: sft.recipes.tiny.placement: Additional properties are not allowed",
    ),
    "incomplete deployment": (
        {"deployments": {"mine": {"nodes": 1}}},
        "config: deployments.mine: 'gpus_per_node' is a required property",
    ),
    "unknown template": ({"template": "alpaca"}, "config: template: 'alpaca' is not one of"),
    "unknown section": (
        {"sftt": {}},
        "config: top level: Additional properties are not allowed ('sftt' was unexpected)",
    ),
    "password in an address": (
        judge(url="https://me:secret@host/v1"),
        "config: llm_judges.wise.url: 'https://me:secret@host/v1' does not match",
    ),
    "key in an address": (
        judge(url="https://host/v1?key=1"),
        "config: llm_judges.wise.url: 'https://host/v1?key=1' does not match",
    ),
    "judge without a rubric": (
        {"llm_judges": {"wise": {"url": "http://host/v1", "model": "wise"}}},
        "config: llm_judges.wise: 'rubric' is a required property",
    ),
    "scale from high to low": (
        judge(scale=[10, 1]),
        "config: llm_judges.wise.scale: [10, 1], expected the lowest rating before the highest one",
    ),
    "parameter that the pipeline sets": (
        judge(parameters={"messages": []}),
        "config: llm_judges.wise.parameters: messages cannot be set",
    ),
    "unknown judge as reward": (
        tiny("rlhf", reward="llm_judges/wise"),
        "config: rlhf.recipes.tiny.reward names 'wise', which is not under llm_judges"
        " (available: none)",
    ),
    "unknown judge of generations": (
        judge() | tiny("generations", reward={"llm_judges/wsie": 1.0}),
        "config: generations.recipes.tiny.reward names 'wsie', which is not under llm_judges"
        " (did you mean wise? available: wise)",
    ),
    "unknown judge of evaluations": (
        {"evaluation": {"llm_judge": "wise"}},
        "config: evaluation.llm_judge names 'wise', which is not under llm_judges",
    ),
    "unknown judge of labels": (
        {"datasets": {"mine": {"label": "toy", "llm_judge": "wise"}}},
        "config: datasets.mine.llm_judge names 'wise', which is not under llm_judges",
    ),
    "labels of an unknown dataset": (
        judge() | {"datasets": {"mine": {"label": "toys", "llm_judge": "wise"}}},
        "config: datasets.mine.label names 'toys', which is not under datasets",
    ),
    "labels of labels": (
        judge()
        | {
            "datasets": {
                "mine": {"label": "toy", "llm_judge": "wise"},
                "again": {"label": "mine", "llm_judge": "wise"},
            }
        },
        "config: datasets.again.label names mine, which is labelled itself: name toy",
    ),
    "labels of a dataset without pairs": (
        judge() | {"datasets": {"mine": {"label": "toy-best", "llm_judge": "wise"}}},
        "config: datasets.mine.label names toy-best, which has no pairs of responses",
    ),
    "labels of responses of a model that they train": (
        judge()
        | {
            "datasets": {"mine": {"label": "toy-round-1", "llm_judge": "wise"}},
            "sft": {"recipes": {"tiny": {"datasets": ["mine"]}}},
        },
        "config: sft.recipes.tiny depends on itself: sft/tiny -> generations/tiny-1 -> sft/tiny",
    ),
    "labelled pairs for SFT": (
        judge()
        | {"datasets": {"mine": {"label": "toy", "llm_judge": "wise"}}}
        | tiny("sft", datasets=["mine"]),
        "config: sft.recipes.tiny.datasets names mine, whose split gives no rows to sft",
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
    changes, expected = MISTAKES[mistake]
    with pytest.raises(ConfigError) as error:
        load(changes, root)
    message = str(error.value)
    assert message.startswith(expected)
    assert "\n" not in message


def test_a_default_that_the_loss_of_some_recipes_ignores_is_no_mistake(root):
    load({"dpo": {"defaults": {"label_smoothing": 0.1}}}, root)


def test_datasets_of_prompts_and_kept_columns_serve_rlhf(root):
    dataset = {"path": "mine", "format": "prompt", "keep": ["answers.solution"]}
    functions = {"needs": {"weight": 0.5, "arguments": {"bonus": 1}}, "length_bounds": 1}
    recipe = {"datasets": ["toy", "mine"], "reward_functions": functions}
    config = load({"datasets": {"mine": dataset}, **tiny("rlhf", **recipe)}, root)
    assert config.split_weights("mine") == {"sft": 0, "reward": 0, "rlhf": 1}
    assert config.kept_columns("mine") == ["solution"]


def test_model_to_compare_with_may_share_the_base_model(root):
    load(tiny("rlhf", compare_with=["dpo/tiny"]), root)


def test_dataset_without_pairs_serves_sft_and_rlhf(root):
    load(with_dataset("sft", format="messages"), root)
    changes = with_dataset("rlhf", format="messages")
    changes["rlhf"]["recipes"]["mine"] = {"actor": "tiny", "reward": "tiny", "datasets": ["mine"]}
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
        (
            {**CLASSIFIER, "id2label": {"0": "NO", "1": "YES", "2": "MAYBE"}},
            "has 3 labels, expected 1, the score: use another classifier",
        ),
        # The default of transformers.
        (
            {"architectures": CLASSIFIER["architectures"]},
            "has 2 labels, expected 1, the score: use another classifier",
        ),
    ],
)
@pytest.mark.parametrize("key", ["reward", "judge"])
def test_a_local_model_that_cannot_score_is_no_reward_model(keys, problem, key, tmp_path):
    with pytest.raises(ConfigError) as error:
        load_with(tmp_path, keys, tiny("rlhf", **{key: "models/mine"}))
    assert str(error.value) == f"config: rlhf.recipes.tiny.{key} names models/mine, which {problem}"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (tiny("sft", model="mine"), "sft.recipes.tiny.model"),
        (tiny("reward", model="mine"), "reward.recipes.tiny.model"),
        (tiny("rlhf", actor="models/mine"), "rlhf.recipes.tiny.actor"),
    ],
)
def test_a_local_classifier_is_no_language_model(changes, key, tmp_path):
    with pytest.raises(ConfigError) as error:
        load_with(tmp_path, CLASSIFIER, changes)
    assert str(error.value) == (
        f"config: {key} names mine, which is a sequence classifier, expected a language model: use"
        " it as a reward model (reward: models/NAME), or use another model here"
    )


def test_models_of_the_right_kind_and_unreadable_ones_are_accepted(tmp_path):
    load_with(tmp_path, CLASSIFIER, tiny("rlhf", reward={"models/mine": 0.5, "reward/tiny": 1}))
    load_with(tmp_path, LANGUAGE_MODEL, tiny("rlhf", actor="models/mine"))
    (tmp_path / "config.json").write_text("{")
    load({"models": {"mine": {"path": str(tmp_path)}}, **tiny("rlhf", reward="models/mine")}, ROOT)
