"""Watch a training in the terminal: curves, time left, jobs, GPUs and responses.

    python scripts/watch.py output/rlhf/1.3b
    python scripts/watch.py output/rlhf/1.3b --once

Start it before, during or after the training, in another terminal or over SSH. It ends with the
training and the jobs after it, or by Ctrl-C, and neither stops nor changes anything. If standard
output is not a terminal, it prints one frame, as with --once.
"""

import argparse
import io
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from snakechat.reporting.training_frame import Frame
from snakechat.reporting.watched_training import WatchedTraining
from snakechat.workflow.errors import InputError

# Seconds between two frames.
INTERVAL = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, help="output/STAGE/RECIPE")
    parser.add_argument("--once", action="store_true", help="print one frame")
    arguments = parser.parse_args()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Terminals without Unicode.
        sys.stdout.reconfigure(errors="replace")
    console = Console()
    try:
        training = WatchedTraining(arguments.result)
        view = training.look()
        if console.is_terminal and not arguments.once:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while not view.has_ended:
                    live.update(Frame(view, console.height), refresh=True)
                    time.sleep(INTERVAL)
                    view = training.look()
        console.print(Frame(view))
    except InputError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
