"""Commands of users, in place of our trainers and as benchmarks.

A command runs in a folder with copies of the files that the config names, and keeps its caches and
temporary files in a folder of the job.

Standard library only: the workflow imports this module while it plans.
"""

import glob
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any

from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job
from snakechat.workflow.manifest import planned_files
from snakechat.workflow.pins import normalized, public
from snakechat.workflow.processes import FORWARDED, end_with_parent, rank, stop_signals

# What an interpreter says of itself. Folders that .pth files add are not in its environment.
QUERY = """
import json, platform, sys
from importlib.metadata import distributions
found = {each.name: each.version for each in [*distributions()][::-1] if each.name}
print(json.dumps([
    {**found, "python": platform.python_version()},
    sorted({sys.prefix, sys.base_prefix, sys.exec_prefix}),
]))
"""
# A pin in a lock or in a list of requirements.
PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)(?:\[[^]]*\])?==([\w.!+-]+)", re.MULTILINE)
# Variables that would change which modules Python finds, or that belong to our own programs.
REMOVED = ("PYTHON", "VIRTUAL_ENV", "SNAKECHAT_", "RANK")
# Bytes of the end of the output, whose last line is the error.
TAIL = 1 << 14
# Seconds to wait for the end of the output, which what a command leaves running may keep open.
MAX_WAIT = 5
# How programs report a file that they may not read, or that is not in their folder.
UNREAD = re.compile("Permission denied|No such file or directory|ModuleNotFoundError")


def names_in(command: str) -> set[str]:
    """Return the names in braces of a command; ValueError if one is neither closed nor doubled."""
    # A format is a part of the name, which is unknown then.
    return {
        ":".join(filter(None, field))
        for _, *field in Formatter().parse(command)
        if field[0] is not None
    }


def command_words(command: str, values: Mapping[str, str]) -> list[str]:
    """Return the words of a command, in which values replace names in braces. No shell runs.

    Raises ValueError if a quote or a brace is not closed, braces have another name, or there is no
    word.
    """
    if unknown := names_in(command) - values.keys():
        names = ", ".join(f"{{{name}}}" for name in values)
        raise ValueError(f"{{{min(unknown)}}} is unknown: expected {names}, or doubled braces")
    words = [word.format_map(values) for word in shlex.split(command)]
    if not words:
        raise ValueError("expected a program and its arguments")
    return words


@cache
def read_interpreter(python: str) -> tuple[dict[str, str], list[str]]:
    """Return the versions of an interpreter (python) and of its distributions, and its folders."""
    try:
        done = subprocess.run([python, "-I", "-c", QUERY], capture_output=True, timeout=60)
        found, folders = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else "is not Python"
        raise InputError(f"{python} {reason}: create it, or correct the path") from None
    return dict(sorted((normalized(name), version) for name, version in found.items())), folders


def pins_in(lock: Path) -> dict[str, str]:
    """Return the versions in a lock, or in a list of requirements, by name."""
    return {normalized(name): version for name, version in PIN.findall(lock.read_text("utf-8"))}


def check_versions(python: str, settings: Any) -> dict[str, str]:
    """Return all versions of an interpreter; InputError if the plan has others."""
    (found, _), planned = read_interpreter(python), settings.distributions
    # A lock may lack some, and have distributions of other platforms.
    has_lock = hasattr(settings, "lock")
    names = planned.keys() & found.keys() if has_lock else planned.keys() | found.keys()
    other = [name for name in sorted(names) if public(found.get(name)) != public(planned.get(name))]
    if other or (has_lock and len(names) < 2):
        raise InputError(
            f"{python} lacks the versions that this build was planned with"
            f" ({', '.join(other) or 'all of its lock'}): install them, or start the build again"
        )
    return found


def named_files(root: Path, patterns: Sequence[str]) -> Iterator[str]:
    """Yield the files that paths, folders and globs name, relative to a root.

    A folder or a `*` names no hidden files. Raises InputError if one of them names no file.
    """
    for pattern in patterns:
        paths = glob.escape(pattern) if Path(root, pattern).exists() else pattern
        found = {
            os.path.relpath(Path(root, path), root)
            for each in (paths, os.path.join(paths, "**"))
            for path in glob.glob(each, root_dir=root, recursive=True)
            if Path(root, path).is_file() and "__pycache__" not in path
        }
        if not found:
            raise InputError(f"{pattern} does not exist: correct the path, or remove it")
        yield from sorted(found)


def run_command(job: Job[Any], output: Path) -> None:
    """Run the command of a job, which fills an output folder.

    Raises InputError if the interpreter or a file is not what was planned, or the command failed.
    """
    settings, root = job.settings, Path(job.options.source)
    python = os.path.abspath(job.options.python or sys.executable)
    if hasattr(settings, "distributions"):
        job.record["versions"] = check_versions(python, settings)
    folders = {key.partition(".")[0]: folder for key, folder in job.inputs.items()}
    folders["model"] = folders["reference"] = folders.get("actor") or folders["model"]
    folders |= {"output": output, "state": job.states, "log_dir": job.log_folder}
    values = {
        **{name: os.path.abspath(folder) for name, folder in folders.items()},
        "python": python,
        "seed": str(getattr(settings, "seed", "")),
        "gpus": str(job.placement.gpus_per_node),
    }
    files = {root / name: digest for name, digest in job.spec["files"].items()}
    copied = {path for path in files if ".." not in path.relative_to(root).parts}
    with tempfile.TemporaryDirectory(prefix="command-") as name:
        folder = Path(name, "files")
        folder.mkdir()
        # Edits of files below the root do not reach the command while it runs.
        with planned_files(files):
            for path in copied:
                copy = folder / path.relative_to(root)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
        environment = command_environment(name, python, getattr(settings, "network", False))
        with planned_files({path: files[path] for path in files.keys() - copied}):
            try:
                code, tail = run_words(command_words(settings.command, values), folder, environment)
            except OSError as error:
                raise InputError(
                    f"{job.target}: the command cannot run {error.filename}: {error.strerror}"
                ) from None
    if code in [128 + number for number in FORWARDED]:
        sys.exit(code)
    if code:
        reason = next((line for line in reversed(tail.splitlines()) if line.strip()), "no output")
        advice = ": add the files that it reads to `files`" if UNREAD.search(reason) else ""
        raise InputError(
            f"{job.target}: the command ended with exit code {code}: {reason.strip()}{advice}"
        )
    # Of several nodes, the first one completes the result.
    if rank() > 0:
        sys.exit()


def command_environment(folder: str, python: str, network: bool) -> dict[str, str]:
    """Return the variables of a command, which keeps its own files in a folder.

    The programs beside its interpreter are found first. With a network, it has the Hub's cache.
    """
    kept = {name: text for name, text in os.environ.items() if not name.startswith(REMOVED)}
    kept |= dict.fromkeys(("HOME", "XDG_CACHE_HOME", "TMPDIR"), folder)
    kept |= {} if network else {"HF_HOME": folder, "HF_HUB_OFFLINE": "1"}
    path = f"{os.path.dirname(python)}{os.pathsep}{kept.get('PATH', os.defpath)}"
    return {**kept, "PATH": path, "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}


def run_words(
    words: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> tuple[int, str]:
    """Run a command in a folder; return its exit code and the end of its output."""
    tail = bytearray()
    source, sink = os.pipe()

    def show() -> None:
        while chunk := os.read(source, TAIL):
            os.write(sys.stdout.fileno(), chunk)
            tail.extend(chunk)
            del tail[:-TAIL]

    reader = threading.Thread(target=show, daemon=True)
    reader.start()
    try:
        code, received = run_child(
            words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink
        )
    finally:
        os.close(sink)
    reader.join(MAX_WAIT)
    return 128 + received[0] if received and code else code, tail.decode(errors="replace")


def run_child(
    words: Sequence[str], should_end: Callable[[], bool] | None = None, **options: Any
) -> tuple[int, list[int]]:
    """Run a command, which ends with this process and gets the signals that ask it to stop.

    It inherits the lock of the job. Returns its exit code, which is 128 + N if signal N ended it,
    and the signals that it got.

    should_end: Called every second; the command gets SIGTERM once it returns True.
    """
    process: subprocess.Popen[bytes] | None = None
    received: list[int] = []

    def forward(number: int, _: object) -> None:
        received.append(number)
        if process:
            process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in stop_signals()}
    try:
        process = subprocess.Popen(
            words,
            close_fds=False,
            preexec_fn=end_with_parent,
            # Of its own, so that a Ctrl-C reaches it once.
            start_new_session=True,
            **options,
        )
        # Signals that arrived before it was started.
        for number in received:
            process.send_signal(number)
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1 if should_end else None)
            if should_end and should_end():
                process.terminate()
                should_end = None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    code = process.returncode
    return code if code >= 0 else 128 - code, received
