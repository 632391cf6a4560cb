# The config: what its names stand for, and the checks before anything is planned.

import itertools

import jsonschema
import yaml
from snakemake.utils import update_config

from snakechat.data.formats import has_pairs


@cache
def config_schema():
    return yaml.safe_load((ROOT / "rules/config.schema.yaml").read_text())


def typed(value):
    """A value of the command line with its numbers, booleans and nulls: Snakemake leaves all that
    stands in braces text.
    """
    if isinstance(value, dict):
        return {key: typed(one) for key, one in value.items()}
    if isinstance(value, list):
        return [typed(one) for one in value]
    if not isinstance(value, str):
        return value
    yaml_reader = yaml.SafeLoader("")
    tag = yaml_reader.resolve(yaml.ScalarNode, value, (True, False))
    return yaml_reader.construct_object(yaml.ScalarNode(tag, value))


def check_config(values, schema, *place):
    """Stop at the first thing in the config, or at a place in it, that a schema refuses."""
    # An integer is one as Python has it: programs count with it, where 2.0 would not do.
    types = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, value: type(value) is int
    )
    validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=types)
    formats = jsonschema.FormatChecker(["regex"])
    errors = validator(schema, format_checker=formats).iter_errors(values)
    error = jsonschema.exceptions.best_match(errors)
    if error:
        key = ".".join(map(str, [*place, *error.absolute_path])) or "top level"
        hint = ""
        if error.validator == "type" and isinstance(error.instance, str):
            hint = " (YAML reads 1e-5 as text: write 1.0e-5)"
        fail(f"config: {key}: {error.message}{hint}")


def entry(section, name, used_by):
    """The entry of a section (datasets, rlhf.presets), or a line that says which names there are."""
    entries = config
    for key in section.split("."):
        entries = entries[key]
    if name not in entries:
        known = ", ".join(sorted(entries)) or "none"
        fail(f"config: {used_by} names {name!r}, which is not under {section} (there: {known})")
    return entries[name]


def recipe(stage, name):
    """The settings of a recipe: the stage's defaults, its preset's, then what it states itself.

    Its placement is complete: where it names a deployment, that one, with what is said on top.
    """
    recipes = config[stage]["recipes"]
    if name not in recipes:
        fail(f"config: {stage}.recipes has no {name!r} (there: {', '.join(recipes)})")
    defaults, own = config[stage]["defaults"], recipes[name]
    preset = own.get("preset", defaults.get("preset"))
    used_by = f"{stage}.recipes.{name}.preset"
    between = {} if preset is None else entry(f"{stage}.presets", preset, used_by)
    settings = {"seed": config["seed"], **defaults, **between, **own}
    settings.pop("preset", None)
    where, layers = {}, {"defaults": defaults, f"presets.{preset}": between, f"recipes.{name}": own}
    for layer, stated in layers.items():
        where = placed(where, stated.get("placement", {}), f"{stage}.{layer}.placement")
    if config["deployment"] is not None:
        where = entry("deployments", config["deployment"], "deployment")
    return {**settings, "placement": where}


def placed(where, stated, used_by):
    """A placement with another on top: the name of a deployment, or keys and maybe such a name."""
    own = {"deployment": stated} if isinstance(stated, str) else dict(stated)
    name = own.pop("deployment", None)
    return {**(where if name is None else entry("deployments", name, used_by)), **own}


def check_placements():
    """Stop if a placement, with all that it stands on, is one that cannot be."""
    schema = config_schema()
    for stage in STAGES:
        kind = "rlhf_placement" if stage == "rlhf" else "placement"
        complete = {"$ref": f"#/$defs/complete_{kind}", "$defs": schema["$defs"]}
        for name in config[stage]["recipes"]:
            place = (stage, "recipes", name, "placement")
            check_config(recipe(stage, name)["placement"], complete, *place)


def check_references():
    """Stop if a recipe names a model, dataset or recipe that the config does not have."""
    for name, dataset in config["datasets"].items():
        try:
            if "format" in dataset:
                columns_of(dataset["format"], dataset.get("columns"))
        except ValueError as error:
            fail(f"config: datasets.{name}: {error}")
    for name, model in config["models"].items():
        if "train_on" in model.get("tokenizer", {}):
            entry("datasets", model["tokenizer"]["train_on"], f"models.{name}.tokenizer")
    for stage in STAGES:
        for name in config[stage]["recipes"]:
            settings = recipe(stage, name)
            for dataset, _ in blend(stage, name):
                check_use(dataset, stage, f"{stage}.recipes.{name}.datasets")
            if stage == "rlhf":
                check_models(name, settings)
                check_scores(name, settings)
            else:
                base_model(stage, name)


def check_use(dataset, stage, used_by):
    """Stop if a dataset has nothing for a stage that names it."""
    settings = entry("datasets", dataset, used_by)
    phase = "reward" if stage == "dpo" else stage
    if not split_weights(dataset)[phase]:
        fail(f"config: {used_by} names {dataset}, whose split gives no rows to {phase}")
    pairs = "generate" in settings or has_pairs(settings["format"], settings.get("columns"))
    if phase == "reward" and not pairs:
        fail(
            f"config: {used_by} names {dataset}, which has no rejected responses (format"
            f" {settings['format']}): it can serve sft and the prompts of rlhf"
        )


def check_models(name, settings):
    """Stop if the models of a recipe would read a dialogue or its tokens differently."""
    actor = template("sft", settings["actor"])
    for key in ("reward", "judge"):
        other = actor if settings[key] is None else template("reward", settings[key])
        if other != actor:
            fail(
                f"config: rlhf.recipes.{name}: actor and {key} have the templates"
                f" {actor} and {other}"
            )
    for model in settings["compare_with"]:
        stage, _, other = model.partition("/")
        if other not in config[stage]["recipes"]:
            known = ", ".join(config[stage]["recipes"])
            fail(f"config: rlhf.recipes.{name}.compare_with: {stage} has no {other!r} (there: {known})")
        if tokenizer_model(stage, other) != tokenizer_model("rlhf", name):
            fail(f"config: rlhf.recipes.{name}.compare_with: {model} reads other tokens than {name}")
    if settings["ptx"] is not None:
        models = [tokenizer_model("sft", settings[key])[1] for key in ("actor", "ptx")]
        if models[0] != models[1]:
            fail(
                f"config: rlhf.recipes.{name}.ptx names {settings['ptx']}, whose rows are tokens of"
                f" {models[1]}; the actor's are those of {models[0]}"
            )


def check_scores(name, settings):
    """Stop if nothing scores the responses of a recipe, or too few of them are compared."""
    place, samples = f"config: rlhf.recipes.{name}", settings["num_generations"]
    if settings["reward"] is None and not settings["reward_functions"]:
        fail(f"{place}.reward is null and there are no reward_functions: nothing scores responses")
    for function in settings["reward_functions"]:
        trouble = reward_function_trouble(function)
        if trouble:
            fail(f"{place}.reward_functions: {trouble}")
    if settings["algorithm"] != "ppo" and samples < 2:
        fail(
            f"{place}.num_generations: {settings['algorithm']} compares the responses to a prompt, and needs"
            f" 2 or more ({samples} given)"
        )
    if settings["global_batch_size"] % samples:
        fail(
            f"{place}.global_batch_size: {settings['global_batch_size']} is not a multiple of"
            f" num_generations ({samples}): the responses to a prompt stay together"
        )


@cache
def reward_function_trouble(name):
    """What is wrong with rewards/NAME.py, as far as it can be told without running it; or None."""
    there = sorted(path.stem for path in (ROOT / "rewards").glob("*.py"))
    if name not in there:
        return f"there is no rewards/{name}.py (there: {', '.join(there) or 'none'})"
    try:
        code_digests(ROOT / "scripts/train_rlhf.py", [name])
    except SyntaxError as error:
        return f"rewards/{name}.py is no valid Python (line {error.lineno}: {error.msg})"
    except ValueError as error:
        return f"rewards/{name}.py is no valid Python ({error})"
    except FileNotFoundError as error:
        return f"rewards/{name}.py imports a module that is not there ({error.filename})"


def base_model(stage, name):
    """The job that makes the model which a recipe starts from: a base model or sft/RECIPE."""
    model = recipe(stage, name)["model"]
    if model.startswith("sft/") and stage != "sft":
        recipe("sft", model.removeprefix("sft/"))
        return "train_sft", model.removeprefix("sft/")
    origin = entry("models", model, f"{stage}.recipes.{name}.model")
    return ("init_model" if "init" in origin else "fetch_model"), model


def tokenizer_model(stage, name):
    """The job of the base model whose tokenizer a recipe uses, behind any sft/RECIPE."""
    if stage == "rlhf":
        return tokenizer_model("sft", recipe("rlhf", name)["actor"])
    made_by, model = base_model(stage, name)
    return tokenizer_model("sft", model) if made_by == "train_sft" else (made_by, model)


def template(stage, name):
    """How dialogues become text for the base model behind a recipe: dialogue or chat."""
    _, model = tokenizer_model(stage, name)
    return config["models"][model].get("template", config["template"])


def blend(stage, name):
    """[dataset, weight] of each dataset of a recipe; without a weight of its own it weighs 1."""
    named = [
        item if isinstance(item, dict) else {item: 1} for item in recipe(stage, name)["datasets"]
    ]
    blended = [[dataset, weight] for item in named for dataset, weight in item.items()]
    if len(blended) > len({dataset for dataset, _ in blended}):
        fail(f"config: {stage}.recipes.{name}.datasets names a dataset twice: give it a weight")
    return blended


def split_weights(dataset):
    """Shares of the phases in a dataset's rows: its own, or those of all."""
    return config["datasets"][dataset].get("split", config["split"]["weights"])


def local_path(path):
    """A path of the config, which is told from the Snakefile's folder, wherever the output goes."""
    return Path(os.path.relpath(ROOT / Path(path).expanduser()))


def source_of(dataset):
    """The local folder or file of a dataset; None where it comes from elsewhere."""
    path = config["datasets"][dataset].get("path")
    return None if path is None else local_path(path)


def models_from(*origins):
    """Constraint on names: the models that have one of these keys."""
    found = [
        name for name, model in config["models"].items() if not model.keys().isdisjoint(origins)
    ]
    return "|".join(map(re.escape, found)) or "(?!)"


def swept(sweep):
    """{name: settings} of the recipes of a sweep: one for each combination of its values."""
    settings = config["sweeps"][sweep]
    origin = entry(f"{settings['stage']}.recipes", settings["recipe"], f"sweeps.{sweep}.recipe")
    made = {}
    for values in itertools.product(*settings["over"].values()):
        own = dict(zip(settings["over"], values, strict=True))
        name = "-".join([sweep, *(f"{key}-{value}" for key, value in own.items())])
        if not re.fullmatch(NAME, name):
            fail(f"config: sweeps.{sweep}.over: {name!r} is no name of a recipe: no such values")
        made[name] = {**origin, **own}
    return made


def add_sweeps():
    """Put the recipes of all sweeps beside the others."""
    for sweep, settings in config["sweeps"].items():
        recipes = config[settings["stage"]]["recipes"]
        if sweep in recipes:
            fail(f"config: sweeps.{sweep} has the name of a recipe of {settings['stage']}")
        for name, made in swept(sweep).items():
            if name in recipes:
                fail(f"config: sweeps.{sweep} makes recipe {name}, which is there already")
            recipes[name] = made


def compared(stage, names):
    """The recipes that a comparison names, joined by -vs-; a sweep stands for all of its own."""
    found = []
    for name in names.split("-vs-"):
        sweep = config["sweeps"].get(name)
        found += swept(name) if sweep and sweep["stage"] == stage else [name]
    for name in found:
        recipe(stage, name)
    if len(set(found)) < 2:
        fail(f"output/compare/{stage}/{names}: name two recipes, A-vs-B, or a sweep")
    return list(dict.fromkeys(found))


update_config(config, typed(dict(workflow.config_settings.config)))
check_config(config, config_schema())
add_sweeps()
check_config(config, config_schema())
check_references()
check_placements()
