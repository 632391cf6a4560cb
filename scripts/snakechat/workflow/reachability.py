"""What a program reaches by name: module-level statements of our modules, and libraries.

Standard library only: the workflow imports this module while it plans.
"""

import sys
from pathlib import Path

from snakechat.workflow.definitions import Module, Statement, parse
from snakechat.workflow.digests import digest
from snakechat.workflow.scopes import Import
from snakechat.workflow.syntax import MODULE_ATTRIBUTES

# The components of a module's name. Those of modules in rewards/ start with REWARDS, which is no
# name in Python.
Key = tuple[str, ...]
REWARDS = "rewards/"

WORKFLOW = ("snakechat", "workflow")
# Modules that lock, check, record, copy and place: no content of a result depends on them, and none
# becomes stale when they change.
WITHOUT_EFFECT = {
    (*WORKFLOW, name)
    for name in (
        *("cache_entries", "cache_space", "result_cache", "result_copies"),
        *("code_digests", "definitions", "reachability", "scopes", "syntax", "pins"),
        *("errors", "gpus", "input_checks", "locks", "run_record"),
    )
}
# It imports torch to connect the processes of a job; programs that compute import it themselves.
WITHOUT_LIBRARIES = {(*WORKFLOW, "distributed")}

# Libraries whose functions do nothing but return a value, and other functions that do more.
PURE_LIBRARIES = {
    "collections",
    "dataclasses",
    "datetime",
    "enum",
    "fractions",
    "functools",
    "itertools",
    "math",
    "operator",
    "pathlib",
    "re",
    "string",
    "struct",
    "textwrap",
    "types",
    "typing",
}
PURE_METHODS = {"copy", "format", "get", "items", "join", "keys", "split", "values"}
IMPURE_BUILTINS = {
    "breakpoint",
    "compile",
    "delattr",
    "eval",
    "exec",
    "input",
    "next",
    "open",
    "print",
    "setattr",
}


class State:
    """What is reached of a module that is imported; false if it is nothing."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.reached: set[int] = set()
        # Imports whose names are used.
        self.imports: set[Import] = set()
        self.whole = False

    def __bool__(self) -> bool:
        return bool(self.whole or self.reached or self.imports)

    def digest(self) -> str:
        """Return the digest of what is reached."""
        ordered: list[tuple[int, int, str]] = []
        movable: list[str] = []
        for number in self.reached:
            statement = self.module.statements[number]
            if statement.movable:
                movable.append(statement.digest)
            else:
                # After the imports that precede it.
                ordered.append((number, len(self.module.imports), statement.digest))
        for number, each in enumerate(self.module.imports):
            if each in self.imports:
                if each in self.module.places:
                    ordered.append((self.module.places[each], number, repr(each)))
                else:
                    movable.append(repr(each))
        return digest([[word for _, _, word in sorted(ordered)], sorted(movable)])


class Reach:
    """The modules that programs import, and what they reach of each.

    Attributes:
        scripts: The folder of our modules.
        rewards: The folder of reward functions and of their helper modules.
        modules: All modules that are imported.
        libraries: Top-level names of modules that are neither ours nor of the standard library.
        literals: Strings in the statements that are reached.
    """

    def __init__(self, scripts: Path) -> None:
        self.scripts = scripts
        self.rewards = scripts.parent / "rewards"
        self.modules: dict[Key, State] = {}
        self.libraries: set[str] = set()
        self.literals: set[str] = set()
        self._paths: dict[Key, Path | None] = {}
        self._pending: list[tuple[Key, Statement]] = []
        self._used: set[tuple[Key, str, tuple[str, ...]]] = set()
        self._has_subclass_hooks = False

    def path(self, key: Key) -> Path:
        """Return the file that Python runs for a module, or the folder of a namespace package."""
        return self._find(key) or self._without_suffix(key).with_suffix(".py")

    def name(self, key: Key) -> str:
        """Return the path of a module's file relative to scripts/; with rewards/ if it is there."""
        folder = self.scripts.parent if key[0] == REWARDS else self.scripts
        return self.path(key).relative_to(folder).as_posix()

    def finish(self) -> None:
        """Follow all names that statements use."""
        while self._pending:
            self._follow(*self._pending.pop())

    def count_whole(self, key: Key, is_program: bool = False) -> None:
        """Reach all statements of a module and everything that its names stand for."""
        state = self._import(key)
        if state.whole:
            return
        state.whole = True
        for number, statement in enumerate(state.module.statements):
            if is_program or not statement.is_main:
                self._reach(key, number)
        for each in state.module.imports:
            # A program's names are used by nobody else.
            if not is_program:
                self._use(key, each.bound, ())

    def _without_suffix(self, key: Key) -> Path:
        if key[0] == REWARDS:
            return self.rewards.joinpath(*key[1:])
        return self.scripts.joinpath(*key)

    def _find(self, key: Key) -> Path | None:
        """Return the file of a module, the folder of a namespace package, or None."""
        if key not in self._paths:
            path = self._without_suffix(key)
            file = path.with_name(f"{path.name}.py")
            # As Python does, prefer a package.
            if (path / "__init__.py").is_file():
                self._paths[key] = path / "__init__.py"
            elif file.is_file():
                self._paths[key] = file
            else:
                is_package = path.is_dir() and any(path.rglob("*.py"))
                self._paths[key] = path if is_package else None
        return self._paths[key]

    def _import(self, key: Key) -> State:
        """Import a module and the packages around it."""
        for depth in range(1, len(key) + 1):
            if key[:depth] not in self.modules:
                self._run(key[:depth])
        return self.modules[key]

    def _run(self, key: Key) -> None:
        """Reach what a module does when it is imported."""
        path = self.path(key)
        source = "" if path.is_dir() else path.read_text(encoding="utf-8")
        module = parse(source, str(path))
        state = self.modules[key] = State(module)
        for each in module.imports:
            self._run_import(key, each)
        for each in module.unused:
            # Imported for what it does.
            if self._target(key, each) is None and self._count_library(each):
                state.imports.add(each)
        if module.hooks_subclasses and not self._has_subclass_hooks:
            self._has_subclass_hooks = True
            for other in self.modules:
                self._reach_always(other)
        self._reach_always(key)

    def _reach_always(self, key: Key) -> None:
        for number, statement in enumerate(self.modules[key].module.statements):
            if not statement.is_main and (
                statement.always
                or (statement.derived and self._has_subclass_hooks)
                or any(self._has_effect(key, *use) for use in statement.calls)
            ):
                self._reach(key, number)

    def _has_effect(self, key: Key, name: str, attributes: tuple[str, ...]) -> bool:
        """Return whether a call may do more than return a value."""
        binding = self.modules[key].module.bindings.get(name)
        if binding is None:
            return name in IMPURE_BUILTINS
        for each in binding.imports:
            if self._target(key, each) is None and each.module.split(".")[0] not in PURE_LIBRARIES:
                return True
        seen: set[tuple[Key, int]] = set()
        pending = self._definitions(key, name, attributes)
        while pending:
            module, number = found = pending.pop()
            if found in seen:
                continue
            seen.add(found)
            statement = self.modules[module].module.statements[number]
            if statement.effects or not (
                # A method may change the value that it belongs to.
                statement.is_definition or PURE_METHODS.issuperset(attributes)
            ):
                return True
            for use in statement.uses:
                pending += self._definitions(module, *use)
        return False

    def _run_import(self, key: Key, each: Import) -> None:
        """Import the modules of an import statement."""
        target = self._target(key, each)
        if target is None:
            return
        self._import(target)
        if each.attribute == "*":
            self.count_whole(target)
        elif each.attribute is not None and self._find((*target, each.attribute)):
            self._import((*target, each.attribute))

    def _target(self, key: Key, each: Import) -> Key | None:
        """Return the module that an import statement names, or None if it is not ours."""
        names = tuple(filter(None, each.module.split(".")))
        if each.level:
            is_package = self.path(key).name == "__init__.py"
            package = key if is_package else key[:-1]
            return (*package[: len(package) - each.level + 1], *names) or None
        if key[0] == REWARDS and self._is_reward_module(key, names[0]):
            return (REWARDS, *names)
        return names if self._find(names[:1]) else None

    def _is_reward_module(self, key: Key, name: str) -> bool:
        """Return whether an import in a module of rewards/ finds a module in rewards/.

        The precedence is that of snakechat.algorithms.reward_functions.
        """
        is_file = self._find((REWARDS, name)) == self.rewards / f"{name}.py"
        return is_file and name != key[-1] and name not in sys.stdlib_module_names

    def _count_library(self, each: Import) -> bool:
        """Count an imported library, unless it is part of Python; return whether it counts."""
        name = each.module.partition(".")[0]
        if name and not each.level and name not in sys.stdlib_module_names:
            self.libraries.add(name)
            return True
        return name == "__future__"

    def _reach(self, key: Key, number: int) -> None:
        state = self.modules[key]
        if number not in state.reached and key not in WITHOUT_EFFECT:
            state.reached.add(number)
            self._pending.append((key, state.module.statements[number]))

    def _follow(self, key: Key, statement: Statement) -> None:
        """Reach what a statement uses."""
        self.literals |= statement.literals
        for each in statement.imports:
            self._run_import(key, each)
            if self._target(key, each) is None and key not in WITHOUT_LIBRARIES:
                self._count_library(each)
        for each, attributes in statement.imported:
            self._use_import(key, each, attributes)
        for name, attributes in statement.uses:
            self._use(key, name, attributes)
        if statement.dynamic:
            self.count_whole(key)
        if statement.imports_any:
            self._count_all()

    def _count_all(self) -> None:
        """Reach all of our modules."""
        paths = [path.relative_to(self.scripts) for path in self.scripts.rglob("*.py")]
        keys = [path.with_suffix("").parts for path in paths if path.name != "__init__.py"]
        if any(key[0] == REWARDS for key in self.modules):
            keys += [(REWARDS, path.stem) for path in self.rewards.glob("*.py")]
        for key in keys:
            self.count_whole(key)

    def _use(self, key: Key, name: str, attributes: tuple[str, ...]) -> None:
        """Reach what binds a global name of a module."""
        state = self.modules[key]
        binding = state.module.bindings.get(name)
        if binding is None or (key, name, attributes) in self._used:
            return
        self._used.add((key, name, attributes))
        for number in binding.statements:
            self._reach(key, number)
        for each in binding.imports if key not in WITHOUT_EFFECT else ():
            state.imports.add(each)
            self._use_import(key, each, attributes)

    def _use_import(self, key: Key, each: Import, attributes: tuple[str, ...]) -> None:
        """Reach what an import statement binds, or attributes of it."""
        target = self._target(key, each)
        if target is None:
            if key not in WITHOUT_LIBRARIES:
                self._count_library(each)
        elif each.attribute is None:
            top = target[:2] if target[0] == REWARDS else target[:1]
            self._use_module(target if each.renamed else top, attributes)
        elif each.attribute != "*":
            self._use_attribute(target, each.attribute, attributes)

    def _use_module(self, key: Key, attributes: tuple[str, ...]) -> None:
        if attributes:
            self._use_attribute(key, attributes[0], attributes[1:])
            return
        # The module is a value, from which any name may be read.
        self.count_whole(key)
        folder = self._without_suffix(key)
        for path in folder.rglob("*.py") if folder.is_dir() else ():
            if path.name != "__init__.py":
                self.count_whole((*key, *path.relative_to(folder).with_suffix("").parts))

    def _use_attribute(self, key: Key, name: str, attributes: tuple[str, ...]) -> None:
        """Reach an attribute of a module, or attributes of it."""
        state, submodule = self._import(key), (*key, name)
        is_bound = name in state.module.bindings
        if is_bound:
            self._use(key, name, attributes)
        if self._find(submodule):
            self._import(submodule)
            self._use_module(submodule, attributes)
        elif not is_bound and name not in MODULE_ATTRIBUTES:
            self.count_whole(key)

    def _definitions(
        self, key: Key, name: str, attributes: tuple[str, ...]
    ) -> list[tuple[Key, int]]:
        """Return the statements that bind a name or an attribute of an imported module."""
        binding = self.modules[key].module.bindings.get(name)
        if binding is None:
            return []
        found = [(key, number) for number in binding.statements]
        for each in binding.imports:
            target = self._target(key, each)
            path = (*filter(None, [each.attribute]), *attributes)
            while target and path and (*target, path[0]) in self.modules:
                target, path = (*target, path[0]), path[1:]
            if target in self.modules and path and (target, path[0]) != (key, name):
                found += self._definitions(target, path[0], path[1:])
        return found
