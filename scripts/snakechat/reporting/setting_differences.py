"""The settings in which trainings differ, each one once: their own, and those of upstream jobs.

Recipes call their SFT model, reward model and the like by different names. Upstream jobs are
matched by their role instead: the SFT model, the SFT model of the reward model, and so on.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from snakechat.workflow.lineage import Lineage

# Their settings follow from those of a training.
DERIVED = {"tokenize_sft", "tokenize_reward", "tokenize_dpo", "tokenize_rlhf", "compute_reference"}
DERIVED |= {"tokenize_generations"}
# The entry of `datasets` or `models` that a recipe names. Another entry is another name only.
NAMED = {"import_dataset", "split_dataset", "init_model", "fetch_model"}
# The models behind these jobs have roles of their own.
BRANCHES = ("train_reward", "select_responses")
# The jobs of each round of iterated DPO.
ROUNDS = {"generate_responses", "score_responses", "select_responses", "train_dpo"}


class UpstreamJob(NamedTuple):
    """A job before a training."""

    path: str
    name: str
    settings: dict[str, Any]


# Upstream jobs by role: several datasets or reward models share a role.
Roles = dict[str, list[UpstreamJob]]


class Difference(NamedTuple):
    """A setting in which trainings differ.

    Attributes:
        setting: Its name; that of an upstream job has the role of the job as a prefix.
        also: Roles of further upstream jobs with these values of this setting.
        values: The value of each training, "" where it has none.
    """

    setting: str
    also: list[str]
    values: list[Any]


def comparable_settings(job: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a job of a lineage, and the digest of its external files."""
    settings = dict(job["settings"])
    if job["files"]["number"]:
        settings["files"] = job["files"]["digest"][:12]
    return settings


def upstream_roles(lineage: Lineage, path: str) -> Roles:
    """Return the jobs before a training by role, the nearest ones first.

    The role of a job is its rule: `train_sft`. It follows a job that has models of its own:
    `train_reward > train_sft`. Jobs of a round of DPO follow the later rounds: `train_dpo >
    train_dpo` is the DPO before the DPO.
    """
    roles: dict[str, dict[str, UpstreamJob]] = {}
    # Path, the branch that it is in, and the number of later rounds of DPO.
    queue = [(upstream, "", 0) for upstream in lineage[path]["inputs"]]
    seen = set(queue)
    for place, branch, rounds in queue:
        job = lineage[place]
        rule = job["rule"]
        if rule not in DERIVED:
            levels = [branch] if branch and rule.startswith("train_") else []
            levels += ["train_dpo"] * (rounds if rule in ROUNDS else 0) + [rule]
            entry = UpstreamJob(place, job["name"], comparable_settings(job))
            roles.setdefault(" > ".join(levels), {})[place] = entry
        if not branch and rule in BRANCHES:
            branch = rule
        rounds += rule == "train_dpo"
        for upstream in job["inputs"]:
            state = upstream, branch, rounds
            if state not in seen:
                seen.add(state)
                queue.append(state)
    return {role: list(jobs.values()) for role, jobs in roles.items()}


def setting_differences(
    own: Sequence[dict[str, Any]], upstream: Sequence[Roles]
) -> list[Difference]:
    """Return the settings that differ.

    A job in a role that a training does not have is not listed: the setting that names it differs.
    Nor are the names of recipes in upstream jobs, whose settings are compared themselves.

    Args:
        own: Settings of each training, without the seed.
        upstream: The jobs before each training.
    """
    found: dict[tuple[str, tuple[str, ...]], Difference] = {}
    for key, values in differing_values(own).items():
        found[key, as_texts(values)] = Difference(key, [], values)
    compared: set[tuple[str, ...]] = set()
    for role, jobs in matched_jobs(upstream).items():
        # One job may have several roles.
        paths = tuple(job.path for job in jobs)
        if paths in compared:
            continue
        compared.add(paths)
        for key, values in differing_values([job.settings for job in jobs]).items():
            if key == "model" and are_of_one_stage(values):
                continue
            place = key, as_texts(values)
            if place in found:
                found[place].also.append(role)
            else:
                found[place] = Difference(f"{role}: {key}", [], values)
    return list(found.values())


def differing_values(columns: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of the keys whose values differ, "" where a column does not have a key."""
    keys = dict.fromkeys(key for column in columns for key in column)
    values = {key: [column.get(key, "") for column in columns] for key in keys}
    differing = {key: each for key, each in values.items() if len(set(as_texts(each))) > 1}
    if "reward" in differing:
        # They are those of the reward models, which have other names.
        differing.pop("reward_templates", None)
    return differing


def matched_jobs(upstream: Sequence[Roles]) -> dict[str, list[UpstreamJob]]:
    """Return a job of each training by the role that they share.

    Of several jobs in a role, those with the same name are compared, and the role has the name.
    """
    matched = {}
    for role in upstream[0]:
        candidates = [roles.get(role, []) for roles in upstream]
        if role not in NAMED and all(len(jobs) == 1 for jobs in candidates):
            matched[role] = [job for [job] in candidates]
            continue
        by_name = [{job.name: job for job in jobs} for jobs in candidates]
        for name in by_name[0]:
            if all(name in jobs for jobs in by_name):
                matched[f"{role} {name}"] = [jobs[name] for jobs in by_name]
    return matched


def as_text(value: Any) -> str:
    """Return a setting as text: strings as they are, all others as JSON."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def as_texts(values: Sequence[Any]) -> tuple[str, ...]:
    """Return settings as text."""
    return tuple(map(as_text, values))


def are_of_one_stage(models: Sequence[str]) -> bool:
    """Return whether all models are those of recipes of the same stage (sft/NAME, dpo/NAME)."""
    stages = {model.partition("/")[0] if "/" in model else None for model in models}
    return len(stages) == 1 and None not in stages
