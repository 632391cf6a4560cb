"""Texts of pages in the language of the config.

locale/LANGUAGE.yaml has the translation of each English text. A text without one appears in
English; a test finds all texts and names those that are missing or unused.
"""

from pathlib import Path

import yaml

LOCALE = Path(__file__).with_name("locale")
# Literal paths, by which code digests find the tables that a program reads.
TABLES = {"zh": "zh.yaml"}

# The translations into the language of the program, by English text.
_texts: dict[str, str] = {}


def set_language(language: str) -> None:
    """Have translate() return texts in a language (en or zh) from now on."""
    _texts.clear()
    _texts.update(translations(language) if language in TABLES else {})


def translate(text: str, /, **values: object) -> str:
    """Return a text in the language of the program.

    Args:
        text: The English text: a literal outside of f-strings, so that the test finds it, or a text
            that N_() marks.
        values: What replaces its {placeholders}.
    """
    translated = _texts.get(text, text)
    return translated.format(**values) if values else translated


def translations(language: str) -> dict[str, str]:
    """Return the translations into a language, by English text."""
    texts: dict[str, str] = yaml.safe_load((LOCALE / TABLES[language]).read_text("utf-8"))
    return texts
