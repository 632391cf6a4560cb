"""Run a program of the build: read a spec, fill a result folder, publish it with its manifest.

A spec (output/specs/RULE/NAME-DIGEST.json) and the content of the inputs determine a result. It
appears in the store by one rename, and its path becomes a link to it (snakechat.workflow.store). If
the store has it already and the build does not force it, `reuse_result` makes the link without
running the program.

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

from snakechat.workflow.code_digests import code_digests
from snakechat.workflow.deterministic import request_deterministic_kernels
from snakechat.workflow.digests import DigestCache, digest, fsync, write_atomically
from snakechat.workflow.distributed import barrier, rank, world_size
from snakechat.workflow.errors import InputError, describe_environment_error
from snakechat.workflow.lineage import merge_lineages
from snakechat.workflow.locks import AlreadyLocked, acquire_lock
from snakechat.workflow.manifest import (
    MANIFEST,
    RUN_RECORD,
    Manifest,
    input_digest,
    read_input,
    read_manifest,
    result_files,
)
from snakechat.workflow.pins import check_installed
from snakechat.workflow.placement import (
    SERIAL,
    Placement,
    parse_placement,
    placement_values,
)
from snakechat.workflow.run_options import DEFAULTS, RunOptions, parse_options
from snakechat.workflow.run_record import run_record
from snakechat.workflow.shared_store import put_result, take_result
from snakechat.workflow.snapshot import read_build
from snakechat.workflow.store import (
    STORE,
    Damaged,
    check_files,
    is_undamaged,
    link_result,
    linked_folders,
    publish,
    store_key,
    stored_folder,
    temporary_folder,
)
from snakechat.workflow.store_space import keep_limit

# Digests of checked inputs, beside what planning remembers. It can be deleted at any time.
CHECKED_DIGESTS = Path(".snakemake/snakechat/inputs.json")
# The launcher sets it to the key of a job whose inputs it has checked, for the job's processes.
CHECKED = "SNAKECHAT_CHECKED"
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
        inputs: Result folders of the upstream jobs, by name.
        target: Path of the result, a link to `stored`.
        stored: Folder of the result in the store.
        result: Folder that main fills.
        facts: What the job found out (a commit, rows dropped by reason); main fills it, and it
            becomes part of the manifest.
        record: Measurements of this run (throughput, GPU memory) for run.json.
        lineage: All upstream jobs, back to the sources.
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
        self.inputs = {name: Path(entry["path"]) for name, entry in spec["inputs"].items()}
        self.input_digests = {
            name: input_digest(spec, manifest) for name, manifest in manifests.items()
        }
        self.lineage = merge_lineages(manifests.values())
        self.key = store_key(spec, self.input_digests)
        self.target = Path(spec["path"])
        self.stored = stored_folder(STORE, spec["rule"], spec["name"], self.key)
        self.result = temporary_folder(self.stored)
        self.states = Path("output/state", spec["rule"], spec["name"], self.key[:16])
        self.log_folder = Path("output/logs", spec["rule"], spec["name"])
        self.facts: dict[str, Any] = {}
        self.record: dict[str, Any] = {}


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
    parser = argparse.ArgumentParser(description="Started by Snakemake: snakemake TARGET")
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
        if rank() == 0:
            lock(spec)
        manifests = read_manifests(spec)
        job = Job(spec, manifests, arguments.placement, arguments.options, settings_type)
        exists = False
        if os.environ.get(CHECKED) != job.key:
            if world_size() == 1:
                recover(job)
            check_inputs(job.inputs, manifests)
            exists = result_exists(job)
        if not exists:
            if rank() == 0:
                shutil.rmtree(job.result, ignore_errors=True)
                job.result.mkdir(parents=True)
            main(job)
            # Slower processes may still read or write in the folder that rank 0 moves next.
            barrier()
            if rank() == 0:
                write_manifest(job, started)
                if is_forced(spec):
                    compare_with_old(job)
                publish(job.stored)
        if rank() == 0:
            finish(job)

    report_errors(work, arguments.spec, arguments.placement)
    if world_size() > 1:
        # DeepSpeed keeps references to process groups. Their threads outlive the groups and now and
        # then abort the interpreter while it shuts down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def reuse_result(
    spec_file: str, options: RunOptions, log: str | None = None, node: int | None = None
) -> bool:
    """Link the result of a job without running its program, if it exists already.

    It exists if its inputs were rebuilt and came out the same, if the job was killed between the
    end of its program and the end of publishing, or if a shared store has it. If it does not, the
    inputs are checked, for all processes that this one starts.

    Args:
        spec_file: Path of the spec.
        options: The options of the run.
        log: Path of the log of the job. It is emptied unless the store has the result, as it
            belongs to another one.
        node: Number of this node, if several ones decide separately, and have to decide the same:
            then the result exists only if the store has it.

    Returns:
        Whether the result is linked. If not, the program has to run, as for forced results.

    Exits with code 1 and one line on standard error if the inputs or the spec are wrong.
    """
    published = False

    def work() -> None:
        nonlocal published
        spec = read_spec(spec_file)
        manifests = read_manifests(spec)
        job = Job(spec, manifests, SERIAL, options, SimpleNamespace)
        if os.environ.get(CHECKED) == job.key:
            # A node of a Slurm job, whose first process has decided.
            return
        descriptor = None if node else lock(spec)
        if node is None:
            recover(job)
            published = publish_existing(job, log)
        else:
            published = result_exists(job)
            if published and node == 0:
                finish(job)
        if not published:
            check_inputs(job.inputs, manifests)
            os.environ[CHECKED] = job.key
        if descriptor is not None:
            # The first process of the program takes it, while this one may wait for its end.
            os.close(descriptor)

    report_errors(work, spec_file)
    return published


def publish_existing(job: Job[Any], log: str | None) -> bool:
    """Link the result of a job if the store or a shared one has it; return whether."""
    if not result_exists(job):
        if log:
            # Before anything is printed that belongs to the new result. The rule creates the log at
            # the same time.
            with suppress(FileNotFoundError):
                os.truncate(log, 0)
        shared = None if is_forced(job.spec) else shared_folder(job)
        if not shared or not take_result(shared, job.result):
            return False
        publish(job.stored)
        print(f"{job.target} is taken from the shared store: {shared}")
    else:
        print(f"{job.target} is kept: it was made from the same spec and inputs")
    finish(job)
    return True


def report_errors(work: Callable[[], None], spec_file: str, placement: Placement = SERIAL) -> None:
    """Call a function; exit with code 1 and one line at an error that the user can act on."""
    try:
        work()
    except InputError as error:
        exit_with_line(f"error: {error}")
    except AlreadyLocked as holder:
        target = read_spec(spec_file)["path"]
        sys.exit(f"error: {target} is being made by {holder}: wait for it, or stop it")
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
    """Return whether the store has the result of a job, and the build does not force it."""
    return not is_forced(job.spec) and is_undamaged(job.stored)


def lock(spec: Mapping[str, Any]) -> int:
    """Make this process the only one that writes the result of a spec; see acquire_lock."""
    target = Path(spec["path"])
    return acquire_lock(target.with_name(f".{target.name}.lock"))


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
            raise InputError(
                f"{folder}: {damage}: delete {folder} and start the build again"
            ) from None


def check_code(spec: Mapping[str, Any], program: str) -> None:
    """Raise InputError unless the code that runs is the code that was planned."""
    rewards = spec["settings"].get("reward_functions", ())
    planned, current = spec["code"], code_digests(program, rewards)
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
# 3. A shared store gets a copy, and leftovers are deleted.
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
        "spec": job.spec,
        "inputs": job.input_digests,
        "lineage": job.lineage,
        "facts": job.facts,
        "files": result_files(job.result),
    }
    (job.result / RUN_RECORD).write_text(
        run_record(job.spec, job.placement, job.options, job.record, started)
    )
    for path in sorted(job.result.rglob("*"), reverse=True):
        fsync(path)
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    write_atomically(job.result / MANIFEST, text)


def compare_with_old(job: Job[Any]) -> None:
    """Print whether a forced run made the bytes of the result that it replaces."""
    old, new = (read_manifest(folder / MANIFEST) for folder in (job.stored, job.result))
    if old is None or new is None:
        return
    names = old["files"].keys() | new["files"].keys()
    changed = sorted(name for name in names if old["files"].get(name) != new["files"].get(name))
    outcome = f"other bytes than before: {', '.join(changed)}" if changed else "the same bytes"
    print(f"{job.target}: the forced run made {outcome}")


def shared_folder(job: Job[Any]) -> Path | None:
    """Return the folder of the result of a job in the shared store, if there is such a store."""
    shared = job.options.shared_store
    if shared is None:
        return None
    return stored_folder(Path(shared), job.spec["rule"], job.spec["name"], job.key)


def recover(job: Job[Any]) -> None:
    """Complete the publishing of a job that was killed after its result was complete."""
    if is_undamaged(job.result, job.key):
        publish(job.stored)


def finish(job: Job[Any]) -> None:
    """Share the result, delete leftovers and link the path of the result to it."""
    if shared := shared_folder(job):
        put_result(job.stored, shared, replace=is_forced(job.spec))
    # Other versions of the result leave these too.
    leftovers = [*job.stored.parent.glob(".*.tmp"), job.states.parent]
    for leftover in leftovers:
        shutil.rmtree(leftover, ignore_errors=True)
    link_result(job.target, job.stored)
    limit = job.options.store_max_bytes
    keep_limit(STORE, lambda: linked_folders(Path("output")), limit)
    if job.options.shared_store:
        keep_limit(Path(job.options.shared_store), set, limit)
