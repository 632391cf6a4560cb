"""Compare a chat model with the models that it was trained from, on held-out prompts.

Each model samples several responses to the same prompts, which are drawn from all datasets of the
blend in proportion: the base model, the SFT and DPO models
that the chat model was trained from, if any, the models of the recipe's compare_with, the chat
model, and the average of its weights, if any. All metrics have 95 % bootstrap intervals over the
prompts.

Writes metrics.json, and every response to responses.jsonl.

Shapes: n prompts, S responses to each.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from snakechat.algorithms.llm_judge import (
    LlmJudge,
    fill_missing,
    load_judges,
    usage_record,
)
from snakechat.algorithms.reward_functions import columns_of, load_functions, weighted_sum
from snakechat.algorithms.reward_models import (
    Reader,
    choose_reader,
    conversation_scores,
    reader_examples,
)
from snakechat.algorithms.reward_sum import weighted_judges
from snakechat.algorithms.rollouts import sample_equally
from snakechat.config.references import input_names, weighted_references
from snakechat.data import toy
from snakechat.data.prompt_texts import PromptTexts
from snakechat.data.ragged_arrays import Ragged
from snakechat.data.reward_model_encoding import response_texts
from snakechat.data.special_tokens import stop_ids
from snakechat.data.tokenizers import load_tokenizer
from snakechat.evaluation.comparisons import (
    ResponseMetrics,
    compare,
    distinct_n,
    evaluated_models,
    initial_model,
    means_by_dataset,
    repetition,
)
from snakechat.evaluation.held_out_prompts import count_contamination, draw_held_out_prompts
from snakechat.evaluation.llm_win_rates import llm_win_rates
from snakechat.evaluation.response_divergence import Candidates, divergences, find_candidates
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy, Scorer, response_scores
from snakechat.modeling.model_check import prompt_examples
from snakechat.modeling.models import check_sequence_length
from snakechat.training.engine import FrozenModel
from snakechat.training.evaluated_models import loaded_policy, loaded_scorer, start_evaluation
from snakechat.training.metric_logs import write_json
from snakechat.workflow.distributed import all_reduce_sum, rank
from snakechat.workflow.job import Job, run

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
    rates = None
    if settings.llm_judge and rank() == 0:
        rates = evaluator.llm_win_rates(models, job.result)
    if judges:
        # All processes add up what they used.
        job.record["llm_judges"] = usage_record(judges.values())
        job.facts["unreadable_replies"] = evaluator.unreadable
    if rank() > 0:
        return

    values = {name: responses.metrics for name, responses in models.items()}
    metrics = compare(values, SCORES, settings.bootstrap_resamples, settings.seed)
    metrics["by_dataset"] = means_by_dataset(values, evaluator.datasets)
    metrics["contamination"] = count_contamination(
        evaluator.texts.prompts(evaluator.rows), settings.trained_on, job.inputs
    )
    if rates:
        metrics["wins"]["rlhf"][initial_model(models)]["llm_judge"] = rates
    print_summary(metrics)
    write_json(job.result / "metrics.json", metrics)
    with open(job.result / "responses.jsonl", "w") as file:
        for name, responses in models.items():
            for line in responses.lines():
                file.write(json.dumps({"model": name, **line}) + "\n")


class ModelResponses:
    """The responses of a model.

    Attributes:
        texts: Responses [S][n].
        metrics: Metrics [S, n] by name, or [1, n] for those of greedy responses.
        candidates: The model's most probable tokens at each token of the responses.
    """

    def __init__(self, evaluator: "Evaluator", responses: list[list[list[int]]]) -> None:
        tokenizer, is_correct = evaluator.tokenizer, evaluator.is_correct
        self.tokenizer = tokenizer
        self.examples = Examples(evaluator.prompts, *responses)
        self.prompt_texts = evaluator.prompt_texts
        self.texts = [tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in responses]
        self.candidates: Candidates | None = None
        ended = [[ids[-1] in evaluator.stop_ids for ids in row] for row in responses]
        self.metrics: ResponseMetrics = {
            "length": self.examples.response_lengths,
            "ended_by_eos": np.array(ended),
        }
        for n in (1, 2):
            values = [[distinct_n(ids, n) for ids in row] for row in responses]
            self.metrics[f"distinct_{n}"] = np.array(values)
        self.metrics["repetition"] = np.array([[*map(repetition, row)] for row in responses])
        if is_correct:
            correct = [list(map(is_correct, self.prompt_texts, row)) for row in self.texts]
            self.metrics["success"] = np.array(correct) & self.metrics["ended_by_eos"]

    def complete_texts(self) -> list[str]:
        """Return the responses [S * n] as a reward model with another tokenizer reads them."""
        sequences: Any = self.examples.responses
        responses = [ids for row in sequences for ids in row]
        ended = self.metrics["ended_by_eos"].flatten().tolist()
        return response_texts(self.tokenizer, responses, ended)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield each response with its scores, prompt by prompt."""
        names = [name for name in SCORES if name in self.metrics]
        for row, prompt in enumerate(self.prompt_texts):
            for number, texts in enumerate(self.texts):
                scores = {name: float(self.metrics[name][number, row]) for name in names}
                yield {"prompt": prompt, "response": texts[row], **scores}


class Evaluator:
    """Samples and scores responses to the held-out prompts of a job.

    Attributes:
        unreadable: Number of unreadable ratings by LLM judge and model.
    """

    def __init__(self, job: Job[SimpleNamespace], judges: Mapping[str, LlmJudge]) -> None:
        self.settings, self.inputs, self.judges = job.settings, job.inputs, judges
        self.unreadable: dict[str, dict[str, int]] = {}
        self.placement = job.placement
        start_evaluation(job.placement, self.settings.dtype)
        self.micro_batch_tokens = job.placement.micro_batch_tokens
        self.tokenizer = load_tokenizer(job.inputs["rlhf"])
        self.stop_ids = stop_ids(self.tokenizer, job.inputs["rlhf"])
        held_out = Ragged(job.inputs["tokens"], "eval.prompt")
        self.rows, self.datasets = draw_held_out_prompts(
            job.inputs["tokens"],
            self.settings.datasets,
            self.settings.num_prompts,
            self.settings.seed,
        )
        self.texts = PromptTexts(job.inputs["tokens"], "eval")
        self.prompts = [list(map(int, held_out[row])) for row in self.rows]
        self.prompt_texts = self.tokenizer.batch_decode(self.prompts, skip_special_tokens=True)
        self.functions = load_functions(self.settings.reward_functions)
        self.is_correct = EXACT_CHECKS.get(self.settings.exact_check)

    def evaluate(self, folder: Path) -> ModelResponses:
        """Sample responses of a model and compute the metrics that need only this model."""
        settings = self.settings
        with self._loaded_policy(folder) as model:
            torch.manual_seed(settings.seed)
            sampled = self._sample(model, settings.temperature, settings.num_generations)
            responses = ModelResponses(self, sampled)
            responses.candidates = find_candidates(
                model.module,
                responses.examples,
                len(self.tokenizer),
                self.micro_batch_tokens,
                settings.temperature,
            )
            if self.is_correct or self.functions:
                greedy = ModelResponses(self, self._sample(model, 0, 1))
                if self.is_correct:
                    responses.metrics["greedy_success"] = greedy.metrics["success"]
                if self.functions:
                    responses.metrics["greedy_function_score"] = self._function_scores(greedy)
        return responses

    def add_kl(self, models: dict[str, ModelResponses]) -> None:
        """Add estimates of each model's KL divergence from the initial one, by response.

        The metrics are kl_to_INITIAL, the log-ratio of the response, and full_kl_to_INITIAL, which
        sums over the vocabulary. INITIAL is sft, dpo or base.
        """
        initial = initial_model(models)
        with self._loaded_policy(self.inputs[initial]) as model:
            for responses in models.values():
                assert responses.candidates is not None
                log_ratios, estimates = divergences(
                    model.module,
                    responses.examples,
                    responses.candidates,
                    self.micro_batch_tokens,
                    self.settings.temperature,
                )
                responses.metrics[f"kl_to_{initial}"] = log_ratios
                responses.metrics[f"full_kl_to_{initial}"] = estimates

    def add_scores(self, models: dict[str, ModelResponses]) -> None:
        """Add score (reward functions, reward models and LLM judges) and judge_score, if any."""
        if self.functions:
            for responses in models.values():
                responses.metrics["score"] = self._function_scores(responses)
                responses.metrics["function_score"] = responses.metrics["score"]
        for key, name in (("reward", "score"), ("judge", "judge_score")):
            references = getattr(self.settings, key)
            weights = weighted_references(references)
            for input_name, reference in input_names(key, references).items():
                for responses, scores in self._scores(input_name, reference, models):
                    weighted = weights[reference] * scores
                    responses.metrics[name] = responses.metrics.get(name, 0) + weighted
            for weight, judge in weighted_judges(references, self.judges):
                for model, responses in models.items():
                    ratings = self._ratings(judge, model, responses)
                    responses.metrics[name] = responses.metrics.get(name, 0) + weight * ratings

    def llm_win_rates(self, models: dict[str, ModelResponses], folder: Path) -> dict[str, Any]:
        """Return the win rates of the chat model over the initial model by the LLM judge.

        It compares the first responses to each prompt. folder: For the log.
        """
        ours, theirs = models["rlhf"], models[initial_model(models)]
        number = len(self.rows)
        return llm_win_rates(
            self.judges[self.settings.llm_judge],
            self.texts.prompts(self.rows),
            (ours.complete_texts()[:number], theirs.complete_texts()[:number]),
            (ours.metrics["length"][0], theirs.metrics["length"][0]),
            vars(self.settings),
            folder,
        )

    def _loaded_policy(self, folder: Path) -> AbstractContextManager[FrozenModel[Policy]]:
        settings = self.settings
        examples = prompt_examples(
            self.prompts, settings.max_response_length, settings.num_generations
        )
        return loaded_policy(
            folder, settings.dtype, self.tokenizer, self.placement, examples, samples=True
        )

    def _function_scores(self, responses: ModelResponses) -> np.ndarray:
        """Return the weighted sum of the reward functions' scores [S, n]."""
        scores = np.zeros((len(responses.texts), len(self.rows)))
        # Only on rank 0: a function may return different scores when it is called again.
        if rank() == 0:
            texts = [text for row in responses.texts for text in row]
            columns = columns_of(self.texts, self.rows, texts)
            prompts = self.prompt_texts * len(scores)
            summed = weighted_sum(self.functions, prompts, texts, columns)
            scores = summed.reshape(scores.shape)
        return all_reduce_sum(torch.from_numpy(scores)).numpy()

    def _ratings(self, judge: LlmJudge, model: str, responses: ModelResponses) -> np.ndarray:
        """Return the ratings [S, n] of a model's responses; count the unreadable ones."""
        num_generations = len(responses.texts)
        prompts = self.texts.prompts(self.rows) * num_generations
        ratings = judge.rate(prompts, responses.complete_texts()).reshape(num_generations, -1)
        self.unreadable.setdefault(judge.name, {})[model] = int(np.isnan(ratings).sum())
        return fill_missing(ratings)

    def _scores(
        self, input_name: str, reference: str, models: dict[str, ModelResponses]
    ) -> Iterator[tuple[ModelResponses, np.ndarray]]:
        """Yield a reward model's score [S, n] of each response of each model."""
        settings, folder = self.settings, self.inputs[input_name]
        reader = choose_reader(
            reference,
            folder,
            settings.reward_templates[reference],
            self.inputs["rlhf"],
            settings.template,
        )
        [first, *_] = models.values()
        examples = reader_examples(reader, first.examples, lambda: self.texts.turns(self.rows))
        with loaded_scorer(folder, "fp32", reader.tokenizer, self.placement, examples) as model:
            for responses in models.values():
                yield responses, self._model_scores(model.module, reader, responses)

    def _model_scores(
        self, scorer: Scorer, reader: Reader, responses: ModelResponses
    ) -> np.ndarray:
        """Return a reward model's score [S, n] of each response of a model."""
        if reader.encoder is None:
            return response_scores(scorer, responses.examples, self.micro_batch_tokens)
        num_generations = len(responses.texts)
        scores = conversation_scores(
            scorer,
            reader.encoder,
            self.texts.turns(self.rows) * num_generations,
            responses.complete_texts(),
            self.micro_batch_tokens,
        )
        return scores.reshape(num_generations, -1)

    def _sample(
        self, model: FrozenModel[Policy], temperature: float, num_generations: int
    ) -> list[list[list[int]]]:
        """Return token ids [S][n] of sampled responses; temperature 0 is greedy decoding."""
        longest = max(map(len, self.prompts)) + self.settings.max_response_length
        check_sequence_length(model.module.model, longest)
        return sample_equally(
            model,
            self.prompts,
            self.stop_ids,
            self.settings.max_response_length,
            temperature,
            self.micro_batch_tokens,
            num_generations,
        )


def print_summary(metrics: dict[str, Any]) -> None:
    """Print scores before and after RLHF, and win rates over the initial model."""
    initial = initial_model(metrics)
    for key in (*SCORES, "success"):
        if key in metrics["rlhf"]:
            print(f"{key}: {metrics[initial][key]:.3f} -> {metrics['rlhf'][key]:.3f}")
    for key, rates in metrics["wins"]["rlhf"][initial].items():
        low, high = rates["interval_95"]
        rate = f"{rates['mean']:.1%} ({low:.1%} to {high:.1%})"
        print(f"win rate over {initial} by {key}: {rate}")


if __name__ == "__main__":
    run(main)
