"""Compare a chat model with the models that it comes from, on held-out prompts.

All answer the same prompts several times, sampled: the base model, the SFT model, models that the
recipe names beside it, the chat model, and the average of its weights, where training kept one.
Figures come with 95 % intervals, by resampling the prompts.

Shapes: n prompts, S answers to each.
"""

import json

import numpy as np
import torch
from tqdm import tqdm

from rlhf import toy
from rlhf.batches import Examples
from rlhf.comparison import Draws, asked_models, compare, distinct, repetition, wins
from rlhf.endpoint import Endpoint
from rlhf.gates import check_tokenizers
from rlhf.generate import sample_responses
from rlhf.job import InputError, run
from rlhf.metrics import write_json
from rlhf.models import choose_device, load_causal, load_scorer
from rlhf.passes import Policy, Scorer, answer_logprobs, answer_scores
from rlhf.rewards import RewardFunctions
from rlhf.tokens import Ragged, load_tokenizer

# Datasets whose answers can be told right from wrong exactly.
EXACT_CHECKS = {"shop": toy.is_right}
# What an answer wins by: what was trained on, and a judge that was not.
SCORES = ("score", "judge_score")


def main(job):
    """Answers, scores, rates; metrics.json has the figures and answers.jsonl every answer."""
    settings = job.settings
    # It may lack its key.
    endpoint = Endpoint(settings.endpoint) if settings.endpoint else None
    evaluation = Evaluation(job)
    # One model at a time: a GPU that can sample from one may not hold two.
    answered = {
        name: evaluation.answers_of(folder) for name, folder in asked_models(job.inputs).items()
    }
    sft = evaluation.policy(job.inputs["sft"])
    for answers in answered.values():
        answers.figures["kl_to_sft"] = answers.logprobs - evaluation.logprobs(sft, answers)
    del sft
    for answers in answered.values():
        answers.figures["score"] = evaluation.functions(answers)
    for key, name in (("reward", "score"), ("judge", "judge_score")):
        if key in job.inputs:
            scorer = evaluation.scorer(job.inputs[key])
            for answers in answered.values():
                scores = answer_scores(scorer, answers.examples, evaluation.max_tokens)
                answers.figures[name] = answers.figures.get(name, 0) + scores
            del scorer

    per_answer = {name: answers.figures for name, answers in answered.items()}
    figures = compare(per_answer, SCORES, settings.bootstrap, settings.seed)
    if endpoint:
        figures["wins"]["rlhf"]["sft"]["endpoint"] = judged(job, endpoint, answered)
    say(figures)
    write_json(job.result / "metrics.json", figures)
    with open(job.result / "answers.jsonl", "w") as file:
        for name, answers in answered.items():
            for line in answers.told():
                file.write(json.dumps({"model": name, **line}) + "\n")


def judged(job, endpoint, answered):
    """How often an endpoint prefers an answer of the chat model to the SFT model's to a prompt.

    The first answers meet; a tie is half a win. Raises InputError where no reply can be read.
    """
    settings, models = job.settings, [answered[name] for name in ("rlhf", "sft")]
    prompts = models[0].questions[: settings.endpoint["prompts"]]
    rows = zip(prompts, *(answers.texts[0] for answers in models), strict=False)
    bar = tqdm(rows, "endpoint", len(prompts), unit="prompt", mininterval=2)
    verdicts = [endpoint.judge(*row) for row in bar]
    with open(job.result / "endpoint.jsonl", "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in endpoint.conversation)
    read = [row for row, verdict in enumerate(verdicts) if verdict is not None]
    if not read:
        reply = endpoint.conversation[0]["reply"][:60]
        raise InputError(
            f"evaluate.endpoint: {settings.endpoint['model']} never replies with A, B or C but"
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
        {"endpoint": values, "length": answers.figures["length"][:1, read]}
        for values, answers in zip((ours, 1 - ours), models, strict=True)
    ]
    draws = Draws(len(read), settings.bootstrap, settings.seed)
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
        rows = range(min(len(held_out), self.settings.prompts))
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

    def answers_of(self, folder):
        """The answers of a model, with the figures that need it."""
        policy, settings = self.policy(folder), self.settings
        torch.manual_seed(settings.seed)
        answers = Answers(self, self.sampled(policy, settings.temperature, settings.samples))
        answers.logprobs = self.logprobs(policy, answers)
        if self.is_right:
            greedy = Answers(self, self.sampled(policy, 0, 1))
            answers.figures["greedy_success"] = greedy.figures["success"]
        return answers

    def logprobs(self, policy, answers):
        """What a model thinks of answers: the log-probability of each [S, n]."""
        return answer_logprobs(policy, answers.examples, self.max_tokens, self.settings.temperature)

    def sampled(self, policy, temperature, samples):
        """Answers [S][n] (ids) of a model; at temperature 0 the likeliest token of each place."""
        return sample_responses(
            policy.model,
            self.prompts,
            self.tokenizer,
            self.settings.max_response_length,
            temperature,
            self.max_tokens,
            samples,
        )

    def functions(self, answers):
        """The reward functions' score of each answer [S, n]."""
        samples = len(answers.texts)
        texts = [text for sample in answers.texts for text in sample]
        return self.score(self.questions * samples, texts).reshape(samples, -1)


class Answers:
    """The answers of a model: texts [S][n], and figures [S, n] by name."""

    def __init__(self, evaluation, responses):
        tokenizer, is_right = evaluation.tokenizer, evaluation.is_right
        self.examples = Examples(evaluation.prompts, *responses)
        self.questions = evaluation.questions
        self.texts = [tokenizer.batch_decode(ids, skip_special_tokens=True) for ids in responses]
        ended = [[ids[-1] == tokenizer.eos_token_id for ids in sample] for sample in responses]
        self.figures = {"length": self.examples.answer_lengths, "ended_by_eos": np.array(ended)}
        for n in (1, 2):
            shares = [[distinct(ids, n) for ids in sample] for sample in responses]
            self.figures[f"distinct_{n}"] = np.array(shares)
        self.figures["repetition"] = np.array([[*map(repetition, each)] for each in responses])
        if is_right:
            right = [list(map(is_right, self.questions, sample)) for sample in self.texts]
            self.figures["success"] = np.array(right) & self.figures["ended_by_eos"]

    def told(self):
        """Yield each answer with its scores, all of a prompt together."""
        names = [name for name in SCORES if name in self.figures]
        for row, question in enumerate(self.questions):
            for sample, texts in enumerate(self.texts):
                scores = {name: float(self.figures[name][sample, row]) for name in names}
                yield {"prompt": question, "answer": texts[row], **scores}


if __name__ == "__main__":
    run(main)
