"""The bound of rows of source files: what exceeds it is a bad row.

The rows of a dataset come from strangers. The bound keeps a hostile file from exhausting the memory
of an import; real rows are far below it.
"""

from snakechat.data.cells import BadRow

# Bytes of a line, of an item of an array, of a cell of csv, of the cells of a row of a table. A row
# of JSON takes up to 30 times its length in memory.
MAX_ROW_BYTES = 16 << 20


def too_long() -> BadRow:
    """Return the bad row in place of one with more than MAX_ROW_BYTES."""
    return BadRow(f"longer than {MAX_ROW_BYTES:,} bytes, the limit for a row")
