"""No text from users or data is interpreted by a shell; ruff checks the programs."""

import re

from conftest import ROOT

RULES = [ROOT / "Snakefile", *sorted(ROOT.glob("rules/*.smk"))]
# Texts that Snakemake puts into the commands of rules.
VALUE = re.compile(r"\{+((?:input|output|params|log)\b[^}]*)\}+")


def test_commands_of_rules_quote_all_values():
    values = [value for path in RULES for value in VALUE.findall(path.read_text())]
    assert len(values) > 4
    # RuleFunctions.command joins its words by shlex.
    assert {value for value in values if not value.endswith(":q")} == {"params.command"}
