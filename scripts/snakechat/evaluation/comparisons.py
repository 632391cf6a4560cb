"""How the responses of models to the same prompts compare: means, differences, wins, and what an
response repeats.

Shapes: n prompts, S responses of each model to each.
"""

import numpy as np

# Tokens of a phrase: one that comes again is a repetition.
PHRASE = 4


def asked_models(inputs):
    """{name: folder} of the models among the inputs of a job, in the order of the road."""
    beside = [name for name in inputs if name.startswith("compare_with.")]
    order = ("base", "sft", *beside, "dpo", "rlhf")
    folders = {name.removeprefix("compare_with."): inputs[name] for name in order if name in inputs}
    if "rlhf" in inputs and (inputs["rlhf"] / "ema").is_dir():
        folders["ema"] = inputs["rlhf"] / "ema"
    return folders


def compare(per_response, scores, resamplings, seed):
    """Figures of models, and of each beside the first ones.

    per_response: {model: {figure: [S, n]}}, of greedy responses [1, n], of what is told once for a
    prompt [1, n]; sft is one of the models. scores: the figures by which a response wins.

    Returns for each model its means; intervals_95 of them; for each model but sft the difference
    to sft of each score and of success; and wins: of each model over sft and base.
    """
    samples, prompts = per_response["sft"]["length"].shape
    draws = Draws(prompts, resamplings, seed)
    figures = {"num_prompts": prompts, "num_generations": samples, "intervals_95": {}, "wins": {}}
    for name, values in per_response.items():
        # Responses to one prompt are alike: the prompt is what is drawn anew.
        rows = {key: np.mean(value, axis=0) for key, value in values.items()}
        figures[name] = {key: float(np.mean(row)) for key, row in rows.items()}
        figures["intervals_95"][name] = {key: draws.interval(row) for key, row in rows.items()}
        if name != "sft":
            for key in (*scores, "success"):
                if key in values:
                    difference = rows[key] - np.mean(per_response["sft"][key], axis=0)
                    told = f"{'' if name == 'rlhf' else f'{name}_'}{key}_difference"
                    figures[told] = draws.told(difference)
        others = [other for other in ("sft", "base") if other in per_response and other != name]
        if name == "base" or not others:
            continue
        figures["wins"][name] = {
            other: {
                key: wins(values, per_response[other], key, draws)
                for key in scores
                if key in values
            }
            for other in others
        }
    return figures


class Draws:
    """Prompts drawn with replacement, the same ones for all figures (Efron 1979)."""

    def __init__(self, prompts, resamplings, seed):
        self.rows = np.random.default_rng(seed).integers(prompts, size=(resamplings, prompts))

    def interval(self, values):
        """95 % percentile interval of the mean of values [n]."""
        means = np.asarray(values, dtype=np.float64)[self.rows].mean(axis=1)
        return [float(bound) for bound in np.percentile(means, [2.5, 97.5])]

    def told(self, values):
        """Mean and interval of values [n]."""
        return {"mean": float(np.mean(values)), "interval_95": self.interval(values)}


def wins(ours, theirs, key, draws):
    """How often a response of one model has the higher score than one of another to the same prompt.

    ours, theirs: {figure: [S, n]}. Each response meets each; a tie is half a win. Beside it, what
    length has to do with it: how often ours is the longer one, and how often it wins then and else.
    """
    won = meetings(ours[key], theirs[key], lambda a, b: (a > b) + (a == b) / 2)
    longer = meetings(ours["length"], theirs["length"], np.greater)
    figures = {**draws.told(won.mean(axis=(0, 1))), "longer": float(longer.mean())}
    for name, which in (("when_longer", longer), ("when_not_longer", ~longer)):
        if which.any():
            figures[name] = float(won[which].mean())
    return figures


def meetings(ours, theirs, relation):
    """A relation of each of our responses to each of theirs: [S, S, n] of two [S, n]."""
    return relation(ours[:, None], theirs[None, :])


def distinct(ids, n):
    """Share of a response's n-grams (of its tokens ids) that differ; 1 where it has none. (Li et al.
    2016, section 5, of one response.)
    """
    grams = [tuple(ids[place : place + n]) for place in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def repetition(ids):
    """Share of a response's phrases that it had before."""
    return 1 - distinct(ids, PHRASE)
