"""What holds the project together: one word for a thing, nothing unused, all in its room."""

import ast
import re
import sys

import yaml

from conftest import ROOT
from snakechat.data.dataset_files import kind_of
from snakechat.data.formats import FORMATS
from snakechat.data.sources import READERS
from snakechat.workflow.code_digests import code_digests

RULES = "\n".join(path.read_text() for path in sorted((ROOT / "rules").glob("*.smk")))
PROGRAMS = sorted((ROOT / "scripts").glob("*.py"))
# Others are typed by hand.
JOBS = [path for path in PROGRAMS if "\n    run(main)\n" in path.read_text()]


def imports(path, at_once=False):
    """Top names of all modules that a Python file imports, or of those that it imports at once."""
    tree = ast.parse(path.read_text())
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]


def test_each_program_is_run_by_the_rule_of_its_name():
    with_program = re.findall(r'rule (\w+):(?:(?!\nrule ).)*?program\("(\w+)"\)', RULES, re.DOTALL)
    assert all(rule == program for rule, program in with_program)
    assert sorted(rule for rule, _ in with_program) == [path.stem for path in JOBS]


def test_each_module_is_used():
    used = {name for path in PROGRAMS for name in code_digests(path)}
    modules = {f"rlhf/{path.name}" for path in (ROOT / "scripts/rlhf").glob("*.py")}
    assert modules <= used


def test_programs_do_not_import_one_another():
    names = {path.stem for path in PROGRAMS}
    for path in [*PROGRAMS, *(ROOT / "scripts/rlhf").glob("*.py")]:
        assert not names & set(imports(path)), path


def test_libraries_stay_in_their_rooms():
    rooms = {
        "deepspeed": {"engine"},
        "huggingface_hub": {"hub"},
        "matplotlib": {"pictures"},
        "jinja2": {"pages", "tokens"},
        "httpx2": {"endpoint", "hub"},
        "pyarrow": {"records", "sources"},
        "ijson": {"sources"},
    }
    for path in [*PROGRAMS, *(ROOT / "scripts/rlhf").glob("*.py")]:
        for library, room in rooms.items():
            assert library not in imports(path) or path.stem in room, path


def test_what_the_workflow_imports_is_standard_library():
    # It imports these while it plans: a dry run must not wait for torch, nor need pyarrow.
    todo = [ROOT / f"scripts/rlhf/{name}.py" for name in re.findall(r"from rlhf\.(\w+)", RULES)]
    found = set()
    while todo:
        path = todo.pop()
        assert set(imports(path, at_once=True)) <= {"rlhf", *sys.stdlib_module_names}, path
        found.add(path.stem)
        behind = re.findall(r"^\s*from rlhf\.(\w+)", path.read_text(), re.MULTILINE)
        todo += [path.with_stem(name) for name in behind if name not in found]
    assert found >= {"digests", "code", "job", "parts", "formats", "dialogues"}


def test_data_and_pages_do_not_wait_for_torch():
    for program in ("import_dataset", "split_dataset", "draw_report", "write_record", "draw_zero"):
        for name in code_digests(ROOT / f"scripts/{program}.py"):
            path = ROOT / "scripts" / name
            assert not {"torch", "transformers", "deepspeed"} & set(imports(path, at_once=True)), (
                path
            )


def test_each_format_is_in_the_schema_and_told_in_the_config():
    schema = yaml.safe_load((ROOT / "rules/config.schema.yaml").read_text())["$defs"]
    assert set(schema["read_dataset"]["properties"]["format"]["enum"]) == set(FORMATS)
    config = (ROOT / "config.yaml").read_text()
    told = re.findall(r"^#     (\w+(?:, \w+)*)  ", config, flags=re.MULTILINE)
    assert {name for names in told for name in names.split(", ")} == set(FORMATS)


def test_each_kind_of_file_can_be_named_by_a_glob():
    schema = yaml.safe_load((ROOT / "rules/config.schema.yaml").read_text())["$defs"]
    for kind in READERS:
        for name in (f"data/*.{kind}", f"data/*.{kind}?download=true"):
            assert re.search(schema["glob"]["pattern"], name), name
            assert kind_of(name) == kind
    assert not re.search(schema["glob"]["pattern"], "data/*.txt")


def test_each_setting_of_a_recipe_is_in_the_schema_and_has_a_default():
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    schema = yaml.safe_load((ROOT / "rules/config.schema.yaml").read_text())["$defs"]
    for stage in ("sft", "reward", "dpo", "rlhf"):
        defaults = set(config[stage]["defaults"])
        # The seed of all is the default of a recipe's own.
        assert defaults | {"seed"} == set(schema[f"{stage}_recipe"]["properties"])
        required = schema[f"{stage}_stage"]["properties"]["defaults"]["required"]
        assert defaults == set(required)


def test_each_setting_is_read_by_the_stage_it_belongs_to():
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    for stage in ("sft", "reward", "dpo", "rlhf"):
        read = (ROOT / "rules/jobs.smk").read_text() + (ROOT / "rules/config.smk").read_text()
        for name in code_digests(ROOT / f"scripts/train_{stage}.py"):
            read += (ROOT / "scripts" / name).read_text()
        for key in set(config[stage]["defaults"]) - {"placement"}:
            assert re.search(rf'settings\.{key}\b|"{key}"', read), f"{stage}.{key}"


def test_the_preset_of_deepspeed_chat_has_its_constants():
    # dschat/rlhf/ppo_trainer.py sets the first ones; its recipes leave the last at 1.
    config = yaml.safe_load((ROOT / "config.yaml").read_text())["rlhf"]
    settings = {**config["defaults"], **config["presets"]["deepspeed_chat"]}
    constants = {"kl_coef": 0.1, "score_clip": 5, "clip_range": 0.2, "value_clip_range": 0.2}
    constants |= {"gamma": 1, "gae_lambda": 0.95, "ppo_epochs": 1, "num_generations": 1}
    constants |= {"standardize_scores": "none", "whiten_advantages": False, "kl_target": None}
    assert constants.items() <= settings.items()


def test_both_readmes_show_the_same_commands():
    command = re.compile(r"^\s*(snakemake [^#\n]+?|make \w+)\s*(?:#.*)?$", re.MULTILINE)
    names = ("README.md", "README.zh-CN.md")
    blocks = [command.findall((ROOT / name).read_text()) for name in names]
    assert blocks[0] == blocks[1] and blocks[0]
