"""What the three tokenize programs have in common: rows of a phase in, ragged arrays out."""

import json
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
from tqdm import tqdm

from snakechat.data.dialogues import is_empty
from snakechat.data.phase_splits import weighted_rows
from snakechat.data.records import read_record_batches
from snakechat.data.statistics import percentiles
from snakechat.data.tokenizers import Encoder, load_tokenizer, truncate_prompt, truncate_responses
from snakechat.data.tokens import Ragged, RaggedWriter
from snakechat.workflow.errors import InputError

PARTS = ("train", "eval")


def write_phase(job, phase, fields, encode):
    """Tokenize a phase's parts into job.result; stats.json says what was kept, cut and dropped.

    fields: names of the columns, and of the ragged arrays made of them. encode: a function of an
    Encoder, the job's settings and texts [fields][B] of sound rows, that returns for each row the
    ids of its fields and whether they were cut, or the reason why the row is dropped after all.
    Raises InputError where a part has no rows.
    """
    tokenizer = load_tokenizer(job.inputs["tokenizer"])
    encoder = Encoder(tokenizer, job.settings.template)
    stats = {}

    def encode_batch(dataset, batch):
        texts = list(zip(*(batch[name] for name in fields), strict=True))
        reasons = [why_useless(encoder, *row) for row in texts]
        sound = [row for row, reason in zip(texts, reasons, strict=True) if reason is None]
        encoded = iter(encode(encoder, job.settings, *zip(*sound, strict=True)) if sound else ())
        return dataset, [reason or next(encoded) for reason in reasons]

    for part in PARTS:
        rows = phase_rows(job, phase, part)
        dropped, cut, kept = Counter(), 0, Counter()
        with ExitStack() as stack:
            writers = [
                stack.enter_context(RaggedWriter(job.result, f"{part}.{name}", len(tokenizer)))
                for name in fields
            ]
            total = sum(map(len, rows.values()))
            bar = stack.enter_context(tqdm(total=total, desc=part, unit="row", mininterval=2))
            for dataset, encoded in in_order(encode_batch, batches(job, part, rows)):
                sound = [row for row in encoded if not isinstance(row, str)]
                dropped.update(row for row in encoded if isinstance(row, str))
                cut += sum(was_cut for *_, was_cut in sound)
                kept[dataset] += len(sound)
                for writer, *ids in zip(writers, *(row[:-1] for row in sound), strict=True):
                    writer.write(ids)
                bar.update(len(encoded))
        stats[part] = {
            "rows": kept.total(),
            "rows_of": {name: len(numbers) for name, numbers in rows.items()},
            # In this order they stand in the arrays.
            "kept_of": {name: kept[name] for name in rows},
            "dropped": dict(sorted(dropped.items())),
            "cut": cut,
            "tokens": {
                name: lengths_of(Ragged(job.result, f"{part}.{name}").lengths) for name in fields
            },
        }
        if not kept.total():
            raise InputError(
                f"{', '.join(rows)}: no row is left to {part} {phase}, of {total} rows in its share"
                f" (dropped: {dict(dropped)}): give it more rows, or a larger share in split"
            )
        print(f"{part}: {kept.total():,} rows, {cut:,} of them cut, dropped {dict(dropped)}")
    job.facts["dropped"] = {part: stats[part]["dropped"] for part in PARTS}
    (job.result / "stats.json").write_text(json.dumps(stats, indent=1, sort_keys=True) + "\n")


def lengths_of(lengths):
    return {"sum": int(lengths.sum()), **percentiles(lengths)}


def phase_rows(job, phase, part):
    """{dataset: row numbers} of a phase; rows to train on are taken as often as they weigh."""
    rows = {}
    for dataset, weight in job.settings.datasets:
        numbers = np.load(job.inputs[f"rows.{dataset}"] / f"{phase}.{part}.npy")
        rows[dataset] = weighted_rows(numbers, weight, job.settings.seed) if part == "train" else numbers
    return rows


def batches(job, part, rows):
    """Yield (dataset, batch of records), dataset after dataset."""
    for dataset, numbers in rows.items():
        path = job.inputs[f"records.{dataset}"] / f"{part}.parquet"
        # Without an eval part, rows to evaluate on are some of train.parquet.
        path = path if path.exists() else path.with_stem("train")
        for batch in read_record_batches(path, numbers):
            yield dataset, batch


def in_order(function, items, workers=2):
    """Yield function(*item) of each item, in order, some of them at work while one is used.

    The tokenizers library lets go of Python while it works, on all cores: meanwhile another thread
    reads, cuts and counts.
    """
    with ThreadPoolExecutor(workers) as pool:
        waiting = deque()
        for item in items:
            waiting.append(pool.submit(function, *item))
            if len(waiting) > workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def why_useless(encoder, prompt, *responses):
    """Why a row teaches nothing, or None: the reason that it is counted under."""
    if None in responses:
        return "no rejected response"
    if is_empty(prompt):
        return "empty prompt"
    stripped = [response.strip() for response in responses]
    if not all(stripped):
        return "empty response"
    if len(set(stripped)) < len(stripped):
        return "equal responses"
    if any(encoder.has_special_token(text) for text in (prompt, *responses)):
        return "special token in text"
    return None


def encode_responses(encoder, settings, prompts, *responses):
    """Yield (prompt, response ..., was cut) of each row: together at most max_length tokens.

    truncation_side left takes from the start of the prompt, right from the end of the responses.
    Responses of a row stand behind the same prompt, which is cut for the longer one.
    """
    prompts = encoder.prompts(prompts)
    responses = zip(*(encoder.responses(texts) for texts in responses), strict=True)
    limit = settings.max_length
    for prompt, ids in zip(prompts, responses, strict=True):
        is_cut = len(prompt) + max(map(len, ids)) > limit
        if is_cut and settings.truncation_side == "left":
            prompt, ids = truncate_prompt(encoder.tokenizer, prompt, ids, limit)
        elif is_cut:
            prompt, ids = truncate_responses(prompt, ids, limit)
        if not ids[0]:
            yield "response cut away"
        # Texts that differ behind the cut, or in what the tokenizer does not tell apart.
        elif len(ids) == 2 and ids[0] == ids[1]:
            yield "equal responses"
        else:
            yield prompt, *ids, is_cut


def encode_prompts(encoder, settings, prompts):
    """Yield (prompt, False) of each row, or the reason why the row is dropped."""
    for ids in encoder.prompts(prompts):
        yield (ids, False) if len(ids) <= settings.max_prompt_length else "prompt too long"


# Phase, text fields and encoding function of each rule. As in DeepSpeed-Chat, DPO trains on the
# rows of the reward phase.
TOKENIZATIONS = {
    "tokenize_sft": ("sft", ("prompt", "chosen"), encode_responses),
    "tokenize_reward": ("reward", ("prompt", "chosen", "rejected"), encode_responses),
    "tokenize_dpo": ("reward", ("prompt", "chosen", "rejected"), encode_responses),
    "tokenize_rlhf": ("rlhf", ("prompt",), encode_prompts),
}
