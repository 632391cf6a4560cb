"""Write docs/en/config.md and docs/zh/config.md: every key of config.yaml.

    python docs/config_reference.py

Types, limits and choices come from rules/config.schema.yaml, defaults from config.yaml, and so does
the English: the comment above a key. What no comment says, and all Chinese, is in
docs/config.texts.yaml, by key.
"""

import json
import re
import sys
from pathlib import Path

import yaml

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PAGES = {"en": DOCS / "en/config.md", "zh": DOCS / "zh/config.md"}
STAGES = ("sft", "reward", "dpo", "rlhf")
# Definitions of the schema that are one value for a reader, whatever they are made of.
VALUES = {"weights", "placement", "rlhf_placement", "datasets"}
LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def main():
    """Write the pages, or say in one line what is missing."""
    try:
        texts = {path: page(language) for language, path in PAGES.items()}
    except ValueError as error:
        sys.exit(f"error: {error}")
    for path, text in texts.items():
        path.write_text(text)


def page(language):
    """Text of a page. Raises ValueError with the keys that nothing explains in its language."""
    return Page(language).text()


def read(path):
    """What a YAML file of the project says."""
    return yaml.safe_load((ROOT / path).read_text())


class Page:
    """All keys of the config in a language (en or zh).

    places: {key: schema}, where a key is a dotted path; NAME stands for any name, and the settings
    of a recipe stand right behind their stage (sft.epochs).
    """

    def __init__(self, language):
        self.language = language
        self.config, self.schema = read("config.yaml"), read("rules/config.schema.yaml")
        self.texts = read("docs/config.texts.yaml")
        self.words = {name: said[language] for name, said in self.texts["page"].items()}
        self.comments = comments((ROOT / "config.yaml").read_text())
        self.places = dict(self.leaves(self.schema))
        # What a recipe can say of its placement beyond a deployment's own keys.
        for name, schema in self.schema["$defs"]["rlhf_placement"]["properties"].items():
            if f"deployments.NAME.{name}" not in self.places:
                self.places[f"placement.{name}"] = schema

    def resolved(self, schema):
        """A schema with what it refers to."""
        while "$ref" in schema:
            schema = {**schema}
            schema = {**self.schema["$defs"][schema.pop("$ref").rpartition("/")[2]], **schema}
        return schema

    def leaves(self, schema, place=()):
        """Yield (key, schema) of all values that a schema allows."""
        named = schema.get("$ref", "").rpartition("/")[2]
        schema = self.resolved(schema)
        entries, keys = schema.get("additionalProperties"), schema.get("properties", {})
        if named in VALUES:
            yield ".".join(place), schema
        elif place and {"defaults", "recipes"} <= keys.keys():
            yield from self.leaves(keys["defaults"], place)
        elif keys:
            if "null" in schema.get("type", ()):
                yield ".".join(place), schema
            for name, inner in keys.items():
                yield from self.leaves(inner, (*place, name))
        elif any("properties" in self.resolved(one) for one in schema.get("oneOf", ())):
            for one in schema["oneOf"]:
                yield from self.leaves(one, place)
        elif isinstance(entries, dict) and {"properties", "oneOf"} & self.resolved(entries).keys():
            yield from self.leaves(entries, (*place, "NAME"))
        else:
            yield ".".join(place), schema

    def text(self):
        """The page."""
        sections = {}
        for key in self.places:
            section = key.partition(".")[0] if "." in key else ""
            sections.setdefault(section, []).append(key)
        parts = [f"# {self.words['title']}", self.words["other"], self.words["intro"]]
        order = ["", *(name for name in self.config if name in sections)]
        order.insert(order.index("deployments") + 1, "placement")
        silent = [key for key in [*order[1:], *self.places] if not self.meaning(key)]
        if silent:
            raise ValueError(f"docs/config.texts.yaml: no {self.language}: {', '.join(silent)}")
        for section in order:
            parts.append(f"## {section or self.words['top']}")
            if section:
                parts.append(prose(self.meaning(section)))
            parts.append("\n".join(self.table(sections[section])))
            if section in STAGES:
                parts += self.names(section)
        return "\n\n".join(parts) + "\n"

    def names(self, stage):
        """Lines that name a stage's presets and recipes."""
        for what in ("presets", "recipes"):
            if what in self.config[stage]:
                listed = ", ".join(f"`{name}`" for name in self.config[stage][what])
                yield f"{self.words[what]}{listed}"

    def table(self, keys):
        """Lines of a table of keys."""
        yield self.words["head"]
        yield "|---|---|---|---|"
        for key in keys:
            section, _, rest = key.partition(".")
            cells = rest or section, self.kind(self.places[key]), self.default(key)
            meaning = " ".join(self.meaning(key).split()).replace("|", "\\|")
            yield f"| `{cells[0]}` | {cells[1]} | {cells[2]} | {meaning} |"

    def meaning(self, key):
        """What a key means: where a later stage says nothing of its own, what it means in sft.

        None: nothing says it.
        """
        section, _, name = key.partition(".")
        for place in (key, f"sft.{name}") if section in STAGES else (key,):
            said = self.texts["keys"].get(place, {})
            english = f"{said.get('en', '')} {self.comments.get(place, '')}".strip()
            if english:
                # A translation belongs to the English of the same place.
                return english if self.language == "en" else said.get(self.language)
        return None

    def default(self, key):
        """What config.yaml says of a key, if it says it of all."""
        section, _, name = key.partition(".")
        if section == "deployments":
            key = name.partition(".")[2]
            values = [(name, entry[key]) for name, entry in self.config[section].items()]
            return ", ".join(f"{name} `{told(value)}`" for name, value in values)
        if section in STAGES:
            value = self.config[section]["defaults"].get(name, self.config.get(name))
            return f"`{told(value)}`"
        value = self.config
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return self.words["unset"]
            value = value[part]
        return f"`{told(value)}`"

    def kind(self, schema):
        """The type of a value, with its limits or choices."""
        schema, either = self.resolved(schema), f" {self.words['or']} "
        if "enum" in schema:
            return ", ".join(f"`{told(value)}`" for value in schema["enum"])
        if "oneOf" in schema:
            return either.join(self.kind(one) for one in schema["oneOf"])
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return either.join(self.kind_of(name, schema) for name in types)

    def kind_of(self, name, schema):
        """A type by its name in a schema, with what it is made of."""
        entries = schema.get("additionalProperties")
        if name == "array":
            return self.words["array"].format(self.kind(schema["items"]))
        if name == "object" and isinstance(entries, dict):
            return f"{{NAME: {self.kind(entries)}}}"
        if name == "object" and "required" in schema:
            return f"{{{', '.join(schema['required'])}}}"
        limits = [f"{sign} {schema[limit]}" for limit, sign in LIMITS.items() if limit in schema]
        of_numbers = limits if name in ("integer", "number") else []
        return f"{self.words[name]} {', '.join(of_numbers)}".strip()


def comments(text):
    """{key: comment} of a config: what stands right above each key of it.

    Settings of recipes by their stage's defaults, those of deployments by the first one's.
    """
    lines, found = text.splitlines(), {}

    def walk(node, place):
        for key, value in node.value:
            name, above = key.value, key.start_mark.line
            while above and lines[above - 1].lstrip().startswith("#"):
                above -= 1
            said = [
                line.strip()[1:].removeprefix(" ") for line in lines[above : key.start_mark.line]
            ]
            # Not of what stands in the middle of a line.
            if said and not lines[key.start_mark.line][: key.start_mark.column].strip():
                known = ".".join(shortened((*place, name)))
                found.setdefault(known, "\n".join(said))
            if isinstance(value, yaml.MappingNode):
                walk(value, (*place, name))

    walk(yaml.compose(text), ())
    return found


def shortened(place):
    """A path of the config as this page calls it."""
    if place[0] == "deployments" and len(place) == 3:
        return place[0], "NAME", place[2]
    if place[0] in STAGES and len(place) == 3 and place[1] == "defaults":
        return place[0], place[2]
    return place


def prose(text):
    """A text as a paragraph, or as it stands where its lines are set out."""
    return f"```text\n{text.rstrip()}\n```" if "\n  " in text else " ".join(text.split())


def told(value):
    """A value as YAML has it in one line."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    # Without a point YAML would read a text.
    return re.sub(
        r"^(\d+)(\.\d+)?e-0?(\d+)$", lambda m: f"{m[1]}{m[2] or '.0'}e-{m[3]}", text
    ).replace('"', "")


if __name__ == "__main__":
    main()
