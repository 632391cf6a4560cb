"""Code and pins make exactly the results stale that were made with them."""

import re

from conftest import ROOT
from snakechat.jobs import rules
from support.staleness import RULES, SCRIPTS, code, few_rows, fresh, pin, replaced, rows

PROGRAMS = sorted(path.name for path in SCRIPTS.glob("*.py"))
# A module of each room, one that every program imports, and one that no rule imports.
MODULES = [
    "snakechat/workflow/job.py",
    "snakechat/data/ragged_arrays.py",
    "snakechat/config/rlhf.py",
    "snakechat/modeling/models.py",
    "snakechat/training/engine.py",
    "snakechat/algorithms/policy_gradient.py",
    "snakechat/evaluation/comparisons.py",
    "snakechat/reporting/model_card.py",
    "snakechat/reporting/plots.py",
    "snakechat/planning/planner.py",
    "snakechat/jobs/model_jobs.py",
    "snakechat/rules/functions.py",
]
CODE = {name: code(name) for name in (*PROGRAMS, *MODULES)}


def test_the_modules_cover_the_rooms():
    rooms = {path.parent.name for path in SCRIPTS.glob("snakechat/*/__init__.py")}
    assert {name.split("/")[1] for name in MODULES} == rooms
    for name in ("planning/planner.py", "reporting/model_card.py", "rules/functions.py"):
        assert not CODE[f"snakechat/{name}"].rules
    assert CODE["snakechat/workflow/job.py"].rules == RULES


def test_every_rule_with_a_spec_has_a_row():
    assert set(rules.RULES) == RULES


@rows(CODE)
def test_code_makes_exactly_the_rules_that_run_it_and_those_downstream_stale(plans, row):
    assert plans(row) == row.rules


# Each library that is pinned directly, and some that these require.
REQUIRED = re.findall(r"^([\w.-]+)==", (ROOT / "requirements.in").read_text(), re.MULTILINE)
REQUIRED = sorted(
    {name.lower().replace("_", "-") for name in REQUIRED} | {"pillow", "sympy", "rich", "regex"}
)
PINS = {name: pin(name) for name in REQUIRED}


def test_the_pins_are_those_of_libraries_that_compute():
    for name in ("tqdm", "tensorboard", "snakemake", "rich", "httpx2"):
        assert not PINS[name].rules
    trainings = {"train_sft", "train_reward", "train_dpo", "train_rlhf"}
    assert trainings <= PINS["torch"].rules
    assert "import_dataset" not in PINS["torch"].rules
    assert PINS["matplotlib"].rules.isdisjoint(trainings)


@rows(PINS)
def test_a_pin_makes_exactly_the_rules_stale_whose_programs_import_the_library(plans, row):
    assert plans(row) == row.rules


# --- edits without effect -------------------------------------------------------------------


def all_code(change):
    """Change the text of each module and program."""

    def edit(folder):
        for path in (folder / "scripts").rglob("*.py"):
            before = path.read_text()
            path.write_text(change(before))
            assert path.read_text() != before or not before, path

    return edit


def add_a_module(folder):
    (folder / "scripts/snakechat/unused.py").write_text("NUMBER = 1\n")
    (folder / "scripts/tool.py").write_text("from snakechat import unused\n")


def write_reward_functions(folder):
    replaced("rewards/shop.py", ("float(", "-float("))(folder)
    (folder / "rewards/new.py").write_text("def score(prompts, responses):\n    return [0, 0]\n")


FRESH = {
    "comments": fresh(all_code(lambda text: f"# A comment.\n{text}\n    # Another.\n")),
    "docstrings": fresh(all_code(lambda text: text.replace('"""', '"""Again: ', 1))),
    "layout": fresh(all_code(lambda text: text.replace("\n\n\n", "\n\n\n\n") + "\n")),
    "code that nothing uses": fresh(add_a_module),
    "comments in the Snakefile": fresh(
        replaced("Snakefile", ("# From preference", "# From all preference"))
    ),
    "messages of rules": fresh(replaced("rules/sft.smk", ('"Fine-tuning', '"Tuning'))),
    "comments in the pins": fresh(replaced("requirements.txt", ("# Written by", "# By"))),
    "reward functions that the recipe does not name": fresh(write_reward_functions),
}


@rows(FRESH)
def test_an_edit_that_changes_no_result_makes_nothing_stale(plans, row):
    assert plans(row) == row.rules


@few_rows({**CODE, **PINS, **FRESH})
def test_a_dry_run_plans_these_rules(dry_runs, row):
    assert dry_runs(row) == row.rules
