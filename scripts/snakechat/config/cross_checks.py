"""Checks of the config that a schema cannot state: names, splits, templates, generations."""

import ast
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from snakechat.config.recipes import Config
from snakechat.config.references import MESSAGES, Reference, input_names, weighted_functions
from snakechat.config.schema import RECIPES, ConfigError, checked
from snakechat.config.sections import RecipePlacement
from snakechat.config.settings import has_reference_point
from snakechat.data.formats import PROMPTS, TEXTS, UNPAIRED, has_pairs, named_columns
from snakechat.data.model_files import model_problem, read_model_config
from snakechat.workflow.code_digests import Modules
from snakechat.workflow.commands import command_words, names_in

# Names in braces of all commands; of recipes' commands too; of RLHF's commands too.
NAMES = ("python", "model", "output", "state", "log_dir", "seed", "gpus")
NAMES_OF_RECIPES, NAMES_OF_RLHF = ("data", "tokens", "reference"), ("reward",)


def check_references(config: Config) -> None:
    """Check that recipes use datasets, models and recipes that exist and fit together.

    So do the placement of each recipe and benchmark and the deployment that it names.

    Raises:
        ConfigError: They do not.
    """
    for problem in _problems(config):
        raise ConfigError(f"config: {problem}")


def _problems(config: Config) -> Iterator[str]:
    """Yield what is wrong, each with its place in the config."""
    yield from _cycles(config)
    judge = config.values["evaluation"]["llm_judge"]
    if judge is not None:
        config.entry("llm_judges", judge, "evaluation.llm_judge")
    taken = {recipe.name for recipe in config.places} | config.values["sweeps"].keys()
    for name in sorted(taken & config.values["logs"].keys()):
        yield f"logs.{name} has the name of a recipe or a sweep: rename it"
    for name, dataset in config.values["datasets"].items():
        place = f"datasets.{name}"
        if "generations" in dataset:
            config.entry("generations.recipes", dataset["generations"], f"{place}.generations")
        if "label" in dataset:
            config.entry("llm_judges", dataset["llm_judge"], f"{place}.llm_judge")
            if not _has_pairs(config.entry("datasets", dataset["label"], f"{place}.label")):
                yield (
                    f"{place}.label names {dataset['label']}, which has no pairs of responses of"
                    " its own: name a dataset with rejected responses"
                )
    for name, model in config.values["models"].items():
        if "template_arguments" in model and config.template("models", name) == "dialogue":
            yield (
                f"models.{name}.template_arguments have no effect: the template dialogue"
                " is not a chat template and takes no arguments: remove them"
            )
        train_on = model.get("tokenizer", {}).get("train_on")
        if train_on is not None:
            config.entry("datasets", train_on, f"models.{name}.tokenizer")
            if config.generated_by(train_on) is not None:
                yield (
                    f"models.{name}.tokenizer.train_on names {train_on}, whose responses a model"
                    " generates: train the tokenizer on a dataset that is imported"
                )
    for (stage, name), place in config.places.items():
        checked(config.recipe(stage, name)["placement"], RecipePlacement, f"{place}.placement")
        if command := config.recipe(stage, name).get("command"):
            names = NAMES if stage == "benchmarks" else NAMES + NAMES_OF_RECIPES
            of_rlhf = NAMES_OF_RLHF if stage == "rlhf" else ()
            yield from _command_problems(command, (*names, *of_rlhf), place)
        if stage != "benchmarks":
            yield from _recipe_problems(config, stage, name, place)


def _recipe_problems(config: Config, stage: str, name: str, place: str) -> Iterator[str]:
    """Yield what is wrong with the datasets, models and functions that a recipe names."""
    if (stage, name) not in config.swept_recipes:
        config.check_effects(stage, name, config.values[stage]["recipes"][name])
    for dataset, _ in config.blend(stage, name):
        if problem := _dataset_problem(config, dataset, stage, config.recipe(stage, name)):
            yield f"{place}.datasets names {dataset}, {problem}"
    if stage in ("rlhf", "generations"):
        yield from _score_problems(config, stage, name, place)
    if stage == "rlhf":
        yield from _tokenizer_problems(config, name, place)
    for key, named in config.references(stage, name).items():
        for text, model in named.items():
            if model.section == "models":
                problem = _model_problem(config, model.name, key in ("reward", "judge"))
                if problem:
                    yield f"{place}.{key} names {text}, which {problem}"


def _has_pairs(dataset: dict[str, Any]) -> bool:
    """Return whether the rows of a dataset have rejected responses, which nothing labels."""
    if "format" in dataset:
        return has_pairs(dataset["format"], dataset.get("columns"))
    return "generate" in dataset or dataset.get("select") == "best_and_worst"


def _cycles(config: Config) -> Iterator[str]:
    """Yield recipes that depend on themselves, by their models or by generated datasets."""
    recipes = [recipe for recipe in config.places if recipe.section in RECIPES]
    try:
        TopologicalSorter({recipe: _recipes_of(config, recipe) for recipe in recipes}).prepare()
    except CycleError as error:
        # In the list, each one depends on the one before it.
        cycle = error.args[1][::-1]
        yield (
            f"{cycle[0].section}.recipes.{cycle[0].name} depends on itself: "
            + " -> ".join("/".join(recipe) for recipe in cycle)
        )


def _recipes_of(config: Config, recipe: Reference) -> Iterator[Reference]:
    """Yield the recipes that a recipe names."""
    for named in config.references(*recipe).values():
        yield from (found for found in named.values() if found.section in RECIPES)
    for dataset, _ in config.blend(*recipe):
        config.entry("datasets", dataset, f"{recipe.section}.recipes.{recipe.name}.datasets")
        if generations := config.generated_by(dataset):
            yield Reference("generations", generations)


def _dataset_problem(config: Config, name: str, stage: str, recipe: dict[str, Any]) -> str | None:
    """Return why a stage cannot use the rows of a dataset, and what to do; None if it can."""
    entry = config.values["datasets"][name]
    phase = {"dpo": "reward", "generations": "rlhf"}.get(stage, stage)
    if not config.split_weights(name)[phase]:
        return f"whose split gives no rows to {phase}"
    format = entry.get("format", "")
    if phase != "rlhf" and format == PROMPTS:
        return f"which has no responses (format {format}): use it for rlhf"
    if format == TEXTS:
        problem = f"whose rows are texts instead of dialogues (format {format})"
        if stage != "sft":
            return f"{problem}: use it for sft"
        if recipe["train_on"] != "all_tokens":
            return f"{problem}: set train_on: all_tokens"
    if phase != "reward" or "label" in entry or _has_pairs(entry):
        return None
    if stage != "dpo" or format not in UNPAIRED:
        kind = f"format {format}" if format else "select: best"
        return f"which has no rejected responses ({kind}): use it for sft or rlhf"
    if not has_reference_point(recipe["loss"]):
        return f"whose responses are not paired (format {format}): set loss: kto, or use pairs"
    return None


def _tokenizer_problems(config: Config, name: str, place: str) -> Iterator[str]:
    """Yield which models do not share the tokenizer of a recipe's actor, and must."""
    ptx, tokenizer = config.recipe("rlhf", name)["ptx"], config.tokenizer_model("rlhf", name)
    for text, model in config.references("rlhf", name)["compare_with"].items():
        if config.tokenizer_model(*model) != tokenizer:
            yield f"{place}.compare_with: {text} and {name} have different tokenizers"
    if ptx is not None and (other := config.tokenizer_model("sft", ptx)) != tokenizer:
        yield (
            f"{place}.ptx names {ptx}, which has the tokenizer of {other[1]}; the actor has the"
            f" tokenizer of {tokenizer[1]}"
        )


def _model_problem(config: Config, name: str, scores: bool) -> str | None:
    """Return why a model of `models` is not of the kind that is needed, as far as files show.

    scores: Whether it must be a reward model; otherwise it must be a language model.
    """
    if scores and "init" in config.values["models"][name]:
        return (
            "is a language model with random weights, expected a sequence classifier: use one, or"
            " a reward recipe"
        )
    source = config.source_of("models", name)
    keys = source and read_model_config(source)
    return model_problem(keys, scores) if keys else None


def _command_problems(command: str, names: Iterable[str], place: str) -> Iterator[str]:
    """Yield what is wrong with the words of a command, which has names in braces."""
    try:
        command_words(command, dict.fromkeys(names, ""))
        if "output" not in names_in(command):
            yield f"{place}.command: expected {{output}}, the folder that it fills"
    except ValueError as error:
        yield f"{place}.command: {error}"


def _score_problems(config: Config, stage: str, name: str, place: str) -> Iterator[str]:
    """Yield why nothing scores the responses of a recipe, or its functions cannot run."""
    settings = config.recipe(stage, name)
    needs_scores = settings.get("algorithm") != "distill"
    if needs_scores and settings["reward"] is None and not settings["reward_functions"]:
        yield f"{place}: reward is null and reward_functions is empty: nothing scores responses"
    datasets = [dataset for dataset, _ in config.blend(stage, name)]
    kept = [config.values["datasets"][dataset].get("keep", {}) for dataset in datasets]
    columns = {column for names in kept for column in named_columns(names)}
    models = input_names("reward", settings["reward"]).values()
    for function, (_, arguments) in weighted_functions(settings["reward_functions"]).items():
        problem = _reward_function_problem(config.sources, function, arguments, columns)
        if function in models:
            problem = f"metrics call a reward model {function}: rename rewards/{function}.py"
        if problem:
            yield f"{place}.reward_functions: {problem}"


def _reward_function_problem(
    sources: Path, name: str, arguments: Collection[str], columns: Collection[str]
) -> str | None:
    """Return what is wrong with rewards/NAME.py as far as parsing shows; None if it is valid.

    Args:
        arguments: Names of the arguments that the recipe has.
        columns: Columns that the recipe's datasets keep.
    """
    problem = _program_problem(sources, name)
    found = None if problem else _parameters(sources / f"rewards/{name}.py")
    if found is None:
        return problem
    parameters, takes_any = found
    unknown = [key for key in arguments if key not in parameters and not takes_any]
    if unknown:
        names = ", ".join(sorted(parameters)) or "none"
        return f"rewards/{name}.py takes no argument {unknown[0]} (available: {names})"
    required = {key for key, is_optional in parameters.items() if not is_optional}
    if missing := sorted(required - {MESSAGES, *arguments, *columns}):
        return (
            f"rewards/{name}.py requires {missing[0]}: name this column in `keep` of the recipe's"
            " datasets, or set it in `arguments`"
        )
    return None


@cache
def _program_problem(sources: Path, name: str) -> str | None:
    """Return why rewards/NAME.py cannot be run; None if it is valid as far as parsing shows."""
    available = sorted(path.stem for path in (sources / "rewards").glob("*.py"))
    if name not in available:
        return f"rewards/{name}.py does not exist (available: {', '.join(available) or 'none'})"
    try:
        Modules(sources / "scripts").imported_by([sources / f"rewards/{name}.py"])
    except (SyntaxError, ValueError) as error:
        return f"rewards/{name}.py is not valid Python ({error})"
    except FileNotFoundError as error:
        return f"rewards/{name}.py imports a module that does not exist ({error.filename})"
    return None


def _parameters(path: Path) -> tuple[dict[str, bool], bool] | None:
    """Return what the function score of a program takes by keyword; None if it defines none.

    Returns:
        Whether each parameter after prompts and responses has a default, by name; and whether there
        is one such as **columns.
    """
    nodes = ast.parse(path.read_bytes()).body
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    found = [function.args for function in functions if function.name == "score"]
    if not found:
        return None
    given = found[-1]
    positional = [*given.posonlyargs, *given.args]
    required = len(positional) - len(given.defaults)
    parameters = {each.arg: place >= required for place, each in enumerate(positional)}
    for name in list(parameters)[:2]:
        del parameters[name]
    keywords = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    parameters |= {each.arg: default is not None for each, default in keywords}
    return parameters, given.kwarg is not None
