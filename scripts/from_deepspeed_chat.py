"""Print the recipe of a command of DeepSpeed-Chat, as YAML.

    python scripts/from_deepspeed_chat.py [--name NAME] [--gpus N] PROGRAM FLAGS...

PROGRAM is one of DeepSpeed-Chat's three main.py for training (four with DPO), prompt_eval.py or
rw_eval.py; a launcher before it (`deepspeed --num_gpus 8 main.py ...`) gives the number of GPUs.
The recipe has the settings in which the command differs from the defaults of config.yaml; comments
name the flags that need no key, or have none, and why. config/deepspeed_chat_flags.yaml has the
flags.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from snakechat.config.loading import FILES
from snakechat.workflow.errors import InputError, one_line_errors

ROOT = Path(__file__).resolve().parents[1]
# Part of the path of a program, by stage.
PROGRAMS = {
    "step1": "sft",
    "step2_reward": "reward",
    "step2_dpo": "dpo",
    "step3": "rlhf",
    "prompt_eval.py": "prompt_eval",
    "rw_eval.py": "rw_eval",
}
# In whose pages the models of prompt_eval.py and rw_eval.py are.
PAGES = {"prompt_eval": "output/prompt_eval/sft", "rw_eval": "output/rw_eval/reward"}
# Settings that DeepSpeed-Chat's code fixes, and that differ from the defaults of the stage.
FIXED: dict[str, dict[str, Any]] = {
    "sft": {},
    "reward": {"preset": "deepspeed_chat"},
    "dpo": {},
    "rlhf": {"preset": "deepspeed_chat"},
}
TYPES = {"number": float, "factor": int, "text": str, "list": str}

Flag = dict[str, Any]


@one_line_errors()
def main() -> None:
    """Print the recipe."""
    parser = argparse.ArgumentParser(usage=(__doc__ or "").split("\n\n")[1].strip())
    parser.add_argument("--name", default="mine", help="name of the recipe")
    parser.add_argument("--gpus", type=int, help="number of GPUs")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    launcher, program, words = split_command(arguments.command)
    if program is None:
        parser.error("name a program of DeepSpeed-Chat, such as step3_rlhf_finetuning/main.py")
    table = yaml.safe_load((ROOT / "config/deepspeed_chat_flags.yaml").read_text())
    stage = stage_of(program, words, table)
    flags = [flag for flag in table if stage in flag["programs"]]
    given = given_flags(stage, words, flags)
    gpus = arguments.gpus or gpus_of(launcher)
    recipe = Recipe(stage, arguments.name, gpus, flags, given)
    config = recipe.config()
    target = f"{PAGES[stage]}/{arguments.name}.html" if stage in PAGES else ""
    print(f"# snakemake --cores 1 {target or f'output/{stage}/{arguments.name}'} --configfile FILE")
    for line in [*remarks(flags, given), *recipe.remarks]:
        print(f"# {line}")
    if config:
        print(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), end="")


def split_command(command: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
    """Return the words before the program, the program, and its own words."""
    for position, word in enumerate(command):
        if word.endswith(".py"):
            return list(command[:position]), word, list(command[position + 1 :])
    return list(command), None, []


def stage_of(program: str, words: Sequence[str], table: Sequence[Flag]) -> str:
    """Return the stage of a program: by its path, or by a flag that no other program has.

    Raises:
        InputError: The path and the flags do not determine the stage.
    """
    for part, stage in PROGRAMS.items():
        if part in program:
            return stage
    names = {word.partition("=")[0] for word in words if word.startswith("--")}
    trained = {"sft", "reward", "dpo", "rlhf"}
    stages = set(trained)
    for name in names:
        having = {
            stage
            for flag in table
            if name in flag["flags"]
            for stage in flag["programs"]
            if stage in trained
        }
        stages &= having or trained
    if len(stages) != 1:
        raise InputError(
            f"{program}: its flags fit {', '.join(sorted(stages)) or 'no stage'}; write its path"
            " with its folder, such as step1_supervised_finetuning/main.py"
        )
    return stages.pop()


def gpus_of(launcher: Sequence[str]) -> int:
    """Return the number of GPUs of the launcher `deepspeed`: 8 where it takes all of a node."""
    if not launcher:
        return 1
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--num_gpus", type=int, default=8)
    parser.add_argument("--num_nodes", type=int, default=1)
    options, _ = parser.parse_known_args(list(launcher))
    return options.num_gpus * options.num_nodes


def given_flags(stage: str, words: Sequence[str], flags: Sequence[Flag]) -> dict[str, Any]:
    """Return the values of the flags on the command line."""
    parser = argparse.ArgumentParser(
        prog=f"DeepSpeed-Chat's {stage}", usage=argparse.SUPPRESS, add_help=False
    )
    for flag in flags:
        kind = flag.get("type", "text")
        for name in flag["flags"]:
            options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
            if kind == "switch":
                parser.add_argument(name, action="store_true", **options)
            else:
                if kind == "list":
                    options["nargs"] = "*"
                parser.add_argument(name, type=TYPES[kind], **options)
    given = vars(parser.parse_args(list(words)))
    for flag in flags:
        if flag.get("required") and not given.keys() & set(flag["flags"]):
            raise InputError(f"the command has no {flag['flags'][0]}, which {stage} needs")
    return given


def remarks(flags: Sequence[Flag], given: dict[str, Any]) -> list[str]:
    """Return a line for each given flag whose value is in no key."""
    return [
        f"{name}: {flag['note']['en']}"
        for flag in flags
        for name in flag["flags"]
        if name in given and not flag.get("key")
    ]


class Recipe:
    """The settings of a command.

    Args:
        stage: Stage of the program.
        name: Name of the recipe.
        gpus: Number of GPUs.
        flags: Flags of the program.
        given: Values of those on the command line.
    """

    def __init__(
        self, stage: str, name: str, gpus: int, flags: Sequence[Flag], given: dict[str, Any]
    ) -> None:
        self.stage = stage
        self.name = name
        self.gpus = gpus
        self.flags = flags
        self.given = given
        self.known: dict[str, Any] = {"datasets": {}, "models": {}}
        for file in FILES:
            sections = yaml.safe_load((ROOT / file).read_text())
            for section, entries in self.known.items():
                entries.update(sections.get(section) or {})
        self.defaults = yaml.safe_load((ROOT / "config.yaml").read_text())
        self.top: dict[str, Any] = {}
        self.remarks: list[str] = []

    def config(self) -> dict[str, Any]:
        """Return the config, with new datasets and models."""
        settings: dict[str, Any] = dict(FIXED.get(self.stage, {}))
        placement: dict[str, Any] = {}
        for flag in self.flags:
            key = flag.get("key")
            if key is None:
                continue
            given = any(name in self.given for name in flag["flags"])
            value = self.value(flag)
            room, _, rest = key.partition(".")
            if room == "placement":
                if given:
                    placement[rest] = value
            elif room == "config":
                if value is not None:
                    self.set_top(rest, value)
            elif key == "datasets":
                settings.setdefault(key, []).extend(value or [])
            elif value is not None:
                settings[key] = value
        if self.stage in PAGES:
            return self.top
        self.adjust(settings, placement)
        settings["datasets"] = self.datasets(settings["datasets"])
        defaults = self.defaults[self.stage]["defaults"]
        preset = self.defaults[self.stage]["presets"].get(settings.get("preset"), {})
        recipe = {
            key: value
            for key, value in settings.items()
            if key == "preset" or value != {**defaults, **preset}.get(key)
        }
        if placement:
            recipe["placement"] = placement
        stages = {self.stage: {"recipes": {self.name: recipe}}}
        return {**self.top, **stages}

    def value(self, flag: Flag) -> Any:
        """Return the value of a flag, given or by default; None without one."""
        default: Any = flag.get("default")
        if isinstance(default, dict):
            default = default[self.stage]
        kind = flag.get("type", "text")
        if kind == "factor":
            factors = [
                self.given.get(name, one) for name, one in zip(flag["flags"], default, strict=True)
            ]
            return math.prod(factors) * self.gpus
        given = [self.given[name] for name in flag["flags"] if name in self.given]
        value = given[0] if given else default
        if kind == "switch":
            return flag.get("is", True) if given else None
        if kind == "number" and value is not None and float(value).is_integer():
            value = int(value)
        return flag.get("values", {}).get(value, value) if kind == "text" else value

    def set_top(self, key: str, value: Any) -> None:
        """Set a key of the top level, if it differs from its default."""
        if key == "split.weights":
            weights = [float(weight) for weight in value.split(",")]
            numbers = [int(weight) if weight.is_integer() else weight for weight in weights]
            value = dict(zip(("sft", "reward", "rlhf"), numbers, strict=True))
        elif key == "prompt_sets":
            value = [value]
        *path, last = key.split(".")
        default, place = self.defaults, self.top
        for part in path:
            default = default[part]
        if value != default[last]:
            for part in path:
                place = place.setdefault(part, {})
            place[last] = value

    def adjust(self, settings: dict[str, Any], placement: dict[str, Any]) -> None:
        """Settings that depend on each other, and names of models."""
        rate = "actor_learning_rate" if self.stage == "rlhf" else "learning_rate"
        if not settings["lora_rank"]:
            settings.pop("lora_learning_rate")
            settings.pop("train_base", None)
        elif "train_base" in settings:
            # Only the adapters are trained.
            settings[rate] = settings.pop("lora_learning_rate")
        else:
            settings["train_base"] = "embeddings_and_norms"
        if not settings.get("critic_lora_rank"):
            settings.pop("critic_lora_learning_rate", None)
        if settings.get("max_steps") == 0:
            settings.pop("max_steps")
        if "--print_answers" not in self.given:
            settings.pop("log_responses_steps", None)
        if placement.get("offload"):
            stage = placement.get("zero_stage", 0)
            placement["offload"] = "parameters" if stage == 3 else "optimizer" if stage else "none"
        if self.gpus > 1:
            nodes = math.ceil(self.gpus / 8)
            placement["deployment"] = "single_node" if nodes == 1 else "multi_node"
            if self.gpus not in (8, 64):
                placement |= {"nodes": nodes, "gpus_per_node": self.gpus // nodes}
        elif placement:
            placement["deployment"] = "single_gpu"
        if self.stage == "dpo":
            settings["model"] = self.model(settings["model"], "sft")
        elif "model" in settings:
            settings["model"] = self.model(settings["model"], "models")
        if self.stage == "rlhf":
            settings["actor"] = self.model(settings["actor"], "sft")
            settings["reward"] = self.model(settings["reward"], "reward")
            if settings.get("ptx"):
                self.add_ptx(settings)
            else:
                settings.pop("ptx_coef")

    def model(self, path: str, section: str) -> str:
        """Return the reference to a model: the result of `section`, or a base model.

        The command of a later stage names the folder of an earlier one, which is a recipe here. A
        new base model gets an entry of `models`.
        """
        for name, entry in self.known["models"].items():
            if path == entry.get("hub"):
                return name if self.stage in ("sft", "reward") else f"models/{name}"
        if section != "models":
            self.remarks.append(f"{path}: {section}/{self.name} stands for it")
            return f"{section}/{self.name}"
        local = path.startswith((".", "~")) or path.count("/") != 1 or Path(path).exists()
        name = Path(path).name
        entry = {"path": path} if local else {"hub": path, "revision": "main"}
        self.top.setdefault("models", {})[name] = entry
        return name

    def datasets(self, paths: Sequence[str]) -> list[str]:
        """Return the names of datasets, new ones with an entry."""
        names = []
        alone = self.given.get("--sft_only_data_path", [])
        for path in paths:
            name = next(
                (
                    name
                    for name, entry in self.known["datasets"].items()
                    if entry.get("hub") == path
                ),
                None,
            )
            if name is None or path in alone:
                entry = dict(self.known["datasets"].get(name, self.new_dataset(path)))
                if path in alone:
                    entry["split"] = ["sft"]
                name = name or path.rstrip("/").replace("/", "-").lstrip(".-")
                if entry != self.known["datasets"].get(name):
                    self.top.setdefault("datasets", {})[name] = entry
            names.append(name)
        return names

    def new_dataset(self, path: str) -> dict[str, Any]:
        """Return the entry of a dataset that config/deepspeed_chat.yaml does not have."""
        if path == "local/jsonfile":
            return {"path": "data", "format": "plain", "train": "train.json", "eval": "eval.json"}
        source = {"path": path} if Path(path).exists() else {"hub": path, "revision": "main"}
        return {**source, "format": "instruct"}

    def add_ptx(self, settings: dict[str, Any]) -> None:
        """A recipe of `sft` for the texts of the pretraining loss."""
        path, name = settings["ptx"], f"{self.name}-ptx"
        entry: dict[str, Any] = {"hub": path, "revision": "main", "format": "text"}
        if config := self.given.get("--unsupervised_dataset_config_name"):
            entry["name"] = config
        self.top.setdefault("datasets", {})[name] = {**entry, "split": ["sft"]}
        length = settings["max_prompt_length"] + settings["max_response_length"]
        recipe = {"datasets": [name], "train_on": "all_tokens", "max_length": length}
        self.top["sft"] = {"recipes": {name: recipe}}
        settings["ptx"] = name


if __name__ == "__main__":
    main()
