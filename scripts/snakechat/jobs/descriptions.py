"""Descriptions of jobs: what a result is made from, and what a command of users reads."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from snakechat.config.recipes import Config, JobId
from snakechat.config.schema import ConfigError
from snakechat.workflow.commands import named_files, names_in, read_interpreter
from snakechat.workflow.errors import InputError

Jobs = dict[str, JobId]


class Description(NamedTuple):
    """What a job is made from, apart from its code and the pinned libraries, and where that is.

    Attributes:
        settings: JSON values that the program reads.
        inputs: Upstream jobs by the keys that the program uses for them.
        files: External files by the names that the spec has for them; of a file that is not local,
            its digest.
        options: RunOptions that this job has, such as the folder of the files. No result is made
            from them.
        program: Name of the program in scripts/ that runs in place of the rule's.
    """

    settings: dict[str, Any]
    inputs: Mapping[str, JobId] = {}
    files: Mapping[str, Path | str] = {}
    options: Mapping[str, Any] = {}
    program: str | None = None


def command_job(config: Config, keys: Mapping[str, Any], place: str) -> Description:
    """Return the description of a job that runs a command, without inputs.

    The text of the command counts, the content of the files that it names, and its interpreter:
    the version of Python, and the lock of its environment or, without one, the versions of its
    distributions. A command without Python has no interpreter.

    Args:
        keys: The keys of a recipe or a benchmark.
        place: Its place in the config, for errors.

    Raises:
        ConfigError: A file or the interpreter does not exist.
    """
    root, lock = config.local_path(""), keys.get("lock")
    settings: dict[str, Any] = {"command": keys["command"]}
    settings |= {key: keys[key] for key in ("lock", "network") if keys.get(key)}
    if "seed" in names_in(keys["command"]):
        settings["seed"] = keys["seed"]
    python = str(config.local_path(keys["python"])) if "python" in keys else ""
    try:
        key = "files"
        files = list(named_files(root, keys.get("files", ())))
        key = "lock"
        files += named_files(root, [lock] if lock else [])
        key = "python"
        if python or "python" in names_in(keys["command"]):
            interpreter = read_interpreter(python or sys.executable)
            settings["python"] = interpreter.version
            if not lock:
                settings["distributions"] = interpreter.distributions
    except InputError as error:
        raise ConfigError(f"config: {place}.{key}: {error}") from None
    return Description(
        settings,
        files={file: Path(root, file) for file in files},
        options={"source": str(root), "python": python},
        program="run_command",
    )
