"""Load the config: the text of its files, values of the command line, sweeps, all checks.

Snakemake reads the files. Of a key that is written twice, it keeps the last value, and its error of
a file that cannot be parsed names neither the file nor the line.
"""

import ast
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import yaml

from snakechat.config.recipes import (
    PHASES,
    RECIPE_NAME,
    RECIPES,
    Config,
    ConfigError,
    Reference,
    checked,
)
from snakechat.config.rlhf import MESSAGES, input_names, weighted_functions
from snakechat.config.sections import RecipePlacement, Sections
from snakechat.config.settings import has_reference_point
from snakechat.data.formats import PROMPTS, TEXTS, UNPAIRED, has_pairs, named_columns
from snakechat.data.model_files import model_problem, read_model_config
from snakechat.data.yaml_files import root_node
from snakechat.workflow.code_digests import Modules
from snakechat.workflow.commands import command_words, names_in

# Spaces and punctuation of Chinese input methods that look like YAML's.
FULL_WIDTH = re.compile("[\u3000\uff0c\uff1a\uff3b\uff3d\uff5b\uff5d\u3010\u3011\u201c\u201d]")


def project_files(root: Path) -> list[Path]:
    """Return the config files below the folder of the Snakefile, in the order of reading."""
    files = ("config.yaml", "config/recipes.yaml", "config/deepspeed_chat.yaml")
    return [root / file for file in files]


def check_config_files(paths: Iterable[Path]) -> None:
    """Check files before Snakemake's values of them are used. A missing file is not an error here.

    Raises:
        ConfigError: A file is not YAML in UTF-8, which JSON is too, or a mapping has a key twice or
            contains itself.
    """
    for path in filter(Path.exists, paths):
        name, lines = path.name, list[str]()
        try:
            lines = (text := path.read_text("utf-8-sig")).splitlines()
            root = root_node(text)
            if not isinstance(root, yaml.MappingNode):
                raise ConfigError(f"{name}: expected sections such as `sft:`, and it has none")
            _check_keys(name, root)
            yaml.CSafeLoader("").construct_document(root)
        except yaml.YAMLError as error:
            message = f"{name} is not YAML: {' '.join(str(error).split())}"
            mark: Any = getattr(error, "problem_mark", None)
            near = lines[max(mark.line - 1, 0) : mark.line + 1] if mark else []
            if found := FULL_WIDTH.search("\n".join(near)):
                message += f" (there is the full-width character {found[0]!r})"
            raise ConfigError(message) from None
        except (ValueError, LookupError, AttributeError) as error:
            # Not UTF-8, too many values, or what has the form of a date or a number, and is none.
            raise ConfigError(f"{name} cannot be read: {error}") from None


def _check_keys(name: str, node: yaml.Node, path: str = "") -> None:
    """Raise ConfigError for the first mapping that has a key twice."""
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            _check_keys(name, item, f"{path}{number}.")
    elif isinstance(node, yaml.MappingNode):
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            written, line = (key.tag, str(key.value)), key.start_mark.line + 1
            # `<<: *name` takes over the keys of another mapping; several ones add up.
            if written in lines and key.tag != "tag:yaml.org,2002:merge":
                raise ConfigError(
                    f"{name}: {path}{key.value} is written twice, in lines {lines[written]} and"
                    f" {line}: keep one of them, the first one would be ignored"
                )
            lines[written] = line
            _check_keys(name, value, f"{path}{key.value}.")


def load_config(
    values: dict[str, Any], root: Path, sources: Path, command_line: dict[str, Any]
) -> Config:
    """Return the checked config.

    Args:
        values: config.yaml with the config files of the user on top. It is updated in place.
        root: The folder of the Snakefile, which relative paths start from.
        sources: The folder of the code: of rewards/ and the locked requirements.
        command_line: What --config set, as Snakemake parsed it.

    Raises:
        ConfigError: A key or value is invalid, or a name refers to nothing.
    """
    update(values, parse_command_line_values(command_line))
    values |= checked(values, Sections)
    config = Config(values, root, sources)
    add_sweeps(config)
    if problem := next(_problems(config), None):
        raise ConfigError(f"config: {problem}")
    return config


def parse_command_line_values(value: Any) -> Any:
    """Return values of the command line with numbers, booleans and nulls read as YAML.

    Snakemake does not parse scalars inside braces: --config 'sft={defaults: {epochs: 2}}'.
    """
    match value:
        case dict():
            # A commit is text, even if it consists of digits.
            return {
                key: item if key == "revision" else parse_command_line_values(item)
                for key, item in value.items()
            }
        case list():
            return [parse_command_line_values(item) for item in value]
        case str():
            loader = yaml.SafeLoader("")
            tag = loader.resolve(yaml.ScalarNode, value, (True, False))
            # What has the form of a date, and is none, is text.
            with suppress(ValueError, yaml.YAMLError):
                return loader.construct_object(yaml.ScalarNode(tag, value))
    return value


def update(values: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Update nested values in place; keys that changes does not name stay.

    Mappings are copied, so that two keys that share one (an alias in YAML) do not change together.
    """
    for key, change in changes.items():
        if isinstance(change, Mapping):
            if not isinstance(values.get(key), dict):
                values[key] = {}
            update(values[key], change)
        else:
            values[key] = change


def add_sweeps(config: Config) -> None:
    """Add the recipes of all sweeps to their stages, one for each combination of values.

    They have no gate of the recipe: a sweep explores.
    """
    for sweep, settings in config.values["sweeps"].items():
        stage, place, over = settings["stage"], f"sweeps.{sweep}", settings["over"]
        recipes = config.values[stage]["recipes"]
        if sweep in recipes:
            raise ConfigError(f"config: {place} has the name of a recipe of {stage}: rename it")
        origin = config.entry(f"{stage}.recipes", settings["recipe"], f"{place}.recipe")
        # A mistake of its own is reported at its place.
        config.recipe(stage, settings["recipe"])
        for values in itertools.product(*over.values()):
            changes = dict(zip(over, values, strict=True))
            # A model is SECTION/NAME.
            name = "-".join([sweep, *(f"{key}-{changes[key]}" for key in over)]).replace("/", "-")
            if name in recipes or not RECIPE_NAME.fullmatch(name):
                raise ConfigError(
                    f"config: {place} makes recipe {name}, which exists, or is not a valid name:"
                    " use other values, of letters, digits, '_', '.' and '-'"
                )
            recipes[name] = {key: origin[key] for key in origin if key != "gate"} | changes
            config.settings_of(stage, recipes[name], f"{place}.over")
            config.swept[Reference(stage, name)] = sweep, changes


# --- what a schema cannot state: names, splits, templates, generations ----------------------------

# Names in braces of all commands.
NAMES = ("python", "model", "output", "state", "log_dir", "seed", "gpus")


def _problems(config: Config) -> Iterator[str]:
    """Yield why datasets, models and recipes do not exist or fit together, each with its place."""
    yield from _cycles(config)
    if (judge := config.values["evaluation"]["llm_judge"]) is not None:
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
        place = f"models.{name}"
        if "template_arguments" in model and config.template("models", name) == "dialogue":
            yield (
                f"{place}.template_arguments have no effect: the template dialogue takes no"
                " arguments: remove them"
            )
        if "tokenizer" in model:
            train_on = model["tokenizer"]["train_on"]
            config.entry("datasets", train_on, f"{place}.tokenizer")
            # The model may be what generates them.
            if config.generated_by(train_on) is not None:
                yield (
                    f"{place}.tokenizer.train_on names {train_on}, whose responses a model"
                    " generates: use a dataset that is imported"
                )
    for (stage, name), place in config.places.items():
        checked(config.recipe(stage, name)["placement"], RecipePlacement, f"{place}.placement")
        if command := config.recipe(stage, name).get("command"):
            names = [
                *NAMES,
                *(("data", "tokens", "reference") if stage != "benchmarks" else ()),
                *(("reward",) if stage == "rlhf" else ()),
            ]
            yield from _command_problems(command, names, place)
        if stage != "benchmarks":
            yield from _recipe_problems(config, stage, name, place)


def _recipe_problems(config: Config, stage: str, name: str, place: str) -> Iterator[str]:
    """Yield what is wrong with the datasets, models and functions that a recipe names."""
    if (stage, name) not in config.swept:
        config.check_effects(stage, name, config.values[stage]["recipes"][name])
    for dataset, _ in config.recipe(stage, name)["datasets"]:
        if problem := _dataset_problem(config, dataset, stage, config.recipe(stage, name)):
            yield f"{place}.datasets names {dataset}, {problem}"
    if stage in ("rlhf", "generations"):
        yield from _score_problems(config, stage, name, place)
    for key, named in config.references(stage, name).items():
        for text, model in named.items():
            if key in ("compare_with", "ptx"):
                own, other = (config.tokenizer_model(*each) for each in ((stage, name), model))
                if other != own:
                    yield (
                        f"{place}.{key} names {text}, which has the tokenizer of {other[1]}; the"
                        f" actor has the tokenizer of {own[1]}"
                    )
            # As far as files show.
            source = config.source_of("models", model.name) if model.section == "models" else None
            keys = source and read_model_config(source)
            if keys and (problem := model_problem(keys, scores=key in ("reward", "judge"))):
                yield f"{place}.{key} names {text}, which {problem}"


def _has_pairs(dataset: dict[str, Any]) -> bool:
    """Return whether the rows of a dataset have rejected responses, which nothing labels."""
    if "format" in dataset:
        return has_pairs(dataset["format"], dataset.get("columns"))
    return "generate" in dataset or dataset.get("select") == "best_and_worst"


def _cycles(config: Config) -> Iterator[str]:
    """Yield recipes that depend on themselves, by their models or by generated datasets."""
    graph: dict[Reference, list[Reference]] = {}
    for recipe, place in config.places.items():
        if recipe.section in RECIPES:
            graph[recipe] = [
                model for named in config.references(*recipe).values() for model in named.values()
            ]
            for dataset, _ in config.recipe(*recipe)["datasets"]:
                config.entry("datasets", dataset, f"{place}.datasets")
                if generations := config.generated_by(dataset):
                    graph[recipe].append(Reference("generations", generations))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        # In the list, each one depends on the one before it.
        cycle = error.args[1][::-1]
        path = " -> ".join(map("/".join, cycle))
        yield f"{cycle[0].section}.recipes.{cycle[0].name} depends on itself: {path}"


def _dataset_problem(config: Config, name: str, stage: str, recipe: dict[str, Any]) -> str | None:
    """Return why a stage cannot use the rows of a dataset, and what to do; None if it can."""
    entry, phase = config.values["datasets"][name], PHASES[stage]
    format = entry.get("format", "")
    kind = f"format {format}" if format else "select: best"
    is_unpaired = phase == "reward" and "label" not in entry and not _has_pairs(entry)
    problems = {
        f"whose split gives no rows to {phase}": not config.split_weights(name)[phase],
        f"which has no responses ({kind}): use it for rlhf": phase != "rlhf" and format == PROMPTS,
        f"whose rows are texts ({kind}): use it for sft, with train_on: all_tokens": (
            format == TEXTS and recipe.get("train_on") != "all_tokens"
        ),
        f"which has no rejected responses ({kind}): use it for sft or rlhf": (
            is_unpaired and not (stage == "dpo" and format in UNPAIRED)
        ),
        f"whose responses are not paired ({kind}): set loss: kto, or use pairs": (
            is_unpaired and not has_reference_point(recipe["loss"])
        ),
    }
    return next((problem for problem, is_wrong in problems.items() if is_wrong), None)


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
    has_scores = settings["reward"] is not None or settings["reward_functions"]
    if settings.get("algorithm") != "distill" and not has_scores:
        yield f"{place}: reward is null and reward_functions is empty: nothing scores responses"
    columns = frozenset(
        column
        for dataset, _ in settings["datasets"]
        for column in named_columns(config.values["datasets"][dataset].get("keep", {}))
    )
    models = input_names("reward", settings["reward"]).values()
    for function, (_, arguments) in weighted_functions(settings["reward_functions"]).items():
        path = config.sources / f"rewards/{function}.py"
        taken = f"metrics call a reward model {function}: rename rewards/{function}.py"
        problem = _reward_function_problem(path, frozenset(arguments), columns)
        if function in models or problem:
            yield f"{place}.reward_functions: {problem or taken}"


@cache
def _reward_function_problem(
    path: Path, arguments: frozenset[str], columns: frozenset[str]
) -> str | None:
    """Return what is wrong with a reward function as far as parsing shows; None if it is valid.

    arguments, columns: Names of those that the recipe and its datasets have for it.
    """
    try:
        Modules(path.parent.parent / "scripts").imported_by([path])
        nodes = ast.parse(path.read_bytes()).body
    # An expression may be nested too deeply, such as a sum of a thousand terms.
    except (SyntaxError, ValueError, RecursionError) as error:
        return f"rewards/{path.name} is not valid Python ({error})"
    except FileNotFoundError as error:
        return f"{error.filename} does not exist"
    # The last one of a name counts.
    functions = {node.name: node.args for node in nodes if isinstance(node, ast.FunctionDef)}
    if "score" in functions:
        signature = _signature(functions["score"])
        given = arguments | ({MESSAGES, *columns} & signature.parameters.keys())
        try:
            signature.bind(None, None, **dict.fromkeys(given))
        except TypeError as error:
            return (
                f"rewards/{path.name}: {error}: correct `arguments`, or name a column in"
                " `keep` of the recipe's datasets"
            )
    return None


def _signature(given: ast.arguments) -> inspect.Signature:
    """Return the signature of a function without its defaults and types, which nothing executes."""
    given.defaults = [ast.Constant(None) for _ in given.defaults]
    given.kw_defaults = [default and ast.Constant(None) for default in given.kw_defaults]
    # Evaluating a lambda runs nothing of it.
    function = ast.Expression(ast.Lambda(given, ast.Constant(None)))
    return inspect.signature(eval(compile(ast.fix_missing_locations(function), "", "eval")))
