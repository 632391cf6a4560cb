"""The code of our own programs, compared with what Python finds and loads."""

import modulefinder
from pathlib import Path

import pytest

from conftest import ROOT
from snakechat.workflow.code_digests import LAUNCHED_BY, WITHOUT_EFFECT, Modules
from support.sources import code_digests

pytestmark = pytest.mark.slow

SCRIPTS = ROOT / "scripts"


def modules_found_from(*names):
    """Return the files that these files import, at any depth, relative to scripts/."""
    # The standard library's finder of imports serves as an independent implementation.
    modules = []
    for name in names:
        finder = modulefinder.ModuleFinder(path=[str(SCRIPTS)])
        finder.run_script(str(SCRIPTS / name))
        modules += finder.modules.values()
    files = (Path(module.__file__) for module in modules if module.__file__)
    return {path.relative_to(SCRIPTS).as_posix() for path in files if SCRIPTS in path.parents}


@pytest.mark.parametrize("program", ["train_rlhf.py", "draw_page.py", "import_dataset.py"])
def test_the_modules_of_our_programs_are_those_that_python_finds(program):
    found = modules_found_from(program, LAUNCHED_BY)
    code = code_digests(SCRIPTS / program, uses_vllm=True)
    counted = {name for name in code if name.endswith(".py")}
    assert counted <= found - WITHOUT_EFFECT
    # The others are imported by modules without effect alone.
    assert found - counted <= WITHOUT_EFFECT | modules_found_from(*WITHOUT_EFFECT)


def test_vllm_counts_where_it_samples_alone():
    program = SCRIPTS / "generate_responses.py"
    more = code_digests(program, uses_vllm=True).keys() - code_digests(program).keys()
    assert "snakechat/modeling/vllm_sampler.py" in more
    assert not Modules(SCRIPTS).code("train_sft").imports & {"vllm"}
