"""Run a program of the build: read a spec, fill a result folder, publish it with its manifest.

A spec (output/specs/RULE/NAME-DIGEST.json) and the content of the inputs determine a result. It
appears in the store by one rename, and its path becomes a link to it (snakechat.workflow.store). If
the store has it already and the build does not force it, `reuse_result` makes the link without
running the program. Of several jobs with one key, one makes the result and the others wait.

Standard library only: scripts/launch.py calls `reuse_result` before the program imports torch.
"""

import argparse
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, NoReturn, TypeVar, overload

from snakechat.workflow.code_digests import code_digests, uses_vllm
from snakechat.workflow.deterministic import request_deterministic_kernels
from snakechat.workflow.digests import DigestCache, digest, fsync, write_atomically
from snakechat.workflow.distributed import barrier, rank, world_size
from snakechat.workflow.errors import InputError, describe_environment_error, warn
from snakechat.workflow.links import link_result, linked_folder, root_links
from snakechat.workflow.locks import AlreadyLocked, acquire_lock, make_folders, wait_for_lock
from snakechat.workflow.manifest import (
    MANIFEST,
    RUN_RECORD,
    Lineage,
    Manifest,
    merge_lineages,
    named_lineage,
    read_input,
    read_manifest,
    recorded_inputs,
    result_files,
    store_key,
    without_names,
)
from snakechat.workflow.pins import check_installed
from snakechat.workflow.placement import (
    DEFAULTS,
    SERIAL,
    Placement,
    RunOptions,
    parse_options,
    parse_placement,
    placement_values,
)
from snakechat.workflow.run_record import run_record
from snakechat.workflow.snapshot import CHECKED_DIGESTS, read_build
from snakechat.workflow.store import (
    Damaged,
    check_files,
    check_result,
    complete_result,
    delete_lock,
    delete_work,
    is_complete,
    lock_path,
    publish,
    set_aside,
    state_folder,
    unfinished_folder,
)

# The launcher sets it to the key of a job whose inputs it has checked, for the job's processes.
CHECKED = "SNAKECHAT_CHECKED"
# The launcher sets it to the key of a job that it has locked until the program ends.
LOCKED = "SNAKECHAT_LOCKED"
# The launcher sets it to the folder of the job's checkpoints, for itself.
STATES = "SNAKECHAT_STATES"
# Seconds that the first process has to report an error before another process reports it.
REPORT_DELAY = 10

S = TypeVar("S")


class Job(Generic[S]):
    """One run of a program.

    Attributes:
        spec: The spec file, parsed.
        settings: The settings of the spec, as an instance of the program's settings class.
        placement: Where and how the job runs (processes, memory settings), from the command line.
        options: What else the run uses that its result does not depend on, from the command line.
        inputs: Folders of the results of the upstream jobs in the store, by name.
        target: Path of the result, a link to `stored`.
        place: Folder in the store that a new result gets.
        stored: Folder of the result: `place`, unless another store has it.
        result: Folder that main fills.
        facts: What the job found out (a commit, rows dropped by reason); main fills it, and it
            becomes part of the manifest.
        record: Measurements of this run (throughput, GPU memory) for run.json.
        key: Digest of everything that determines the content of the result.
        states: Folder where an interrupted run keeps its checkpoints.
        log_folder: Folder of the TensorBoard logs.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        manifests: Mapping[str, Manifest],
        placement: Placement,
        options: RunOptions,
        settings_type: Callable[..., S],
    ) -> None:
        self.spec = spec
        self.settings = settings_type(**spec["settings"])
        self.placement, self.options = placement, options
        self.inputs = {name: _input_folder(entry) for name, entry in spec["inputs"].items()}
        self.recorded_inputs = recorded_inputs(spec, manifests)
        self.recorded_lineage = merge_lineages(manifests.values())
        digests = {name: entry["digest"] for name, entry in self.recorded_inputs.items()}
        self.key = store_key(spec, digests)
        self.target = Path(spec["path"])
        self.place = self.stored = Path(options.stores[0], spec["rule"], self.key)
        self.result, self.states = unfinished_folder(self.place), state_folder(self.place)
        self.log_folder = Path("output/logs", spec["rule"], spec["name"])
        self.facts: dict[str, Any] = {}
        self.record: dict[str, Any] = {}

    @property
    def lineage(self) -> Lineage:
        """All upstream jobs, back to the sources, by their paths; of a page, which shows names."""
        results = {
            entry["path"]: self.recorded_inputs[name]["result"]
            for name, entry in self.spec["inputs"].items()
        }
        return named_lineage(results, self.recorded_lineage, self.spec["names"])


def _input_folder(entry: Mapping[str, str]) -> Path:
    """Return the folder of an input in the store, relative to the working directory if below."""
    path = Path(entry["path"])
    folder = linked_folder(path)
    if folder is None:
        return path
    here = Path.cwd().resolve()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


@overload
def run(main: Callable[[Job[SimpleNamespace]], None]) -> None: ...
@overload
def run(main: Callable[[Job[S]], None], settings_type: type[S]) -> None: ...
def run(main: Callable[[Job[Any]], None], settings_type: type = SimpleNamespace) -> None:
    """Run main(job) and publish job.result. Earlier results stay.

    Every process of a job computes; only the first one takes the lock and writes. The launcher has
    checked the inputs, and that there is no result yet; without it, every process does.

    Args:
        main: Fills job.result.
        settings_type: Class of job.settings, called with the settings of the spec by keyword.

    Exits with code 1 and one line on standard error if the input, the code or the spec is wrong.
    """
    parser = ProgramParser(description="Started by Snakemake: snakemake TARGET")
    parser.add_argument("--spec", required=True, help="spec file of the job")
    parser.add_argument(
        "--placement", default=SERIAL, type=parse_placement, help="JSON: hardware and its use"
    )
    parser.add_argument(
        "--options", default=DEFAULTS, type=parse_options, help="JSON: paths and limits"
    )
    arguments = parser.parse_args()
    started = time.time()

    def work() -> None:
        spec = read_spec(arguments.spec)
        check_code(spec, sys.argv[0])
        check_installed(spec["requirements"])
        if spec.get("deterministic"):
            request_deterministic_kernels()
        manifests = read_manifests(spec)
        job = Job(spec, manifests, arguments.placement, arguments.options, settings_type)
        if rank() == 0:
            lock(job)
        exists = False
        if os.environ.get(CHECKED) != job.key:
            if world_size() == 1:
                recover(job)
            check_inputs(job.inputs, manifests)
            exists = result_exists(job)
        if not exists:
            if rank() == 0:
                shutil.rmtree(job.result, ignore_errors=True)
                make_folders(job.result)
            main(job)
            # Slower processes may still read or write in the folder that rank 0 moves next.
            barrier()
            if rank() == 0:
                write_manifest(job, started)
                if replaces_stored(job):
                    publish(job.place)
        if rank() == 0:
            finish(job)

    report_errors(work, arguments.spec, arguments.placement)
    if world_size() > 1:
        # DeepSpeed keeps references to process groups. Their threads outlive the groups and now and
        # then abort the interpreter while it shuts down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class ProgramParser(argparse.ArgumentParser):
    """The parser of programs that Snakemake starts."""

    def error(self, message: str) -> NoReturn:
        """Exit with the command that starts the program, for other flags than those of a job."""
        program = Path(sys.argv[0]).stem
        targets = {"prompt_eval": "prompt_eval/STAGE/RECIPE.html"}
        targets["rw_eval"] = "rw_eval/reward/RECIPE.html"
        targets |= {
            f"train_{stage}": f"{stage}/RECIPE" for stage in ("sft", "reward", "dpo", "rlhf")
        }
        target = f"output/{targets[program]}" if program in targets else "TARGET"
        sys.exit(
            f"error: Snakemake starts {program}.py: snakemake --cores 1 {target}"
            " (docs/en/migration.md has DeepSpeed-Chat's flags as keys of a recipe):"
            f" {message}"
        )


def reuse_result(
    spec_file: str, options: RunOptions, log: str | None = None, node: int | None = None
) -> bool:
    """Link the result of a job without running its program, if it exists already.

    It exists if its inputs were rebuilt and came out the same, if the job was killed between the
    end of its program and the end of publishing, or if another job makes the same one at the same
    time. If it does not, the inputs are checked, for all processes that this one starts.

    Args:
        spec_file: Path of the spec.
        options: The options of the run.
        log: Path of the log of the job. It is emptied unless the store has the result, as it
            belongs to another one.
        node: Number of this node, if several ones decide separately, and have to decide the same:
            then the result exists only if the store has it.

    Returns:
        Whether the result is linked. If not, the program has to run, as for forced results, and
        this process holds the lock of the job, also after os.exec.

    Exits with code 1 and one line on standard error if the inputs or the spec are wrong.
    """
    published = False

    def work() -> None:
        nonlocal published
        spec = read_spec(spec_file)
        manifests = read_manifests(spec)
        job = Job(spec, manifests, SERIAL, options, SimpleNamespace)
        os.environ[STATES] = str(job.states)
        if os.environ.get(CHECKED) == job.key:
            # A node of a Slurm job, whose first process has decided.
            return
        if node is None:
            os.set_inheritable(wait_for_lock(lock_path(job.place)), True)
            os.environ[LOCKED] = job.key
            recover(job)
        published = result_exists(job)
        if published and not node:
            if node is None:
                print(f"{job.target} is kept: it was made from the same spec and inputs")
            finish(job)
        if not published:
            if log:
                # Before anything is printed that belongs to the new result. The rule creates the
                # log at the same time.
                with suppress(FileNotFoundError):
                    os.truncate(log, 0)
            check_inputs(job.inputs, manifests)
            os.environ[CHECKED] = job.key

    report_errors(work, spec_file)
    return published


def report_errors(work: Callable[[], None], spec_file: str, placement: Placement = SERIAL) -> None:
    """Call a function; exit with code 1 and one line at an error that the user can act on."""
    try:
        work()
    except InputError as error:
        exit_with_line(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped by SIGINT" if rank() == 0 else 1)
    except Exception as error:
        try:
            target = read_spec(spec_file)["path"]
        except (InputError, OSError):
            target = spec_file
        line = describe_environment_error(error, target, placement_values(placement))
        if line is None:
            raise
        exit_with_line(f"error: {line}")


def exit_with_line(line: str) -> NoReturn:
    """Exit with code 1 and a line on standard error, which one process prints for all."""
    if rank() > 0:
        # The launcher ends this process as soon as rank 0 ends with the same error.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(REPORT_DELAY)
    # In a log, what was printed before stands before the error.
    with suppress(OSError):
        sys.stdout.flush()
    sys.exit(line)


# --- inputs -----------------------------------------------------------------------------------


def read_spec(path: str | Path) -> dict[str, Any]:
    """Return the spec in a file.

    Raises:
        InputError: The file is not the spec that it is named after.
    """
    text = Path(path).read_text(errors="replace")
    planned = re.search("-([0-9a-f]{16})$", Path(path).stem)
    try:
        spec = json.loads(text)
        is_spec = not planned or digest(spec).startswith(planned[1])
    except (ValueError, RecursionError):
        is_spec = False
    if not is_spec:
        raise InputError(f"{path} was edited or damaged: start the build again")
    return spec


def is_forced(spec: Mapping[str, Any]) -> bool:
    """Return whether the build computes a result although it exists (snakemake --force)."""
    build = os.environ.get("SNAKECHAT_BUILD")
    return bool(build and spec["path"] in read_build(build).forced)


def result_exists(job: Job[Any]) -> bool:
    """Return whether a store has the result of a job, and the build does not force it.

    Of several stores, `job.stored` becomes the folder that has it. A damaged result is named.
    """
    if is_forced(job.spec):
        return False
    for store in job.options.stores:
        folder = Path(store, job.spec["rule"], job.key)
        if folder.is_dir():
            try:
                check_result(folder, digests=DigestCache(CHECKED_DIGESTS).digests)
            except (Damaged, OSError) as problem:
                warn(f"{folder} is damaged and is made again: {problem}")
            else:
                job.stored = folder
                return True
    return False


def lock(job: Job[Any]) -> None:
    """Make this process the only one that makes the result of a job, after any other that does."""
    path = lock_path(job.place)
    if os.environ.get(LOCKED) != job.key:
        wait_for_lock(path)
        return
    # The launcher, which started this process, holds the lock, unless a step of a cluster does not
    # inherit it.
    with suppress(AlreadyLocked):
        acquire_lock(path)


def read_manifests(spec: Mapping[str, Any]) -> dict[str, Manifest]:
    """Return the manifests of the inputs of a job."""
    return {name: read_input(entry) for name, entry in spec["inputs"].items()}


def check_inputs(folders: Mapping[str, Path], manifests: Mapping[str, Manifest]) -> None:
    """Check the files of the inputs of a job.

    The jobs of a build read the same models and tokens again and again. A file of which the size,
    the times and the inode are those of an earlier check is not read again; `scripts/verify.py`
    reads every file.

    Args:
        folders: Result folders by the names of the inputs.
        manifests: Their manifests by the same names.

    Raises:
        InputError: A file is not the one in the manifest.
    """
    cache = DigestCache(CHECKED_DIGESTS)
    for name, manifest in manifests.items():
        folder = folders[name]
        try:
            check_files(folder, manifest, cache.digests)
        except Damaged as damage:
            with suppress(OSError):
                set_aside(folder)
            raise InputError(
                f"{folder}: {damage}: start the build again, which makes it again"
            ) from None


def check_code(spec: Mapping[str, Any], program: str) -> None:
    """Raise InputError unless the code that runs is the code that was planned."""
    rewards = spec["settings"].get("reward_functions", ())
    planned = spec["code"]
    current = code_digests(program, rewards, uses_vllm(spec["settings"]))
    names = planned.keys() | current.keys()
    changed = sorted(name for name in names if planned.get(name) != current.get(name))
    if changed:
        raise InputError(
            f"{', '.join(changed)} changed since this build was planned: start it again"
        )


# --- publishing -------------------------------------------------------------------------------

# A job may be killed between any two of these steps. Its next run continues from what is there:
# 1. The record of the run and then the manifest are written into the new folder, which is complete
#    from now on.
# 2. The new folder takes its place in the store.
# 3. The checkpoints of the job and its lock are deleted.
# 4. The path of the result becomes a link to it, which makes it visible to the build: the job does
#    not run again, so that nothing is left to do.


def write_manifest(job: Job[Any], started: float) -> None:
    """Complete the new folder of a job with its manifest, and store both on disk."""
    # safetensors writes files that only their owner can read, whatever the umask.
    mode = job.result.stat().st_mode & 0o666
    for path in job.result.rglob("*"):
        if path.is_file():
            path.chmod(mode)
    manifest = {
        "spec": without_names(job.spec),
        "inputs": job.recorded_inputs,
        "lineage": job.recorded_lineage,
        "facts": job.facts,
        "files": result_files(job.result),
    }
    (job.result / RUN_RECORD).write_text(
        run_record(without_names(job.spec), job.placement, job.options, job.record, started)
    )
    for path in sorted(job.result.rglob("*"), reverse=True):
        fsync(path)
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    write_atomically(job.result / MANIFEST, text)


def replaces_stored(job: Job[Any]) -> bool:
    """Return whether a new result takes the place of the one in the store, if that has one.

    It does if the stored one is damaged. The result of a forced run takes its place if its bytes
    differ and no other path leads to it: it prints what it did.
    """
    if not is_forced(job.spec) or not is_complete(job.place):
        return True
    old, new = (read_manifest(folder / MANIFEST) for folder in (job.place, job.result))
    assert old is not None and new is not None
    names = old["files"].keys() | new["files"].keys()
    changed = sorted(name for name in names if old["files"].get(name) != new["files"].get(name))
    if not changed:
        print(f"{job.target}: the forced run made the same bytes")
        return False
    outcome = f"{job.target}: the forced run made other bytes than before: {', '.join(changed)}"
    if others := readers(job):
        print(f"{outcome}; the earlier result stays, because {others} leads to it")
        return False
    print(outcome)
    return True


def readers(job: Job[Any]) -> str:
    """Return a path other than the target that leads to the stored result; "" if there is none."""
    target = job.target.parent.resolve() / job.target.name
    return next(
        (
            str(path)
            for path, folder in root_links(Path(job.options.stores[0]), Path("output"))
            if folder == job.place.resolve() and path.parent.resolve() / path.name != target
        ),
        "",
    )


def recover(job: Job[Any]) -> None:
    """Complete the publishing of a job that was killed after its result was complete."""
    if complete_result(job.place) is None and is_complete(job.result, job.key):
        publish(job.place)


def finish(job: Job[Any]) -> None:
    """Delete what the job needs no more, and link the path of the result to it."""
    delete_work(job.place)
    link_result(job.target, job.stored)
    delete_lock(job.place)
