"""Compare a chat model with the models that it comes from, on held-out prompts.

All response the same prompts several times, sampled: the base model, the SFT model, models that the
recipe names beside it, the chat model, and the average of its weights, where training kept one.
Figures come with 95 % intervals, by resampling the prompts.

Shapes: n prompts, S responses to each.
"""

import json

import numpy as np
import torch
from snakechat.modeling.batching import Examples
from tqdm import tqdm

from snakechat.algorithms.reward_functions import RewardFunctions
from snakechat.algorithms.sanity_checks import check_tokenizers
from snakechat.data import toy
from snakechat.data.tokenizers import load_tokenizer
from snakechat.data.tokens import Ragged
from snakechat.evaluation.comparisons import (
    Draws,
    asked_models,
    compare,
    distinct,
    repetition,
    wins,
)
from snakechat.evaluation.judge_endpoint import Endpoint
from snakechat.modeling.forward import Policy, Scorer, response_logprobs, response_scores
from snakechat.modeling.generation import sample_responses
from snakechat.modeling.models import choose_device, load_causal, load_scorer
from snakechat.training.metrics import write_json
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import run

# Datasets whose responses can be told right from wrong exactly.
EXACT_CHECKS = {"shop": toy.is_correct}
# What a response wins by: what was trained on, and a judge that was not.
SCORES = ("score", "judge_score")


def main(job):
    """Responses, scores, rates; metrics.json has the figures and responses.jsonl every response."""
    settings = job.settings
    # It may lack its key.
    endpoint = Endpoint(settings.endpoint) if settings.endpoint else None
    evaluation = Evaluation(job)
    # One model at a time: a GPU that can sample from one may not hold two.
    responded = {
        name: evaluation.responses_of(folder) for name, folder in asked_models(job.inputs).items()
    }
    sft = evaluation.policy(job.inputs["sft"])
    for responses in responded.values():
        responses.figures["kl_to_sft"] = responses.logprobs - evaluation.logprobs(sft, responses)
    del sft
    for responses in responded.values():
        responses.figures["score"] = evaluation.functions(responses)
    for key, name in (("reward", "score"), ("judge", "judge_score")):
        if key in job.inputs:
            scorer = evaluation.scorer(job.inputs[key])
            for responses in responded.values():
                scores = response_scores(scorer, responses.examples, evaluation.max_tokens)
                responses.figures[name] = responses.figures.get(name, 0) + scores
            del scorer

    per_response = {name: responses.figures for name, responses in responded.items()}
    figures = compare(per_response, SCORES, settings.bootstrap_resamples, settings.seed)
    if endpoint:
        figures["wins"]["rlhf"]["sft"]["endpoint"] = judged(job, endpoint, responded)
    say(figures)
    write_json(job.result / "metrics.json", figures)
    with open(job.result / "responses.jsonl", "w") as file:
        for name, responses in responded.items():
            for line in responses.told():
                file.write(json.dumps({"model": name, **line}) + "\n")


def judged(job, endpoint, responded):
    """How often an endpoint prefers a response of the chat model to the SFT model's to a prompt.

    The first responses meet; a tie is half a win. Raises InputError where no reply can be read.
    """
    settings, models = job.settings, [responded[name] for name in ("rlhf", "sft")]
    prompts = models[0].questions[: settings.endpoint["prompts"]]
    rows = zip(prompts, *(responses.texts[0] for responses in models), strict=False)
    bar = tqdm(rows, "endpoint", len(prompts), unit="prompt", mininterval=2)
    verdicts = [endpoint.judge(*row) for row in bar]
    with open(job.result / "endpoint.jsonl", "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in endpoint.conversation)
    read = [row for row, verdict in enumerate(verdicts) if verdict is not None]
    if not read:
        reply = endpoint.conversation[0]["reply"][:60]
        raise InputError(
            f"evaluation.endpoint: {settings.endpoint['model']} never replies with A, B or C but"
            f" {reply!r}: take another model"
        )
    unreadable = len(verdicts) - len(read)
    job.facts["endpoint"] = {
        "prompts": len(verdicts),
        "unreadable": unreadable,
        "note": "what an endpoint replies does not follow from this spec: another build may differ",
    }
    ours = np.array([[verdicts[row] for row in read]])
    figures = [
        {"endpoint": values, "length": responses.figures["length"][:1, read]}
        for values, responses in zip((ours, 1 - ours), models, strict=True)
    ]
    draws = Draws(len(read), settings.bootstrap_resamples, settings.seed)
    return {**wins(*figures, "endpoint", draws), "prompts": len(read), "unreadable": unreadable}


def say(figures):
    """Print what there is to know first."""
    for key in (*SCORES, "success"):
        if key in figures["rlhf"]:
            print(f"{key}: {figures['sft'][key]:.3f} -> {figures['rlhf'][key]:.3f}")
    for key, won in figures["wins"]["rlhf"]["sft"].items():
        low, high = won["interval_95"]
        print(f"wins over SFT by {key}: {won['mean']:.1%} ({low:.1%} to {high:.1%})")


class Evaluation:
    """What all models are asked, and how."""

    def __init__(self, job):
        self.settings = job.settings
        self.device = choose_device(job.placement)
        self.max_tokens = job.placement["micro_batch_tokens"]
        self.folder = job.inputs["rlhf"]
        self.tokenizer = load_tokenizer(self.folder)
        held_out = Ragged(job.inputs["tokens"], "eval.prompt")
        rows = range(min(len(held_out), self.settings.num_prompts))
        self.prompts = [list(map(int, held_out[row])) for row in rows]
        self.questions = self.tokenizer.batch_decode(self.prompts, skip_special_tokens=True)
        self.score = RewardFunctions(self.settings.reward_functions)
        self.is_right = EXACT_CHECKS.get(self.settings.exact_check)

    def policy(self, folder):
        """A model to be asked."""
        return Policy(load_causal(folder, self.settings.dtype, self.tokenizer)).to(self.device)

    def scorer(self, folder):
        """A reward model. Raises InputError for one that would read other tokens."""
        check_tokenizers(self.tokenizer, load_tokenizer(folder), (self.folder, folder))
        return Scorer(load_scorer(folder, "fp32", self.tokenizer)).to(self.device)

    def responses_of(self, folder):
        """The responses of a model, with the figures that need it."""
        policy, settings = self.policy(folder), self.settings
        torch.manual_seed(settings.seed)
        responses = Responses(self, self.sampled(policy, settings.temperature, settings.num_generations))
        responses.logprobs = self.logprobs(policy, responses)
        if self.is_right:
            greedy = Responses(self, self.sampled(policy, 0, 1))
            responses.figures["greedy_success"] = greedy.figures["success"]
        return responses

    def logprobs(self, policy, responses):
        """What a model thinks of responses: the log-probability of each [S, n]."""
        return response_logprobs(
            policy, responses.examples, self.max_tokens, self.settings.temperature
        )

    def sampled(self, policy, temperature, samples):
        """Responses [S][n] (ids) of a model; at temperature 0 the likeliest token of each place."""
        return sample_responses(
            policy.model,
            self.prompts,
            self.tokenizer,
            self.settings.max_response_length,
            temperature,
            self.max_tokens,
            samples,
        )

    def functions(self, responses):
        """The reward functions' score of each response [S, n]."""
        samples = len(responses.texts)
        texts = [text for sample in responses.texts for text in sample]
        return self.score(self.questions * samples, texts).reshape(samples, -1)


class Responses:
    """The responses of a model: texts [S][n], and figures [S, n] by name."""

    def __init__(self, evaluation, responses):
        tokenizer, is_right = evaluation.tokenizer, evaluation.is_right
        self.examples = Examples(evaluation.prompts, *responses)
        self.questions = evaluation.questions
        self.texts = [tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in responses]
        ended = [[ids[-1] == tokenizer.eos_token_id for ids in sample] for sample in responses]
        self.figures = {"length": self.examples.response_lengths, "ended_by_eos": np.array(ended)}
        for n in (1, 2):
            shares = [[distinct(ids, n) for ids in sample] for sample in responses]
            self.figures[f"distinct_{n}"] = np.array(shares)
        self.figures["repetition"] = np.array([[*map(repetition, each)] for each in responses])
        if is_right:
            right = [list(map(is_right, self.questions, sample)) for sample in self.texts]
            self.figures["success"] = np.array(right) & self.figures["ended_by_eos"]

    def told(self):
        """Yield each response with its scores, all of a prompt together."""
        names = [name for name in SCORES if name in self.figures]
        for row, question in enumerate(self.questions):
            for sample, texts in enumerate(self.texts):
                scores = {name: float(self.figures[name][sample, row]) for name in names}
                yield {"prompt": question, "response": texts[row], **scores}


if __name__ == "__main__":
    run(main)
