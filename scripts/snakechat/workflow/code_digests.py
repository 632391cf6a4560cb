"""Digests of programs: one for each module of ours that a program imports, at any depth.

A module counts by its syntax tree without docstrings, so that comments and layout change nothing.
An import counts wherever it stands, also in a function or in a branch that may never run. What no
statement imports, the kernel denies to a job (snakechat.workflow.hermetic). A module that can read
its own source counts byte for byte.

Standard library only: the workflow imports this module while it plans.
"""

import ast
import hashlib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from snakechat.workflow.digests import file_digest

# The components of a module's name. Those of modules in rewards/ start with REWARDS, which is no
# name in Python.
Key = tuple[str, ...]
REWARDS = "rewards/"

WORKFLOW = ("snakechat", "workflow")
# Modules that lock, link, report, place and check: no content of a result depends on them, or on
# what only they import.
WITHOUT_EFFECT = {
    *((*WORKFLOW, name) for name in ("errors", "links", "locks", "progress_lines")),
    ("snakechat", "training", "rungs"),
    ("snakechat", "modeling", "command_outputs"),
}
# What the launcher sets before a program starts: of every program.
LAUNCHED_BY = [(*WORKFLOW, "placement")]
# Only of programs whose settings choose vLLM.
VLLM = ("snakechat", "modeling", "vllm_sampler")
# It imports torch to connect processes; programs that compute import it themselves.
WITHOUT_LIBRARIES = {(*WORKFLOW, "distributed")}

# Names by which code reads docstrings, comments or numbers of lines.
SOURCE_READERS = {
    *("__doc__", "getdoc", "getcomments", "getsource", "getsourcelines", "findsource"),
    *("linecache", "f_lineno", "tb_lineno", "co_filename", "co_firstlineno", "co_lines"),
    *("co_code", "co_consts", "co_linetable", "co_positions", "co_qualname", "co_names"),
}
# Reward functions are programs of users, which may open their own file.
REWARD_SOURCE_READERS = {*SOURCE_READERS, "__file__"}

# Folders of a package with files other than modules: Jinja templates, translations, tables.
DATA_FOLDERS = ("templates", "locale", "tables")
# Strings that may be names of such files.
FILE_NAME = re.compile(r"[\w/.-]+\.\w+")
REFERENCE = re.compile(r"""{%-?\s*(?:extends|include|import|from)\s+["']([^"']+)["']""")
# Such as a sum of a thousand terms.
TOO_DEEP = "an expression is nested too deeply: divide it, or put its data into a file"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Code(NamedTuple):
    """What a program consists of.

    Attributes:
        digests: Digests of its files by path: relative to scripts/, or rewards/NAME.
        imports: Top-level names of the libraries that it imports, without the standard library.
    """

    digests: dict[str, str]
    imports: frozenset[str]


# Level, module and attribute of an import. The attribute is "" in `import module`.
Import = tuple[int, str, str]


def read_source(data: bytes, path: str, is_reward: bool) -> tuple[str, list[Import], list[str]]:
    """Return what counts of a module.

    Args:
        data: The bytes of its file.
        path: Its path, for errors.
        is_reward: Whether it is in rewards/.

    Returns:
        Digest of the syntax tree, or of the bytes if the module can read them; its imports; the
        strings that may be names of data files.

    Raises:
        SyntaxError, ValueError: It is not valid Python.
    """
    try:
        module = ast.parse(data, path)
    except (RecursionError, MemoryError):
        raise ValueError(TOO_DEEP) from None
    imports: list[Import] = []
    names: set[str] = set()
    strings: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, DOCUMENTED) and _has_docstring(node):
            del node.body[0]
        if isinstance(node, ast.Import):
            imports += [(0, alias.name, "") for alias in node.names]
            names.update(name for alias in node.names for name in alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            imports += [(node.level, node.module or "", alias.name) for alias in node.names]
            names.update((node.module or "").split("."), (alias.name for alias in node.names))
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.add(node.value)
    readers = REWARD_SOURCE_READERS if is_reward else SOURCE_READERS
    try:
        text = ast.dump(module).encode() if names.isdisjoint(readers) else data
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    names_of_files = sorted(text for text in strings if is_reward or FILE_NAME.fullmatch(text))
    return hashlib.sha256(text).hexdigest(), imports, names_of_files


def _has_docstring(node: ast.AST) -> bool:
    body: list[ast.stmt] = getattr(node, "body", [])
    first = body[0].value if body and isinstance(body[0], ast.Expr) else None
    return isinstance(first, ast.Constant) and isinstance(first.value, str)


def uses_vllm(settings: Mapping[str, Any]) -> bool:
    """Return whether a program with these settings samples by vLLM."""
    return settings.get("generation_backend") == "vllm"


class Module(NamedTuple):
    """What a module of ours consists of.

    Attributes:
        digest: Digest of what counts of its source; "" if nothing does.
        imports: Modules of ours that it imports, and the package around it.
        libraries: Top-level names of modules that are neither ours nor of the standard library.
        strings: Strings that may be names of data files.
    """

    digest: str
    imports: list[Key]
    libraries: set[str]
    strings: list[str]


class Modules:
    """The modules of ours, each read once.

    Args:
        scripts: The folder of our modules.

    Attributes:
        rewards: The folder of reward functions and of their helper modules.
    """

    def __init__(self, scripts: Path) -> None:
        self.scripts, self.rewards = scripts, scripts.parent / "rewards"
        self._paths: dict[Key, Path | None] = {}
        self._modules: dict[Key, Module] = {}

    def code(
        self, program: str, reward_functions: Iterable[str] = (), uses_vllm: bool = False
    ) -> Code:
        """Return the digests of a program and of what it imports, by file, and its libraries.

        A template, a translation or a table counts if a string in the code is its path, relative to
        the folder `templates`, `locale` or `tables` next to one of the modules; so do the templates
        that it extends or includes.

        A reward function may import modules in rewards/ and our modules. A file in rewards/ that is
        not a module counts if a string in the code is its path relative to rewards/.

        Args:
            program: Name of the program in the folder of our modules.
            reward_functions: Names of the files in rewards/ that the program runs.
            uses_vllm: Whether the program samples by vLLM.

        Raises:
            FileNotFoundError: A module of ours does not exist.
            SyntaxError, ValueError, OSError: A file cannot be read.
        """
        launched_by = [key for key in LAUNCHED_BY if self._find(key)]
        rewards = [(REWARDS, name) for name in reward_functions]
        keys = self.imported_by([(program,), *launched_by, *rewards], () if uses_vllm else (VLLM,))
        modules = {key: self._module(key) for key in keys}
        digests = {self.name(key): each.digest for key, each in modules.items() if each.digest}
        for path in self.data_files(keys):
            folder = self.scripts.parent if path.is_relative_to(self.rewards) else self.scripts
            digests[path.relative_to(folder).as_posix()] = file_digest(path)
        libraries = frozenset[str]().union(*(each.libraries for each in modules.values()))
        return Code(dict(sorted(digests.items())), libraries)

    @property
    def folders(self) -> list[Path]:
        """The folders in which imports look for our modules; `snakechat` may be a link."""
        return [self.scripts, self.scripts / "snakechat", self.rewards]

    def files(
        self, program: Key, reward_functions: Iterable[str] = (), uses_vllm: bool = False
    ) -> set[Path]:
        """Return the files that a program may read: what counts, and WITHOUT_EFFECT.

        Args:
            program: The components of its name.
            reward_functions, uses_vllm: As in code.
        """
        keys = [program, *((REWARDS, name) for name in reward_functions)]
        without = () if uses_vllm else (VLLM,)
        found = self.imported_by(keys, without, self._read_module)
        return {*map(self.path, found), *self.data_files(found)}

    def path(self, key: Key) -> Path:
        """Return the file that Python runs for a module."""
        return self._find(key) or self._without_suffix(key).with_suffix(".py")

    def name(self, key: Key) -> str:
        """Return the path of a module's file relative to scripts/; with rewards/ if it is there."""
        folder = self.scripts.parent if key[0] == REWARDS else self.scripts
        return self.path(key).relative_to(folder).as_posix()

    def imported_by(
        self,
        keys: Iterable[Key],
        without: Collection[Key] = (),
        read: Callable[[Key], Module] | None = None,
    ) -> set[Key]:
        """Return modules with the packages around them and all that they import, at any depth.

        Args:
            keys: The modules.
            without: Modules to skip, with what only they import.
            read: Returns a module, by default what counts of it.
        """
        found: set[Key] = set()
        pending = list(keys)
        while pending:
            key = pending.pop()
            if key not in found and key not in without:
                found.add(key)
                pending += (read or self._module)(key).imports
        return found

    def _module(self, key: Key) -> Module:
        """Return what counts of a module."""
        if key in WITHOUT_EFFECT:
            return Module("", self._packages(key), set(), [])
        return self._read_module(key)

    def _packages(self, key: Key) -> list[Key]:
        """Return the package around a module, if it is in one."""
        return [] if len(key) == (2 if key[0] == REWARDS else 1) else [key[:-1]]

    def _read_module(self, key: Key) -> Module:
        if key in self._modules:
            return self._modules[key]
        imports, libraries = self._packages(key), set[str]()
        path = self.path(key)
        counted, statements, strings = read_source(path.read_bytes(), str(path), key[0] == REWARDS)
        for each in statements:
            imports += self._imported(key, *each, libraries)
        self._modules[key] = Module(counted, imports, libraries, strings)
        return self._modules[key]

    def data_files(self, keys: Iterable[Key]) -> set[Path]:
        """Return the data files that modules name, and the templates that these refer to."""
        modules = {key: module for key in keys if (module := self._module(key)).digest}
        parents = {self.path(key).parent for key in modules if key[0] != REWARDS}
        folders = [parent / name for parent in parents for name in DATA_FOLDERS]
        if any(key[0] == REWARDS for key in modules):
            folders.append(self.rewards)
        files: dict[str, list[Path]] = {}
        for folder in folders:
            for path in folder.rglob("*"):
                name = path.relative_to(folder).as_posix()
                # Snapshots have neither hidden files nor bytecode; modules count if imported.
                if path.suffix != ".py" and not re.search(r"/(\.|__pycache__)", f"/{name}"):
                    files.setdefault(name, []).append(path)
        referenced: set[Path] = set()
        pending = [name for module in modules.values() for name in module.strings]
        while pending:
            for path in files.get(pending.pop(), ()):
                if path.is_file() and path not in referenced:
                    referenced.add(path)
                    if not path.is_relative_to(self.rewards):
                        pending += REFERENCE.findall(path.read_text(encoding="utf-8"))
        return referenced

    def _without_suffix(self, key: Key) -> Path:
        if key[0] == REWARDS:
            return self.rewards.joinpath(*key[1:])
        return self.scripts.joinpath(*key)

    def _find(self, key: Key) -> Path | None:
        """Return the file of a module; None if it is not ours or does not exist."""
        if key not in self._paths:
            path = self._without_suffix(key)
            # As Python does, prefer a package.
            files = (path / "__init__.py", path.with_name(f"{path.name}.py"))
            self._paths[key] = next((file for file in files if file.is_file()), None)
        return self._paths[key]

    def _imported(
        self, key: Key, level: int, module: str, attribute: str, libraries: set[str]
    ) -> list[Key]:
        """Return the modules of ours that an import in a module names, or add to libraries."""
        names = tuple(filter(None, module.split(".")))
        if level:
            is_package = self.path(key).name == "__init__.py"
            package = key if is_package else key[:-1]
            target = (*package[: len(package) - level + 1], *names)
        elif key[0] == REWARDS and self._is_reward_module(key, names[0]):
            target = (REWARDS, *names)
        elif self._find(names[:1]):
            target = names
        else:
            if names[0] not in sys.stdlib_module_names and key not in WITHOUT_LIBRARIES:
                libraries.add(names[0])
            return []
        # rewards/ is no package: `from . import words`.
        found = [] if target == (REWARDS,) else [target]
        if attribute and self._find((*target, attribute)):
            found.append((*target, attribute))
        return found

    def _is_reward_module(self, key: Key, name: str) -> bool:
        """Return whether an import in a module of rewards/ finds a module in rewards/.

        snakechat.algorithms.reward_functions has the same precedence.
        """
        is_file = self._find((REWARDS, name)) == self.rewards / f"{name}.py"
        return is_file and name != key[-1] and name not in sys.stdlib_module_names
