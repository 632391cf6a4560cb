"""The texts of HTML pages and of the cells of tables."""

import html
import re


def texts_in(page, tag):
    """Return the text of each element with a tag that does not contain the same tag."""
    found = re.findall(rf"<{tag}(?: [^>]*)?>(.*?)</{tag}>", page, re.DOTALL)
    return [html.unescape(re.sub("<.*?>", "", text)) for text in found]


def text_of(cell):
    """Return the text of a cell, with spaces and signs of a typewriter."""
    text = " ".join(filter(None, cell)) if isinstance(cell, tuple) else str(cell or "")
    return text.replace("\xa0", " ").replace("\u2212", "-")
