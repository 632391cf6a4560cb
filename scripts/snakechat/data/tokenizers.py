"""Tokenizers: loading, checks, and the template that a model is trained on."""

import json
import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import Environment, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from snakechat.data.chat_templates import (
    DAY,
    MAX_MEMORY,
    end_of_turn,
    limited_steps,
    limited_time,
    set_pad_token,
    syntax_problem,
    text_backend,
)
from snakechat.data.dialogues import chat_template
from snakechat.data.model_files import load_pretrained
from snakechat.workflow.errors import InputError
from snakechat.workflow.processes import limited_memory

# The parts of a tokenizer of the tokenizers library, apart from its added tokens.
PARTS = ("normalizer", "pre_tokenizer", "model", "post_processor", "decoder")
# A call of the function that formats the current day, with a format that is a text.
DAY_CALL = re.compile(rf"\b{DAY}\s*\(\s*(['\"])((?:(?!\1).)*)\1\s*\)")
# CPU time (s) of all threads that loading tokenizer.json may take, usually less than 10 s: its
# regular expressions search the added tokens.
MAX_SECONDS = 60.0


def load_tokenizer(
    folder: str | Path,
    template_arguments: Mapping[str, float | str | bool] = MappingProxyType({}),
    is_result: bool = False,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder, with a pad token that does not end a turn.

    Args:
        template_arguments: As for set_template_defaults.
        is_result: Whether this function loaded the tokenizer that was saved there, so that the
            files name all special tokens. Then it needs no class of its own: transformers imports
            torch to find one.

    Raises:
        InputError: The tokenizer has no eos token, or tokenizer.json a regular expression that
            takes too many steps on an added token.
    """
    path = Path(folder, "tokenizer.json")
    has_file = path.is_file()
    # Without this file, transformers may convert another one for minutes.
    with limited_time(MAX_SECONDS if has_file else 0), limited_steps(str(folder)):
        tokenizer = _from_file(path) if is_result and has_file else _from_class(path)
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"{folder}: the tokenizer has no eos token, which ends a response:"
            " set eos_token in tokenizer_config.json"
        )
    # The chat template is rendered.
    with limited_memory(MAX_MEMORY):
        set_template_defaults(tokenizer, template_arguments)
        end = tokenizer.added_tokens_decoder.get(end_of_turn(tokenizer)[1])
        if end is not None and not end.special:
            # As decoding and sampling expect it to be. It matches the same texts as before.
            end.special = True
            tokenizer.add_tokens([end], special_tokens=True)
        set_pad_token(tokenizer)
    # BPE's dropout gives a text other ids each time.
    if tokenizer.is_fast and getattr(tokenizer.backend_tokenizer.model, "dropout", None):
        tokenizer.backend_tokenizer.model.dropout = None
    # Decoding returns the text of the ids. transformers warns of true, which Llama 3's files have.
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def _from_class(path: Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer by its class; it agrees with its tokenizer.json, if there is one.

    Some classes of transformers take the vocabulary alone from the file: they drop or replace the
    other parts, and change or add tokens. Without a class of its own, a saved tokenizer keeps them.
    """
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = load_pretrained(AutoTokenizer, path.parent)
    if not path.is_file() or _is_equal(tokenizer.backend_tokenizer, Tokenizer.from_file(str(path))):
        return tokenizer
    generic = _from_file(path)
    # Names that the class alone has.
    vocabulary = generic.get_vocab()
    for name, text in tokenizer.special_tokens_map.items():
        if getattr(generic, name) is None and text in vocabulary:
            setattr(generic, name, text)
    return generic


def _from_file(path: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of tokenizer.json, with the names of tokenizer_config.json."""
    own = Tokenizer.from_file(str(path))
    generic: PreTrainedTokenizerFast = load_pretrained(PreTrainedTokenizerFast, path.parent)
    backend: Tokenizer = generic.backend_tokenizer
    for part in PARTS:
        setattr(backend, part, getattr(own, part))
    loaded, tokens = backend.get_added_tokens_decoder(), own.get_added_tokens_decoder()
    for token_id, token in tokens.items():
        # tokenizer_config.json may name a token that is text in tokenizer.json.
        token.special = token.special or loaded[token_id].special
    # At once: each call normalizes all of them.
    backend.add_tokens(list(tokens.values()))
    return generic


def _is_equal(first: Tokenizer, second: Tokenizer) -> bool:
    """Return whether two tokenizers give all texts the same ids, and all ids the same text."""

    def state(tokenizer: Tokenizer) -> list[Any]:
        found = json.loads(tokenizer.to_str())
        # Whether a token is special does not determine which text it matches.
        tokens = [{**token, "special": True} for token in found["added_tokens"]]
        return [tokens, *(found[part] for part in PARTS)]

    # Parsing a large vocabulary takes a second.
    return first.to_str() == second.to_str() or state(first) == state(second)


def load_training_tokenizer(folder: str | Path, template: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model to train, with the chat template that the model is trained on.

    template: As in resolved_template.
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
    The value of strftime_now, a function which formats the current day, is a date that the template
    has in place of its calls: "2026-01-31".

    Raises:
        InputError: The chat template is missing, or does not read a variable.
    """
    if not arguments:
        return
    template = tokenizer.chat_template
    if not isinstance(template, str):
        found = "no chat template" if template is None else "several chat templates"
        raise InputError(
            f"template_arguments: {', '.join(arguments)}: the tokenizer has {found}, expected one:"
            " remove them"
        )
    # transformers adds the statement `generation` to Jinja.
    statements = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)
    try:
        with limited_time(MAX_SECONDS):
            variables = find_undeclared_variables(
                Environment(extensions=["jinja2.ext.loopcontrols"]).parse(statements)
            )
    except TemplateSyntaxError as error:
        raise InputError(f"template_arguments: {syntax_problem(error)}") from None
    if unknown := ", ".join(name for name in arguments if name not in variables):
        raise InputError(
            f"template_arguments: the chat template does not read {unknown}, but"
            f" {', '.join(sorted(variables)) or 'nothing'}: correct the name or remove it"
        )
    if DAY in arguments:
        # Raises ValueError if it is not a date.
        day = date.fromisoformat(str(arguments[DAY]))
        template = DAY_CALL.sub(lambda call: json.dumps(day.strftime(call[2])), template)
    # As Jinja writes a value, JSON does too. The newline leaves the template at the start of a
    # line, where Jinja strips space.
    defaults = (
        f"{{%- if {name} is not defined %}}"
        f"{{%- set {name} = {json.dumps(value, ensure_ascii=False, allow_nan=False)} %}}"
        "{%- endif %}\n"
        for name, value in arguments.items()
        if name != DAY
    )
    tokenizer.chat_template = "".join((*defaults, template))


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
    """Return whether two tokenizers are the same, apart from pad and the chat template."""
    return _is_equal(text_backend(first), text_backend(second)) and all(
        getattr(first, name) == getattr(second, name) for name in ("bos_token_id", "eos_token_id")
    )
