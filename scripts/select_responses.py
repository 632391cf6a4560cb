"""Select generated responses by their scores as the records of a dataset.

Writes what import_dataset writes: train.parquet, eval.parquet and stats.json.
"""

from collections import Counter
from types import SimpleNamespace

from snakechat.data.cells import DroppedRow
from snakechat.data.phase_splits import SPLITS
from snakechat.data.records import RecordWriter
from snakechat.data.scored_responses import read_scored_responses, select_record
from snakechat.data.statistics import write_statistics
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job, run


def main(job: Job[SimpleNamespace]) -> None:
    """Write the records of both splits; count dropped prompts."""
    settings = job.settings
    job.facts["dropped"] = {}
    for split in SPLITS:
        dropped: Counter[str] = Counter()
        with RecordWriter(job.result / f"{split}.parquet") as writer:
            for scored in read_scored_responses(job.inputs["scores"] / f"{split}.parquet"):
                try:
                    record = select_record(
                        scored, settings.select, settings.min_score, settings.min_margin
                    )
                except DroppedRow as reason:
                    dropped[str(reason)] += 1
                else:
                    writer.write(record)
        job.facts["dropped"][split] = dict(sorted(dropped.items()))
        if not writer:
            raise InputError(
                f"datasets.{job.spec['name']}: the {split} split has no rows left of"
                f" {dropped.total():,} (dropped: {dict(dropped)}): generate more responses"
                " (num_generations), or lower min_score and min_margin"
            )
    write_statistics(job)


if __name__ == "__main__":
    run(main)
