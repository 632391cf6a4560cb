"""README, CONTRIBUTING and docs/: links, commands, config keys, names and messages exist."""

import importlib.util
import re
import shlex
import sys
from collections import defaultdict
from itertools import pairwise

import pytest
import yaml

from conftest import ROOT, Workflow, copy_sources
from snakechat.config.schema import check_schema, config_schema

sys.path.insert(0, str(ROOT / "docs"))

from config_reference import PAGES, Page

TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
ENGLISH = [*TOP, *sorted((ROOT / "docs/en").rglob("*.md"))]
CHINESE = [ROOT / "README.zh-CN.md", *sorted((ROOT / "docs/zh").rglob("*.md"))]
DOCS = [*ENGLISH, *CHINESE]
TRANSLATED = [ROOT / "README.md", *sorted((ROOT / "docs/en").rglob("*.md"))]
CONFIG = yaml.safe_load((ROOT / "config.yaml").read_text())
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


def pages_of(language):
    """The pages of a language, as the navigation names them."""
    folder = ROOT / "docs" / language
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.md"))


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


def spans(text):
    """Inline code."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def rows(path):
    """The cells of each row of the tables of a page."""
    lines = re.findall(r"^\|(.*)\|$", prose(path), re.MULTILINE)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines]


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


def test_each_page_exists_in_both_languages():
    assert pages_of("en") == pages_of("zh")


@pytest.mark.parametrize("path", TRANSLATED, ids=name_of)
def test_translations_have_the_same_headings_and_tables(path):
    both = (path, translation(path))
    levels = [re.findall(r"^(#+) ", prose(page), re.MULTILINE) for page in both]
    assert levels[0] == levels[1]
    assert [len(row) for row in rows(both[0])] == [len(row) for row in rows(both[1])]


@pytest.mark.parametrize("path", TRANSLATED, ids=name_of)
def test_translations_show_the_same_commands(path):
    shown = [
        [re.split(r"\s+#", line)[0] for block in blocks(page, "") for line in block.splitlines()]
        for page in (path, translation(path))
    ]
    commands = [[line for line in lines if is_command(line)] for lines in shown]
    assert commands[0] == commands[1]


@pytest.mark.parametrize("path", TRANSLATED, ids=name_of)
def test_translations_show_the_same_configs(path):
    def configs(page):
        return [yaml.safe_load(block) for block in blocks(page, "yaml")]

    assert configs(path) == configs(translation(path))


# --- links and names ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\(([^)\s]+)\)", prose(path))
    for link in [*links, *re.findall(r'src="([^"]+)"', prose(path))]:
        if link.startswith(("http:", "https:")):
            continue
        place, _, anchor = link.partition("#")
        target = (path.parent / place).resolve() if place else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("language", ["en", "zh"])
def test_navigation_contains_every_page(language):
    named = re.findall(r'"([\w/-]+\.md)"', (ROOT / f"docs/{language}.toml").read_text())
    assert sorted(named) == pages_of(language)


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_named_files_exist(path):
    if path.name in HISTORY:
        pytest.skip("names files of earlier versions")
    folders = "scripts|rules|tests|profiles|envs|rewards|prompts|docs"
    for name in re.findall(rf"(?<![\w/.])(?:{folders})/[\w./-]+\w", path.read_text()):
        generated = name.startswith("docs/site") or name in WRITTEN
        assert generated or PLACEHOLDER.search(name) or (ROOT / name).exists(), name


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_named_recipes_exist(path):
    found = re.findall(rf"output/(?:\w+/)?({'|'.join(STAGES)})/([\w.-]*\w)", path.read_text())
    for stage, name in found:
        name = re.sub(r"(\.(manifest|run))?\.(json|md|html)$", "", name)
        exist = {*CONFIG[stage]["recipes"], *CONFIG["sweeps"], "RECIPE", "NAME", "theirs"}
        parts = {part for part in name.split("-vs-") if part not in "AB"}
        assert {part for part in parts if not part.startswith("mine")} <= exist, f"{stage}/{name}"


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_make_targets_exist(path):
    makefile = (ROOT / "Makefile").read_text().replace("$(VENV)", ".venv")
    for target in re.findall(r"(?:^|`)make ([\w./-]+)", path.read_text(), re.MULTILINE):
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_settings_in_the_text_exist(path):
    keys = {*keys_of(SCHEMA), "prompt", "chosen", "rejected", "NAME"}
    for stage in STAGES:
        keys |= CONFIG[stage]["recipes"].keys()
    for section in ("datasets", "deployments", "sweeps", "models"):
        keys |= CONFIG[section].keys()
    for profile in (ROOT / "profiles").glob("*/config.yaml"):
        keys |= set(re.findall(r"([\w-]+):", profile.read_text()))
    keys |= {"mine"}
    for span in spans(prose(path)):
        whole = "..." not in span and (span.count(": ") == 1 or span.endswith("}"))
        value = yaml.safe_load(span) if whole and re.match(r"\{?[a-z_]+: \S", span) else {}
        if isinstance(value, dict) and not span.startswith(("error:", "warning:", "config:")):
            assert value.keys() <= keys, span


@pytest.mark.parametrize("language", ["en", "zh"])
def test_settings_that_replace_flags_exist(language):
    cells = [
        row[1]
        for row in rows(ROOT / "docs" / language / "migration.md")
        if row[0].startswith("`--") and len(row) == 3
    ]
    keys = [re.match(r"[\w.]+", span)[0].split(".")[-1] for cell in cells for span in spans(cell)]
    assert len(keys) > 40
    assert set(keys) <= set(keys_of(SCHEMA))


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_named_functions_exist(path):
    text = prose(path)
    if path.name in ("migration.md", "tour.md", "trl.md"):
        # The first column has names of DeepSpeed-Chat, of TRL and of earlier versions.
        text = re.sub(r"^\| [^|]*\|", "|", text, flags=re.MULTILINE)
    if path.name == "CHANGELOG.md":
        pytest.skip("names keys of earlier versions")
    files = [*(ROOT / "scripts").rglob("*.py"), *(ROOT / "rules").iterdir(), ROOT / "config.yaml"]
    files += (ROOT / "rewards").glob("*.py")
    files += [*(ROOT / "profiles").glob("*/config.yaml"), *(ROOT / "tests").rglob("*.py")]
    words = set(re.findall(r"\w+", "\n".join(file.read_text() for file in files if file.is_file())))
    # DeepSpeed-Chat's score head, and a method of PyTorch that it does not call.
    words |= {"v_head", "set_epoch"}
    for span in spans(text):
        for word in re.findall(r"^(?:[a-z]+\.)*([a-z]+(?:_[a-z]+)+)(?:\(.*\))?$", span):
            assert word in words, span


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_named_metrics_are_logged(path):
    code = "\n".join(file.read_text() for file in (ROOT / "scripts").rglob("*.py"))
    for name in re.findall(r"\b(?:objective|policy|value|response)/(\w+)", path.read_text()):
        assert re.search(rf"\b{name}\b", code), name


# --- messages -----------------------------------------------------------------------------------

# Messages of Snakemake, jsonschema, pip and the system.
FOREIGN = (
    "MissingRule",
    "IsADirectoryError",
    "Invalid config definition",
    "Target rules may not contain",
    "Additional properties",
    "not of type",
    "No space left",
    "In --require-hashes",
)


@pytest.fixture(scope="module")
def messages():
    """All code, with string literals that span several lines joined."""
    files = [*(ROOT / "scripts").rglob("*.py"), *(ROOT / "rules").glob("*.smk")]
    code = "\n".join(file.read_text() for file in files)
    return re.sub(r"\"\s*\n\s*f?\"", "", code)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_explained_messages_exist(language, messages):
    path = ROOT / "docs" / language / "troubleshooting.md"
    quoted = [row[0] for row in rows(path) if is_message(row)]
    assert quoted
    unknown = [
        (span, part)
        for cell in quoted
        for span in spans(cell)
        if not any(foreign in span for foreign in FOREIGN)
        for part in fixed_parts(span)
        if part not in messages
    ]
    assert not unknown


def is_message(row):
    """Whether a row of the troubleshooting page explains a message."""
    quoted = row[0].startswith("`") and re.search(r"\.\.\.|: | \w+ \w+ ", row[0])
    return len(row) == 3 and quoted and "objective/" not in row[0]


def fixed_parts(message):
    """The text of a message between placeholders."""
    placeholders = r"\.\.\.+|\d+|\b[A-Z]{3,}\b|[\[\]]|: "
    return [part.strip(" :'.,") for part in re.split(placeholders, message)]


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
                found[options, above if "mine.yaml" in options else ""].update(targets)
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
    for name in ("mydata", "bench", "data/rm-static"):
        (folder / name).mkdir(parents=True)
        row = '{"prompt": "Why?", "chosen": "So.", "rejected": "No."}\n'
        (folder / name / "rows.jsonl").write_text(row)
    (folder / "words.txt").write_text("forbidden\n")
    model = folder / "models/opt-125m"
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


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_no_target_follows_an_option_that_takes_all_words(path):
    option = "--config|-C|--configfiles?|--forcerun|-R|--until|-U|--omit-from|-O"
    for line, _ in commands_of(path):
        assert not re.search(rf"(?<=\s)({option})( [^-\s]\S*)* output/", line), line


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
        if "dry_run" in code:
            exist |= snakemake_options
        assert options <= exist, program


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_documented_configs_fit_the_schema(path):
    for block in blocks(path, "yaml"):
        check_schema(merged(CONFIG, yaml.safe_load(block)), SCHEMA)


def merged(below, above):
    """A config with another one on top, as Snakemake merges them."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return {**below, **{key: merged(below.get(key), value) for key, value in above.items()}}


# Text of a table or sentence with measured figures, by page.
FIGURES = [
    ("README.md", "0.510 → 0.931"),
    ("README.md", "ranks 65.6 % of 398 pairs"),
    ("README.zh-CN.md", "0.510 → 0.931"),
    ("README.zh-CN.md", "65.6 %"),
    ("docs/{}/benchmarks.md", "3,986"),
    ("docs/{}/evaluation.md", "margin 10.5535"),
    ("docs/{}/rlhf.md", "0.930, 0.886, 0.949"),
    ("docs/{}/training.md", "0.956, 0.922, 0.944"),
    ("docs/{}/training.md", "0.512 | 0.786"),
]


@pytest.mark.parametrize(
    ("page", "figure"),
    [(page.format(name), figure) for page, figure in FIGURES for name in ("en", "zh")],
)
def test_figures_name_processor_threads_and_commit(page, figure):
    before = (ROOT / page).read_text().partition(figure)[0]
    # The paragraph before the table, or the one that opens a page of measurements.
    start = before if "benchmarks" in page else before[-1200:]
    assert re.search("CPU", start) and re.search(r"\b[12] (threads?|线程)", start)
    assert re.search(r"\b[0-9a-f]{7}\b", start)


def test_the_changelog_has_the_version_to_cite():
    """The workflow of releases takes the version and the notes from these files."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    versions = re.findall(
        r"^## \[(\d+\.\d+\.\d+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert versions[0] == (cited["version"], str(cited["date-released"]))
