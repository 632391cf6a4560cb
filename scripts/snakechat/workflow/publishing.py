"""What happens around the program of a job: before it starts, and after it has ended.

The launcher (scripts/launch.py) does this, and no program of a job has the rights to. It holds the
lock of the job, links a result that exists already, checks what the program will read, makes its
folders, and publishes what the program wrote. Of several jobs with one key, one makes the result
and the others wait.

The launcher itself is not limited. It writes into a file what the job may read and write: what its
key counts, and its result. scripts/confined.py takes these limits on before a program of the job
imports anything.

Standard library only.
"""

import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from snakechat.workflow.code_digests import Modules, selected_code
from snakechat.workflow.commands import read_interpreter
from snakechat.workflow.errors import InputError, warn
from snakechat.workflow.job import PREPARED, STATES, Job, read_manifests, read_spec
from snakechat.workflow.kernel_limits import NETWORK_VERSION, landlock_version
from snakechat.workflow.links import link_result, paths_by_key
from snakechat.workflow.manifest import (
    MANIFEST,
    REPRODUCED,
    RUN_RECORD,
    digest,
    fsync,
    manifest_path,
    require_manifest,
    result_files,
    sealed_json,
    without_names,
    write_atomically,
)
from snakechat.workflow.pins import check_installed, installed_versions
from snakechat.workflow.processes import Placement, RunOptions, changed_values
from snakechat.workflow.store import (
    AlreadyLocked,
    acquire_lock,
    complete_result,
    delete_lock,
    delete_work,
    is_undamaged,
    is_writable,
    locked,
    make_folders,
    publish,
    replies_folder,
    result_damage,
    set_aside,
    work_path,
)

# What the clock shows more than the monotonic one, before a run starts: a clock that is set during
# the run does not change its duration.
CLOCK_OFFSET = time.time() - time.monotonic()
# The file with the limits of a job; not set without limits.
LIMITS = "SNAKECHAT_LIMITS"
# The program that imports reward functions, below scripts/.
IMPORTER = "snakechat/algorithms/reward_functions"
# Variables with the path of a cache of the Hub; of a file or a folder of certificates.
HUB_CACHES = ("HF_HOME", "HF_HUB_CACHE", "HF_XET_CACHE")
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")

# --- before the first job ---------------------------------------------------------------------


def check_machine(mode: str, recipes: Sequence[str]) -> None:
    """Check what jobs on this machine need: limits for each, and GPUs for some recipes.

    Says once that they have no limits, if `hermetic: auto` cannot set them. Raises InputError for
    the first of the recipes that need a GPU, unless torch finds one.
    """
    if not hermetic_version(mode) and mode != "off":
        warn(
            "the kernel has no Landlock, or a container denies it: jobs may read files that their"
            " results are not made from (hermetic: auto)"
        )
    # Importing torch takes seconds, and would stay in the process that plans.
    program = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    if recipes and subprocess.run(program, stderr=subprocess.DEVNULL).returncode:
        raise InputError(
            f"{recipes[0]} needs a GPU, and this machine has none: add --config deployment=cpu to"
            " train on the CPU"
        )


def import_reward_functions(sources: Path, names: Collection[str], mode: str) -> None:
    """Import the reward functions rewards/NAME.py below a folder, within limits as jobs will.

    Raises InputError if one of them cannot be imported. mode: As of hermetic_version.
    """
    if not names:
        return
    modules = Modules(sources.absolute() / "scripts")
    folders = [str(modules.scripts), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Imports do not look beside the program.
    words = [sys.executable, "-P"]
    with tempfile.TemporaryDirectory() as folder:
        if hermetic_version(mode):
            path = Path(folder, "limits.json")
            read = [*map(str, modules.code(IMPORTER, names).files)]
            path.write_text(json.dumps({"read": read, "folders": [*map(str, modules.folders)]}))
            words += [str(modules.scripts / "confined.py"), str(path), folder]
        process = subprocess.run(
            [*words, str(modules.scripts / f"{IMPORTER}.py"), *sorted(names)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    if process.returncode:
        lines = process.stdout.strip().splitlines() or [f"exit code {process.returncode}"]
        raise InputError(lines[-1].removeprefix("error: "))


# --- before the program -----------------------------------------------------------------------


def prepare(
    spec_file: str, program: str, placement: Placement, options: RunOptions, node: int | None = None
) -> Job[Any] | None:
    """Prepare a job for its program, unless its result exists: then link it, and return None.

    The job is locked until this process and those that it starts end, what its program will read is
    checked, and its folders are made. Variables name the job and the file of its limits to these
    processes.

    A result exists if the inputs were rebuilt and came out the same, if the job was killed before
    it was published, or if another job makes the same one at the same time. Raises InputError if
    the spec, the code, a library or an input is not what was planned.

    node: Number of this node, if several ones decide separately, and have to decide the same: then
        the result exists only if the store has it.
    """
    spec = read_spec(spec_file)
    job: Job[Any] = Job(spec, read_manifests(spec), placement, options, SimpleNamespace)
    if not node:
        os.set_inheritable(acquire_lock(work_path(job.place, "lock"), waits=True), True)
    if node is None and complete_result(job.place) is None and not result_damage(job.result):
        # It was killed after its result was complete.
        publish(job.place)
    if stored := stored_result(job):
        job.stored = stored
        if not node:
            print(f"{job.target} is kept: it was made from the same spec and inputs")
            finish(job)
        return None
    # The log belongs to another result. The rule creates it at the same time.
    with suppress(FileNotFoundError):
        os.truncate(os.environ.get("SNAKECHAT_LOG", ""), 0)
    check_inputs(job.inputs.values())
    modules = Modules(Path(program).parent)
    code = modules.code(Path(program).stem, *selected_code(spec["settings"]))
    if changed := changed_keys(spec["code"], code.digests):
        raise InputError(f"{changed} changed since this build was planned: start it again")
    check_installed(spec["requirements"])
    if not node:
        shutil.rmtree(job.result, ignore_errors=True)
        take_checkpoints(job)
        for folder in (job.result, job.states, job.log_folder):
            make_folders(folder)
        # For gc, which keeps them.
        inputs = (f"{entry['result']}\n" for entry in job.recorded_inputs.values())
        write_atomically(work_path(job.place, "inputs"), "".join(inputs))
    os.environ.update({PREPARED: job.key, STATES: str(job.states)})
    if hermetic_version(options.hermetic):
        path = work_path(job.place, "limits.json")
        limits = limits_of(job, (Path(spec_file), Path(program), *code.files), modules.folders)
        write_atomically(path, json.dumps(limits), durable=False)
        os.environ[LIMITS] = str(path)
    return job


def take_checkpoints(job: Job[Any]) -> None:
    """Move the checkpoints here that the job left in another store when it was interrupted.

    The disk of the other store may be full, so that its user names another one.
    """
    for store in job.options.stores[1:]:
        other = Path(store, job.spec["rule"], job.key)
        is_left = any(work_path(other, "state").glob("*")) and is_writable(other)
        if is_left and not any(job.states.glob("*")):
            # It may run there.
            with suppress(AlreadyLocked), locked(other):
                moved = work_path(job.place, "moved")
                shutil.rmtree(moved, ignore_errors=True)
                shutil.copytree(work_path(other, "state"), moved)
                shutil.rmtree(job.states, ignore_errors=True)
                os.rename(moved, job.states)
                delete_work(other)


def is_forced(spec: Mapping[str, Any]) -> bool:
    """Return whether the build computes a result although it exists (snakemake --force)."""
    build = os.environ.get("SNAKECHAT_BUILD")
    return bool(build and spec["path"] in json.loads(Path(build).read_text())["forced"])


def stored_result(job: Job[Any]) -> Path | None:
    """Return the folder in a store with the result of a job, unless the build forces the job.

    A damaged result is named, and does not count.
    """
    stores = () if is_forced(job.spec) else job.options.stores
    folders = (Path(store, job.spec["rule"], job.key) for store in stores)
    return next((each for each in folders if each.is_dir() and is_undamaged(each)), None)


def check_inputs(folders: Iterable[Path]) -> None:
    """Check the result folders that a job reads: set a damaged one aside, and raise InputError."""
    for folder in folders:
        if not is_undamaged(folder):
            with suppress(OSError):
                set_aside(folder)
            raise InputError(f"{folder} is damaged: start the build again, which makes it again")


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the keys whose values differ, as one text."""
    return ", ".join(key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key))


# --- limits -----------------------------------------------------------------------------------


def hermetic_version(mode: str) -> int:
    """Return the version of Landlock under which jobs run; 0 if they run without limits.

    mode: `auto`: limited where the kernel can; `require`: InputError where it cannot; `off`.
    """
    version = 0 if mode == "off" else landlock_version()
    # It needs rights on TCP ports.
    if mode == "require" and version < NETWORK_VERSION:
        found = f"version {version}" if version else "none"
        raise InputError(
            f"hermetic: require needs version {NETWORK_VERSION} of Landlock (Linux 6.7), and this"
            f" kernel ({platform.release()}) has {found}: use `hermetic: auto`"
        )
    return version


def limits_of(job: Job[Any], files: Iterable[Path], folders: Iterable[Path]) -> dict[str, Any]:
    """Return what the program of a job may do, for scripts/confined.py.

    files: The spec, the program and its code. folders: Where imports look for modules.
    """
    spec, settings, options = job.spec, job.spec["settings"], job.options
    # Records of runs do not belong to results: pages show them, and a training that is made again
    # starts with the placement that the first one found.
    records = [*map(Path, job.lineage)] if spec.get("shows_provenance") else []
    if reproduced := os.environ.get(REPRODUCED):
        records.append(Path(reproduced, *job.target.parts[1:]))
    read: list[str | Path] = [*files, *external_files(job), *job.inputs.values()]
    read += [manifest_path(entry["path"]) for entry in spec["inputs"].values()]
    read += [folder for kinds in options.versions.values() for folder in kinds.values()]
    read += [path / RUN_RECORD for path in records]
    write = [job.result, job.states, job.log_folder]
    # The command of a user: its files, and its interpreter.
    is_command = "command" in settings
    if options.python:
        read += read_interpreter(options.python)[1]
    fetches = "hub" in settings or settings.get("network", False)
    has_network = fetches or bool(options.llm_judges)
    if fetches:
        write += map(Path, filter(None, map(os.environ.get, HUB_CACHES)))
    if options.llm_judges:
        write.append(replies_folder(Path(options.stores[0])))
    if has_network:
        read += filter(None, map(os.environ.get, CERTIFICATES))
    for folder in write:
        make_folders(folder)
    return {
        "read": [*map(str, read)],
        "folders": [*map(str, folders)],
        "write": [*map(str, write)],
        "network": has_network,
        # Processes of a command may connect to each other in any way.
        "connects": job.placement.num_processes > 1 or is_command,
        "nodes": job.placement.nodes > 1,
        "gpus": job.placement.gpus_per_node > 0 or is_command,
    }


def external_files(job: Job[Any]) -> dict[Path, str]:
    """Return the planned digests of the external files of a job."""
    options = job.options

    def path_of(name: str) -> Path:
        first, _, rest = name.partition("/")
        if first in options.versions:
            # Of a version in the store: its training or its evaluation. Or a training log.
            kind, _, inner = rest.partition("/")
            return Path(options.versions[first][kind], inner)
        # The names of a dataset's files start with their split.
        return Path(options.source, rest if job.spec["rule"] == "import_dataset" else name)

    return {path_of(name): sha256 for name, sha256 in job.spec["files"].items()}


# --- after the program ------------------------------------------------------------------------

# A job may be killed between any two of these steps. Its next run continues from what is there:
# 1. The record of the run and then the manifest are written into the new folder, which is complete
#    from now on.
# 2. The new folder takes its place in the store.
# 3. The checkpoints of the job are deleted.
# 4. The path of the result becomes a link to it, which makes it visible to the build: the job does
#    not run again.
# 5. The lock is deleted.


def publish_result(job: Job[Any], started: float) -> None:
    """Publish what the program of a job wrote, or raise InputError if it wrote no result.

    started: Unix time of its start, in seconds.
    """
    complete(job, started)
    if replaces_stored(job):
        publish(job.place)
    finish(job)
    # Of a program without curves.
    with suppress(OSError):
        job.log_folder.rmdir()


def complete(job: Job[Any], started: float) -> None:
    """Write the record and the manifest of a new result as publish_result, and sync all files."""
    paths, mode = sorted(job.result.rglob("*")), job.result.stat().st_mode & 0o666
    for path in paths:
        # A link could lead to a file that the program had no right to.
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise InputError(f"{path}: the program made something else than a file")
        # safetensors writes files that only their owner can read, whatever the umask.
        if path.is_file():
            path.chmod(mode)
    try:
        outcome = json.loads((job.result / RUN_RECORD).read_text())
    except (OSError, ValueError):
        raise InputError(f"{job.target}: the program wrote no result") from None
    spec = without_names(job.spec)
    record = run_record(spec, job.options, outcome["measured"], started)
    (job.result / RUN_RECORD).write_text(record)
    manifest = {
        "spec": spec,
        "inputs": job.recorded_inputs,
        "lineage": job.recorded_lineage,
        "facts": outcome["facts"],
        "files": result_files(job.result),
    }
    for path in reversed(paths):
        fsync(path)
    write_atomically(job.result / MANIFEST, sealed_json(manifest))


def run_record(
    spec: Mapping[str, Any], options: RunOptions, measured: Mapping[str, Any], started: float
) -> str:
    """Return the JSON text of run.json.

    measured: What the program knows: placement, throughput, memory.
    started: Unix time of the start, in seconds.
    """
    model = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return sealed_json(
        {
            "spec": digest(spec),
            "started": datetime.datetime.fromtimestamp(started, datetime.UTC).isoformat(),
            "seconds": round(time.monotonic() + CLOCK_OFFSET - started, 3),
            **measured,
            "host": platform.node(),
            "cpu": model[1] if model else platform.machine(),
            "cpus": os.cpu_count(),
            "platform": platform.platform(),
            "options": changed_values(options),
            # The version of Landlock within whose limits the program ran.
            "hermetic": hermetic_version(options.hermetic),
            "python": platform.python_version(),
            "versions": {
                **installed_versions(spec["requirements"]),
                **measured.get("versions", {}),
            },
        }
    )


def replaces_stored(job: Job[Any]) -> bool:
    """Return whether a new result takes the place of the one in the store, if that has one.

    It does if the stored one is damaged. The result of a forced run replaces an undamaged one only
    if its bytes differ and no other path leads to that. Prints what a forced run changed.
    """
    if not is_forced(job.spec) or result_damage(job.place):
        return True
    old, new = (require_manifest(each / MANIFEST)["files"] for each in (job.place, job.result))
    changed = changed_keys(old, new)
    if not changed:
        print(f"{job.target}: the forced run made the same bytes")
        return False
    stays = "; the earlier result stays, because folders that cannot be read may need it"
    # Another machine may have output folders that use the store.
    with suppress(InputError):
        paths = paths_by_key(Path(job.options.stores[0]), Path("output")).get(job.key, ())
        own = (job.target, manifest_path(job.target))
        others = [path for path in paths if not {path, *path.parents}.intersection(own)]
        stays = f"; the earlier result stays, because {others[0]} leads to it" if others else ""
    print(f"{job.target}: the forced run made other bytes than before: {changed}{stays}")
    return not stays


def finish(job: Job[Any]) -> None:
    """Delete what the job needs no more, and link the path of the result to it."""
    delete_work(job.place)
    link_result(job.target, job.stored)
    delete_lock(job.place)
