"""The syntax tree of one statement: its digest and the names that it binds and uses.

The digest does not change with names of local variables: they become numbers in order of their
first appearance. Parameters keep their names, which callers may use; so do nested functions and
classes, whose names are visible in messages.

Standard library only: the workflow imports this module while it plans.
"""

import ast
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from snakechat.workflow.scopes import Import, Scope, Use, import_of

# Functions that reach global or local names by strings.
DYNAMIC_NAMES = {"globals", "eval", "exec"}
# The same if they are called without arguments.
DYNAMIC_WITHOUT_ARGUMENTS = {"vars", "locals", "dir"}
DYNAMIC_ATTRIBUTES = {"_getframe", "currentframe", "f_locals", "f_globals"}
IMPORT_FUNCTIONS = {"import_module", "__import__"}
# Attributes of all modules, which depend on none of their statements.
MODULE_ATTRIBUTES = {"__doc__", "__file__", "__name__", "__package__", "__path__", "__spec__"}
# Those and functions that run files which are found at run time.
IMPORT_OR_RUN = {*IMPORT_FUNCTIONS, "spec_from_file_location", "run_path", "run_module"}


class Syntax:
    """What the syntax tree of a module-level statement consists of.

    Attributes:
        digest: Digest of the tree.
        bound: Global names that it binds, without imports.
        global_imports: Imports that bind global names.
        uses: Global names that it uses, with the attributes that it reads from them.
        imports: All imports inside it.
        imported: What it uses of imports that bind local names.
        literals: Strings other than docstrings.
        dynamic: Whether it may reach names that it does not spell out.
        imports_any: Whether it imports modules whose names are not constants.
        calls: What it calls when it is run, not inside the functions that it defines: names with
            the attributes that lead to what is called.
        effects: Whether calling it may change something other than its own variables.
        hooks_subclasses: Whether a class in it may take notice of the classes derived from it.
    """

    def __init__(self, node: ast.stmt) -> None:
        self.global_imports: list[Import] = []
        self.uses: set[Use] = set()
        self.imports: set[Import] = set()
        self.imported: set[tuple[Import, tuple[str, ...]]] = set()
        self.literals: set[str] = set()
        self.dynamic = False
        self.imports_any = False
        self.calls: set[Use] = set()
        self.effects = False
        self.hooks_subclasses = False
        # The tree as a list of words. A name stands there with its scope: whose variable it is
        # shows when all names of the scopes around it are known.
        self._words: list[str | tuple[Scope, str]] = []
        self._references: list[tuple[Scope, str, tuple[str, ...]]] = []
        # Nodes with a function that imports what is known, or with sys.modules for its names only.
        self._harmless: set[int] = set()
        module = Scope("module")
        self._visit(node, module)
        self._resolve()
        self.bound = module.bound
        self.digest = hashlib.sha256("\n".join(self._numbered_names()).encode()).hexdigest()
        self._words.clear()

    def _resolve(self) -> None:
        """Sort the names that the statement uses into global ones and local imports."""
        for scope, name, attributes in self._references:
            owner = scope.owner(name)
            if owner is None:
                self.uses.add((name, attributes))
                self.dynamic |= name in DYNAMIC_NAMES
            else:
                self.imported.update((each, attributes) for each in owner.imports.get(name, ()))
        self._references.clear()

    def _numbered_names(self) -> Iterator[str]:
        """Yield the words of the tree, with numbers for the names of local variables."""
        numbers: dict[tuple[Scope, str], int] = {}
        for word in self._words:
            if isinstance(word, str):
                yield word
                continue
            scope, name = word
            owner = None if self.dynamic else scope.owner(name)
            if owner is None or name in owner.kept:
                yield f"name {name}"
            else:
                yield f"local {numbers.setdefault((owner, name), len(numbers))}"

    def _visit(self, node: ast.AST, scope: Scope) -> None:
        visitor = VISITORS.get(type(node))
        if visitor is None:
            self._fields(node, scope, node._fields)
        else:
            visitor(self, node, scope)

    def _fields(self, node: ast.AST, scope: Scope, names: tuple[str, ...]) -> None:
        """Write a node with these fields.

        Empty fields are omitted: newer versions of Python add fields, which are empty for old code.
        """
        self._words.append(type(node).__name__)
        for name in names:
            value = getattr(node, name, None)
            if value is not None and value != [] and not isinstance(value, ast.expr_context):
                self._words.append(f".{name}")
                self._value(value, scope)
        self._words.append(")")

    def _value(self, value: Any, scope: Scope) -> None:
        if isinstance(value, ast.AST):
            self._visit(value, scope)
        elif isinstance(value, list):
            self._words.append("[")
            for item in value:
                self._value(item, scope)
            self._words.append("]")
        else:
            # Which characters repr() escapes depends on the version of Python.
            self._words.append(f"{type(value).__name__} {value!a}")

    def _constant(self, node: ast.Constant, scope: Scope) -> None:
        if isinstance(node.value, str):
            self.literals.add(node.value)
        self._words.append("Constant")
        self._value(node.value, scope)

    def _f_string(self, node: ast.JoinedStr, scope: Scope) -> None:
        # Some versions of Python add empty strings.
        values = [each for each in node.values if getattr(each, "value", None) != ""]
        self._words.append("JoinedStr")
        self._value(values, scope)

    def _name(self, node: ast.Name, scope: Scope) -> None:
        if isinstance(node.ctx, ast.Load):
            self._reference(node, node.id, (), scope)
        else:
            scope.bound.add(node.id)
        self._words.append((scope, node.id))

    def _attribute(self, node: ast.Attribute, scope: Scope) -> None:
        self.effects |= not isinstance(node.ctx, ast.Load)
        attributes, value = [node.attr], node.value
        while isinstance(value, ast.Attribute):
            attributes.append(value.attr)
            value = value.value
        attributes.reverse()
        self._words.append("Attribute")
        if isinstance(value, ast.Name):
            self._reference(node, value.id, tuple(attributes), scope)
            self._words.append((scope, value.id))
        else:
            self._reference(node, "", tuple(attributes), scope)
            if isinstance(value, ast.Subscript) and attributes[0] in MODULE_ATTRIBUTES:
                self._harmless.add(id(value.value))
            self._visit(value, scope)
        self._words += attributes
        self._words.append(")")

    def _reference(
        self, node: ast.expr, name: str, attributes: tuple[str, ...], scope: Scope
    ) -> None:
        """Record the use of a name and its attributes. name: empty for those of other values."""
        if not attributes and name not in IMPORT_OR_RUN:
            self._references.append((scope, name, attributes))
            return
        words = {name, *attributes}
        self.hooks_subclasses |= "__subclasses__" in words
        self.dynamic |= not words.isdisjoint(DYNAMIC_ATTRIBUTES)
        if id(node) not in self._harmless:
            self.imports_any |= not words.isdisjoint(IMPORT_OR_RUN)
            self.imports_any |= (name, *attributes[:1]) == ("sys", "modules")
        if name:
            self._references.append((scope, name, attributes))

    def _call(self, node: ast.Call, scope: Scope) -> None:
        if scope.is_run_at_once():
            self._record_call(node.func, scope)
        name = getattr(node.func, "id", getattr(node.func, "attr", None))
        if name in DYNAMIC_WITHOUT_ARGUMENTS and not node.args and not node.keywords:
            self.dynamic |= isinstance(node.func, ast.Name)
        argument = getattr(node.args[0], "value", None) if len(node.args) == 1 else None
        if name in IMPORT_FUNCTIONS and isinstance(argument, str) and argument[:1] != ".":
            self._harmless.add(id(node.func))
            module = Import(argument, 0, None, "", renamed=True)
            self.imports.add(module)
            self.imported.add((module, ()))
        self._fields(node, scope, node._fields)

    def _record_call(self, function: ast.expr, scope: Scope) -> None:
        attributes: list[str] = []
        while isinstance(function, ast.Attribute):
            attributes.insert(0, function.attr)
            function = function.value
        if isinstance(function, ast.Name) and function.id not in scope.bound:
            self.calls.add((function.id, tuple(attributes)))

    def _compare(self, node: ast.Compare, scope: Scope) -> None:
        self._harmless.update(map(id, node.comparators))
        self._fields(node, scope, node._fields)

    def _loop(self, node: ast.For | ast.AsyncFor, scope: Scope) -> None:
        self._harmless.add(id(node.iter))
        self._fields(node, scope, node._fields)

    def _subscript(self, node: ast.Subscript, scope: Scope) -> None:
        self.effects |= not isinstance(node.ctx, ast.Load)
        self._fields(node, scope, node._fields)

    def _expression(self, node: ast.Expr, scope: Scope) -> None:
        self.effects |= isinstance(node.value, (ast.Call, ast.Await))
        self._fields(node, scope, node._fields)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> None:
        self._definition(node.name, scope)
        self.hooks_subclasses |= node.name == "__init_subclass__"
        outer = self._type_parameters(node, scope)
        inner = Scope("function", outer)
        self._fields(node, scope, ("decorator_list",))
        self._parameters(node.args, outer, inner)
        self._annotation(node.returns, outer)
        self._body(node.body, inner)

    def _lambda(self, node: ast.Lambda, scope: Scope) -> None:
        inner = Scope("function", scope)
        self._words.append("Lambda")
        self._parameters(node.args, scope, inner)
        self._visit(node.body, inner)

    def _class(self, node: ast.ClassDef, scope: Scope) -> None:
        self._definition(node.name, scope)
        self.hooks_subclasses |= any(keyword.arg == "metaclass" for keyword in node.keywords)
        outer = self._type_parameters(node, scope)
        self._fields(node, outer, ("decorator_list", "bases", "keywords"))
        self._body(node.body, Scope("class", outer))

    def _definition(self, name: str, scope: Scope) -> None:
        scope.bound.add(name)
        scope.kept.add(name)
        self._words.append((scope, name))

    def _type_parameters(self, node: ast.AST, scope: Scope) -> Scope:
        """Return the scope of the type parameters of newer versions of Python."""
        parameters = getattr(node, "type_params", [])
        if not parameters:
            return scope
        inner = Scope("function", scope)
        for parameter in parameters:
            self._definition(parameter.name, inner)
            self._visit(parameter, inner)
        return inner

    def _body(self, body: list[ast.stmt], scope: Scope) -> None:
        self._value(body[1:] if is_string(body[0]) else body, scope)

    def _parameters(self, node: ast.arguments, outer: Scope, inner: Scope) -> None:
        kinds: tuple[list[Any], ...] = (
            node.posonlyargs,
            node.args,
            [node.vararg],
            node.kwonlyargs,
            [node.kwarg],
        )
        for number, parameters in enumerate(kinds):
            self._words.append(f"parameters {number}")
            for parameter in filter(None, parameters):
                inner.bound.add(parameter.arg)
                if parameters is node.args or parameters is node.kwonlyargs:
                    inner.kept.add(parameter.arg)
                self._words.append((inner, parameter.arg))
                self._annotation(parameter.annotation, outer)
        self._value(node.defaults, outer)
        self._value(node.kw_defaults, outer)

    def _annotation(self, node: ast.expr | None, scope: Scope) -> None:
        """Write an annotation. A string in it is an expression, too."""
        if node is None:
            self._words.append("unannotated")
            return
        self._visit(node, scope)
        for item in ast.walk(node):
            if isinstance(item, ast.Constant) and isinstance(item.value, str):
                try:
                    self._visit(ast.parse(item.value, mode="eval").body, scope)
                except (SyntaxError, ValueError):
                    continue

    def _annotated_assignment(self, node: ast.AnnAssign, scope: Scope) -> None:
        self._fields(node, scope, ("target", "value", "simple"))
        self._annotation(node.annotation, scope)

    def _comprehension(self, node: Any, scope: Scope) -> None:
        inner = Scope("comprehension", scope)
        self._words.append(type(node).__name__)
        for number, generator in enumerate(node.generators):
            self._harmless.add(id(generator.iter))
            self._visit(generator.target, inner)
            self._visit(generator.iter, inner if number else scope)
            self._value([generator.ifs, generator.is_async], inner)
        for name in ("elt", "key", "value"):
            if hasattr(node, name):
                self._visit(getattr(node, name), inner)

    def _walrus(self, node: ast.NamedExpr, scope: Scope) -> None:
        target = scope
        while target.kind == "comprehension" and target.parent:
            target = target.parent
        target.bound.add(node.target.id)
        self._words += ["NamedExpr", (scope, node.target.id)]
        self._visit(node.value, scope)

    def _binder(self, node: Any, scope: Scope) -> None:
        """Write a node with a field that binds a name: `except ... as name`, patterns."""
        field = "rest" if isinstance(node, ast.MatchMapping) else "name"
        name = getattr(node, field)
        if name is not None:
            scope.bound.add(name)
            self._words.append((scope, name))
        self._fields(node, scope, tuple(each for each in node._fields if each != field))

    def _declaration(self, node: ast.Global | ast.Nonlocal, scope: Scope) -> None:
        is_global = isinstance(node, ast.Global)
        self.effects = True
        (scope.declared_global if is_global else scope.declared_nonlocal).update(node.names)
        self._words.append(type(node).__name__)
        for name in node.names:
            if is_global:
                self._references.append((scope, name, ()))
            self._words.append((scope, name))
        self._words.append(")")

    def _import(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        self._words.append("Import")
        for each in import_of(node):
            self.imports.add(each)
            if scope.kind == "module" or each.bound in scope.declared_global:
                self.global_imports.append(each)
            else:
                scope.bound.add(each.bound)
                scope.imports.setdefault(each.bound, []).append(each)
            if scope.kind == "class":
                # An attribute of the class, from which anything may be read.
                self.imported.add((each, ()))
            self._value([each.module, each.level, each.attribute, each.renamed], scope)
            self._words.append((scope, each.bound))
        self._words.append(")")


def is_string(node: ast.stmt) -> bool:
    """Return whether a statement is a string, such as a docstring."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


VISITORS: dict[type, Callable[[Syntax, Any, Scope], None]] = {
    ast.AnnAssign: Syntax._annotated_assignment,
    ast.AsyncFor: Syntax._loop,
    ast.AsyncFunctionDef: Syntax._function,
    ast.Attribute: Syntax._attribute,
    ast.Call: Syntax._call,
    ast.ClassDef: Syntax._class,
    ast.Compare: Syntax._compare,
    ast.Constant: Syntax._constant,
    ast.DictComp: Syntax._comprehension,
    ast.ExceptHandler: Syntax._binder,
    ast.Expr: Syntax._expression,
    ast.For: Syntax._loop,
    ast.FunctionDef: Syntax._function,
    ast.GeneratorExp: Syntax._comprehension,
    ast.Global: Syntax._declaration,
    ast.Import: Syntax._import,
    ast.ImportFrom: Syntax._import,
    ast.JoinedStr: Syntax._f_string,
    ast.Lambda: Syntax._lambda,
    ast.ListComp: Syntax._comprehension,
    ast.MatchAs: Syntax._binder,
    ast.MatchMapping: Syntax._binder,
    ast.MatchStar: Syntax._binder,
    ast.Name: Syntax._name,
    ast.NamedExpr: Syntax._walrus,
    ast.Nonlocal: Syntax._declaration,
    ast.SetComp: Syntax._comprehension,
    ast.Subscript: Syntax._subscript,
}
