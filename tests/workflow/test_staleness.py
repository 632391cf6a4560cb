"""Staleness is exact: edits to a finished build, and the rules that must run after each.

A row of the tables is an edit and the rules that Snakemake has to plan after it, no more and no
less. Every setting and every program has a row, and so has a module of every room.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import yaml

from conftest import ROOT, Workflow, copy_sources
from snakechat.config.schema import config_schema
from snakechat.workflow.code_digests import code_digests
from support.hub import serving

# The rules that read the result of a rule, in the tiny recipes: their reward model and their DPO
# model start from the SFT model; their base model is not fetched.
TOKENIZERS = {"tokenize_sft", "tokenize_reward", "tokenize_dpo", "tokenize_rlhf"}
READERS = {
    "import_dataset": {"split_dataset", "init_model", *TOKENIZERS, "draw_report"},
    "split_dataset": {*TOKENIZERS, "draw_report"},
    "fetch_model": set(),
    "init_model": {
        *TOKENIZERS,
        "train_sft",
        "evaluate_sft",
        "evaluate_rlhf",
        "prompt_eval",
        "compare_zero",
    },
    "tokenize_sft": {
        "train_sft",
        "evaluate_sft",
        "train_rlhf",
        "draw_report",
        "compare_zero",
        "write_record",
    },
    "train_sft": {
        "evaluate_sft",
        "write_record",
        "train_reward",
        "compute_reference",
        "train_dpo",
        "train_rlhf",
        "evaluate_rlhf",
        "draw_report",
        "prompt_eval",
    },
    "evaluate_sft": {"draw_report", "write_record"},
    "tokenize_reward": {"train_reward", "evaluate_reward", "train_rlhf", "draw_report"},
    "train_reward": {"evaluate_reward", "train_rlhf", "evaluate_rlhf", "draw_report", "rw_eval"},
    "evaluate_reward": {"draw_report"},
    "tokenize_dpo": {"compute_reference", "train_dpo", "evaluate_dpo"},
    "compute_reference": {"train_dpo", "evaluate_dpo"},
    "train_dpo": {"evaluate_dpo", "compare_runs"},
    "evaluate_dpo": {"compare_runs"},
    "tokenize_rlhf": {"train_rlhf", "evaluate_rlhf", "draw_report"},
    "train_rlhf": {"evaluate_rlhf", "draw_report", "prompt_eval", "evaluate_tasks"},
    "evaluate_rlhf": {"draw_report"},
    "draw_report": set(),
    "prompt_eval": set(),
    "rw_eval": set(),
    "evaluate_tasks": set(),
    # Of SFT.
    "write_record": set(),
    "compare_zero": {"draw_zero"},
    "draw_zero": set(),
    # Of DPO.
    "compare_runs": set(),
}


def stale(*rules):
    """Return rules and all rules downstream of them."""
    return set(rules).union(*(stale(*READERS[rule]) for rule in rules))


# The rules that a change of the spec of train_sft makes stale. Its settings and code are also those
# of the comparison of ZeRO stages, which does not read its result.
SFT_TRAINED = stale("train_sft", "compare_zero")


ZERO = "output/zero/sft/tiny.html"
COMPARED = "output/compare/dpo/tiny-vs-other.html"
# The tiny recipes and their pages; a model from the hub, fine-tuned on a local dataset; a dataset
# from the hub; a model whose tokenizer is copied from a folder; a model from a folder.
TINY = (
    "output/rlhf/tiny",
    "output/dpo/tiny",
    "output/record/sft/tiny.md",
    ZERO,
    COMPARED,
    "output/prompt_eval/rlhf/tiny.html",
    "output/rw_eval/reward/tiny.html",
    "output/lm_eval/rlhf/tiny.manifest.json",
)
MINE = "output/sft/mine.manifest.json"
FAR = "output/data/far.manifest.json"
COPIED = "output/models/copied.manifest.json"
NEAR = "output/models/near.manifest.json"
TARGETS = (*TINY, MINE, FAR, COPIED, NEAR)


class Row(NamedTuple):
    """An edit, the rules that must run after it, and the targets.

    edit: a function of the folder of a build.
    """

    edit: Callable
    rules: set
    targets: tuple = TINY


def rows(table):
    """Parametrize a test with the rows of a table."""
    return pytest.mark.parametrize("row", table.values(), ids=table.keys())


# --- the build ------------------------------------------------------------------------------

CONFIG = yaml.safe_load((ROOT / "config.yaml").read_text())
SCHEMA = config_schema()
QUICK = yaml.safe_load((ROOT / "tests/configs/quick.yaml").read_text())


def merged(config, *changes):
    """Return a config updated as by --configfile; keys that become None are removed."""
    result = dict(config)
    for change in changes:
        for key, value in change.items():
            mapping = isinstance(value, dict)
            result[key] = merged(result.get(key) or {}, value) if mapping else value
    removed = {key for change in changes for key in change if result[key] is None}
    return {key: value for key, value in result.items() if key not in removed}


def nested(path, value):
    """{"a": {"b": value}} of a.b."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


# The keys that the tiny recipes set themselves in the quick build.
RECIPES = {
    stage: merged(CONFIG[stage]["recipes"]["tiny"], QUICK[stage]["recipes"]["tiny"])
    for stage in ("sft", "reward", "dpo", "rlhf")
}
MODEL = CONFIG["models"]["tiny"]

# Added to the config: what TARGETS need besides the tiny recipes, and one `other` of each kind.
OURS = {
    "datasets": {
        "mine": {"path": "mine", "format": "plain"},
        "far": {"hub": "lab/far", "revision": "main", "format": "plain"},
        "other": {"generate": "shop", "rows": 600, "eval_rows": 100},
    },
    "models": {
        "far": {"hub": "lab/far", "revision": "main"},
        "copied": {"init": MODEL["init"], "tokenizer": {"path": "tokenizer"}},
        "near": {"path": "model"},
        "classifier": {"path": "classifier"},
        "other": MODEL,
    },
    "sft": {
        "recipes": {
            "mine": {**RECIPES["sft"], "model": "far", "datasets": ["mine"]},
            "other": RECIPES["sft"],
        },
    },
    "reward": {"recipes": {"other": RECIPES["reward"]}},
    "dpo": {"recipes": {"other": {**RECIPES["dpo"], "beta": 0.3}}},
}


def write_config(folder, *changes):
    """Write mine.yaml: OURS with changes."""
    (folder / "mine.yaml").write_text(yaml.safe_dump(merged(OURS, *changes)))


def lines(*numbers):
    """Rows of a dataset, all of the same length."""
    rows = [{"prompt": f"{n:04}?", "chosen": f" {n:04}.", "rejected": " No."} for n in numbers]
    return "".join(json.dumps(row) + "\n" for row in rows)


FILES = {
    "mine/train-1.jsonl": lines(*range(40)),
    "mine/train-2.jsonl": lines(*range(40, 50)),
    "mine/test.jsonl": lines(*range(50, 70)),
    # Neither trained nor evaluated on, unless the config says so.
    "mine/more.jsonl": lines(*range(70, 80)),
    "one/rows.jsonl": lines(*range(80, 90)),
    "another/rows.jsonl": lines(*range(90, 100)),
}


def add_label(path):
    """Make the config of a classifier that of a reward model."""
    path.write_text(json.dumps(json.loads(path.read_text()) | {"id2label": {"0": "SCORE"}}))


@pytest.fixture(scope="module")
def built(quick, tmp_path_factory):
    """The quick build with all of TARGETS. No test changes it."""
    workflow = quick.copy(tmp_path_factory.mktemp("built") / "work")
    workflow.options = (*quick.options, "mine.yaml")
    folder = workflow.folder
    write_config(folder)
    for path, text in FILES.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    (folder / "mine/train-3").symlink_to("../one", target_is_directory=True)
    model = {path.name: path.read_bytes() for path in (folder / "output/models/tiny").iterdir()}
    (folder / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "tokenizer" / name).write_bytes(model[name])
    (folder / "model").mkdir()
    for name in model:
        (folder / "model" / name).write_bytes(model[name])
    # This model is never built; planning reads only its config.json.
    (folder / "classifier").mkdir()
    for name, content in model.items():
        content = content.replace(b"ForCausalLM", b"ForSequenceClassification")
        (folder / "classifier" / name).write_bytes(content)
    add_label(folder / "classifier/config.json")
    with serving() as hub:
        rows = {"train.jsonl": lines(*range(40)).encode()}
        hub.repositories = {"model/lab/far": model, "dataset/lab/far": rows}
        workflow.environment = {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path_factory.mktemp("home")),
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1,localhost",
        }
        workflow.build(*TARGETS)
    assert workflow.planned(*TARGETS) == set()
    return workflow


@pytest.fixture
def copy(built, tmp_path):
    """A copy of the build, for one test."""
    return built.copy(tmp_path / "copy")


@pytest.fixture(scope="module")
def plans(request, built, tmp_path_factory):
    """A function that returns the rules that Snakemake plans after a row's edit.

    A dry run takes two seconds. All rows of the session therefore start at once, two at a time,
    each in a copy of the build.
    """
    folder = tmp_path_factory.mktemp("rows")

    def plan(row):
        tree = built.copy(folder / f"{id(row)}")
        row.edit(tree.folder)
        planned = tree.planned(*row.targets)
        shutil.rmtree(tree.folder)
        return planned

    tests = [item for item in request.session.items if item.module is request.module]
    parameters = [test.callspec.params for test in tests if hasattr(test, "callspec")]
    pool = ThreadPoolExecutor(2)
    started = {id(p["row"]): pool.submit(plan, p["row"]) for p in parameters if "row" in p}
    yield lambda row: started[id(row)].result()
    pool.shutdown(cancel_futures=True)


# --- edits ----------------------------------------------------------------------------------


def config(*changes):
    """Change the config."""
    return lambda folder: write_config(folder, *changes)


def setting(path, value):
    """Change one setting."""
    return config(nested(path, value))


def tiny_rlhf(**settings):
    """Change settings of the tiny recipe of RLHF."""
    return setting("rlhf.recipes.tiny", settings)


def replaced(path, *replacements):
    """Replace texts in a file."""

    def edit(folder):
        text = (folder / path).read_text()
        for old, new in replacements:
            assert old in text, f"{old!r} is not in {path}"
            text = text.replace(old, new, 1)
        (folder / path).write_text(text)

    return edit


# --- settings -------------------------------------------------------------------------------

# The rules that build another dataset, SFT model or reward model for the first time.
DATASET = {"import_dataset", "split_dataset"}
SFT = {"tokenize_sft", "train_sft", "evaluate_sft"}
REWARD = {"tokenize_reward", "train_reward", "evaluate_reward"}

# Another value of each setting of the stages, and the rules that must run after the change.
DATASETS = {"datasets": ["toy", "other"]}
CUT = {"max_length": 95, "truncation_side": "right"}
DTYPE = {"dtype": "fp32"}
# Settings of RLHF whose values have to fit one another.
RL = {"reward_functions": {"shop": 1}, "num_generations": 2, "rollout_batch_size": 64}
BETAS = {"adam_betas": [0.95, 0.9]}
# Settings with a row in SETTINGS.
SPECIAL = ("algorithm", "preset", "compare_with", "judge", "ptx")
STAGES = {
    f"{stage}.{key}": (value, rules)
    for stage, settings, rules in (
        ("sft", {"model": "other"}, stale("init_model")),
        ("sft", DATASETS, DATASET | stale("tokenize_sft")),
        ("sft", CUT, stale("tokenize_sft")),
        (
            "sft",
            {"eval_steps": 3, "save_strategy": "best", "early_stopping_patience": 2},
            SFT_TRAINED,
        ),
        ("sft", BETAS, SFT_TRAINED),
        ("reward", {"model": "tiny"}, stale("train_reward")),
        ("reward", DATASETS, DATASET | stale("tokenize_reward")),
        ("reward", CUT, stale("tokenize_reward")),
        ("reward", BETAS, stale("train_reward")),
        ("dpo", {"model": "tiny"}, stale("compute_reference")),
        ("dpo", DATASETS, DATASET | stale("tokenize_dpo")),
        ("dpo", CUT, stale("tokenize_dpo")),
        ("dpo", DTYPE, stale("compute_reference")),
        ("dpo", BETAS, stale("train_dpo")),
        ("rlhf", {"actor": "other"}, SFT | stale("train_rlhf")),
        ("rlhf", {"reward": "other"}, REWARD | stale("train_rlhf")),
        ("rlhf", DATASETS, DATASET | stale("tokenize_rlhf")),
        ("rlhf", {"max_prompt_length": 47}, stale("tokenize_rlhf")),
        ("rlhf", RL | BETAS, stale("train_rlhf")),
    )
    for key, value in settings.items()
}


def another_value(schema, value):
    """Return a value that a JSON schema allows, other than the given one."""
    if "enum" in schema:
        return next(choice for choice in schema["enum"] if choice != value)
    if isinstance(value, bool):
        return not value
    if schema["type"] == "integer":
        return value + 1
    return value / 2 if value else 0.25


# All other settings count in training alone.
STAGES |= {
    f"{stage}.{key}": (
        another_value(schema, {**CONFIG[stage]["defaults"], **RECIPES[stage]}[key]),
        SFT_TRAINED if stage == "sft" else stale(f"train_{stage}"),
    )
    for stage in RECIPES
    for key, schema in SCHEMA["properties"][stage]["properties"]["defaults"]["properties"].items()
    if f"{stage}.{key}" not in STAGES and key not in ("placement", "seed", *SPECIAL)
}


def is_stated(name):
    """Return whether the tiny recipe sets a key itself."""
    stage, key = name.split(".")
    return key in RECIPES[stage]


def place_of(name):
    """Return the path of the key that determines a setting of the tiny recipe."""
    return name.replace(".", ".recipes.tiny." if is_stated(name) else ".defaults.")


# Another value of each key of the config of the tiny model.
INIT = {
    "model_type": "gpt2",
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "num_attention_heads": 4,
    "ffn_dim": 128,
    "max_position_embeddings": 256,
    "dropout": 0.1,
    "init_std": 0.05,
}

TOKENIZED = {"tokenize_sft", "train_sft"}
SPLIT = {"split_dataset", *TOKENIZED}
IMPORTED = {"import_dataset", *SPLIT}
FETCHED = {"fetch_model", *TOKENIZED}
SHARES = {"sft": 2, "reward": 4, "rlhf": 4}
SWAPPED_COLUMNS = {"prompt": "prompt", "chosen": "rejected", "rejected": "chosen"}
GENERATED = {"path": None, "format": None, "generate": "shop", "rows": 50, "eval_rows": 10}


def mine(rules, **settings):
    """A row with settings of the local dataset."""
    return Row(setting("datasets.mine", settings), rules, (MINE,))


def far(rules, **settings):
    """A row with settings of the dataset from the hub."""
    return Row(setting("datasets.far", settings), rules, (FAR,))


def other_model(folder):
    move_the_model(folder)
    replaced("elsewhere/config.json", ("{", '{"key": 1,'))(folder)


def other_tokenizer(folder):
    shutil.copytree(folder / "tokenizer", folder / "elsewhere")
    replaced("elsewhere/tokenizer.json", ("<unk>", "<UNK>"))(folder)
    write_config(folder, nested("models.copied.tokenizer.path", "elsewhere"))


PROMPT_PAGES = {"prompt_eval", "rw_eval"}
ENDPOINT = {"url": "http://judge/v1", "model": "wise", "key_env": "KEY", "prompts": 5}
DPO_SWEEP = {"stage": "dpo", "recipe": "tiny", "over": {"beta": [0.2]}}

SETTINGS = {
    "seed": Row(setting("seed", 1235), stale("import_dataset")),
    "template": Row(setting("template", "chat"), stale(*TOKENIZERS)),
    "on_bad_row": Row(setting("on_bad_row", "skip"), IMPORTED, (MINE,)),
    "split.by": Row(setting("split.by", "prompt"), stale("split_dataset")),
    "split.weights.sft": Row(setting("split.weights.sft", 3), stale("split_dataset")),
    "split.weights.reward": Row(setting("split.weights.reward", 3), stale("split_dataset")),
    "split.weights.rlhf": Row(setting("split.weights.rlhf", 3), stale("split_dataset")),
    "datasets.path": mine(IMPORTED, path="another"),
    "datasets.hub": far({"import_dataset"}, hub="lab/other"),
    "datasets.revision": far({"import_dataset"}, revision="v2"),
    "datasets.format": mine(IMPORTED, format="instruct"),
    "datasets.columns": mine(IMPORTED, columns=SWAPPED_COLUMNS),
    "datasets.remove": mine(IMPORTED, remove="[.]"),
    "datasets.train": mine(IMPORTED, train="train-1.jsonl", eval="test.jsonl"),
    "datasets.eval": mine(IMPORTED, train="train-**.jsonl", eval="more.jsonl"),
    "datasets.on_bad_row": mine(IMPORTED, on_bad_row="skip"),
    "datasets.split.sft": mine(SPLIT, split={**SHARES, "sft": 3}),
    "datasets.split.reward": mine(SPLIT, split={**SHARES, "reward": 3}),
    "datasets.split.rlhf": mine(SPLIT, split={**SHARES, "rlhf": 3}),
    "datasets.max_rows": mine(SPLIT, max_rows=20),
    "datasets.generate": mine(IMPORTED, **GENERATED),
    "datasets.rows": Row(setting("datasets.toy.rows", 601), stale("import_dataset")),
    "datasets.eval_rows": Row(setting("datasets.toy.eval_rows", 101), stale("import_dataset")),
    "datasets.seed": Row(setting("datasets.toy.seed", 5), stale("import_dataset")),
    "models.hub": Row(setting("models.far.hub", "lab/other"), FETCHED, (MINE,)),
    "models.path": Row(other_model, {"fetch_model"}, (NEAR,)),
    "models.revision": Row(setting("models.far.revision", "v2"), FETCHED, (MINE,)),
    "models.template": Row(setting("models.tiny.template", "chat"), stale(*TOKENIZERS)),
    "models.tokenizer.train_on": Row(
        setting("models.tiny.tokenizer.train_on", "other"), {"import_dataset", *stale("init_model")}
    ),
    "models.tokenizer.vocab_size": Row(
        setting("models.tiny.tokenizer.vocab_size", 500), stale("init_model")
    ),
    "models.tokenizer.path": Row(other_tokenizer, {"init_model"}, (COPIED,)),
    **{
        f"models.init.{key}": Row(setting(f"models.tiny.init.{key}", value), stale("init_model"))
        for key, value in INIT.items()
    },
    **{name: Row(setting(place_of(name), value), rules) for name, (value, rules) in STAGES.items()},
    **{
        f"{stage}.seed": Row(setting(f"{stage}.recipes.tiny.seed", 5), stale(f"tokenize_{stage}"))
        for stage in RECIPES
    },
    # With as many responses as it needs; test_rl_settings_count changes the algorithm alone.
    "rlhf.algorithm": Row(tiny_rlhf(algorithm="rloo", num_generations=2), stale("train_rlhf")),
    "rlhf.preset": Row(tiny_rlhf(preset="deepspeed_chat"), stale("train_rlhf")),
    "rlhf.compare_with": Row(
        tiny_rlhf(compare_with=["dpo/tiny"]), stale("evaluate_rlhf", "prompt_eval")
    ),
    "rlhf.judge": Row(
        tiny_rlhf(judge="other"), {"tokenize_reward", "train_reward", *stale("evaluate_rlhf")}
    ),
    "rlhf.ptx": Row(tiny_rlhf(ptx="other"), {"tokenize_sft", *stale("train_rlhf")}),
    "evaluation.num_prompts": Row(setting("evaluation.num_prompts", 21), stale("evaluate_rlhf")),
    "evaluation.num_generations": Row(
        setting("evaluation.num_generations", 3), stale("evaluate_rlhf")
    ),
    "evaluation.temperature": Row(setting("evaluation.temperature", 0.9), stale("evaluate_rlhf")),
    "evaluation.bootstrap_resamples": Row(
        setting("evaluation.bootstrap_resamples", 101), stale("evaluate_rlhf")
    ),
    "language": Row(
        setting("language", "zh"), {"write_record", "draw_zero", "compare_runs", *PROMPT_PAGES}
    ),
    # Sweeps make other recipes than those that were built.
    "sweeps.stage": Row(setting("sweeps.mine", DPO_SWEEP), set()),
    "sweeps.recipe": Row(setting("sweeps.tiny-kl.recipe", "tiny-rloo"), set()),
    "sweeps.over": Row(setting("sweeps.tiny-kl.over.kl_coef", [0.3]), set()),
    **{
        f"evaluation.endpoint.{key}": Row(
            setting("evaluation.endpoint", ENDPOINT), stale("evaluate_rlhf")
        )
        for key in ENDPOINT
    },
    # Without its own key, the tiny model uses the common one.
    "prompt_sets": Row(replaced("config.yaml", ("    prompt_sets: [toy]\n", "")), PROMPT_PAGES),
    "models.prompt_sets": Row(setting("models.tiny.prompt_sets", ["toy", "en"]), PROMPT_PAGES),
    "lm_eval.tasks": Row(setting("lm_eval.tasks", ["arc_easy"]), {"evaluate_tasks"}),
    "lm_eval.limit": Row(setting("lm_eval.limit", 5), {"evaluate_tasks"}),
    **{
        f"prompt_eval.{key}": Row(setting(f"prompt_eval.{key}", value), {"prompt_eval"})
        for key, value in {"max_response_length": 9, "temperature": 0.5, "num_beams": 3}.items()
    },
    "zero.steps": Row(setting("zero.steps", 3), stale("compare_zero")),
}

# Another value of each setting that determines only where and how a job runs.
PLACE = {
    "nodes": 2,
    "gpus_per_node": 8,
    "zero_stage": 2,
    "offload": "optimizer",
    "activation_checkpointing": True,
    "micro_batch_tokens": 4096,
    "threads": 1,
    "mem_mb": 2000,
    "runtime": 30,
}
PLACEMENT = {
    "save_steps": 7,
    "deployment": "multi_node",
    **{f"deployments.{key}": value for key, value in PLACE.items()},
    **{
        f"{stage}.placement.{key}": value
        for stage in RECIPES
        for key, value in {**PLACE, "deployment": "single_node"}.items()
    },
    "rlhf.placement.critic_zero_stage": 1,
    "rlhf.placement.offload_frozen": True,
}


def settings_of(schema, config):
    """Return the settings that a schema names, and those that it allows and a config has.

    The names of recipes, presets, datasets and models are omitted: sft.epochs, models.init.dropout.
    """

    def walk(node, values, path):
        if "oneOf" in node:
            return set().union(*(walk(option, values, path) for option in node["oneOf"]))
        found = set()
        for key, inner in node.get("properties", {}).items():
            below = path if key in ("defaults", "presets", "recipes") else [*path, key]
            found |= walk(inner, [value[key] for value in values if key in (value or ())], below)
        others = node.get("additionalProperties", node.get("type") == "object")
        if isinstance(others, dict):
            # One of several types: {NAME: weight}, or the name of one model.
            mappings = [value for value in values if isinstance(value, dict)]
            found |= walk(others, [inner for value in mappings for inner in value.values()], path)
        elif others:
            found |= {".".join([*path, key]) for value in values for key in value}
        return found or {".".join(path)}

    return walk(schema, [config], [])


def test_every_setting_has_a_row_and_every_row_a_setting():
    assert settings_of(SCHEMA, CONFIG) == SETTINGS.keys() | PLACEMENT.keys()


@pytest.mark.parametrize(
    ("place", "name"),
    [("properties", "new"), ("properties.evaluation.properties", "evaluation.new")],
)
def test_a_new_setting_is_missed(place, name):
    schema = merged(SCHEMA, nested(f"{place}.new", {"type": "number"}))
    assert settings_of(schema, CONFIG) - settings_of(SCHEMA, CONFIG) == {name}
    assert name not in SETTINGS


def test_a_new_setting_of_a_model_is_missed():
    config = merged(CONFIG, nested("models.tiny.init.new", 1))
    assert settings_of(SCHEMA, config) - settings_of(SCHEMA, CONFIG) == {"models.init.new"}
    assert "models.init.new" not in SETTINGS


def test_rows_of_stages_change_the_tiny_recipe():
    config = merged(CONFIG, QUICK)
    for name, (value, _) in STAGES.items():
        stage, key = name.split(".")
        assert {**config[stage]["defaults"], **RECIPES[stage]}[key] != value, name


@rows(SETTINGS)
def test_a_setting_makes_exactly_what_depends_on_it_stale(plans, row):
    assert plans(row) == row.rules


VALUES = {
    "rows of a dataset taken twice": Row(
        setting("sft.recipes.tiny.datasets", [{"toy": 2}]), stale("tokenize_sft")
    ),
    "pairs of a dataset taken twice": Row(
        setting("reward.recipes.tiny.datasets", [{"toy": 2}]), stale("tokenize_reward")
    ),
    "pairs of a dataset taken twice by DPO": Row(
        setting("dpo.recipes.tiny.datasets", [{"toy": 2}]), stale("tokenize_dpo")
    ),
    "DPO from another SFT model": Row(
        setting("dpo.recipes.tiny.model", "sft/other"),
        {"tokenize_sft", "train_sft", *stale("compute_reference")},
    ),
    # Which is there for the comparison.
    "RLHF from another DPO model": Row(tiny_rlhf(actor="dpo/other"), stale("train_rlhf")),
    "RLHF from a model of models": Row(
        tiny_rlhf(actor="models/near", reward=None, judge=None, reward_functions={"shop": 1}),
        stale("tokenize_rlhf"),
    ),
    "a base model instead of the SFT model as actor": Row(
        tiny_rlhf(actor="models/tiny"), stale("train_rlhf")
    ),
    "a reward model with a weight": Row(tiny_rlhf(reward={"tiny": 0.5}), stale("train_rlhf")),
    # mine.yaml has the keys in their order: the report shows the first one.
    "another reward model in addition": Row(
        tiny_rlhf(reward={"other": 0.5, "tiny": 1}),
        REWARD | stale("train_rlhf"),
    ),
    "a classifier as reward model": Row(
        tiny_rlhf(reward="models/classifier"), {"fetch_model", *stale("train_rlhf")}
    ),
    "a classifier as judge": Row(
        tiny_rlhf(judge={"models/classifier": 2, "tiny": 1}),
        {"fetch_model", *stale("evaluate_rlhf")},
    ),
    "prompts of a dataset taken twice": Row(
        setting("rlhf.recipes.tiny.datasets", [{"toy": 2}]), stale("tokenize_rlhf")
    ),
    "a value of the recipe instead of the default": Row(
        setting("rlhf.recipes.tiny.gae_lambda", 0.9), stale("train_rlhf")
    ),
    "a split of a generated dataset": Row(
        setting("datasets.toy.split", {**SHARES, "sft": 3}), stale("split_dataset")
    ),
    "fewer rows of a generated dataset": Row(
        setting("datasets.toy.max_rows", 500), stale("split_dataset")
    ),
    "files of a dataset from the hub": far({"import_dataset"}, train="a.jsonl", eval="b.jsonl"),
    "how a dataset from the hub is read": far({"import_dataset"}, remove="[.]"),
    "the template of a model from the hub": Row(
        setting("models.far.template", "chat"), TOKENIZED, (MINE,)
    ),
    "a key that a model's config did not have": Row(
        setting("models.tiny.init.activation_function", "gelu"), stale("init_model")
    ),
    # A comparison of sets of values would not notice these.
    "two keys of a recipe swapped": Row(
        config(
            nested("rlhf.recipes.tiny.rollout_batch_size", 64),
            nested("rlhf.recipes.tiny.global_batch_size", 128),
        ),
        stale("train_rlhf"),
    ),
    "two defaults swapped": Row(
        config(nested("rlhf.defaults.gamma", 0.95), nested("rlhf.defaults.gae_lambda", 1.0)),
        stale("train_rlhf"),
    ),
    "two shares of the split swapped": Row(
        config(nested("split.weights.sft", 4), nested("split.weights.reward", 2)),
        stale("split_dataset"),
    ),
    "two keys of the evaluation swapped": Row(
        config(nested("evaluation.num_prompts", 2), nested("evaluation.num_generations", 20)),
        stale("evaluate_rlhf"),
    ),
    "two keys of a model swapped": Row(
        config(nested("models.tiny.init.hidden_size", 256), nested("models.tiny.init.ffn_dim", 64)),
        stale("init_model"),
    ),
    "values of two stages swapped": Row(
        config(
            nested("sft.recipes.tiny.global_batch_size", 32),
            nested("reward.recipes.tiny.global_batch_size", 16),
        ),
        SFT_TRAINED,
    ),
}


@rows(VALUES)
def test_other_forms_of_a_setting_do_so_too(plans, row):
    assert plans(row) == row.rules


# --- code -----------------------------------------------------------------------------------

RULES = set(READERS)
SCRIPTS = ROOT / "scripts"


def program_of(rule):
    """Return the path of the program that a rule runs."""
    return SCRIPTS / f"{'tokenize_phase' if rule in TOKENIZERS else rule}.py"


# tests/unit/workflow/test_code_digests.py proves that these are the modules that programs import.
CODE_OF = {rule: code_digests(program_of(rule)) for rule in RULES}
PROGRAMS = sorted(path.name for path in SCRIPTS.glob("*.py"))
# A module of each room, one that every program imports, and one that no rule imports.
MODULES = [
    "snakechat/workflow/job.py",
    "snakechat/data/tokens.py",
    "snakechat/config/rlhf.py",
    "snakechat/modeling/models.py",
    "snakechat/training/engine.py",
    "snakechat/algorithms/ppo.py",
    "snakechat/evaluation/comparisons.py",
    "snakechat/reporting/plots.py",
    "snakechat/planning/dry_run.py",
]
# Targets for which every rule has a job.
EVERY_RULE = (*TINY, "output/models/far.manifest.json")


def code(name):
    """A row with another meaning of a file in scripts/."""

    def edit(folder):
        with (folder / "scripts" / name).open("a") as file:
            file.write("\nEDITED = True\n")

    users = {rule for rule in RULES if name in CODE_OF[rule]}
    return Row(edit, stale(*users) | (SFT_TRAINED if "train_sft" in users else set()), EVERY_RULE)


CODE = {name: code(name) for name in (*PROGRAMS, *MODULES)}


def test_the_modules_cover_the_rooms():
    rooms = {path.parent.name for path in SCRIPTS.glob("snakechat/*/__init__.py")}
    assert {name.split("/")[1] for name in MODULES} == rooms
    assert not CODE["snakechat/planning/dry_run.py"].rules
    assert CODE["snakechat/workflow/job.py"].rules == RULES


def test_every_rule_with_a_spec_has_a_row():
    text = "".join(path.read_text() for path in sorted((ROOT / "rules").glob("*.smk")))
    assert set(re.findall(r'SPECS\.describe\(\n    "(\w+)"', text)) == RULES


@rows(CODE)
def test_code_makes_exactly_the_rules_that_run_it_and_those_downstream_stale(plans, row):
    assert plans(row) == row.rules


# --- external files -------------------------------------------------------------------------


def edit_a_row(folder):
    replaced("mine/train-1.jsonl", (" 0007.", " 7777."))(folder)


def replace_a_file_by_an_older_one(folder):
    # As cp -p or rsync -t would leave it.
    edit_a_row(folder)
    os.utime(folder / "mine/train-1.jsonl", (1, 1))


def append_a_row(folder):
    with (folder / "mine/train-2.jsonl").open("a") as file:
        file.write(lines(99))


def edit_the_eval_split(folder):
    (folder / "mine/test.jsonl").write_text(lines(*range(60, 80)))


def add_a_file(folder):
    (folder / "mine/train-4.jsonl").write_text(lines(99))


def remove_a_file(folder):
    (folder / "mine/train-2.jsonl").unlink()


def exchange_two_files(folder):
    first, second = folder / "mine/train-1.jsonl", folder / "mine/train-2.jsonl"
    first.rename(folder / "mine/kept")
    second.rename(first)
    (folder / "mine/kept").rename(second)


def retarget_a_link(folder):
    (folder / "mine/train-3").unlink()
    (folder / "mine/train-3").symlink_to("../another", target_is_directory=True)


def edit_behind_a_link(folder):
    (folder / "one/rows.jsonl").write_text(lines(*range(90, 100)))


def edit_weights(folder):
    path = folder / "model/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")


CHANGES = (
    edit_a_row,
    replace_a_file_by_an_older_one,
    append_a_row,
    edit_the_eval_split,
    add_a_file,
    remove_a_file,
    exchange_two_files,
    retarget_a_link,
    edit_behind_a_link,
)
CONTENTS = {change.__name__: Row(change, IMPORTED, (MINE,)) for change in CHANGES} | {
    "edit_a_tokenizer": Row(
        replaced("tokenizer/tokenizer.json", ("<unk>", "<UNK>")), {"init_model"}, (COPIED,)
    ),
    "edit_a_model": Row(edit_weights, {"fetch_model"}, (NEAR,)),
    "edit_prompts": Row(replaced("prompts/toy.yaml", ("Pia", "Max")), {"prompt_eval"}),
    "edit_pairs": Row(replaced("prompts/pairs/toy.yaml", ("Pia", "Max")), {"rw_eval"}),
    "edit_prompts_of_another_set": Row(replaced("prompts/en.yaml", ("basil", "mint")), set()),
}


@rows(CONTENTS)
def test_files_with_other_content_are_read_again(plans, row):
    assert plans(row) == row.rules


def test_an_edit_that_sets_size_and_time_back_is_seen(copy):
    # The digest of the file is cached now.
    assert copy.planned(MINE) == set()
    path = copy.folder / "mine/train-1.jsonl"
    before = path.stat()
    edit_a_row(copy.folder)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert copy.planned(MINE) == IMPORTED


def pins(old, new):
    """A row with a change of the pins."""
    return Row(replaced("requirements.txt", (old, new)), RULES, EVERY_RULE)


PINS = {
    "another version": pins("peft==", "peft==1"),
    "one more": pins("peft==", "trl==1.16.0\npeft=="),
    "one less": pins("\npeft==", "\n# peft=="),
}


@rows(PINS)
def test_a_pin_makes_everything_stale(plans, row):
    assert plans(row) == row.rules


# --- edits without effect -------------------------------------------------------------------


def fresh(edit):
    """A row with an edit after which nothing must run."""
    return Row(edit, set(), TARGETS)


def all_code(change):
    """Change the text of each module and program."""

    def edit(folder):
        for path in (folder / "scripts").rglob("*.py"):
            before = path.read_text()
            path.write_text(change(before))
            assert path.read_text() != before or not before, path

    return edit


def add_a_module(folder):
    (folder / "scripts/snakechat/unused.py").write_text("NUMBER = 1\n")
    (folder / "scripts/tool.py").write_text("from snakechat import unused\n")


def write_reward_functions(folder):
    replaced("rewards/shop.py", ("float(", "-float("))(folder)
    (folder / "rewards/new.py").write_text("def score(prompts, responses):\n    return [0, 0]\n")


def backwards(value):
    """Return mappings with their keys in reverse order."""
    if not isinstance(value, dict):
        return value
    return {key: backwards(inner) for key, inner in reversed(value.items())}


def reformat_the_config(folder):
    text = yaml.safe_dump(backwards(CONFIG), sort_keys=False, default_flow_style=False)
    (folder / "config.yaml").write_text(text)


def reverse_the_pins(folder):
    path = folder / "requirements.txt"
    path.write_text("\n".join(reversed(path.read_text().splitlines())) + "\n")


def touch_everything(folder):
    # Inputs become newer than results, and sources newer than all.
    now = time.time()
    for number, path in enumerate(sorted(folder.rglob("*"), reverse=True)):
        os.utime(path, (now - number, now - number), follow_symlinks=False)


def move_the_dataset(folder):
    # Under another name, without times, with a file instead of a link, and next to another file.
    shutil.copytree(folder / "mine", folder / "moved", copy_function=shutil.copyfile)
    shutil.rmtree(folder / "mine")
    (folder / "moved/README.md").write_text("# Mine\n")
    write_config(folder, nested("datasets.mine.path", str(folder / "moved")))


def move_the_model(folder):
    (folder / "model").rename(folder / "elsewhere")
    # Files next to the weights that are not read.
    (folder / "elsewhere/training_args.bin").write_text("old")
    (folder / "elsewhere/onnx").mkdir()
    (folder / "elsewhere/onnx/model.safetensors").write_text("old")
    write_config(folder, nested("models.near.path", "elsewhere"))


def move_the_tokenizer(folder):
    (folder / "tokenizer").rename(folder / "moved")
    write_config(folder, nested("models.copied.tokenizer.path", "moved"))


def put_the_clock_ahead(folder):
    # As a node whose clock is an hour ahead would leave its results.
    ahead = time.time() + 3600
    for path in (folder / "output").rglob("*"):
        os.utime(path, (ahead, ahead))


def placement(*names):
    """Change settings of PLACEMENT."""
    places = {name: name.replace(".placement", ".recipes.tiny.placement") for name in names}
    return config(*(nested(places[name], PLACEMENT[name]) for name in names))


PLACES = {stage: [name for name in PLACEMENT if name.startswith(f"{stage}.")] for stage in RECIPES}
OVERRIDDEN = [
    nested(name.replace(".", ".defaults."), value)
    for name, (value, _) in STAGES.items()
    if is_stated(name)
]
STATED = [
    nested(f"{stage}.recipes.tiny", {**CONFIG[stage]["defaults"], **RECIPES[stage]})
    for stage in RECIPES
]
USUAL_COLUMNS = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}

FRESH = {
    "comments": fresh(all_code(lambda text: f"# A comment.\n{text}\n    # Another.\n")),
    "docstrings": fresh(all_code(lambda text: text.replace('"""', '"""Again: ', 1))),
    "layout": fresh(all_code(lambda text: text.replace("\n\n\n", "\n\n\n\n") + "\n")),
    "code that nothing uses": fresh(add_a_module),
    "comments in the Snakefile": fresh(
        replaced("Snakefile", ("# From preference", "# From all preference"))
    ),
    "messages of rules": fresh(replaced("rules/sft.smk", ('"Fine-tuning', '"Tuning'))),
    "comments in the pins": fresh(replaced("requirements.txt", ("# The one set", "# One set"))),
    "order of the pins": fresh(reverse_the_pins),
    "comments in the config": fresh(replaced("config.yaml", ("# All settings", "# The settings"))),
    "order and style of the config": fresh(reformat_the_config),
    "spelling of values": fresh(
        replaced(
            "config.yaml",
            ("seed: 1234", "seed: 0x4D2"),
            ("weights: {sft: 2,", "weights: {sft: 2.0,"),
            ("init_std: 0.06", "init_std: 6.0e-2"),
            ("lora_alpha: 1", "lora_alpha: 1.0"),
            ("gamma: 1.0", "gamma: 1"),
            ("actor_learning_rate: 1.0e-3", "actor_learning_rate: .001"),
            ("whiten_advantages: true", "whiten_advantages: True"),
            ("dtype: bf16", 'dtype: "bf16"'),
        )
    ),
    "save_steps": fresh(placement("save_steps")),
    "deployment": fresh(placement("deployment")),
    "the keys of a deployment": fresh(config(nested("deployments.cpu", PLACE))),
    "another deployment": fresh(setting("deployments.new", CONFIG["deployments"]["cpu"])),
    "the name of a deployment as placement": fresh(
        config(*(nested(f"{stage}.recipes.tiny.placement", "multi_node") for stage in RECIPES))
    ),
    "placement of sft": fresh(placement(*PLACES["sft"])),
    "placement of reward": fresh(placement(*PLACES["reward"])),
    "placement of dpo": fresh(placement(*PLACES["dpo"])),
    "placement of rlhf": fresh(placement(*PLACES["rlhf"])),
    "defaults that the recipes override": fresh(config(*OVERRIDDEN)),
    "defaults stated in the recipes": fresh(config(*STATED)),
    "another recipe": fresh(setting("sft.recipes.350m.epochs", 3)),
    "another dataset": fresh(setting("datasets.local.path", "elsewhere")),
    "another model": fresh(setting("models.opt-125m.revision", "v2")),
    "a new recipe": fresh(setting("rlhf.recipes.new", RECIPES["rlhf"])),
    "a preset that the recipe does not use": fresh(
        setting("rlhf.presets.deepspeed_chat.kl_coef", 0.3)
    ),
    "a preset with the values of the recipe": fresh(
        config(
            nested("rlhf.presets.mine", {"kl_coef": 0.15, "gae_lambda": 0.95}),
            nested("rlhf.recipes.tiny.preset", "mine"),
        )
    ),
    "a preset whose values the recipe overrides": fresh(
        config(
            nested("rlhf.presets.mine", {"kl_coef": 0.3, "ppo_epochs": 1}),
            nested("rlhf.recipes.tiny.preset", "mine"),
        )
    ),
    "the common seed as seed of the recipe": fresh(
        config(*(nested(f"{stage}.recipes.tiny.seed", CONFIG["seed"]) for stage in RECIPES))
    ),
    "the common seed as seed of the dataset": fresh(setting("datasets.toy.seed", CONFIG["seed"])),
    "reward functions that the recipe does not name": fresh(write_reward_functions),
    "a weight of one": fresh(setting("sft.recipes.tiny.datasets", [{"toy": 1.0}])),
    "the common split as split of the dataset": fresh(setting("datasets.toy.split", SHARES)),
    "the common template as template of the model": fresh(
        setting("models.tiny.template", "dialogue")
    ),
    "the common template as template of a fetched model": fresh(
        setting("models.far.template", "dialogue")
    ),
    "the common on_bad_row as that of the dataset": fresh(
        setting("datasets.mine.on_bad_row", "fail")
    ),
    "on_bad_row for generated datasets": Row(setting("on_bad_row", "skip"), set()),
    "the usual columns": fresh(setting("datasets.mine.columns", USUAL_COLUMNS)),
    "globs of the same files": fresh(
        setting("datasets.mine", {"train": "train-**.jsonl", "eval": "test.jsonl"})
    ),
    "the origin of a local dataset": fresh(
        setting("datasets.mine", {"hub": "lab/mine", "revision": "main"})
    ),
    "a dataset moved": fresh(move_the_dataset),
    "a tokenizer moved": fresh(move_the_tokenizer),
    "a model moved": fresh(move_the_model),
    "the origin of a local model": fresh(
        setting("models.near", {"hub": "lab/near", "revision": "main"})
    ),
    "everything touched": fresh(touch_everything),
    "a clock ahead of time": fresh(put_the_clock_ahead),
    ".snakemake deleted": fresh(lambda folder: shutil.rmtree(folder / ".snakemake")),
}


def test_every_placement_is_changed():
    cpu = CONFIG["deployments"]["cpu"]
    assert all(PLACE[key] != value for key, value in cpu.items())
    for stage, names in PLACES.items():
        assert RECIPES[stage]["placement"] == {"deployment": "cpu"} != names
        assert {name.rpartition(".")[2] for name in names} >= PLACE.keys() | {"deployment"}
    assert all(PLACEMENT[name] != CONFIG[name] for name in ("save_steps", "deployment"))


@rows(FRESH)
def test_an_edit_that_changes_no_result_makes_nothing_stale(plans, row):
    assert plans(row) == row.rules


def test_a_copy_without_times_is_fresh(built, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(built.folder, folder, copy_function=shutil.copyfile, symlinks=True)
    assert Workflow(folder, *built.options).planned(*TARGETS) == set()


# --- results --------------------------------------------------------------------------------

RESULTS = {
    "import_dataset": "data/toy",
    "split_dataset": "split/toy",
    "init_model": "models/tiny",
    "tokenize_sft": "tokens/sft/tiny",
    "train_sft": "sft/tiny",
    "evaluate_sft": "eval/sft/tiny",
    "tokenize_reward": "tokens/reward/tiny",
    "train_reward": "reward/tiny",
    "evaluate_reward": "eval/reward/tiny",
    "tokenize_dpo": "tokens/dpo/tiny",
    "compute_reference": "reference/tiny",
    "train_dpo": "dpo/tiny",
    "evaluate_dpo": "eval/dpo/tiny",
    "tokenize_rlhf": "tokens/rlhf/tiny",
    "train_rlhf": "rlhf/tiny",
    "evaluate_rlhf": "eval/rlhf/tiny",
    "draw_report": "report/tiny",
    "prompt_eval": "prompt_eval/rlhf/tiny",
    "rw_eval": "rw_eval/reward/tiny",
    "evaluate_tasks": "lm_eval/rlhf/tiny",
    "write_record": "record/sft/tiny",
    "compare_zero": "zero_runs/sft/tiny",
    "draw_zero": "zero/sft/tiny",
    "compare_runs": "compare/dpo/tiny-vs-other",
}


def empty(result):
    shutil.rmtree(result)
    result.mkdir()


def lengthen_a_file(result):
    with next(files_of(result)).open("a") as file:
        file.write(" ")


def cut_a_file(result):
    os.truncate(next(files_of(result)), 1)


def delete_a_file(result):
    next(files_of(result)).unlink()


def delete_the_manifest(result):
    result.with_name(f"{result.name}.manifest.json").unlink()


def empty_and_delete_the_manifest(result):
    empty(result)
    delete_the_manifest(result)


def cut_the_manifest(result):
    os.truncate(result.with_name(f"{result.name}.manifest.json"), 500)


def files_of(result):
    """Return the files that the manifest of a result lists."""
    files = (path for path in sorted(result.iterdir()) if path.is_file())
    return (path for path in files if path.name not in ("manifest.json", "README.md"))


def damaged(rule, damage, rules=None, targets=TINY):
    """A row with a damaged result, which makes the rule stale unless rules are named."""
    rules = stale(rule) if rules is None else rules
    return Row(lambda folder: damage(folder / "output" / RESULTS[rule]), rules, targets)


DAMAGES = (
    shutil.rmtree,
    lengthen_a_file,
    cut_a_file,
    delete_a_file,
    cut_the_manifest,
)
DAMAGED = {f"{rule}: empty": damaged(rule, empty) for rule in RESULTS}
DAMAGED |= {f"train_sft: {damage.__name__}": damaged("train_sft", damage) for damage in DAMAGES}

# A result whose input lost its manifest stays valid, unless the input itself is a target. (The
# rules sft, dpo, rlhf and report have no command: they are the folders that users name.)
REQUESTED = {
    "train_dpo": {"dpo", *stale("train_dpo")},
    "evaluate_dpo": {"dpo", *stale("evaluate_dpo")},
    "train_rlhf": {"rlhf", *stale("train_rlhf")},
    "evaluate_rlhf": {"rlhf", *stale("evaluate_rlhf")},
    "draw_report": {"report", "draw_report"},
    "prompt_eval": {"prompt_eval"},
    "rw_eval": {"rw_eval"},
    "evaluate_tasks": {"evaluate_tasks"},
    "write_record": {"write_record"},
    "draw_zero": {"draw_zero"},
    "compare_runs": {"compare_runs"},
}
SFT_REQUESTED = {"sft", "train_sft", "evaluate_sft"}, ("output/sft/tiny",)
DAMAGED |= {
    **{
        f"{rule}: delete_the_manifest": damaged(
            rule, delete_the_manifest, REQUESTED.get(rule, set())
        )
        for rule in RESULTS
    },
    "train_sft: delete_the_manifest, request it": damaged(
        "train_sft", delete_the_manifest, *SFT_REQUESTED
    ),
    "train_sft: empty_and_delete_the_manifest, request it": damaged(
        "train_sft", empty_and_delete_the_manifest, *SFT_REQUESTED
    ),
}


def test_every_result_of_the_tiny_recipes_is_damaged():
    assert RESULTS.keys() == RULES - {"fetch_model"}


@rows(DAMAGED)
def test_a_result_that_lost_files_is_stale(plans, row):
    assert plans(row) == row.rules


# --- one edit after another -----------------------------------------------------------------


def test_edits_that_are_undone_leave_nothing_behind(copy):
    edits = (
        SETTINGS["rlhf.gamma"],
        SETTINGS["seed"],
        VALUES["two shares of the split swapped"],
        CODE["snakechat/algorithms/ppo.py"],
        CODE["snakechat/workflow/job.py"],
        PINS["another version"],
        CONTENTS["edit_a_row"],
        FRESH["everything touched"],
    )
    before = {path: path.read_bytes() for path in sources_of(copy.folder)}
    for row in edits:
        row.edit(copy.folder)
        assert copy.planned(*row.targets) == row.rules
        for path, content in before.items():
            path.write_bytes(content)
    assert copy.planned(*TARGETS) == set()


def sources_of(folder):
    """Return the files of a tree that are not results."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [p for p in files if p.relative_to(folder).parts[0] not in ("output", ".snakemake")]


def test_an_edit_is_noticed_although_the_clock_was_ahead(copy):
    put_the_clock_ahead(copy.folder)
    SETTINGS["rlhf.gae_lambda"].edit(copy.folder)
    assert copy.planned(*TINY) == stale("train_rlhf")
    write_config(copy.folder)
    assert copy.planned(*TARGETS) == set()


# Programs that write only the manifest of their result, and pages: they build in seconds.
STUB = '''"""Write a result without content."""

from snakechat.workflow.job import run


def main(job):
    """Write only the files that rules copy."""
    for page in (
        "record.md",
        "zero.html",
        "comparison.html",
        "responses.html",
        "scores.html",
    ):
        (job.result / page).touch()


run(main)
'''
FULL_DISK = STUB.replace("for page", 'raise OSError(28, "No space left on device")\n    for page')


STUBS = (*TINY, "output/sft/other", "output/reward/tiny")


def stub_config(*changes):
    """Return a config with recipes tiny and other of sft and reward, and an rlhf recipe of both."""
    settings = {"reward": "other", "num_generations": 2, "reward_functions": {"shop": 1}}
    return merged(CONFIG, QUICK, OURS, nested("rlhf.recipes.tiny", settings), *changes)


def write_stub_config(folder, config):
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


@pytest.fixture(scope="module")
def built_stubs(tmp_path_factory):
    """A build of stubs."""
    workflow = Workflow(tmp_path_factory.mktemp("stubs") / "work")
    copy_sources(workflow.folder)
    for rule in RULES:
        (workflow.folder / "scripts" / program_of(rule).name).write_text(STUB)
    write_stub_config(workflow.folder, stub_config())
    workflow.build(*STUBS)
    return workflow


@pytest.fixture
def stubs(built_stubs, tmp_path):
    """A copy of it, for one test."""
    return built_stubs.copy(tmp_path / "stubs")


def run_records(workflow):
    """Return the record of each run that made a result."""
    return {path: path.read_text() for path in (workflow.folder / "output").rglob("*.run.json")}


def test_actor_and_reward_model_swapped_are_stale(stubs):
    assert stubs.planned(*STUBS) == set()
    actor, reward = ("rlhf.recipes.tiny.actor", "other"), ("rlhf.recipes.tiny.reward", "tiny")
    write_stub_config(stubs.folder, stub_config(nested(*actor), nested(*reward)))
    assert stubs.planned(*STUBS) == stale("train_rlhf")


def test_order_of_recipes_does_not_matter(stubs):
    write_stub_config(stubs.folder, backwards(stub_config()))
    assert stubs.planned(*STUBS) == set()


def test_a_result_is_stale_after_the_edit_that_it_was_made_with_is_undone(stubs):
    write_stub_config(stubs.folder, stub_config(nested("rlhf.recipes.tiny.gamma", 0.9)))
    assert stubs.planned(*TINY) == stale("train_rlhf")
    stubs.build(*TINY)
    assert stubs.planned(*TINY) == set()
    write_stub_config(stubs.folder, stub_config())
    assert stubs.planned(*TINY) == stale("train_rlhf")


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "rloo"},
        {"algorithm": "grpo"},
        {"preset": "deepspeed_chat"},
        {"reward": None},
        {"reward_functions": {"shop": 2}},
    ],
)
def test_rl_settings_count(stubs, settings):
    config = stub_config()
    config["rlhf"]["recipes"]["tiny"] |= settings
    write_stub_config(stubs.folder, config)
    assert stubs.planned(*TINY) == stale("train_rlhf")


def test_a_reward_function_is_code_of_the_rules_that_run_it(stubs):
    path = stubs.folder / "rewards/shop.py"
    before = path.read_text()
    path.write_text(f"# A comment.\n{before}")
    assert stubs.planned(*TINY) == set()
    path.write_text(f"{before}\nEDITED = True\n")
    assert stubs.planned(*TINY) == stale("train_rlhf")
    output = stubs.run("python", "scripts/explain.py", "output/rlhf/tiny").stdout
    assert "train_rlhf tiny is stale: reward function rewards/shop.py changed\n" in output
    # A module that nothing else uses.
    (stubs.folder / "scripts/snakechat/mine.py").write_text("ONE = 1\n")
    path.write_text(f"from snakechat.mine import ONE\n{before}")
    stubs.build(*TINY)
    assert stubs.planned(*TINY) == set()
    (stubs.folder / "scripts/snakechat/mine.py").write_text("ONE = 2\n")
    assert stubs.planned(*TINY) == stale("train_rlhf")


def test_a_failed_job_leaves_downstream_results_stale_and_loses_nothing(stubs):
    # The comparison of ZeRO stages has the same code, and succeeds.
    targets = [target for target in TINY if target != ZERO]
    program = stubs.folder / "scripts/train_sft.py"
    before = run_records(stubs)
    program.write_text(FULL_DISK)
    process = stubs.snakemake(*targets, "--cores", "2")
    assert process.returncode != 0
    assert "error: No space left" in process.stdout and "Traceback" not in process.stdout
    assert stubs.planned(*targets) == stale("train_sft")
    # The edit is undone and the old result exists: it is reused, not rebuilt.
    program.write_text(STUB)
    stubs.build(*targets)
    assert run_records(stubs) == before
    assert stubs.planned(*targets) == set()


def test_results_behind_a_missing_one_are_as_new_as_its_inputs(stubs):
    # Snakemake looks through a missing result. What it does with results that are older than the
    # inputs behind it depends on the order of a set.
    (stubs.folder / "output/sft/tiny.manifest.json").unlink()
    tokens = stubs.folder / "output/tokens/sft/tiny.manifest.json"
    tokens.touch()
    stubs.planned(*STUBS)
    followers = [
        path
        for path in (stubs.folder / "output").rglob("*.manifest.json")
        for job in json.loads(path.read_text())["spec"]["inputs"].values()
        if job["path"] == "output/sft/tiny"
    ]
    assert len(followers) >= 5
    assert min(path.stat().st_mtime_ns for path in followers) >= tokens.stat().st_mtime_ns
