"""The throughput of a training: rows, tokens and floating point operations per second.

Of a step of median length, without saving, loading and evaluation.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from snakechat.planning.flops import peak_flops, rlhf_flops, training_flops


class Throughput(NamedTuple):
    """Throughput of all processes together. Rows are pairs in DPO and prompts in RLHF.

    utilization: The share of the GPUs' peak rate (MFU), None if it is unknown.
    """

    rows_per_second: float
    tokens_per_second: float
    flops_per_second: float
    utilization: float | None


def throughput(
    stage: str,
    settings: Mapping[str, Any],
    run: Mapping[str, Any],
    steps: Sequence[Mapping[str, Any]],
    train: Mapping[str, Any],
) -> Throughput:
    """Return the throughput of a training.

    Args:
        stage: sft, reward, dpo or rlhf.
        settings: Settings of the training.
        run: run.json of the training.
        steps: The lines of metrics.jsonl.
        train: stats.json of the tokens that it was trained on.
    """
    # Mean tokens of the prompt and of each kind of response of a row. All responses share a prompt.
    lengths = {name: tokens["sum"] / train["rows"] for name, tokens in train["tokens"].items()}
    counts = dict.fromkeys(lengths, 1)
    if stage == "rlhf":
        # An evaluation before training (step 0) has no responses of a step.
        sampled = [line["response/length"] for line in steps if "response/length" in line]
        lengths["response"] = sum(sampled) / len(sampled)
        counts["response"] = settings["num_generations"]
    tokens = sum(length * counts.get(name, 1) for name, length in lengths.items())
    batch = settings["rollout_batch_size" if stage == "rlhf" else "global_batch_size"]
    rows = min(batch, train["rows"]) / run["seconds_per_step"]
    # The responses of a row do not attend to each other.
    prompt, *responses = lengths["prompt"], *(lengths[name] for name in lengths if name != "prompt")
    length = prompt + sum(responses) / len(responses)
    if stage == "rlhf":
        flops = rlhf_flops(run["models"], length, settings["ppo_epochs"])
    else:
        flops = training_flops(run["models"]["model"], length)
    flops *= rows * tokens
    placement = run["placement"]
    peak = peak_flops(run.get("gpu", "")) if settings["dtype"] != "fp32" else None
    gpus = placement["nodes"] * placement["gpus_per_node"]
    return Throughput(rows, rows * tokens, flops, flops / (gpus * peak) if peak else None)
