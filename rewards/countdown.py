"""Reward 1 for a response that makes `target` from `numbers` as in Countdown, 0 for any other.

The response is an arithmetic expression with +, -, *, / and parentheses, which uses each of the
numbers exactly once. What follows an equals sign does not count. Rows without a target give 0.
"""

import ast
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from snakechat.evaluation.verification import is_verified

OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def score(
    prompts: Sequence[str],
    responses: Sequence[str],
    numbers: Sequence[Sequence[int]],
    target: Sequence[int | None],
) -> list[float]:
    """Return one score for each response."""
    return [
        float(goal is not None and makes(response, given, int(goal)))
        for response, given, goal in zip(responses, numbers, target, strict=True)
    ]


def makes(response: str, numbers: Sequence[int], target: int) -> bool:
    """Return whether a response is an expression of all the numbers that equals the target."""

    def equals_target(response: str) -> bool:
        text = response.partition("=")[0].strip()
        if sorted(map(int, re.findall(r"\d+", text))) != sorted(map(int, numbers)):
            return False
        try:
            return value(ast.parse(text, mode="eval").body) == target
        except (SyntaxError, ValueError, ZeroDivisionError):
            return False

    return is_verified(equals_target, response)


def value(expression: ast.expr) -> Fraction:
    """Return the exact value of an expression of integers.

    Raises:
        ValueError: It has other parts, such as names or other operators.
        ZeroDivisionError: It divides by 0.
    """
    match expression:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value(left), value(right))
        case ast.Constant(value=number) if type(number) is int:
            return Fraction(number)
    raise ValueError("not an arithmetic expression of integers")
