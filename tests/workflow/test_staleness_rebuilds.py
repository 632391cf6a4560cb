"""Staleness through several edits and builds: undone edits, failed jobs, missing results."""

from support.staleness import (
    IMPORTED,
    MINE,
    STUB,
    STUB_TARGETS,
    TARGETS,
    TINY,
    Row,
    backwards,
    code,
    edit_a_row,
    fresh,
    nested,
    pin,
    put_the_clock_ahead,
    setting,
    stale,
    stub_config,
    touch_everything,
    write_config,
    write_stub_config,
)


def test_edits_that_are_undone_leave_nothing_behind(copy):
    edits = (
        Row(setting("rlhf.recipes.tiny.gamma", 0.5), stale("train_rlhf")),
        Row(setting("seed", 1235), stale("import_dataset")),
        Row(setting("split.weights", {"sft": 4, "reward": 2}), stale("split_dataset")),
        code("snakechat/algorithms/policy_gradient.py"),
        code("snakechat/workflow/job.py"),
        pin("peft"),
        Row(edit_a_row, IMPORTED, (MINE,)),
        fresh(touch_everything),
    )
    before = {path: path.read_bytes() for path in sources_of(copy.folder)}
    for row in edits:
        row.edit(copy.folder)
        assert copy.planned(*row.targets) == row.rules
        for path, content in before.items():
            path.write_bytes(content)
    assert copy.planned(*TARGETS) == set()


def sources_of(folder):
    """Return the files of a tree that are not results."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [p for p in files if p.relative_to(folder).parts[0] not in ("output", ".snakemake")]


def test_an_edit_is_noticed_although_the_clock_was_ahead(copy):
    put_the_clock_ahead(copy.folder)
    setting("rlhf.recipes.tiny.gae_lambda", 0.9)(copy.folder)
    assert copy.planned(*TINY) == stale("train_rlhf")
    write_config(copy.folder)
    assert copy.planned(*TARGETS) == set()


FULL_DISK = STUB.replace("for page", 'raise OSError(28, "No space left on device")\n    for page')


def run_records(workflow):
    """Return the record of each run that made a result."""
    return {path: path.read_text() for path in (workflow.folder / "output").rglob("run.json")}


def test_actor_and_reward_model_swapped_are_stale(stubs):
    assert stubs.planned(*STUB_TARGETS) == set()
    swapped = {"actor": "sft/other", "reward": "reward/tiny"}
    write_stub_config(stubs.folder, stub_config(nested("rlhf.recipes.tiny", swapped)))
    assert stubs.planned(*STUB_TARGETS) == stale("train_rlhf")


def test_order_of_recipes_does_not_matter(stubs):
    write_stub_config(stubs.folder, backwards(stub_config()))
    assert stubs.planned(*STUB_TARGETS) == set()


def test_an_earlier_version_is_linked_after_its_edit_is_undone(stubs):
    before = (stubs.folder / "output/rlhf/tiny").resolve()
    write_stub_config(stubs.folder, stub_config(nested("rlhf.recipes.tiny.gamma", 0.9)))
    assert stubs.planned(*TINY) == stale("train_rlhf")
    stubs.build(*TINY)
    assert stubs.planned(*TINY) == set()
    assert (stubs.folder / "output/rlhf/tiny").resolve() != before
    write_stub_config(stubs.folder, stub_config())
    assert stubs.planned(*TINY) == set()
    stubs.build(*TINY)
    assert (stubs.folder / "output/rlhf/tiny").resolve() == before


def test_a_reward_function_is_code_of_the_rules_that_run_it(stubs):
    path = stubs.folder / "rewards/shop.py"
    before = path.read_text()
    path.write_text(f"# A comment.\n{before}")
    assert stubs.planned(*TINY) == set()
    path.write_text(f"{before}\nEDITED = True\n")
    assert stubs.planned(*TINY) == stale("train_rlhf")
    output = stubs.run("python", "scripts/explain.py", "output/rlhf/tiny").stdout
    assert "train_rlhf tiny is stale: rewards/shop.py changed\n" in output
    # A module that nothing else uses.
    (stubs.folder / "scripts/snakechat/mine.py").write_text("ONE = 1\n")
    path.write_text(f"from snakechat.mine import ONE\n{before}")
    stubs.build(*TINY)
    assert stubs.planned(*TINY) == set()
    (stubs.folder / "scripts/snakechat/mine.py").write_text("ONE = 2\n")
    assert stubs.planned(*TINY) == stale("train_rlhf")


def test_a_failed_job_leaves_downstream_results_stale_and_loses_nothing(stubs):
    program = stubs.folder / "scripts/train_sft.py"
    before = run_records(stubs)
    program.write_text(FULL_DISK)
    process = stubs.snakemake(*TINY, "--cores", "2")
    assert process.returncode != 0
    assert "error: No space left" in process.stdout and "Traceback" not in process.stdout
    assert stubs.planned(*TINY) == stale("train_sft")
    # The edit is undone and the old result exists: it is reused, not rebuilt.
    program.write_text(STUB)
    stubs.build(*TINY)
    assert run_records(stubs) == before
    assert stubs.planned(*TINY) == set()


def test_times_of_files_do_not_matter_behind_a_missing_result(stubs):
    # Snakemake looks through a missing result, and would compare the times of what is behind it.
    (stubs.folder / "output/sft/tiny.manifest.json").unlink()
    planned = stubs.planned(*STUB_TARGETS)
    for path in ("output/tokens/sft/tiny.manifest.json", "output/data/toy.manifest.json"):
        (stubs.folder / path).touch()
    assert stubs.planned(*STUB_TARGETS) == planned
