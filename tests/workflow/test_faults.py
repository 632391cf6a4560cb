"""Programs that are killed or find a broken disk: nothing is lost, and they end as if undisturbed.

Each program of the build replaces an older result, with a cache. A fault occurs at one of its
changes of files; then the same command runs again without one. With `--kills N`, each fault occurs
at N changes of each program, spread over all of them.
"""

import json
import random
import shutil
import signal
import subprocess
from contextlib import chdir

import pytest

from conftest import ENVIRONMENT
from snakechat.workflow.digests import digest
from snakechat.workflow.manifest import read_manifest, result_files
from snakechat.workflow.result_cache import ResultCache
from snakechat.workflow.spec_files import spec_path, write_spec
from support import llm_endpoint
from support.faults import ERRORS, compile_faults, fault
from support.program_forks import ProgramForks
from support.staleness import RULES, program_of

pytestmark = pytest.mark.slow

# Rules that run the program of another rule with less to do.
REPEATED = {"tokenize_sft", "tokenize_dpo", "tokenize_rlhf", "tokenize_generations"}
# Killed in test_kill.py, or too slow: only with --kills.
LONG = {"train_sft", "train_reward", "train_dpo", "train_rlhf", "compare_zero"}
# What a run leaves besides results.
TRACES = ("logs", "specs", "state", "code", "cache", ".cache", ".replies")
# Rules whose programs write by pyarrow, numpy, tokenizers, safetensors and Python.
WRITERS = {"import_dataset", "tokenize_reward", "init_model", "write_record"}


class Program:
    """The program of a rule, and the result that it makes in a tree."""

    def __init__(self, tree, rule):
        self.tree, self.rule = tree, rule
        self.output = tree.folder / "output"
        manifests = (read_manifest(path) for path in self.output.rglob("*.manifest.json"))
        specs = [manifest["spec"] for manifest in manifests if manifest["spec"]["rule"] == rule]
        # Rather a tiny one than another one, and none from the hub.
        self.spec = min(specs, key=lambda spec: ("hub" in spec["settings"], len(spec["name"])))
        self.target = tree.folder / self.spec["path"]
        record = json.loads(self.beside("run").read_text())
        self.cache = ResultCache(self.output / "cache", None)
        places = {"cache": str(self.cache.folder), "cache_max_bytes": None}
        self.placement = {**record["placement"], **places}
        self.others, self.expected = self.other_files(), self.contents()
        self.old = tree.folder / "old" / rule

    def beside(self, kind):
        """Return the path of NAME.KIND.json next to the result."""
        return self.target.with_name(f"{self.target.name}.{kind}.json")

    def own_files(self):
        """Return the files and folders next to the result whose names begin with its name."""
        name = self.target.name
        own = (f"{name}.", f".{name}.")
        siblings = self.target.parent.iterdir()
        return {path for path in siblings if path.name == name or path.name.startswith(own)}

    def other_files(self):
        """Return the identities of the files of all other results."""
        own = self.own_files()
        return {
            path: (path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ino)
            for folder in self.output.iterdir()
            if folder.name not in TRACES
            for path in folder.rglob("*")
            if path.is_file() and own.isdisjoint((path, *path.parents))
        }

    def contents(self):
        """Return the bytes of the result and of its manifest."""
        files = [self.beside("manifest"), *self.target.rglob("*")]
        return {
            path.relative_to(self.target.parent): path.read_bytes()
            for path in files
            if path.is_file() and path.name != ".snakemake_timestamp"
        }

    def complete(self):
        """Return the specs of the complete results, published or not."""
        own = (self.target.name, f".{self.target.name}.tmp", f".{self.target.name}.old1")
        specs = []
        for name in own:
            folder = self.target.with_name(name)
            manifest = read_manifest(folder / "manifest.json")
            # Replaced results are deleted file by file.
            if manifest and manifest["files"] == result_files(folder):
                specs.append(digest(manifest["spec"]))
        return specs

    def prepare(self):
        """Replace the result by an older one of other settings, and delete what a run left."""
        if not self.old.exists():
            self.old.parent.mkdir(exist_ok=True)
            shutil.copytree(self.target, self.old)
            (self.old / "older").write_text("older")
            manifest = read_manifest(self.old / "manifest.json")
            manifest["spec"]["settings"]["older"] = True
            manifest["files"] = result_files(self.old)
            (self.old / "manifest.json").write_text(json.dumps(manifest))
        for path in self.target.parent.glob(f".{self.target.name}.*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for folder in ("cache", "state"):
            shutil.rmtree(self.output / folder, ignore_errors=True)
        shutil.rmtree(self.target, ignore_errors=True)
        shutil.copytree(self.old, self.target)
        # As Snakemake does before it runs a job: see Staleness.
        shutil.copy(self.old / "manifest.json", self.beside("manifest"))
        with chdir(self.tree.folder):
            write_spec(self.spec)

    def run(self, launcher=(), **named):
        """Run the program, by a launcher or not, with a fault or not; return the process."""
        spec = spec_path(self.rule, self.spec["name"], digest(self.spec))
        words = ("--spec", str(spec), "--placement", json.dumps(self.placement))
        environment = self.tree.environment
        if named:
            self.tree.environment = environment | fault(self.output, **named)
        try:
            program = f"scripts/{program_of(self.rule).name}"
            return self.tree.run("python", *launcher, program, *words)
        finally:
            self.tree.environment = environment

    def check_nothing_is_lost(self):
        """Check that the old or the new result is complete, and all others are as they were."""
        assert self.complete(), "both results are lost"
        assert self.other_files() == self.others
        assert self.cache.verify() == []

    def check_finished(self):
        """Check that the result is the expected one, and that nothing else is left."""
        assert self.contents() == self.expected
        left = {path.name for path in self.target.parent.glob(f".{self.target.name}.*")}
        assert left == {f".{self.target.name}.lock"}
        assert not (self.output / "state" / self.rule / self.spec["name"]).exists()
        self.check_nothing_is_lost()

    def run_again(self):
        """Run the same command without a fault."""
        process = self.run()
        assert process.returncode == 0, process.stdout
        self.check_finished()
        assert [entry.path for entry in self.cache.entries()] == [self.spec["path"]]


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    """The environment of programs in which faults occur."""
    forks = ProgramForks(ENVIRONMENT, preload=compile_faults(tmp_path_factory.mktemp("faults")))
    if not forks.environment:
        forks.stop()
        pytest.skip("needs a machine without a GPU")
    yield forks.environment
    forks.stop()


@pytest.fixture(scope="module")
def tree(built, scratch, forks):
    """A copy of the build."""
    tree = built.copy(scratch / "faults")
    tree.environment = forks
    yield tree
    shutil.rmtree(tree.folder)


@pytest.fixture
def program(request, tree):
    """The program of a rule; afterwards, its result and its run record are as before."""
    program = Program(tree, request.param)
    kept = tree.folder / "kept"
    kept.mkdir()
    subprocess.run(["cp", "-a", *program.own_files(), kept], check=True)
    with llm_endpoint.serving() as endpoint:
        endpoint.replies = [llm_endpoint.prefer_first_in_alphabet]
        for judge in program.placement.get("llm_judges", {}).values():
            judge["url"] = endpoint.url
        yield program
    for path in program.own_files():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    subprocess.run(["cp", "-a", *kept.iterdir(), program.target.parent], check=True)
    shutil.rmtree(kept)


def places(program, kind, kills):
    """Return where a fault occurs: named arguments of `fault`.

    By default, that is once: kills in publishing, where a program need not run twice, and errors of
    the disk anywhere.
    """
    draw = random.Random(f"{program.rule} {kind}")
    if kills > 2:
        log = program.tree.folder / f"{program.rule}.log"
        log.unlink(missing_ok=True)
        program.prepare()
        assert program.run(log=log).returncode == 0
        changes = log.read_text().count("\n")
        kills = min(kills, changes)
        print(f"{program.rule}: {kind} at {kills} of {changes} changes")
        return [{"at": 1 + number * changes // kills} for number in range(kills)]
    if kind == "kill":
        return [{"at": draw.randint(1, 25), "after": f".{program.target.name}.run.json"}]
    return [{"at": draw.randint(1, 25)}]


def on_programs(rules):
    """Parametrize a test with the programs of rules."""
    return pytest.mark.parametrize("program", sorted(rules), indirect=True)


@on_programs(RULES - REPEATED)
def test_a_killed_program_loses_nothing_and_makes_the_same_bytes(program, kills):
    if program.rule in LONG and kills <= 2:
        pytest.skip("only with --kills")
    for place in places(program, "kill", kills):
        program.prepare()
        process = program.run(kind="kill", **place)
        assert process.returncode in (-signal.SIGKILL, 0, 1), process.stdout
        program.check_nothing_is_lost()
        program.run_again()


@on_programs(RULES - REPEATED)
@pytest.mark.parametrize("kind", ERRORS)
def test_a_disk_that_fails_is_one_line_and_loses_nothing(program, kind, kills):
    if program.rule not in WRITERS and kills <= 2:
        pytest.skip("only with --kills")
    for place in places(program, kind, kills):
        program.prepare()
        process = program.run(kind=kind, **place)
        if process.returncode == 0:
            # The fault hit what costs time only: the cache, or leftovers of earlier runs.
            assert program.contents() == program.expected
        else:
            lines = process.stdout.replace("\r", "\n").splitlines()
            [error] = [line for line in lines if line.startswith("error: ")]
            assert process.returncode == 1
            assert "Traceback" not in process.stdout, process.stdout[-3000:]
            assert ERRORS[kind] in error or "the disk is full or broken" in error, error
        program.check_nothing_is_lost()
        program.run_again()
