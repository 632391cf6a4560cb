"""Imports of rooms and libraries, what planning loads, and quoted values in commands of rules."""

import ast
import re
import subprocess
import sys
from functools import cache

import pytest

from conftest import ROOT
from snakechat.config.recipes import RECIPES
from support.sources import code_digests

SCRIPTS = ROOT / "scripts"
PROGRAMS = sorted(SCRIPTS.glob("*.py"))
MODULES = sorted((SCRIPTS / "snakechat").rglob("*.py"))
RULES = "\n".join(
    path.read_text() for path in (ROOT / "Snakefile", *sorted((ROOT / "rules").glob("*.smk")))
)

# From the lowest: a module imports from its own room and from those before it.
ROOMS = (
    "workflow",
    "data",
    "config",
    "jobs",
    "modeling",
    "training",
    "algorithms",
    "evaluation",
    "estimates",
    "pages",
)
# The rooms that may import a library.
LIBRARIES = {
    "deepspeed": {"training"},
    "huggingface_hub": {"data", "modeling", "pages"},
    "matplotlib": {"pages"},
    "pyarrow": {"data"},
    "pydantic": {"config"},
    "snakemake": {"workflow"},
    "vllm": {"modeling"},
}
# Libraries that take seconds to import, or that a cluster's head node may not have.
HEAVY = {"torch", "transformers", "deepspeed", "pyarrow", "numpy", "matplotlib"}


@cache
def tree_of(path):
    return ast.parse(path.read_text())


def at_once(node):
    """Yield a node and those in it that Python runs when it imports the module."""
    yield node
    later = ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda
    for child in ast.iter_child_nodes(node):
        is_for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if not isinstance(child, later) and not is_for_types:
            yield from at_once(child)


@cache
def imported_by(path, nodes_of=ast.walk):
    """Return the dotted names of all modules, and of what is in them, that a file imports."""
    names = set()
    for node in nodes_of(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def imported_libraries(path):
    """Return the top-level names of all modules that a file imports, wherever in it."""
    return {name.partition(".")[0] for name in imported_by(path)}


@cache
def loaded_by(path):
    """Return the libraries that Python loads when it imports a file, also by modules of ours."""
    names = imported_by(path, at_once)
    files = {SCRIPTS / f"{name.replace('.', '/')}.py" for name in names} & {*MODULES}
    return {name.partition(".")[0] for name in names}.union(*map(loaded_by, files))


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_downwards(room):
    above = {*ROOMS[ROOMS.index(room) + 1 :], "snakefile"}
    paths = [path for path in MODULES if path.parent.name == room]
    assert paths
    for path in paths:
        rooms = {name.split(".")[1] for name in imported_by(path) if "snakechat." in name}
        assert not rooms & above, path


def test_each_folder_of_the_package_is_a_room():
    assert {path.parent.name for path in MODULES} == {"snakechat", *ROOMS}


@pytest.mark.parametrize("library", LIBRARIES)
def test_library_stays_in_its_rooms(library):
    importers = [path for path in MODULES if library in imported_libraries(path)]
    assert {path.parent.name for path in importers} <= LIBRARIES[library]


def test_programs_do_not_import_one_another():
    names = {path.stem for path in PROGRAMS}
    for path in [*PROGRAMS, *MODULES]:
        assert not names & imported_libraries(path), path


def test_each_module_is_imported_somewhere():
    imported = set(re.findall(r"^ *from ([\w.]+) import", RULES, re.MULTILINE))
    imported |= {
        f"{package}.{name}"
        for package, name in re.findall(r"^ *from ([\w.]+) import (\w+)$", RULES, re.MULTILINE)
    }
    imported |= set().union(
        *map(imported_by, [*PROGRAMS, *MODULES, *(ROOT / "rewards").glob("*.py")])
    )
    modules = {".".join(path.relative_to(SCRIPTS).with_suffix("").parts) for path in MODULES}
    assert not modules - imported - {"snakechat.__init__"}


def test_planning_loads_no_heavy_library():
    """A dry run takes about two seconds."""
    statements = re.findall(r"^from snakechat[\w.]* import (?:\([^)]*\)|.+)", RULES, re.MULTILINE)
    assert len(statements) > 1
    program = "\n".join([*statements, f"import sys; print({HEAVY!r} & {{*sys.modules}})"])
    process = subprocess.run(
        [sys.executable, "-c", program], cwd=SCRIPTS, capture_output=True, text=True
    )
    assert process.stdout == "set()\n", process.stderr


# Libraries that take a tenth of a second or more, and those that a program always uses. With the
# update of a library, the results of all programs that import it are stale.
SLOW = HEAVY - {"numpy"} | {"datasets", "huggingface_hub", "openai", "peft", "pydantic"}
SLOW |= {"tensorboard", "yaml"}
MODELS = {"torch", "transformers", "huggingface_hub", "pydantic"}
USED = {
    "import_dataset": {"pyarrow", "yaml"},
    "init_model": {"pyarrow", "torch", "transformers"},
    "split_dataset": {"pyarrow"},
    "tokenize_phase": {"pyarrow", "transformers", "huggingface_hub"},
    "select_responses": {"pyarrow"},
    "label_pairs": {"pyarrow", "pydantic"},
    "find_row": {"pyarrow"},
    "show_rows": {"yaml"},
    "draw_page": {"matplotlib", "yaml"},
    "check_gate": {"yaml"},
    **dict.fromkeys(["train_sft", "train_reward", "train_dpo", "evaluate_sft"], MODELS),
    "train_rlhf": {*MODELS, "pyarrow"},
}


@pytest.mark.parametrize("program", USED)
def test_a_program_loads_no_library_that_it_may_not_use(program):
    assert loaded_by(SCRIPTS / f"{program}.py") & SLOW <= USED[program]


@pytest.mark.parametrize("stage", RECIPES)
def test_each_setting_is_used(stage):
    """A declared hyper-parameter that nothing reads would be silently without effect."""
    names = set(re.findall(r"\w+", RULES))
    training = (f"train_{stage}",)
    programs = ("generate_responses", "score_responses") if stage == "generations" else training
    for name in {name for each in programs for name in code_digests(SCRIPTS / f"{each}.py")}:
        if name.endswith(".py") and not name.startswith("snakechat/config/"):
            nodes = list(ast.walk(tree_of(SCRIPTS / name)))
            names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            # getattr(settings, "lora_rank"): the whole of a string.
            names |= {node.value for node in nodes if isinstance(node, ast.Constant)}
    for path in (SCRIPTS / "snakechat/config").glob("*.py"):
        if path.stem not in {"settings", "rlhf", "sections"}:
            names |= set(re.findall(r"\"(\w+)\"", path.read_text()))
    assert RECIPES[stage].__base__.model_fields.keys() <= names


def test_commands_of_rules_quote_all_values():
    # Texts that Snakemake puts into the commands of rules, in which no shell interprets them.
    values = re.findall(r"\{+((?:input|output|params|log)\b[^}]*)\}+", RULES)
    assert len(values) > 4
    # RuleFunctions.command joins its words by shlex.
    assert {value for value in values if not value.endswith(":q")} == {"params.command"}
