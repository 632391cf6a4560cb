"""What determines a result, and which results are up to date.

A spec is canonical JSON: settings, digests of code, pins and external files, and the jobs whose
results are the inputs. The inputs themselves count by their content, which the manifest records
(snakechat.workflow.manifest).

A result is up to date if a store has it: its key is the digest of the job's spec and the content of
its inputs. Its path is a link, which may lead to another version: then the build changes the
link and runs no job. Times of files decide nothing, and a decision writes nothing.

The content of an input is known if the input is up to date itself. One that is stale is made first;
its readers then run, and find their result in the store if its content is the same
(snakechat.workflow.publishing.prepare).
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from snakechat.config.recipes import Config, JobId, Reference
from snakechat.config.sections import judge_access
from snakechat.jobs.data_jobs import Description
from snakechat.jobs.rules import RULES
from snakechat.workflow.code_digests import Modules, selected_code
from snakechat.workflow.manifest import (
    MEMORY,
    DigestCache,
    Lineage,
    canonical_json,
    content_digest,
    digest,
    input_digest,
    store_key,
    without_names,
    write_atomically,
)
from snakechat.workflow.pins import pins_of
from snakechat.workflow.processes import SERIAL, Placement, RunOptions, changed_values
from snakechat.workflow.store import Stored, complete_result, is_undamaged, stored_folders

# Starts of the names of variables of networks and their libraries: they move bytes.
NETWORK_VARIABLES = (
    *("NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_", "OMPI_", "PSM2_", "PSM3_", "TP_", "TORCH_NCCL_"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)


class PlannedJob:
    """A job as the config has it today. Each property is determined once, when it is asked for.

    Attributes:
        path: Path of the result.
        manifest: Path of the manifest of the result.
        existed: Whether the path led to a result, up to date or not, when the job was planned.
    """

    def __init__(self, jobs: "Jobs", rule: str, name: str) -> None:
        self.jobs, self.rule, self.name, self.row = jobs, rule, name, jobs.rules[rule]
        self.path = f"output/{self.row.folder}/{name}"
        self.manifest = f"{self.path}.manifest.json"
        self.existed = Path(self.manifest).exists()

    @cached_property
    def description(self) -> Description:
        """What the job is made from, apart from its code and the pinned libraries."""
        return self.row.describe(self.jobs.config, *self.name.split("/"))

    @cached_property
    def inputs(self) -> dict[str, "PlannedJob"]:
        """The jobs upstream, by the keys that the program uses for them."""
        return {key: self.jobs[job] for key, job in self.description.inputs.items()}

    @cached_property
    def depth(self) -> int:
        """The number of jobs in the longest chain of jobs upstream, and this one."""
        return 1 + max((job.depth for job in self.inputs.values()), default=0)

    @property
    def program(self) -> str:
        """Name of the program in scripts/."""
        is_command = self.row.work == "training" and "command" in self.description.settings
        return "run_command" if is_command else self.row.program or self.rule

    # --- runs ---------------------------------------------------------------------------------
    # Options are never part of a spec, and placements only by `environment` and in a sweep.

    @property
    def recipe(self) -> tuple[str, str]:
        """The stage and the name of the recipe that the job belongs to."""
        stage, (first, _, rest) = self.row.stage, self.name.partition("/")
        # The placement of a benchmark is its own.
        if stage == "benchmarks":
            return stage, first
        return (first, rest) if stage is None else (stage, self.name)

    @cached_property
    def placement(self) -> Placement:
        """Where and how the job runs: nodes, GPUs, threads, memory and time.

        An evaluation has one process, on at most one GPU, unless ZeRO 3 partitions the models: they
        may not fit on one GPU. Then it has all processes. A job that runs no model has one process
        too; one that tokenizes has the threads of its recipe.
        """
        work, is_tokenization = self.row.work, self.row.program == "tokenize_phase"
        if work is None and not is_tokenization:
            return SERIAL
        placement = Placement(**self.jobs.config.recipe(*self.recipe)["placement"])
        if is_tokenization:
            return replace(SERIAL, threads=placement.threads)
        # A training chooses its own, for the memory of its GPUs.
        if placement.micro_batch_tokens == "auto" and work != "training":
            placement = replace(placement, micro_batch_tokens=SERIAL.micro_batch_tokens)
        if work != "evaluation" or placement.zero_stage == 3:
            return placement
        gpus = placement.gpus_per_node
        threads = max(placement.threads // max(gpus, 1), 1)
        return replace(placement, nodes=1, gpus_per_node=min(gpus, 1), threads=threads)

    @cached_property
    def options(self) -> RunOptions:
        """What else a run of the job uses."""
        config, own = self.jobs.config, dict(self.description.options)
        if self.row.work is not None:
            own["save_steps"] = config.values["save_steps"]
        if judges := self.description.settings.get("llm_judges"):
            own["llm_judges"] = judge_access(config.values["llm_judges"], judges)
        return RunOptions(
            stores=list(map(str, config.stores)),
            hermetic=config.values["hermetic"],
            snakemake=list(self.jobs.words),
            **own,
        )

    def command(self, scripts: str, placement: Placement) -> list[str]:
        """Return the words after `python` that run the job, with the folder of the programs."""
        return [
            *(f"{scripts}/launch.py", f"{scripts}/{self.program}.py"),
            *("--spec", str(self.spec_file)),
            *("--placement", canonical_json(changed_values(placement))),
            *("--options", canonical_json(changed_values(self.options))),
        ]

    # --- specs --------------------------------------------------------------------------------

    @cached_property
    def spec(self) -> dict[str, Any]:
        """What the job is made from, apart from the content of its inputs."""
        settings, files = self.description.settings, self.description.files
        digests = self.jobs.file_digests(files.values())
        code = self.jobs.code(self.program, *selected_code(settings))
        spec: dict[str, Any] = {
            "rule": self.rule,
            "name": self.name,
            "path": self.path,
            "settings": settings,
            "inputs": {
                key: {"rule": job.rule, "name": job.name, "path": job.path}
                for key, job in self.inputs.items()
            },
            "files": {name: digests[path] for name, path in files.items()},
            "code": code.digests,
            "requirements": self.jobs.pins(code.imports),
        }
        if self.row.shows_provenance:
            spec |= {"shows_provenance": True, "names": self.names}
        return spec | self._of_models() if self.row.work else spec

    def _of_models(self) -> dict[str, Any]:
        """Return what else a spec of a job has that runs a model, only where it is set."""
        config = self.jobs.config
        placed = config.recipe(*self.recipe)["placement"].get("environment") or {}
        # A sweep over placements measures each: its trainings share no result.
        _, swept = config.swept.get(Reference(*self.recipe), ("", {}))
        found = {
            "deterministic": config.values["deterministic"],
            # The variables that may change how libraries compute.
            "environment": {
                name: value
                for name, value in placed.items()
                if not name.startswith(NETWORK_VARIABLES)
            },
            "placement": swept.get("placement") if self.row.work == "training" else None,
        }
        return {key: value for key, value in found.items() if value}

    @property
    def names(self) -> dict[str, dict[str, str]]:
        """The paths of the inputs of this job and of all jobs upstream, by the path of each."""
        return {
            job.path: {key: upstream.path for key, upstream in job.inputs.items()}
            for job in with_upstream([self])
        }

    @cached_property
    def spec_file(self) -> Path:
        """Path of the file from which the program reads the spec."""
        return Path("output/specs", self.rule, f"{self.name}-{digest(self.spec)[:16]}.json")

    def write_spec(self) -> None:
        """Write the spec file, unless it exists.

        Jobs compare a spec file with its name; a damaged one is replaced here. Any other stays: the
        limits of a job that has just started allow it to read this very file, and no new one.
        """
        path, text = self.spec_file, json.dumps(self.spec, indent=1, sort_keys=True) + "\n"
        if not path.exists() or path.read_text(errors="replace") != text:
            write_atomically(path, text, durable=False)

    # --- results ------------------------------------------------------------------------------

    @cached_property
    def result(self) -> Stored | None:
        """The up-to-date result, if a store has it."""
        digests = {
            key: input_digest(self.spec, job.result.manifest)
            for key, job in self.inputs.items()
            if job.result is not None
        }
        if len(digests) == len(self.inputs):
            folder = Path(self.rule, store_key(self.spec, digests))
            stored_in = (complete_result(store / folder) for store in self.jobs.config.stores)
            found = next(filter(None, stored_in), None)
            if found is None and self.jobs.will_run:
                for job in self.inputs.values():
                    # A damaged one is made again.
                    if job.result is not None and not is_undamaged(job.result.folder):
                        job.result = None
            return found
        # Inputs that were deleted: a result remains that was made from what they would be.
        results = self.jobs.results_of(self.rule)
        for stored in results.get(digest(without_names(self.spec)), ()) if results else ():
            recorded, lineage = stored.manifest["inputs"], stored.manifest["lineage"]
            if all(
                recorded[key]["digest"] == digests[key]
                if key in digests
                else job.was_made_as_planned(recorded[key]["result"], lineage)
                for key, job in self.inputs.items()
            ):
                return stored
        return None

    @property
    def is_stale(self) -> bool:
        """Whether there is a result, and none that is up to date."""
        return self.existed and self.result is None

    def was_made_as_planned(self, result: str, lineage: Lineage) -> bool:
        """Return whether the job has or would make the content that a lineage has of it.

        result: Its RULE/KEY in the lineage.
        """
        recorded = lineage[result]
        if self.result is not None:
            return content_digest(self.result.manifest) == recorded["content"]
        return recorded["spec"] == digest(without_names(self.spec)) and all(
            job.was_made_as_planned(recorded["inputs"][key], lineage)
            for key, job in self.inputs.items()
        )


class Jobs(dict[JobId, PlannedJob]):
    """The jobs of a config by rule and name. One is added when it is asked for.

    Args:
        config: The checked config.
        root: Folder of scripts/ and of the locked requirements.
        words: The options of Snakemake with which results are rebuilt.

    Attributes:
        rules: The rules by name.
        will_run: Whether jobs will run: the files that they read are compared with manifests.
    """

    def __init__(self, config: Config, root: Path, words: Sequence[str] = ()) -> None:
        self.config, self.words, self.rules, self.will_run = config, words, RULES, False
        self.file_digests = DigestCache(MEMORY / "digests.json").digests
        self.code = cache(Modules(root / "scripts").code)
        self.pins = cache(
            partial(pins_of, lock=root / "requirements.txt", digests=self.file_digests)
        )
        self.results_of = cache(self._find_results_of)

    def __missing__(self, job: JobId) -> PlannedJob:
        self[job] = planned = PlannedJob(self, *job)
        return planned

    def _find_results_of(self, rule: str) -> dict[str, list[Stored]]:
        """Return the complete results of a rule by the digests of their specs."""
        found: dict[str, list[Stored]] = {}
        for store in self.config.stores:
            for stored in filter(None, map(complete_result, stored_folders(store, rule))):
                found.setdefault(digest(stored.manifest["spec"]), []).append(stored)
        return found

    def forget_results(self) -> None:
        """Have the stores read again, after jobs have run."""
        self.will_run = False
        self.results_of.cache_clear()
        for job in self.values():
            vars(job).pop("result", None)


def with_upstream(wanted: Iterable[PlannedJob]) -> list[PlannedJob]:
    """Return jobs and all jobs upstream of them, each after those that it reads."""
    found = set(wanted)
    while upstream := {each for job in found for each in job.inputs.values()} - found:
        found |= upstream
    return sorted(found, key=lambda job: (job.depth, job.path))
