"""Reward models: how they read responses, and their scores.

A reward model that encodes conversations as the actor does reads the actor's token ids. Any other
one reads their text, in the form that it was trained on. Special tokens that occur in the text are
text.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from snakechat.config.references import weighted_references
from snakechat.data.dialogues import Turn, render_response, response_content
from snakechat.data.encoder import Encoder, accepted
from snakechat.data.ragged_arrays import Ragged, read_statistics
from snakechat.data.records import PromptTexts
from snakechat.data.tokenizers import is_same_tokenizer, load_tokenizer, resolved_template
from snakechat.modeling.batching import NUM_PROMPTS, Examples, prompt_examples
from snakechat.modeling.forward import Scorer
from snakechat.modeling.models import max_positions
from snakechat.training.engine import FrozenModel
from snakechat.training.placed_models import load_frozen
from snakechat.workflow.job import Job

# A conversation whose encoding shows whether two models read responses alike.
SAMPLE_PROMPT, SAMPLE_RESPONSE = [("user", "Name two fruits.")], " Apples, pears."

# Returns the token ids of each conversation, given the turns of prompts and the texts of responses.
# A space in front of a response separates it from a marker; it is not part of a message.
ConversationEncoder = Callable[[Sequence[list[Turn]], Sequence[str]], list[list[int]]]


class RewardModel(NamedTuple):
    """A frozen reward model.

    name: The job's input with the model. weight: Of its scores in their sum.
    encoder: Encodes the text of conversations; None if the model reads the actor's token ids.
    shares_tokenizer: Whether it can read the actor's token ids. The critic can then start from it,
        even if its own chat template differs.
    """

    name: str
    module: FrozenModel
    weight: float
    encoder: ConversationEncoder | None
    shares_tokenizer: bool


def turn_encoder(tokenizer: PreTrainedTokenizerBase, template: str) -> ConversationEncoder:
    """Return the encoder of our trainers: prompt, response, end of turn."""
    encoder = Encoder(tokenizer, template)

    def encode(prompts: Sequence[list[Turn]], responses: Sequence[str]) -> list[list[int]]:
        prompts = [_marked(encoder, turns) for turns in prompts]
        texts = [encoder.marked(response_content(text)) for text in responses]
        texts = list(map(render_response, texts))
        rows = list(accepted(encoder.conversations(prompts, texts, sampled=True)))
        return [[*prompt, *response] for prompt, [response] in rows]

    return encode


def chat_encoder(tokenizer: PreTrainedTokenizerBase) -> ConversationEncoder:
    """Return the encoder by the chat template of a classifier, with the response as last turn.

    Raises:
        InputError: The tokenizer has no chat template.
    """
    encoder = Encoder(tokenizer, "chat", generates=False)

    def encode(prompts: Sequence[list[Turn]], responses: Sequence[str]) -> list[list[int]]:
        return [
            encoder.rendered(_marked(encoder, [*turns, ("assistant", response_content(text))]))
            for turns, text in zip(prompts, responses, strict=True)
        ]

    return encode


def _marked(encoder: Encoder, turns: Sequence[Turn]) -> list[Turn]:
    """Return turns in which marks surround special tokens."""
    return [(role, encoder.marked(text)) for role, text in turns]


def choose_encoder(
    tokenizer: PreTrainedTokenizerBase,
    is_foreign: bool,
    template: str,
    actor_tokenizer: PreTrainedTokenizerBase,
    actor_template: str,
) -> tuple[ConversationEncoder | None, bool]:
    """Return the encoder and shares_tokenizer of a reward model that scores an actor.

    Args:
        is_foreign: Whether the model was trained elsewhere, by its own chat template.
        template: Its prompt template.

    Raises:
        InputError: A tokenizer has no chat template, although its template is "chat".
    """
    if is_foreign and resolved_template(tokenizer, template) == "chat":
        encode = chat_encoder(tokenizer)
    else:
        encode = turn_encoder(tokenizer, template)
    sample = [SAMPLE_PROMPT], [SAMPLE_RESPONSE]
    shared = is_same_tokenizer(actor_tokenizer, tokenizer)
    reads_ids = shared and turn_encoder(actor_tokenizer, actor_template)(*sample) == encode(*sample)
    return None if reads_ids else encode, shared


def conversation_examples(
    scorer: Scorer,
    encoder: ConversationEncoder,
    prompts: Sequence[list[Turn]],
    responses: Sequence[str],
) -> Examples:
    """Return each prompt with the response at the same place as a reward model reads them.

    A conversation that exceeds the positions of the model is truncated at its start.
    """
    positions = max_positions(scorer.model) or 0
    return sequence_examples([ids[-positions:] for ids in encoder(prompts, responses)])


def sequence_examples(sequences: Sequence[list[int]]) -> Examples:
    """Return encoded conversations as prompts whose response is the last token, which is scored."""
    return Examples([ids[:-1] for ids in sequences], [ids[-1:] for ids in sequences])


def load_reward(
    job: Job[Any],
    key: str,
    actor: str,
    dtype: str,
    split: str,
    offload: bool | None = None,
    longest: int = 0,
) -> RewardModel:
    """Load a reward model.

    Args:
        key: The job's input with the model: `reward` or `judge`, or one of several (input_names).
        actor: The job's input with the model whose responses are scored.
        split: The split of the prompts.
        offload: As for load_frozen.
        longest: Tokens of the longest sequence of the actor; conversations in text are truncated.

    Raises:
        InputError: As choose_encoder and load_frozen do.
    """
    settings, folder = job.settings, job.inputs[key]
    weights = weighted_references(getattr(settings, key.partition(".")[0]))
    is_foreign = job.spec["inputs"][key]["rule"] != "train_reward"
    template, tokens = settings.reward_templates.get(key, "auto"), job.inputs["tokens"]
    actor_template = read_statistics(tokens, split)["template"]
    tokenizer, actor_tokenizer = load_tokenizer(folder), load_tokenizer(job.inputs[actor])
    encoder, shared = choose_encoder(
        tokenizer, is_foreign, template, actor_tokenizer, actor_template
    )
    prompts = Ragged(tokens, f"{split}.prompt")
    if encoder is None:
        generations = settings.num_generations
        examples = prompt_examples(prompts, settings.max_response_length, generations)
    else:
        turns = PromptTexts(tokens, split).turns(range(min(len(prompts), NUM_PROMPTS)))
        examples = sequence_examples(encoder(turns, [SAMPLE_RESPONSE] * len(turns)))
        longest = 0
    module = load_frozen(
        *(Scorer, folder, dtype, tokenizer, job.placement, examples),
        offload=offload,
        longest=longest,
    )
    return RewardModel(key, module, weights[key], encoder, shared)
