"""Texts of pages in the language of the config, from gettext catalogues.

The sources of the translations are locale/LANGUAGE/LC_MESSAGES/snakechat.po. A text that has no
translation appears in English. scripts/update_translations.py finds new texts and lists the
untranslated ones.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

from babel.messages.pofile import read_po

LOCALE = Path(__file__).with_name("locale")
# Literal paths, by which code digests find the catalogues that a program reads.
CATALOGUES = {"zh": "zh_CN/LC_MESSAGES/snakechat.po"}

# Translates a text, then replaces its {placeholders} by the keyword arguments.
Translate = Callable[..., str]


def translator(language: str) -> Translate:
    """Return a function that translates English texts into a language (en or zh).

    Its argument must be a literal outside of f-strings, so that update_translations finds it.
    """
    texts = translations(CATALOGUES[language]) if language in CATALOGUES else {}

    def translate(text: str, /, **values: object) -> str:
        translated = texts.get(text, text)
        return translated.format(**values) if values else translated

    return translate


@cache
def translations(catalogue: str) -> dict[str, str]:
    """Return the finished translations of a catalogue, by English text."""
    with open(LOCALE / catalogue, "rb") as file:
        messages = read_po(file)
    return {
        str(message.id): str(message.string)
        for message in messages
        if message.id and message.string and not message.fuzzy
    }
