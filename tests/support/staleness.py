"""Edits to a build and the rules that must run after each.

A row is an edit and the rules that a build has to run after it, no more and no less. The fixture
`plans` compares the keys of all jobs before and after an edit. With the fixture `dry_runs`,
Snakemake plans in a copy of `built`: the quick build, and what OURS adds to its config.
"""

import copy
import functools
import json
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import yaml

from conftest import ROOT, copy_sources
from snakechat.config.loading import load_config, project_files, update
from snakechat.jobs.planner import jobs_of_target
from snakechat.jobs.rules import RULES
from snakechat.jobs.staleness import Jobs, with_upstream
from snakechat.workflow import code_digests
from snakechat.workflow.manifest import store_key
from support.configs import project_values

TOKENIZERS = {f"tokenize_{stage}" for stage in ("sft", "reward", "dpo", "rlhf", "generations")}
# The rules that read the result of a rule, in the tiny recipes: their reward model and their DPO
# model start from the SFT model; their base model is not fetched. Nothing reads the other results.
READERS = {
    "import_dataset": "split_dataset label_pairs init_model evaluate_rlhf draw_report",
    "split_dataset": "evaluate_rlhf draw_report",
    "init_model": "train_sft evaluate_sft evaluate_rlhf prompt_eval",
    "tokenize_sft": "train_sft evaluate_sft train_rlhf draw_report",
    "train_sft": "evaluate_sft train_reward compute_reference train_dpo evaluate_dpo train_rlhf"
    " evaluate_rlhf generate_responses score_responses draw_report prompt_eval rw_eval",
    "evaluate_sft": "draw_report",
    "tokenize_reward": "train_reward evaluate_reward train_rlhf draw_report",
    "train_reward": "evaluate_reward train_rlhf score_responses evaluate_rlhf draw_report rw_eval",
    "evaluate_reward": "draw_report",
    "tokenize_dpo": "compute_reference train_dpo evaluate_dpo draw_report",
    "compute_reference": "train_dpo",
    "train_dpo": "evaluate_dpo draw_page draw_report",
    "evaluate_dpo": "draw_page draw_report check_gate",
    "tokenize_rlhf": "train_rlhf evaluate_rlhf draw_report",
    "train_rlhf": "evaluate_rlhf draw_report prompt_eval",
    "evaluate_rlhf": "draw_report",
    "prompt_eval": "draw_page",
    "rw_eval": "draw_page",
    "tokenize_generations": "generate_responses score_responses",
    "generate_responses": "score_responses",
    "score_responses": "select_responses",
}


def readers(rule):
    """Return the rules that read the result of a rule."""
    tokenizers = TOKENIZERS if rule in ("import_dataset", "split_dataset", "init_model") else set()
    return {*READERS.get(rule, "").split(), *tokenizers}


def stale(*rules):
    """Return rules and all rules downstream of them."""
    return set(rules).union(*(stale(*readers(rule)) for rule in rules))


# The rules that read what the local dataset and the model from the hub become.
TOKENIZED = {"tokenize_sft", "train_sft"}
SPLIT = {"split_dataset", *TOKENIZED}
IMPORTED = {"import_dataset", *SPLIT}
FETCHED = {"fetch_model", *TOKENIZED}
# The tiny recipes and their pages; a model from the hub, fine-tuned on a local dataset; a dataset
# from the hub; a model from a folder.
TINY = (
    *("output/rlhf/tiny", "output/dpo/tiny", "output/compare/dpo/tiny-vs-other.html"),
    *("output/prompt_eval/rlhf/tiny.html", "output/rw_eval/reward/tiny.html"),
    *("output/data/picked.manifest.json", "output/data/labelled.manifest.json"),
)
MINE = "output/sft/mine.manifest.json"
FAR = "output/data/far.manifest.json"
NEAR = "output/models/near.manifest.json"
TARGETS = (*TINY, MINE, FAR, NEAR)


class Row(NamedTuple):
    """An edit, which is a function of the folder of a build, and the rules that must run after it.

    By default, none must run of all targets.
    """

    edit: Callable
    rules: set = frozenset()
    targets: tuple = TARGETS


# --- the config ---------------------------------------------------------------------------------

CONFIG = project_values()
QUICK_FILE = ROOT / "tests/configs/quick.yaml"
QUICK = yaml.safe_load(QUICK_FILE.read_text())


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


# The keys that the tiny recipes set in the quick build, themselves or by their preset.
RECIPES = {
    stage: merged(
        CONFIG[stage].get("presets", {}).get("tiny", {}),
        CONFIG[stage]["recipes"]["tiny"],
        QUICK[stage]["recipes"]["tiny"],
    )
    for stage in ("sft", "reward", "dpo", "rlhf", "generations")
}
MODEL = CONFIG["models"]["tiny"]
# Added to the config: what TARGETS need besides the tiny recipes, and one `other` of each kind,
# which differs in one setting from the tiny recipe; a `twin` does not.
OTHER = {"sft": {"seed": 5}, "reward": {"seed": 5}, "dpo": {"beta": 0.3}}
OTHER["generations"] = {"temperature": 0.5}
OURS = {
    stage: {"recipes": {"other": RECIPES[stage] | other, "twin": RECIPES[stage]}}
    for stage, other in OTHER.items()
}
OURS["sft"]["recipes"]["mine"] = {**RECIPES["sft"], "model": "far", "datasets": ["mine"]}
OURS["dpo"]["recipes"]["tiny"] = {"gate": {"metric": "loss", "min": 0, "max": 99}}
OURS["llm_judges"] = {"wise": {"url": "http://judge/v1", "model": "wise", "rubric": "Be kind."}}
OURS["datasets"] = {
    "mine": {"path": "mine", "format": "plain"},
    "far": {"hub": "lab/far", "revision": "main", "format": "plain"},
    "other": {"generate": "shop", "rows": 500, "eval_rows": 100},
    "picked": {"generations": "tiny", "select": "best"},
    "labelled": {"label": "toy", "llm_judge": "wise", "max_rows": 20},
}
OURS["models"] = {
    "far": {"hub": "lab/far", "revision": "main"},
    "near": {"path": "model"},
    "classifier": {"path": "classifier"},
    "other": merged(MODEL, {"init": {"init_std": 0.05}}),
}


def write_config(folder, *changes):
    """Write mine.yaml: OURS with changes."""
    (folder / "mine.yaml").write_text(yaml.safe_dump(merged(OURS, *changes)))


def setting(path, value):
    """Return an edit of one setting."""
    return lambda folder: write_config(folder, nested(path, value))


def replaced(path, old, new):
    """Return an edit of a text in a file."""

    def edit(folder):
        text = (folder / path).read_text()
        assert old in text, f"{old!r} is not in {path}"
        (folder / path).write_text(text.replace(old, new, 1))

    return edit


# --- builds and their plans -----------------------------------------------------------------------


def lines(*numbers):
    """Rows of a dataset, all of the same length."""
    rows = [{"prompt": f"{n:04}?", "chosen": f" {n:04}.", "rejected": " No."} for n in numbers]
    return "".join(json.dumps(row) + "\n" for row in rows)


FILES = {
    "mine/train-1.jsonl": lines(*range(40)),
    "mine/train-2.jsonl": lines(*range(40, 50)),
    "mine/test.jsonl": lines(*range(50, 70)),
    "mine/.one/rows.jsonl": lines(*range(80, 90)),
    "model/config.json": '{"architectures": ["OPTForCausalLM"]}',
    "classifier/config.json": '{"architectures": ["OPTForSequenceClassification"],'
    ' "id2label": {"0": "SCORE"}}',
    **{f"{name}/model.safetensors": "weights" for name in ("model", "classifier")},
    **{f"{name}/tokenizer.json": '"<unk>"' for name in ("model", "classifier")},
}


def write_inputs(folder):
    """Write mine.yaml, and what planning reads of its inputs: data, and the config of models."""
    write_config(folder)
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "mine/train-3.jsonl").symlink_to(".one/rows.jsonl")


# Each version of a module and of a config file is parsed once.
parsed = functools.cache(yaml.safe_load)
read_source = functools.cache(code_digests.read_source)


def keys_of(folder, targets):
    """Return the keys of all jobs of targets with their rules: of equal inputs, names count not.

    The working directory is the folder, a copy of the sources with mine.yaml.
    """
    values = {}
    for file in (*project_files(folder), QUICK_FILE, folder / "mine.yaml"):
        update(values, copy.deepcopy(parsed(file.read_bytes())))
    jobs = Jobs(load_config(values, folder, folder, {}), folder)
    wanted = [job for target in targets for job in jobs_of_target(jobs, target)]

    def read(data, path, is_reward):
        return read_source(data, "a module", is_reward)

    keys = {}
    with mock.patch.object(code_digests, "read_source", read):
        for job in with_upstream(wanted):
            # The key of an input stands for its content.
            digests = {name: keys[upstream] for name, upstream in job.inputs.items()}
            keys[job] = store_key(job.spec, digests)
    return {(job.rule, key) for job, key in keys.items()}


# A program that writes a constant, and the files that rules and model cards read: it builds in no
# time.
STUB = '''"""Write a constant."""

from snakechat.workflow.job import run

CONTENT = "first"
PAGES = ("compare.html", "prompt_eval.html", "rw_eval.html")


def main(job):
    """Write the constant, and the files that rules and model cards read."""
    (job.result / "content.txt").write_text(CONTENT)
    (job.result / "metrics.json").write_text("{}")
    (job.result / "metrics.jsonl").write_text('{"step": 1}')
    for page in PAGES:
        (job.result / page).touch()


run(main)
'''


def build_stubs(workflow):
    """Build TINY with a stub in place of each program."""
    copy_sources(workflow.folder)
    write_inputs(workflow.folder)
    for name, rule in RULES.items():
        (workflow.folder / f"scripts/{rule.program or name}.py").write_text(STUB)
    workflow.build(*TINY)
