"""Update the translation catalogues of the pages and list the texts without a translation.

Texts are the arguments of translate() and N_() in scripts/, and of _() in the templates of pages. A
text without a translation appears in English.
"""

import argparse
import io
from pathlib import Path

from babel.messages.catalog import Catalog, Message
from babel.messages.extract import extract_from_dir
from babel.messages.pofile import read_po, write_po

from snakechat.reporting.translations import CATALOGUES, LOCALE

SCRIPTS = Path(__file__).parent
METHODS = [("**.py", "python"), ("**/templates/**.*", "jinja2")]
KEYWORDS = {"translate": None, "N_": None, "_": None}
OPTIONS = {"**/templates/**.*": {"silent": "false"}}
HEADER = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=utf-8\\n"\n\n'


def main() -> None:
    """Print the untranslated texts; without --check, write the catalogues."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="do not write the catalogues")
    check = parser.parse_args().check
    texts = extract()
    for language, name in CATALOGUES.items():
        path = LOCALE / name
        catalogue, missing = update(path, texts)
        if not check:
            path.write_text(format_catalogue(catalogue), encoding="utf-8")
        print(f"{language}: {len(texts)} texts, {len(missing)} without a translation")
        for text in missing:
            print(f"  {text}")


def extract() -> list[str]:
    """Return the texts of all programs and templates, sorted."""
    found = extract_from_dir(SCRIPTS, METHODS, OPTIONS, KEYWORDS)
    return sorted({message for _, _, message, _, _ in found if isinstance(message, str)})


def update(path: Path, texts: list[str]) -> tuple[Catalog, list[str]]:
    """Return a catalogue that contains exactly these texts, and those without a translation."""
    with open(path, "rb") as file:
        catalogue = read_po(file)
    for message in list(catalogue):
        if message.id and message.id not in texts:
            catalogue.delete(message.id)
    for text in texts:
        if text not in catalogue:
            catalogue[text] = Message(text)
    return catalogue, [text for text in texts if not catalogue[text].string]


def format_catalogue(catalogue: Catalog) -> str:
    """Return a catalogue as a .po file without dates, places of texts and obsolete entries."""
    for message in catalogue:
        # A percent sign in a text is not a placeholder.
        message.flags.discard("python-format")
    file = io.BytesIO()
    options = {"no_location": True, "ignore_obsolete": True, "sort_output": True}
    write_po(file, catalogue, width=100, omit_header=True, **options)
    return HEADER + file.getvalue().decode("utf-8")


if __name__ == "__main__":
    main()
