"""The throughput of a training: rows, tokens and floating point operations per second.

Of a step of median length, without saving, loading and evaluation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from snakechat.planning.flops import peak_flops, rlhf_flops, training_flops


def throughput(
    stage: str,
    settings: Mapping[str, Any],
    run: Mapping[str, Any],
    steps: Sequence[Mapping[str, Any]],
    train: Mapping[str, Any],
) -> dict[str, float | None]:
    """Return the throughput of all processes of a training together, by the names on pages.

    Rows are pairs in DPO and prompts in RLHF. `utilization` is the share of the GPUs' peak rate
    (MFU), None if it is unknown.

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
    return {
        "rows_per_second": rows,
        "tokens_per_second": rows * tokens,
        "flops_per_second": flops,
        "utilization": flops / (gpus * peak) if peak else None,
    }
