"""Say what a build will take before it starts: memory of each GPU, hours, disk.

    python scripts/plan.py output/rlhf/13b
    python scripts/plan.py output/rlhf/mine --gpu h100 -- --configfile mine.yaml

Jobs and their placement come from a dry run of Snakemake, which gets the options behind --. Nothing
is built, and only spec files are written. What is estimated and how: snakechat/planning/estimates.py.
"""

import argparse
import json
import os
import sys

from snakechat.planning import estimates as estimate
from snakechat.planning.changes import job_name
from snakechat.planning.dry_run import parse_arguments, dry_run, planned_jobs
from snakechat.planning.estimates import GIB, GPUS, PARTS
from snakechat.planning.workload import Plan, base_model_bytes, workload_of
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import manifest_path, read_manifest

COLUMNS = ("job", "state", "GPUs", "model", "trained")
COLUMNS += (*PARTS, "in all", "at", "disk", "PFLOP", "hours")
# What is tried where a job does not fit: the rank of DeepSpeed-Chat's adapters, GPUs of a node, and
# the fewest tokens of a pass that make sense.
ADAPTERS, NODE, FEWEST_TOKENS = 128, 8, 256
# When ZeRO 3 has a whole model in each process.
WHOLE_MOMENTS = ("loading", "sampling", "saving")
# States of a training that are there at a time: the last two, and the one that is written.
STATES = 3


def main():
    """Plan, estimate, tell."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-h] [--gpu GPU] [--json] [targets ...] [-- options of snakemake]",
    )
    parser.add_argument("targets", nargs="*", help="as for snakemake; without any, what was built")
    parser.add_argument("--gpu", choices=GPUS, default="a100-80g", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="bytes, operations, seconds as JSON")
    arguments, options = parse_arguments(parser, sys.argv[1:])
    gpu = GPUS[arguments.gpu]

    folder, stale = dry_run([*arguments.targets, *options])
    _, every = dry_run([*arguments.targets, *options, "--forceall"])
    os.chdir(folder)
    plan = Plan(planned_jobs(every), set(planned_jobs(stale)))
    lines = [Line(path, plan, gpu) for path in plan.jobs]

    if arguments.json:
        print(json.dumps([line.told() for line in lines], indent=1))
        return
    print(
        f"on {arguments.gpu}: {gpu.memory / GIB:.0f} GiB, {gpu.flops / 1e12:.0f} TFLOPS in 16 bits,"
        f" {gpu.bandwidth / 1e12:.2f} TB/s; assumed: {estimate.FLOPS_REACHED:.0%} of these TFLOPS,"
        f" {estimate.BANDWIDTH_REACHED:.0%} of this bandwidth"
    )
    print(table([COLUMNS, *(line.cells() for line in lines)]))
    for line in lines:
        for warning in line.warnings:
            print(f"warning: {line}: {warning}")
    for note, jobs in by_note(lines).items():
        print(f"{note} ({', '.join(jobs)})")
    print(total(lines))


class Line:
    """What is told of a job. None: it is unknown, or the job needs no GPU.

    memory: bytes of a GPU by part in its fullest moment, `moment`; host: bytes of a node's own
    memory; flops, seconds; disk: bytes of the result.
    """

    def __init__(self, path, plan, gpu):
        self.spec, self.placement, _ = plan.jobs[path]
        self.plan, self.gpu, self.stale = plan, gpu, path in plan.stale
        self.work = self.moment = self.memory = self.host = self.flops = self.seconds = None
        self.warnings, self.notes, self.gpus = [], [], 0
        self.disk = built_bytes(path) if not self.stale else None
        try:
            self.work = workload_of(self.spec, self.placement, plan)
            if self.work:
                self.estimate()
            elif self.disk is None:
                self.disk = base_model_bytes(self.spec, plan)
        except InputError as error:
            self.warnings.append(str(error))

    def __str__(self):
        return job_name(self.spec)

    def estimate(self):
        """Memory, operations, time, disk, and what does not fit."""
        work, where = self.work, self.placement
        self.gpus = where["nodes"] * where["gpus_per_node"]
        self.moment, self.memory = work.memory(where)
        self.host, self.flops = work.host_memory(where), work.flops
        if self.gpus:
            self.seconds = work.seconds(self.gpu, self.gpus)
        if self.stale:
            self.notes = work.notes
            self.disk = work.result_bytes()
            self.warnings = [*self.misfits(), *self.host_misfits()]

    def misfits(self):
        """What does not fit on a GPU, and which settings would make it fit: a line, or none."""
        if self.fits():
            return []
        found = sum(self.memory.values())
        most = max(self.memory, key=self.memory.get)
        told = (
            f"does not fit: {told_bytes(found)} at {self.moment} ({most}:"
            f" {told_bytes(self.memory[most])}), and {'a GPU' if self.gpus else 'mem_mb'} has"
            f" {told_bytes(self.limit())}"
        )
        ways = {}
        for knobs in self.knobs():
            # The first of a kind changes least.
            if tuple(knobs) not in ways and self.fits(**knobs):
                ways[tuple(knobs)] = told_settings(knobs)
        if ways:
            return [f"{told}; it would with {' | '.join(ways.values())}"]
        together = {}
        for knobs in self.knobs():
            together |= {name: value for name, value in knobs.items() if name != "lora_rank"}
        if together and self.fits(**together):
            return [f"{told}; it would with all of {told_settings(together)}"]
        left, _ = self.at(**together)
        if self.work.trained and left in WHOLE_MOMENTS:
            told += "; ZeRO 3 has all weights in each process as they are loaded, sampled and saved"
        return [f"{told}; no setting of placement changes that: larger GPUs, or a smaller model"]

    def host_misfits(self):
        """What does not fit in a node's own memory: a line, or none."""
        there = self.placement["mem_mb"] << 20
        if self.host <= there:
            return []
        return [
            f"{told_bytes(self.host)} of each node's own memory, beside mem_mb:"
            f" {self.placement['mem_mb']}"
        ]

    def limit(self):
        """Bytes that the tensors of a process can have."""
        if self.gpus == 0:
            return self.placement["mem_mb"] << 20
        return self.gpu.memory * estimate.USABLE

    def knobs(self):
        """Settings of placement, and adapters, that may make the job fit; small changes first."""
        where, training = self.placement, self.work.trained
        tokens = where["micro_batch_tokens"] // 2
        while tokens >= max(FEWEST_TOKENS, self.work.largest.length):
            yield {"micro_batch_tokens": tokens}
            tokens //= 2
        if not training:
            return
        if not where["activation_checkpointing"]:
            yield {"activation_checkpointing": True}
        if "offload_frozen" not in where and self.spec["rule"] == "train_rlhf":
            yield {"offload_frozen": True}
        if estimate.processes(where) > 1:
            for stage in range(max(where["zero_stage"], 1) + 1, 4):
                yield {"zero_stage": stage}
        if where["offload"] == "none":
            yield {"zero_stage": max(where["zero_stage"], 2), "offload": "optimizer"}
        if where["offload"] != "parameters":
            yield {"zero_stage": 3, "offload": "parameters"}
        if 0 < where["gpus_per_node"] < NODE:
            yield {"zero_stage": 3, "gpus_per_node": NODE}
        if self.spec["settings"]["lora_rank"] == 0:
            yield {"lora_rank": ADAPTERS}

    def fits(self, **settings):
        """Whether a process has room for the job, or would with these settings."""
        _, memory = self.at(**settings)
        return sum(memory.values()) <= self.limit()

    def at(self, lora_rank=None, **placement):
        """The fullest moment, and its memory by part, with other settings."""
        settings, where = self.spec["settings"], self.placement | placement
        if lora_rank:
            settings = settings | {"lora_rank": lora_rank}
        work = workload_of(self.spec | {"settings": settings}, where, self.plan)
        return work.memory(where)

    def cells(self):
        """The job's line of the table."""
        sizes, weights, trained = ["" for _ in (*PARTS, "in all")], "", ""
        if self.memory:
            weights, trained = map(told_count, self.work.weights())
            parts = [self.memory[part] for part in PARTS]
            sizes = [told_bytes(found) if found else "" for found in (*parts, sum(parts))]
        return (
            str(self),
            "stale" if self.stale else "up to date",
            str(self.gpus or ""),
            weights,
            trained,
            *sizes,
            self.moment or "",
            "?" if self.disk is None else told_bytes(self.disk),
            told_number(self.flops and self.flops / 1e15),
            told_number(self.seconds and self.seconds / 3600),
        )

    def told(self):
        """The line as JSON has it."""
        return {
            "job": str(self),
            "path": self.spec["path"],
            "stale": self.stale,
            "gpus": self.gpus,
            "moment": self.moment,
            "memory": self.memory,
            "host_memory": self.host,
            "disk": self.disk,
            "flops": self.flops,
            "seconds": self.seconds,
            "warnings": self.warnings,
            "notes": self.notes,
        }


def built_bytes(path):
    """Bytes of a result that is there, by its manifest."""
    manifest = read_manifest(manifest_path(path))
    return manifest and sum(facts["size"] for facts in manifest["files"].values())


def by_note(lines):
    """What was assumed, and of which jobs."""
    found = {}
    for line in lines:
        for note in line.notes:
            found.setdefault(note, []).append(str(line))
    return found


def total(lines):
    """The last line: of what is stale."""
    stale = [line for line in lines if line.stale]
    on_gpus = [line for line in stale if line.gpus]
    hours = [line.gpus * line.seconds / 3600 for line in on_gpus if line.seconds is not None]
    disk = [line.disk for line in stale if line.disk is not None]
    states = [STATES * line.work.state_bytes() for line in stale if line.work]
    least = " at least" if len(hours) < len(on_gpus) else ""
    return (
        f"{len(stale)} of {len(lines)} jobs are stale: {sum(hours):,.1f} GPU hours{least},"
        f" {told_bytes(sum(disk))} of disk for what is known of it, and up to"
        f" {told_bytes(max(states, default=0))} while a training saves its states"
    )


def table(rows):
    """Rows of texts as lines of columns; those that are empty in all jobs are left out."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for cells in zip(*columns, strict=True):
        first, *others = zip(cells, widths, strict=True)
        told = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        lines.append("  ".join(told).rstrip())
    return "\n".join(lines)


def told_settings(settings):
    """Settings as a config has them."""
    return ", ".join(f"{name}: {str(value).lower()}" for name, value in settings.items())


def told_bytes(number):
    """Bytes in GiB, small ones in MiB."""
    return f"{number / GIB:,.1f} GiB" if number >= GIB / 10 else f"{number / (1 << 20):,.1f} MiB"


def told_count(number):
    """A count of weights: 13.0 B, 125.2 M; nothing for none."""
    if number == 0:
        return ""
    return f"{number / 1e9:,.1f} B" if number >= 1e9 else f"{number / 1e6:,.1f} M"


def told_number(number):
    """A number with about two digits; nothing where it is unknown."""
    if number is None:
        return ""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


if __name__ == "__main__":
    main()
