"""How the tools end where they cannot go on: one line, or none if nobody reads their output."""

import errno
import os
import subprocess
import sys

import pytest

from conftest import ROOT
from snakechat.workflow.errors import InputError, one_line_errors


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (InputError("row 1"), "error: row 1\n"),
        (
            OSError(errno.EACCES, "Permission denied", "output/a"),
            "error: Permission denied: output/a\n",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "error: No space left on device\n"),
    ],
)
def test_an_error_is_one_line(error, line, capsys):
    @one_line_errors(code=2)
    def main():
        raise error

    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("is_full", [False, True])
def test_output_that_cannot_be_written(is_full):
    program = (
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        "from snakechat.workflow.errors import one_line_errors\n"
        "@one_line_errors()\n"
        "def main():\n"
        "    print('line')\n"
        "    sys.exit(0)\n"
        "main()\n"
    )
    if is_full:
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, output = os.pipe()
        os.close(reader)
    process = subprocess.run(
        [sys.executable, "-c", program], stdout=output, stderr=subprocess.PIPE, text=True
    )
    os.close(output)
    assert process.returncode == 1
    assert process.stderr == ("error: No space left on device\n" if is_full else "")
