"""Print the recipe of a command of DeepSpeed-Chat, as YAML.

    python scripts/from_deepspeed_chat.py [--name NAME] PROGRAM FLAGS...

PROGRAM is one of DeepSpeed-Chat's three main.py for training (four with DPO), prompt_eval.py or
rw_eval.py; a launcher before it (`deepspeed --num_gpus 8 main.py ...`) gives the number of GPUs.
The recipe has the settings of the command; comments name the flags that need no key, or have none,
and why. config/deepspeed_chat_flags.yaml has the flags.
"""

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from snakechat.config.loading import project_files, update
from snakechat.workflow.errors import InputError, one_line_errors

ROOT = Path(__file__).resolve().parents[1]
# Stages, by a part of the path of a program, or by a flag of the program that is named main.py.
PROGRAMS = {
    "step1": "sft",
    "step2_reward": "reward",
    "step2_dpo": "dpo",
    "step3": "rlhf",
    "prompt_eval.py": "prompt_eval",
    "rw_eval.py": "rw_eval",
    "--actor_model_name_or_path": "rlhf",
}
# The page of a program that trains nothing.
PAGES = {"prompt_eval": "prompt_eval/sft/{}.html", "rw_eval": "rw_eval/reward/{}.html"}

Flag = dict[str, Any]


@one_line_errors()
def main() -> None:
    """Print the recipe."""
    parser = argparse.ArgumentParser(usage=(__doc__ or "").split("\n\n")[1].strip())
    parser.add_argument("--name", default="mine", help="name of the recipe")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    name, command = arguments.name, arguments.command
    start = next((place for place, word in enumerate(command) if word.endswith(".py")), None)
    if start is None:
        parser.error("name a program of DeepSpeed-Chat, such as step3_rlhf_finetuning/main.py")
    launcher, program, words = command[:start], command[start], command[start + 1 :]
    named = [program, *(word.partition("=")[0] for word in words if word.startswith("--"))]
    stage = next((PROGRAMS[part] for part in PROGRAMS if part in " ".join(named)), None)
    if stage is None:
        raise InputError(
            f"{program}: write its path with its folder, such as"
            " step1_supervised_finetuning/main.py"
        )
    table = yaml.safe_load((ROOT / "config/deepspeed_chat_flags.yaml").read_text())
    flags = [flag for flag in table if stage in flag["programs"]]
    given = given_flags(stage, words, flags)
    target = PAGES.get(stage, f"{stage}/{{}}").format(name)
    print(f"# snakemake --cores 1 output/{target} --configfile FILE")
    for flag in flags:
        for each in flag["flags"]:
            if given[each] is not None and "key" not in flag:
                print(f"# {each}: {flag['note']['en']}")
    # With the preset, what DeepSpeed-Chat's code fixes.
    recipe: dict[str, Any] = {"preset": "deepspeed_chat"} if stage in ("reward", "rlhf") else {}
    gpus = gpus_of(" ".join(launcher))
    for flag in flags:
        if (value := value_of(flag, given, gpus)) is not None:
            section, (*path, key) = recipe, flag["key"].split(".")
            for each in path:
                section = section.setdefault(each, {})
            section[key] = section.get(key, []) + value if isinstance(value, list) else value
    config: dict[str, Any] = recipe.pop("config", {})
    if stage not in PAGES:
        name_sources(config, recipe, stage, name, given)
        adjust(recipe, stage, gpus)
        config[stage] = {"recipes": {name: recipe}}
    if config:
        print(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), end="")


def gpus_of(launcher: str) -> int:
    """Return the number of GPUs of the launcher `deepspeed`: 8 where it takes all of a node.

    Python alone starts one process.
    """
    given = dict(re.findall(r"--num_(gpus|nodes)[ =](\d+)", launcher))
    return int(given.get("gpus", 8)) * int(given.get("nodes", 1)) if "deepspeed" in launcher else 1


def given_flags(stage: str, words: Sequence[str], flags: Sequence[Flag]) -> dict[str, Any]:
    """Return the values of the flags on the command line, or DeepSpeed-Chat's defaults, or None."""
    parser = argparse.ArgumentParser(
        prog=f"DeepSpeed-Chat's {stage}", usage=argparse.SUPPRESS, add_help=False
    )
    for flag in flags:
        names, kind = flag["flags"], flag.get("type", "value")
        default: Any = flag.get("default")
        if isinstance(default, dict):
            default = default[stage]
        by_kind: dict[str, dict[str, Any]] = {
            "switch": {"action": "store_const", "const": flag.get("is", True)},
            "list": {"nargs": "*"},
            "weights": {"type": split_weights},
        }
        options = by_kind.get(kind, {"type": parse_value}) | {
            "required": flag.get("required", False)
        }
        defaults = default if kind == "factor" else [default] * len(names)
        for name, value in zip(names, defaults, strict=True):
            parser.add_argument(name, dest=name, default=value, **options)
    return vars(parser.parse_args(words))


def parse_value(text: str) -> int | float | str:
    """Return a number if a text is one, or else the text."""
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


def split_weights(text: str) -> dict[str, Any]:
    """Return the weights of the phases in a text such as 2,4,4."""
    return dict(zip(("sft", "reward", "rlhf"), map(parse_value, text.split(",")), strict=True))


def value_of(flag: Flag, given: Mapping[str, Any], gpus: int) -> Any:
    """Return the value of a flag's key; None without one, or without a key."""
    needed = flag.get("with")
    if "key" not in flag or (needed and not any(map(given.get, needed))):
        return None
    values = [given[name] for name in flag["flags"]]
    if flag.get("type") == "factor":
        return gpus * math.prod(values)
    value = next((value for value in values if value is not None), None)
    return flag["values"].get(value, value) if "values" in flag else value


def name_sources(
    config: dict[str, Any], recipe: dict[str, Any], stage: str, name: str, given: Mapping[str, Any]
) -> None:
    """Replace the paths of a recipe by names of models and datasets; new ones get an entry.

    Prints which paths are results of earlier stages.
    """
    project: dict[str, Any] = {}
    for file in project_files(ROOT):
        update(project, yaml.safe_load(file.read_text()))
    # Names of the project by repositories on the Hub; of several with one, the first.
    datasets, models = (
        {entry.get("hub"): each for each, entry in reversed(project[section].items())}
        for section in ("datasets", "models")
    )
    datasets["local/jsonfile"] = "local"

    def dataset(path: str, form: dict[str, Any], selection: dict[str, Any]) -> str:
        """Return the name of a dataset. A new one, or one with a selection, gets an entry."""
        dataset_name = datasets.get(path) or path.rstrip("/").replace("/", "-").lstrip(".-")
        entry = selection if path in datasets else source_of(path) | form | selection
        if entry:
            config.setdefault("datasets", {})[dataset_name] = entry
        return dataset_name

    for key in [key for key in ("model", "actor", "reward") if key in recipe]:
        path = recipe[key]
        known = models.get(path)
        if stage in ("sft", "reward"):
            recipe[key] = known or Path(path).name
            if not known:
                config["models"] = {recipe[key]: source_of(path)}
        elif known:
            recipe[key] = f"models/{known}"
        else:
            # The command of a later stage names the folder of an earlier one, a recipe here.
            recipe[key] = f"{'reward' if key == 'reward' else 'sft'}/{name}"
            print(f"# {path}: {recipe[key]} stands for it")
    of_sft = given.get("--sft_only_data_path") or ()
    recipe["datasets"] = [
        dataset(path, {"format": "instruct"}, {"split": ["sft"]} if path in of_sft else {})
        for path in recipe["datasets"]
    ]
    if "ptx" in recipe:
        named = given.get("--unsupervised_dataset_config_name")
        form = {"format": "text", "split": ["sft"], **({"name": named} if named else {})}
        length = recipe["max_prompt_length"] + recipe["max_response_length"]
        texts = dataset(recipe["ptx"], form, {})
        ptx = {"datasets": [texts], "train_on": "all_tokens", "max_length": length}
        recipe["ptx"] = f"{name}-ptx"
        config["sft"] = {"recipes": {recipe["ptx"]: ptx}}


def source_of(path: str) -> dict[str, str]:
    """Return the source of an entry: a path, or a name on the Hub."""
    is_path = path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).exists()
    return {"path": path} if is_path else {"hub": path, "revision": "main"}


def adjust(recipe: dict[str, Any], stage: str, gpus: int) -> None:
    """Change settings that depend on each other."""
    if recipe.get("train_base") == "none":
        # Only the adapters are trained.
        rate = "actor_learning_rate" if stage == "rlhf" else "learning_rate"
        recipe[rate] = recipe.pop("lora_learning_rate")
    placement = recipe.pop("placement", {})
    if "offload" in placement:
        by_stage = {0: "none", 3: "parameters"}
        placement["offload"] = by_stage.get(placement.get("zero_stage", 0), "optimizer")
    if gpus > 1:
        nodes = math.ceil(gpus / 8)
        placement["deployment"] = "single_node" if nodes == 1 else "multi_node"
        placement |= {"nodes": nodes, "gpus_per_node": gpus // nodes}
    elif placement:
        placement["deployment"] = "single_gpu"
    if placement:
        recipe["placement"] = placement


if __name__ == "__main__":
    main()
