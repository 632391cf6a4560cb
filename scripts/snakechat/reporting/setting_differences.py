"""The settings in which trainings differ: their own, and the settings of the jobs before them."""

from collections.abc import Sequence
from typing import Any

from snakechat.reporting.page_parts import as_text
from snakechat.workflow.lineage import Lineage

# Their settings follow from the settings of a training.
DERIVED = {"tokenize_sft", "tokenize_reward", "tokenize_dpo", "tokenize_rlhf", "compute_reference"}
DERIVED |= {"tokenize_generations", "compute_teacher"}
# The entry of `datasets` or `models` that a recipe names. Another entry is another name only.
NAMED = {"import_dataset", "split_dataset", "init_model", "fetch_model"}


def comparable_settings(lineage: Lineage, path: str) -> dict[str, Any]:
    """Return the settings of a training without the seed, and the settings of the jobs before it.

    A setting of an earlier job has the rule of the job as a prefix; of a dataset or a base model,
    also its name. Several jobs of a rule have a list of their values.

    Args:
        lineage: The training and all jobs before it.
        path: Path of the training.
    """
    settings = {key: value for key, value in job_settings(lineage[path]) if key != "seed"}
    upstream: dict[str, list[Any]] = {}
    for place in upstream_paths(lineage, path):
        job = lineage[place]
        name = f" {job['name']}" if job["rule"] in NAMED else ""
        if job["rule"] not in DERIVED:
            for key, value in job_settings(job):
                values = upstream.setdefault(f"{job['rule']}{name}: {key}", [])
                if value not in values:
                    values.append(value)
    several = {key: values[0] if len(values) == 1 else values for key, values in upstream.items()}
    return settings | several


def job_settings(job: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the settings of a job of a lineage, and the digest of its external files."""
    files = [("files", job["files"]["digest"][:12])] if job["files"]["number"] else []
    return [*job["settings"].items(), *files]


def upstream_paths(lineage: Lineage, path: str) -> list[str]:
    """Return the paths of the jobs before a job."""
    found = [path]
    for place in found:
        found += [upstream for upstream in lineage[place]["inputs"] if upstream not in found]
    return found[1:]


def setting_differences(columns: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of the settings that differ, "" where a column does not have a setting.

    A setting of a job that only some columns have is not listed: the setting that names the job
    differs. Nor is one that an earlier row has with the same values.
    """
    jobs = [{key.rpartition(": ")[0] for key in column} for column in columns]
    found: dict[tuple[str, ...], tuple[str, list[Any]]] = {}
    for key in dict.fromkeys(key for column in columns for key in column):
        job, _, setting = key.rpartition(": ")
        values = [column.get(key, "") for column in columns]
        if all(job in of_column for of_column in jobs) and len(set(as_texts(values))) > 1:
            found.setdefault((setting, *as_texts(values)), (key, values))
    return dict(found.values())


def as_texts(values: Sequence[Any]) -> tuple[str, ...]:
    """Return settings as text."""
    return tuple(map(as_text, values))
