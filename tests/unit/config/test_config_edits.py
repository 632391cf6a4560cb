"""Random edits of valid configs: they load and can be planned, or fail in one line.

The option --config-edits is their number, for example 3000.
"""

import copy
import functools
import random

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import ROOT
from snakechat.config import job_settings as jobs
from snakechat.config.loading import load_config, update
from snakechat.config.recipes import STAGES
from snakechat.config.resources import job_placement, job_resources
from snakechat.config.targets import default_targets
from snakechat.workflow.digests import digest
from snakechat.workflow.errors import InputError
from support.configs import config_values

# An entry of each kind, in addition to the small recipes of config.yaml.
MORE = yaml.safe_load("""
datasets:
  mine: {path: mine, format: plain, train: "train*.jsonl", on_bad_row: skip, keep: [solution]}
  far: {hub: lab/far, revision: "0123", format: plain, max_rows: 9, columns: {prompt: q, chosen: a}}
  best: {generations: tiny, select: best, min_score: 0.5}
  labelled: {label: toy, llm_judge: wise}
models:
  near: {path: model, template: chat}
  far: {hub: lab/far, revision: main}
llm_judges:
  wise: {url: "http://127.0.0.1/v1", model: m, rubric: Be fair., scale: [0, 10]}
sweeps:
  kl: {stage: rlhf, recipe: tiny, over: {kl_coef: [0.1, 0.2], seed: [1, 2]}}
deployments: {mine: {nodes: 2, gpus_per_node: 0, zero_stage: 0, offload: none, threads: 2,
  activation_checkpointing: false, micro_batch_tokens: 8192, mem_mb: 4000, runtime: 60}}
""")
EXTREMES = [0, -1, 1, 2**31, 2**63, 10**400, 1e308, -0.0, float("inf"), float("nan"), "", "\0"]
EXTREMES += ["a\n", "é", "\ud83d", "../x", "/", "a" * 5000, "{x}", "null", "1e5", "-", " "]
EXTREMES += [None, True, [], {}, [[]], [None], {"": 1}, {1: 2}, {None: 3}, b"x", {1, 2}, "*", "("]


@functools.cache
def base():
    """Return a valid config with the small recipes and an entry of each kind."""
    values = config_values()
    for stage in (*STAGES, "generations"):
        values[stage]["recipes"] = {
            name: recipe
            for name, recipe in values[stage]["recipes"].items()
            if "tiny" in name or name == "judge"
        }
    update(values, MORE)
    return values


def places(value, path=()):
    """Return the paths of all values."""
    keys = value if isinstance(value, dict) else range(len(value)) if type(value) is list else ()
    found = [path] if path else []
    for key in keys:
        found += places(value[key], (*path, key))
    return found


def parent_of(values, path):
    for key in path[:-1]:
        values = values[key]
    return values


def edit(values, draw):
    """Edit a config in place: one of several ways, at a random place."""
    # Of the many places, those near the top are as likely as the deep ones.
    paths = places(values)
    depth = draw.randrange(1, 6)
    path = draw.choice([path for path in paths if len(path) == depth] or paths)
    parent, key = parent_of(values, path), path[-1]
    other = draw.choice(paths)
    kind = draw.choice(["delete", "rename", "extreme", "extreme", "retype", "swap", "add", "nest"])
    if kind == "delete":
        del parent[key]
    elif kind == "rename" and isinstance(parent, dict):
        parent[draw.choice([f"{key}x", f"{key}\n", "é", 7, None, other[-1], f"{key} "])] = (
            parent.pop(key)
        )
    elif kind == "extreme":
        parent[key] = copy.deepcopy(draw.choice(EXTREMES))
    elif kind == "retype":
        parent[key] = draw.choice([str, lambda value: [value], lambda value: {"a": value}])(
            parent[key]
        )
    elif kind == "swap":
        parent[key] = copy.deepcopy(parent_of(values, other)[other[-1]])
    elif kind == "add" and isinstance(parent[key], dict):
        value = copy.deepcopy(parent_of(values, other)[other[-1]])
        parent[key][draw.choice([other[-1], "new", "NEW.json", "a b", 3, "\x1b[31m"])] = value
    elif kind == "nest":
        for _ in range(draw.choice([1, 60])):
            parent[key] = [parent[key]]


def plan(values):
    """Load a config and ask for what planning asks for, without files."""
    config = load_config(values, ROOT, ROOT, {})
    default_targets(config)
    found = []
    for stage in (*STAGES, "generations"):
        for name in config.values[stage]["recipes"]:
            found.append(config.program_settings(stage, name))
            found.append(jobs.tokenization_inputs(config, stage, name))
            job_resources(job_placement(config, stage, name, False), 2)
            config.llm_judges(stage, name)
    for name in config.values["rlhf"]["recipes"]:
        found += [jobs.rlhf_inputs(config, name), jobs.rlhf_evaluation_settings(config, name)]
        found.append(jobs.rlhf_evaluation_inputs(config, name))
    for name in config.values["dpo"]["recipes"]:
        found += [jobs.reference_settings(config, name), jobs.dpo_evaluation_settings(config, name)]
    for name in config.values["generations"]["recipes"]:
        found += [jobs.sampling_settings(config, name), jobs.scoring_inputs(config, name)]
    for name in config.values["datasets"]:
        rule, _ = config.records_job(name)
        makers = {"import_dataset": jobs.import_settings, "label_pairs": jobs.labelling_settings}
        found.append(makers.get(rule, jobs.selection_settings)(config, name))
        found.append(jobs.split_settings(config, name))
    found += [jobs.model_settings(config, name) for name in config.values["models"]]
    for settings_of_a_job in found:
        digest(settings_of_a_job)
    assert config.cache_max_bytes is None or config.cache_max_bytes >= 0


def test_the_config_that_is_edited_can_be_planned():
    plan(copy.deepcopy(base()))


def test_an_edited_config_can_be_planned_or_fails_in_one_line(request):
    @settings(
        max_examples=request.config.getoption("--config-edits"),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**32), st.integers(1, 3))
    def check(seed, edits):
        values, draw = copy.deepcopy(base()), random.Random(seed)
        for _ in range(edits):
            edit(values, draw)
        try:
            plan(values)
        except InputError as error:
            text = str(error)
            assert "\n" not in text and text.isprintable(), text
            assert len(text) < 3000, len(text)

    check()
