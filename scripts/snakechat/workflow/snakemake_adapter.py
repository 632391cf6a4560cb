"""Private interfaces of Snakemake that the workflow needs; no other module uses them.

Written for Snakemake 9.27 and later versions 9. The workflow imports this module while it plans.
"""

import gc
import logging
import os
import sys
from typing import Any

from snakemake import __version__ as SNAKEMAKE_VERSION
from snakemake.logging import logger
from snakemake.settings.types import SharedFSUsage, StorageSettings

from snakechat.workflow.errors import InputError


def check_version(version: str = SNAKEMAKE_VERSION) -> None:
    """Raise InputError for a Snakemake whose private interfaces may differ."""
    if not version.startswith("9."):
        raise InputError(
            f"Snakemake {version} is installed, and this workflow needs 9.27 or a later version 9:"
            " pip install --no-deps --requirement requirements.txt"
        )


def collect_garbage_rarely() -> None:
    """Have Python search for unreachable cycles of objects less often.

    Planning creates many objects and nearly no such cycles: searching would take up to a quarter of
    its time.
    """
    gc.freeze()
    gc.set_threshold(200_000)


def command_line_config(workflow: Any) -> dict[str, Any]:
    """Return the values of --config, which Snakemake leaves as text below the top level."""
    return dict(workflow.config_settings.config)


def jobs_share_environment(workflow: Any) -> bool:
    """Return whether jobs run in the Python environment of Snakemake, and not in another one."""
    methods = workflow.deployment_settings.deployment_method
    shared = workflow.storage_settings.shared_fs_usage
    return not methods and SharedFSUsage.SOFTWARE_DEPLOYMENT in shared


def writes_report(arguments: list[str] | None = None) -> bool:
    """Return whether Snakemake only writes a report, in which stale results would appear too."""
    options = {word.partition("=")[0] for word in (sys.argv if arguments is None else arguments)}
    return bool(options & {"--report", "--reporter"}) and "--report-after-run" not in options


def config_options(arguments: list[str] | None = None) -> list[str]:
    """Return the words of the command line that change the config: --configfile and --config.

    A rebuild needs them again.
    """
    words = sys.argv[1:] if arguments is None else arguments
    options, kept = [], False
    for word in words:
        if word.startswith("-"):
            kept = word.partition("=")[0] in ("--configfile", "--configfiles", "--config", "-C")
        if kept:
            options.append(word)
    return options


def hide_missing_folder_warnings() -> None:
    """Drop Snakemake's warning about result folders that its plan did not expect.

    It holds for every folder that users ask for: an upstream job wrote it, and its own rule has no
    command.
    """

    def is_wanted(record: logging.LogRecord) -> bool:
        return "were not present when the DAG was created" not in record.getMessage()

    logger.addFilter(is_wanted)


class SharedVolume(StorageSettings):
    """Settings of storage for pods that share a volume."""

    # Pods start in a folder of their own, and have to be given this one.
    assume_common_workdir = False


def use_shared_volume(workflow: Any) -> None:
    """Have pods of Kubernetes read and write files of a shared volume in place.

    The plugin for Kubernetes declares that pods share nothing, and copies the files of each job
    from and to a storage that it asks for (default-storage-provider). With provider `fs`
    (profiles/kubernetes), files stay where they are; only the installed software belongs to a pod.
    """
    if workflow.storage_settings.default_storage_provider != "fs":
        return
    per_pod = {SharedFSUsage.SOFTWARE_DEPLOYMENT, SharedFSUsage.SOURCE_CACHE}
    changed = {
        "default_storage_provider": None,
        "shared_fs_usage": SharedFSUsage.all() - per_pod,
    }
    workflow.storage_settings = SharedVolume(**{**vars(workflow.storage_settings), **changed})
    workflow.overwrite_workdir = os.getcwd()
