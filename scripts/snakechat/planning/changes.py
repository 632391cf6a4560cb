"""What changed from one spec of a job to another, in words that a person reads.

Standard library only, but for counting rows.
"""

import json
import re
from pathlib import Path

from snakechat.data.dataset_files import kind_of
from snakechat.workflow.digests import digest
from snakechat.workflow.errors import InputError

# So many files are told one by one.
FEW = 5
# Bytes of a source file whose rows are counted by reading them all, in about a second.
SOON_READ = 1 << 26
# Settings of evaluate_rlhf that are a recipe's.
OF_RECIPES = ("dtype", "max_response_length", "reward_functions")
# Where the settings of rules stand that are called by STAGE/NAME.
SECTIONS = {"prompt_eval": "prompt_eval", "evaluate_tasks": "lm_eval"}
# Texts that need no quotes in YAML: names as of recipes (1.3b) and models.
PLAIN = re.compile(r"(?!(?:true|false|null|yes|no|on|off)$)([a-z][\w./-]*|\d[\d.]*[a-z]+)", re.I)


def changes_of(old, new, facts, source=None):
    """What differs in two specs of a result, apart from the jobs before it."""
    if old["rule"] != new["rule"]:
        return [f"{old['rule']} made it before"]
    changes = changed_settings(old, new) + changed_code(old, new)
    if old["requirements"] != new["requirements"]:
        changes.append("pinned requirements changed")
    changes += changed_files(old, new, facts.get("source_rows", {}), source)
    if "training" in new["settings"]:
        # The spec of a training, which is tried at each ZeRO stage.
        changes += changes_of(*(spec["settings"]["training"] for spec in (old, new)), {})
    return list(dict.fromkeys(changes))


def exchanged_inputs(old, new):
    """Inputs that come from other jobs than before."""
    before, now = (
        {key: name_of(entry) for key, entry in spec["inputs"].items()} for spec in (old, new)
    )
    changes = []
    for key in sorted(before.keys() | now.keys()):
        if key not in before:
            changes.append(f"reads {now[key]} now")
        elif key not in now:
            changes.append(f"no longer reads {before[key]}")
        elif before[key] != now[key]:
            changes.append(f"reads {now[key]} instead of {before[key]}")
    return changes


def changed_settings(old, new):
    """Settings that differ, by their keys in the config."""
    before, now = flat(old["settings"]), flat(new["settings"])
    return [
        f"{config_key(new, key)} {as_written(before, key)} -> {as_written(now, key)}"
        for key in sorted(before.keys() | now.keys())
        # As specs are compared: 1 is 1.0, and is not true.
        if not key.startswith("training.")
        and digest([before.get(key), key in before]) != digest([now.get(key), key in now])
    ]


def flat(settings, prefix=""):
    """Settings by dotted keys. Lists are whole."""
    values = {}
    for key, value in settings.items():
        inner = isinstance(value, dict) and value
        values |= flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return values


def config_key(spec, key):
    """Where the config has a setting of a job: sft.learning_rate for one of train_sft."""
    rule, first = spec["rule"], key.partition(".")[0]
    stage = rule.partition("_")[2]
    if first in ("seed", "template", "on_bad_row", "exact_check", "language"):
        return key
    if rule == "import_dataset" or first == "max_rows":
        return f"datasets.{spec['name']}.{key}"
    if rule == "split_dataset":
        return f"split.{key}"
    if stage == "model":
        return f"models.{spec['name']}.{key}"
    if rule in ("prompt_eval", "rw_eval") and first == "prompts":
        return key
    if rule in SECTIONS:
        return f"{spec['name'].partition('/')[0] if first == 'dtype' else SECTIONS[rule]}.{key}"
    if rule == "evaluate_rlhf" and first not in OF_RECIPES:
        return f"evaluation.{key}"
    return f"{stage}.{key}"


def as_written(settings, key):
    """A setting as it would stand in the config, on one line."""
    if key not in settings:
        return "(not set)"
    value = settings[key]
    if key == "datasets":
        # Each has its weight in a spec; in a recipe 1 is left out.
        value = [name if weight == 1 else {name: weight} for name, weight in value]
    return yaml_line(value)


def yaml_line(value):
    """A value in YAML, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {yaml_line(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(yaml_line, value)) + "]"
    plain = isinstance(value, str) and PLAIN.fullmatch(value)
    return value if plain else json.dumps(value, ensure_ascii=False)


def changed_code(old, new):
    """Our program and modules that differ. Only digests of them are known."""
    before, now = old["code"], new["code"]
    changes = []
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            reward = name.startswith("rewards/")
            use = "used" if reward else "imported"
            what = "changed" if name in now else f"is no longer {use}"
            what = what if name in before else f"is {use} now"
            kind = "reward function" if reward else "module" if "/" in name else "program"
            changes.append(f"{kind} {name} {what}")
    return changes


def changed_files(old, new, rows, source):
    """Files from outside that differ. rows: how many they had; source: the folder they lie in."""
    before, now = old["files"], new["files"]
    # Prompts belong to no job.
    kind = {"import_dataset": "dataset", "init_model": "model"}.get(new["rule"])
    whose = f"{kind} {new['name']}: " if kind else ""

    def describe(name):
        what = "is gone" if name not in now else "changed" if name in before else "is new"
        counts = [rows.get(name)] if name in before else []
        counts += [count_rows(source, name)] if name in now else []
        if None in counts:
            return f"{whose}{name} {what}"
        return f"{whose}{name} {what} ({' -> '.join(f'{n:,}' for n in dict.fromkeys(counts))} rows)"

    names = [name for name in before.keys() | now.keys() if before.get(name) != now.get(name)]
    return few(names, describe, f"{whose}{{}} more files changed")


def count_rows(source, name):
    """Rows of a file of a dataset, as the import counts them; None where that takes long."""
    # Files stand in a spec behind the name of their part.
    path = Path(source or "", name.partition("/")[2])
    try:
        # Only here: Snakemake's own environment may be without the libraries that read rows.
        from snakechat.data.sources import count_rows, read_rows

        if kind_of(path) == "parquet":
            return count_rows(path)
        return sum(1 for _ in read_rows(path)) if path.stat().st_size <= SOON_READ else None
    except (ImportError, InputError, OSError):
        return None


def few(names, describe, rest):
    """What there is to say of the first few names, and how many more there are."""
    names = sorted(names)
    more = [rest.format(f"{len(names) - FEW:,}")] if len(names) > FEW else []
    return [describe(name) for name in names[:FEW]] + more


def name_of(job):
    """train_sft 1.3b: of a spec, or of an entry of its inputs."""
    return f"{job['rule']} {job['name']}"
