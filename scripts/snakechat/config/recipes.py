"""Recipes with all their settings, and what the names in the config refer to."""

import itertools
import json
import math
import os
import re
from collections.abc import Mapping
from fractions import Fraction
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from snakechat.config.references import (
    JUDGES,
    Reference,
    in_order,
    input_names,
    judge_names,
    weighted_references,
)
from snakechat.config.schema import RECIPES, ConfigError, Layer, available, checked, checked_recipe
from snakechat.config.sections import PlacementChanges, judge_settings
from snakechat.config.settings import NAME_END, RefersTo
from snakechat.data.formats import PROMPTS
from snakechat.workflow.errors import warn
from snakechat.workflow.links import is_version
from snakechat.workflow.manifest import STORE
from snakechat.workflow.processes import SERIAL
from snakechat.workflow.store import is_writable

STAGES = ("sft", "reward", "dpo", "rlhf")
# Rates that may be written for the adapters alone: the settings of all weights, and of adapters.
RATES = (
    ("learning_rate", "lora_learning_rate"),
    ("actor_learning_rate", "lora_learning_rate"),
    ("critic_learning_rate", "critic_lora_learning_rate"),
)
# As settings.Name; a recipe of a sweep is named after its values.
RECIPE_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,199}}{NAME_END}")
# Comparisons also take versions in the store, NAME@KEY.
COMPARISON_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.@-]{{0,199}}{NAME_END}")

# The rule and the name of a job: ("train_sft", "tiny"), ("draw_report", "sft/tiny").
JobId = tuple[str, str]


def _new_entry(section: str) -> str:
    """Return how a section gets an entry for files; an empty text for other sections."""
    if section not in ("datasets", "models"):
        return ""
    return f": {section} needs an entry with the path of your files, or their name on the Hub (hub)"


class Config:
    """The values of the config by the names that recipes use.

    Args:
        values: The content of config.yaml with what users put on top.
        root: The folder of the Snakefile. Paths in the config are relative to it.
        sources: The folder of the code: of rewards/ and the locked requirements.

    All methods raise ConfigError for a name that the config does not have.
    """

    def __init__(self, values: dict[str, Any], root: Path, sources: Path) -> None:
        self.values = values
        self.root, self.sources = root, sources
        # Planning asks for the settings of a recipe dozens of times.
        self._recipe = cache(self._settings_of)
        # What each key of a recipe names, by the text in the config.
        self.references = cache(self._references_of)

    def entry(self, section: str, name: str, used_by: str) -> Any:
        """Return an entry of a section such as `datasets` or `rlhf.presets`.

        Args:
            section: Dotted path of the section.
            name: Name of the entry.
            used_by: The key that names the entry, for the error.
        """
        entries = self.values
        for key in section.split("."):
            entries = entries[key]
        if name not in entries:
            raise ConfigError(
                f"config: {used_by} names {name!r}, which is not under {section}"
                f" {available(name, entries)}{_new_entry(section)}"
            )
        return entries[name]

    def recipe(self, stage: str, name: str) -> dict[str, Any]:
        """Return the settings of a recipe.

        A recipe overrides its preset, which overrides the defaults of the stage. The placement is
        complete, with the keys of the deployment that it names.
        """
        return dict(self._recipe(stage, name))

    def _settings_of(self, stage: str, name: str) -> dict[str, Any]:
        if stage == "benchmarks":
            return self._benchmark(name)
        recipes = self.values[stage]["recipes"]
        if name not in recipes:
            raise ConfigError(
                f"config: {stage}.recipes has no {name!r} {available(name, recipes)}: correct the"
                " name, or add the --configfile that has the recipe"
            )
        layers = self.layers(stage, f"{stage}.recipes.{name}", recipes[name])
        settings = checked_recipe(stage, layers)
        settings.pop("preset", None)
        if settings.get("algorithm") == "distill" and "reward" not in {
            key for layer in layers[1:] for key in layer.keys
        }:
            # It trains without scores: no default is built for it.
            settings["reward"] = None
        settings["placement"] = self._placement_of(layers)
        return settings

    def _benchmark(self, name: str) -> dict[str, Any]:
        """Return the keys of a benchmark; its placement defaults to the one of RLHF."""
        keys = self.entry("benchmarks", name, "the target")
        defaults = Layer("rlhf.defaults", self.values["rlhf"]["defaults"])
        placement = self._placement_of([defaults, Layer(f"benchmarks.{name}", keys)])
        return {"seed": self.values["seed"], **keys, "placement": placement}

    def layers(self, stage: str, place: str, own: Mapping[str, Any]) -> list[Layer]:
        """Return the defaults of a stage, the preset and the keys of a recipe at a place."""
        defaults = {"seed": self.values["seed"], **self.values[stage]["defaults"]}
        layers = [Layer(f"{stage}.defaults", defaults)]
        preset = own.get("preset", defaults.get("preset"))
        # Another value, or a stage without presets, is an error when the layers are checked.
        if isinstance(preset, str) and "presets" in self.values[stage]:
            keys = self.entry(f"{stage}.presets", preset, f"{place}.preset")
            if "preset" in keys:
                raise ConfigError(f"config: {stage}.presets.{preset}.preset: a preset has none")
            layers.append(Layer(f"{stage}.presets.{preset}", keys))
        return [*layers, Layer(place, own)]

    def _placement_of(self, layers: list[Layer]) -> dict[str, Any]:
        """Return the placement of a recipe with the keys of the deployment that it names."""
        placement: dict[str, Any] = {}
        for place, keys in layers:
            changes = checked(keys.get("placement", {}), str | PlacementChanges, place, "placement")
            # The name of a deployment, or keys that change one.
            changes = {"deployment": changes} if isinstance(changes, str) else changes
            if "deployment" in changes:
                name = changes.pop("deployment")
                placement = self.entry("deployments", name, f"{place}.placement")
            placement = {**placement, **changes}
        if self.values["deployment"] is not None:
            placement = self.entry("deployments", self.values["deployment"], "deployment")
        return placement

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
        """Return the settings of a recipe as its program receives them.

        They are fields of SftSettings, RewardSettings, DpoSettings, RlhfSettings or
        GenerationSettings: those that the training reads. No name of an input is among them.
        """
        settings = self.used_settings(stage, name)
        for key in (*RECIPES[stage].references(), "datasets", "placement", "gate", "evaluation"):
            settings.pop(key, None)
        if stage in ("rlhf", "generations"):
            settings |= self.reward_settings(stage, name, "reward")
        return settings

    def reward_settings(self, stage: str, name: str, *keys: str) -> dict[str, Any]:
        """Return the settings of what scores responses, by which programs find their inputs.

        keys: `reward`, and `judge` where an evaluation reads it.
        """
        settings: dict[str, Any] = {"reward_templates": {}}
        for key in keys:
            value = self.recipe(stage, name)[key]
            inputs, weights = input_names(key, value), weighted_references(value)
            settings[key] = in_order(
                {inputs.get(text, text): each for text, each in weights.items()}
            )
            for input_name, model in self.reward_models(name, key, stage).items():
                # The tokenizer that our training saved has the template of its rows.
                if model.section == "models" or "command" in self.recipe(*model):
                    settings["reward_templates"][input_name] = self.template(*model)
        judges = judge_names(*(settings[key] for key in keys))
        return settings | {"llm_judges": judge_settings(self.values[JUDGES], judges)}

    def used_settings(self, stage: str, name: str) -> dict[str, Any]:
        """Return the settings that the training of a recipe reads, each value in one spelling."""
        settings = self.recipe(stage, name)
        unread = RECIPES[stage].without_effect(settings)
        used = {key: value for key, value in settings.items() if key not in unread}
        for general, of_adapters in RATES:
            if general in unread and used.get(of_adapters):
                used[general] = used[of_adapters]
            if general in used and used.get(of_adapters) in (None, used[general]):
                used.pop(of_adapters, None)
        for key in ("lora_target_modules", "train_only"):
            if used.get(key) is None:
                used.pop(key, None)
        if used.get("clip_range_high") in (None, used.get("clip_range")):
            used.pop("clip_range_high", None)
        if used.get("save_dtype") == used["dtype"]:
            used["save_dtype"] = None
        return used

    def blend(self, stage: str, name: str) -> list[list[Any]]:
        """Return [dataset, weight] of each dataset of a recipe."""
        blend: list[list[Any]] = self.recipe(stage, name)["datasets"]
        return blend

    def _references_of(self, stage: str, name: str) -> dict[str, dict[str, Reference]]:
        recipe = self.recipe(stage, name)
        found: dict[str, dict[str, Reference]] = {}
        for key, allowed in RECIPES[stage].references().items():
            used_by, value = f"{stage}.recipes.{name}.{key}", recipe[key]
            is_list = key in ("compare_with", "benchmarks")
            texts = value if is_list else weighted_references(value)
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
            hint = _new_entry("models") if slash and section not in self.values else ""
            raise ConfigError(f"config: {used_by} names {text!r}, expected {forms}{hint}")
        has_recipes = section not in ("models", "benchmarks", JUDGES)
        path = f"{section}.recipes" if has_recipes else section
        self.entry(path, name, used_by)
        return Reference(section, name)

    def origin(self, stage: str, name: str) -> Reference:
        """Return the initial model of a recipe; of a recipe of generations, its generator."""
        key = "actor" if stage == "rlhf" else "model"
        (model,) = self.references(stage, name)[key].values()
        return model

    def base_model(self, stage: str, name: str) -> JobId:
        """Return the job that makes the initial model of a recipe."""
        return self.model_job(self.origin(stage, name))

    def records_job(self, dataset: str) -> JobId:
        """Return the job that makes the records of a dataset."""
        settings = self.values["datasets"][dataset]
        if "generations" in settings:
            return "select_responses", dataset
        return ("label_pairs" if "label" in settings else "import_dataset"), dataset

    def generated_by(self, dataset: str) -> str | None:
        """Return the recipe of generations whose responses a dataset has or labels, if any."""
        datasets = self.values["datasets"]
        source = datasets.get(datasets[dataset].get("label", dataset), {})
        recipe: str | None = source.get("generations")
        return recipe

    def pretrained_model(self, name: str) -> JobId:
        """Return the job that fetches or initializes a model of `models`."""
        origin = self.entry("models", name, "the target")
        return ("init_model" if "init" in origin else "fetch_model"), name

    def teacher(self, name: str) -> Reference | None:
        """Return the teacher of a recipe of rlhf, if it has one."""
        return next(iter(self.references("rlhf", name)["teacher"].values()), None)

    def reward_models(self, name: str, key: str, stage: str = "rlhf") -> dict[str, Reference]:
        """Return what the reward models of a recipe are, by the inputs of jobs.

        LLM judges are omitted. key: `reward` or `judge`. stage: rlhf or generations.
        """
        models, value = self.references(stage, name)[key], self.recipe(stage, name)[key]
        return {input_name: models[text] for text, input_name in input_names(key, value).items()}

    def llm_judges(self, name: str) -> list[str]:
        """Return the LLM judges that the evaluation of a recipe of RLHF asks."""
        recipe = self.recipe("rlhf", name)
        names = judge_names(recipe["reward"], recipe["judge"])
        judge = self.values["evaluation"]["llm_judge"]
        return list(dict.fromkeys([*names, *([judge] if judge else [])]))

    def model_job(self, model: Reference) -> JobId:
        """Return the job that makes the model of a recipe, or a model of `models`."""
        if model.section == "models":
            return self.pretrained_model(model.name)
        return f"train_{model.section}", model.name

    def recipe_chain(self, stage: str, name: str) -> list[Reference]:
        """Return the recipes of all stages that trained a model, from first to last.

        stage: "models" for a model of `models`, which none of them trained.
        """
        if stage == "models":
            return []
        return [*self.recipe_chain(*self.origin(stage, name)), Reference(stage, name)]

    def tokenizer_model(self, stage: str, name: str) -> JobId:
        """Return the job that makes the base model whose tokenizer a recipe uses.

        stage: "models" for a model of `models` itself.
        """
        while stage != "models":
            stage, name = self.origin(stage, name)
        return self.pretrained_model(name)

    def template(self, stage: str, name: str) -> str:
        """Return the prompt template of the base model of a recipe: auto, dialogue or chat.

        A tokenizer that the build trains has no chat template: `auto` is `dialogue`.
        """
        _, model = self.tokenizer_model(stage, name)
        entry = self.values["models"][model]
        template: str = entry.get("template", self.values["template"])
        is_trained = "train_on" in entry.get("tokenizer", {})
        return "dialogue" if is_trained and template == "auto" else template

    def selection(self, dataset: str) -> dict[str, Any]:
        """Return what the config says of the files of a dataset: train and eval, name, split."""
        settings = self.values["datasets"][dataset]
        found = {key: settings[key] for key in ("train", "eval", "name") if key in settings}
        split = settings.get("split")
        named = {key: split[key] for key in ("train", "eval") if key in split} if split else {}
        return found | ({"split": named} if named else {})

    def split_weights(self, dataset: str) -> dict[str, float]:
        """Return the weight of each phase in the split of a dataset, as the smallest integers.

        2, 4, 4 and 1, 2, 2 are the same split.
        """
        settings, defaults = self.values["datasets"][dataset], self.values["split"]["weights"]
        split = settings.get("split")
        if isinstance(split, dict) and not split.keys() & defaults.keys():
            split = split.get("phases")
        weights: dict[str, float]
        if isinstance(split, list):
            weights = {phase: float(phase in split) for phase in defaults}
        elif split:
            weights = split
        elif "label" in settings:
            weights = {"sft": 0.0, "reward": 1.0, "rlhf": 0.0}
        elif "generations" in settings:
            has_pairs = settings["select"] == "best_and_worst"
            weights = {"sft": float(not has_pairs), "reward": float(has_pairs), "rlhf": 0.0}
        elif settings.get("format") == PROMPTS:
            weights = {"sft": 0.0, "reward": 0.0, "rlhf": 1.0}
        else:
            weights = defaults
        # As they are written: 0.1 is a tenth, and not the binary number next to it.
        exact = [Fraction(str(weight)) for weight in weights.values()]
        unit = Fraction(
            math.gcd(*(number.numerator for number in exact)),
            math.lcm(*(number.denominator for number in exact)),
        )
        return {
            phase: float(number / unit) if number else 0.0
            for phase, number in zip(weights, exact, strict=True)
        }

    @cached_property
    def stores(self) -> list[Path]:
        """The stores whose results are used; new ones go to the first, which can be written."""
        store = Path(os.path.expanduser(self.values["store"]))
        if store == STORE:
            return [STORE]
        if is_writable(store):
            return [store, STORE]
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

    @cached_property
    def swept_settings(self) -> dict[str, dict[str, dict[str, Any]]]:
        """The values that each recipe of a sweep takes of it, by sweep and recipe."""
        return {name: self._combinations(name) for name in self.values["sweeps"]}

    def _combinations(self, sweep: str) -> dict[str, dict[str, Any]]:
        """Return the values of each recipe of a sweep: one for each combination of its values."""
        over = self.values["sweeps"][sweep]["over"]
        recipes: dict[str, dict[str, Any]] = {}
        for values in itertools.product(*over.values()):
            changes = dict(zip(over, values, strict=True))
            name = "-".join([sweep, *(f"{key}-{value}" for key, value in changes.items())])
            # A model is SECTION/NAME.
            name = name.replace("/", "-")
            if not RECIPE_NAME.fullmatch(name):
                raise ConfigError(
                    f"config: sweeps.{sweep}.over: {name!r} is not a valid recipe name:"
                    " use values of letters, digits, '_', '.' and '-'"
                )
            if name in recipes:
                raise ConfigError(f"config: sweeps.{sweep}.over makes recipe {name} twice")
            recipes[name] = changes
        return recipes

    @cached_property
    def swept_recipes(self) -> dict[tuple[str, str], dict[str, Any]]:
        """The values that sweeps set, by the stage and the name of a recipe."""
        return {
            (self.values["sweeps"][sweep]["stage"], name): changes
            for sweep, recipes in self.swept_settings.items()
            for name, changes in recipes.items()
        }

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
        recipes: list[str] = []
        for name in names.split("-vs-"):
            if name in self.values["logs"]:
                recipes.append(name)
                continue
            sweep = self.values["sweeps"].get(name)
            swept = self.swept_settings[name] if sweep and sweep["stage"] == stage else {name: {}}
            for recipe, settings in swept.items():
                if not is_version(recipe):
                    self.check_effects(stage, recipe, settings)
            recipes += swept
        recipes = list(dict.fromkeys(recipes))
        if len(recipes) < 2:
            raise ConfigError(
                f"output/compare/{stage}/{names}: name two recipes, A-vs-B, or a sweep"
            )
        return recipes
