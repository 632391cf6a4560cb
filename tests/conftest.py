"""Snakemake as users run it, tiny models, and builds that many tests share."""

import contextlib
import fcntl
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from snakechat.config.recipes import STAGES
from snakechat.workflow.job import PREPARED, STATES
from snakechat.workflow.manifest import without_names
from snakechat.workflow.processes import FORWARDED, SERIAL
from snakechat.workflow.publishing import LIMITS
from support.program_forks import start_server

# Until pytest_collection_finish: the passes over what the imports make take a third of their time.
gc.disable()
# Before torch is imported. Test processes and their builds share the cores: with several threads,
# each operation would wait until all of them have had one.
os.environ["OMP_NUM_THREADS"] = "1"
# Programs print as they do for users: with it, output would always be in order.
os.environ.pop("PYTHONUNBUFFERED", None)

ROOT = Path(__file__).resolve().parent.parent
# Runs programs as forks: support/program_forks.py.
PYTHON = ROOT / "tests/bin/python"

# The files of a checkout that a build reads.
SOURCES = ("Snakefile", "config.yaml", "config", "requirements.txt", "requirements-torch.txt")
SOURCES += ("rules", "scripts", "envs", "rewards", "prompts", "profiles", "slurm")

# The rules of paths that users ask for, and the last line of a dry run.
NO_COMMAND = {*STAGES, "report", "result_folder", "result_file", "total"}

# Of folders in memory: a tree of a build has 15 MB, and a worker has two at a time.
SCRATCH_BYTES = 1 << 30

# The config of a tiny language model.
INIT = {
    "model_type": "opt",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "num_attention_heads": 2,
    "ffn_dim": 64,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "init_std": 0.06,
}

SEQUENCES = [[0, 9, 8, 7, 6, 5, 40], [0, 21, 22, 2], [0, 30, 31, 32, 33, 2]]


def pytest_addoption(parser):
    parser.addoption(
        "--kills",
        type=int,
        default=2,
        help="kills of a training (test_kill.py)",
    )


def pytest_configure(config):
    """Start the server of forks for all workers, in the process that starts them."""
    if not hasattr(config, "workerinput"):
        os.environ |= start_server()


def pytest_collection_finish(session):
    """Collect garbage from now on, without passes over what the imports made."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def process_state():
    """Restore the handlers that a training in the process of the test replaces, and the variables
    of the launcher.

    A training that was stopped ignores further signals, and so would the programs that later tests
    start.
    """
    before = {number: signal.getsignal(number) for number in FORWARDED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    for name in (PREPARED, STATES, LIMITS):
        os.environ.pop(name, None)


class Workflow:
    """A copy of the sources with its own output folder, in which Snakemake runs."""

    def __init__(self, folder, *options):
        self.folder = folder
        self.options = options
        self.environment = {}
        # A user's command gets a real interpreter, although programs run in forks of one process.
        self.python = PYTHON

    def snakemake(self, *arguments):
        """Run Snakemake with the workflow's options, as `run` runs a command."""
        program = Path(sys.executable).with_name("snakemake")
        return self.run(self.python, program, *arguments, *self.options)

    def run(self, *command):
        """Run a command; return the finished process with its output as text."""
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.variables(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def variables(self):
        """Return the environment of a command, in which `python` runs programs as forks."""
        folders = PYTHON.parent, Path(sys.executable).parent, os.environ["PATH"]
        path = os.pathsep.join(map(str, folders))
        return {**os.environ, **self.environment, "PATH": path}

    def build(self, *targets):
        """Build targets on two cores; a failure shows the output of Snakemake."""
        process = self.snakemake(*targets, "--cores", "2")
        assert process.returncode == 0, process.stdout[-5000:]
        return process.stdout

    def copy(self, folder):
        """Return a copy of the workflow and its results in another folder."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        # With the hard links between results and their cache, which copytree would break.
        subprocess.run(["cp", "-a", self.folder, folder], check=True)
        return Workflow(folder, *self.options)

    def spec_of(self, result):
        """Return the spec that a result was made from, as its job read it."""
        recorded = json.loads((self.folder / f"{result}.manifest.json").read_text())["spec"]
        paths = (self.folder / "output/specs" / recorded["rule"]).rglob("*.json")
        specs = (json.loads(path.read_text()) for path in paths)
        return next(s for s in specs if s["path"] == result and without_names(s) == recorded)

    def planned(self, *targets):
        """Return the rules that a dry run plans for targets, or for the tiny recipe.

        Without those that have no command.
        """
        process = self.snakemake(*(targets or ["output/rlhf/tiny"]), "-n")
        assert process.returncode == 0, process.stdout
        if "Nothing to be done" in process.stdout:
            return set()
        table = re.search(r"Job stats:\n(.*?)\n\n", process.stdout, re.DOTALL).group(1)
        return {line.split()[0] for line in table.splitlines()[2:]} - NO_COMMAND


@contextlib.contextmanager
def edited(path, *replacements):
    """Replace texts in a file for the duration of a context."""
    before = path.read_text()
    after = before
    for old, new in replacements:
        assert old in after, f"{old!r} is not in {path}"
        after = after.replace(old, new, 1)
    path.write_text(after)
    try:
        yield
    finally:
        path.write_text(before)


def copy_sources(folder):
    """Copy the files that a build reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)


@pytest.fixture(scope="session")
def tokenizer():
    """A tokenizer of 300 tokens."""
    # Imported here, because most tests of the workflow need no torch.
    from support.family_tokenizers import toy

    return toy()


@pytest.fixture
def model(tokenizer):
    """A language model with random weights for that tokenizer."""
    from snakechat.modeling.models import make_causal

    return make_causal(INIT, tokenizer, 1)


@pytest.fixture
def folder(model, tokenizer, tmp_path):
    """The model, saved."""
    from snakechat.modeling.saving import save_model

    save_model(model, tokenizer, tmp_path / "causal")
    return tmp_path / "causal"


@pytest.fixture
def scorer_folder(folder, tokenizer, tmp_path):
    """A reward model that starts from it, saved."""
    import torch

    from snakechat.modeling.loading import load_scorer
    from snakechat.modeling.saving import save_model

    torch.manual_seed(3)
    scorer = load_scorer(folder, "fp32", tokenizer, new_head=True)
    save_model(scorer, tokenizer, tmp_path / "scorer")
    return tmp_path / "scorer"


@pytest.fixture(scope="module")
def group():
    """The device of a process group of one process on the CPU, which engines need.

    The environment that the group sets is restored after the module.
    """
    from snakechat.training.placed_models import init_process_group

    before = dict(os.environ)
    yield init_process_group(SERIAL)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def fp16_on_cpu(monkeypatch):
    """A CPU on which DeepSpeed also trains in fp16, slowly."""
    import torch
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    supported = [torch.float32, torch.bfloat16, torch.float16]
    monkeypatch.setattr(get_accelerator(), "supported_dtypes", lambda: supported)


@pytest.fixture
def sources(tmp_path):
    """A workflow without any output."""
    copy_sources(tmp_path / "sources")
    return Workflow(tmp_path / "sources")


@pytest.fixture(scope="session")
def scratch(tmp_path_factory):
    """A folder for trees that are created and deleted by the hundred: in memory, if possible.

    ext4 creates files more slowly for minutes after others were deleted.
    """
    memory = Path("/dev/shm")
    if not memory.is_dir() or shutil.disk_usage(memory).free < SCRATCH_BYTES:
        memory = tmp_path_factory.getbasetemp()
    folder = Path(tempfile.mkdtemp(prefix="rows-", dir=memory))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def make_once(tmp_path_factory, worker_id):
    """A function that returns a folder which all workers share.

    The first worker that needs it makes it, by a function of the folder; the others wait.
    """
    shared = tmp_path_factory.getbasetemp()
    shared = shared if worker_id == "master" else shared.parent

    def folder_of(name, make):
        # A shell must not see what this name would do there.
        folder = shared / f'{name} it\'s a; $(touch X) "build" é'
        done = shared / f"{name}.done"
        with open(shared / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                # Left by a build that failed.
                shutil.rmtree(folder, ignore_errors=True)
                make(folder)
                done.touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def build_once(make_once, tmp_path_factory):
    """A function that returns a copy of a build, which is made once for all workers."""

    def build(name, options, *targets):
        def make(folder):
            copy_sources(folder)
            Workflow(folder, *options).build(*targets)

        folder = make_once(name, make)
        return Workflow(folder, *options).copy(tmp_path_factory.mktemp(name) / "work")

    return build


@pytest.fixture(scope="session")
def tiny(build_once):
    """The tiny recipe, as users build it, except for its judge, and with one thread for a job."""
    options = ("deployments={cpu: {threads: 1}}", "rlhf={recipes: {tiny: {judge: null}}}")
    return build_once("tiny", ("--config", *options), "output/rlhf/tiny")


@pytest.fixture(scope="session")
def quick(build_once):
    """The quick build. Tests that change it restore it."""
    options = ("--configfile", str(ROOT / "tests/configs/quick.yaml"))
    return build_once("quick", options, "output/rlhf/tiny", "output/dpo/tiny")


@pytest.fixture(scope="session")
def shared_data():
    """Real preference data, if it lies next to the checkout."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.exists():
        pytest.skip("needs the data in ../shared/data")
    return folder
