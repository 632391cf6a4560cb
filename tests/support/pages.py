"""The texts of HTML pages."""

import html
import re


def texts_in(page, tag):
    """Return the text of each element with a tag that does not contain the same tag."""
    found = re.findall(rf"<{tag}(?: [^>]*)?>(.*?)</{tag}>", page, re.DOTALL)
    return [html.unescape(re.sub("<.*?>", "", text)) for text in found]
