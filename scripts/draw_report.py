"""Draw the curves and write the tables of a recipe's three stages."""

import csv
import json

import matplotlib

matplotlib.use("svg")
# Fixed ids instead of random ones: the same build gives the same bytes.
matplotlib.rcParams["svg.hashsalt"] = "snakechat"

from matplotlib import pyplot as plt

from rlhf.job import run

# Okabe and Ito's colours, apart for all kinds of colour vision.
COLOUR = "#0072B2"

CURVES = {
    "sft": ("train_sft", {"loss": "loss (nats per token)", "learning_rate": "learning rate"}),
    "reward": ("train_reward", {"loss": "loss (nats per pair)", "accuracy": "accuracy (share)"}),
    "rlhf": (
        "train_rlhf",
        {
            "objective/scores": "score of the reward model",
            "objective/kl": "KL to SFT (nats per answer)",
            "response/length": "answer length (tokens)",
            "objective/entropy": "entropy (nats per token)",
        },
    ),
}


def main(job):
    """One figure for each stage, and figures.csv with the evaluations."""
    for stage, (name, curves) in CURVES.items():
        lines = (job.inputs[name] / "metrics.jsonl").read_text().splitlines()
        draw(job.result / f"{stage}.svg", [json.loads(line) for line in lines], curves)
    with open(job.result / "figures.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["stage", "figure", "value"])
        for stage in CURVES:
            figures = json.loads((job.inputs[f"evaluate_{stage}"] / "metrics.json").read_text())
            table.writerows([stage, name, f"{value:.6g}"] for name, value in flat(figures))


def draw(path, steps, curves):
    """One panel for each curve, over the steps."""
    figure, panels = plt.subplots(
        1, len(curves), figsize=(3.6 * len(curves), 3), layout="constrained"
    )
    for panel, (name, label) in zip(panels, curves.items(), strict=True):
        panel.plot([line["step"] for line in steps], [line[name] for line in steps], color=COLOUR)
        panel.set(xlabel="step", ylabel=label)
        panel.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def flat(figures, prefix=""):
    """(name, number) of each figure of nested dicts and lists, names joined by dots."""
    items = figures.items() if isinstance(figures, dict) else enumerate(figures)
    for key, value in items:
        if isinstance(value, (dict, list)):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


if __name__ == "__main__":
    run(main)
