"""Tokenizers: loading, checks, and the template that a model is trained on."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment
from jinja2.meta import find_undeclared_variables
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from snakechat.data.dialogues import chat_template
from snakechat.data.model_files import load_pretrained
from snakechat.data.special_tokens import mark_end_of_turn, set_pad_token
from snakechat.workflow.errors import InputError


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder, with a pad token that does not end a turn.

    Raises:
        InputError: The tokenizer has no eos token.
    """
    tokenizer = load_pretrained(AutoTokenizer, folder)
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"{folder}: the tokenizer has no eos token, which ends a response:"
            " set eos_token in tokenizer_config.json"
        )
    mark_end_of_turn(tokenizer)
    set_pad_token(tokenizer)
    # Decoding returns the text of the ids. transformers warns of true, which Llama 3's files have.
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def load_training_tokenizer(folder: str | Path, template: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model to train, with the chat template that the model is trained on.

    template: As in resolved_template; "dialogue" sets the template of snakechat.data.dialogues,
    "chat" keeps the tokenizer's.
    """
    tokenizer = load_tokenizer(folder)
    if resolved_template(tokenizer, template) == "dialogue":
        tokenizer.chat_template = chat_template(tokenizer)
    return tokenizer


def set_template_defaults(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, float | str | bool]
) -> None:
    """Make values the defaults of the variables of a tokenizer's chat template.

    Everything that renders with the saved tokenizer has them, servers too: no caller passes them.

    Raises:
        InputError: There is no chat template, or it does not read a variable.
    """
    if not arguments:
        return
    names, template = ", ".join(arguments), tokenizer.chat_template
    if not isinstance(template, str):
        found = "no chat template" if template is None else "several chat templates"
        raise InputError(
            f"template_arguments: {names}: the tokenizer has {found}, expected one: remove them"
        )
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    # transformers adds the statement `generation` to those of Jinja.
    statements = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)
    variables = find_undeclared_variables(environment.parse(statements))
    for name in arguments:
        if name not in variables:
            raise InputError(
                f"template_arguments: the chat template does not read {name}, but"
                f" {', '.join(sorted(variables))}: correct the name or remove it"
            )
    # The newline leaves the template at the start of a line, where Jinja strips white space. JSON
    # writes these values as Jinja does.
    tokenizer.chat_template = (
        "".join(
            f"{{%- if {name} is not defined %}}"
            f"{{%- set {name} = {json.dumps(value, ensure_ascii=False, allow_nan=False)} %}}"
            "{%- endif %}\n"
            for name, value in arguments.items()
        )
        + template
    )


def resolved_template(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    """Return the prompt template of a model: dialogue or chat.

    template: "auto" is "chat" if the tokenizer has a chat template. A model that was trained with
    "dialogue" has a chat template that renders this format: it remains "dialogue".
    """
    if template != "auto":
        return template
    has_own = tokenizer.chat_template and tokenizer.chat_template != chat_template(tokenizer)
    return "chat" if has_own else "dialogue"


def is_same_tokenizer(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> bool:
    """Return whether two tokenizers give the same meaning to every token id that models read."""
    return first.get_vocab() == second.get_vocab() and all(
        getattr(first, name) == getattr(second, name) for name in ("bos_token_id", "eos_token_id")
    )


def source_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what errors call a tokenizer."""
    return tokenizer.name_or_path or "tokenizer"


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """Raise InputError for a tokenizer that is not a fast one, or lacks the chat template."""
    if not tokenizer.is_fast:
        raise InputError(
            f"{source_of(tokenizer)}: the tokenizer has no tokenizer.json: convert it to a fast one"
        )
    if template == "chat" and not tokenizer.chat_template:
        raise InputError(
            f"{source_of(tokenizer)}: the tokenizer has no chat template, which template: chat"
            " requires: use template: dialogue"
        )
