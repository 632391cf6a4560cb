"""Source files as a stranger may make them: damaged, oversized, deeply nested, in wrong encodings.

damaged_file(seed) always makes the same file for a seed, from a valid file of one of the kinds.
"""

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from support.source_files import ROW, WRITERS, numbered

KINDS = list(WRITERS)
TABLES = ("rows.parquet", "rows.arrow")
MB = 1 << 20


def damaged_file(folder: Path, seed: int) -> Path:
    """Write the damaged file of a seed into a folder and return its path."""
    rng = random.Random(seed)
    name = rng.choice(KINDS)
    makers = [edit_bytes] * 4 + [hostile_table if name in TABLES else hostile_text] * 2
    path = folder / name
    path.write_bytes(b"")
    rng.choice(makers)(rng, path)
    return path


def valid_bytes(rng, name):
    """Return a valid file with a few hundred rows, some of them nested."""
    rows = numbered(rng.choice([1, 20, 300]))
    if name != "rows.csv" and rng.random() < 0.5:
        for row in rows:
            row["messages"] = [{"role": "user", "content": row["chosen"]}] * 2
            row["score"] = rng.choice([0.5, -1.5])
    return WRITERS[name](rows)


# --- edits of valid files -------------------------------------------------------------------


def edit_bytes(rng, path):
    """Truncate, flip, repeat, swap, delete or insert bytes of a valid file."""
    content = bytearray(valid_bytes(rng, path.name))
    if path.name.endswith(".gz") and rng.random() < 0.5:
        # Damage within intact compression.
        content = bytearray(gzip.decompress(content))
    for _ in range(rng.choice([1, 1, 3, 30])):
        rng.choice(EDITS)(rng, content)
    compressed = path.name.endswith(".gz") and content[:1] == b"{"
    path.write_bytes(gzip.compress(content) if compressed else content)


def place(rng, content):
    """Return a position; often near the end, where parquet has its metadata."""
    size = max(1, len(content))
    return size - 1 - rng.randrange(min(size, 300)) if rng.random() < 0.4 else rng.randrange(size)


def truncate(rng, content):
    del content[place(rng, content) :]


def flip_bit(rng, content):
    if content:
        content[place(rng, content)] ^= 1 << rng.randrange(8)


def put_large_number(rng, content):
    start = place(rng, content)
    content[start : start + 5] = rng.choice([b"\xff\xff\xff\xff\x0f", b"\xff\xff\xff\x7f\x00"])


def put_zeros(rng, content):
    start = place(rng, content)
    size = rng.choice([1, 8, 40])
    content[start : start + size] = bytes(size)


def swap_blocks(rng, content):
    size = rng.choice([4, 64, 512])
    first, second = sorted([place(rng, content), place(rng, content)])
    if first + size <= second and second + size <= len(content):
        block = content[first : first + size]
        content[first : first + size] = content[second : second + size]
        content[second : second + size] = block


def repeat_block(rng, content):
    start = place(rng, content)
    content[start:start] = content[start : start + 200] * rng.choice([1, 50])


def delete_block(rng, content):
    start = place(rng, content)
    del content[start : start + rng.choice([1, 4, 100])]


def insert_bytes(rng, content):
    odd = [
        b'"',
        b"{",
        b"[",
        b"]",
        b"}",
        b"\\",
        b"\x00",
        b"\xff",
        b"\xed\xa0\x80",
        b"\r",
        b"\n",
        b",",
    ]
    start = place(rng, content)
    content[start:start] = rng.choice(odd) * rng.choice([1, 1000])


EDITS = [
    truncate,
    flip_bit,
    flip_bit,
    put_large_number,
    put_zeros,
    swap_blocks,
    repeat_block,
    delete_block,
    insert_bytes,
]

# --- hostile content in files of text -------------------------------------------------------


def hostile_text(rng, path):
    """Write a file with hostile rows between valid ones."""
    good = json.dumps(ROW).encode()
    rows = [rng.choice(HOSTILE)(rng) for _ in range(rng.choice([1, 3]))]
    rows = [good, *rows, good]
    if path.name == "rows.json":
        path.write_bytes(b"[" + b",".join(rows) + b"]")
    elif path.name == "rows.csv":
        path.write_bytes(b"prompt,chosen\r\n" + b"\r\n".join(map(as_cells, rows)))
    else:
        content = b"\n".join(rows)
        path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)


def as_cells(row):
    """Return JSON as the second cell of a row of csv, quoted or not."""
    quoted = b'"' + row.replace(b'"', b'""') + b'"'
    return b"a," + (quoted if len(row) % 2 else row)


def field(value):
    return b'{"prompt": "a", "chosen": ' + value + b"}"


def nested(rng):
    depth = rng.choice([99, 101, 2_000, 200_000])
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    return field(opening * depth + b"1" + closing * (depth if rng.random() < 0.8 else 0))


def digits(rng):
    number = b"9" * rng.choice([400, 4_301, 5_000, 300_000])
    return field(number + rng.choice([b"", b".5", b"e9", b"e-99999"]))


def long_row(rng):
    text = rng.choice([b"x", b" ", b"\\n", b'\\"', b"\xe4\xbd\xa0", b"\\u0000", b"[", b"USER:"])
    return field(b'"' + text * (rng.choice([1, 1, 1, 15, 17, 40]) * MB // len(text)) + b'"')


def many_values(rng):
    value = rng.choice([b"[]", b"{}", b"0.1", b'{"":0}', b'"a"', b"null"])
    return field(b"[" + b",".join([value] * (rng.choice([1, 1, 15]) * MB // len(value))) + b"]")


def many_keys(rng):
    return b"{" + b",".join(b'"%d":0' % number for number in range(rng.choice([10, 10**6]))) + b"}"


def long_key(rng):
    return b'{"' + rng.choice([b"k", b"\\u001b[31m", b"\\u202e"]) * (5 * MB // 8) + b'": 1}'


def wrong_encoding(rng):
    text = '{"prompt": "é", "chosen": "日本"}'
    codec = rng.choice(["utf-16", "utf-32", "utf-8-sig", "shift_jis", "utf-7"])
    return text.encode(codec, "replace")


def odd_values(rng):
    odd = [b"NaN", b"-Infinity", b"1e999", b"-0", b'"\\ud800"', b'"\\udc00\\ud800"', b"[[]]", b"{}"]
    return field(rng.choice(odd))


def random_bytes(rng):
    return rng.randbytes(rng.choice([1, 100, 100_000]))


HOSTILE = [
    nested,
    digits,
    long_row,
    many_values,
    many_keys,
    long_key,
    wrong_encoding,
    odd_values,
    random_bytes,
]

# --- hostile tables -------------------------------------------------------------------------


def hostile_table(rng, path):
    """Write a table that is valid and takes much more memory than its file has bytes."""
    table = rng.choice(TABLES_TO_WRITE)(rng)
    if path.suffix == ".parquet":
        pq.write_table(table, path, compression=rng.choice(["zstd", "none"]))
        return
    options = pa.ipc.IpcWriteOptions(compression=rng.choice(["zstd", "lz4", None]))
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_stream(file, table.schema, options=options) as stream,
    ):
        stream.write_table(table)


def repeated_text(rng):
    """Return a few megabytes as often as there are rows, in a dictionary."""
    size, rows = rng.choice([(MB, 200), (20 * MB, 250), (5 * MB, 1000)])
    indices = pa.array([0] * rows, pa.int32())
    texts = pa.DictionaryArray.from_arrays(indices, pa.array(["x" * size]))
    return pa.table({"prompt": texts, "chosen": ["a"] * rows})


def repeated_texts_in_a_row(rng):
    """Return lists with the same text a thousand times."""
    texts = pa.DictionaryArray.from_arrays(
        pa.array([0] * 3000, pa.int32()), pa.array(["x" * rng.choice([1000, 2 * MB])])
    )
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 3000], pa.int32()), texts)
    return pa.table({"prompt": lists, "chosen": ["a", "b"]})


def long_cells(rng):
    return pa.table({"prompt": ["x" * (rng.choice([1, 15, 17]) * MB)] * 5, "chosen": ["a"] * 5})


def nested_cells(rng):
    """Return lists in lists."""
    values = pa.array([1])
    for _ in range(rng.choice([20, 60])):
        values = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), values)
    return pa.table({"prompt": values, "chosen": ["a"]})


def many_columns(rng):
    return pa.table({f"\x1b[3{number}m": ["a"] for number in range(2000)} | {"prompt": ["a"]})


def odd_types(rng):
    columns = [
        pa.array([10**12] * 3, pa.timestamp("s")),
        pa.array([b"\xff", b"a", None], pa.binary()),
        pa.array([1, None, 3], pa.decimal128(38, 0)),
        pa.array([float("nan"), float("inf"), -0.0]),
        pa.nulls(3),
    ]
    return pa.table({"prompt": rng.choice(columns), "chosen": rng.choice(columns)})


TABLES_TO_WRITE = [
    repeated_text,
    repeated_texts_in_a_row,
    long_cells,
    nested_cells,
    many_columns,
    odd_types,
]
