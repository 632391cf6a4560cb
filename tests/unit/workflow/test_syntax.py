"""Digests of statements, compared with what Python compiles them to."""

import ast
import copy
import dis
import itertools
import random
from types import CodeType

from conftest import ROOT
from snakechat.workflow.syntax import Syntax

DEFINITIONS = [
    node
    for path in sorted((ROOT / "scripts").rglob("*.py"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, (ast.FunctionDef, ast.ClassDef))
]
SAMPLES = 800
# They only prepare the variables of a closure, in the order of their names.
PREPARATIONS = {"MAKE_CELL", "COPY_FREE_VARS", "LOAD_CLOSURE", "EXTENDED_ARG"}


def instructions(node):
    """What Python runs for a definition, with numbers for local variables."""
    numbers = itertools.count()
    node = copy.deepcopy(node)
    for each in ast.walk(node):
        if isinstance(each, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(each):
            each.body[0] = ast.copy_location(ast.Pass(), each.body[0])
    code = compile(ast.fix_missing_locations(ast.Module([node], [])), "", "exec")
    return list(numbered(code, None, numbers))


def numbered(code, outer, numbers):
    """Yield the instructions of code; outer is what a nested function calls for names around it."""
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    definitions = {each.co_name for each in code.co_consts if isinstance(each, CodeType)}
    variables = {}

    def number(name):
        if name in code.co_freevars and outer:
            return outer(name)
        if name in parameters or name in definitions:
            return name
        if name not in variables:
            variables[name] = next(numbers)
        return variables[name]

    for each in dis.get_instructions(code):
        if each.opname in PREPARATIONS:
            continue
        if each.opcode in dis.haslocal or each.opcode in dis.hasfree:
            yield each.opname, number(each.argval)
        elif isinstance(each.argval, CodeType):
            yield from numbered(each.argval, number, numbers)
        else:
            yield each.opname, repr(each.argval)


def renamed(node, generator):
    """A copy of a definition in which one or all uses of a name have another name."""
    node = copy.deepcopy(node)
    # Where super is named, even as a local variable, the compiler adds a variable __class__.
    nodes = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    names = [each for each in nodes if each.id != "super"]
    bound = [each for each in names if isinstance(each.ctx, ast.Store)]
    if not bound:
        return node
    old = generator.choice(generator.choice([names, bound]))
    new = generator.choice([generator.choice(names).id, "new_name"])
    changed = [old] if generator.random() < 0.3 else [each for each in names if each.id == old.id]
    for each in changed:
        each.id = new
    return node


def test_definitions_with_the_same_digest_run_the_same_instructions():
    """Names in real code are exchanged at random, most of the time with another meaning."""
    generator = random.Random(7)
    same = different = 0
    for _ in range(SAMPLES):
        node = generator.choice(DEFINITIONS)
        other = renamed(node, generator)
        if ast.dump(node) == ast.dump(other):
            continue
        if Syntax(node).digest != Syntax(other).digest:
            different += 1
            continue
        try:
            found = instructions(other)
        except SyntaxError:
            continue
        assert found == instructions(node), ast.unparse(other)
        same += 1
    assert same > 100
    assert different > 200


# Every kind of scope. The digest is the same in all versions of Python.
SCOPES = """
@decorate(1.5, b"x", None, -2j)
async def function(first, /, second: "int" = 3, *rest, third=..., **named) -> list[str]:
    global Found
    rest = {key: [(lambda row: row + second)(value) for value in "é"] for key in named if key}
    class Local(Base, metaclass=Meta):
        rest = rest
        def method(self):
            nonlocal rest
            rest = f"{self.rest!r:>{first}} {rest=}"
    try:
        import os.path, numpy as np
        from . import module as other
        async with other.open(np) as (file, *files), os.path:
            del file
    except (ValueError, Found) as error:
        raise error from None
    match rest:
        case {"a": 1, **more} | [Local(rest=more), *_] if (count := len(more)) > 1:
            return await count
    return [x async for x in files], Local
"""


def test_the_digest_does_not_depend_on_the_version_of_python():
    expected = "65cdd40ca52aada749364352c7d02233306febd2d6b227e5250f95f385578f2c"
    assert Syntax(ast.parse(SCOPES).body[0]).digest == expected
