"""The frame of every program: a spec comes in, a result folder and its manifest go out.

A spec (output/specs/RULE/NAME-DIGEST.json) holds all that determines a result. The manifest
(output/STAGE/NAME.manifest.json) repeats the spec, tells all jobs before it and what this one found
out, and lists size and sha256 of every file of the result. It has no times in it: the same build
gives the same bytes. When and where a job ran is in NAME.run.json beside it.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from snakechat.workflow.code_digests import REQUIREMENTS, code_digests, pinned_versions
from snakechat.workflow.digests import digest, file_digest, write_atomically
from snakechat.workflow.distributed import barrier, rank, world_size
from snakechat.workflow.lineage import lineage_behind
from snakechat.workflow.locks import Locked, hold

# Snakemake leaves this empty file in folders that a user asks for by name.
NOT_OURS = {".snakemake_timestamp", "manifest.json"}

# Seconds that the first process of a job has to say what is wrong, before another one does.
FIRST_WORD = 10


class InputError(Exception):
    """A user's mistake or damaged input: told in one line, without a traceback."""


class Job:
    """One run of a program.

    settings: the science, from the spec. placement: where and how it runs, from the command line.
    inputs: the result folders of the jobs before it, by name. result: the folder to fill. facts:
    what the job found out (a commit, rows dropped by reason): main fills it, the manifest has it.
    record: how it went, for NAME.run.json. lineage: the jobs before it, back to the sources.
    states: where an unfinished run keeps what it needs to go on.
    """

    def __init__(self, spec, manifests, placement):
        self.spec = spec
        self.input_digests = {name: file_digest(path) for name, path in manifests.items()}
        self.lineage = lineage_behind(read_manifest(path) for path in manifests.values())
        self.placement = placement
        self.settings = SimpleNamespace(**spec["settings"])
        self.inputs = {name: Path(job["path"]) for name, job in spec["inputs"].items()}
        self.target = Path(spec["path"])
        self.result = self.target.with_name(f".{self.target.name}.tmp")
        self.old = self.target.with_name(f".{self.target.name}.old")
        self.facts = {}
        made_from = digest([spec, self.input_digests])[:16]
        self.states = Path("output/state", spec["rule"], spec["name"], made_from)
        self.record = {}
        self.log_folder = Path("output/logs", spec["rule"], spec["name"])


def manifest_of(folder):
    """Path of the manifest beside a result folder."""
    return Path(f"{folder}.manifest.json")


def read_manifest(path):
    """A manifest; None where there is none that can be read."""
    try:
        return parse_manifest(Path(path).read_text())
    except (OSError, UnicodeDecodeError):
        return None


def parse_manifest(text):
    """A manifest from its text; None if it is none."""
    try:
        manifest = json.loads(text)
        parts = [manifest[name] for name in ("inputs", "lineage", "facts", "files")]
        parts.append(manifest["spec"]["inputs"])
        sound = isinstance(manifest["spec"]["path"], str)
    except (ValueError, KeyError, TypeError):
        return None
    return manifest if sound and all(isinstance(part, dict) for part in parts) else None


def result_files(folder):
    """Size and sha256 of every file in a result folder, by relative path."""
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {
            "size": path.stat().st_size,
            "sha256": file_digest(path),
        }
        for path in paths
        if path.name not in NOT_OURS
    }


def run(main):
    """Run main(job), then publish job.result. The old result stays until the new one is whole.

    Of several processes each one checks and computes, and the first one alone locks and writes:
    until all have met in main, none changes a file that another decides by.

    Exits with 1 and one line on standard error where the input, the code or the spec is wrong.
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
            hold(Path(target).with_name(f".{Path(target).name}.lock"))
        manifests = {name: check_input(entry) for name, entry in spec["inputs"].items()}
        job = Job(spec, manifests, arguments.placement)
        complete = is_complete(job)
        if rank() == 0 and not complete:
            shutil.rmtree(job.result, ignore_errors=True)
            job.result.mkdir(parents=True)
        if not complete:
            main(job)
            # A slower one still reads or writes in the folder that the first one then moves.
            barrier()
        if rank() == 0:
            finish(job, started, complete)
    except InputError as error:
        leave(f"error: {error}")
    except Locked as other:
        sys.exit(f"error: {target} is being made by {other}: wait for it, or stop it")
    except KeyboardInterrupt:
        sys.exit("stopped by SIGINT" if rank() == 0 else 1)
    except Exception as error:
        told = unforeseen(error, target, arguments.placement)
        if told is None:
            raise
        leave(f"error: {told}")
    if world_size() > 1:
        # DeepSpeed holds on to groups of processes: their threads outlive them, and now and then
        # end by SIGABRT a program that Python takes apart.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def finish(job, started, complete):
    """Leave nothing but the result and what belongs beside it."""
    if not complete:
        publish(job, started)
    # A complete folder without its manifest beside it: an interrupted or failed rerun removed the
    # manifest alone. Nothing has to be computed again.
    write_beside(job, "manifest", (job.target / "manifest.json").read_text())
    # What an interrupted run left too, and states of other specs: they were superseded.
    for leftover in (job.result, job.old, job.states.parent):
        shutil.rmtree(leftover, ignore_errors=True)


def leave(line):
    """End the program with a line, which the first of several processes says for all."""
    if rank() > 0:
        # Where the first one ends too, the launcher ends this one.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(FIRST_WORD)
        # Its bar may stand in this line.
        line = f"\n{line}"
    sys.exit(line)


def unforeseen(error, target, placement):
    """One line for what happens to sound programs: no memory, a full disk, a process lost; or None.

    placement: what the memory of a job depends on.
    """
    if is_out_of_memory(error):
        knobs = [
            f"{name}: {placement[name]}"
            for name in ("micro_batch_tokens", "activation_checkpointing", "zero_stage", "offload")
            if name in placement
        ]
        ways = f": placement has {', '.join(knobs)}; fewer micro_batch_tokens need less"
        return f"{target}: out of memory" + (ways if knobs else "")
    if world_size() > 1 and re.search("closed by peer|reset by peer|Broken pipe", str(error)):
        return f"{target}: another process of this job has ended"
    number = system_error(error)
    return number and f"{os.strerror(number)}: {getattr(error, 'filename', None) or target}"


def is_out_of_memory(error):
    """Whether memory was asked for that is not there, on the CPU or a GPU."""
    # torch's own kind is known by its name: this module works without torch.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    told = "can't allocate memory" in str(error)
    return told or not kinds.isdisjoint({"MemoryError", "OutOfMemoryError"})


def system_error(error):
    """The system's number for what went wrong (a full disk, a missing file), or None."""
    if isinstance(error, OSError):
        # Names that a network does not know have numbers below 0, of another kind.
        return error.errno if error.errno and error.errno > 0 else None
    # As libraries written in Rust tell it.
    found = re.search(r"\(os error (\d+)\)", str(error))
    return found and int(found[1])


def check_code(spec):
    """The code that runs must be the code that was planned: an edit in between is refused."""
    rewards = spec["settings"].get("reward_functions", ())
    planned, now = spec["code"], code_digests(Path(sys.argv[0]), rewards)
    changed = sorted(name for name in planned.keys() | now if planned.get(name) != now.get(name))
    if changed:
        raise InputError(
            f"{', '.join(changed)} changed since this build was planned: start it again"
        )


def check_input(entry):
    """The path of an input's manifest, if its spec and files are those that were planned."""
    path = manifest_of(entry["path"])
    manifest = read_manifest(path)
    if manifest is None:
        raise InputError(f"{path} cannot be read: delete it and start the build again")
    if digest(manifest["spec"]) != entry["spec"]:
        raise InputError(
            f"{path} was made from another spec than this job's: start the build again"
        )
    files = result_files(entry["path"])
    for name in sorted(manifest["files"].keys() | files):
        if manifest["files"].get(name) != files.get(name):
            raise InputError(
                f"{entry['path']}/{name} is not the file that its manifest names:"
                f" delete {entry['path']} and start the build again"
            )
    return path


def check_file(path, planned):
    """A file from outside must have the content that was planned."""
    if not path.is_file() or file_digest(path) != planned:
        raise InputError(f"{path} changed since this build was planned: start it again")


def is_complete(job):
    """Whether the result folder was made from the job's spec and inputs, and is undamaged."""
    manifest = read_manifest(job.target / "manifest.json")
    return (
        manifest is not None
        and manifest["spec"] == job.spec
        and manifest["inputs"] == job.input_digests
        and manifest["files"] == result_files(job.target)
    )


def publish(job, started):
    """Put the finished folder, with its manifest inside, in the place of the old one."""
    manifest = {
        "spec": job.spec,
        "inputs": job.input_digests,
        "lineage": job.lineage,
        "facts": job.facts,
        "files": result_files(job.result),
    }
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    write_atomically(job.result / "manifest.json", text)
    # Before the folder is in its place: behind that, a run that is started again does nothing.
    write_run_record(job, started)
    shutil.rmtree(job.old, ignore_errors=True)
    if job.target.exists():
        os.replace(job.target, job.old)
    os.replace(job.result, job.target)


def write_run_record(job, started):
    """NAME.run.json: times, machine, placement and installed versions of this run."""
    pins = pinned_versions(REQUIREMENTS)
    record = {
        "spec": digest(job.spec),
        "started": datetime.datetime.fromtimestamp(started, datetime.UTC).isoformat(),
        "seconds": round(time.time() - started, 3),
        "peak_memory_mb": peak_memory_mb(),
        **job.record,
        "host": platform.node(),
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "placement": job.placement,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in pins},
    }
    write_beside(job, "run", json.dumps(record, indent=1, sort_keys=True) + "\n")


def peak_memory_mb():
    """The most memory that this process has had, in MB."""
    # Linux tells it in kB, macOS in bytes.
    units = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / units)


def cpu_name():
    """What the CPU calls itself, or its kind where it is not told."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    named = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return named[1] if named else platform.machine()


def write_beside(job, kind, text):
    """Write NAME.KIND.json. Nobody else does, so that a killed run's file is simply taken over."""
    write_atomically(f"{job.target}.{kind}.json", text, writer="tmp")
