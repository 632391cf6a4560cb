"""Tokenize the rows of a phase, as the rule of the job requires: SFT, reward, DPO or RLHF.

RLHF also keeps the turns of its prompts (snakechat/data/records.py).
"""

from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from snakechat.data.chat_templates import MAX_MEMORY
from snakechat.data.dialogues import SPLITS
from snakechat.data.encoder import Encoder
from snakechat.data.ragged_arrays import Ragged, open_ragged, save_array, whole_lengths_path
from snakechat.data.records import PROMPT, open_prompt_texts, percentiles
from snakechat.data.row_encoding import SYSTEM, converted_batches, encode_batch, kept_names
from snakechat.data.tokenizers import load_tokenizer
from snakechat.workflow.errors import warn
from snakechat.workflow.job import Job, run, write_json
from snakechat.workflow.processes import limited_memory

# Share of dropped rows above which a warning is printed.
MAX_DROPPED = 0.05


def main(job: Job[Any]) -> None:
    """Write a ragged array of each split and text field, and stats.json."""
    with limited_memory(MAX_MEMORY):
        encoder = Encoder(
            load_tokenizer(job.inputs["tokenizer"], is_result=True), job.settings.template
        )
        stats = {split: _tokenize_split(job, encoder, split) for split in SPLITS}
    job.facts["dropped"] = {split: stats[split]["dropped"] for split in SPLITS}
    write_json(job.result / "stats.json", stats)


def _tokenize_split(job: Job[Any], encoder: Encoder, split: str) -> dict[str, Any]:
    """Write the ragged arrays of a split, and print counts. Returns its statistics."""
    fields = job.settings.fields
    kept, dropped, truncated = Counter[int](), Counter[str](), Counter[str]()
    whole_lengths: list[np.ndarray] = []
    with ExitStack() as stack:
        is_all = getattr(job.settings, "train_on", None) == "all_turns"
        writers = [
            stack.enter_context(open_ragged(job.result, f"{split}.{name}", len(encoder.tokenizer)))
            for name in (*fields, *["trained"] * is_all)
        ]
        # Reward functions and reward models read the texts of prompts.
        if fields == [PROMPT]:
            write_texts = stack.enter_context(
                open_prompt_texts(job.result, split, kept_names(job, split))
            )
        encode = partial(encode_batch, encoder, job.settings)
        for dataset, batch, new in converted_batches(job, split, encode, dropped):
            valid = [row for row in new if not isinstance(row, str)]
            kept[dataset] += len(valid)
            truncated.update(what for *_, what in valid if what)
            lengths = np.array([row[-2] for row in valid], np.int32)
            whole_lengths.append(lengths.reshape(len(valid), len(fields) - 1))
            for write, *ids in zip(writers, *(row[:-2] for row in valid), strict=True):
                write(ids)
            if fields == [PROMPT]:
                write_texts(batch, [not isinstance(row, str) for row in new])
    # Numbers of rows by what was cut, and by why they are dropped.
    cuts, reasons = (dict(sorted(counts.items())) for counts in (truncated, dropped))
    print(f"{split}: {kept.total():,} rows, truncated: {cuts}, dropped: {reasons}")
    total = kept.total() + dropped.total()
    for reason, count in reasons.items():
        if count > MAX_DROPPED * total:
            warn(f"{split}: {count:,} of {total:,} rows are dropped: {reason}")
    if without_system := sum(count for what, count in cuts.items() if SYSTEM in what):
        warn(
            f"{split}: {without_system:,} of {total:,} rows lost their system turn and tools, which"
            f" leave no room within max_length: {job.settings.max_length}: they train with the"
            " default system prompt of the chat template, if it has one"
        )
    if len(fields) > 1:
        save_array(whole_lengths_path(job.result, split), np.concatenate(whole_lengths).T)
    lengths_of = {name: Ragged(job.result, f"{split}.{name}").lengths for name in fields}
    return {
        "rows": kept.total(),
        # What `auto` is: trainings read it here.
        "template": encoder.template,
        "weights": job.settings.weights,
        # Of each dataset; the arrays hold them in this order.
        "kept_of": [kept[dataset] for dataset in range(1, len(job.settings.weights) + 1)],
        "truncated": cuts,
        "dropped": reasons,
        "tokens": {
            name: {"sum": int(lengths.sum()), **percentiles(lengths)}
            for name, lengths in lengths_of.items()
        },
    }


if __name__ == "__main__":
    run(main)
