"""Write the rows of a phase as files that other trainers read.

SPLIT.jsonl has the rows as TRL's conversational format: `messages` for SFT; `prompt`, `chosen` and
`rejected` of pairs; `prompt`, `completion` and `label` of responses that are labelled one by one;
`prompt` and the kept columns for RLHF. SPLIT.text.jsonl has the same rows as the template writes
them, in which a response ends in the token that ends it. They are the rows that we tokenize, before
anything is cut to a number of tokens.
"""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from snakechat.data.chat_templates import MAX_MEMORY, TurnsRejected
from snakechat.data.dialogues import SPLITS, messages_of, response_turn, tools_of
from snakechat.data.encoder import Encoder
from snakechat.data.records import KEPT, PROMPT, Batch
from snakechat.data.row_encoding import conversations_of, converted_batches, drop_reason
from snakechat.data.tokenizers import load_tokenizer
from snakechat.workflow.job import Job, run
from snakechat.workflow.processes import limited_memory

Line = dict[str, Any]


def main(job: Job[Any]) -> None:
    """Write both files of each split."""
    with limited_memory(MAX_MEMORY):
        encoder = Encoder(load_tokenizer(job.inputs["tokenizer"]), job.settings.template)
        job.facts["dropped"] = {split: write_split(job, encoder, split) for split in SPLITS}


def write_split(job: Job[Any], encoder: Encoder, split: str) -> dict[str, int]:
    """Write the files of a split; return the numbers of rows that are dropped, by reason."""
    dropped, written = Counter[str](), 0

    def convert(batch: Batch) -> Iterator[list[Any] | TurnsRejected]:
        for cells in zip(*batch.values(), strict=True):
            try:
                yield [lines_of(encoder, job.settings, dict(zip(batch, cells, strict=True)))]
            except TurnsRejected as error:
                yield error

    messages, texts = (job.result / f"{split}{kind}.jsonl" for kind in ("", ".text"))
    with messages.open("w", encoding="utf-8") as first, texts.open("w", encoding="utf-8") as second:
        for _, _, rows in converted_batches(job, split, convert, dropped):
            for forms in rows:
                if not isinstance(forms, str):
                    written += 1
                    for file, lines in zip((first, second), forms, strict=True):
                        for line in lines:
                            print(json.dumps(line, ensure_ascii=False), file=file)
    print(f"{split}: {written:,} rows, dropped: {dict(dropped)}")
    return dict(sorted(dropped.items()))


def lines_of(encoder: Encoder, settings: Any, record: Line) -> list[list[Line]] | str:
    """Return the lines of a record as messages and as texts, or the reason why it is dropped.

    Raises:
        TurnsRejected: The template rejects it.
    """
    turns, writer = record[PROMPT], encoder.writer
    end = str(encoder.tokenizer.decode([encoder.end_id]))
    tools = {"tools": found} if (found := tools_of(turns)) else {}
    responses = {name: record[name] for name in settings.fields if name != PROMPT}
    if reason := drop_reason(encoder, turns, *responses.values(), unpaired=settings.unpaired):
        return reason
    if not turns:
        text = record["chosen"]
        return [[{"text": text}], [{"text": text + end}]]
    if [*responses] == ["chosen"]:
        response = record["chosen"]
        written = []
        for before, [text] in conversations_of(settings, turns, response):
            prompt = writer.prompt(before)
            written.append(
                {PROMPT: prompt, "completion": writer.response(prompt, before, text) + end}
            )
        dialogue = messages_of([*turns, response_turn(response)])
        return [[{"messages": dialogue, **tools}], written]
    prompt = writer.prompt(turns)
    given = {name: response for name, response in responses.items() if response is not None}
    kept = {
        name.removeprefix(KEPT): json.loads(cell)
        for name, cell in record.items()
        if name.startswith(KEPT) and cell is not None
    }
    forms: list[tuple[Line, Line]] = [
        (
            {PROMPT: messages_of(turns), **tools, **kept},
            {name: messages_of([response_turn(each)]) for name, each in given.items()},
        ),
        (
            {PROMPT: prompt, **kept},
            {name: writer.response(prompt, turns, each) + end for name, each in given.items()},
        ),
    ]
    if not settings.unpaired:
        return [[{**start, **values}] for start, values in forms]
    return [
        [{**start, "completion": each, "label": key == "chosen"} for key, each in values.items()]
        for start, values in forms
    ]


if __name__ == "__main__":
    run(main)
