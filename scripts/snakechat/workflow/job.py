"""Run a program of the build: read a spec, fill a result folder, publish it with its manifest.

A spec (output/specs/RULE/NAME-DIGEST.json) contains everything that determines a result. The result
appears by one rename, with NAME.manifest.json and NAME.run.json next to it.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, NoReturn, TypeVar, overload

from snakechat.workflow.code_digests import code_digests
from snakechat.workflow.digests import digest, file_digest, write_atomically
from snakechat.workflow.distributed import barrier, rank, world_size
from snakechat.workflow.errors import InputError, describe_environment_error
from snakechat.workflow.lineage import merge_lineages
from snakechat.workflow.locks import AlreadyLocked, acquire_lock
from snakechat.workflow.manifest import check_input, is_complete, read_manifest, result_files
from snakechat.workflow.run_record import run_record

# Seconds that the first process has to report an error before another process reports it.
REPORT_DELAY = 10

S = TypeVar("S")


class Job(Generic[S]):
    """One run of a program.

    Attributes:
        spec: The spec file, parsed.
        settings: The settings of the spec, as an instance of the program's settings class.
        placement: Where and how the job runs (processes, memory settings), from the command line.
        inputs: Result folders of the upstream jobs, by name.
        target: Path of the published result.
        result: Folder that main fills.
        facts: What the job found out (a commit, rows dropped by reason); main fills it, and it
            becomes part of the manifest.
        record: Measurements of this run (throughput, GPU memory) for NAME.run.json.
        lineage: All upstream jobs, back to the sources.
        states: Folder where an interrupted run keeps its checkpoints.
        log_folder: Folder of the TensorBoard logs.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        manifests: Mapping[str, Path],
        placement: dict[str, Any],
        settings_type: Callable[..., S],
    ) -> None:
        self.spec = spec
        self.settings = settings_type(**spec["settings"])
        self.placement = placement
        self.inputs = {name: Path(entry["path"]) for name, entry in spec["inputs"].items()}
        self.input_digests = {name: file_digest(path) for name, path in manifests.items()}
        self.lineage = merge_lineages(filter(None, map(read_manifest, manifests.values())))
        self.target = Path(spec["path"])
        self.result = self.target.with_name(f".{self.target.name}.tmp")
        self.old = self.target.with_name(f".{self.target.name}.old")
        made_from = digest([spec, self.input_digests])[:16]
        self.states = Path("output/state", spec["rule"], spec["name"], made_from)
        self.log_folder = Path("output/logs", spec["rule"], spec["name"])
        self.facts: dict[str, Any] = {}
        self.record: dict[str, Any] = {}


@overload
def run(main: Callable[[Job[SimpleNamespace]], None]) -> None: ...
@overload
def run(main: Callable[[Job[S]], None], settings_type: type[S]) -> None: ...
def run(main: Callable[[Job[Any]], None], settings_type: type = SimpleNamespace) -> None:
    """Run main(job) and publish job.result. The old result stays until the new one is complete.

    Every process of a job checks the inputs and computes; only the first one takes the lock and
    writes. No process changes a file before all of them have decided by it, in main.

    Args:
        main: Fills job.result.
        settings_type: Class of job.settings, called with the settings of the spec by keyword.

    Exits with code 1 and one line on standard error if the input, the code or the spec is wrong.
    """
    parser = argparse.ArgumentParser(description=sys.modules[main.__module__].__doc__)
    parser.add_argument("--spec", required=True, help="spec file of the job")
    parser.add_argument(
        "--placement", default="{}", type=json.loads, help="JSON: where and how the job runs"
    )
    arguments = parser.parse_args()
    started = time.time()
    target = arguments.spec
    try:
        spec = json.loads(Path(arguments.spec).read_text())
        target = spec["path"]
        check_code(spec)
        if rank() == 0:
            acquire_lock(Path(target).with_name(f".{Path(target).name}.lock"))
        manifests = {name: check_input(entry) for name, entry in spec["inputs"].items()}
        job = Job(spec, manifests, arguments.placement, settings_type)
        complete = is_complete(job.target, spec, job.input_digests)
        if not complete:
            if rank() == 0:
                shutil.rmtree(job.result, ignore_errors=True)
                job.result.mkdir(parents=True)
            main(job)
            # Slower processes may still read or write in the folder that rank 0 moves next.
            barrier()
        if rank() == 0:
            finish(job, started, complete)
    except InputError as error:
        exit_with_line(f"error: {error}")
    except AlreadyLocked as holder:
        sys.exit(f"error: {target} is being made by {holder}: wait for it, or stop it")
    except KeyboardInterrupt:
        sys.exit("stopped by SIGINT" if rank() == 0 else 1)
    except Exception as error:
        line = describe_environment_error(error, target, arguments.placement)
        if line is None:
            raise
        exit_with_line(f"error: {line}")
    if world_size() > 1:
        # DeepSpeed keeps references to process groups. Their threads outlive the groups and now and
        # then abort the interpreter while it shuts down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def check_code(spec: Mapping[str, Any]) -> None:
    """Raise InputError unless the code that runs is the code that was planned."""
    rewards = spec["settings"].get("reward_functions", ())
    planned, current = spec["code"], code_digests(sys.argv[0], rewards)
    names = planned.keys() | current.keys()
    changed = sorted(name for name in names if planned.get(name) != current.get(name))
    if changed:
        raise InputError(
            f"{', '.join(changed)} changed since this build was planned: start it again"
        )


def exit_with_line(line: str) -> NoReturn:
    """Exit with code 1 and a line on standard error, which one process prints for all."""
    if rank() > 0:
        # The launcher ends this process as soon as rank 0 ends with the same error.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(REPORT_DELAY)
        # The cursor may stand behind the progress bar of rank 0.
        line = f"\n{line}"
    sys.exit(line)


def finish(job: Job[Any], started: float, complete: bool) -> None:
    """Publish the result if it is new, write its manifest and delete temporary files."""
    if not complete:
        publish(job, started)
    # A failed or interrupted rerun may have removed the manifest next to a complete result: the
    # copy in the folder restores it, without computing anything.
    write_next_to(job, "manifest", (job.target / "manifest.json").read_text())
    # The states of other specs are superseded too.
    for leftover in (job.result, job.old, job.states.parent):
        shutil.rmtree(leftover, ignore_errors=True)


def publish(job: Job[Any], started: float) -> None:
    """Replace the old result by the new folder, with its manifest inside."""
    manifest = {
        "spec": job.spec,
        "inputs": job.input_digests,
        "lineage": job.lineage,
        "facts": job.facts,
        "files": result_files(job.result),
    }
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    write_atomically(job.result / "manifest.json", text)
    # Before the rename: after it, a job that is started again is complete and writes no record.
    write_next_to(job, "run", run_record(job.spec, job.placement, job.record, started))
    shutil.rmtree(job.old, ignore_errors=True)
    if job.target.exists():
        os.replace(job.target, job.old)
    os.replace(job.result, job.target)


def write_next_to(job: Job[Any], kind: str, text: str) -> None:
    """Write NAME.KIND.json next to the result.

    The lock makes this job the only writer, so that the temporary file needs no process id and the
    file of a killed run is overwritten.
    """
    write_atomically(f"{job.target}.{kind}.json", text, writer="tmp")
