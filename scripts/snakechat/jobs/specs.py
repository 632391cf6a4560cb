"""Specs of jobs: everything that determines a result.

A spec is canonical JSON: settings, digests of code, pins and external files, and the jobs whose
results are the inputs. The inputs themselves count by their content, which the manifest records
(snakechat.workflow.manifest).
"""

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from snakechat.config.recipes import Config
from snakechat.jobs.descriptions import Description
from snakechat.jobs.rules import RULES, Rule, recipe_of
from snakechat.workflow.code_digests import Modules, uses_vllm
from snakechat.workflow.digests import DigestCache, digest
from snakechat.workflow.pins import pins_of
from snakechat.workflow.placement import computing_variables
from snakechat.workflow.snapshot import MEMORY


class Specs:
    """The specs of all jobs of a config, each computed once.

    Args:
        config: The checked config.
        root: Folder of scripts/ and of the locked requirements.
        rules: The rules by name.
    """

    def __init__(self, config: Config, root: Path, rules: Mapping[str, Rule] = RULES) -> None:
        self.config, self.root, self.rules = config, root, rules
        self.file_digests = DigestCache(MEMORY / "digests.json")
        # A spec is asked for many times, by jobs downstream and by Snakemake.
        self.spec = cache(self._spec)
        self.describe = cache(self._describe)
        self._code = cache(Modules(root / "scripts").code)
        self._pins = cache(partial(pins_of, digests=self.file_digests.digests))

    def result(self, rule: str, name: str) -> str:
        """Return the result folder of a job."""
        return f"output/{self.rules[rule].folder}/{name}"

    def manifest(self, rule: str, name: str) -> str:
        """Return the path of the manifest of a job's result."""
        return f"{self.result(rule, name)}.manifest.json"

    def program(self, rule: str, name: str) -> str:
        """Return the name of the program of a job in scripts/."""
        is_command = rule.startswith("train_") and "command" in self.describe(rule, name).settings
        return "run_command" if is_command else self.rules[rule].program or rule

    def _describe(self, rule: str, name: str) -> Description:
        """Return the description of a job."""
        return self.rules[rule].describe(self.config, *name.split("/"))

    def _spec(self, rule: str, name: str) -> tuple[dict[str, Any], str]:
        """Return the spec of a job and its digest."""
        description = self.describe(rule, name)
        settings = description.settings
        inputs = {
            key: {"rule": upstream, "name": upstream_name, "path": self.result(*job)}
            for key, job in description.inputs.items()
            for upstream, upstream_name in [job]
        }
        files = description.files
        digests = self.file_digests.digests(files.values())
        functions = tuple(settings.get("reward_functions", ()))
        code = self._code(self.program(rule, name), functions, uses_vllm(settings))
        spec: dict[str, Any] = {
            "rule": rule,
            "name": name,
            "path": self.result(rule, name),
            "settings": settings,
            "inputs": inputs,
            "files": {name: digests[path] for name, path in files.items()},
            "code": code.digests,
            "requirements": self._pins(code.imports, self.root / "requirements.txt"),
        }
        if self.rules[rule].shows_provenance:
            spec["shows_provenance"] = True
            spec["names"] = self.names(rule, name)
        # Only where it is true, and only of jobs whose kernels it changes.
        if self.rules[rule].work and self.config.values["deterministic"]:
            spec["deterministic"] = True
        if self.rules[rule].work:
            placed = self.config.recipe(*recipe_of(rule, name))["placement"].get("environment")
            # The variables that may change how libraries compute.
            if variables := computing_variables(placed or {}):
                spec["environment"] = variables
        # A sweep over placements measures each: its trainings share no result.
        if self.rules[rule].work == "training" and (
            placement := self.config.swept_recipes.get(recipe_of(rule, name), {}).get("placement")
        ):
            spec["placement"] = placement
        return spec, digest(spec)

    def names(self, rule: str, name: str) -> dict[str, dict[str, str]]:
        """Return the paths of the inputs of a job and of all jobs upstream, by the path of each."""
        names: dict[str, dict[str, str]] = {}
        pending = [(rule, name)]
        for job in pending:
            if self.result(*job) not in names:
                inputs = self.describe(*job).inputs
                names[self.result(*job)] = {key: self.result(*up) for key, up in inputs.items()}
                pending += inputs.values()
        return names
