"""The code of our own programs, compared with what Python finds and loads."""

import ast
import dis
import json
import modulefinder
from pathlib import Path

import pytest

from conftest import ROOT
from snakechat.workflow.code_digests import CodeCache, code_digests, program_code
from snakechat.workflow.reachability import WITHOUT_EFFECT, Reach

SCRIPTS = ROOT / "scripts"


def reach_of(program):
    reach = Reach(SCRIPTS)
    reach.count_whole((program.removesuffix(".py"),), is_program=True)
    reach.finish()
    return reach


PROGRAMS = sorted(path.name for path in SCRIPTS.glob("*.py"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_modules_of_our_programs_are_among_those_that_python_finds(program):
    # The standard library's finder of imports serves as an independent implementation. It also
    # follows imports inside functions that the program does not reach.
    finder = modulefinder.ModuleFinder(path=[str(SCRIPTS)])
    finder.run_script(str(SCRIPTS / program))
    files = (Path(module.__file__) for module in finder.modules.values() if module.__file__)
    loaded = {path for path in files if SCRIPTS in path.parents}
    reach = reach_of(program)
    assert {reach.path(key) for key in reach.modules} <= loaded


@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_in_our_programs_makes_all_modules_count(program):
    assert {name for name in code_digests(SCRIPTS / program) if "/" not in name} == {program}


def loaded_globals(code):
    """The global names that compiled code loads."""
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    return names.union(
        *(loaded_globals(each) for each in code.co_consts if hasattr(each, "co_code"))
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_python_loads_no_global_name_of_reached_definitions_that_is_not_reached(program):
    """The compiler serves as an independent implementation of the scopes of names."""
    reach = reach_of(program)

    def is_reached(key, name):
        state = reach.modules[key]
        binding = state.module.bindings.get(name)
        return binding is None or (
            state.reached.issuperset(binding.statements)
            and state.imports.issuperset(binding.imports)
        )

    checked = 0
    for key, state in reach.modules.items():
        for node in ast.parse(reach.path(key).read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and is_reached(key, node.name):
                code = compile(ast.Module([node], []), "", "exec")
                names = {name for name in loaded_globals(code) if not is_reached(key, name)}
                assert names == set(), (key, node.name)
                checked += 1
        for each in state.imports:
            module = tuple(each.module.split("."))
            if each.attribute and module in reach.modules and module not in WITHOUT_EFFECT:
                assert is_reached(module, each.attribute), (key, each)
    assert checked > 3


def test_libraries_of_our_programs():
    split = program_code(SCRIPTS / "split_dataset.py").imports
    training = program_code(SCRIPTS / "train_sft.py").imports
    assert {"torch", "transformers", "deepspeed"} <= training
    assert split.isdisjoint({"torch", "transformers", "deepspeed", "matplotlib"})
    drawing = program_code(SCRIPTS / "draw_report.py").imports
    assert "matplotlib" in drawing - training and "torch" not in drawing


def test_locks_records_and_the_cache_make_no_result_stale():
    """They are imported by every job, and no content depends on them."""
    names = program_code(SCRIPTS / "train_sft.py").digests
    unwanted = {f"snakechat/workflow/{name}.py" for name in ("locks", "run_record", "result_cache")}
    assert unwanted.isdisjoint(names)
    assert {"snakechat/workflow/job.py", "snakechat/workflow/distributed.py"} <= names.keys()


def test_the_code_of_a_program_is_remembered_on_disk(tmp_path):
    code = program_code(SCRIPTS / "train_rlhf.py", ["shop"])
    assert CodeCache(tmp_path / "code.json", "1").code(SCRIPTS / "train_rlhf.py", ("shop",)) == code
    remembered = CodeCache(tmp_path / "code.json", "1")
    assert remembered.code(tmp_path / "train_rlhf.py", ("shop",)) == code
    assert remembered.code(SCRIPTS / "train_rlhf.py", ()) != code


def edit_memory(text):
    """Return the text of a memory in which a digest was changed."""
    memory = json.loads(text)
    memory["entries"]["train_sft.py"][0]["train_sft.py"] = "0" * 64
    return json.dumps(memory)


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda _, text=text: text for text in ("", "[]", "[" * 5000, '{"sources": "1"}')),
        *(lambda text: text[:-9], edit_memory),
    ],
)
def test_a_damaged_memory_is_ignored(tmp_path, damage):
    program, memory = SCRIPTS / "train_sft.py", tmp_path / "code.json"
    CodeCache(memory, "1").code(program, ())
    memory.write_text(damage(memory.read_text()))
    assert CodeCache(tmp_path / "code.json", "1").code(program, ()) == program_code(program)
