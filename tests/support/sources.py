"""Small programs and their packages, and which of their digests an edit changes."""

from snakechat.workflow.code_digests import code_digests


def write_sources(root, files):
    """Write files, by path, under a folder and return the folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def changed(write, files, edits):
    """The files whose digests change if program.py runs with these edits: {FILE: (OLD, NEW)}."""
    program = write(files) / "program.py"
    before = code_digests(program)
    for name, (old, new) in edits.items():
        assert files[name].count(old) == 1, (name, old)
        (program.parent / name).write_text(files[name].replace(old, new))
    after = code_digests(program)
    return {name for name in before | after if before.get(name) != after.get(name)}
