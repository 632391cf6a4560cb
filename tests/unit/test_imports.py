"""Libraries in their rooms, and what programs and planning import."""

import ast
import dataclasses
import re
import subprocess
import sys
from functools import cache

import pytest

from conftest import ROOT
from snakechat.config.schema import SETTINGS
from snakechat.workflow.code_digests import code_digests

SCRIPTS = ROOT / "scripts"
PROGRAMS = sorted(SCRIPTS.glob("*.py"))
MODULES = sorted((SCRIPTS / "snakechat").rglob("*.py"))
RULES = "\n".join(
    path.read_text() for path in (ROOT / "Snakefile", *sorted((ROOT / "rules").glob("*.smk")))
)

# The rooms that may import a library.
LIBRARIES = {
    "deepspeed": {"training"},
    "huggingface_hub": {"data", "modeling", "reporting"},
    "matplotlib": {"reporting"},
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


def imported_libraries(path):
    """Return the top-level names of all modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.partition(".")[0])
    return names


def loaded_by(statement, libraries):
    """Return which of these libraries a new Python process has loaded after a statement."""
    program = f"import sys\n{statement}\nprint(*sorted({libraries!r} & set(sys.modules)))"
    process = subprocess.run(
        [sys.executable, "-c", program], cwd=SCRIPTS, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.split()


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
    for path in [*PROGRAMS, *MODULES, *(ROOT / "rewards").glob("*.py")]:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    modules = {".".join(path.relative_to(SCRIPTS).with_suffix("").parts) for path in MODULES}
    assert {name for name in modules - imported if not name.endswith("__init__")} == set()


def test_planning_loads_no_heavy_library():
    """A dry run takes about two seconds."""
    statements = re.findall(r"^from snakechat[\w.]* import (?:\([^)]*\)|.+)", RULES, re.MULTILINE)
    assert len(statements) > 3
    assert loaded_by("\n".join(statements), HEAVY) == []


@pytest.mark.parametrize(
    "program",
    [
        "import_dataset",
        "split_dataset",
        "draw_report",
        "check_gate",
    ],
)
def test_program_for_data_or_pages_does_not_load_torch(program):
    assert loaded_by(f"import {program}", {"torch", "transformers", "deepspeed"}) == []


@pytest.mark.parametrize("stage", SETTINGS)
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
        if path.stem not in {*SETTINGS, "common", "renamed"}:
            names |= set(re.findall(r"\"(\w+)\"", path.read_text()))
    assert {field.name for field in dataclasses.fields(SETTINGS[stage])} <= names
