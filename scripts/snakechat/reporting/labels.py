"""What metrics, models and stages are called on pages.

Keys are those of metrics.jsonl (steps of a training) and of metrics.json (evaluations).
"""


def N_(message: str) -> str:
    """Mark a message for the tables of translations without translating it."""
    return message


MODELS = {"base": "base", "sft": "SFT", "dpo": "DPO", "rlhf": "RLHF", "ema": "EMA of RLHF"}
# The trained models in NAME.run.json.
TRAINED_MODELS = {"model": N_("model"), "actor": N_("actor"), "critic": N_("critic")}

# Steps of a training, by stage.
_PAIR_CURVES = {"loss": N_("loss (nats per pair)"), "accuracy": N_("accuracy")}
CURVES = {
    "sft": {"loss": N_("loss (nats per token)"), "learning_rate": N_("learning rate")},
    "reward": _PAIR_CURVES,
    "dpo": _PAIR_CURVES,
    "rlhf": {
        "objective/scores": N_("score"),
        "objective/kl": N_("KL to the reference model (nats per response)"),
        "objective/entropy": N_("entropy (nats per token)"),
        "response/length": N_("response length (tokens)"),
        "response/ended_by_eos": N_("ended by EOS"),
        "value/loss": N_("value loss"),
        "value/explained_var": N_("explained variance of the returns"),
        "policy/clipfrac_high": N_("ratios clipped above (share of tokens)"),
    },
}

# Evaluations of held-out rows. The first one is the main result.
PERPLEXITIES = {
    "response_perplexity": N_("perplexity of responses"),
    "perplexity": N_("perplexity of prompts and responses"),
}
PAIRS = {
    "accuracy": N_("accuracy"),
    "longer_wins_accuracy": N_("accuracy of choosing the longer response"),
    "ties": N_("ties"),
    "within_noise": N_("pairs whose margin is not larger than its rounding error"),
    "margin_noise": N_("largest rounding error of a margin"),
    "loss": N_("loss (nats per pair)"),
    "chosen_score": N_("mean score of chosen responses"),
    "rejected_score": N_("mean score of rejected responses"),
    "calibration_error": N_("expected calibration error"),
}
RESPONSES = {
    "score": N_("score"),
    "judge_score": N_("score by the judge"),
    "success": N_("correct"),
    "greedy_success": N_("correct with greedy decoding"),
    "kl_to_sft": N_("KL to the SFT model (nats per response)"),
    "kl_to_dpo": N_("KL to the DPO model (nats per response)"),
    "kl_to_base": N_("KL to the base model (nats per response)"),
    "length": N_("response length (tokens)"),
    "ended_by_eos": N_("ended by EOS"),
    "distinct_1": N_("distinct unigrams"),
    "distinct_2": N_("distinct bigrams"),
    "repetition": N_("repeated 4-grams"),
}
# By what a response wins over another response to the same prompt.
WIN_CRITERIA = {
    "score": N_("by score"),
    "judge_score": N_("by the judge"),
    "llm_judge": N_("by the LLM judge"),
}
# By the model that RLHF started from.
WIN_RATES = {
    "sft": {
        "score": N_("win rate against SFT by score"),
        "judge_score": N_("win rate against SFT by the judge"),
        "llm_judge": N_("win rate against SFT by the LLM judge"),
    },
    "dpo": {
        "score": N_("win rate against DPO by score"),
        "judge_score": N_("win rate against DPO by the judge"),
        "llm_judge": N_("win rate against DPO by the LLM judge"),
    },
    "base": {
        "score": N_("win rate against the base model by score"),
        "judge_score": N_("win rate against the base model by the judge"),
        "llm_judge": N_("win rate against the base model by the LLM judge"),
    },
}
# Metrics of RESPONSES and PAIRS that lie between 0 and 1.
FRACTIONS = {
    *("accuracy", "longer_wins_accuracy", "ties", "within_noise", "calibration_error", "success"),
    *("greedy_success", "ended_by_eos", "distinct_1", "distinct_2", "repetition"),
}


# Metrics that are better if they are higher, and if they are lower; others are neither.
HIGHER_IS_BETTER = {
    *("accuracy", "score", "judge_score", "success", "greedy_success", "ended_by_eos", "llm_judge"),
}
LOWER_IS_BETTER = {*PERPLEXITIES, "loss", "calibration_error", "repetition"}


def is_fraction(path: str) -> bool:
    """Return whether a metric lies between 0 and 1 and is shown in percent.

    path: keys of metrics.json joined by dots.
    """
    return path.startswith("wins.") or path.rpartition(".")[2] in FRACTIONS


def is_share(key: str) -> bool:
    """Return whether a metric of metrics.jsonl (GROUP/NAME) is shown in percent."""
    return is_fraction(key.replace("/", ".")) or "clipfrac" in key


def better_sign(path: str) -> int:
    """Return 1 if a metric is better when it is higher, -1 when it is lower, 0 if neither."""
    key = path.rpartition(".")[2]
    return (key in HIGHER_IS_BETTER) - (key in LOWER_IS_BETTER)


def bounds_of(path: str) -> tuple[float | None, float | None]:
    """Return the lowest and the highest value that a metric can have; None for no bound.

    path: keys of metrics.json joined by dots.
    """
    key = path.rpartition(".")[2]
    if is_fraction(path):
        return 0.0, 1.0
    if key in PERPLEXITIES:
        return 1.0, None
    return (0.0 if key == "length" or key.startswith("kl_to_") else None), None
