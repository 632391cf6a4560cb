"""What users write for models to be tried on: prompts/SET.yaml, and prompts/pairs/SET.yaml with a
good and a bad response to each prompt.
"""

from pathlib import Path

import yaml

from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import check_external_file

# Of an entry of prompts/pairs.
PAIR = ("prompt", "chosen", "rejected")


def read_prompts(job):
    """(set, prompt) of each prompt that a job is to ask. Raises InputError as read_sets."""
    found = read_sets(job, "prompts")
    for place, _, prompt in found:
        check_text(prompt, place)
    return [(name, prompt.strip()) for _, name, prompt in found]


def read_pairs(job):
    """(set, {prompt, chosen, rejected}) of each pair that a job is to score. Raises InputError as
    read_sets.
    """
    found = read_sets(job, "prompts/pairs")
    for place, _, pair in found:
        if not isinstance(pair, dict) or sorted(pair) != sorted(PAIR):
            raise InputError(f"{place}: expected {', '.join(PAIR)}, found {told(pair)}")
        for key in PAIR:
            check_text(pair[key], f"{place}, {key}")
    return [(name, {key: pair[key].strip() for key in PAIR}) for _, name, pair in found]


def read_sets(job, folder):
    """(place, set, entry) of each entry of the sets in a job's settings, in their order. place: as
    an error names it.

    Raises InputError where a file changed since the build was planned, or is no list.
    """
    found = []
    for name in job.settings.prompts:
        planned = f"{folder}/{name}.yaml"
        path = Path(job.placement["source"], planned)
        check_external_file(path, job.spec["files"][planned])
        try:
            entries = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(entries, list) or not entries:
            raise InputError(f"{path}: expected a list, each entry behind a dash")
        numbered = enumerate(entries, start=1)
        found += [(f"{path}, entry {number}", name, entry) for number, entry in numbered]
    return found


def check_text(value, place):
    """Raises InputError for what is no text, or an empty one."""
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{place}: expected a text, found {told(value)}: put it in quotes")


def told(value):
    """What YAML made of an entry, short enough for a line."""
    if isinstance(value, dict):
        return f"keys {', '.join(map(str, value))}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
