"""Module-level statements of Python files: the names that they bind and use, and their digests.

Standard library only: the workflow imports this module while it plans.
"""

import ast
from collections.abc import Iterator, Set
from functools import cache
from typing import NamedTuple

from snakechat.workflow.scopes import Import, Use, import_of
from snakechat.workflow.syntax import Syntax, is_string

# Decorators that do nothing but change what they decorate. Any other one may register it somewhere.
PURE_DECORATORS = {
    "abc.abstractmethod",
    "classmethod",
    "contextlib.contextmanager",
    "dataclasses.dataclass",
    "functools.cache",
    "functools.cached_property",
    "functools.lru_cache",
    "functools.total_ordering",
    "functools.wraps",
    "property",
    "staticmethod",
    "torch.enable_grad",
    "torch.inference_mode",
    "torch.no_grad",
    "typing.final",
    "typing.overload",
    "typing.runtime_checkable",
}
ACCESSORS = {"setter", "getter", "deleter"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Statement(NamedTuple):
    """A module-level statement other than an import.

    Attributes:
        digest: Digest of its syntax tree, without comments and names of local variables.
        always: Whether it counts as soon as its module is imported. Others count where a name that
            they bind is used.
        is_main: Whether it is `if __name__ == "__main__"`, which does nothing in a module that is
            imported.
        movable: Whether its place in the file has no effect.
        derived: Whether it is a class that another class may take notice of.
        is_definition: Whether it is a function or a class.
        calls: What it calls when the module is imported, other than decorators without effects.
        effects: Whether it may change something other than its own variables when it is called.
        uses: Global names that it uses, with the attributes that it reads from them.
        imports: Imports inside it.
        imported: What it uses of imports inside functions.
        literals: Strings in it.
        dynamic: Whether it can reach any name of its module.
        imports_any: Whether it imports modules whose names are not constants.
    """

    digest: str
    always: bool
    is_main: bool
    movable: bool
    derived: bool
    is_definition: bool
    calls: Set[Use]
    effects: bool
    uses: Set[Use]
    imports: Set[Import]
    imported: Set[tuple[Import, tuple[str, ...]]]
    literals: Set[str]
    dynamic: bool
    imports_any: bool


class Binding(NamedTuple):
    """What binds a global name: statements, by their numbers, and imports."""

    statements: list[int]
    imports: list[Import]

    @property
    def is_once(self) -> bool:
        """Whether no order decides what the name is: `import a.b, a.c` bind the same `a`."""
        modules = [each for each in self.imports if each.attribute is None and not each.renamed]
        return len(self.statements) + len(self.imports) - len(modules) + bool(modules) == 1


class Module(NamedTuple):
    """A Python file.

    Attributes:
        statements: Statements other than imports, in order.
        imports: Imports that run when the file is imported.
        places: The number of statements before an import, where its place has an effect.
        bindings: What binds each global name.
        unused: Imports of names that no statement uses.
        hooks_subclasses: Whether it has a class that may take notice of classes derived from it.
        constants: The expression that is assigned to a name, the last one in the file.
    """

    statements: list[Statement]
    imports: list[Import]
    places: dict[Import, int]
    bindings: dict[str, Binding]
    unused: list[Import]
    hooks_subclasses: bool
    constants: dict[str, ast.expr]


# Most modules are part of several programs.
@cache
def parse(source: str, filename: str) -> Module:
    """Parse the text of a Python file.

    Raises:
        SyntaxError, ValueError: It is not Python.
    """
    tree = ast.parse(source, filename=filename)
    imports: list[Import] = []
    places: dict[Import, int] = {}
    bindings: dict[str, Binding] = {}
    constants: dict[str, ast.expr] = {}
    nodes: list[ast.stmt] = []
    for node in _without_type_checking(tree.body):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports += import_of(node)
            places |= dict.fromkeys(import_of(node), len(nodes))
        elif not is_string(node):
            nodes.append(node)
    origins = {each.bound: _origin(each) for each in imports}
    trees = [Syntax(node) for node in nodes]
    for number, (node, syntax) in enumerate(zip(nodes, trees, strict=True)):
        imports += syntax.global_imports
        places |= dict.fromkeys(syntax.global_imports, number)
        for name in syntax.bound:
            bindings.setdefault(name, Binding([], [])).statements.append(number)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value:
            constants |= dict.fromkeys(syntax.bound, node.value)
    for each in imports:
        bindings.setdefault(each.bound, Binding([], [])).imports.append(each)
    used = {name for syntax in trees for name, _ in syntax.uses}
    once = {name for name, binding in bindings.items() if binding.is_once}
    return Module(
        statements=[_statement(*pair, origins, once) for pair in zip(nodes, trees, strict=True)],
        imports=imports,
        places={each: place for each, place in places.items() if place or each.bound not in once},
        bindings=bindings,
        unused=[each for each in imports if each.bound not in used],
        hooks_subclasses=any(syntax.hooks_subclasses for syntax in trees),
        constants=constants,
    )


def _statement(
    node: ast.stmt, syntax: Syntax, origins: dict[str, str], once: set[str]
) -> Statement:
    """Return a statement. once: global names that one statement binds."""
    is_definition = isinstance(node, (*FUNCTIONS, ast.ClassDef))
    is_simple = _is_pure(node, origins) if is_definition else _is_assignment(node)
    return Statement(
        digest=syntax.digest,
        always=not is_simple,
        is_main=_is_main(node),
        movable=isinstance(node, FUNCTIONS) and _is_movable(node) and node.name in once,
        derived=isinstance(node, ast.ClassDef) and bool(node.bases or node.keywords),
        is_definition=is_definition,
        calls={use for use in syntax.calls if _dotted(use, origins) not in PURE_DECORATORS},
        effects=syntax.effects,
        uses=syntax.uses,
        imports=syntax.imports,
        imported=syntax.imported,
        literals=syntax.literals,
        dynamic=syntax.dynamic,
        imports_any=syntax.imports_any,
    )


def _without_type_checking(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield module-level statements except those that only type checkers see."""
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING":
            yield from node.orelse
        else:
            yield node


def _is_main(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.If)
        and not node.orelse
        and ast.unparse(node.test) in ("__name__ == '__main__'", "'__main__' == __name__")
    )


def _is_assignment(node: ast.stmt) -> bool:
    """Return whether a statement does nothing but bind names."""
    if isinstance(node, ast.Assign):
        targets = [
            item
            for target in node.targets
            for item in (target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target])
        ]
        return all(isinstance(target, ast.Name) for target in targets)
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name)
    # The statement `type` of newer versions of Python.
    return type(node).__name__ == "TypeAlias"


def _is_pure(node: ast.stmt, origins: dict[str, str]) -> bool:
    """Return whether a function or class has no effect until it is used: no decorator stores it."""
    if isinstance(node, ast.ClassDef):
        body = all(
            isinstance(item, ast.Pass)
            or (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))
            or _is_assignment(item)
            or (isinstance(item, (*FUNCTIONS, ast.ClassDef)) and _is_pure(item, origins))
            for item in node.body
        )
    else:
        body = True
    decorators = node.decorator_list  # type: ignore[attr-defined]
    return body and all(_is_pure_decorator(decorator, origins) for decorator in decorators)


def _is_pure_decorator(node: ast.expr, origins: dict[str, str]) -> bool:
    root, *rest = ast.unparse(node.func if isinstance(node, ast.Call) else node).split(".")
    is_accessor = len(rest) == 1 and rest[0] in ACCESSORS
    return is_accessor or _dotted((root, tuple(rest)), origins) in PURE_DECORATORS


def _dotted(use: Use, origins: dict[str, str]) -> str:
    """Return the full name of what a name of this module and attributes of it stand for."""
    name, attributes = use
    return ".".join([origins.get(name, name), *attributes])


def _is_movable(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether defining a function runs nothing: its defaults are constants."""
    defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
    return not node.decorator_list and all(isinstance(item, ast.Constant) for item in defaults)


def _origin(each: Import) -> str:
    """Return the dotted name of what an import binds."""
    if each.attribute is not None:
        return f"{each.module}.{each.attribute}"
    return each.module if each.renamed else each.bound
