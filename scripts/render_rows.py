"""Write the rows of a phase as files that other trainers read.

SPLIT.jsonl has the rows as TRL's conversational format: `messages` for SFT; `prompt`, `chosen` and
`rejected` of pairs; `prompt`, `completion` and `label` of responses that are labelled one by one;
`prompt` and the kept columns for RLHF. SPLIT.text.jsonl has the same rows as the template writes
them, in which a response ends in the token that ends it. They are the rows that we tokenize, before
anything is cut to a number of tokens.
"""

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from snakechat.data.chat_templates import TurnsRejected
from snakechat.data.dialogues import Turn, message_of, messages_of, response_turn, tools_of
from snakechat.data.encoder import Encoder
from snakechat.data.phase_splits import ROW, SPLITS, batches, phase_rows, records_path
from snakechat.data.records import COLUMNS, KEPT, kept_columns
from snakechat.data.row_encoding import REJECTED, drop_reason, trained_places
from snakechat.data.tokenizers import load_tokenizer
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job, run

Line = dict[str, Any]


def main(job: Job[Any]) -> None:
    """Write both files of each split, and stats.json.

    Raises:
        InputError: A split has no rows, or the template rejects a row.
    """
    writer = RowWriter(load_tokenizer(job.inputs["tokenizer"]), job.settings)
    stats = {split: write_split(job, writer, split) for split in SPLITS}
    job.facts["dropped"] = {split: stats[split]["dropped"] for split in SPLITS}
    (job.result / "stats.json").write_text(json.dumps(stats, indent=1, sort_keys=True) + "\n")


def write_split(job: Job[Any], writer: "RowWriter", split: str) -> dict[str, Any]:
    """Write the files of a split; return the numbers of its rows and of those that are dropped."""
    rows, dropped, written = phase_rows(job, split), Counter[str](), 0
    paths = [records_path(job, name, split) for name in rows]
    # Reward functions receive them.
    has_kept = job.settings.fields == ["prompt"]
    kept = sorted({name for path in paths for name in kept_columns(path)}) if has_kept else []
    columns = [*COLUMNS, *(f"{KEPT}{name}" for name in kept)]
    with ExitStack() as stack:
        files = [
            stack.enter_context((job.result / f"{split}{kind}.jsonl").open("w", encoding="utf-8"))
            for kind in ("", ".text")
        ]
        for dataset, batch in batches(job, split, rows, columns):
            for place, number in enumerate(batch[ROW]):
                record = {name: cells[place] for name, cells in batch.items()}
                try:
                    found = writer.lines(record)
                except TurnsRejected as error:
                    if dataset not in getattr(job.settings, "skip_rejected", ()):
                        raise InputError(f"dataset {dataset}: row {number + 1}: {error}") from None
                    found = REJECTED
                if isinstance(found, str):
                    dropped[found] += 1
                    continue
                written += 1
                for file, lines in zip(files, found, strict=True):
                    file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    if not written:
        raise InputError(f"{', '.join(rows)}: the {split} split has no rows left: {dict(dropped)}")
    print(f"{split}: {written:,} rows, dropped: {dict(dropped)}")
    return {"rows": written, "dropped": dict(sorted(dropped.items()))}


class RowWriter:
    """Renders records.

    Args:
        tokenizer: Tokenizer of the model.
        settings: Settings of the job.
    """

    def __init__(self, tokenizer: Any, settings: Any) -> None:
        self.encoder, self.settings = Encoder(tokenizer, settings.template), settings
        self.end: str = tokenizer.decode([self.encoder.end_id])

    def lines(self, record: Line) -> tuple[list[Line], list[Line]] | str:
        """Return the lines of a record as messages and as texts, or why it is dropped.

        Raises:
            TurnsRejected: The template rejects it.
        """
        turns = record["prompt"]
        fields = [name for name in self.settings.fields if name != "prompt"]
        responses = {name: record[name] for name in fields}
        is_unpaired = self.settings.unpaired
        if reason := drop_reason(self.encoder, turns, *responses.values(), unpaired=is_unpaired):
            return reason
        if not turns:
            text = record["chosen"]
            return [{"text": text}], [{"text": text + self.end}]
        if fields == ["chosen"]:
            return self._dialogue([*turns, response_turn(record["chosen"])])
        text = self.encoder.writer.prompt(turns)
        prompts: list[Line] = [{"prompt": messages_of(turns)}, {"prompt": text}]
        if tools := tools_of(turns):
            prompts[0]["tools"] = tools
        written = {
            name: (
                [message_of(response_turn(response))],
                self.encoder.writer.response(text, turns, response) + self.end,
            )
            for name, response in responses.items()
            if response is not None
        }
        kept = {
            name.removeprefix(KEPT): json.loads(cell)
            for name, cell in record.items()
            if name.startswith(KEPT) and cell is not None
        }
        found = []
        for form, prompt in enumerate(prompts):
            of_form = {name: forms[form] for name, forms in written.items()}
            if is_unpaired:
                found.append(
                    [
                        {**prompt, "completion": response, "label": name == "chosen", **kept}
                        for name, response in of_form.items()
                    ]
                )
            else:
                found.append([{**prompt, **of_form, **kept}])
        return found[0], found[1]

    def _dialogue(self, turns: Sequence[Turn]) -> tuple[list[Line], list[Line]]:
        """Return the lines of a dialogue; as texts, one for each response that is trained."""
        line: Line = {"messages": messages_of(turns)}
        if tools := tools_of(turns):
            line["tools"] = tools
        is_all = getattr(self.settings, "train_on", None) == "all_turns"
        places = trained_places(list(turns)) if is_all else [len(turns) - 1]
        return [line], [
            {"prompt": each.prompt, "completion": f"{each.response}{self.end}"}
            for each in self.encoder.writer.responses(turns, places)
        ]


if __name__ == "__main__":
    run(main)
