"""Reward 1 for a response that is JSON of a schema, 0 for any other.

The response is the JSON alone, or has it in a block that starts with ```json. `schema` is a JSON
Schema for all responses (an argument), or one for each (a column: an object, or its JSON as text).
Rows without a schema give 0.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from referencing import Registry

from snakechat.data.cells import parse_json
from snakechat.evaluation.sandbox import is_verified

BLOCK = re.compile(r"```json\s*\n(.*?)```", re.DOTALL)


def score(
    prompts: Sequence[str],
    responses: Sequence[str],
    schema: Mapping[str, Any] | Sequence[Mapping[str, Any] | str | None],
) -> list[float]:
    """Return one score for each response."""
    schemas = [schema] * len(responses) if isinstance(schema, Mapping) else schema
    return [
        float(each is not None and is_valid(response, each))
        for response, each in zip(responses, schemas, strict=True)
    ]


def is_valid(response: str, schema: Mapping[str, Any] | str) -> bool:
    """Return whether a response is JSON of a schema. Raises an error if the schema is not valid."""
    schema = parse_json(schema) if isinstance(schema, str) else schema
    draft = validator_for(schema, default=Draft202012Validator)
    draft.check_schema(schema)
    # Without a registry, a schema could name one on the network.
    validator = draft(schema, registry=Registry())

    def has_schema(response: str) -> bool:
        blocks = BLOCK.findall(response)
        try:
            value = parse_json(blocks[-1] if blocks else response)
            # NaN and infinity are not JSON.
            json.dumps(value, allow_nan=False)
        except ValueError:
            return False
        return validator.is_valid(value)

    return is_verified(has_schema, response)
