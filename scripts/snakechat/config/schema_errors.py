"""Errors of the schema as one line: which key is invalid, why, and what was probably meant."""

from collections.abc import Iterable
from typing import Any

from jsonschema.exceptions import relevance

from snakechat.config.hints import key_hint
from snakechat.workflow.value_types import NAME_PATTERN

# jsonschema's ValidationError, whose attributes may be unset as far as its types say.
Error = Any

NUMBERS = {"integer", "number"}


def describe(errors: Iterable[Error]) -> tuple[list[str | int], str] | None:
    """Return the path of the most relevant error and a message for it; None without errors.

    Where a value may have several forms, the error is that of the form which it resembles most.
    """
    error = max(errors, key=relevance, default=None)
    form = ""
    while error is not None and error.validator in ("oneOf", "anyOf"):
        alternatives = _matching_alternatives(error)
        if len(alternatives) != 1:
            return list(error.absolute_path), _any_of(error)
        (index,) = alternatives
        title = error.validator_value[index].get("title")
        form = f" (in {title})" if title else form
        error = max(alternatives[index], key=relevance)
    if error is None:
        return None
    return list(error.absolute_path), f"{error.message}{_hint(error)}{form}"


def _matching_alternatives(error: Error) -> dict[int, list[Error]]:
    """Return the errors of the alternatives that a value resembles most, by number.

    Those of another type do not count. Of mappings, those count that know most of the keys.
    """
    by_number: dict[int, list[Error]] = {}
    for sub_error in error.context or ():
        by_number.setdefault(int(sub_error.schema_path[0]), []).append(sub_error)
    matching = {
        number: sub_errors
        for number, sub_errors in by_number.items()
        if not any(each.validator == "type" and not each.path for each in sub_errors)
    }
    if isinstance(error.instance, dict):
        known = {
            number: len(error.validator_value[number].get("properties", {}).keys() & error.instance)
            for number in matching
        }
        most = max(known.values(), default=0)
        matching = {number: matching[number] for number in matching if known[number] == most}
    return matching


def _any_of(error: Error) -> str:
    """Return the message for a value that resembles no alternative more than the others."""
    forms = error.validator_value
    names = [form.get("title") or form.get("type") for form in forms]
    if all(form.keys() == {"required"} for form in forms):
        names = [" and ".join(form["required"]) for form in forms]
    if None in names:
        return str(error.message)
    expected = "one of: " + "; ".join(names) if len(names) > 2 else " or ".join(names)
    known = {key: of for form in forms for key, of in form.get("properties", {}).items()}
    keys = error.instance if isinstance(error.instance, dict) and known else {}
    unknown = next((key for key in keys if key not in known), None)
    hint = "" if unknown is None else key_hint(str(unknown), known)
    return f"{error.instance!r} is not valid: expected {expected}{hint}"


def _hint(error: Error) -> str:
    """Return a hint in parentheses, or an empty text."""
    if error.validator == "additionalProperties":
        allowed = error.schema.get("properties", {})
        unknown = [name for name in error.instance if name not in allowed]
        return key_hint(str(unknown[0]), allowed)
    if error.validator == "pattern" and error.validator_value == NAME_PATTERN:
        return " (a name has letters A to Z and a to z, digits, '_', '.' and '-')"
    if error.validator != "type":
        return ""
    types = error.validator_value
    types = {types} if isinstance(types, str) else {*types}
    if types == {"object"}:
        return " (expected keys with values: {KEY: VALUE})"
    if isinstance(error.instance, str):
        if types == {"array"}:
            return f" (expected a list: [{error.instance}])"
        return _number_hint(error.instance, NUMBERS & types)
    if isinstance(error.instance, int | float) and "string" in types:
        return " (YAML reads it as a number or a boolean: quote it)"
    return ""


def _number_hint(text: str, types: set[str]) -> str:
    """Return how to write a number that YAML reads as text, where one of these types is expected.

    YAML 1.1 wants a decimal point and a sign of the exponent.
    """
    try:
        value = float(text)
    except ValueError:
        return ""
    mantissa, e, exponent = text.lower().partition("e")
    if not types or not e:
        return ""
    if types == {"integer"}:
        return f" (YAML reads {text} as text: write {value:.0f})" if value.is_integer() else ""
    mantissa += "" if "." in mantissa else ".0"
    sign = "" if exponent[:1] in "+-" else "+"
    return f" (YAML reads {text} as text: write {mantissa}e{sign}{exponent})"
