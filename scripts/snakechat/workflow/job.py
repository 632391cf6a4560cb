"""Run a program of the build: read a spec, fill a result folder.

A spec (output/specs/RULE/NAME-DIGEST.json) and the content of the inputs determine a result.

Standard library only: scripts/launch.py imports it.
"""

import argparse
import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from snakechat.workflow import manifest
from snakechat.workflow.errors import InputError, describe_error
from snakechat.workflow.processes import (
    Placement,
    RunOptions,
    barrier,
    rank,
    request_deterministic_kernels,
    world_size,
)
from snakechat.workflow.store import work_path

# The launcher sets it to the key of the job that it has prepared for its processes.
PREPARED = "SNAKECHAT_PREPARED"
# The launcher sets it to the folder of the job's checkpoints, for itself.
STATES = "SNAKECHAT_STATES"
# The file among its checkpoints in which an import notes the source file that it reads.
READING = "reading"
# Seconds that the first process has to report an error before another process reports it.
REPORT_DELAY = 10

S = TypeVar("S")


class Job(Generic[S]):
    """One run of a program.

    Attributes:
        spec: The spec file, parsed.
        settings: The settings of the spec, as an instance of the program's settings class.
        placement, options: Where and how the job runs, and what else it uses.
        inputs: Folders of the results of the upstream jobs in the store, by name.
        key: Digest of everything that determines the content of the result.
        target: Path of the result, a link to `stored`.
        place: Folder in the store that a new result gets.
        stored: Folder of the result: `place`, unless another store has it.
        result, states: Folders that main fills: the result, and checkpoints of an interrupted run.
        log_folder: Folder of the TensorBoard logs.
        facts: What main found out (a commit, rows dropped by reason), for the manifest.
        record: Measurements of this run (throughput, GPU memory), for run.json.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        manifests: Mapping[str, manifest.Manifest],
        placement: Placement,
        options: RunOptions,
        settings_type: Callable[..., S],
    ) -> None:
        self.spec = spec
        self.settings = settings_type(**spec["settings"])
        self.placement, self.options = placement, options
        self.inputs = {name: _input_folder(entry) for name, entry in spec["inputs"].items()}
        self.recorded_inputs = manifest.recorded_inputs(spec, manifests)
        self.recorded_lineage = manifest.merge_lineages(manifests.values())
        result = manifest.result_id({"spec": spec, "inputs": self.recorded_inputs})
        self.target = Path(spec["path"])
        self.place = self.stored = Path(options.stores[0], result)
        self.key = self.place.name
        self.result, self.states = work_path(self.place, "result"), work_path(self.place, "state")
        self.log_folder = Path("output/logs", spec["rule"], spec["name"])
        self.facts: dict[str, Any] = {}
        self.record: dict[str, Any] = {}

    @property
    def lineage(self) -> manifest.Lineage:
        """All upstream jobs, back to the sources, by their paths; of a page, which shows names."""
        results = {
            entry["path"]: self.recorded_inputs[name]["result"]
            for name, entry in self.spec["inputs"].items()
        }
        return manifest.named_lineage(results, self.recorded_lineage, self.spec["names"])


def _input_folder(entry: Mapping[str, str]) -> Path:
    """Return the folder of an input in the store, relative to the working directory if below."""
    path, here = Path(entry["path"]), Path.cwd().resolve()
    folder = Path(os.path.realpath(path / manifest.MANIFEST)).parent if path.is_symlink() else path
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def run(main: Callable[[Job[Any]], None], settings_type: type = SimpleNamespace) -> None:
    """Run main(job), which fills job.result.

    Every process of a job computes; only the first one writes. The launcher, which started them,
    has checked the spec, the code and the inputs, and completes and publishes the result. Exits
    with code 1 and one line on standard error if the input, the code or the spec is wrong.

    settings_type: Class of job.settings, called with the settings of the spec by keyword.
    """
    spec_file, placement, options, unknown = parse_words(sys.argv[1:])
    if unknown or not spec_file:
        # It was started with flags of DeepSpeed-Chat.
        sys.exit(
            f"error: Snakemake starts {Path(sys.argv[0]).name}: snakemake --cores 1 TARGET"
            " (docs/en/migration.md has DeepSpeed-Chat's programs as targets, and their flags as"
            " keys of a recipe)"
        )

    def work(spec: dict[str, Any]) -> None:
        if spec.get("deterministic"):
            request_deterministic_kernels()
        job = Job(spec, read_manifests(spec), placement, options, settings_type)
        if os.environ.get(PREPARED) != job.key:
            raise InputError(f"scripts/launch.py starts this program: run snakemake {job.target}")
        main(job)
        # Slower processes may still read or write in the folder that the first one completes.
        barrier()
        if rank() == 0:
            write_outcome(job)

    report_errors(work, spec_file)
    if world_size() > 1:
        # DeepSpeed keeps references to process groups. Their threads outlive the groups and now and
        # then abort the interpreter while it shuts down.
        sys.stdout.flush()
        os._exit(0)


def parse_words(words: Sequence[str]) -> tuple[str, Placement, RunOptions, list[str]]:
    """Return the spec file, placement and options of a job's program, and its other arguments."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--spec", default="")
    parser.add_argument("--placement", default="{}", type=json.loads)
    parser.add_argument("--options", default="{}", type=json.loads)
    found, others = parser.parse_known_args(words)
    return found.spec, Placement(**found.placement), RunOptions(**found.options), others


def report_errors(work: Callable[[dict[str, Any]], Any], spec_file: str) -> Any:
    """Return work(spec); exit with code 1 and one line at an error that the user can act on.

    spec_file: "" for a program that makes no result.
    """
    spec: dict[str, Any] = {"path": spec_file, "rule": "", "settings": {}}
    try:
        spec = read_spec(spec_file) if spec_file else spec
        return work(spec)
    except KeyboardInterrupt:
        sys.exit("stopped by SIGINT" if rank() == 0 else 1)
    except Exception as error:
        line = describe_error(error, spec["path"])
        if line is None:
            raise
        if rank() > 0:
            # One process prints the line for all. The launcher ends this one as soon as rank 0 ends
            # with the same error.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(REPORT_DELAY)
        # In a log, what was printed before stands before the error.
        with suppress(OSError):
            sys.stdout.flush()
        sys.exit(f"error: {line}")


# --- inputs -----------------------------------------------------------------------------------


def read_spec(path: str | Path) -> dict[str, Any]:
    """Return the spec in a file; raise InputError if it is not the one that it is named after."""
    planned = re.search("-([0-9a-f]{16})$", Path(path).stem)
    with suppress(ValueError, RecursionError):
        spec: dict[str, Any] = json.loads(Path(path).read_text(errors="replace"))
        if not planned or manifest.digest(spec).startswith(planned[1]):
            return spec
    raise InputError(f"{path} was edited or damaged: start the build again")


def read_manifests(spec: Mapping[str, Any]) -> dict[str, manifest.Manifest]:
    """Return the manifests of the inputs of a job."""
    return {
        name: manifest.require_manifest(manifest.manifest_path(entry["path"]))
        for name, entry in spec["inputs"].items()
    }


# --- results ----------------------------------------------------------------------------------


def write_json(path: Path, value: object) -> None:
    """Write metrics or statistics of a result as JSON with sorted keys."""
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def write_json_lines(path: Path, lines: Iterable[Mapping[str, Any]], mode: str = "w") -> None:
    """Write a result of one JSON object on each line."""
    with path.open(mode) as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def write_outcome(job: Job[Any]) -> None:
    """Write what the launcher completes a result with: facts, and measurements of this run."""
    measured = {
        **job.record,
        "peak_memory_mb": peak_memory_mb(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        # A training has replaced `auto`.
        "placement": {name: each for name, each in vars(job.placement).items() if each is not None},
    }
    outcome = manifest.canonical_json({"facts": job.facts, "measured": measured})
    (job.result / manifest.RUN_RECORD).write_text(outcome)


def peak_memory_mb() -> int:
    """Return the peak resident memory of this process, or of the largest one that it ran, in MB."""
    # ru_maxrss is in kB.
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return round(max(resource.getrusage(kind).ru_maxrss for kind in kinds) / (1 << 10))
