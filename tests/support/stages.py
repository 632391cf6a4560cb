"""The jobs of a recipe in this process: what a build makes, without Snakemake."""

import contextlib
import importlib
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from conftest import INIT, ROOT
from snakechat.config.rlhf import GenerationSettings, RlhfSettings
from snakechat.config.settings import DpoSettings, RewardSettings, SftSettings
from snakechat.data import toy
from snakechat.data.records import write_split
from snakechat.jobs.rules import RULES
from snakechat.jobs.staleness import Jobs
from snakechat.modeling.models import make_causal
from snakechat.modeling.saving import save_model
from snakechat.workflow import job as jobs
from snakechat.workflow.job import Job, read_manifests
from snakechat.workflow.manifest import MANIFEST, manifest_path, result_files, sealed_json
from snakechat.workflow.publishing import publish_result
from support.configs import load
from support.encoding import make_record
from support.specs import EMPTY_SPEC

# The types of settings; others are a SimpleNamespace.
SETTINGS = {
    "train_sft": SftSettings,
    "train_reward": RewardSettings,
    "train_dpo": DpoSettings,
    "train_rlhf": RlhfSettings,
    "generate_responses": GenerationSettings,
    "score_responses": GenerationSettings,
}


class Stages:
    """Results of a config's jobs, each made when it is first asked for.

    The working directory is the folder of the build.

    Args:
        rows: {split: records} of the datasets; each phase gets all of them.
        models: Folders of the base models by name.
    """

    def __init__(self, config, folder, rows, models):
        self.config, self.folder, self.models = config, folder, models
        self.made = {}
        for split, records in rows.items():
            (folder / "records").mkdir(exist_ok=True)
            path = folder / f"records/{split}.parquet"
            write_split(path, [make_record(*texts) for texts in records])
            (folder / "rows").mkdir(exist_ok=True)
            for phase in ("sft", "reward", "rlhf"):
                np.save(folder / f"rows/{phase}.{split}.npy", np.arange(len(records)))
        for path in (folder / "records", folder / "rows", *models.values()):
            write_manifest(path)

    def result(self, rule, name):
        """Return the folder of a job's result."""
        if rule == "fetch_model":
            return self.models[name]
        if rule in ("import_dataset", "split_dataset"):
            return self.folder / {"import_dataset": "records", "split_dataset": "rows"}[rule]
        if (rule, name) not in self.made:
            self.made[rule, name] = self.folder / self.run(rule, name).target
        return self.made[rule, name]

    def spec(self, rule, name):
        """Return the spec of a job, whose inputs are made."""
        settings, inputs = RULES[rule].describe(self.config, name)[:2]
        inputs = {
            key: {"rule": job[0], "name": job[1], "path": str(self.result(*job))}
            for key, job in inputs.items()
        }
        spec = EMPTY_SPEC | {"rule": rule, "name": name, "settings": settings, "inputs": inputs}
        spec |= {"path": f"output/{rule}/{name}"}
        if RULES[rule].shows_provenance:
            spec["names"] = {}
        return spec

    def run(self, rule, name):
        """Run a job; return it."""
        program = importlib.import_module(RULES[rule].program or rule)
        spec = self.spec(rule, name)
        manifests = read_manifests(spec)
        options = Jobs(self.config, ROOT)[rule, name].options
        settings_type = SETTINGS.get(rule, SimpleNamespace)
        job = Job(spec, manifests, self.placement(rule, name), options, settings_type)
        # Left by a job that failed.
        shutil.rmtree(job.result, ignore_errors=True)
        for folder in (job.result, job.states, job.log_folder):
            folder.mkdir(parents=True, exist_ok=True)
        program.main(job)
        jobs.write_outcome(job)
        publish_result(job, time.time())
        return job

    def placement(self, rule, name):
        """Return the placement of a job."""
        return Jobs(self.config, ROOT)[rule, name].placement


@contextlib.contextmanager
def stages_of_small_model(folder, tokenizer, rows, recipes, datasets=None, llm_judges=None, **init):
    """Yield the Stages of recipes, whose model `random` is small, in a working directory.

    Args:
        rows: {split: records}.
        recipes: {stage: {name: recipe}}.
        datasets: {name: dataset}, in addition to the datasets of the config.
        llm_judges: {name: judge}.
        init: Changes of the model's config.
    """
    model = make_causal({**INIT, "max_position_embeddings": 96, **init}, tokenizer, 1)
    save_model(model, tokenizer, folder / "base")
    changes = {stage: {"recipes": added} for stage, added in recipes.items()}
    changes["datasets"], changes["llm_judges"] = datasets or {}, llm_judges or {}
    changes["models"] = {"random": {"path": str(folder / "base"), "template": "dialogue"}}
    before = Path.cwd()
    os.chdir(folder)
    yield Stages(load(changes), folder, rows, {"random": folder / "base"})
    os.chdir(before)


def toy_rows(number, seed=1):
    """Return the same pairs of the toy for both splits: (prompt, chosen, rejected)."""
    rows, _ = toy.make_rows(number, 0, seed)
    return {split: [tuple(row.values()) for row in rows] for split in ("train", "eval")}


def write_manifest(path):
    """Write the manifest of a folder that no program made."""
    spec = EMPTY_SPEC | {"rule": path.name, "name": path.name, "path": str(path)}
    manifest = {"spec": spec, "inputs": {}, "lineage": {}, "facts": {}}
    manifest["files"] = result_files(path)
    for file in (manifest_path(path), path / MANIFEST):
        file.write_text(sealed_json(manifest))
