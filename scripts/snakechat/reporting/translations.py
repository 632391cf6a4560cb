"""Texts of pages in the language of the config.

locale/LANGUAGE.yaml has the translation of each English text. A text without one appears in
English; a test finds all texts and names those that are missing or unused.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import yaml

LOCALE = Path(__file__).with_name("locale")
# Literal paths, by which code digests find the tables that a program reads.
TABLES = {"zh": "zh.yaml"}

# Translates a text, then replaces its {placeholders} by the keyword arguments.
Translate = Callable[..., str]


def translator(language: str) -> Translate:
    """Return a function that translates English texts into a language (en or zh).

    Its argument must be a literal outside of f-strings, so that the test finds it.
    """
    texts = translations(language) if language in TABLES else {}

    def translate(text: str, /, **values: object) -> str:
        translated = texts.get(text, text)
        return translated.format(**values) if values else translated

    return translate


@cache
def translations(language: str) -> dict[str, str]:
    """Return the translations into a language, by English text."""
    texts: dict[str, str] = yaml.safe_load((LOCALE / TABLES[language]).read_text("utf-8"))
    return texts
