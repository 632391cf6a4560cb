"""Recipes with all their settings, what the names in the config refer to, and its errors."""

import difflib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from snakechat.config.rlhf import (
    JUDGES,
    in_order,
    input_names,
    judge_names,
    weighted_references,
)
from snakechat.config.sections import (
    Deployment,
    DpoRecipe,
    GenerationRecipe,
    PlacementChanges,
    RewardRecipe,
    RlhfRecipe,
    SftRecipe,
    judge_settings,
)
from snakechat.config.settings import NAME_END, RefersTo, Settings
from snakechat.data.formats import PROMPTS
from snakechat.workflow.errors import InputError, warn
from snakechat.workflow.manifest import STORE
from snakechat.workflow.processes import SERIAL
from snakechat.workflow.store import is_writable

RECIPES: dict[str, type[Settings]] = {
    "sft": SftRecipe,
    "reward": RewardRecipe,
    "dpo": DpoRecipe,
    "rlhf": RlhfRecipe,
    "generations": GenerationRecipe,
}
# The phase whose rows each reads. As in DeepSpeed-Chat, DPO has the rows of the reward phase.
PHASES = {stage: stage for stage in RECIPES} | {"dpo": "reward", "generations": "rlhf"}
# Those that train.
STAGES = ("sft", "reward", "dpo", "rlhf")
# Settings that may be null; with another one, they are the same if they are null or equal to it.
SAME_AS = (
    ("lora_learning_rate", "learning_rate"),
    ("lora_learning_rate", "actor_learning_rate"),
    ("critic_lora_learning_rate", "critic_learning_rate"),
    ("clip_range_high", "clip_range"),
    ("lora_target_modules", ""),
    ("train_only", ""),
)
# Keys that programs do not receive, besides those that name entries of the config.
NOT_SETTINGS = {"datasets", "placement", "gate", "evaluation"}
# As settings.Name; a recipe of a sweep is named after its values.
RECIPE_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,199}}{NAME_END}")
# Comparisons also take versions in the store, NAME@KEY.
COMPARISON_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.@-]{{0,199}}{NAME_END}")

# The rule and the name of a job: ("train_sft", "tiny"), ("draw_report", "sft/tiny").
JobId = tuple[str, str]


class Reference(NamedTuple):
    """A recipe, or an entry of `models`, `llm_judges` or `benchmarks`."""

    section: str
    name: str


class ConfigError(InputError):
    """A mistake in the config; the message is one line for the user."""


def available(name: str, names: Iterable[str]) -> str:
    """Return the names that exist, in parentheses, for an error about one that does not."""
    similar = difflib.get_close_matches(name, names, n=1)
    guess = f"did you mean {similar[0]}? " if similar else ""
    return f"({guess}available: {', '.join(sorted(names)) or 'none'})"


_adapter = cache(TypeAdapter)


def checked(values: Any, declared: Any, *place: str) -> Any:
    """Return values of the config, or those at a place in it, as values of a type.

    Raises:
        ConfigError: A key or value is invalid, or values do not fit each other; the message names
            the key.
    """
    try:
        converted = _adapter(declared).validate_python(values)
    except ValidationError as error:
        path, message = _describe(error, values)
        raise ConfigError(f"config: {'.'.join([*place, *path])}: {message}") from None
    return _adapter(declared).dump_python(converted, mode="json", exclude_unset=True)


def _describe(error: ValidationError, values: Any) -> tuple[list[str], str]:
    """Return the path of the most relevant problem, and a message of one line.

    Where a value may have several forms, those count that it resembles most: the problem is deepest
    inside of it, and the fewest keys are unknown. A message about several keys starts with the one
    that it is about.
    """
    problems: dict[tuple[int, bool, int], list[tuple[list[Any], Any]]] = {}
    for each in error.errors(include_url=False):
        path, unknown = _path(each, values), each["type"] == "unknown_key"
        rank = len(path), unknown, -each.get("ctx", {}).get("number", 0)
        problems.setdefault(rank, []).append((path, each))
    relevant = problems[max(problems)]
    path, first = relevant[0]
    # The comment of a pattern says in words what it allows (snakechat.config.settings.Name).
    texts = [
        re.sub(r"^String should match pattern '\(\?#(.*?)\).*", r"expected \1", each["msg"])
        for at, each in relevant
        if at == path
    ]
    message = " or ".join(dict.fromkeys(text.removeprefix("Value error, ") for text in texts))
    shown = [text if text.isprintable() else repr(text) for text in map(str, path)]
    if first["type"] == "missing":
        message = "this key is required"
    elif about := re.match(r"(\w+): (.*)", message):
        shown, message = [*shown, about[1]], about[2]
    # Users may have written a key of an API there.
    elif first["type"] != "unknown_key" and path[-1:] not in (["url"], ["key_env"]):
        message += f", found {first['input']!r}"
    return shown, message


def _path(problem: Mapping[str, Any], value: Any) -> list[Any]:
    """Return the keys and indices that lead to a problem, without the types in its location."""
    path = []
    for part in problem["loc"]:
        # An item that is missing has an index, too.
        is_index = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_index or (isinstance(value, dict) and part in value):
            value = value[part]
            path.append(part)
    if problem["type"] == "unknown_key":
        return [*path, problem["ctx"]["key"]]
    # The index of a missing item, such as of a pair, is not a key that a user writes.
    is_key = problem["type"] == "missing" and isinstance(problem["loc"][-1], str)
    return [*path, problem["loc"][-1]] if is_key else path


class Config:
    """The values of the config by the names that recipes use.

    All methods raise ConfigError for a name that the config does not have.

    Attributes:
        values: The content of config.yaml with what users put on top.
        root: The folder of the Snakefile. Paths in the config are relative to it.
        sources: The folder of the code: of rewards/ and the locked requirements.
        swept: The sweep that makes a recipe, and the settings that it sets.
    """

    def __init__(self, values: dict[str, Any], root: Path, sources: Path) -> None:
        self.values, self.root, self.sources = values, root, sources
        self.swept: dict[Reference, tuple[str, dict[str, Any]]] = {}
        # Planning asks for the settings of a recipe dozens of times. They are not changed.
        self.recipe = cache(self._recipe_of)
        # What each key of a recipe names, by the text in the config.
        self.references = cache(self._references_of)

    def entry(self, section: str, name: str, used_by: str) -> Any:
        """Return an entry of a section such as `datasets` or `rlhf.presets`.

        used_by: The key that names the entry, for the error.
        """
        entries = self.values
        for key in section.split("."):
            entries = entries[key]
        if name not in entries:
            hint = (
                f"{section} needs an entry with the path of your files, or their hub"
                if section in ("datasets", "models")
                else "correct the name, or add the --configfile that has it"
            )
            raise ConfigError(
                f"config: {used_by} names {name!r}, which is not under {section}"
                f" {available(name, entries)}: {hint}"
            )
        return entries[name]

    def _recipe_of(self, stage: str, name: str) -> dict[str, Any]:
        """Return the settings of a recipe, or of a benchmark.

        A recipe overrides its preset, which overrides the defaults of the stage. The placement is
        complete, with the keys of the deployment that it names.
        """
        if stage != "benchmarks":
            own = self.entry(f"{stage}.recipes", name, "the target")
            return self.settings_of(stage, own, f"{stage}.recipes.{name}")
        keys = self.entry(stage, name, "the target")
        # Its placement defaults to the one of RLHF.
        placement = self._placement_of(
            f"benchmarks.{name}.placement", self.values["rlhf"]["defaults"], keys
        )
        return {"seed": self.values["seed"], **keys, "placement": placement}

    def settings_of(self, stage: str, own: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Return the settings of a recipe with its own keys, which has a place in the config."""
        section, preset = self.values[stage], {}
        defaults = {"seed": self.values["seed"], **section["defaults"]}
        name = own.get("preset", defaults.get("preset"))
        # Another value, or a stage without presets, is an error when the keys are checked.
        if isinstance(name, str) and "presets" in section:
            preset = self.entry(f"{stage}.presets", name, f"{place}.preset")
            if "preset" in preset:
                raise ConfigError(f"config: {stage}.presets.{name}.preset: a preset has none")
        settings: dict[str, Any] = checked({**defaults, **preset, **own}, RECIPES[stage], place)
        settings.pop("preset", None)
        if settings.get("algorithm") == "distill" and "reward" not in {*preset, *own}:
            # It trains without scores: no default is built for it.
            settings["reward"] = None
        settings["placement"] = self._placement_of(f"{place}.placement", defaults, preset, own)
        return settings

    def _placement_of(self, place: str, *layers: Mapping[str, Any]) -> dict[str, Any]:
        """Return a complete placement, in which each layer overrides those before it."""
        placement: dict[str, Any] = {}
        for keys in layers:
            changes = checked(keys.get("placement", {}), str | PlacementChanges, place)
            changes = {"deployment": changes} if isinstance(changes, str) else changes
            if "deployment" in changes:
                placement = self.entry("deployments", changes.pop("deployment"), place)
            placement = {**placement, **changes}
        if (named := self.values["deployment"]) is not None:
            placement = self.entry("deployments", named, "deployment")
        return checked(placement, Deployment, place)

    @property
    def places(self) -> dict[Reference, str]:
        """The place in the config of all recipes and benchmarks, which have placements."""
        places = {
            Reference(stage, name): f"{stage}.recipes.{name}"
            for stage in RECIPES
            for name in self.values[stage]["recipes"]
        }
        names = self.values["benchmarks"]
        return places | {Reference("benchmarks", name): f"benchmarks.{name}" for name in names}

    def program_settings(self, stage: str, name: str) -> dict[str, Any]:
        """Return the settings of a recipe as its program receives them, without names of inputs."""
        inputs = {key for key, _ in RECIPES[stage].notes(RefersTo)} | NOT_SETTINGS
        settings = {
            key: value
            for key, value in self.used_settings(stage, name).items()
            if key not in inputs
        }
        if stage in ("rlhf", "generations"):
            settings |= self.reward_settings(stage, name, "reward")
        return settings

    def reward_settings(self, stage: str, name: str, *keys: str) -> dict[str, Any]:
        """Return the settings of what scores responses, by which programs find their inputs.

        keys: `reward`; for an evaluation, also `judge`.
        """
        settings: dict[str, Any] = {"reward_templates": {}}
        for key in keys:
            value = self.recipe(stage, name)[key]
            inputs, weights = input_names(key, value), weighted_references(value)
            settings[key] = in_order({inputs.get(text, text): weights[text] for text in weights})
            for input_name, model in self.reward_models(name, key, stage).items():
                # The tokenizer that our training saved has the template of its rows.
                if model.section == "models" or "command" in self.recipe(*model):
                    settings["reward_templates"][input_name] = self.template(*model)
        references = [settings[key] for key in keys]
        compares = self.values["evaluation"]["llm_judge"]
        # An evaluation also asks an LLM judge to compare responses.
        if "judge" in keys and compares:
            references.append(f"{JUDGES}/{compares}")
        judges = judge_names(*references)
        return settings | {"llm_judges": judge_settings(self.values[JUDGES], judges)}

    def used_settings(self, stage: str, name: str) -> dict[str, Any]:
        """Return the settings that the training of a recipe reads, each value in one spelling."""
        settings = self.recipe(stage, name)
        unread = RECIPES[stage].without_effect(settings)
        used = {key: value for key, value in settings.items() if key not in unread}
        for key, general in SAME_AS:
            if general in unread and used.get(key):
                # The rate of adapters, which are all that is trained.
                used[general] = used[key]
            if used.get(key) in (None, used.get(general)):
                used.pop(key, None)
        if used.get("save_dtype") == used["dtype"]:
            used["save_dtype"] = None
        return used

    def _references_of(self, stage: str, name: str) -> dict[str, dict[str, Reference]]:
        found: dict[str, dict[str, Reference]] = {}
        for key, allowed in RECIPES[stage].notes(RefersTo):
            used_by, value = f"{stage}.recipes.{name}.{key}", self.recipe(stage, name)[key]
            texts = value if key in ("compare_with", "benchmarks") else weighted_references(value)
            found[key] = {text: self._reference(text, allowed, used_by) for text in texts}
        return found

    def _reference(self, text: str, allowed: RefersTo, used_by: str) -> Reference:
        """Return the recipe or model that a key of a recipe names."""
        section, slash, name = text.partition("/")
        if allowed.plain and not (slash and allowed.sections):
            section, name = allowed.plain, text
        elif section not in allowed.sections:
            forms = " or ".join(f"{key}/NAME" for key in allowed.sections)
            # Names on the Hub have a slash, too.
            hint = "" if section in self.values else ": models needs an entry with the path or hub"
            raise ConfigError(f"config: {used_by} names {text!r}, expected {forms}{hint}")
        self.entry(f"{section}.recipes" if section in RECIPES else section, name, used_by)
        return Reference(section, name)

    def origin(self, stage: str, name: str) -> Reference:
        """Return the initial model of a recipe; of a recipe of generations, its generator."""
        key = "actor" if stage == "rlhf" else "model"
        return next(iter(self.references(stage, name)[key].values()))

    def records_job(self, dataset: str) -> JobId:
        """Return the job that makes the records of a dataset."""
        settings = self.values["datasets"][dataset]
        if "generations" in settings:
            return "select_responses", dataset
        return ("label_pairs" if "label" in settings else "import_dataset"), dataset

    def generated_by(self, dataset: str) -> str | None:
        """Return the recipe of generations whose responses a dataset has or labels, if any."""
        datasets = self.values["datasets"]
        source: dict[str, str] = datasets.get(datasets[dataset].get("label", dataset), {})
        return source.get("generations")

    def reward_models(self, name: str, key: str, stage: str = "rlhf") -> dict[str, Reference]:
        """Return what the reward models of a recipe are, by the inputs of jobs.

        LLM judges are omitted. key: `reward` or `judge`. stage: rlhf or generations.
        """
        inputs = input_names(key, self.recipe(stage, name)[key])
        return {inputs[text]: self.references(stage, name)[key][text] for text in inputs}

    def model_job(self, model: Reference) -> JobId:
        """Return the job that makes the model of a recipe, or a model of `models`."""
        if model.section == "models":
            entry = self.entry("models", model.name, "the target")
            return ("init_model" if "init" in entry else "fetch_model"), model.name
        return f"train_{model.section}", model.name

    def tokenizer_model(self, stage: str, name: str) -> JobId:
        """Return the job that makes the base model whose tokenizer a recipe uses.

        stage: "models" for a model of `models` itself.
        """
        while stage != "models":
            stage, name = self.origin(stage, name)
        return self.model_job(Reference(stage, name))

    def template(self, stage: str, name: str) -> str:
        """Return the prompt template of the base model of a recipe: auto, dialogue or chat.

        A tokenizer that the build trains has no chat template: `auto` is `dialogue`.
        """
        _, model = self.tokenizer_model(stage, name)
        entry = self.values["models"][model]
        template: str = entry.get("template", self.values["template"])
        return "dialogue" if "init" in entry and template == "auto" else template

    def selection(self, dataset: str) -> dict[str, Any]:
        """Return what the config says of the files of a dataset: train and eval, name, split."""
        settings = self.values["datasets"][dataset]
        found = {key: settings[key] for key in ("train", "eval", "name") if key in settings}
        split = settings.get("split", ())
        named = {key: split[key] for key in ("train", "eval") if key in split}
        return found | ({"split": named} if named else {})

    def split_weights(self, dataset: str) -> dict[str, float]:
        """Return the weight of each phase in the split of a dataset, as the smallest integers.

        2, 4, 4 and 1, 2, 2 are the same split.
        """
        settings, defaults = self.values["datasets"][dataset], self.values["split"]["weights"]
        split = settings.get("split")
        if isinstance(split, dict) and not split.keys() & defaults.keys():
            split = split.get("phases")
        if not split:
            has_pairs = "label" in settings or settings.get("select") == "best_and_worst"
            default = ["rlhf"] if settings.get("format") == PROMPTS else defaults
            split = ["reward"] if has_pairs else ["sft"] if "generations" in settings else default
        if isinstance(split, list):
            split = {phase: phase in split for phase in defaults}
        # As they are written: 0.1 is a tenth, and not the binary number next to it.
        exact = {phase: Fraction(str(float(weight))) for phase, weight in split.items()}
        scale = math.lcm(*(weight.denominator for weight in exact.values()))
        unit = math.gcd(*(int(weight * scale) for weight in exact.values())) or 1
        return {phase: float(weight * scale / unit) for phase, weight in exact.items()}

    @cached_property
    def stores(self) -> list[Path]:
        """The stores whose results are used; new ones go to the first, which can be written."""
        store = Path(os.path.expanduser(self.values["store"]))
        if store == STORE or is_writable(store):
            return list(dict.fromkeys((store, STORE)))
        warn(f"{store} is read-only: its results are used, and new ones go to {STORE}")
        return [STORE, store]

    def local_path(self, path: str | Path) -> Path:
        """Return a path of the config, relative if it is in the working directory."""
        whole = os.path.normpath(Path.cwd() / self.root / os.path.expanduser(path))
        relative = os.path.relpath(whole)
        return Path(whole if relative.startswith("..") else relative)

    def source_of(self, section: str, name: str) -> Path | None:
        """Return the `path` of a dataset or a model (section); None if it has none."""
        path = self.values[section][name].get("path")
        return None if path is None else self.local_path(path)

    def check_effects(self, stage: str, name: str, own: Mapping[str, Any]) -> None:
        """Raise ConfigError if one of some keys of a recipe, or of its placement, has no effect.

        Its preset and the defaults of the stage may have settings that only other recipes use.
        """
        settings, place = self.recipe(stage, name), f"{stage}.recipes.{name}"
        placement = own.get("placement")
        changes = placement if isinstance(placement, dict) else {}
        for declared, path, keys, defaults in (
            (RECIPES[stage], place, own, self.values[stage]["defaults"]),
            (PlacementChanges, f"{place}.placement", changes, vars(SERIAL)),
        ):
            unread = declared.without_effect(settings)
            for key in keys:
                default = defaults.get(key)
                if key in unread and keys[key] not in (default, None):
                    raise ConfigError(
                        f"config: {path}.{key}: {keys[key]} has no effect {unread[key]}: remove it,"
                        f" or set {key}: {json.dumps(default)}"
                    )

    def compared_recipes(self, stage: str, names: str) -> list[str]:
        """Return the recipes of the comparison A-vs-B.

        A sweep stands for all its recipes. NAME@KEY is a version in the store, of a recipe that the
        config may have no longer (snakechat.workflow.links). A name of `logs` stands for itself.
        """
        recipes: dict[str, Any] = {}
        for name in names.split("-vs-"):
            swept = {
                recipe.name: settings
                for recipe, (sweep, settings) in self.swept.items()
                if (recipe.section, sweep) == (stage, name)
            }
            recipes |= swept or {name: {}}
        for recipe, settings in recipes.items():
            if recipe not in self.values["logs"] and "@" not in recipe:
                self.check_effects(stage, recipe, settings)
        if len(recipes) < 2:
            raise ConfigError(
                f"output/compare/{stage}/{names}: name two recipes, A-vs-B, or a sweep"
            )
        return list(recipes)
