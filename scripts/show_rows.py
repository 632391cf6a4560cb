"""Show rows as they are trained: text by token, the tokens that count in the loss, truncation.

    python scripts/show_rows.py output/tokens/sft/mine -n 3
    python scripts/show_rows.py output/tokens/dpo/mine --row 17 --split eval --page rows.html

In a terminal, tokens that count in the loss are green and special tokens have a frame; elsewhere,
they are in brackets: ⟦loss⟧ and ⟪special⟫.
"""

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from snakechat.data.ragged_arrays import read_statistics
from snakechat.pages.page import Page, Section, Tokens, write_page
from snakechat.pages.rows import row_reader, row_tables
from snakechat.workflow.errors import InputError, one_line_errors, tool_parser
from snakechat.workflow.manifest import MANIFEST, read_manifest
from snakechat.workflow.printable import printable_text

# Start and end of tokens that count in the loss, and of special tokens.
COLOURS = ("\x1b[32m", "\x1b[0m"), ("\x1b[7m", "\x1b[27m")
BRACKETS = ("⟦", "⟧"), ("⟪", "⟫")


@one_line_errors()
def main() -> None:
    parser = tool_parser(__doc__)
    parser.add_argument("folder", type=Path, help="a tokenized phase: output/tokens/STAGE/NAME")
    parser.add_argument("-n", type=int, default=3, help="number of rows; default: 3")
    parser.add_argument("--row", type=int, default=0, help="first row, from 0; default: 0")
    parser.add_argument("--split", choices=("train", "eval"), default="train")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write an HTML page instead")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    manifest = read_manifest(folder / MANIFEST)
    tokenizer = manifest and manifest["inputs"].get("tokenizer")
    if not manifest or not tokenizer:
        raise InputError(f"{folder} is not a tokenized phase, such as output/tokens/sft/NAME")
    train_on = manifest["spec"]["settings"].get("train_on")
    # Both are STORE/RULE/KEY.
    tokenizer_folder = folder.resolve().parents[1] / tokenizer["result"]
    read_row = row_reader(folder, arguments.split, tokenizer_folder, train_on == "all_tokens")
    stats = read_statistics(folder, arguments.split)
    numbers = range(arguments.row, min(arguments.row + arguments.n, stats["rows"]))
    if arguments.row < 0 or not numbers:
        parser.error(f"{folder} has the {arguments.split} rows 0 to {stats['rows'] - 1}")
    summary = f"{stats['rows']:,} rows" + (f"; train_on: {train_on}" if train_on else "")
    for kind in ("truncated", "dropped"):
        counts = [f"{count:,} {why}" for why, count in stats[kind].items()]
        summary += f"; {kind}: {', '.join(counts) or 'none'}"
    if arguments.page:
        section = Section(summary, tables=row_tables(read_row, numbers))
        write_page(arguments.page, "en", Page("Rows as they are trained", str(folder), [section]))
        return
    print(f"{arguments.split}: {summary}")
    for number in numbers:
        print(f"\nrow {number}")
        for name, tokens in read_row(number).items():
            print(f"{name}{f' ({tokens.kept})' if tokens.kept else ''}:")
            print("".join(marked(tokens, COLOURS if sys.stdout.isatty() else BRACKETS)))


def marked(tokens: Tokens, marks: tuple[tuple[str, str], ...]) -> Iterator[str]:
    """Yield the text of tokens with marks around those that count in the loss or are special."""
    (loss, no_loss), (special, no_special) = marks
    for counts, run in groupby(tokens.tokens, lambda token: token.counts):
        yield loss if counts else ""
        for each in run:
            text = printable_text(each.text)
            yield f"{special}{text}{no_special}" if each.is_special else text
        yield no_loss if counts else ""


if __name__ == "__main__":
    main()
