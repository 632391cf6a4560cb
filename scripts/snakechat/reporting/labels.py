"""What metrics and models are called on pages, and in which range and direction metrics are.

Metrics have their keys in metrics.jsonl (steps of a training) or metrics.json (evaluations).
"""

from collections.abc import Mapping
from typing import Any

from snakechat.evaluation.comparisons import INITIAL_MODELS, initial_model
from snakechat.reporting.translations import translate


def N_(message: str) -> str:
    """Mark a message for the tables of translations without translating it."""
    return message


MODELS = {"base": "base", "sft": "SFT", "dpo": "DPO", "rlhf": "RLHF", "ema": "EMA of RLHF"}
# In the order of training, and as titles of sections.
STAGES = {
    "sft": N_("SFT"),
    "dpo": N_("DPO"),
    "reward": N_("Reward model"),
    "rlhf": N_("RLHF"),
}

# Steps of a training, by stage.
_PAIR_CURVES = {
    "loss": N_("loss (nats per pair)"),
    "accuracy": N_("accuracy"),
    "chosen_score": N_("mean score of chosen responses"),
    "rejected_score": N_("mean score of rejected responses"),
    "auc": N_("AUC of good against bad responses"),
    "good_score": N_("mean score of good responses"),
    "bad_score": N_("mean score of bad responses"),
    "learning_rate": N_("learning rate"),
}
CURVES = {
    "sft": {"loss": N_("loss (nats per token)"), "learning_rate": N_("learning rate")},
    "reward": _PAIR_CURVES,
    "dpo": _PAIR_CURVES,
    "rlhf": {
        "objective/scores": N_("score"),
        "objective/kl": N_("KL to the reference model (nats per response)"),
        "objective/kl_to_teacher": N_("KL to the teacher (nats per response)"),
        "objective/entropy": N_("entropy (nats per token)"),
        "response/length": N_("response length (tokens)"),
        "response/ended_by_eos": N_("ended by EOS"),
        "value/loss": N_("value loss"),
        "value/explained_var": N_("explained variance of the returns"),
        "policy/clipfrac_high": N_("ratios clipped above (share of tokens)"),
        "policy/learning_rate": N_("learning rate"),
    },
}

# Evaluations of held-out rows.
MOMENTS = {"before": N_("before training"), "after": N_("after training")}
PERPLEXITIES = {
    "response_perplexity": N_("perplexity of responses"),
    "perplexity": N_("perplexity of prompts and responses"),
}
PAIRS = {
    "accuracy": N_("accuracy"),
    "longer_wins_accuracy": N_("accuracy of choosing the longer response"),
    "ties": N_("ties"),
    "auc": N_("AUC of good against bad responses"),
    "longer_wins_auc": N_("AUC of the length"),
    "share_good": N_("share of good responses"),
    "loss": N_("loss (nats per pair)"),
    "chosen_score": N_("mean score of chosen responses"),
    "rejected_score": N_("mean score of rejected responses"),
    "good_score": N_("mean score of good responses"),
    "bad_score": N_("mean score of bad responses"),
    "calibration_error": N_("expected calibration error"),
}
RESPONSES = {
    "score": N_("score"),
    "judge_score": N_("score by the judge"),
    "function_score": N_("score by reward functions"),
    "greedy_function_score": N_("score by reward functions with greedy decoding"),
    "success": N_("correct"),
    "greedy_success": N_("correct with greedy decoding"),
    "kl_to_sft": N_("KL to the SFT model (nats per response)"),
    "kl_to_dpo": N_("KL to the DPO model (nats per response)"),
    "kl_to_base": N_("KL to the base model (nats per response)"),
    "full_kl_to_sft": N_("KL to the SFT model over the vocabulary (nats per response)"),
    "full_kl_to_dpo": N_("KL to the DPO model over the vocabulary (nats per response)"),
    "full_kl_to_base": N_("KL to the base model over the vocabulary (nats per response)"),
    "length": N_("response length (tokens)"),
    "ended_by_eos": N_("ended by EOS"),
    "distinct_1": N_("distinct unigrams"),
    "distinct_2": N_("distinct bigrams"),
    "repetition": N_("repeated 4-grams"),
}
METRICS = {**PERPLEXITIES, **PAIRS, **RESPONSES}
# By what a response wins over another response to the same prompt.
WIN_CRITERIA = {
    "score": N_("by score"),
    "judge_score": N_("by the judge"),
    "llm_judge": N_("by the LLM judge"),
}

# The main results of a recipe, by stage: paths in metrics.json.
_PAIR_HEADLINE = (
    *("accuracy", "longer_wins_accuracy", "calibration_error"),
    *("auc", "longer_wins_auc", "share_good", "loss"),
)
HEADLINES = {
    "sft": ("after.response_perplexity",),
    "reward": _PAIR_HEADLINE,
    "dpo": _PAIR_HEADLINE,
    "rlhf": (
        *(f"wins.rlhf.{{initial}}.{key}" for key in reversed(WIN_CRITERIA)),
        *("success_difference", "score_difference", "rlhf.kl_to_{initial}"),
    ),
}

# Metrics that lie between 0 and 1.
FRACTIONS = {
    *("accuracy", "longer_wins_accuracy", "ties", "calibration_error", "success"),
    *("auc", "longer_wins_auc", "share_good"),
    *("greedy_success", "ended_by_eos", "distinct_1", "distinct_2", "repetition", "clipfrac_high"),
}
# Metrics that are better if they are higher, and if they are lower; others are neither.
HIGHER_IS_BETTER = {
    *(
        "accuracy",
        "auc",
        "score",
        "judge_score",
        "success",
        "greedy_success",
        "ended_by_eos",
        "llm_judge",
    ),
    *("function_score", "greedy_function_score"),
}
LOWER_IS_BETTER = {*PERPLEXITIES, "loss", "calibration_error", "repetition"}


def model_label(model: str) -> str:
    """Return the name of a model on pages."""
    return MODELS.get(model, model)


def label_of(path: str) -> str:
    """Return the label of a metric of an evaluation. path: keys of metrics.json joined by dots."""
    keys = path.split(".")
    if keys[0] == "wins":
        return translate(
            "win rate of {model} against {other}, {criterion}",
            model=model_label(keys[1]),
            other=model_label(keys[2]),
            criterion=translate(WIN_CRITERIA[keys[3]]),
        )
    label = translate(METRICS[keys[-1]])
    if keys[0] == "before":
        return translate("{metric} before training", metric=label)
    if keys[0] in INITIAL_MODELS:
        return translate("{metric} of {model}", metric=label, model=model_label(keys[0]))
    return label


def headline_paths(stage: str, metrics: Mapping[str, Any]) -> list[str]:
    """Return the paths of the main results in metrics.json, which may lack some of them."""
    initial = initial_model(metrics) if "rlhf" in metrics else ""
    return [path.format(initial=initial) for path in HEADLINES[stage]]


def key_of(path: str) -> str:
    """Return the last key of a path of metrics.json (with dots) or metrics.jsonl (with slashes)."""
    return path.replace("/", ".").rpartition(".")[2]


def is_fraction(path: str) -> bool:
    """Return whether a metric lies between 0 and 1 and is shown in percent."""
    return path.startswith("wins.") or key_of(path) in FRACTIONS


def better_sign(path: str) -> int:
    """Return 1 if a metric is better when it is higher, -1 when it is lower, 0 if neither."""
    return (key_of(path) in HIGHER_IS_BETTER) - (key_of(path) in LOWER_IS_BETTER)
