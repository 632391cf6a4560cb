"""The scores that reward models, LLM judges and reward functions give to responses, and their sum.

A reward model that encodes conversations as the actor does reads the actor's token ids. Any other
one reads their text, in the form that it was trained on. Special tokens that occur in the text are
text.

Shapes: B responses, as in snakechat/algorithms/rollouts.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from snakechat.algorithms.llm_judge import LlmJudge
from snakechat.algorithms.reward_functions import WeightedFunctions, function_columns
from snakechat.algorithms.rollouts import Rollouts
from snakechat.config.rlhf import (
    JUDGES,
    RewardReferences,
    judge_names,
    model_names,
    weighted_references,
)
from snakechat.data.dialogues import Turn, render_response, response_content
from snakechat.data.encoder import Encoder, accepted
from snakechat.data.ragged_arrays import Ragged, read_statistics
from snakechat.data.records import PromptTexts
from snakechat.data.tokenizers import is_same_tokenizer, load_tokenizer, resolved_template
from snakechat.modeling.batching import NUM_PROMPTS, Examples, prompt_examples
from snakechat.modeling.forward import Scorer, response_scores
from snakechat.modeling.models import max_positions
from snakechat.training.engine import FrozenModel
from snakechat.training.placed_models import load_frozen
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job
from snakechat.workflow.processes import all_reduce_sum, rank

# --- reward models --------------------------------------------------------------------------------

# A conversation whose encoding shows whether two models read responses alike.
SAMPLE_PROMPT, SAMPLE_RESPONSE = [("user", "Name two fruits.")], " Apples, pears."

# Returns the token ids of each conversation, given the turns of prompts and the texts of responses.
# A space in front of a response separates it from a marker; it is not part of a message.
ConversationEncoder = Callable[[Sequence[list[Turn]], Sequence[str]], list[list[int]]]


class RewardModel(NamedTuple):
    """A frozen reward model.

    name: The job's input with the model. weight: Of its scores in their sum.
    encoder: Encodes the text of conversations; None if the model reads the actor's token ids.
    tokenizer: Of the model. If it is the tokenizer of the actor, the critic can start from the
        model, even if their chat templates differ.
    """

    name: str
    module: FrozenModel[Scorer]
    weight: float
    encoder: ConversationEncoder | None
    tokenizer: PreTrainedTokenizerBase


def conversation_encoder(
    tokenizer: PreTrainedTokenizerBase, template: str, is_foreign: bool = False
) -> ConversationEncoder:
    """Return the encoder of our trainers: prompt, response, end of turn.

    A model that was trained elsewhere reads a chat as its template renders the whole of it.
    """
    is_rendered = is_foreign and resolved_template(tokenizer, template) == "chat"
    encoder = Encoder(tokenizer, template, generates=not is_rendered)

    def encode(prompts: Sequence[list[Turn]], responses: Sequence[str]) -> list[list[int]]:
        # Marks surround special tokens in the text, which are text.
        prompts = [[(role, encoder.marked(text)) for role, text in turns] for turns in prompts]
        texts = [encoder.marked(response_content(text)) for text in responses]
        if is_rendered:
            pairs = zip(prompts, texts, strict=True)
            return [encoder.rendered([*turns, ("assistant", text)]) for turns, text in pairs]
        rows = zip(prompts, ([render_response(text)] for text in texts), strict=True)
        encoded = accepted(encoder.conversations(rows, sampled=True))
        return [[*prompt, *response] for prompt, [response] in encoded]

    return encode


def choose_encoder(
    tokenizer: PreTrainedTokenizerBase,
    is_foreign: bool,
    template: str,
    actor_tokenizer: PreTrainedTokenizerBase,
    actor_template: str,
) -> ConversationEncoder | None:
    """Return the encoder of a reward model; None if it encodes conversations as the actor does."""
    encode = conversation_encoder(tokenizer, template, is_foreign)
    if not is_same_tokenizer(actor_tokenizer, tokenizer):
        return encode
    sample = [SAMPLE_PROMPT], [SAMPLE_RESPONSE]
    of_actor = conversation_encoder(actor_tokenizer, actor_template)(*sample)
    return None if of_actor == encode(*sample) else encode


def sequence_examples(sequences: Sequence[list[int]], positions: int = 0) -> Examples:
    """Return encoded conversations as prompts whose response is the last token, which is scored.

    positions: Maximum number of tokens, or 0. Longer ones are truncated at their start.
    """
    kept = [ids[-positions:] for ids in sequences]
    return Examples([ids[:-1] for ids in kept], [ids[-1:] for ids in kept])


def load_rewards(
    job: Job[Any],
    key: str,
    actor: str,
    dtype: str,
    split: str,
    offload: bool | None = None,
    longest: int = 0,
) -> Iterator[RewardModel]:
    """Load the reward models of a setting, one after the other.

    Args:
        key: The setting: `reward` or `judge`.
        actor: The job's input with the model whose responses to the prompts of a split are scored.
        longest: Tokens of the longest sequence of the actor; conversations in text are truncated.
    """
    settings, tokens = job.settings, job.inputs["tokens"]
    weights = weighted_references(getattr(settings, key))
    for name in model_names(weights):
        tokenizer = load_tokenizer(job.inputs[name])
        encoder = choose_encoder(
            tokenizer,
            job.spec["inputs"][name]["rule"] != "train_reward",
            settings.reward_templates.get(name, "auto"),
            load_tokenizer(job.inputs[actor]),
            read_statistics(tokens, split)["template"],
        )
        prompts = Ragged(tokens, f"{split}.prompt")
        if encoder:
            turns = PromptTexts(tokens, split).turns(range(min(len(prompts), NUM_PROMPTS)))
            examples = sequence_examples(encoder(turns, [SAMPLE_RESPONSE] * len(turns)))
        else:
            sizes = settings.max_response_length, settings.num_generations
            examples = prompt_examples(prompts, *sizes)
        arguments = job.inputs[name], dtype, tokenizer, job.placement, examples
        module = load_frozen(Scorer, *arguments, offload=offload, longest=0 if encoder else longest)
        yield RewardModel(name, module, weights[name], encoder, tokenizer)


# --- sums -----------------------------------------------------------------------------------------


class Scores(NamedTuple):
    """Scores of responses.

    Attributes:
        sum: Weighted sum of all scores [B]; NaN of a response that nothing scores: all reward
            functions returned None, or there are none, which `distill` allows.
        by_source: Scores [B], without weights, of each reward function NAME, of each reward model,
            by the job's input (reward, or reward.1), and of each LLM judge, by llm_judges/NAME.
            The score of a function that returned None is NaN, and the sum omits it.
        unreadable: Number of unreadable replies of each LLM judge, whose responses have the mean of
            the others (fill_missing).
    """

    sum: torch.Tensor
    by_source: dict[str, torch.Tensor]
    unreadable: dict[str, int]

    def metrics(self) -> dict[str, float]:
        """Return mean and standard deviation; of several sources, also of each one.

        `rewards/NAME/unreadable` is the fraction of unreadable replies of an LLM judge, and
        `rewards/NAME/missing` of responses for which a reward function returned None; means leave
        them out.
        """
        metrics = _mean_and_std(self.sum, "objective/scores", "objective/scores_std")
        for name, values in self.by_source.items():
            if len(self.by_source) > 1:
                metrics |= _mean_and_std(values, f"rewards/{name}/mean", f"rewards/{name}/std")
            if missing := values.isnan().float().mean().item():
                metrics[f"rewards/{name}/missing"] = missing
        return metrics | {
            f"rewards/{name}/unreadable": number / len(self.sum)
            for name, number in self.unreadable.items()
        }


def _mean_and_std(values: torch.Tensor, mean: str, std: str) -> dict[str, float]:
    """Return mean and standard deviation of values under these names; none if all are NaN."""
    values = values[~values.isnan()]
    return {mean: values.mean().item(), std: values.std(correction=0).item()} if len(values) else {}


def weighted_judges(
    references: RewardReferences, judges: Mapping[str, LlmJudge]
) -> list[tuple[float, LlmJudge]]:
    """Return the LLM judges that `reward` or `judge` names, with their weights."""
    weights = weighted_references(references)
    return [(weights[f"{JUDGES}/{name}"], judges[name]) for name in judge_names(references)]


def fill_missing(ratings: np.ndarray) -> np.ndarray:
    """Return ratings [A, n] of A responses to each of n prompts without NaN.

    A missing rating becomes the mean of the other responses to the prompt, or of all responses if
    they have none either: it favours neither this response nor the others. At least one is known.
    """
    known = ~np.isnan(ratings)
    counts, sums = known.sum(axis=0), np.where(known, ratings, 0).sum(axis=0)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), sums.sum() / counts.sum())
    return np.where(known, ratings, means)


class RewardSum(NamedTuple):
    """The weighted sum of reward models, reward functions and LLM judges."""

    rewards: Sequence[RewardModel]
    functions: WeightedFunctions
    prompt_texts: PromptTexts
    judges: Sequence[tuple[float, LlmJudge]] = ()

    def score(self, rollouts: Rollouts, step: int, rows: Sequence[int] | np.ndarray) -> Scores:
        """Return the scores of the responses to the prompts in the given rows.

        Raises InputError if a sum is not finite, an endpoint fails, or no reply is readable.
        """
        total = torch.zeros(len(rollouts.ended), device=rollouts.device)
        by_source: dict[str, torch.Tensor] = {}
        unreadable: dict[str, int] = {}
        generations = len(total) // len(rows)
        for reward in self.rewards:
            scores = by_source[reward.name] = self._model_scores(reward, rollouts, rows)
            total += reward.weight * scores
        for weight, judge in self.judges:
            name, prompts = f"{JUDGES}/{judge.name}", self.prompt_texts.prompts(rows) * generations
            ratings = judge.rate(prompts, rollouts.response_texts()).reshape(generations, -1)
            unreadable[name] = int(np.isnan(ratings).sum())
            scores = by_source[name] = torch.from_numpy(fill_missing(ratings)).flatten().to(total)
            total += weight * scores
        tables = self._function_scores(rollouts, rows)
        for (name, (weight, _)), values in zip(self.functions.items(), tables, strict=True):
            by_source[name] = values
            total += (weight * values).where(~values.isnan(), 0)
        if not total.isfinite().all():
            index = int(total.isfinite().logical_not().nonzero()[0])
            raise InputError(
                f"step {step}: the score of a response to row {rows[index % len(rows)]} is"
                f" {total[index].item()}, expected a finite number: check the reward models,"
                " functions and weights"
            )
        if not self.rewards and not self.judges:
            total[tables.isnan().all(dim=0)] = torch.nan
        return Scores(total, by_source, unreadable)

    def _function_scores(
        self, rollouts: Rollouts, rows: Sequence[int] | np.ndarray
    ) -> torch.Tensor:
        """Return the score of each function for each response [f, B]; NaN for None."""
        scores = torch.zeros(len(self.functions), len(rollouts.ended))
        if not self.functions:
            return scores.to(rollouts.device)
        # Only on rank 0: a function may return different scores when it is called again.
        if rank() == 0:
            prompts, responses = rollouts.decode()
            columns = function_columns(self.prompt_texts, rows, responses)
            for row, (_, function) in zip(scores, self.functions.values(), strict=True):
                row[:] = torch.from_numpy(function(prompts, responses, columns))
        return all_reduce_sum(scores).to(rollouts.device)

    def _model_scores(
        self, reward: RewardModel, rollouts: Rollouts, rows: Sequence[int] | np.ndarray
    ) -> torch.Tensor:
        """Return a reward model's score of each response [B]."""
        examples = rollouts.examples
        with reward.module.on_device() as scorer:
            if reward.encoder:
                responses = rollouts.response_texts()
                prompts = self.prompt_texts.turns(rows) * (len(responses) // len(rows))
                sequences = reward.encoder(prompts, responses)
                examples = sequence_examples(sequences, max_positions(scorer.model) or 0)
            scores = response_scores(scorer, examples).flatten()
        return torch.from_numpy(scores).float().to(rollouts.device)
