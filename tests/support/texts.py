"""Texts to train tokenizers on and to tokenize."""

import pyarrow.parquet as pq

TEXTS = [f"Human: {number}\n\nAssistant: yes {number} no" for number in range(10)]


def texts_of(path, rows):
    table = pq.ParquetFile(path).read(["prompt", "chosen", "rejected"]).slice(0, rows)
    return [text for row in table.to_pylist() for text in row.values()]
