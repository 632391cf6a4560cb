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
from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from snakechat.config.recipes import Config, JobId
from snakechat.config.references import Reference
from snakechat.jobs.data_jobs import Description
from snakechat.jobs.rules import RULES, Rule, recipe_of
from snakechat.workflow.code_digests import Modules, selected_code
from snakechat.workflow.errors import InputError
from snakechat.workflow.links import is_linked, link_result
from snakechat.workflow.manifest import (
    MEMORY,
    DigestCache,
    Lineage,
    content_digest,
    digest,
    input_digest,
    manifest_path,
    store_key,
    without_names,
    write_atomically,
)
from snakechat.workflow.pins import pins_of
from snakechat.workflow.processes import computing_variables
from snakechat.workflow.store import Stored, complete_result, is_undamaged, stored_folders


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
            key: {"rule": job[0], "name": job[1], "path": self.result(*job)}
            for key, job in description.inputs.items()
        }
        files = description.files
        digests = self.file_digests.digests(files.values())
        code = self._code(self.program(rule, name), *selected_code(settings))
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
        if self.rules[rule].work:
            spec |= self._of_models(rule, name)
        return spec, digest(spec)

    def _of_models(self, rule: str, name: str) -> dict[str, Any]:
        """Return what else a spec of a job has that runs a model, only where it is set."""
        stage, recipe = recipe_of(rule, name)
        found: dict[str, Any] = {}
        if self.config.values["deterministic"]:
            found["deterministic"] = True
        placed = self.config.recipe(stage, recipe)["placement"].get("environment")
        # The variables that may change how libraries compute.
        if variables := computing_variables(placed or {}):
            found["environment"] = variables
        # A sweep over placements measures each: its trainings share no result.
        _, swept = self.config.swept.get(Reference(stage, recipe), ("", {}))
        if self.rules[rule].work == "training" and "placement" in swept:
            found["placement"] = swept["placement"]
        return found

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


# The specs of jobs, which their programs read.
SPECS = Path("output/specs")


def spec_path(rule: str, name: str, spec_digest: str) -> Path:
    """Return the path of a job's spec file."""
    return SPECS / rule / f"{name}-{spec_digest[:16]}.json"


def write_spec(spec: Mapping[str, Any]) -> str:
    """Write the spec file of a job, unless it exists, and return its path.

    Jobs compare a spec file with its name; a damaged one is replaced here.

    Raises:
        OSError: It cannot be written.
    """
    path = spec_path(spec["rule"], spec["name"], digest(spec))
    text = json.dumps(spec, indent=1, sort_keys=True) + "\n"
    if not path.exists() or path.read_text(errors="replace") != text:
        write_atomically(path, text, durable=False)
    return str(path)


class Staleness:
    """The results that the store has of the jobs of today.

    Args:
        specs: The specs of all jobs.

    Attributes:
        reporting: Whether Snakemake writes a report, which shows results as they are on disk.
        checks_files: Whether jobs will run: the files that they read are compared with manifests,
            and a damaged result is made again.
        stale: The specs of the results that exist and are stale, by the path of the result. One is
            also stale if an input is.
        incomplete: The missing manifests of the folders that exist without them, by folder.
        links: The results that are up to date and that their paths do not lead to, by path.
    """

    def __init__(self, specs: Specs) -> None:
        self.specs, self.reporting, self.checks_files = specs, False, False
        self.stores = specs.config.stores
        self.stale: dict[str, dict[str, Any]] = {}
        self.incomplete: dict[str, list[str]] = {}
        self.links: dict[str, Path] = {}
        self.decide = cache(self._decide)
        self._results: dict[JobId, Stored | None] = {}
        self._results_of = cache(self._find_results_of)

    def _decide(self, rule: str, name: str) -> None:
        """Decide whether the result of a job is stale.

        Raises:
            InputError: It is, and Snakemake writes a report.
        """
        spec, _ = self.specs.spec(rule, name)
        path, stored = spec["path"], self.result(rule, name)
        exists = manifest_path(path).exists()
        if stored is None and exists:
            self.stale[path] = spec
        elif stored is not None and not is_linked(path, stored.folder):
            self.links[path] = stored.folder
        if exists and (path in self.stale or path in self.links):
            self._require_report_input(path, "stale")

    def link(self) -> list[str]:
        """Have the paths of results lead to the versions that are up to date; return the paths.

        Raises:
            InputError: A path has something else than a link.
        """
        linked, self.links = self.links, {}
        for path, folder in linked.items():
            link_result(path, folder)
        return list(linked)

    def decide_folder(self, folder: str, manifests: Iterable[str]) -> None:
        """Decide whether a folder that users ask for lacks manifests.

        Raises:
            InputError: It does, and Snakemake writes a report.
        """
        missing = [path for path in manifests if not Path(path).exists()]
        if missing:
            self._require_report_input(folder, "incomplete")
            if Path(folder).exists():
                self.incomplete[folder] = missing

    def result(self, rule: str, name: str) -> Stored | None:
        """Return the up-to-date result of a job, if a store has it."""
        if (rule, name) not in self._results:
            self._results[rule, name] = self._result(rule, name)
        return self._results[rule, name]

    def _result(self, rule: str, name: str) -> Stored | None:
        spec, _ = self.specs.spec(rule, name)
        upstream, found = self.specs.describe(rule, name).inputs, None
        digests = {
            key: input_digest(spec, stored.manifest)
            for key, job in upstream.items()
            if (stored := self.result(*job)) is not None
        }
        if len(digests) == len(upstream):
            key = store_key(spec, digests)
            stored_in = (complete_result(store / rule / key) for store in self.stores)
            found = next(filter(None, stored_in), None)
            if found is None and self.checks_files:
                for job in upstream.values():
                    self._check(job)
            return found
        # Inputs that were deleted: a result remains that was made from what they would be.
        results = self._results_of(rule)
        for stored in results.get(digest(without_names(spec)), ()) if results else ():
            recorded, lineage = stored.manifest["inputs"], stored.manifest["lineage"]
            if all(
                recorded[key]["digest"] == digests[key]
                if key in digests
                else self._was_made_as_planned(job, recorded[key]["result"], lineage)
                for key, job in upstream.items()
            ):
                found = stored
        return found

    def _check(self, job: JobId) -> None:
        """Compare the files of an input of a job that will run with its manifest.

        A damaged result is made again.
        """
        stored = self._results[job]
        assert stored is not None
        if not is_undamaged(stored.folder):
            self._results[job] = None
            spec, _ = self.specs.spec(*job)
            self.stale[spec["path"]] = spec

    def _find_results_of(self, rule: str) -> dict[str, list[Stored]]:
        """Return the complete results of a rule by the digests of their specs."""
        found: dict[str, list[Stored]] = {}
        for store in self.stores:
            for stored in filter(None, map(complete_result, stored_folders(store, rule))):
                found.setdefault(digest(stored.manifest["spec"]), []).append(stored)
        return found

    def _was_made_as_planned(self, job: JobId, result: str, lineage: Lineage) -> bool:
        """Return whether a job has or would make the content that a lineage has of it.

        result: Its RULE/KEY in the lineage.
        """
        recorded, stored = lineage.get(result), self.result(*job)
        if recorded is None:
            return False
        if stored is not None:
            return content_digest(stored.manifest) == recorded["content"]
        spec, _ = self.specs.spec(*job)
        return recorded["spec"] == digest(without_names(spec)) and all(
            self._was_made_as_planned(up, recorded["inputs"][key], lineage)
            for key, up in self.specs.describe(*job).inputs.items()
        )

    def _require_report_input(self, path: str, state: str) -> None:
        """Raise InputError if Snakemake writes a report and a result is not up to date."""
        if self.reporting:
            raise InputError(
                f"{path} is {state}, and a report shows results that are up to date: first run the"
                " same command with --cores 1 instead of --report (python scripts/explain.py prints"
                " what changed)"
            )
