"""Write the reference of all config keys, docs/en/config.md and docs/zh/config.md, and the flags of
DeepSpeed-Chat in migration.md.

    python docs/config_reference.py

Types and constraints come from the declarations in scripts/snakechat/config, defaults and
descriptions from config.yaml: the comment above a key. docs/config.texts.yaml has the rest:
descriptions of keys that config.yaml does not spell out, and the translations. The program lists
keys without a translation, for which the Chinese page has the English text. The flags come from
config/deepspeed_chat_flags.yaml, and stand between two marks.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT / "scripts"))

from snakechat.config.recipes import RECIPES  # noqa: E402
from snakechat.config.sections import RecipeKeys, Sections  # noqa: E402

PAGES = {"en": DOCS / "en/config.md", "zh": DOCS / "zh/config.md"}
SCALARS = ("integer", "number", "string", "boolean")
NO_DEFAULT = "-"
STAGES = ("sft", "reward", "dpo", "rlhf")
LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
# Objects and lists that are one value for a reader.
VALUES = {"weights", "split", "datasets", "placement", "reward_functions", "gate", "over"}

MIGRATION = {language: DOCS / language / "migration.md" for language in PAGES}
TIMES = "\N{MULTIPLICATION SIGN}"
SEPARATORS = {"en": ", ", "zh": "、"}
MARKS = ("<!-- flags -->\n", "<!-- end of flags -->")
# Titles of the tables of flags, and the programs in each. A flag is in the first table that has one
# of its programs.
FLAG_TABLES = {
    ("flag of SFT, reward model or DPO", "SFT、奖励模型或 DPO 的参数"): {"sft", "reward", "dpo"},
    ("further flag of RLHF", "RLHF 的其他参数"): {"rlhf"},
    ("flag of `prompt_eval.py` or `rw_eval.py`", "`prompt_eval.py` 或 `rw_eval.py` 的参数"): {
        "prompt_eval",
        "rw_eval",
    },
}

Schema = dict[str, Any]


def main() -> None:
    """Write both pages and list the keys without a description or a translation."""
    for language, path in PAGES.items():
        page = Page(language)
        path.write_text(page.text())
        for key in page.missing:
            print(f"{path.relative_to(ROOT)}: no {language} text for {key}")
    for language, path in MIGRATION.items():
        path.write_text(with_flags(path.read_text(), language))


def with_flags(text: str, language: str) -> str:
    """Return the text of migration.md with the tables of flags."""
    flags = yaml.safe_load((ROOT / "config/deepspeed_chat_flags.yaml").read_text())
    tables = []
    for (en, zh), programs in FLAG_TABLES.items():
        key_title = "key" if language == "en" else "键"
        rows: dict[str, list[str]] = {}
        for flag in (flag for flag in flags if programs & set(flag["programs"])):
            names, rest = flag_row(flag, language)
            # The page says that a flag without a row has the key of its name.
            if rest != f"| {names.replace('--', '')} | |":
                rows.setdefault(rest, []).append(names)
        flags = [flag for flag in flags if not programs & set(flag["programs"])]
        separator = SEPARATORS[language]
        lines = [f"| {separator.join(names)} {rest}" for rest, names in rows.items()]
        head = [f"| {en if language == 'en' else zh} | {key_title} | |", "|---|---|---|"]
        tables.append("\n".join([*head, *lines]) + "\n")
    before, rest = text.split(MARKS[0])
    _, after = rest.split(MARKS[1])
    return before + MARKS[0] + "\n".join(tables) + MARKS[1] + after


def flag_row(flag: dict[str, Any], language: str) -> tuple[str, str]:
    """Return the flags of one key, and the rest of their row."""
    product = flag.get("type") == "factor"
    separator = f" {TIMES} " if product else SEPARATORS[language]
    names = separator.join(f"`{name}`" for name in flag["flags"])
    if product:
        names += f" {TIMES} GPUs" if language == "en" else f" {TIMES} GPU 数"
    key = flag.get("key") or ""
    if "is" in flag:
        key += f": {flag['is']}"
    key = f"`{key.removeprefix('config.')}`" if key else NO_DEFAULT
    note = flag.get("note", {}).get(language)
    return names, f"| {key} | {note} |" if note else f"| {key} | |"


class Page:
    """The reference in one language.

    A key is a dotted path. NAME stands for the name of a dataset, a model and the like; the
    settings of a recipe come directly below their stage (sft.epochs). Settings that mean the same
    in several stages have one table.

    Attributes:
        keys: The schema of each key.
        shared: The stages of each setting that means the same in several of them.
        missing: Keys without a text in this language, after text() was called.
    """

    def __init__(self, language: str) -> None:
        self.language = language
        self.config = yaml.safe_load((ROOT / "config.yaml").read_text())
        self.comments = comments((ROOT / "config.yaml").read_text())
        texts = yaml.safe_load((DOCS / "config.texts.yaml").read_text())
        self.labels = {name: label[language] for name, label in texts["page"].items()}
        self.texts = texts["keys"]
        self.keys = dict(keys_of(config_schema()))
        self.shared = self.shared_settings()
        self.missing: list[str] = []

    def text(self) -> str:
        """Return the page as Markdown."""
        sections: dict[str, list[str]] = {}
        for key in self.keys:
            section, dot, name = key.partition(".")
            if section not in self.shared.get(name, ()):
                sections.setdefault(section if dot else "", []).append(key)
        order = ["", *(name for name in self.config if name in sections)]
        lines = [f"# {self.labels['title']}", self.labels["intro"]]
        for section in order:
            if section == "sft":
                lines += [f"## {self.labels['shared']}", self.labels["shared_intro"]]
                lines.append("\n".join(self.shared_table()))
            lines.append(f"## {section or self.labels['top']}")
            if section:
                lines.append(self.description(section))
            lines.append("\n".join(self.table(section, sections[section])))
        return "\n\n".join(lines) + "\n"

    def shared_settings(self) -> dict[str, list[str]]:
        """Return the stages of each setting whose meaning several stages have in common.

        The stage whose text it is comes first.
        """
        places: dict[str, list[str]] = {}
        for key in self.in_order(list(self.keys)):
            if key.partition(".")[0] in RECIPES:
                places.setdefault(self.place(key), []).append(key.partition(".")[0])
        return {
            place.partition(".")[2]: stages for place, stages in places.items() if len(stages) > 1
        }

    def in_order(self, keys: list[str]) -> list[str]:
        """Return keys in the order of config.yaml, after those that it does not spell out."""
        order = list(self.comments)
        return sorted(keys, key=lambda key: order.index(key) if key in order else -1)

    def shared_table(self) -> Iterator[str]:
        """Yield the lines of the table of settings of several stages."""
        yield self.labels["head"]
        yield "|---|---|---|"
        for name, stages in self.shared.items():
            key = f"{stages[0]}.{name}"
            values = {stage: self.default(f"{stage}.{name}") for stage in stages}
            different = list(dict.fromkeys(values.values()))
            default = ", ".join(
                f"{', '.join(stage for stage in stages if values[stage] == value)} {value}"
                for value in different
            )
            is_general = len(different) == 1 and set(stages) >= set(STAGES)
            yield self.row(name, key, different[0] if is_general else default)

    def table(self, section: str, keys: list[str]) -> Iterator[str]:
        """Yield the lines of a table of keys. A stage has its keys in the order of config.yaml."""
        if section in RECIPES:
            keys = self.in_order(keys)
        yield self.labels["head"]
        yield "|---|---|---|"
        for key in keys:
            name = key.removeprefix(f"{section}.") if section else key
            yield self.row(name, key, self.default(key))

    def row(self, name: str, key: str, default: str) -> str:
        """Return the line of a key in a table."""
        schema, description = self.keys[key], self.description(key).replace("|", "\\|")
        value = default
        if default == NO_DEFAULT:
            value = self.type(schema)
        elif schema.get("type") not in SCALARS or "enum" in schema:
            # The default shows the type of any other value.
            value = f"{default} ({self.type(schema, default)})"
        return f"| `{name}` | {value} | {description} |"

    def description(self, key: str) -> str:
        """Return what a key means."""
        place = self.place(key)
        texts = self.texts.get(place, {})
        english = self.comments.get(place) or texts.get("en") or ""
        # A translation belongs to the English text of the same place.
        text = english if self.language == "en" else texts.get(self.language)
        if not text:
            self.missing.append(place)
        return " ".join((text or english).split())

    def place(self, key: str) -> str:
        """Return the key whose text describes a key.

        Settings that a stage does not describe mean the same in sft, or in rlhf.
        """
        section, _, name = key.partition(".")
        others = (f"sft.{name}", f"rlhf.{name}") if section in RECIPES else ()
        described = (
            place
            for place in (key, *others)
            if self.comments.get(place) or self.texts.get(place, {}).get("en")
        )
        return next(described, key)

    def default(self, key: str) -> str:
        """Return the value of a key in config.yaml, if it has one."""
        section, _, name = key.partition(".")
        if section in RECIPES:
            return as_code(self.config[section]["defaults"].get(name, self.config.get(name)))
        value = self.config
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return NO_DEFAULT
            value = value[part]
        return as_code(value)

    def type(self, schema: Schema, default: str = "") -> str:
        """Return the type of a value with its constraints or choices, without a default."""
        choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
        if choices:
            return ", ".join(text for text in map(as_code, choices) if text != default)
        forms = schema.get("anyOf") or schema.get("oneOf")
        if forms:
            types = [self.type(form, default) for form in forms]
            return f" {self.labels['or']} ".join(dict.fromkeys(filter(None, types)))
        is_default = schema == {"type": "null"} and default == "`null`"
        return "" if is_default else self.single_type(schema)

    def single_type(self, schema: Schema) -> str:
        """Return the type of a schema of one form, with its constraints."""
        name, entries = schema["type"], schema.get("additionalProperties")
        if name == "array":
            return self.labels["array"].format(
                self.type(schema.get("items") or schema["prefixItems"][0])
            )
        if name == "object" and entries is True:
            return "{NAME: ...}"
        if name == "object" and isinstance(entries, dict):
            return f"{{NAME: {self.type(entries)}}}"
        if name == "object" and "required" in schema:
            return f"{{{', '.join(schema['required'] or schema['properties'])}}}"
        limits = [f"{sign} {schema[limit]}" for limit, sign in LIMITS.items() if limit in schema]
        is_number = name in ("integer", "number")
        return f"{self.labels[name]} {', '.join(limits) if is_number else ''}".strip()


def config_schema() -> Schema:
    """Return the JSON Schema of the config, without references."""
    schema = _without_references(Sections.model_json_schema())
    for stage, declared in RECIPES.items():
        recipe = _without_references(declared.model_json_schema())
        keys = recipe["properties"].items()
        properties = {key: each for key, each in keys if key not in RecipeKeys.not_keys}
        section = schema["properties"][stage]["properties"]
        section["defaults"] = {"type": "object", "properties": properties}
        for key in section.keys() - {"defaults"}:
            section[key] = {"type": "object", "additionalProperties": section["defaults"]}
    return schema


def _without_references(schema: Schema) -> Schema:
    """Return a JSON Schema with its definitions in place of references to them."""
    definitions = schema.get("$defs", {})

    def resolved(node: Any) -> Any:
        if isinstance(node, list):
            return [resolved(each) for each in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolved(definitions[node["$ref"].rpartition("/")[2]])
        if "patternProperties" in node:
            (others,) = node["patternProperties"].values()
            return {"type": "object", "additionalProperties": resolved(others)}
        return {key: resolved(inner) for key, inner in node.items() if key != "$defs"}

    found: Schema = resolved(schema)
    return found


def keys_of(schema: Schema, place: tuple[str, ...] = ()) -> Iterator[tuple[str, Schema]]:
    """Yield (key, schema) of all values that a schema allows."""
    properties, entries = schema.get("properties", {}), schema.get("additionalProperties")
    forms = schema.get("anyOf") or schema.get("oneOf") or ()
    alternatives = [form for form in forms if "properties" in form]
    if len(place) > 1 and place[-1] in VALUES:
        yield ".".join(place), schema
    elif "defaults" in properties:
        yield from keys_of(properties["defaults"], place)
    elif properties or alternatives:
        for each in alternatives or [schema]:
            for name, inner in each["properties"].items():
                yield from keys_of(inner, (*place, name))
    elif isinstance(entries, dict) and entries.keys() & {"properties", "oneOf"}:
        yield from keys_of(entries, (*place, "NAME"))
    else:
        yield ".".join(place), schema


def comments(text: str) -> dict[str, str]:
    """Return the comment above each key of a YAML file, in its order; empty if there is none.

    Settings of a stage's defaults belong to the stage, settings of a deployment to all. What a
    key merges (<<) from a place further up has no comment.
    """
    lines, visited = text.splitlines(), set()
    found: dict[str, str] = {}

    def walk(node: yaml.MappingNode, place: tuple[str, ...]) -> None:
        is_alias = id(node) in visited
        visited.add(id(node))
        for key, value in node.value:
            if key.value == "<<":
                merged = value.value if isinstance(value, yaml.SequenceNode) else [value]
                for child in merged:
                    walk(child, place)
                continue
            inner = (*place, key.value)
            name, line = reference_key(inner), key.start_mark.line
            # A comment above a line belongs to the first key of the line.
            is_first = not lines[line][: key.start_mark.column].strip(" -")
            comment = comment_above(lines, line) if is_first and not is_alias else ""
            found[name] = found.get(name) or comment
            if isinstance(value, yaml.MappingNode):
                walk(value, inner)

    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    walk(root, ())
    return found


def comment_above(lines: list[str], line: int) -> str:
    """Return the comment that ends right above a line; empty if there is none."""
    start = line
    while start and lines[start - 1].lstrip().startswith("#"):
        start -= 1
    return "\n".join(text.strip().removeprefix("#").strip() for text in lines[start:line])


def reference_key(place: tuple[str, ...]) -> str:
    """Return a path in config.yaml as the reference calls it."""
    if place[0] == "deployments" and len(place) == 3:
        place = (place[0], "NAME", place[2])
    elif place[0] in RECIPES and len(place) == 3 and place[1] == "defaults":
        place = (place[0], place[2])
    return ".".join(place)


def as_code(value: Any) -> str:
    """Return a value as YAML writes it on one line, in Markdown."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    # YAML reads a number without a decimal point and with an exponent as text.
    pattern = r"^(\d+)(\.\d+)?e-0?(\d+)$"
    text = re.sub(pattern, lambda match: f"{match[1]}{match[2] or '.0'}e-{match[3]}", text)
    return f"`{text}`".replace('"', "")


if __name__ == "__main__":
    main()
