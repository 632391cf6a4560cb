"""Descriptions of jobs: what a result is made from, and what a command of users reads."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from snakechat.config.recipes import Config, JobId
from snakechat.config.schema import ConfigError
from snakechat.workflow.commands import named_files, names_in, pins_in, read_interpreter
from snakechat.workflow.errors import InputError

Jobs = dict[str, JobId]


class Description(NamedTuple):
    """What a job is made from, apart from its code and the pinned libraries, and where that is.

    Attributes:
        settings: JSON values that the program reads.
        inputs: Upstream jobs by the keys that the program uses for them.
        files: External files by the names that the spec has for them.
        options: RunOptions that this job has, such as the folder of the files. No result is made
            from them.
    """

    settings: dict[str, Any]
    inputs: Mapping[str, JobId] = {}
    files: Mapping[str, Path] = {}
    options: Mapping[str, Any] = {}


def command_job(config: Config, keys: Mapping[str, Any], place: str) -> Description:
    """Return the description of a job that runs a command, without inputs.

    The text of the command counts, the content of the files that it names, and the versions of its
    interpreter, if it has one, and of the lock or, without one, of the installed distributions.

    keys, place: The keys of a recipe or a benchmark, and their place in the config.

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
        files = named_files(root, [*keys.get("files", ()), *([lock] if lock else [])])
        paths = {file: Path(root, file) for file in files}
        if python or "python" in names_in(keys["command"]):
            found, _ = read_interpreter(python or sys.executable)
            locked = lock and {**pins_in(Path(root, lock)), "python": found["python"]}
            settings["distributions"] = locked or found
    except InputError as error:
        raise ConfigError(f"config: {place}: {error}") from None
    return Description(settings, files=paths, options={"source": str(root), "python": python})
