"""Digests of programs, of the modules that they import and of the templates that they render.

Standard library only: the workflow imports this module while it plans.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from snakechat.workflow.digests import digest, file_digest

REQUIREMENTS = Path(__file__).resolve().parents[3] / "requirements.txt"

# Folders of a package with files other than modules: Jinja templates, translations.
DATA_FOLDERS = ("templates", "locale")
REFERENCE = re.compile(r"""{%-?\s*(?:extends|include|import|from)\s+["']([^"']+)["']""")


class Source(NamedTuple):
    """What a Python file consists of: its digest, its import statements and its strings."""

    digest: str
    imports: tuple["Import", ...]
    literals: frozenset[str]


class Import(NamedTuple):
    """One import statement: `from ..module import names` has level 2, `import module` no names."""

    module: str
    names: tuple[str, ...] = ()
    level: int = 0


def source_digest(path: str | Path) -> str:
    """Return the digest of a Python file; comments, docstrings and layout do not change it."""
    return _parse(Path(path).read_text(), str(path)).digest


def code_digests(program: str | Path, reward_functions: Iterable[str] = ()) -> dict[str, str]:
    """Return the digest of a program and of each module of ours that it imports, by file name.

    A module is ours if it lies in the folder of the program. Imports are followed through packages,
    with each `__init__.py` that Python runs on the way, and wherever in a file they stand.

    A template or a translation counts if a string in one of these modules is its path, relative to
    the folder `templates` or `locale` next to one of these modules; so do the templates that it
    extends or includes.

    Args:
        program: Path of scripts/NAME.py.
        reward_functions: Names of the files in rewards/ that the program runs.

    Raises:
        FileNotFoundError: A module of one of our packages does not exist.
        SyntaxError, ValueError, OSError: A file cannot be read.
    """
    root = Path(program).parent
    rewards = [root.parent / f"rewards/{name}.py" for name in reward_functions]
    digests: dict[str, str] = {}
    literals: set[str] = set()
    folders: set[Path] = set()
    pending = [Path(program), *rewards]
    while pending:
        path = pending.pop()
        is_reward = path in rewards
        name = path.relative_to(root.parent if is_reward else root).as_posix()
        if name not in digests:
            source = _parse(path.read_text(), str(path))
            digests[name] = source.digest
            literals |= source.literals
            package = () if is_reward else path.relative_to(root).parent.parts
            folders |= set() if is_reward else {path.parent}
            for statement in source.imports:
                pending += _imported_files(statement, package, root)
    for path in sorted(_data_files(folders, literals)):
        digests[path.relative_to(root).as_posix()] = file_digest(path)
    return digests


def _data_files(folders: Iterable[Path], names: Iterable[str]) -> set[Path]:
    """Return the files of these names in the data folders, and the templates that they refer to."""
    files: dict[str, list[Path]] = {}
    for data_folder in (folder / name for folder in folders for name in DATA_FOLDERS):
        for path in data_folder.rglob("*"):
            files.setdefault(path.relative_to(data_folder).as_posix(), []).append(path)
    referenced: set[Path] = set()
    pending = [name for name in names if name in files]
    while pending:
        for path in files.get(pending.pop(), ()):
            if path.is_file() and path not in referenced:
                referenced.add(path)
                pending += REFERENCE.findall(path.read_text(encoding="utf-8"))
    return referenced


def _imported_files(statement: Import, package: tuple[str, ...], root: Path) -> Iterator[Path]:
    """Yield the files under root that an import statement runs.

    package: the packages around the importing module, from the outermost to the innermost.
    """
    parents = package[: len(package) - statement.level + 1] if statement.level else ()
    components = [*parents, *filter(None, statement.module.split("."))]
    if not components or not _is_module(root / components[0]):
        return
    for depth in range(1, len(components) + 1):
        yield _module_file(root.joinpath(*components[:depth]))
    # `from package import name` imports a module of that name, if there is one.
    folder = root.joinpath(*components)
    for name in statement.names:
        if _is_module(folder / name):
            yield _module_file(folder / name)


def _is_module(path: Path) -> bool:
    """Return whether a path without suffix is a package or a module."""
    return _is_package(path) or path.with_name(f"{path.name}.py").is_file()


def _is_package(folder: Path) -> bool:
    return (folder / "__init__.py").is_file()


def _module_file(path: Path) -> Path:
    """Return the file that Python runs for a module; as Python does, prefer a package."""
    return path / "__init__.py" if _is_package(path) else path.with_name(f"{path.name}.py")


# Most modules are part of several programs.
@cache
def _parse(source: str, filename: str) -> Source:
    """Parse the text of a Python file."""
    tree = ast.parse(source, filename=filename)
    imports, literals = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [Import(alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            imports.append(Import(node.module or "", names, node.level))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            literals.add(node.value)
    return Source(digest(_canonical(tree)), tuple(imports), frozenset(literals))


def _canonical(node: Any) -> Any:
    """Return a syntax tree as nested lists without docstrings, positions and empty fields.

    Newer versions of Python add fields (type_params), which are empty for the same code: the digest
    must not depend on the Python that plans.
    """
    if isinstance(node, list):
        return [_canonical(item) for item in node]
    if not isinstance(node, ast.AST):
        return f"{type(node).__name__} {node!r}"
    fields = dict(ast.iter_fields(node))
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
            fields["body"] = node.body[1:]
    kept = {key: _canonical(value) for key, value in fields.items() if value not in (None, [])}
    return [type(node).__name__, kept]


def requirements_digest(path: str | Path) -> str:
    """Return the digest of the pinned requirements; order, case and comments do not change it."""
    lines = Path(path).read_text().lower().splitlines()
    lines = [re.sub(r"\s*#.*", "", line).strip() for line in lines]
    return digest(sorted(line for line in lines if line))


def pinned_versions(path: str | Path) -> dict[str, str]:
    """Return the version of each pinned requirement, by name."""
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", Path(path).read_text(), flags=re.MULTILINE))
