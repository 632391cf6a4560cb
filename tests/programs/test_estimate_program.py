"""What is told of a build before it starts: does it fit, what does it cost."""

import json

import pytest
from estimate import Line, total

from snakechat.data.tokens import RaggedWriter
from snakechat.planning.dry_run import PlannedJob
from snakechat.planning.estimates import GIB, GPUS
from snakechat.planning.workload import Plan

SETTINGS = {"max_length": 512, "epochs": 1, "dtype": "bf16", "lora_rank": 0, "train_base": "none"}
PLACEMENT = {
    "nodes": 1,
    "gpus_per_node": 1,
    "zero_stage": 0,
    "offload": "none",
    "activation_checkpointing": False,
    "micro_batch_tokens": 8192,
    "mem_mb": 64000,
}
DATA = {"hub": "Dahoas/rm-static"}
SPLIT = {"weights": {"sft": 2, "reward": 4, "rlhf": 4}, "max_rows": None}


def an_sft(
    model="facebook/opt-1.3b", data=DATA, settings=(), stale=True, folder="out", **placement
):
    """The Plan of an SFT recipe and the path of its training."""
    specs = {}

    def add(rule, settings, **inputs):
        entries = {
            key: {"rule": specs[path]["rule"], "name": specs[path]["name"], "path": path}
            for key, path in inputs.items()
        }
        path = f"{folder}/{rule}"
        specs[path] = {"rule": rule, "name": "a", "path": path, "settings": settings}
        specs[path]["inputs"] = entries
        return path

    base = add("fetch_model", {"hub": model})
    records = add("import_dataset", data)
    rows = add("split_dataset", SPLIT, records=records)
    settings = SETTINGS | dict(settings)
    blend = settings | {"datasets": [["a", 1]]}
    inputs = {"records.a": records, "rows.a": rows}
    tokens = add("tokenize_sft", blend, tokenizer=base, **inputs)
    path = add("train_sft", blend, model=base, tokens=tokens)
    jobs = {name: PlannedJob(spec, PLACEMENT | placement, "") for name, spec in specs.items()}
    return Plan(jobs, set(jobs) if stale else set()), path


def line_of(gpu="a100-80g", **named):
    plan, path = an_sft(**named)
    return Line(path, plan, GPUS[gpu])


# --- does it fit ----------------------------------------------------------------------------


def test_what_fits_is_not_warned_of():
    line = line_of(settings={"lora_rank": 128})
    assert line.warnings == []
    assert 2.6 * GIB < line.memory["weights"] < 2.8 * GIB
    assert sum(line.memory.values()) < 30 * GIB


@pytest.mark.parametrize(
    ("named", "knobs"),
    [
        ({"gpu": "v100-32g"}, ["micro_batch_tokens: 4096", "activation_checkpointing: true"]),
        ({"model": "facebook/opt-6.7b"}, ["zero_stage: 2, offload: optimizer", "lora_rank: 128"]),
        (
            {"model": "facebook/opt-13b", "gpus_per_node": 8},
            ["zero_stage: 3", "zero_stage: 2, offload: optimizer"],
        ),
    ],
)
def test_what_does_not_fit_is_told_with_settings_that_make_it_fit(named, knobs):
    line = line_of(**named)
    warning = line.warnings[0]
    size = f"does not fit: {sum(line.memory.values()) / GIB:,.1f} GiB at {line.moment}"
    assert warning.startswith(size)
    _, _, told = warning.partition("it would with ")
    for knob in knobs:
        assert knob in told.split(" | ")
        # As it is told, so it is.
        changes = dict(part.split(": ") for part in knob.split(", "))
        changes = {key: json.loads(v) if v[0] in "0123456789t" else v for key, v in changes.items()}
        settings = {key: changes.pop(key) for key in ("lora_rank",) if key in changes}
        changed = line_of(**{**named, **changes}, settings=settings)
        assert not [text for text in changed.warnings if "does not fit" in text]


def test_several_settings_together_are_told_where_none_is_enough():
    where = {"gpus_per_node": 8, "micro_batch_tokens": 16384}
    line = line_of(gpu="v100-32g", model="facebook/opt-13b", **where)
    _, _, told = line.warnings[0].partition("it would with all of ")
    for knob in ("activation_checkpointing: true", "zero_stage: 3", "offload: parameters"):
        assert knob in told.split(", ")


def test_what_no_setting_mends_is_told():
    line = line_of(model="facebook/opt-66b", gpus_per_node=8, nodes=8, settings={"lora_rank": 128})
    warning = line.warnings[0]
    assert "ZeRO 3 has all weights in each process" in warning
    assert warning.endswith("larger GPUs, or a smaller model")


def test_memory_of_the_node_is_told():
    line = line_of(model="facebook/opt-13b", gpus_per_node=8, zero_stage=3)
    # Eight processes load 12.85 B weights of two bytes.
    [warning] = [text for text in line.warnings if "own memory" in text]
    assert warning.startswith("191.5 GiB of each node's own memory, beside mem_mb: 64000")
    assert line_of(settings={"lora_rank": 128}).host < 3 * GIB


def test_a_job_on_a_cpu_has_the_memory_of_its_placement_and_no_hours():
    line = line_of(model="facebook/opt-125m", gpus_per_node=0, mem_mb=3000)
    assert "mem_mb has 2.9 GiB" in line.warnings[0]
    assert (line.gpus, line.seconds) == (0, None)
    assert line.flops > 0
    assert line_of(model="facebook/opt-125m", gpus_per_node=0).warnings == []


# --- what does it cost ----------------------------------------------------------------------


def test_hours_and_disk_by_hand():
    plan, path = an_sft()
    line = Line(path, plan, GPUS["a100-80g"])
    # A fifth of 76,256 rows, 256 tokens each; 6 operations a weight, 12 layers' width for each
    # token that is seen.
    tokens, weights = 0.2 * 76_256 * 256, 1_315_758_080
    flops = tokens * (6 * weights + 12 * 24 * 2048 * 256)
    assert line.flops == pytest.approx(flops)
    assert line.seconds == pytest.approx(flops / 312e12 / 0.4)
    assert line.disk == 2 * weights
    assert line.notes == [
        "assumed: a has as many rows as in 2023",
        "unknown until tokenize_sft a is there: tokens of a row; 256 assumed, half of the limit",
    ]
    lines = [Line(job, plan, GPUS["a100-80g"]) for job in plan.jobs]
    # The base model and the trained one; three states of twelve bytes a weight.
    assert total(lines) == (
        f"5 of 5 jobs are stale: {flops / 312e12 / 0.4 / 3600:.1f} GPU hours,"
        f" {4 * weights / GIB:.1f} GiB of disk for what is known of it, and up to"
        f" {36 * weights / GIB:.1f} GiB while a training saves its states"
    )


def test_rows_that_nobody_knows_have_no_hours_but_memory():
    plan, path = an_sft(data={"hub": "someone/something"})
    line = Line(path, plan, GPUS["h100"])
    assert line.flops is line.seconds is None
    assert line.memory["weights"] > 0
    assert line.notes[0] == "unknown until a is imported: how many rows it has"
    assert "0.0 GPU hours at least" in total([line])


def test_tokens_that_are_there_are_counted(tmp_path):
    plan, path = an_sft(folder=tmp_path)
    tokens = tmp_path / "tokenize_sft"
    tokens.mkdir()
    for field, lengths in (("prompt", (10, 30)), ("chosen", (20, 60))):
        with RaggedWriter(tokens, f"train.{field}", 300) as writer:
            writer.write([[1] * length for length in lengths])
    fresh = plan._replace(stale={path})
    line = Line(path, fresh, GPUS["h100"])
    assert line.flops == pytest.approx(120 * (6 * 1_315_758_080 + 12 * 24 * 2048 * 60))
    assert (line.work.largest.length, line.work.largest.lines) == (90, 8192 // 90)
    assert line.notes == []
    old = Line(path, plan, GPUS["h100"])
    assert old.notes == ["assumed: rows are as long as in tokenize_sft a as it was"]


def test_a_model_that_is_there_tells_its_shapes(tmp_path):
    plan, path = an_sft(model="someone/model", folder=tmp_path)
    line = Line(path, plan, GPUS["h100"])
    [warning] = line.warnings
    assert warning == (
        f"nothing tells the shapes of someone/model: fetch it first: {tmp_path}/fetch_model"
    )
    assert line.memory is None
    (tmp_path / "fetch_model").mkdir()
    shapes = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 32}
    (tmp_path / "fetch_model/config.json").write_text(json.dumps(shapes | {"n_positions": 16}))
    assert Line(path, plan, GPUS["h100"]).work.weights() == (2144, 2144)


# --- the program ----------------------------------------------------------------------------


def ask(workflow, *words):
    """What estimate.py prints, which must go well."""
    process = workflow.run("python", "scripts/estimate.py", *words)
    assert process.returncode == 0, process.stdout
    return process.stdout


def test_a_plan_of_a_fresh_tree(sources):
    jobs = json.loads(ask(sources, "output/rlhf/13b", "--json"))
    by_name = {job["job"]: job for job in jobs}
    assert all(job["stale"] for job in jobs)
    for name in ("train_sft 13b", "train_rlhf 13b"):
        assert by_name[name]["gpus"] == 8
        assert by_name[name]["seconds"] > 0
    # Generation has the whole actor in each process, beside its eighth.
    assert by_name["train_rlhf 13b"]["moment"] == "sampling"
    assert by_name["train_rlhf 13b"]["memory"]["cache"] > 3 * GIB
    assert by_name["draw_report 13b"]["memory"] is None
    assert not (sources.folder / "output/models").exists()


def test_a_plan_of_what_was_built_says_so(quick):
    told = ask(quick, "output/rlhf/tiny", "--", *quick.options)
    heading, _, *lines, last = told.splitlines()
    assert heading.startswith("on a100-80g: 80 GiB, 312 TFLOPS")
    assert all(" up to date " in line for line in lines)
    assert last.startswith(f"0 of {len(lines)} jobs are stale: 0.0 GPU hours, 0.0 MiB of disk")
    [training] = [line for line in lines if line.startswith("train_sft tiny")]
    # Of its manifest.
    manifest = json.loads((quick.folder / "output/sft/tiny.manifest.json").read_text())
    size = sum(facts["size"] for facts in manifest["files"].values())
    assert f"{size / 2**20:.1f} MiB" in training


def test_what_is_wrong_with_a_target_is_said_as_snakemake_says_it(sources):
    process = sources.run("python", "scripts/estimate.py", "output/sft/nothing")
    assert process.returncode == 1
    assert "sft.recipes has no 'nothing'" in process.stdout
