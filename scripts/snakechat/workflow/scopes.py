"""Import statements and the scopes of names.

They are found here and not by the module symtable, whose results depend on the version of Python: a
plan made by another Python must have the same digests.

Standard library only: the workflow imports this module while it plans.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple


class Import(NamedTuple):
    """One name of an import statement.

    Attributes:
        module: The module as written, without the dots of a relative import.
        level: The number of these dots.
        attribute: What is imported from the module; None for `import module`.
        bound: The name that is bound.
        renamed: Whether it is `import a.b as bound`, which binds a.b and not a.
    """

    module: str
    level: int
    attribute: str | None
    bound: str
    renamed: bool = False


# A global name and the attributes that are read from it: ("np", ("random", "RandomState")).
Use = tuple[str, tuple[str, ...]]


def import_of(node: ast.Import | ast.ImportFrom) -> Iterator[Import]:
    """Yield what an import statement binds."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            bound = alias.asname or alias.name
            yield Import(node.module or "", node.level, alias.name, bound)
        else:
            bound = alias.asname or alias.name.partition(".")[0]
            yield Import(alias.name, 0, None, bound, alias.asname is not None)


class Scope:
    """The names of a module, a function, a class or a comprehension.

    Attributes:
        kept: Bound names that the digest keeps.
        declared_global: Names of `global` statements; declared_nonlocal likewise.
        imports: What import statements bind here.
    """

    def __init__(self, kind: str, parent: "Scope | None" = None) -> None:
        self.kind = kind
        self.parent = parent
        self.bound: set[str] = set()
        self.kept: set[str] = set()
        self.declared_global: set[str] = set()
        self.declared_nonlocal: set[str] = set()
        self.imports: dict[str, list[Import]] = {}

    def is_run_at_once(self) -> bool:
        """Return whether the code of this scope runs when the module is imported."""
        scope: Scope | None = self
        while scope is not None and scope.kind != "function":
            scope = scope.parent
        return scope is None

    def owner(self, name: str) -> "Scope | None":
        """Return the scope whose local variable a name is; None for names of modules and classes.

        A name that a class binds may also be read from the module: it counts as the module's.
        """
        scope: Scope | None = self
        while scope is not None and scope.kind != "module":
            if name in scope.declared_global:
                return None
            if name in scope.bound and name not in scope.declared_nonlocal:
                if scope.kind != "class":
                    return scope
                # Functions inside a class do not see its names.
                if scope is self:
                    return None
            scope = scope.parent
        return None
