"""No text from users or data is interpreted by a shell."""

import ast
import re

import pytest

from conftest import ROOT

PROGRAMS = sorted(ROOT.glob("scripts/**/*.py")) + sorted(ROOT.glob("rewards/*.py"))
RULES = [ROOT / "Snakefile", *sorted(ROOT.glob("rules/*.smk"))]
SHELLS = {"system", "popen", "getoutput", "getstatusoutput", "create_subprocess_shell"}
SHELLS |= {f"spawn{kind}" for kind in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")}
# Texts that Snakemake puts into the commands of rules.
VALUE = re.compile(r"\{+((?:input|output|params|log)\b[^}]*)\}+")


def shell_calls(tree):
    """Return the lines of calls that pass text to a shell."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            shell = [word.value for word in node.keywords if word.arg == "shell"]
            if name in SHELLS or any(getattr(value, "value", True) for value in shell):
                yield node.lineno


def test_no_program_uses_a_shell():
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in PROGRAMS
        for line in shell_calls(ast.parse(path.read_text()))
    }
    assert not found


@pytest.mark.parametrize("code", ["run(x, shell=True)", "os.system(x)", "run(x, shell=flag)"])
def test_shells_are_noticed(code):
    assert list(shell_calls(ast.parse(code))) == [1]


def test_commands_of_rules_quote_all_values():
    values = [value for path in RULES for value in VALUE.findall(path.read_text())]
    assert len(values) > 4
    # RuleFunctions.command joins its words by shlex.
    assert {value for value in values if not value.endswith(":q")} == {"params.command"}
