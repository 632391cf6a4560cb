"""Small programs and their packages."""

from snakechat.workflow.code_digests import Modules


def code_digests(program, *arguments, **named):
    """Return the digests of the code of a program, given its path scripts/NAME.py."""
    return Modules(program.parent).code(program.stem, *arguments, **named).digests


def write_sources(root, files):
    """Write files, by path, under a folder and return the folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
