"""Specs of jobs: everything that determines a result.

A spec is canonical JSON: settings, digests of code, pins and external files, and the jobs whose
results are the inputs. The inputs themselves count by their content, which the manifest records
(snakechat.workflow.manifest). Rule files describe their jobs by `Specs.describe`.

Standard library only: the workflow imports this module while it plans.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from snakechat.workflow.code_digests import Code, program_code
from snakechat.workflow.digests import DigestCache, digest, write_atomically
from snakechat.workflow.pins import pins_of

FOLDER = Path("output/specs")
# What planning remembers; it can be deleted at any time. Planning writes nowhere else.
MEMORY = Path(".snakemake/snakechat")


# The rule and the name of a job.
Job = tuple[str, str]


class Rule(NamedTuple):
    """A rule whose jobs have specs.

    The functions get the wildcards of the rule: NAME, or STAGE and NAME.

    Attributes:
        folder: Folder of the results below output/.
        program: Path of the program that the rule runs.
        settings: JSON values that the program reads.
        inputs: Upstream jobs by the keys that the program uses for them.
        files: External files by the names that the spec has for them; of a file that is not local,
            its digest.
        shows_provenance: Whether the program shows what its inputs were made from, so that their
            whole manifests count, and not only their content.
        runs_models: Whether the program runs models by torch.
    """

    folder: str
    program: Path
    settings: Callable[..., dict[str, Any]]
    inputs: Callable[..., dict[str, Job]]
    files: Callable[..., Mapping[str, Path | str]]
    shows_provenance: bool
    runs_models: bool


def _nothing(*_: str) -> dict[str, Any]:
    return {}


def spec_path(rule: str, name: str, spec_digest: str, folder: Path = FOLDER) -> Path:
    """Return the path of a job's spec file."""
    return folder / rule / f"{name}-{spec_digest[:16]}.json"


def write_spec(spec: dict[str, Any], folder: Path = FOLDER) -> str:
    """Write the spec file of a job, unless it exists, and return its path.

    Jobs compare a spec file with its name; a damaged one is replaced here.

    Raises:
        OSError: It cannot be written.
    """
    path = spec_path(spec["rule"], spec["name"], digest(spec), folder)
    text = json.dumps(spec, indent=1, sort_keys=True) + "\n"
    if not path.exists() or path.read_text(errors="replace") != text:
        write_atomically(path, text, durable=False)
    return str(path)


class Specs:
    """The specs of all jobs of a workflow, computed once per invocation of Snakemake.

    Args:
        root: Folder of scripts/ and of the locked requirements.
        code: program_code, or a function that remembers what it reads.
        deterministic: Whether jobs that run models use deterministic kernels. Their specs have it
            only where it is true.
    """

    def __init__(
        self,
        root: Path,
        code: Callable[[Path, tuple[str, ...]], Code] = program_code,
        deterministic: bool = False,
    ) -> None:
        self.root, self.deterministic = root, deterministic
        self.rules: dict[str, Rule] = {}
        self.file_digests = DigestCache(MEMORY / "digests.json")
        # A spec is asked for many times, by jobs downstream and by Snakemake.
        self.spec = cache(self._spec)
        self._code = cache(code)
        self._pins = cache(partial(pins_of, digests=self.file_digests.digests))

    def describe(
        self,
        rule: str,
        folder: str,
        settings: Callable[..., dict[str, Any]],
        inputs: Callable[..., dict[str, Job]] = _nothing,
        files: Callable[..., Mapping[str, Path | str]] = _nothing,
        program: str | None = None,
        shows_provenance: bool = False,
        runs_models: bool = False,
    ) -> None:
        """Describe the jobs of a rule: see Rule.

        Args:
            program: Name of the program in scripts/; by default, the name of the rule.
        """
        path = self.root / f"scripts/{program or rule}.py"
        self.rules[rule] = Rule(
            folder, path, settings, inputs, files, shows_provenance, runs_models
        )

    def result(self, rule: str, name: str) -> str:
        """Return the result folder of a job."""
        return f"output/{self.rules[rule].folder}/{name}"

    def manifest(self, rule: str, name: str) -> str:
        """Return the path of the manifest of a job's result."""
        return f"{self.result(rule, name)}.manifest.json"

    def inputs(self, rule: str, name: str) -> dict[str, Job]:
        """Return the upstream jobs of a job."""
        return self.rules[rule].inputs(*name.split("/"))

    def _spec(self, rule: str, name: str) -> tuple[dict[str, Any], str]:
        """Return the spec of a job and its digest."""
        description, wildcards = self.rules[rule], name.split("/")
        settings = description.settings(*wildcards)
        inputs = {
            key: {
                "rule": upstream,
                "name": upstream_name,
                "path": self.result(upstream, upstream_name),
            }
            for key, (upstream, upstream_name) in self.inputs(rule, name).items()
        }
        files = description.files(*wildcards)
        digests = self.file_digests.digests(
            path for path in files.values() if isinstance(path, Path)
        )
        reward_functions = tuple(settings.get("reward_functions", ()))
        code = self._code(description.program, reward_functions)
        libraries = code.imports
        if settings.get("generation_backend") != "vllm":
            libraries -= {"vllm"}
        spec: dict[str, Any] = {
            "rule": rule,
            "name": name,
            "path": self.result(rule, name),
            "settings": settings,
            "inputs": inputs,
            "files": {
                name: file if isinstance(file, str) else digests[file]
                for name, file in files.items()
            },
            "code": code.digests,
            "requirements": self._pins(libraries, self.root / "requirements.txt"),
        }
        if description.shows_provenance:
            spec["shows_provenance"] = True
        if description.runs_models and self.deterministic:
            spec["deterministic"] = True
        return spec, digest(spec)
