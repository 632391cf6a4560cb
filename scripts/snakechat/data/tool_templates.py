"""What a chat template writes of tools, of their calls and of their results.

Templates differ: some leave them out without an error. A word that nothing else has shows what
arrives in the text.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from snakechat.data.chat_templates import render_messages
from snakechat.workflow.errors import InputError

Message = dict[str, Any]

TOOLS, CALLS, RESULTS = "the definitions of tools", "calls of tools", "results of tools"
WORD = "probed_word"
# Mistral's templates require identifiers of nine letters or digits.
IDENTIFIER = "abcdefgh9"
QUESTION: Message = {"role": "user", "content": "Question"}
TOOL: Message = {
    "type": "function",
    "function": {
        "name": WORD,
        "description": "Look",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
RESULT: Message = {"role": "tool", "name": "look", "tool_call_id": IDENTIFIER, "content": WORD}


def unwritten(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: object
) -> str | None:
    """Return what the chat template of a tokenizer would leave out of a dialogue, or None."""
    needed = {
        TOOLS: bool(tools),
        CALLS: any("tool_calls" in message for message in messages),
        RESULTS: any(message["role"] == "tool" for message in messages),
    }
    written = _written(tokenizer)
    return next((what for what in needed if needed[what] and what not in written), None)


@cache
def _written(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return what the chat template of a tokenizer writes."""

    def writes(messages: list[Message], **options: Any) -> bool:
        try:
            return WORD in render_messages(tokenizer, messages, **options)
        except (TemplateError, InputError):
            return False

    written = {
        TOOLS: writes([QUESTION], tools=[TOOL]),
        CALLS: writes([QUESTION, _call(WORD, {})])
        and writes([QUESTION, _call("look", {"a": WORD})]),
        RESULTS: writes([QUESTION, _call("look", {}), RESULT]),
    }
    return {what for what, is_written in written.items() if is_written}


def _call(name: str, arguments: Message) -> Message:
    """Return a message that calls a tool."""
    function = {"name": name, "arguments": arguments}
    call = {"id": IDENTIFIER, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
