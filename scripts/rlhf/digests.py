"""What things are, told by their content: digests of settings, files, code and requirements.

Standard library only: the workflow imports this module while it plans, so that a dry run needs
neither torch nor any other library of the training programs.
"""

import ast
import hashlib
import json
import os
import re
from pathlib import Path

CHUNK = 1 << 20


def canonical_json(value):
    """One text for each value: keys sorted, no blanks, floats as repr; NaN is refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value):
    """sha256 (hex) of a JSON value. 1 and 1.0 are the same number, however they were written."""

    def plain(item):
        if isinstance(item, dict):
            return {key: plain(inner) for key, inner in item.items()}
        if isinstance(item, list):
            return [plain(inner) for inner in item]
        if isinstance(item, float) and item.is_integer():
            return int(item)
        return item

    return hashlib.sha256(canonical_json(plain(value)).encode()).hexdigest()


def file_digest(path):
    """sha256 (hex) of a file's bytes."""
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            sha.update(chunk)
    return sha.hexdigest()


class DigestCache:
    """File digests remembered by (size, mtime_ns, ctime_ns, inode), to plan again at no cost.

    ctime is in the key because an edit can restore mtime but not ctime.
    """

    def __init__(self, path):
        self.path = Path(path)
        self.known = json.loads(self.path.read_text()) if self.path.exists() else {}

    def __getitem__(self, path):
        path = os.path.realpath(path)
        status = os.stat(path)
        key = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        if self.known.get(path, [None])[0] != key:
            self.known[path] = [key, file_digest(path)]
            write_atomically(self.path, canonical_json(self.known))
        return self.known[path][1]


def write_atomically(path, text):
    """Write a small text file so that a reader sees the old text or the new one, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def _tree(node):
    """The syntax tree as nested lists without docstrings, positions and empty fields.

    Empty fields are left out because newer Pythons add some (type_params): the digest must not
    depend on the Python that plans.
    """
    if isinstance(node, list):
        return [_tree(item) for item in node]
    if not isinstance(node, ast.AST):
        return f"{type(node).__name__} {node!r}"
    fields = dict(ast.iter_fields(node))
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
            fields["body"] = node.body[1:]
    kept = {key: _tree(value) for key, value in fields.items() if value not in (None, [])}
    return [type(node).__name__, kept]


def source_digest(path):
    """Digest of a Python file's meaning: comments, docstrings and layout do not count."""
    return digest(_tree(ast.parse(Path(path).read_text(), filename=str(path))))


def _imported_modules(path, root):
    """Files under root/rlhf that a Python file imports in any form, anywhere in it."""
    for node in ast.walk(ast.parse(Path(path).read_text(), filename=str(path))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, ["rlhf" if node.level else "", node.module]))
            names = [module, *(f"rlhf.{alias.name}" for alias in node.names if module == "rlhf")]
        yield from (root / f"{name.replace('.', '/')}.py" for name in names if name[:5] == "rlhf.")


def code_digests(program):
    """Digest of a program and of each module of ours it imports, directly or not, by file name.

    program: path of scripts/NAME.py.
    """
    root = Path(program).parent
    found, todo = {}, [Path(program)]
    while todo:
        path = todo.pop()
        name = path.relative_to(root).as_posix()
        if name not in found:
            found[name] = source_digest(path)
            todo.extend(_imported_modules(path, root))
    return found


def requirements_digest(path):
    """Digest of the pinned requirements: order, case and comments do not count."""
    lines = Path(path).read_text().lower().splitlines()
    lines = (re.sub(r"\s*#.*", "", line).strip() for line in lines)
    return digest(sorted(line for line in lines if line))
