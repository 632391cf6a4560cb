"""Pages for people, each complete in one file: nothing is loaded, whatever models have written."""

from jinja2 import Environment

# Control characters, but for line breaks and tabs, as pictures of themselves.
PICTURES = {code: 0x2400 + code for code in range(32) if code not in b"\t\n"} | {127: 0x2421}

PAGE = """<!doctype html>
<html lang="{{ language }}">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>
body { font: 16px/1.5 sans-serif; max-width: 90em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; width: 100%; table-layout: fixed; margin-bottom: 2em; }
th, td { border: 1px solid #ccc; padding: .4em .6em; text-align: left; vertical-align: top; }
th { background: #f3f3f3; overflow-wrap: anywhere; }
caption { text-align: left; font-weight: bold; padding: .4em 0; }
caption, td { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; }
.name { width: 8em; }
.number { width: 6em; text-align: right; }
.cut { color: #777; }
@media print {
  body { font-size: 10pt; max-width: none; margin: 0; padding: 0; }
  tr { break-inside: avoid; }
  thead { display: table-header-group; }
  caption { break-after: avoid; }
}
</style>
<h1>{{ title }}</h1>
{% for sentence in sentences %}<p>{{ sentence }}</p>
{% endfor %}"""


def write_page(path, body, language, title, sentences, **values):
    """Write a page: title, sentences, and a body (a Jinja template) of values.

    All values are escaped: what looks like HTML in them is shown as it stands.
    """
    environment = Environment(autoescape=True, trim_blocks=True, finalize=drawn)
    page = environment.from_string(PAGE + body + "</html>\n")
    text = page.render(language=language, title=title, sentences=sentences, **values)
    path.write_text(text, encoding="utf-8")


def drawn(value):
    """What a page shows of a value."""
    return value.translate(PICTURES) if isinstance(value, str) else value
