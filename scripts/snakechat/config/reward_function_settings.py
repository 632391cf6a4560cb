"""Reward functions of a recipe: their weights and arguments, and what their programs take.

Standard library only: programs are parsed, not run.
"""

import ast
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from snakechat.workflow.code_digests import reward_function_files

# What every function receives by keyword besides the columns that datasets keep.
MESSAGES = "messages"
# Names of the first two parameters of score, which no column can have.
POSITIONAL = ("prompts", "responses")


class Parameters(NamedTuple):
    """What score takes by keyword.

    Attributes:
        required: Parameters without a default, after prompts and responses.
        optional: Parameters with a default.
        takes_any: Whether it has a parameter such as **columns.
    """

    required: frozenset[str]
    optional: frozenset[str]
    takes_any: bool

    def takes(self, name: str) -> bool:
        """Return whether score takes a column or an argument."""
        return self.takes_any or name in self.required | self.optional


def weighted_functions(setting: Mapping[str, Any]) -> dict[str, tuple[float, dict[str, Any]]]:
    """Return {NAME: (weight, arguments)} of the key `reward_functions`."""
    return {
        name: (entry["weight"], entry.get("arguments", {}))
        if isinstance(entry, dict)
        else (entry, {})
        for name, entry in setting.items()
    }


def reward_function_problem(
    sources: Path, name: str, arguments: Collection[str], columns: Collection[str]
) -> str | None:
    """Return what is wrong with rewards/NAME.py as far as parsing shows; None if it is valid.

    Args:
        arguments: Names of the arguments that the recipe has.
        columns: Columns that the recipe's datasets keep.
    """
    problem = _program_problem(sources, name)
    parameters = None if problem else _parameters(sources / f"rewards/{name}.py")
    if parameters is None:
        return problem
    unknown = [argument for argument in arguments if not parameters.takes(argument)]
    if unknown:
        known = ", ".join(sorted(parameters.required | parameters.optional)) or "none"
        return f"rewards/{name}.py takes no argument {unknown[0]} (available: {known})"
    missing = sorted(parameters.required - {MESSAGES, *arguments, *columns})
    if missing:
        return (
            f"rewards/{name}.py requires {missing[0]}: name this column in `keep` of the recipe's"
            " datasets, or set it in `arguments`"
        )
    return None


@cache
def _program_problem(sources: Path, name: str) -> str | None:
    """Return why rewards/NAME.py cannot be run; None if it is valid as far as parsing shows."""
    available = sorted(path.stem for path in (sources / "rewards").glob("*.py"))
    if name not in available:
        return f"rewards/{name}.py does not exist (available: {', '.join(available) or 'none'})"
    try:
        reward_function_files(sources / "scripts", [name])
    except (SyntaxError, ValueError) as error:
        return f"rewards/{name}.py is not valid Python ({error})"
    except FileNotFoundError as error:
        return f"rewards/{name}.py imports a module that does not exist ({error.filename})"
    return None


def _parameters(path: Path) -> Parameters | None:
    """Return the parameters of the function score of a program; None if it defines none."""
    functions = [
        node
        for node in ast.parse(path.read_bytes()).body
        if isinstance(node, ast.FunctionDef) and node.name == "score"
    ]
    if not functions:
        return None
    given = functions[-1].args
    positional = [*given.posonlyargs, *given.args]
    without_default = len(positional) - len(given.defaults)
    required = [parameter.arg for parameter in positional[2:without_default]]
    optional = [parameter.arg for parameter in positional[max(2, without_default) :]]
    for parameter, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        (optional if default else required).append(parameter.arg)
    return Parameters(frozenset(required), frozenset(optional), given.kwarg is not None)
