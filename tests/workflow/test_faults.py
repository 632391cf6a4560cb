"""Programs that are killed or find a broken disk: nothing is lost, and they end as if undisturbed.

Each program of the build makes a version of a result, with a shared store. A fault occurs at one of
its changes of files; then the same command runs again without one. With `--kills N`, each fault
occurs at N changes of each program, spread over all of them.
"""

import json
import random
import shutil
import signal
from contextlib import chdir

import pytest

from conftest import ENVIRONMENT
from snakechat.workflow.digests import digest
from snakechat.workflow.manifest import RUN_RECORD, read_manifest, result_files
from snakechat.workflow.spec_files import spec_path, write_spec
from snakechat.workflow.store import is_undamaged, link_result, store_key, stored_folders
from support import llm_endpoint
from support.cases import some
from support.faults import ERRORS, compile_faults, fault
from support.program_forks import ProgramForks
from support.staleness import RULES, program_of

pytestmark = pytest.mark.slow

# Rules that run the program of another rule with less to do.
REPEATED = {"tokenize_sft", "tokenize_dpo", "tokenize_rlhf", "tokenize_generations"}
# Rules whose programs write by pyarrow, numpy, tokenizers, safetensors and Python.
WRITERS = {"import_dataset", "tokenize_reward", "init_model", "check_gate"}
# All programs publish by the same code: `make test` kills these.
KILLED = {*WRITERS, "generate_responses", "evaluate_rlhf"}


class Program:
    """The program of a rule, and the result that it makes in a tree."""

    def __init__(self, tree, rule):
        self.tree, self.rule = tree, rule
        self.output, self.shared = tree.folder / "output", tree.folder / "shared"
        manifests = (read_manifest(path) for path in self.output.rglob("*.manifest.json"))
        specs = [manifest["spec"] for manifest in manifests if manifest["spec"]["rule"] == rule]
        # Rather a tiny one than another one, and none from the hub.
        self.spec = min(specs, key=lambda spec: ("hub" in spec["settings"], len(spec["name"])))
        self.target = tree.folder / self.spec["path"]
        self.stored = self.target.resolve()
        record = json.loads((self.stored / "run.json").read_text())
        self.placement = record["placement"]
        self.options = {**record["options"], "shared_store": str(self.shared)}
        self.others, self.expected = self.other_files(), self.contents()
        self.kept = tree.folder / "kept"

    def other_files(self):
        """Return the identities of the files of all other results."""
        return {
            path: (path.stat().st_size, path.stat().st_mtime_ns, path.stat().st_ino)
            for path in (self.output / "store").rglob("*")
            if path.is_file() and self.stored.parent not in path.parents
            if path.name != "collected"
        }

    def contents(self):
        """Return the bytes of the result."""
        unlisted = {".snakemake_timestamp", "README.md", RUN_RECORD}
        return {
            path.relative_to(self.target): path.read_bytes()
            for path in self.target.rglob("*")
            if path.is_file() and path.name not in unlisted
        }

    def prepare(self):
        """Have the path of the result lead to an older one, and delete what a run left."""
        for folder in (self.shared, self.output / "state", self.stored.parent):
            shutil.rmtree(folder, ignore_errors=True)
        self.shared.mkdir()
        manifest = read_manifest(self.kept / "manifest.json")
        manifest["spec"]["settings"]["older"] = True
        older = self.stored.with_name(store_key(manifest["spec"], manifest["inputs"]))
        shutil.copytree(self.kept, older)
        (older / "older").write_text("older")
        manifest["files"] = result_files(older)
        (older / "manifest.json").write_text(json.dumps(manifest))
        link_result(self.target, older)
        with chdir(self.tree.folder):
            write_spec(self.spec)

    def run(self, launcher=(), **named):
        """Run the program, by a launcher or not, with a fault or not; return the process."""
        spec = spec_path(self.rule, self.spec["name"], digest(self.spec))
        words = ["--spec", str(spec), "--placement", json.dumps(self.placement)]
        words += ["--options", json.dumps(self.options)]
        environment = self.tree.environment
        if named:
            self.tree.environment = environment | fault(self.output, **named)
        try:
            program = f"scripts/{program_of(self.rule).name}"
            return self.tree.run("python", *launcher, program, *words)
        finally:
            self.tree.environment = environment

    def check_nothing_is_lost(self):
        """Check that the path leads to the old or the new result, and the others are untouched."""
        assert is_undamaged(self.target.resolve())
        assert self.other_files() == self.others
        assert all(map(is_undamaged, stored_folders(self.shared)))

    def check_finished(self):
        """Check that the result is the expected one, and that nothing else is left."""
        assert self.contents() == self.expected
        left = {path.name for path in self.target.parent.glob(f".{self.target.name}.*")}
        assert left == {f".{self.target.name}.lock"}
        assert not list(self.stored.parent.glob(".*"))
        assert not (self.output / "state" / self.rule / self.spec["name"]).exists()
        self.check_nothing_is_lost()

    def run_again(self):
        """Run the same command without a fault."""
        process = self.run()
        assert process.returncode == 0, process.stdout
        self.check_finished()
        [shared] = stored_folders(self.shared)
        assert shared.name == self.stored.name


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
    """The program of a rule; afterwards, its result is as before."""
    program = Program(tree, request.param)
    # Links to the evaluation stay links.
    shutil.copytree(program.stored, program.kept, symlinks=True)
    with llm_endpoint.serving() as endpoint:
        endpoint.replies = [llm_endpoint.prefer_first_in_alphabet]
        for judge in program.options.get("llm_judges", {}).values():
            judge["url"] = endpoint.url
        yield program
    shutil.rmtree(program.stored.parent)
    program.stored.parent.mkdir(parents=True)
    program.kept.rename(program.stored)
    link_result(program.target, program.stored)


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
        return [{"at": draw.randint(1, 25), "after": "run.json"}]
    return [{"at": draw.randint(1, 25)}]


def on_programs(kept):
    """Parametrize a test with all programs; those of rules that are not kept are exhaustive."""
    return some(sorted(RULES - REPEATED), kept, "program", indirect=True)


@on_programs(KILLED)
def test_a_killed_program_loses_nothing_and_makes_the_same_bytes(program, kills):
    for place in places(program, "kill", kills):
        program.prepare()
        process = program.run(kind="kill", **place)
        assert process.returncode in (-signal.SIGKILL, 0, 1), process.stdout
        program.check_nothing_is_lost()
        program.run_again()


@on_programs(WRITERS)
@pytest.mark.parametrize("kind", ERRORS)
def test_a_disk_that_fails_is_one_line_and_loses_nothing(program, kind, kills):
    for place in places(program, kind, kills):
        program.prepare()
        process = program.run(kind=kind, **place)
        if process.returncode == 0:
            # The fault hit what costs time only: the shared store, or leftovers of earlier runs.
            assert program.contents() == program.expected
        else:
            lines = process.stdout.replace("\r", "\n").splitlines()
            [error] = [line for line in lines if line.startswith("error: ")]
            assert process.returncode == 1
            assert "Traceback" not in process.stdout, process.stdout[-3000:]
            assert ERRORS[kind] in error or "the disk is full or broken" in error, error
        program.check_nothing_is_lost()
        program.run_again()
