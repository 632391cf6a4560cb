"""What code is, told by its meaning: digests of programs, of their modules, and of the pins.

Standard library only, as rlhf.digests.
"""

import ast
import re
from functools import cache
from pathlib import Path

from rlhf.digests import digest

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements.txt"


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
    return _read(Path(path).read_text(), str(path))[0]


# Most modules are part of several programs.
@cache
def _read(source, filename):
    """The digest of a source's meaning, and the modules of ours that it imports in any form."""
    tree = ast.parse(source, filename=filename)
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, ["rlhf" if node.level else "", node.module]))
            names.append(module)
            names += [f"rlhf.{alias.name}" for alias in node.names if module == "rlhf"]
    ours = [name for name in names if name.startswith("rlhf.")]
    # Python runs it before any module of the package.
    return digest(_tree(tree)), ["rlhf.__init__", *ours] if ours else []


def code_digests(program, reward_functions=()):
    """Digest of a program and of each module of ours it imports, directly or not, by file name.

    program: path of scripts/NAME.py. reward_functions: names of those that it is given to run.
    Raises SyntaxError, ValueError or OSError for a file that cannot be read.
    """
    root = Path(program).parent
    rewards = [root.parent / f"rewards/{name}.py" for name in reward_functions]
    found, todo = {}, [Path(program), *rewards]
    while todo:
        path = todo.pop()
        name = path.relative_to(root.parent if path in rewards else root).as_posix()
        if name not in found:
            found[name], imported = _read(path.read_text(), str(path))
            todo += [root / f"{module.replace('.', '/')}.py" for module in imported]
    return found


def requirements_digest(path):
    """Digest of the pinned requirements: order, case and comments do not count."""
    lines = Path(path).read_text().lower().splitlines()
    lines = (re.sub(r"\s*#.*", "", line).strip() for line in lines)
    return digest(sorted(line for line in lines if line))


def pinned_versions(path):
    """Version of each pinned requirement, by name."""
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", Path(path).read_text(), flags=re.MULTILINE))
