"""Run a program, and record what it gets from the modules that no code digest counts.

    traced_program.py RECORD PROGRAM --spec SPEC

It prepares the job and publishes its result as scripts/launch.py does, without its limits.
Writes a JSON list of the functions of WITHOUT_EFFECT that returned a value to counted code of ours.
"""

import json
import runpy
import sys
import threading
from pathlib import Path

_, record, program, _, spec = sys.argv
SCRIPTS = Path(program).resolve().parent
sys.argv = sys.argv[2:]
sys.path.insert(0, str(SCRIPTS))

from snakechat.workflow.code_digests import WITHOUT_EFFECT  # noqa: E402
from snakechat.workflow.processes import SERIAL, RunOptions  # noqa: E402
from snakechat.workflow.publishing import prepare, publish_result  # noqa: E402

UNCOUNTED = {str(SCRIPTS / name) for name in WITHOUT_EFFECT}
OURS = f"{SCRIPTS}/"
found = set()


def trace(frame, event, value):
    """Record a function that returns a value to counted code."""
    if event != "return" or value is None or frame.f_code.co_filename not in UNCOUNTED:
        return
    caller = frame.f_back
    if caller is None or caller.f_code.co_filename in UNCOUNTED:
        return
    # A call at import makes a class or a constant, which counts where it is used.
    if caller.f_code.co_filename.startswith(OURS) and frame.f_code.co_name != "<module>":
        module = Path(frame.f_code.co_filename).stem
        found.add(f"{module}.{frame.f_code.co_qualname}")


job = prepare(spec, program, SERIAL, RunOptions(hermetic="off"))
threading.setprofile(trace)
sys.setprofile(trace)
try:
    runpy.run_path(program, run_name="__main__")
finally:
    sys.setprofile(None)
    Path(record).write_text(json.dumps(sorted(found)))
publish_result(job, 0.0)
