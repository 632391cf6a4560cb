"""Compare a chat model with the models that it was trained from, on held-out prompts.

Each model samples several responses to the same prompts, which are drawn from all datasets of the
blend in proportion: the base model, the SFT and DPO models that the chat model was trained from,
the models of the recipe's compare_with, the chat model, and the average of its weights, as far as
they exist. All metrics have 95 % intervals over the prompts. responses.jsonl has every response.

Shapes: n prompts, S responses to each; B = S * n responses, all first responses, then all second
ones.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from snakechat.algorithms.llm_judge import LlmJudge, load_judges, record_usage
from snakechat.algorithms.reward_functions import load_functions
from snakechat.algorithms.rewards import RewardSum, load_rewards, weighted_judges
from snakechat.algorithms.rollouts import Rollouts, sample_on_all_ranks
from snakechat.data import toy
from snakechat.data.chat_templates import stop_ids
from snakechat.data.ragged_arrays import Ragged
from snakechat.data.records import PromptTexts
from snakechat.data.tokenizers import load_tokenizer
from snakechat.evaluation.comparisons import (
    ResponseMetrics,
    clusters_of,
    compare,
    distinct_n,
    evaluated_models,
    initial_model,
    means_by_dataset,
    pass_rates,
    repetition,
    win_rates,
)
from snakechat.evaluation.held_out_prompts import count_contamination, draw_held_out_prompts
from snakechat.modeling.batching import prompt_examples
from snakechat.modeling.forward import Policy
from snakechat.modeling.generation import Sampler
from snakechat.training.engine import FrozenModel
from snakechat.training.placed_models import load_frozen, start_evaluation
from snakechat.workflow.job import Job, run, write_json, write_json_lines
from snakechat.workflow.processes import rank

# Generated datasets with an exact check of correctness.
EXACT_CHECKS = {"shop": toy.is_correct}
# Metrics that decide wins: the score that RLHF trained on, and the judge's, which it did not.
SCORES = ("score", "judge_score")


def main(job: Job[SimpleNamespace]) -> None:
    """Sample and score responses of each model, compare the models, write metrics."""
    settings = job.settings
    # Created first: a missing API key must not cost the evaluation.
    judges = load_judges(job)
    evaluator = Evaluator(job, judges)
    # One model at a time: a GPU that can sample from one model may not hold two.
    models = {
        name: evaluator.evaluate(folder) for name, folder in evaluated_models(job.inputs).items()
    }
    evaluator.add_kl(models)
    evaluator.add_scores(models)
    wins = settings.llm_judge and rank() == 0
    rates = evaluator.llm_win_rates(models, job.result / "llm_judge.jsonl") if wins else None
    # All processes add up what they used.
    record_usage(job, judges.values())
    if rank() > 0:
        return

    initial, prompts = initial_model(models), evaluator.texts.prompts(evaluator.rows)
    values = {name: responses.metrics for name, responses in models.items()}
    metrics = compare(values, SCORES, prompts)
    metrics["by_dataset"] = means_by_dataset(values, evaluator.datasets)
    metrics["contamination"] = count_contamination(prompts, settings.trained_on, job.inputs)
    if rates:
        metrics["wins"]["rlhf"][initial]["llm_judge"] = rates
    for key in (*SCORES, "success"):
        if key in metrics["rlhf"]:
            print(f"{key}: {metrics[initial][key]:.3f} -> {metrics['rlhf'][key]:.3f}")
    write_json(job.result / "metrics.json", metrics)
    lines = [{"model": name, **line} for name in models for line in models[name].lines()]
    write_json_lines(job.result / "responses.jsonl", lines)


class ModelResponses:
    """The responses of a model.

    is_correct: Returns whether a response to a prompt is right, or None.

    Attributes:
        metrics: Metrics [S, n] by name, or [1, n] of greedy responses.
    """

    # The model's log-probability of each token of the responses [B, R].
    logprobs: torch.Tensor

    def __init__(self, rollouts: Rollouts, is_correct: Callable[[str, str], bool] | None) -> None:
        self.rollouts, ids = rollouts, rollouts.response_ids
        self.prompt_texts, self.texts = rollouts.decode()
        columns = {
            "length": rollouts.examples.response_lengths,
            "ended_by_eos": rollouts.ended.cpu().numpy(),
            **{f"distinct_{n}": [distinct_n(each, n) for each in ids] for n in (1, 2)},
            "repetition": list(map(repetition, ids)),
        }
        self.metrics: ResponseMetrics = {key: self.table(of) for key, of in columns.items()}
        if is_correct:
            correct = list(map(is_correct, self.prompt_texts, self.texts))
            self.metrics["success"] = self.table(correct) & self.metrics["ended_by_eos"]
            self.metrics |= pass_rates(self.metrics["success"].astype(float))

    def table(self, values: Any) -> np.ndarray:
        """Return values of responses [B] as [S, n]."""
        return np.reshape(values, self.rollouts.examples.response_lengths.shape)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield each response with its scores, prompt by prompt."""
        tables = {name: self.metrics[name] for name in SCORES if name in self.metrics}
        for index in np.arange(len(self.texts)).reshape(-1, self.rollouts.num_prompts).T.flat:
            scores = {name: float(of.flat[index]) for name, of in tables.items()}
            known = {name: score for name, score in scores.items() if not math.isnan(score)}
            yield {"prompt": self.prompt_texts[index], "response": self.texts[index], **known}


class Evaluator:
    """Samples and scores responses to the held-out prompts of a job."""

    def __init__(self, job: Job[SimpleNamespace], judges: Mapping[str, LlmJudge]) -> None:
        self.job, self.settings, self.judges = job, job.settings, judges
        self.device = start_evaluation(job.placement, self.settings.dtype)
        self.tokenizer = load_tokenizer(job.inputs["rlhf"])
        self.stop_ids = stop_ids(self.tokenizer, job.inputs["rlhf"])
        tokens, settings = job.inputs["tokens"], job.settings
        self.rows, datasets = draw_held_out_prompts(tokens, settings.num_prompts, settings.seed)
        self.datasets = [settings.datasets[dataset] for dataset in datasets]
        self.texts, held_out = PromptTexts(tokens, "eval"), Ragged(tokens, "eval.prompt")
        self.prompts = [held_out[row].tolist() for row in self.rows]
        self.functions = load_functions(self.settings.reward_functions)
        self.function_sum = RewardSum([], self.functions, self.texts)
        self.is_correct = EXACT_CHECKS.get(self.settings.exact_check)

    def evaluate(self, folder: Path) -> ModelResponses:
        """Sample responses of a model and compute the metrics that need only this model."""
        settings = self.settings
        with self._loaded_policy(folder) as model:
            torch.manual_seed(settings.seed)
            responses = self._sample(model, settings.temperature, settings.num_generations)
            responses.logprobs = responses.rollouts.logprobs(model.module)
            if self.is_correct or self.functions:
                greedy = self._sample(model, 0, 1)
                if self.functions:
                    self._add("score", {"greedy": greedy}, self.function_sum)
                responses.metrics |= {
                    f"greedy_{key}": greedy.metrics[key]
                    for key in ("success", "function_score")
                    if key in greedy.metrics
                }
        return responses

    def add_kl(self, models: dict[str, ModelResponses]) -> None:
        """Add estimates of each model's KL divergence from the initial one, by response.

        The metric is kl_to_INITIAL, the log-ratio of the response. INITIAL is sft, dpo or base.
        """
        initial = initial_model(models)
        with self._loaded_policy(self.job.inputs[initial]) as model:
            for responses in models.values():
                log_ratios = responses.logprobs - responses.rollouts.logprobs(model.module)
                kl = log_ratios.double().sum(dim=1).cpu().numpy()
                responses.metrics[f"kl_to_{initial}"] = responses.table(kl)

    def add_scores(self, models: dict[str, ModelResponses]) -> None:
        """Add score (reward functions, reward models and LLM judges) and judge_score, if any.

        Without an exact check, add pass_at_K, too: a response passes if each function that judges
        it gives 1. One reward model is loaded at a time.
        """
        if self.functions:
            self._add("score", models, self.function_sum)
        for key, name in (("reward", "score"), ("judge", "judge_score")):
            references = getattr(self.settings, key)
            for reward in load_rewards(self.job, key, "rlhf", "fp32", "eval"):
                with reward.module:
                    self._add(name, models, RewardSum([reward], {}, self.texts))
            if judges := weighted_judges(references, self.judges):
                self._add(name, models, RewardSum([], {}, self.texts, judges))

    def _add(self, name: str, models: Mapping[str, ModelResponses], scorer: RewardSum) -> None:
        """Add scores to a metric of each model; NaN adds nothing.

        The scores of functions, which come first, are function_score as well.
        """
        for model, responses in models.items():
            scores = scorer.score(responses.rollouts, 0, self.rows)
            added = responses.table(scores.sum.double().cpu().numpy())
            known = responses.metrics.get(name, np.nan)
            added = np.where(np.isnan(added), known, added + np.nan_to_num(known))
            responses.metrics[name] = added
            if scorer.functions:
                responses.metrics["function_score"] = added
            if scorer.functions and not self.is_correct:
                # NaN only where all are.
                lowest = np.fmin.reduce([each.cpu().numpy() for each in scores.by_source.values()])
                passed = np.where(np.isnan(lowest), np.nan, lowest >= 1)
                responses.metrics |= pass_rates(responses.table(passed))
            for judge, number in scores.unreadable.items():
                unreadable = self.job.facts.setdefault("unreadable_replies", {})
                unreadable.setdefault(judge, {})[model] = number

    def llm_win_rates(self, models: dict[str, ModelResponses], log: Path) -> dict[str, Any]:
        """Return the win rates of the chat model over the initial model by the LLM judge.

        It compares the first responses to prompts at equal distances, in both orders; a tie is half
        a win. Pairs with an unreadable reply are counted and skipped. The log has all replies.
        """
        pair, prompts = (models["rlhf"], models[initial_model(models)]), len(self.rows)
        number = min(prompts, self.settings.llm_judge_prompts)
        rows = np.linspace(0, prompts - 1, number).round().astype(int)
        texts = self.texts.prompts(self.rows)
        responses = [responses.rollouts.response_texts() for responses in pair]
        wins, lines = self.judges[self.settings.llm_judge].compare(
            [texts[row] for row in rows], *([each[row] for row in rows] for each in responses)
        )
        write_json_lines(log, lines)
        rows, won = rows[~np.isnan(wins)], wins[None, ~np.isnan(wins)]
        ours, theirs = (
            {"llm_judge": values, "length": responses.metrics["length"][:1, rows]}
            for values, responses in zip((won, 1 - won), pair, strict=True)
        )
        rates = win_rates(ours, theirs, "llm_judge", clusters_of(texts[row] for row in rows))
        return {**rates, "prompts": len(rows), "unreadable": number - len(rows)}

    def _loaded_policy(self, folder: Path) -> AbstractContextManager[FrozenModel[Policy]]:
        length = self.settings.max_response_length
        examples = prompt_examples(self.prompts, length, self.settings.num_generations)
        arguments = folder, self.settings.dtype, self.tokenizer, self.job.placement, examples
        longest = max(map(len, self.prompts)) + length
        return load_frozen(Policy, *arguments, samples=True, longest=longest)

    def _sample(
        self, model: FrozenModel[Policy], temperature: float, number: int
    ) -> ModelResponses:
        """Sample a number of responses to each prompt; temperature 0 is greedy decoding."""
        length = self.settings.max_response_length
        sampler = Sampler(self.stop_ids, length, temperature, number)
        sampler.update(model.module.model)
        responses, _ = sample_on_all_ranks(sampler, self.prompts, model.sampling)
        tokens = self.prompts, responses, self.tokenizer, self.stop_ids
        return ModelResponses(Rollouts(*tokens, temperature, self.device), self.is_correct)


if __name__ == "__main__":
    run(main)
