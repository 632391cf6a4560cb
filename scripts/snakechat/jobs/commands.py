"""Describes what commands of users are made from besides their inputs."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snakechat.config.recipes import Config
from snakechat.config.schema import ConfigError
from snakechat.jobs.descriptions import Description
from snakechat.workflow.commands import named_files, names_in, read_interpreter
from snakechat.workflow.errors import InputError


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
