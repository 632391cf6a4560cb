"""Programs, and Snakemake, in forks of a process that has imported their libraries.

The imports of torch, DeepSpeed and transformers take longer than most jobs of the tests, and that
of Snakemake longer than a dry run; the tests start hundreds of both. tests/bin/python, the first
`python` on the path of a build, sends its command line to this server, which forks. The fork has
the caller's files, folder and environment, and imports the modules of the project itself. Signals
to the caller reach the fork.

    python tests/support/program_forks.py LISTENER

LISTENER is the number of an open socket. The server imports the libraries for its first caller, and
ends when its standard input is closed.
"""

import _imp
import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path

import numpy

# What programs import, as far as it takes more than some milliseconds.
LIBRARIES = (
    "datasets",
    "deepspeed",
    "matplotlib.pyplot",
    "peft",
    "pyarrow.parquet",
    "snakemake.cli",
    "snakemake_logger_plugin_rich",
    "torch.utils.tensorboard",
    "transformers.generation",
    "transformers.models.auto.modeling_auto",
    "transformers.models.opt.modeling_opt",
    "yte",
)
# Variables that libraries read once: with other values, programs run in plain Python.
READ_AT_IMPORT = ("DATASETS_", "HF_", "LANG", "LC_", "OMP_NUM_", "PYTHON", "TORCH", "TRANSFORMERS_")
# Except those that rules, scripts/launch.py and torchrun set for each program. The server has UTF-8
# too, and a fork has the path of its program.
OF_LAUNCHERS = ("PYTHONSAFEPATH", "PYTHONUTF8", "TORCHELASTIC_", "TORCH_CPP_", "TORCH_NCCL_")
# Set by torch in a process that compiles, such as the process of other tests.
OF_COMPILER = ("TORCHINDUCTOR_CACHE_DIR",)


def start_server():
    """Start a server that runs until the tests end; return the variables that programs need."""
    # A process that forks must not have used a GPU.
    if Path("/dev/nvidiactl").exists():
        return {}
    folder = tempfile.mkdtemp(prefix="forks-")
    address = f"{folder}/socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        server = subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            start_new_session=True,
            env={**os.environ, "PYTHONUTF8": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )

    def stop():
        server.communicate()
        shutil.rmtree(folder)

    atexit.register(stop)
    return {"PROGRAM_FORKS": address}


def imported_with(environment):
    """Return the variables that the import of the libraries depends on."""
    # scripts/launch.py names the default.
    cache = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    environment = {"HF_HOME": f"{cache}/huggingface", **environment}
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_IMPORT) and not name.startswith((*OF_LAUNCHERS, *OF_COMPILER))
    }


def compile_once(folder):
    """Compile the modules of a folder, so that forks which import their copies need not."""
    compile_source = SourceFileLoader.source_to_code
    sources = {path.read_bytes(): path for path in folder.rglob("*.py")}
    compiled = {source: compile(source, path, "exec") for source, path in sources.items()}

    def source_to_code(loader, source, path, **options):
        if source not in compiled:
            return compile_source(loader, source, path, **options)
        # As Python does where the file of compiled code was moved.
        _imp._fix_co_filename(compiled[source], path)
        return compiled[source]

    SourceFileLoader.source_to_code = source_to_code


def serve(listener, variables):
    """Fork for each caller with these variables; return in the forks alone, with the request."""
    # It waits for none of them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        caller, _ = listener.accept()
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return accept(caller, variables)
        caller.close()
    os._exit(0)


def accept(caller, variables):
    """Return the request of a caller in a fork. Supervise the fork here: this does not return.

    Forwards signals of the caller to the fork, and the exit code of the fork to the caller.
    """
    _, files, _, _ = socket.recv_fds(caller, 1, 3)
    with caller.makefile("rb", buffering=0) as lines:
        request = json.loads(lines.readline())
    # Snakemake itself does not use the libraries that these variables are for.
    is_snakemake = request["arguments"][0].endswith("/snakemake")
    accepted = is_snakemake or imported_with(request["environment"]) == variables
    caller.sendall(json.dumps(accepted).encode() + b"\n")
    if not accepted:
        os._exit(0)
    program = os.fork()
    if not program:
        for number, file in enumerate(files):
            os.dup2(file, number)
        # Of the server and of the caller.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        return request
    for file in files:
        os.close(file)

    def forward():
        while number := caller.recv(1):
            os.kill(program, number[0])
        # The caller was killed, or the program has ended.
        with contextlib.suppress(ProcessLookupError):
            os.kill(program, signal.SIGKILL)

    threading.Thread(target=forward, daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with contextlib.suppress(ConnectionError):
        caller.sendall(json.dumps(code).encode() + b"\n")
    os._exit(0)


def become(request):
    """Take over the folder, environment and arguments of a caller; return its program."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ |= request["environment"]
    program = Path(request["arguments"][0])
    sys.argv = request["arguments"]
    sys.path[0] = str(program.resolve().parent)
    sys.path += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    # So that the programs that it starts are forks too. A job with limits cannot reach the server.
    if program.name != "confined.py":
        sys.executable = str(Path(__file__).resolve().parents[1] / "bin/python")
    buffering = 1 if os.isatty(1) else -1
    sys.stdout = open(1, "w", buffering, closefd=False)  # noqa: SIM115
    # Otherwise all forks would draw the same numbers.
    random.seed()
    numpy.random.seed()
    return program


def run(program):
    """Run a program as the main module, and exit with its code.

    Python itself would end by deleting all objects, and copy the memory of those that forks share:
    that takes longer than many programs.
    """
    main = types.ModuleType("__main__")
    main.__file__ = str(program)
    sys.modules["__main__"] = main
    code = 0
    try:
        exec(compile(program.read_bytes(), program, "exec"), main.__dict__)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    # Waits for threads, as Python does before it exits.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    variables, listener = imported_with(os.environ), socket.socket(fileno=int(sys.argv[1]))
    if listener in select.select([listener, sys.stdin], [], [])[0]:
        gc.disable()
        for library in LIBRARIES:
            importlib.import_module(library)
        compile_once(Path(__file__).resolve().parents[2] / "scripts")
        # Searches for plugins, once.
        sys.modules["snakemake.cli"].get_argument_parser()
        # Collections in forks would visit, and copy, what they share.
        gc.freeze()
        gc.enable()
        run(become(serve(listener, variables)))
