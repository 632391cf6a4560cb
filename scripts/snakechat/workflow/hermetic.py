"""What the job of a build may read and write: what its key counts, and its result.

The launcher is not limited. It writes the limits of a job into a file; scripts/confined.py takes
them on before a program of the job imports anything.

Standard library only.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from snakechat.workflow.code_digests import Modules, selected_code
from snakechat.workflow.commands import read_interpreter
from snakechat.workflow.errors import InputError, warn
from snakechat.workflow.job import Job
from snakechat.workflow.kernel_limits import landlock_version
from snakechat.workflow.manifest import REPRODUCED, RUN_RECORD, manifest_path
from snakechat.workflow.store import make_folders, replies_folder

# The file with the limits of a job; not set without limits.
LIMITS = "SNAKECHAT_LIMITS"
# The program that imports reward functions, below scripts/.
IMPORTER = "snakechat/algorithms/reward_functions"
# `hermetic: require` needs rights on TCP ports.
REQUIRED_VERSION = 4

# Variables with the path of a cache of the Hub; of a file or a folder of certificates.
HUB_CACHES = ("HF_HUB_CACHE", "HF_XET_CACHE")
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


def hermetic_version(mode: str) -> int:
    """Return the version of Landlock under which jobs run; 0 if they run without limits.

    mode: `auto`: limited where the kernel can; `require`: InputError where it cannot; `off`.
    """
    if mode == "off":
        return 0
    version = landlock_version()
    if mode == "require" and version < REQUIRED_VERSION:
        found = f"version {version}" if version else "none"
        raise InputError(
            f"hermetic: require needs version {REQUIRED_VERSION} of Landlock (Linux 6.7), and this"
            f" kernel ({platform.release()}) has {found}: use `hermetic: auto`"
        )
    return version


def hub_folder() -> str:
    """Return the folder of huggingface_hub's cache and token."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")


def limits_of(job: Job[Any], spec_file: str, program: str, modules: Modules) -> dict[str, Any]:
    """Return what the program of a job may do, for scripts/confined.py."""
    spec, settings, options = job.spec, job.spec["settings"], job.options
    # Records of runs do not belong to results: pages show them, and a training that is made again
    # starts with the placement that the first one found.
    records = [*map(Path, job.lineage)] if spec.get("shows_provenance") else []
    if reproduced := os.environ.get(REPRODUCED):
        records.append(Path(reproduced, *job.target.parts[1:]))
    code = modules.code(Path(program).stem, *selected_code(settings)).files
    read = [spec_file, program, *code, *external_files(job), *job.inputs.values()]
    read += [manifest_path(entry["path"]) for entry in spec["inputs"].values()]
    read += [folder for kinds in options.versions.values() for folder in kinds.values()]
    read += [path / RUN_RECORD for path in records]
    write = [job.result, job.states, job.log_folder]
    # The command of a user: its files, and its interpreter.
    is_command = "command" in settings
    if options.python:
        read += read_interpreter(options.python)[1]
    has_network = fetches = "hub" in settings or settings.get("network", False)
    if fetches:
        write += map(Path, filter(None, [hub_folder(), *map(os.environ.get, HUB_CACHES)]))
    if options.llm_judges:
        has_network = True
        write.append(replies_folder(Path(options.stores[0])))
    if has_network:
        read += filter(None, map(os.environ.get, CERTIFICATES))
    for folder in write:
        make_folders(folder)
    return {
        "read": [*map(str, read)],
        "folders": [*map(str, modules.folders)],
        "write": [*map(str, write)],
        "network": has_network,
        # Processes of a command may connect to each other in any way.
        "connects": job.placement.num_processes > 1 or is_command,
        "nodes": job.placement.nodes > 1,
        "gpus": job.placement.gpus_per_node > 0 or is_command,
    }


def external_files(job: Job[Any]) -> dict[Path, str]:
    """Return the planned digests of the external files of a job."""
    found: dict[Path, str] = {}
    for name, digest in job.spec["files"].items():
        first, _, rest = name.partition("/")
        if first in job.options.versions:
            # Of a version in the store: its training or its evaluation. Or a training log.
            kind, _, inner = rest.partition("/")
            path = Path(job.options.versions[first][kind], inner)
        else:
            # The names of a dataset's files start with their split.
            is_of_split = job.spec["rule"] == "import_dataset"
            path = Path(job.options.source, rest if is_of_split else name)
        found[path] = digest
    return found


# --- before the first job ---------------------------------------------------------------------


def check_gpus(recipes: Iterable[str]) -> None:
    """Raise InputError for the first of the recipes that need a GPU, unless torch finds one."""
    # Importing torch takes seconds, and would stay in the process that plans.
    program = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    recipe = next(iter(recipes), None)
    if recipe and subprocess.run(program, stderr=subprocess.DEVNULL).returncode:
        raise InputError(
            f"{recipe} needs a GPU, and this machine has none: add --config deployment=cpu to train"
            " on the CPU"
        )


def check_limits(mode: str) -> None:
    """Say once that jobs on this machine have no limits, if `hermetic: auto` cannot set them."""
    if not hermetic_version(mode) and mode != "off":
        warn(
            "the kernel has no Landlock, or a container denies it: jobs may read files that their"
            " results are not made from (hermetic: auto)"
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
