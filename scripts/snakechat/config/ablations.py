"""Recipes without some of their datasets: `leave_out` of a sweep.

A sweep over `leave_out` measures the effect of a dataset on a model. It removes the dataset from
the whole lineage of the recipe: from its own datasets, from the recipes that trained its models,
and from the datasets that are generated or labelled from it. Results of recipes that do not use it
are reused. The evaluation does not change: `judge`, `compare_with` and the held-out rows are those
of the recipe with all datasets (Config.held_out_recipe). Base models do not change either, because
another vocabulary would affect every metric.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from snakechat.config.errors import ConfigError
from snakechat.config.hints import available
from snakechat.config.references import Reference, parse_reference

if TYPE_CHECKING:
    from snakechat.config.recipes import Config

# The key of `over` whose values are lists of datasets.
LEAVE_OUT = "leave_out"
# The settings that name models, with the section of a plain name.
MODELS = {"model": "models", "actor": "sft", "ptx": "sft", "reward": "reward"}
RECIPE_SECTIONS = ("sft", "reward", "dpo", "rlhf", "generations")


class Ablated(NamedTuple):
    """A recipe without some datasets.

    Attributes:
        left_out: The datasets.
        held_out: The recipe of the same stage whose held-out rows it is evaluated on.
    """

    left_out: tuple[str, ...]
    held_out: str


def left_out_name(left_out: Sequence[str]) -> str:
    """Return removed datasets as a part of the name of a recipe."""
    return "-and-".join(sorted(left_out)) or "none"


def unexpecting(stage: str) -> dict[str, Any]:
    """Return the settings of a recipe of a sweep that expects nothing of its evaluation."""
    settings: dict[str, Any] = {} if stage == "generations" else {"expect": {}}
    return settings | ({"not_worse_than": None} if stage in ("reward", "dpo", "rlhf") else {})


class Ablation:
    """The recipes of a config without some datasets. Those that differ are added to the config.

    Args:
        config: The config, whose recipes do not depend on themselves.
        sweep: The sweep that leaves the datasets out, for errors.
        left_out: The datasets.

    All methods raise ConfigError if nothing is left to train on, or a name is taken.
    """

    def __init__(self, config: "Config", sweep: str, left_out: Sequence[str]) -> None:
        self.config, self.left_out = config, tuple(sorted(left_out))
        self.place = f"config: sweeps.{sweep}.over.{LEAVE_OUT}"
        self.suffix = f"-{LEAVE_OUT}-{left_out_name(left_out)}"
        # The datasets of the recipes that were asked for, and of those before them.
        self.datasets: set[str] = set()

    def add(self, stage: str, name: str, origin: str) -> None:
        """Add a recipe without the datasets under a name of its own.

        Args:
            stage: Stage of the recipe.
            name: Name of the new recipe.
            origin: The recipe with all datasets.
        """
        self._add(stage, name, origin, self._changes(stage, origin))
        for dataset in self.left_out:
            if dataset not in self.datasets:
                raise ConfigError(
                    f"{self.place} names {dataset!r}, which is no dataset of {stage}/{origin} or of"
                    f" a recipe before it {available(dataset, self.datasets)}"
                )

    def _add(self, stage: str, name: str, origin: str, changes: dict[str, Any]) -> None:
        config, held_out = self.config, origin
        recipes = config.values[stage]["recipes"]
        if stage == "dpo" and "model" in changes:
            # The implicit rewards of held-out pairs need log-probabilities of the new reference.
            held_out = f"{name}-held_out"
            self._require_new(Reference(stage, held_out), recipes)
            recipes[held_out] = {**recipes[origin], "model": changes["model"]}
        recipes[name] = {**recipes[origin], **changes, **unexpecting(stage)}
        config.ablated[Reference(stage, name)] = Ablated(self.left_out, held_out)

    def _recipe(self, stage: str, name: str) -> str:
        """Return the name of a recipe without the datasets: its own if it differs in nothing."""
        if name not in self.config.values[stage]["recipes"]:
            # An error of the recipe that names it.
            return name
        changes = self._changes(stage, name)
        if not changes:
            return name
        new = Reference(stage, name + self.suffix)
        self._require_new(new, self.config.values[stage]["recipes"])
        if new not in self.config.ablated:
            self._add(*new, name, changes)
        return new.name

    def _changes(self, stage: str, name: str) -> dict[str, Any]:
        """Return the settings that a recipe has without the datasets, as far as they differ."""
        settings = self.config.recipe(stage, name)
        changes: dict[str, Any] = {"datasets": self._blend(stage, name)}
        if not changes["datasets"]:
            raise ConfigError(
                f"{self.place}: without {' and '.join(self.left_out)}, {stage}.recipes.{name} has"
                " no dataset left to train on"
            )
        for key, section in MODELS.items():
            value = settings.get(key)
            if isinstance(value, dict):
                changes[key] = {self._model(text, section): value[text] for text in value}
            elif value is not None:
                changes[key] = self._model(value, section)
        return {key: value for key, value in changes.items() if value != settings[key]}

    def _model(self, text: str, section: str) -> str:
        """Return the reference to a model without the datasets. section: That of a plain name."""
        model = parse_reference(text, section)
        if model.section not in RECIPE_SECTIONS:
            return text
        return text.removesuffix(model.name) + self._recipe(*model)

    def _blend(self, stage: str, name: str) -> list[Any]:
        """Return the entries of `datasets` of a recipe that are left."""
        left = []
        for entry in self.config.recipe(stage, name)["datasets"]:
            weights = entry if isinstance(entry, dict) else {entry: None}
            for dataset, weight in weights.items():
                new = self._dataset(dataset)
                if new is not None:
                    left.append(new if weight is None else {new: weight})
        return left

    def _dataset(self, name: str) -> str | None:
        """Return the name of a dataset without the removed ones; None if none of it remains."""
        self.datasets.add(name)
        if name in self.left_out:
            return None
        datasets = self.config.values["datasets"]
        entry = datasets.get(name, {})
        changes: dict[str, str] = {}
        if "label" in entry:
            source = self._dataset(entry["label"])
            if source is None:
                return None
            changes = {"label": source}
        recipe = entry.get("generations")
        if recipe in self.config.values["generations"]["recipes"]:
            if not self._blend("generations", recipe):
                return None
            changes = {"generations": self._recipe("generations", recipe)}
        if all(entry[key] == value for key, value in changes.items()):
            return name
        new = Reference("datasets", name + self.suffix)
        self._require_new(new, datasets)
        datasets[new.name] = {**entry, **changes}
        self.config.ablated[new] = Ablated(self.left_out, name)
        return new.name

    def _require_new(self, new: Reference, entries: dict[str, Any]) -> None:
        """Raise ConfigError if a name is taken by an entry that removes other datasets."""
        made = self.config.ablated.get(new)
        if new.name in entries and (made is None or made.left_out != self.left_out):
            raise ConfigError(f"{self.place} makes {'/'.join(new)}, which exists: rename one")
