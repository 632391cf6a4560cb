"""Print the recipe of a command of DeepSpeed-Chat, as YAML.

    python scripts/from_deepspeed_chat.py [--name NAME] PROGRAM FLAGS...

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

from snakechat.config.loading import FILES, update
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
PAGES = {"prompt_eval": "prompt_eval/sft", "rw_eval": "rw_eval/reward"}

Flag = dict[str, Any]


@one_line_errors()
def main() -> None:
    """Print the recipe."""
    parser = argparse.ArgumentParser(usage=(__doc__ or "").split("\n\n")[1].strip())
    parser.add_argument("--name", default="mine", help="name of the recipe")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    command: list[str] = arguments.command
    start = next((place for place, word in enumerate(command) if word.endswith(".py")), None)
    if start is None:
        parser.error("name a program of DeepSpeed-Chat, such as step3_rlhf_finetuning/main.py")
    launcher, program, words = command[:start], command[start], command[start + 1 :]
    table = yaml.safe_load((ROOT / "config/deepspeed_chat_flags.yaml").read_text())
    stage = stage_of(program, words, table)
    flags = [flag for flag in table if stage in flag["programs"]]
    given = given_flags(stage, words, flags)
    recipe = Recipe(stage, arguments.name, gpus_of(launcher), given)
    config = recipe.config(flags)
    page = f"{PAGES[stage]}/{arguments.name}.html" if stage in PAGES else ""
    print(f"# snakemake --cores 1 output/{page or f'{stage}/{arguments.name}'} --configfile FILE")
    notes = [
        f"{name}: {flag['note']['en']}"
        for flag in flags
        for name in flag["flags"]
        if name in given and not flag.get("key")
    ]
    for line in [*notes, *recipe.remarks]:
        print(f"# {line}")
    if config:
        print(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), end="")


def stage_of(program: str, words: Sequence[str], table: Sequence[Flag]) -> str:
    """Return the stage of a program: by its path, or by flags that no other program has.

    Raises:
        InputError: The path and the flags do not determine the stage.
    """
    for part, stage in PROGRAMS.items():
        if part in program:
            return stage
    stages = set(PROGRAMS.values()) - PAGES.keys()
    for name in (word.partition("=")[0] for word in words):
        having = {each for flag in table if name in flag["flags"] for each in flag["programs"]}
        # A flag that no training has is an error of the parser.
        stages &= having - PAGES.keys() or stages
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
        kind, default = flag.get("type"), default_of(flag, stage)
        options: dict[str, Any] = {"required": flag.get("required", False)}
        if kind == "switch":
            options["action"] = "store_true"
        elif kind == "list":
            options["nargs"] = "*"
        elif kind == "factor":
            options["type"] = int
        elif isinstance(default, int | float):
            options["type"] = float
        for name in flag["flags"]:
            parser.add_argument(name, dest=name, default=argparse.SUPPRESS, **options)
    return vars(parser.parse_args(list(words)))


def default_of(flag: Flag, stage: str) -> Any:
    """Return DeepSpeed-Chat's default of a flag in the program of a stage."""
    default = flag.get("default")
    return default[stage] if isinstance(default, dict) else default


class Recipe:
    """The settings of a command.

    Args:
        stage: Stage of the program.
        name: Name of the recipe.
        gpus: Number of GPUs.
        given: Values of the flags on the command line.

    Attributes:
        top: The config, apart from the recipe.
        remarks: Comments on values.
    """

    def __init__(self, stage: str, name: str, gpus: int, given: dict[str, Any]) -> None:
        self.stage, self.name, self.gpus, self.given = stage, name, gpus, given
        files = [yaml.safe_load((ROOT / file).read_text()) for file in FILES]
        self.defaults = files[0]
        # The entries of the project; of several with one name on the Hub, the first.
        self.known = {
            section: [item for file in files for item in (file.get(section) or {}).items()]
            for section in ("datasets", "models")
        }
        self.top: dict[str, Any] = {}
        self.remarks: list[str] = []

    def config(self, flags: Sequence[Flag]) -> dict[str, Any]:
        """Return the config, with new datasets and models.

        flags: Flags of the program.
        """
        settings: dict[str, Any] = {"datasets": []}
        placement: dict[str, Any] = {}
        for flag in (flag for flag in flags if "key" in flag):
            room, _, key = flag["key"].rpartition(".")
            value = self.value(flag)
            if room == "placement":
                if not self.given.keys().isdisjoint(flag["flags"]):
                    placement[key] = value
            elif value is None:
                continue
            elif room:
                self.set_top([*room.split(".")[1:], key], value)
            elif key == "datasets":
                settings[key] += map(self.dataset, value)
            else:
                settings[key] = value
        if self.stage in PAGES:
            return self.top
        stage = self.defaults[self.stage]
        defaults = stage["defaults"]
        if self.stage in ("reward", "rlhf"):
            # What DeepSpeed-Chat's code fixes.
            settings = {"preset": "deepspeed_chat", **settings}
            defaults = {**defaults, **stage["presets"]["deepspeed_chat"], "preset": None}
        self.adjust(settings)
        recipe = {key: value for key, value in settings.items() if value != defaults.get(key)}
        if placement := self.placement(placement):
            recipe["placement"] = placement
        return {**self.top, self.stage: {"recipes": {self.name: recipe}}}

    def value(self, flag: Flag) -> Any:
        """Return the value of a flag, given or by default; None without one."""
        default = default_of(flag, self.stage)
        given = [self.given[name] for name in flag["flags"] if name in self.given]
        if flag.get("type") == "switch":
            return flag.get("is", True) if given else None
        if flag.get("type") == "factor":
            factors = zip(flag["flags"], default, strict=True)
            return math.prod(self.given.get(name, one) for name, one in factors) * self.gpus
        value = given[0] if given else default
        if isinstance(value, int | float):
            return as_number(value)
        return flag["values"].get(value, value) if "values" in flag else value

    def set_top(self, path: list[str], value: Any) -> None:
        """Set a key of the top level, if it differs from its default."""
        if path[-1] == "weights":
            weights = map(as_number, value.split(","))
            value = dict(zip(("sft", "reward", "rlhf"), weights, strict=True))
        elif path[-1] == "prompt_sets":
            value = [value]
        default, change = self.defaults, value
        for key in path:
            default = default[key]
        if value != default:
            for key in reversed(path):
                change = {key: change}
            update(self.top, change)

    def adjust(self, settings: dict[str, Any]) -> None:
        """Change settings that depend on each other, and names of models."""
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
        sections = {"actor": "sft", "reward": "reward"}
        sections["model"] = "sft" if self.stage == "dpo" else "models"
        for key, section in sections.items():
            if key in settings:
                settings[key] = self.model(settings[key], section)
        if "ptx" in settings:
            self.add_ptx(settings)
        else:
            settings.pop("ptx_coef", None)

    def placement(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Return the placement on the GPUs, given the keys that flags change."""
        if "offload" in changes:
            stage = changes.get("zero_stage", 0)
            changes["offload"] = "parameters" if stage == 3 else "optimizer" if stage else "none"
        if self.gpus > 1:
            nodes = math.ceil(self.gpus / 8)
            changes["deployment"] = "single_node" if nodes == 1 else "multi_node"
            if self.gpus not in (8, 64):
                changes |= {"nodes": nodes, "gpus_per_node": self.gpus // nodes}
        elif changes:
            changes["deployment"] = "single_gpu"
        return changes

    def model(self, path: str, section: str) -> str:
        """Return the reference to a model: the result of `section`, or a base model.

        The command of a later stage names the folder of an earlier one, which is a recipe here. A
        new base model gets an entry of `models`.
        """
        name, _ = self.entry("models", path)
        if name:
            return name if self.stage in ("sft", "reward") else f"models/{name}"
        if section != "models":
            self.remarks.append(f"{path}: {section}/{self.name} stands for it")
            return f"{section}/{self.name}"
        name, is_on_hub = Path(path).name, path.count("/") == 1 and path[0] not in ".~"
        self.top.setdefault("models", {})[name] = source_of(path, is_on_hub)
        return name

    def dataset(self, path: str) -> str:
        """Return the name of a dataset; one that the project does not have gets an entry."""
        name, entry = self.entry("datasets", path)
        if not name:
            name, entry = path.rstrip("/").replace("/", "-").lstrip(".-"), new_dataset(path)
        if path in self.given.get("--sft_only_data_path", ()):
            entry = {**entry, "split": ["sft"]}
        if (name, entry) not in self.known["datasets"]:
            self.top.setdefault("datasets", {})[name] = entry
        return name

    def entry(self, section: str, path: str) -> tuple[str, dict[str, Any]]:
        """Return the project's name and entry of a repository of the Hub, empty without one."""
        found = (item for item in self.known[section] if item[1].get("hub") == path)
        return next(found, ("", {}))

    def add_ptx(self, settings: dict[str, Any]) -> None:
        """Add a recipe of `sft` for the texts of the pretraining loss."""
        name = f"{self.name}-ptx"
        entry = {**source_of(settings["ptx"], True), "format": "text", "split": ["sft"]}
        if config := self.given.get("--unsupervised_dataset_config_name"):
            entry["name"] = config
        self.top.setdefault("datasets", {})[name] = entry
        length = settings["max_prompt_length"] + settings["max_response_length"]
        recipe = {"datasets": [name], "train_on": "all_tokens", "max_length": length}
        self.top["sft"] = {"recipes": {name: recipe}}
        settings["ptx"] = name


def source_of(path: str, is_on_hub: bool) -> dict[str, str]:
    """Return the source of an entry: a folder if it exists, or a name on the Hub."""
    is_local = Path(path).exists() or not is_on_hub
    return {"path": path} if is_local else {"hub": path, "revision": "main"}


def new_dataset(path: str) -> dict[str, Any]:
    """Return the entry of a dataset that the project does not have."""
    if path == "local/jsonfile":
        return {"path": "data", "format": "plain", "train": "train.json", "eval": "eval.json"}
    return {**source_of(path, True), "format": "instruct"}


def as_number(text: str | float) -> int | float:
    """Return a number, without its fraction if it has none."""
    number = float(text)
    return int(number) if number.is_integer() else number


if __name__ == "__main__":
    main()
