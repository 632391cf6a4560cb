"""Compute the most probable tokens of a teacher at the target tokens of an SFT recipe.

SFT with a teacher minimizes its divergence from them (snakechat/modeling/divergences.py). The files
are described in snakechat/modeling/teacher_split.py.
"""

from typing import Any

from snakechat.data.tokenizers import is_same_tokenizer, load_tokenizer
from snakechat.modeling.batching import Examples
from snakechat.modeling.models import check_sequence_length
from snakechat.modeling.teacher_split import TeacherSplit
from snakechat.training.evaluated_models import loaded_policy, start_evaluation
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job, run


def main(job: Job[Any]) -> None:
    """Compute the tokens of both splits."""
    settings, folder = job.settings, job.inputs["teacher"]
    start_evaluation(job.placement, settings.dtype)
    tokenizer = load_tokenizer(folder)
    if not is_same_tokenizer(load_tokenizer(job.inputs["tokenizer"]), tokenizer):
        raise InputError(
            f"teacher: {folder} has another tokenizer than {job.inputs['tokenizer']}: expected the"
            " same vocabulary, bos and eos: use a teacher with the tokenizer of the model"
        )
    if settings.teacher_top_k > len(tokenizer):
        raise InputError(
            f"teacher_top_k: found {settings.teacher_top_k}, expected at most {len(tokenizer)}, the"
            " size of the vocabulary: set a smaller number"
        )
    train = Examples.read(job.inputs["tokens"], "train", "chosen")
    with loaded_policy(folder, settings.dtype, tokenizer, job.placement, train) as model:
        for split in ("train", "eval"):
            examples = Examples.read(job.inputs["tokens"], split, "chosen")
            lengths = examples.prompt_lengths + examples.response_lengths
            check_sequence_length(model.module.model, int(lengths.max(initial=0)))
            targets = TeacherSplit(job.result, split, examples, settings.train_on == "all_tokens")
            targets.compute(
                model.module,
                settings.teacher_top_k,
                len(tokenizer),
                job.placement.micro_batch_tokens,
            )


if __name__ == "__main__":
    run(main)
