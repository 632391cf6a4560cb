"""What the READMEs and docs/ say is so: links, names, messages and commands, in both languages."""

import importlib.util
import re
import shlex
import sys
from collections import Counter, defaultdict
from itertools import pairwise

import jsonschema
import pytest
import yaml

from conftest import ROOT, Workflow, copy_sources

sys.path.insert(0, str(ROOT / "docs"))

from config_reference import PAGES, Page, page

DOCS = sorted([*ROOT.glob("README*.md"), *(ROOT / "docs").glob("*.md")])
ENGLISH = [path for path in DOCS if not path.name.endswith(".zh-CN.md")]
names = [path.relative_to(ROOT).as_posix() for path in ENGLISH]
CONFIG = yaml.safe_load((ROOT / "config.yaml").read_text())
SCHEMA = yaml.safe_load((ROOT / "rules/config.schema.yaml").read_text())
STAGES = ("sft", "reward", "dpo", "rlhf")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Other ways to say "some name" than words in capitals.
SOME = re.compile(r"\b[A-Z]{2,}\b|\bmine\b|[*{<]|\.\.\.")


def chinese(path):
    """The Chinese page beside an English one."""
    return path.with_name(f"{path.stem}.zh-CN.md")


def blocks(path, kind):
    """Texts of the code blocks of a kind ("" for none) in a page."""
    return [text for language, text in FENCE.findall(path.read_text()) if language == kind]


def prose(path):
    """A page without its code blocks."""
    return FENCE.sub("", path.read_text())


def spans(text):
    """Texts between backquotes."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def rows(path):
    """Cells of each row of the tables of a page."""
    lines = re.findall(r"^\|(.*)\|$", prose(path), re.MULTILINE)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines]


def anchors(path):
    """What GitHub makes of the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# --- all keys ---------------------------------------------------------------------------------


@pytest.mark.parametrize("language", PAGES)
def test_the_page_of_all_keys_is_what_the_config_says_now(language):
    told = "python docs/config_reference.py writes it anew; new keys: docs/config.texts.yaml"
    assert PAGES[language].read_text() == page(language), told


def test_each_text_of_a_key_has_its_key():
    texts = yaml.safe_load((ROOT / "docs/config.texts.yaml").read_text())["keys"]
    known = Page("en").places
    assert texts.keys() <= known.keys() | {key.partition(".")[0] for key in known}


def test_the_page_of_all_keys_has_each_setting_of_a_recipe():
    for stage in STAGES:
        section = prose(PAGES["en"]).partition(f"\n## {stage}\n")[2].partition("\n## ")[0]
        assert {f"`{key}`" for key in CONFIG[stage]["defaults"]} <= set(
            re.findall("`[^`]+`", section)
        )


# --- both languages ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", ENGLISH, ids=names)
def test_the_chinese_page_has_the_same_parts(path):
    other = chinese(path)
    for of in (prose(path), prose(other)):
        assert "`" not in re.sub(r"`[^`]+`", "", of)
    shapes = [re.findall(r"^(#+) ", prose(one), re.MULTILINE) for one in (path, other)]
    assert shapes[0] == shapes[1]
    assert [len(row) for row in rows(path)] == [len(row) for row in rows(other)]
    firsts = [[spans(row[0]) for row in rows(one)] for one in (path, other)]
    assert firsts[0] == firsts[1]


@pytest.mark.parametrize("path", ENGLISH, ids=names)
def test_the_chinese_page_shows_the_same_commands(path):
    shown = [
        [re.split(r"\s+#", line)[0] for block in blocks(one, "") for line in block.splitlines()]
        for one in (path, chinese(path))
    ]
    commands = [[line for line in lines if is_command(line)] for lines in shown]
    assert commands[0] == commands[1]


# --- links and names --------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_each_link_leads_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if link.startswith(("http:", "https:")):
            continue
        place, _, anchor = link.partition("#")
        target = (path.parent / place).resolve() if place else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_each_file_that_is_named_is_there(path):
    folders = "scripts|rules|docs|tests|profiles|envs|rewards|prompts|requirements"
    for name in re.findall(rf"(?<![\w/.])(?:{folders})/[\w./-]+\w", path.read_text()):
        assert SOME.search(name) or "reproduced" in name or (ROOT / name).exists(), name


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_each_recipe_that_is_named_is_in_the_config(path):
    found = re.findall(rf"output/(?:\w+/)?({'|'.join(STAGES)})/([\w.-]*\w)", path.read_text())
    for stage, name in found:
        name = re.sub(r"(\.(manifest|run))?\.(json|md|html)$", "", name)
        known = {*CONFIG[stage]["recipes"], *CONFIG["sweeps"], "RECIPE", "NAME", "theirs"}
        own = {part for part in name.split("-vs-") if not part.startswith("mine")}
        assert own <= known, f"output/{stage}/{name}"


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_each_make_target_that_is_named_is_in_the_makefile(path):
    makefile = (ROOT / "Makefile").read_text().replace("$(VENV)", ".venv")
    for target in re.findall(r"(?:^|[^\w\s])make ([\w./-]+)", path.read_text(), re.MULTILINE):
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target


def keys_of(schema):
    """All keys that a schema has anywhere."""
    if isinstance(schema, dict):
        for name, inner in schema.items():
            if name == "properties":
                yield from inner
            yield from keys_of(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from keys_of(inner)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_each_setting_that_is_shown_is_one(path):
    known = {*keys_of(SCHEMA), *keys_of_profiles()}
    for stage in STAGES:
        known |= CONFIG[stage]["recipes"].keys()
    for section in ("datasets", "deployments", "sweeps"):
        known |= CONFIG[section].keys()
    # Columns of data, and any name.
    known |= {"prompt", "chosen", "rejected", "NAME"}
    for span in spans(prose(path)):
        whole = "..." not in span and (span.count(": ") == 1 or span.endswith("}"))
        value = yaml.safe_load(span) if whole and re.match(r"\{?[a-z_]+: \S", span) else {}
        if isinstance(value, dict) and not span.startswith(("error:", "warning:")):
            assert value.keys() <= known, span


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("from-*.md")), ids=lambda p: p.name)
def test_each_key_in_the_place_of_a_flag_is_one(path):
    told = [row[1] for row in rows(path) if row[0].startswith("`--") and len(row) == 3]
    keys = [re.match(r"[\w.]+", span)[0].split(".")[-1] for cell in told for span in spans(cell)]
    assert set(keys) <= set(keys_of(SCHEMA))
    assert len(keys) > 40


def keys_of_profiles():
    """Words that stand before a colon in the profiles."""
    for path in (ROOT / "profiles").glob("*/config.yaml"):
        yield from re.findall(r"([\w-]+):", path.read_text())


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_each_name_of_the_code_is_in_the_code(path):
    # A column of DeepSpeed-Chat's names is left out.
    text = prose(path)
    if "deepspeed" in path.name or path.name.startswith("tour"):
        text = re.sub(r"^\| [^|]*\|", "|", text, flags=re.MULTILINE)
    files = [*(ROOT / "scripts").rglob("*.py"), *(ROOT / "rules").iterdir(), ROOT / "config.yaml"]
    files += [*(ROOT / "profiles").glob("*/config.yaml"), *(ROOT / "tests").glob("*")]
    there = set(re.findall(r"\w+", "\n".join(file.read_text() for file in files if file.is_file())))
    for span in spans(text):
        for word in re.findall(r"^(?:[a-z]+\.)*([a-z]+(?:_[a-z]+)+)(?:\(.*\))?$", span):
            # What DeepSpeed-Chat calls its score head, and torch what it does not call.
            assert word in there | {"v_head", "set_epoch"}, span


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_each_figure_that_is_named_is_logged(path):
    code = "\n".join(file.read_text() for file in (ROOT / "scripts").rglob("*.py"))
    for name in re.findall(r"\b(?:objective|policy|value|response)/(\w+)", path.read_text()):
        assert re.search(rf"\b{name}\b", code), name


@pytest.mark.parametrize("path", sorted(ROOT.glob("README*.md")), ids=lambda path: path.name)
def test_the_readme_names_each_recipe_program_and_module(path):
    told = next(text for text in path.read_text().split("\n\n") if "llama2-7b chinese" in text)
    listed = [name for span in spans(told) for name in span.split()]
    assert Counter(listed) == Counter(name for stage in STAGES for name in CONFIG[stage]["recipes"])
    tree = next(block for block in blocks(path, "") if block.startswith("Snakefile "))
    named = set(re.findall(r"\w+", tree))
    for start, ends in re.findall(r"(\w+)_\{([\w,]+)\}", tree):
        named |= {f"{start}_{end}" for end in ends.split(",")}
    files = [*(ROOT / "scripts").glob("*.py"), *(ROOT / "scripts/rlhf").glob("[a-z]*.py")]
    missing = {file.stem for file in files} - named
    assert not missing


# --- messages ---------------------------------------------------------------------------------

# Of Snakemake, jsonschema and the system.
OTHERS = ("MissingRule", "Additional properties", "not of type", "No space left")


@pytest.fixture(scope="module")
def messages():
    """All code, each text that goes over several lines in one."""
    files = [*(ROOT / "scripts").rglob("*.py"), *(ROOT / "rules").glob("*.smk")]
    code = "\n".join(file.read_text() for file in files)
    return re.sub(r"\"\s*\n\s*f?\"", "", code)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_each_message_that_is_explained_is_one(path, messages):
    explained = [row[0] for row in rows(path) if is_message(path, row)]
    unknown = [
        (span, part)
        for cell in explained
        for span in spans(cell)
        if not any(other in span for other in OTHERS)
        for part in fixed_parts(span)
        if part not in messages
    ]
    assert not unknown
    assert explained or "troubleshooting" not in path.name


def fixed_parts(message):
    """What stays the same in a message: not ..., numbers, and names in capitals."""
    others = r"(?:process )?\.\.\.+|\d+|\b[A-Z]{3,}\b|mine\.py|[\[\]]|loss is nan|: "
    return [part.strip(" :'.") for part in re.split(others, message)]


def is_message(path, row):
    """Whether a row of a table explains a message."""
    kind, width = ("README", 2) if "README" in path.name else ("troubleshooting", 3)
    quoted = row[0].startswith("`") and re.search(r"\.\.\.|: | \w+ \w+ ", row[0])
    return kind in path.name and len(row) == width and quoted and "objective/" not in row[0]


# --- commands ---------------------------------------------------------------------------------


def is_command(line):
    return line.startswith(("snakemake ", "python scripts/", "make ", "pytest "))


def commands_of(path):
    """(command, the YAML block before it) of each command in a page's blocks and spans."""
    text, above = path.read_text(), ""
    for found in re.finditer(rf"{FENCE.pattern}|`([^`]+)`", text, re.MULTILINE | re.DOTALL):
        language, block, span = found.groups()
        if language == "yaml":
            above = block
        for line in block.splitlines() if block else [" ".join((span or "").split())]:
            line = line.removeprefix("$ ").rpartition(" | ")[2]
            if is_command(line) and not re.search(r"\.\.\.|=N\b|\bSTAGE\b", line):
                yield line, above


def planned(line):
    """(options, targets) of a Snakemake command; None for one that does not plan."""
    words = shlex.split(line, comments=True)[1:]
    plain = {"-n", "-p", "-F"}
    options, targets = [], []
    for before, word in pairwise(["", *words]):
        # Neither matters to a plan.
        if word in plain or {"--cores", "--sdm", "--logger"} & {word, before}:
            continue
        if before in ("--profile", "--configfile", "--config", "--directory") or word[0] == "-":
            options.append(word)
        else:
            targets.append(word)
    return None if "--report" in options else (tuple(options), targets)


def plans():
    """{(options, YAML): targets} of all Snakemake commands of the English pages.

    Those of the same options are planned at once, and so are all without a profile or a file.
    """
    found, together, values = defaultdict(set), set(), []
    for path in ENGLISH:
        for line, above in commands_of(path):
            if not line.startswith("snakemake") or not (plan := planned(line)):
                continue
            options, targets = plan
            if {"--profile", "--configfile"} & set(options):
                found[options, above if "mine.yaml" in options else ""].update(targets)
            else:
                # Snakemake's own rule stands for no target.
                together.update(targets or ["all"])
                values += [option for option in options if "=" in option]
    return {**found, (("--config", *sorted(set(values))), ""): together}


PLANS = plans()


@pytest.fixture(scope="module")
def workflow(tmp_path_factory):
    """A workflow beside the data that the commands speak of."""
    folder = tmp_path_factory.mktemp("docs") / "sources"
    copy_sources(folder)
    if (ROOT / "kubernetes").exists() and not (folder / "kubernetes").exists():
        (folder / "kubernetes").symlink_to("profiles/kubernetes")
    for name in ("mydata", "data/rm-static"):
        (folder / name).mkdir(parents=True)
        row = '{"prompt": "Why?", "chosen": "So.", "rejected": "No."}\n'
        (folder / name / "rows.jsonl").write_text(row)
    (folder / "rewards/mine.py").write_text(
        "def score(prompts, responses):\n    return responses\n"
    )
    return Workflow(folder)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: " ".join(plan[0]) or "plain")
def test_the_commands_that_are_shown_plan_a_build(plan, workflow):
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
    options = [option.replace("/data/", "data/") for option in options]
    process = workflow.snakemake(*sorted(PLANS[plan]), "-n", "--quiet", "rules", *options)
    assert process.returncode == 0, process.stdout[-3000:]


def test_the_options_of_the_programs_that_are_shown_are_theirs():
    used = defaultdict(set)
    for path in ENGLISH:
        for line, _ in commands_of(path):
            if line.startswith("python scripts/"):
                words = shlex.split(line, comments=True)[1:]
                own = words[: words.index("--")] if "--" in words else words
                used[words[0]] |= {word for word in own[1:] if word.startswith("--")}
    assert used
    for program, options in used.items():
        known = set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', (ROOT / program).read_text()))
        assert options <= known, program


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_each_config_that_is_shown_fits_the_schema(path):
    for block in blocks(path, "yaml"):
        shown = yaml.safe_load(block)
        if not shown.keys() <= SCHEMA["properties"].keys():
            continue
        jsonschema.validate(merged(CONFIG, shown), SCHEMA)


def merged(below, above):
    """A config on top of another one, as Snakemake puts it there."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return {**below, **{key: merged(below.get(key), value) for key, value in above.items()}}
