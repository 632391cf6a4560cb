"""README, CONTRIBUTING and docs/: links, commands, config keys and files exist."""

import importlib.util
import re
import shlex
import sys
import tomllib
from collections import defaultdict
from itertools import pairwise

import pytest
import yaml

from conftest import ROOT, Workflow, copy_sources
from snakechat.config.recipes import RECIPES, Config, checked
from snakechat.config.sections import Sections
from support.configs import config_values, project_values

sys.path.insert(0, str(ROOT / "docs"))

from config_reference import PAGES, Page, config_schema

TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
ENGLISH = [*TOP, *sorted((ROOT / "docs/en").rglob("*.md"))]
CHINESE = [ROOT / "README.zh-CN.md", *sorted((ROOT / "docs/zh").rglob("*.md"))]
DOCS = [*ENGLISH, *CHINESE]
TRANSLATED = [ROOT / "README.md", *sorted((ROOT / "docs/en").rglob("*.md"))]
CONFIG = project_values()
SCHEMA = config_schema()
STAGES = ("sft", "reward", "dpo", "rlhf")
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Files that tutorials write.
WRITTEN = {
    title
    for path in (ROOT / "docs/en/tutorials").glob("*.md")
    for title in re.findall(r'^```\w+ title="([^"]+)"', path.read_text(), re.MULTILINE)
}
# Placeholders.
PLACEHOLDER = re.compile(r"\b[A-Z]{2,}\b|\bmine\b|[*{<]|\.\.\.")
# These pages name what does not exist any more.
HISTORY = {"CHANGELOG.md", "migration.md"}


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def translation(path):
    """The Chinese page of an English one."""
    if path.name == "README.md":
        return ROOT / "README.zh-CN.md"
    return ROOT / "docs/zh" / path.relative_to(ROOT / "docs/en")


def blocks(path, language):
    """The code blocks of a page in a language ("" for commands)."""
    return [text for found, text in FENCE.findall(path.read_text()) if found == language]


def prose(path):
    """A page without its code blocks."""
    return FENCE.sub("", path.read_text())


def anchors(path):
    """The anchors that GitHub and the site make of headings."""
    titles = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def keys_of(schema):
    """All property names in a JSON schema."""
    if isinstance(schema, dict):
        for name, inner in schema.items():
            if name == "properties":
                yield from inner
            yield from keys_of(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from keys_of(inner)


# --- reference of all config keys ---------------------------------------------------------------


@pytest.mark.parametrize("language", PAGES)
def test_config_reference_is_up_to_date(language):
    assert PAGES[language].read_text() == Page(language).text(), "run make docs"


def test_config_texts_belong_to_existing_keys():
    texts = yaml.safe_load((ROOT / "docs/config.texts.yaml").read_text())["keys"]
    keys = Page("en").keys
    assert texts.keys() <= keys.keys() | {key.partition(".")[0] for key in keys}


# --- both languages -----------------------------------------------------------------------------


@pytest.mark.parametrize("language", ["en", "zh"])
def test_each_language_has_all_pages_and_its_navigation_names_them(language):
    def pages_of(language):
        folder = ROOT / "docs" / language
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.md"))

    named = re.findall(r'"([\w/-]+\.md)"', (ROOT / f"docs/{language}.toml").read_text())
    assert sorted(named) == pages_of(language) == pages_of("en")


def test_translations_show_the_same_code():
    def code(path):
        """All but trees of folders, without comments."""
        return [
            re.sub(r"(^|\s+)#.*", "", found.group())
            for found in FENCE.finditer(path.read_text())
            if found[1] or any(map(is_command, found[2].splitlines()))
        ]

    for path in TRANSLATED:
        assert code(path) == code(translation(path)), name_of(path)


# --- links and names ----------------------------------------------------------------------------


def test_links_lead_somewhere():
    for path in DOCS:
        links = re.findall(r"\]\(([^)\s]+)\)", prose(path))
        for link in [*links, *re.findall(r'src="([^"]+)"', prose(path))]:
            if link.startswith(("http:", "https:")):
                continue
            place, _, anchor = link.partition("#")
            target = (path.parent / place).resolve() if place else path
            assert target.exists(), f"{name_of(path)}: {link}"
            assert not anchor or anchor in anchors(target), f"{name_of(path)}: {link}"


def test_named_files_exist():
    folders = "scripts|rules|tests|profiles|envs|rewards|prompts|docs"
    for path in DOCS:
        if path.name in HISTORY:
            continue
        for name in re.findall(rf"(?<![\w/.])(?:{folders})/[\w./-]+\w", path.read_text()):
            generated = name.startswith("docs/site") or name in WRITTEN
            assert generated or PLACEHOLDER.search(name) or (ROOT / name).exists(), (
                f"{name_of(path)}: {name}"
            )


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text().replace("$(VENV)", ".venv")
    for path in DOCS:
        for target in re.findall(r"(?:^|`)make ([\w./-]+)", path.read_text(), re.MULTILINE):
            assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), (
                f"{name_of(path)}: {target}"
            )


def test_settings_in_the_text_exist():
    keys = {*keys_of(SCHEMA), "prompt", "chosen", "rejected", "NAME", "mine"}
    for stage in STAGES:
        keys |= CONFIG[stage]["recipes"].keys()
    for section in ("datasets", "deployments", "sweeps", "models"):
        keys |= CONFIG[section].keys()
    for profile in (ROOT / "profiles").glob("*/config.yaml"):
        keys |= set(re.findall(r"([\w-]+):", profile.read_text()))
    for path in DOCS:
        for span in re.findall(r"`([^`]+)`", prose(path)):
            span = " ".join(span.split())
            whole = "..." not in span and (span.count(": ") == 1 or span.endswith("}"))
            value = yaml.safe_load(span) if whole and re.match(r"\{?[a-z_]+: \S", span) else {}
            if isinstance(value, dict) and not span.startswith(("error:", "warning:", "config:")):
                assert value.keys() <= keys, f"{name_of(path)}: {span}"


# --- commands -----------------------------------------------------------------------------------


def is_command(line):
    return line.startswith(("snakemake ", "python scripts/", "make ", "pytest "))


def commands_of(path):
    """Yield each command of a page and the YAML block above it."""
    text, above = path.read_text(), ""
    for found in re.finditer(rf"{FENCE.pattern}|`([^`]+)`", text, re.MULTILINE | re.DOTALL):
        language, block, span = found.groups()
        if language == "yaml":
            above = block
        for line in block.splitlines() if block else [" ".join((span or "").split())]:
            line = line.removeprefix("$ ").rpartition(" | ")[2].partition(" > ")[0]
            # "is not installed" is a message.
            placeholder = r"\.\.\.|=N\b|\bSTAGE\b|\bTARGET\b|is not installed"
            if is_command(line) and not re.search(placeholder, line):
                yield line, above


def parse_snakemake(line):
    """The options and targets of a Snakemake command; None for one that only writes a report."""
    words = shlex.split(line, comments=True)[1:]
    flags = {"-n", "-p", "-f", "-F", "--report-after-run"}
    options, targets = [], []
    for before, word in pairwise(["", *words]):
        # These do not change the plan.
        if word in flags or {"--cores", "--sdm", "--logger", "--report"} & {word, before}:
            continue
        with_value = {"--profile", "--configfile", "--config", "--directory", "--until", "-R"}
        if before in with_value or word[0] == "-":
            options.append(word)
        else:
            targets.append(word)
    return (tuple(options), targets) if targets or "--report" not in words else None


# What mine.yaml has where a page does not show it.
EXAMPLE = blocks(ROOT / "README.md", "yaml")[0]


def plans():
    """{(options, YAML): targets} of all Snakemake commands of the English pages.

    Commands with the same options are planned together, and so are all without profile and file.
    """
    found, plain, values = defaultdict(set), set(), []
    # Tutorials are executed: test_tutorials.py.
    for path in (path for path in ENGLISH if path.parent.name != "tutorials"):
        for line, above in commands_of(path):
            if not line.startswith("snakemake") or not (parsed := parse_snakemake(line)):
                continue
            options, targets = parsed
            if {"--profile", "--configfile"} & set(options):
                config = above or EXAMPLE if "mine.yaml" in options else ""
                found[options, config].update(targets)
            else:
                # Snakemake's own rule stands for no target.
                plain.update(targets or ["all"])
                values += [option for option in options if "=" in option]
    return {**found, (("--config", *sorted(set(values))), ""): plain}


PLANS = plans()


@pytest.fixture(scope="module")
def workflow(tmp_path_factory):
    """A workflow with the data that the commands name."""
    folder = tmp_path_factory.mktemp("docs") / "sources"
    copy_sources(folder)
    if (ROOT / "kubernetes").exists() and not (folder / "kubernetes").exists():
        (folder / "kubernetes").symlink_to("profiles/kubernetes")
    for name in ("mydata", "data/rm-static"):
        (folder / name).mkdir(parents=True)
        row = '{"prompt": "Why?", "chosen": "So.", "rejected": "No."}\n'
        (folder / name / "rows.jsonl").write_text(row)
    for model in (folder / "models/opt-125m", folder / "smollm2"):
        model.mkdir(parents=True)
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (model / name).write_text("{}")
    (folder / "rewards/mine.py").write_text(
        "def score(prompts, responses):\n    return responses\n"
    )
    return Workflow(folder)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: " ".join(plan[0]) or "plain")
def test_documented_commands_plan_a_build(plan, workflow):
    options, above = plan
    if "--profile" in options:
        profile = options[options.index("--profile") + 1]
        file = ROOT / profile / "config.yaml"
        assert file.is_file()
        executor = yaml.safe_load(file.read_text()).get("executor")
        plugin = f"snakemake_executor_plugin_{executor}"
        if executor and not importlib.util.find_spec(plugin):
            pytest.skip(f"needs {plugin}")
    if above:
        (workflow.folder / "mine.yaml").write_text(above)
    options = [re.sub(r"/(data|models)/", r"\1/", option) for option in options]
    process = workflow.snakemake(*sorted(PLANS[plan]), "-n", "--quiet", "rules", *options)
    assert process.returncode == 0, process.stdout[-3000:]


def test_documented_options_of_programs_exist():
    # explain and estimate pass all other options to Snakemake.
    snakemake_options = {"--config", "--configfile", "--directory"}
    used = defaultdict(set)
    for path in ENGLISH:
        if path.name in HISTORY:
            continue
        for line, _ in commands_of(path):
            if line.startswith("python scripts/"):
                words = shlex.split(line, comments=True)[1:]
                used[words[0]] |= {word for word in words[1:] if word.startswith("--")}
    assert used
    for program, options in used.items():
        code = (ROOT / program).read_text()
        exist = set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', code))
        if "plan_build" in code:
            exist |= snakemake_options
        assert options <= exist, program


def test_documented_configs_fit_the_schema():
    for path in DOCS:
        for block in blocks(path, "yaml"):
            changes = yaml.safe_load(block)
            config = Config(checked(config_values(changes), Sections), ROOT, ROOT)
            for stage in RECIPES:
                for name in changes.get(stage, {}).get("recipes", ()):
                    config.recipe(stage, name)


def test_all_files_have_the_version_of_the_changelog():
    """The workflow of releases takes the version and the notes from these files."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    versions = re.findall(
        r"^## \[(\d+\.\d+\.\d+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert versions[0] == (cited["version"], str(cited["date-released"]))
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert package["version"] == cited["version"]
    assert f'VERSION = "{cited["version"]}"\n' in (ROOT / "Snakefile").read_text()


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_tour_quotes_the_programs(language):
    """Lines of code in the tour are lines of one file, in this order."""
    text = (ROOT / "docs" / language / "tour.md").read_text()
    programs = [path.read_text().splitlines() for path in (ROOT / "scripts").rglob("*.py")]
    quoted = [block for kind, block in FENCE.findall(text) if kind == "python"]
    assert len(quoted) == 2
    for block in quoted:
        assert any(
            all(line.strip() in lines for line in block.splitlines())
            for lines in (iter(map(str.strip, program)) for program in programs)
        ), block
