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

from snakechat.config.loading import project_files
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
        example = "step1_supervised_finetuning/main.py"
        raise InputError(f"{program}: write its path with its folder, such as {example}")
    table = yaml.safe_load((ROOT / "config/deepspeed_chat_flags.yaml").read_text())
    flags = [flag for flag in table if stage in flag["programs"]]
    given = given_flags(stage, words, flags)
    target = PAGES.get(stage, f"{stage}/{{}}").format(name)
    print(f"# snakemake --cores 1 output/{target} --configfile FILE")
    for flag in flags:
        for each in flag["flags"]:
            if given[each] is not None and "key" not in flag:
                print(f"# {each}: {flag['note']['en']}")
    if config := Recipe(stage, name, gpus_of(launcher), given).config(flags):
        print(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), end="")


def gpus_of(launcher: Sequence[str]) -> int:
    """Return the number of GPUs of the launcher `deepspeed`: 8 where it takes all of a node."""
    given = dict(re.findall(r"--num_(gpus|nodes)[ =](\d+)", " ".join(launcher)))
    return int(given.get("gpus", 8)) * int(given.get("nodes", 1)) if launcher else 1


def given_flags(stage: str, words: Sequence[str], flags: Sequence[Flag]) -> dict[str, Any]:
    """Return the values of the flags on the command line, or DeepSpeed-Chat's defaults, or None."""
    parser = argparse.ArgumentParser(
        prog=f"DeepSpeed-Chat's {stage}", usage=argparse.SUPPRESS, add_help=False
    )
    for flag in flags:
        kind: str | None = flag.get("type")
        default: Any = flag.get("default")
        if isinstance(default, dict):
            default = default[stage]
        options: dict[str, Any] = {"type": split_weights if kind == "weights" else parse_value}
        if kind == "switch":
            options = {"action": "store_const", "const": flag.get("is", True)}
        elif kind == "list":
            options = {"nargs": "*"}
        for number, name in enumerate(flag["flags"]):
            options["default"] = default[number] if kind == "factor" else default
            parser.add_argument(name, dest=name, required=flag.get("required", False), **options)
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


class Recipe:
    """The settings of a command: of a stage and the given flags, on a number of GPUs."""

    def __init__(self, stage: str, name: str, gpus: int, given: Mapping[str, Any]) -> None:
        self.stage, self.name, self.gpus, self.given = stage, name, gpus, given
        # Names of the project's datasets and models by their repositories on the Hub; of several
        # with one repository, the first.
        self.known = {"datasets": {"local/jsonfile": "local"}, "models": dict[str, str]()}
        for file in project_files(ROOT):
            config = yaml.safe_load(file.read_text())
            for section, names in self.known.items():
                for each, entry in (config.get(section) or {}).items():
                    names.setdefault(entry.get("hub", ""), each)

    def config(self, flags: Sequence[Flag]) -> dict[str, Any]:
        """Return the config, with new datasets and models. Prints what it makes of some values."""
        # With the preset, what DeepSpeed-Chat's code fixes.
        has_preset = self.stage in ("reward", "rlhf")
        recipe: dict[str, Any] = {"preset": "deepspeed_chat"} if has_preset else {}
        for flag in flags:
            if (value := self.value(flag)) is not None:
                section, (*path, key) = recipe, flag["key"].split(".")
                for each in path:
                    section = section.setdefault(each, {})
                section[key] = section.get(key, []) + value if isinstance(value, list) else value
        # The top level.
        self.entries: dict[str, Any] = recipe.pop("config", {})
        if self.stage not in PAGES:
            self.adjust(recipe)
            self.entries[self.stage] = {"recipes": {self.name: recipe}}
        return self.entries

    def value(self, flag: Flag) -> Any:
        """Return the value of a flag; None without one, or without a key."""
        needed = flag.get("with")
        if "key" not in flag or (needed and not any(map(self.given.get, needed))):
            return None
        values = [self.given[name] for name in flag["flags"]]
        if flag.get("type") == "factor":
            return self.gpus * math.prod(values)
        value = next((value for value in values if value is not None), None)
        return flag["values"].get(value, value) if "values" in flag else value

    def adjust(self, recipe: dict[str, Any]) -> None:
        """Change settings that depend on each other, and the names of models and datasets."""
        if recipe.get("train_base") == "none":
            # Only the adapters are trained.
            rate = "actor_learning_rate" if self.stage == "rlhf" else "learning_rate"
            recipe[rate] = recipe.pop("lora_learning_rate")
        for key in ("model", "actor", "reward"):
            if key in recipe:
                recipe[key] = self.model(recipe[key], "reward" if key == "reward" else "sft")
        recipe["datasets"] = [self.dataset(path, format="instruct") for path in recipe["datasets"]]
        if "ptx" in recipe:
            named = {"name": self.given.get("--unsupervised_dataset_config_name")}
            texts = self.dataset(recipe["ptx"], format="text", split=["sft"], **named)
            length = recipe["max_prompt_length"] + recipe["max_response_length"]
            ptx = {"datasets": [texts], "train_on": "all_tokens", "max_length": length}
            recipe["ptx"] = f"{self.name}-ptx"
            self.entries["sft"] = {"recipes": {recipe["ptx"]: ptx}}
        placement = recipe.pop("placement", {})
        if "offload" in placement:
            stage = placement.get("zero_stage", 0)
            placement["offload"] = "parameters" if stage == 3 else "optimizer" if stage else "none"
        if self.gpus > 1:
            nodes = math.ceil(self.gpus / 8)
            placement["deployment"] = "single_node" if nodes == 1 else "multi_node"
            placement |= {"nodes": nodes, "gpus_per_node": self.gpus // nodes}
        elif placement:
            placement["deployment"] = "single_gpu"
        if placement:
            recipe["placement"] = placement

    def model(self, path: str, section: str) -> str:
        """Return the reference to a model: a base model, or a result of `section`.

        The command of a later stage names the folder of an earlier one, which is a recipe here. A
        new base model gets an entry of `models`.
        """
        is_base, name = self.stage in ("sft", "reward"), self.known["models"].get(path)
        if name:
            return name if is_base else f"models/{name}"
        if is_base:
            self.entries["models"] = {Path(path).name: source_of(path)}
            return Path(path).name
        print(f"# {path}: {section}/{self.name} stands for it")
        return f"{section}/{self.name}"

    def dataset(self, path: str, **form: Any) -> str:
        """Return the name of a dataset; one that is new, or for SFT alone, gets an entry.

        form: Keys of a new one, apart from its source.
        """
        of_sft = path in (self.given.get("--sft_only_data_path") or ())
        entry: dict[str, Any] = {"split": ["sft"]} if of_sft else {}
        name = self.known["datasets"].get(path)
        if not name:
            name = path.rstrip("/").replace("/", "-").lstrip(".-")
            entry = source_of(path) | {key: value for key, value in form.items() if value} | entry
        if entry:
            self.entries.setdefault("datasets", {})[name] = entry
        return name


def source_of(path: str) -> dict[str, str]:
    """Return the source of an entry: a path, or a name on the Hub."""
    is_path = path[0] in "./~" or path.count("/") > 1 or Path(path).exists()
    return {"path": path} if is_path else {"hub": path, "revision": "main"}


if __name__ == "__main__":
    main()
