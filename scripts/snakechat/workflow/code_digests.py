"""The sources: digests of what each program imports, and the snapshot that a build runs.

Each module of ours that a program imports, at any depth, has a digest. It counts by its syntax tree
without docstrings, so that comments and layout change nothing. An import counts wherever it stands,
also in a function or in a branch that may never run. What no statement imports, the kernel denies
to a job (scripts/confined.py). A module that can read its own source counts byte for byte.

output/code/DIGEST/ is a copy of the files that jobs run, named after their content. An edit of the
sources while a build runs changes none of its jobs, and bytecode always belongs to its source. A
file in it says with what Snakemake plans again in each job of a cluster, and which results the user
forces. Both are written when the jobs start, so that a dry run writes nothing.

Standard library only: the workflow imports this module while it plans.
"""

import ast
import hashlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from snakechat.workflow.manifest import canonical_json, digest, file_digest, write_atomically

# Modules that lock, link, report, place, check, and convert the curves of commands. A change of
# them, or of what only they import, makes no result stale. Paths are relative to scripts/.
WITHOUT_EFFECT = {
    *(f"snakechat/workflow/{name}.py" for name in ("errors", "links", "store")),
    "snakechat/training/rungs.py",
    "snakechat/modeling/command_outputs.py",
}
# What the launcher sets before a program starts: of every program. Programs that compute import
# torch themselves.
LAUNCHED_BY = "snakechat/workflow/processes.py"
# Only of programs whose settings choose vLLM.
VLLM = "snakechat/modeling/vllm_sampler.py"

# Words by which code reads docstrings, comments or numbers of lines.
SOURCE_READERS = {
    *("__doc__", "getdoc", "getcomments", "getsource", "getsourcelines", "findsource"),
    *("linecache", "f_lineno", "tb_lineno", "co_filename", "co_firstlineno", "co_lines"),
    *("co_code", "co_consts", "co_linetable", "co_positions", "co_qualname", "co_names"),
}

# Folders of a package with files other than modules: Jinja templates, translations, tables.
DATA_FOLDERS = ("templates", "tables")
# Strings that may be names of such files.
FILE_NAME = re.compile(r"[\w/.-]+\.\w+")
# Paths of hidden files and of bytecode, and paths that lead out of the folder.
NOT_DATA = re.compile(r"/(/|\.|__pycache__)")
REFERENCE = re.compile(r"""{%-?\s*(?:extends|include|import|from)\s+["']([^"']+)["']""")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Code(NamedTuple):
    """What a program consists of."""

    # Digests of its files by path: relative to scripts/, or rewards/NAME.
    digests: dict[str, str]
    # Top-level names of the libraries that it imports, without the standard library.
    imports: frozenset[str]
    # The files that it may read: those that count, and WITHOUT_EFFECT.
    files: frozenset[Path]


# Level, module and attribute of an import. The attribute is "" in `import module`.
Import = tuple[int, str, str]


def read_source(data: bytes, path: str, is_reward: bool) -> tuple[str, list[Import], list[str]]:
    """Return what counts of a module: a digest, its imports, and what may be names of data files.

    It is the digest of the syntax tree, or of the bytes (data) if the module can read them.
    Raises SyntaxError or ValueError if it is not valid Python.

    is_reward: Whether it is in rewards/.
    """
    imports: list[Import] = []
    strings: set[str] = set()
    module = ast.parse(data, path)
    for node in ast.walk(module):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
        if isinstance(node, ast.Import):
            imports += [(0, alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports += [(node.level, node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.add(node.value)
    text = ast.dump(module)
    # Reward functions are programs of users, which may open their own file.
    readers = SOURCE_READERS | {"__file__"} if is_reward else SOURCE_READERS
    counted = text.encode() if readers.isdisjoint(re.findall(r"\w+", text)) else data
    names_of_files = sorted(text for text in strings if is_reward or FILE_NAME.fullmatch(text))
    return hashlib.sha256(counted).hexdigest(), imports, names_of_files


def selected_code(settings: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    """Return the reward functions of a program, and whether it samples by vLLM."""
    return tuple(settings.get("reward_functions", ())), settings.get("generation_backend") == "vllm"


class Module(NamedTuple):
    """What a module of ours consists of."""

    digest: str
    # The files of our modules that it imports, and of the packages around it.
    imports: list[Path]
    libraries: set[str]
    # Strings that may be names of data files.
    strings: list[str]


class Modules:
    """The modules of ours, each read once. A module is the path of its file.

    scripts: Their folder. Reward functions and the modules of these are in rewards/ beside it.
    """

    def __init__(self, scripts: Path) -> None:
        self.scripts, self.rewards = scripts, scripts.parent / "rewards"
        # snakechat.algorithms.reward_functions finds these before libraries, too.
        self.helpers = {file.stem for file in self.rewards.glob("*.py")} - sys.stdlib_module_names
        # In which imports look for our modules; `snakechat` may be a link.
        self.folders = [scripts, scripts / "snakechat", self.rewards]
        self._find = cache(self._find_module)
        self._read = cache(self._read_module)

    def code(
        self, program: str, reward_functions: Iterable[str] = (), uses_vllm: bool = False
    ) -> Code:
        """Return the digests of a program and of what it imports, by file, and its libraries.

        A template, a translation or a table counts if a string in the code is its path, relative to
        the folder `templates` or `tables` next to one of the modules; so do the templates that it
        extends or includes. Other files in rewards/ count as relative to rewards/.

        Args:
            program: Path of the program in the folder of our modules, without .py.
            reward_functions: Names of the files in rewards/ that the program runs.
            uses_vllm: Whether the program samples by vLLM.

        Raises SyntaxError, ValueError or OSError if a file cannot be read.
        """
        started = [self.scripts / f"{program}.py"]
        started += [self.rewards / f"{name}.py" for name in reward_functions]
        if (launched_by := self.scripts / LAUNCHED_BY).exists():
            started.append(launched_by)
        vllm = () if uses_vllm else (VLLM,)
        modules = self.imported_by(started, (*WITHOUT_EFFECT, *vllm))
        data = self._data_files(modules)
        digests = {path: module.digest for path, module in modules.items()}
        digests |= {path: file_digest(path) for path in data}
        libraries = frozenset[str]().union(*(each.libraries for each in modules.values()))
        files = frozenset(data).union(self.imported_by(started, vllm))
        # Those in rewards/ are beside scripts/.
        by_name = {
            os.path.relpath(path, self.scripts).removeprefix("../"): sha256
            for path, sha256 in digests.items()
        }
        return Code(dict(sorted(by_name.items())), libraries, files)

    def imported_by(
        self, paths: Iterable[Path], without: Iterable[str] = (VLLM,)
    ) -> dict[Path, Module]:
        """Return modules with the packages around them and all that they import, at any depth.

        without: Modules, relative to scripts/, that do not count, nor does what only they import.
        """
        found: dict[Path, Module] = {}
        skipped, pending = {self.scripts / name for name in without}, [*paths]
        while pending:
            path = pending.pop()
            if path not in found and path not in skipped:
                found[path] = self._read(path)
                pending += found[path].imports
        return found

    def _read_module(self, path: Path) -> Module:
        is_reward = self._is_reward(path)
        counted, statements, strings = read_source(path.read_bytes(), str(path), is_reward)
        # The files of the packages around it; a folder needs none.
        top, libraries = self.rewards if is_reward else self.scripts, set[str]()
        packages = [top / folder / "__init__.py" for folder in path.relative_to(top).parents]
        imports = [file for file in packages if file.is_file()]
        for level, module, attribute in statements:
            names = module.split(".") if module else []
            if level:
                folder = path.parents[level - 1]
            elif is_reward and names[0] in self.helpers - {path.stem}:
                folder = self.rewards
            elif self._find(self.scripts, names[0]):
                folder = self.scripts
            else:
                libraries.add(names[0])
                continue
            # The attribute may be a module, too. Without one, both are the same.
            files = self._find(folder, *names), self._find(folder, *names, attribute)
            # Reading one that does not exist is an error.
            missing = [folder.joinpath(*names).with_suffix(".py")] if names else []
            imports += [file for file in files if file] or missing
        if path == self.scripts / LAUNCHED_BY:
            libraries.clear()
        return Module(counted, imports, libraries - sys.stdlib_module_names, strings)

    def _data_files(self, modules: Mapping[Path, Module]) -> set[Path]:
        """Return the data files that modules name, and the templates that these refer to."""
        possible = {path.parent / name for path in modules for name in DATA_FOLDERS}
        folders = [*filter(Path.is_dir, possible)]
        if any(map(self._is_reward, modules)):
            folders.append(self.rewards)
        found: set[Path] = set()
        pending = [name for module in modules.values() for name in module.strings]
        while pending:
            name = pending.pop()
            # Snapshots have neither hidden files nor bytecode; modules count if imported.
            if name.endswith(".py") or NOT_DATA.search(f"/{name}"):
                continue
            for path in (folder / name for folder in folders):
                if path not in found and os.path.isfile(path):
                    found.add(path)
                    if not self._is_reward(path):
                        pending += REFERENCE.findall(path.read_text(encoding="utf-8"))
        return found

    def _is_reward(self, path: Path) -> bool:
        return path.is_relative_to(self.rewards)

    def _find_module(self, folder: Path, *names: str) -> Path | None:
        """Return the file of a module, given the components of its name; None without one."""
        path = folder.joinpath(*names)
        # As Python does, prefer a package.
        files = (path / "__init__.py", path.with_name(f"{path.name}.py"))
        return next((file for file in files if file.is_file()), None)


# --- snapshots --------------------------------------------------------------------------------

SNAPSHOTS = Path("output/code")
# What jobs run, and plan with on a cluster, below the folder of the Snakefile.
SOURCES = ("envs", "rewards", "rules", "scripts")
# Snapshots that no build has used for so long are deleted. Jobs may still be in a cluster's queue.
MAX_AGE_SECONDS = 7 * 24 * 3600


class Snapshot:
    """The sources in a folder (root) at one moment, and the folder that they are copied to."""

    def __init__(self, root: Path) -> None:
        self.files = _source_files(root)
        digests = {name: hashlib.sha256(each).hexdigest() for name, each in self.files.items()}
        self.folder = SNAPSHOTS / digest(digests)[:16]

    def write(self, build: Mapping[str, Any], forced: Iterable[str]) -> None:
        """Copy the sources, unless the copy exists, and delete what no build has used for a week.

        A copy that was edited or damaged is replaced.

        Args:
            build: What the jobs of a build plan with: the folder of the snapshot (sources), the
                config as Snakemake read it (config), and what --config set (command_line).
            forced: The results that the user forces.
        """
        SNAPSHOTS.mkdir(parents=True, exist_ok=True)
        if _source_files(self.folder) != self.files:
            with tempfile.TemporaryDirectory(prefix=".", dir=SNAPSHOTS) as temporary:
                copy = Path(temporary, "copy")
                for name, content in self.files.items():
                    (copy / name).parent.mkdir(parents=True, exist_ok=True)
                    (copy / name).write_bytes(content)
                # Of other builds, whose jobs may wait in the queue of a cluster.
                for other in self.folder.glob("*.json"):
                    shutil.copy2(other, copy)
                shutil.rmtree(self.folder, ignore_errors=True)
                # It fails if another process has taken the same snapshot.
                with suppress(OSError):
                    os.rename(copy, self.folder)
        # The folder has the time of its last use by this.
        text = canonical_json({**build, "forced": [*forced]})
        write_atomically(build_path(build), text, durable=False)
        oldest = time.time() - MAX_AGE_SECONDS
        for path in SNAPSHOTS.iterdir():
            # Another build may rename or delete one at this moment.
            with suppress(OSError):
                if path.stat().st_mtime < oldest:
                    shutil.rmtree(path)


def _source_files(root: Path) -> dict[str, bytes]:
    # Hidden files, which editors write, and bytecode are not sources.
    paths = list(root.glob("requirements*.txt"))
    for name in SOURCES:
        for parent, folders, files in os.walk(root / name):
            folders[:] = [inner for inner in folders if not inner.startswith((".", "__pycache__"))]
            paths += [Path(parent, file) for file in files if not file.startswith(".")]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def build_path(build: Mapping[str, Any]) -> Path:
    """Return the path of the file with what the jobs of a build plan with.

    The path does not depend on what the user forces: plugins read it when they start, before the
    jobs are known.
    """
    return Path(build["sources"], f"{digest(build)[:16]}.json")
