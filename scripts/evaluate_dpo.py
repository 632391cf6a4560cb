"""Evaluate the implicit rewards of a DPO model on the evaluation split.

Metrics of pairs: accuracy, margin, loss, calibration. A tie is not counted as correct.
longer_wins_accuracy is the accuracy of choosing the longer response. Metrics of labelled responses
(KTO): the share of good ones, and the AUC of the rewards and of the lengths.

The trained model and the reference model compute in fp32, in whichever dtype they were trained:
some steps of DPO change the margin of a pair by less than the rounding errors of 16 bits.
"""

from typing import Any

from snakechat.algorithms.preference import reward_rounding
from snakechat.algorithms.preference_data import PreferenceData
from snakechat.config.settings import has_reference, has_reference_point
from snakechat.data.tokenizers import load_tokenizer
from snakechat.evaluation.held_out_pairs import write_pair_metrics
from snakechat.evaluation.sample_responses import held_out_responses, write_responses
from snakechat.modeling.forward import Policy
from snakechat.training.engine import FrozenModel
from snakechat.training.placed_models import load_frozen, start_evaluation
from snakechat.workflow.job import Job, run
from snakechat.workflow.processes import rank

DTYPE = "fp32"


def main(job: Job[Any]) -> None:
    """Compute the implicit rewards of both responses of each pair and write metrics.json."""
    placement = job.placement
    start_evaluation(placement, DTYPE)
    tokenizer = load_tokenizer(job.inputs["model"])
    data = PreferenceData(job.settings, job.inputs, "eval")
    responses = {}

    def load(key: str) -> FrozenModel[Policy]:
        folder = job.inputs[key]
        return load_frozen(Policy, folder, DTYPE, tokenizer, placement, data.rows, samples=True)

    def sample(key: str, model: FrozenModel[Policy]) -> None:
        name = "before" if key == "base" else "dpo"
        folder = job.inputs[key]
        responses[name] = held_out_responses(model, tokenizer, folder, data.rows)

    if has_reference(job.settings.loss):
        with load("base") as base:
            data.compute_reference(base.module)
            sample("base", base)
    with load("model") as model:
        rewards, losses = data.evaluate(model.module)
        sample("model", model)
    if rank() == 0:
        write_responses(job.result / "responses.jsonl", tokenizer, data.rows, responses)
        rounding = reward_rounding(job.settings, data.lengths, DTYPE)
        write_pair_metrics(job, losses, rewards, rounding, has_reference_point(job.settings.loss))


if __name__ == "__main__":
    run(main)
