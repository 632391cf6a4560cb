"""Responses of language models as text: to the prompts of users, and to held-out prompts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from snakechat.algorithms.rollouts import sample_on_all_ranks
from snakechat.data.special_tokens import stop_ids
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy
from snakechat.modeling.generation import HfSampler
from snakechat.modeling.models import check_sequence_length, max_positions
from snakechat.training.engine import FrozenModel
from snakechat.training.metric_logs import write_json_lines

# Held-out prompts that reports show, and tokens of a response to one of them.
PROMPTS, MAX_RESPONSE_LENGTH = 10, 256

# A response as text, and whether it ended: {"text", "ended"}.
Response = dict[str, Any]


def respond(
    policy: FrozenModel[Policy],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    max_response_length: int,
    temperature: float,
) -> list[Response]:
    """Return a response to each prompt. All processes of the job call it together.

    The longest prompt limits all responses.

    Args:
        folder: The folder of the model, which names the tokens that end a response.
        prompts: Token ids of each prompt.
        temperature: 0 is greedy decoding.

    Raises:
        InputError: A prompt leaves no positions for a response.
    """
    ends, longest = stop_ids(tokenizer, folder), max(map(len, prompts))
    check_sequence_length(policy.module.model, longest + 1)
    positions = max_positions(policy.module.model)
    length = min(max_response_length, positions - longest) if positions else max_response_length
    sampler = HfSampler(ends, length, temperature)
    sampler.update(policy.module.model)
    [responses], _ = sample_on_all_ranks(sampler, prompts, policy.sampling)
    return [
        {"text": as_text(tokenizer, ids), "ended": bool(ids) and ids[-1] in ends}
        for ids in responses
    ]


def first_prompts(examples: Examples) -> list[int]:
    """Return the rows of the first different prompts."""
    rows: dict[tuple[int, ...], int] = {}
    for row in range(len(examples)):
        rows.setdefault(tuple(examples.prompts[row]), row)
        if len(rows) == PROMPTS:
            break
    return list(rows.values())


def held_out_responses(
    policy: FrozenModel[Policy],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    examples: Examples,
) -> list[Response]:
    """Return the greedy responses of a model to the first held-out prompts."""
    prompts = [list(map(int, examples.prompts[row])) for row in first_prompts(examples)]
    return respond(policy, tokenizer, folder, prompts, MAX_RESPONSE_LENGTH, 0)


def write_responses(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    examples: Examples,
    responses: Mapping[str, Sequence[Response]],
) -> None:
    """Write the responses of each model to the first held-out prompts as JSON lines.

    The rows' own responses come first, under the model "data".

    responses: By model, as held_out_responses returns them.
    """
    rows = first_prompts(examples)
    texts = {"data": [as_text(tokenizer, examples.responses[0][row]) for row in rows]}
    for model, of_model in responses.items():
        texts[model] = [response["text"] for response in of_model]
    prompts = [as_text(tokenizer, examples.prompts[row]) for row in rows]
    lines = [
        {"model": model, "prompt": prompt, "response": text}
        for model, of_model in texts.items()
        for prompt, text in zip(prompts, of_model, strict=True)
    ]
    write_json_lines(path, lines)


def as_text(tokenizer: PreTrainedTokenizerBase, ids: Any) -> str:
    """Return the text of token ids, without special tokens."""
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text)
