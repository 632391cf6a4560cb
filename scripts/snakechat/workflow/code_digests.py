"""Digests of programs: of the definitions that they reach and of the templates that they render.

A program is its file and the module-level statements of our other modules that it can reach by
name. Statements that do more than bind a name count as soon as their module is imported. What
cannot be resolved (star imports, names that are made at run time, modules used as values) makes the
module that it is about count whole.

Standard library only: the workflow imports this module while it plans.
"""

import ast
import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from snakechat.workflow.digests import digest, file_digest, write_atomically
from snakechat.workflow.errors import InputError
from snakechat.workflow.reachability import REWARDS, Reach

# Folders of a package with files other than modules: Jinja templates, translations, tables.
DATA_FOLDERS = ("templates", "locale", "tables")
REFERENCE = re.compile(r"""{%-?\s*(?:extends|include|import|from)\s+["']([^"']+)["']""")


class Code(NamedTuple):
    """What a program consists of.

    Attributes:
        digests: Digests of what it reaches of each file, by path: relative to scripts/, or
            rewards/NAME. Files without reached definitions are omitted.
        imports: Top-level names of the libraries that it uses, without the standard library.
    """

    digests: dict[str, str]
    imports: frozenset[str]


def program_code(program: str | Path, reward_functions: Iterable[str] = ()) -> Code:
    """Return the digests of what a program reaches, by file, and the libraries that it uses.

    Our modules are those in the folder of the program. A template, a translation or a table counts
    if a string in the code is its path, relative to the folder `templates`, `locale` or `tables`
    next to one of the modules; so do the templates that it extends or includes.

    A reward function may import modules in rewards/ and our modules. The data files that it reads
    are those in rewards/ that it declares: `FILES = ["words.txt"]`.

    Args:
        program: Path of scripts/NAME.py.
        reward_functions: Names of the files in rewards/ that the program runs.

    Raises:
        InputError: A file that a reward function declares does not exist.
        FileNotFoundError: A module of ours does not exist.
        SyntaxError, ValueError, OSError: A file cannot be read.
    """
    program = Path(program)
    reach = Reach(program.parent)
    reach.count_whole((program.stem,), is_program=True)
    return _code(reach, reward_functions)


class CodeCache:
    """program_code with a memory on disk.

    Args:
        path: File of the memory.
        sources: Digest of all files of scripts/ and rewards/. The memory holds for one.
    """

    def __init__(self, path: Path, sources: str) -> None:
        self.path, self.sources = path, sources
        try:
            known = json.loads(path.read_text())
            entries = known["entries"]
            if known["sources"] != sources or known["digest"] != digest(entries):
                raise ValueError("of other sources, or damaged")
            self._known = {key: Code(code[0], frozenset(code[1])) for key, code in entries.items()}
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            # Missing, of other sources, or damaged by a full disk.
            self._known = {}

    def code(self, program: Path, reward_functions: tuple[str, ...]) -> Code:
        """Return program_code(program, reward_functions)."""
        key = " ".join([program.name, *reward_functions])
        if key not in self._known:
            self._known[key] = program_code(program, reward_functions)
            entries = {
                key: [code.digests, sorted(code.imports)] for key, code in self._known.items()
            }
            known = {"sources": self.sources, "entries": entries, "digest": digest(entries)}
            # Without it, planning takes half a second longer.
            with suppress(OSError):
                write_atomically(self.path, json.dumps(known), durable=False)
        return self._known[key]


def code_digests(program: str | Path, reward_functions: Iterable[str] = ()) -> dict[str, str]:
    """Return program_code(...).digests."""
    return program_code(program, reward_functions).digests


def reward_function_files(scripts: Path, reward_functions: Iterable[str]) -> set[Path]:
    """Return all files of the project that reward functions import or declare.

    Raises:
        As program_code.
    """
    reach = Reach(scripts)
    _code(reach, reward_functions)
    return {*map(reach.path, reach.modules), *_declared_files(reach).values()}


def _code(reach: Reach, reward_functions: Iterable[str]) -> Code:
    for name in reward_functions:
        reach.count_whole((REWARDS, name))
    reach.finish()
    digests = {reach.name(key): state.digest() for key, state in reach.modules.items() if state}
    digests |= {name: file_digest(path) for name, path in _declared_files(reach).items()}
    folders = {reach.path(key).parent for key in reach.modules if key[0] != REWARDS}
    for path in _data_files(folders, reach.literals):
        digests[path.relative_to(reach.scripts).as_posix()] = file_digest(path)
    return Code(dict(sorted(digests.items())), frozenset(reach.libraries))


def _declared_files(reach: Reach) -> dict[str, Path]:
    """Return the files of the constants FILES of modules in rewards/, by name in digests."""
    files = {}
    for key, state in reach.modules.items():
        if key[0] != REWARDS or "FILES" not in state.module.bindings:
            continue
        place, names = reach.name(key), _constant(state.module.constants.get("FILES"))
        if not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
            raise InputError(f'{place}: FILES must be a list of names, such as ["words.txt"]')
        for name in names:
            path = Path(os.path.normpath(reach.rewards / name))
            if not path.is_file():
                raise InputError(f"{place}: FILES names {name}: there is no file {path}")
            if not path.is_relative_to(reach.rewards):
                raise InputError(f"{place}: FILES names {name}, which is not in rewards/")
            files[path.relative_to(reach.rewards.parent).as_posix()] = path
    return files


def _constant(node: ast.expr | None) -> object:
    """Return the value of an expression; None if it is not constant."""
    try:
        return ast.literal_eval(node) if node else None
    except ValueError:
        return None


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
