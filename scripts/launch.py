"""torchrun for the programs here: its options, and one line where something goes wrong.

    python scripts/launch.py --standalone --nproc-per-node 8 scripts/train_sft.py --spec ...

The processes say themselves what is wrong; torchrun would bury it under its own stack. Only of one
that was killed nothing is heard: that is told here.
"""

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

logging.disable(logging.ERROR)
try:
    run(parse_args(sys.argv[1:]))
except SignalException as stopped:
    sys.exit(128 + stopped.sigval)
except ChildFailedError as error:
    rank, failure = error.get_first_failure()
    if failure.exitcode > 0:
        sys.exit(failure.exitcode)
    name = signal.Signals(-failure.exitcode).name
    sys.exit(f"error: process {rank} of the job was ended by {name}")
