"""Describe what changed from one spec of a job to another, one sentence per change.

Standard library only, except for counting rows: Snakemake's environment may lack other libraries.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from snakechat.workflow.digests import digest
from snakechat.workflow.errors import InputError

Spec = Mapping[str, Any]

# Longer lists of files are truncated to this number.
MAX_LISTED = 5
# Largest text file whose rows are counted by reading them, in about a second.
MAX_COUNTED_BYTES = 1 << 26
# Settings of evaluate_rlhf that belong to the recipe, not to the section `evaluation`.
RECIPE_SETTINGS = (
    *("dtype", "max_response_length", "reward_functions"),
    *("reward", "judge", "reward_templates", "datasets"),
)
# Settings that the config has at its top level, and those that it has nowhere.
TOP_LEVEL_KEYS = ("seed", "template", "on_bad_row", "language", "prompt_sets", "llm_judges")
DERIVED = (*("exact_check", "trained_on", "unpaired", "mismatched_max_length", "batches"),)
# Config sections of the rules whose names do not contain them.
STAGES = {
    "compute_teacher": "sft",
    "compute_reference": "dpo",
    "generate_responses": "generations",
    "score_responses": "generations",
}
# Strings that need no quotes in YAML: names of recipes (1.3b) and of models.
UNQUOTED = re.compile(r"(?!(?:true|false|null|yes|no|on|off)$)([a-z][\w./-]*|\d[\d.]*[a-z]+)", re.I)


def job_name(job: Spec) -> str:
    """Return the name of a job (train_sft 1.3b), given its spec or an entry of a spec's inputs."""
    return f"{job['rule']} {job['name']}"


def spec_changes(old: Spec, new: Spec, facts: Mapping[str, Any], source: str = "") -> list[str]:
    """Describe the differences of two specs of a result, except those of its upstream jobs.

    Args:
        old: The spec that the result was made from.
        new: The spec of today.
        facts: The facts of the result's manifest, for the rows that its files had.
        source: Folder of the external files, to count the rows that they have now.
    """
    if old["rule"] != new["rule"]:
        return [f"was made by {old['rule']} before"]
    changes = changed_settings(old, new) + changed_kernels(old, new) + changed_code(old, new)
    changes += changed_pins(old["requirements"], new["requirements"])
    changes += changed_files(old, new, facts.get("source_rows", {}), source)
    if "training" in new["settings"]:
        # compare_zero repeats the training of another spec at each ZeRO stage.
        changes += spec_changes(old["settings"]["training"], new["settings"]["training"], {})
    return list(dict.fromkeys(changes))


def replaced_inputs(old: Spec, new: Spec) -> list[str]:
    """Describe the inputs that come from other jobs than before."""
    old_names, new_names = (
        {key: job_name(entry) for key, entry in spec["inputs"].items()} for spec in (old, new)
    )
    changes = []
    for key in sorted(old_names.keys() | new_names.keys()):
        if key not in old_names:
            changes.append(f"now reads {new_names[key]}")
        elif key not in new_names:
            changes.append(f"no longer reads {old_names[key]}")
        elif old_names[key] != new_names[key]:
            changes.append(f"reads {new_names[key]} instead of {old_names[key]}")
    return changes


def changed_settings(old: Spec, new: Spec) -> list[str]:
    """Describe the settings that differ, by their keys in the config."""
    old_values, new_values = flatten(old["settings"]), flatten(new["settings"])
    changes = []
    for key in sorted(old_values.keys() | new_values.keys()):
        # The spec of a training inside a spec is compared by spec_changes.
        if key.startswith("training."):
            continue
        name = config_key(new, key)
        if key not in old_values:
            changes.append(f"{name} was added: {format_setting(key, new_values[key])}")
        elif key not in new_values:
            changes.append(f"{name} was removed: {format_setting(key, old_values[key])}")
        # By digest, as specs are compared: 1 differs from 1.0 and from true.
        elif digest(old_values[key]) != digest(new_values[key]):
            before, after = (
                format_setting(key, values[key]) for values in (old_values, new_values)
            )
            changes.append(f"{name} changed from {before} to {after}")
    return changes


def changed_kernels(old: Spec, new: Spec) -> list[str]:
    """Describe a change of `deterministic`, which specs have only where it is true."""
    before, after = (bool(spec.get("deterministic")) for spec in (old, new))
    if before == after:
        return []
    return [f"deterministic changed from {format_yaml(before)} to {format_yaml(after)}"]


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted keys; lists and empty mappings are values."""
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            values |= flatten(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values


def config_key(spec: Spec, key: str) -> str:
    """Return where the config sets a setting of a job: sft.learning_rate for one of train_sft."""
    # Settings of a training that compute_reference follows.
    key = key.removeprefix("batches.")
    rule, first = spec["rule"], key.partition(".")[0]
    stage = STAGES.get(rule, rule.partition("_")[2])
    if first in (*TOP_LEVEL_KEYS, *DERIVED):
        return key
    if first == "reward_templates":
        return "template"
    if rule in ("import_dataset", "select_responses", "label_pairs") or first == "max_rows":
        return f"datasets.{spec['name']}.{key}"
    if rule == "split_dataset":
        return f"split.{key}"
    if stage == "model":
        return f"models.{spec['name']}.{key}"
    if rule == "check_gate":
        return f"{spec['name'].partition('/')[0]}.{key}"
    if rule == "prompt_eval":
        return f"{spec['name'].partition('/')[0] if first == 'dtype' else rule}.{key}"
    if rule == "evaluate_rlhf" and first not in RECIPE_SETTINGS:
        return f"evaluation.{key}"
    return f"{stage}.{key}"


def format_setting(key: str, value: Any) -> str:
    """Return a setting as the config would have it, on one line."""
    if key == "datasets":
        # A spec has the weight of each dataset; the config omits weights of 1.
        value = [name if weight == 1 else {name: weight} for name, weight in value]
    return format_yaml(value)


def format_yaml(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, dict):
        items = (f"{key}: {format_yaml(inner)}" for key, inner in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(format_yaml, value)) + "]"
    if isinstance(value, str) and UNQUOTED.fullmatch(value):
        return value
    return json.dumps(value, ensure_ascii=False)


def changed_code(old: Spec, new: Spec) -> list[str]:
    """Describe the program, modules and reward functions that differ; specs have digests only."""
    old_code, new_code = old["code"], new["code"]
    changes = []
    for name in sorted(old_code.keys() | new_code.keys()):
        if old_code.get(name) == new_code.get(name):
            continue
        if name.startswith("rewards/"):
            kind, use = "reward function", "used"
        else:
            kind, use = "module" if "/" in name else "program", "imported"
        if name not in old_code:
            changes.append(f"{kind} {name} is now {use}")
        elif name not in new_code:
            changes.append(f"{kind} {name} is no longer {use}")
        else:
            changes.append(f"{kind} {name} changed")
    return changes


def changed_pins(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Describe the pinned libraries that differ."""

    def describe(name: str) -> str:
        if name not in old:
            return f"library {name} {new[name]} is now used"
        if name not in new:
            return f"library {name} is no longer used"
        return f"library {name} changed from {old[name]} to {new[name]}"

    names = [name for name in old.keys() | new.keys() if old.get(name) != new.get(name)]
    return summarize(names, describe, "{} more libraries changed")


def changed_files(old: Spec, new: Spec, old_rows: Mapping[str, int], source: str) -> list[str]:
    """Describe the external files that differ.

    Args:
        old, new: The specs.
        old_rows: Rows that the files had, by name.
        source: Folder of the files.
    """
    old_files, new_files = old["files"], new["files"]
    # The prompt files of the evaluations belong to no dataset or model.
    kind = {"import_dataset": "dataset", "init_model": "model"}.get(new["rule"])
    owner = f"{kind} {new['name']}: " if kind else ""

    def describe(name: str) -> str:
        if name not in new_files:
            change, counts = "was deleted", [old_rows.get(name)]
        elif name not in old_files:
            change, counts = "was added", [count_rows(source, name)]
        else:
            change, counts = "changed", [old_rows.get(name), count_rows(source, name)]
        if None in counts:
            return f"{owner}{name} {change}"
        rows = " -> ".join(f"{count:,}" for count in dict.fromkeys(counts))
        return f"{owner}{name} {change} ({rows} rows)"

    names = old_files.keys() | new_files.keys()
    changed = [name for name in names if old_files.get(name) != new_files.get(name)]
    return summarize(changed, describe, f"{owner}{{}} more files changed")


def count_rows(source: str, name: str) -> int | None:
    """Return the rows of a dataset file as the import counts them; None if that takes long.

    Args:
        source: Folder of the dataset.
        name: Name of the file in the spec: the split, a slash, the path in the folder.
    """
    if not source:
        return None
    path = Path(source, name.partition("/")[2])
    try:
        # Snakemake's own environment may lack the libraries that read rows.
        from snakechat.data.sources import read_rows

        if path.stat().st_size > MAX_COUNTED_BYTES:
            return None
        return sum(1 for _ in read_rows(path))
    except (ImportError, InputError, OSError):
        return None


def summarize(names: Iterable[str], describe: Callable[[str], str], remainder: str) -> list[str]:
    """Describe the first few names, and count the others.

    Args:
        names: In any order; the descriptions are sorted by name.
        describe: Returns the description of a name.
        remainder: Format of the last line, for the number of the other names.
    """
    names = sorted(names)
    lines = [describe(name) for name in names[:MAX_LISTED]]
    if len(names) > MAX_LISTED:
        lines.append(remainder.format(f"{len(names) - MAX_LISTED:,}"))
    return lines
