"""A frame of scripts/watch.py: a training at one moment, for a terminal of any width."""

import math
from collections.abc import Iterator, Mapping

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from snakechat.reporting.formatting import (
    format_duration,
    format_memory,
    format_share,
    format_significant,
)
from snakechat.reporting.labels import CURVES, is_share
from snakechat.reporting.terminal_plots import plot_curve
from snakechat.reporting.watched_training import View
from snakechat.workflow.job_states import JobState
from snakechat.workflow.machine_usage import GpuUsage
from snakechat.workflow.printable import printable_line

STYLES = {"waits": "yellow", "running": "cyan", "failed": "bold red", "finished": "green"}
MARKS = {"waits": "…", "running": "▶", "failed": "✗", "finished": "✓"}
# Characters: the least width of a curve with its numbers, between two of them, and of the numbers.
PANEL_WIDTH, GAP, NUMBER_WIDTH = 37, 3, 8
CURVE_HEIGHT = 5
# Jobs that wait, responses, and lines of each prompt and response that are shown.
MAX_WAITING, MAX_RESPONSES, MAX_LINES = 5, 2, 3


class Frame:
    """A view of a training, as rich shows it.

    Args:
        view: The training.
        height: Lines of the terminal; curves that do not fit are omitted. None shows all.
    """

    def __init__(self, view: View, height: int | None = None) -> None:
        self.view, self.height = view, height

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        head, width = Group(*self._head()), options.max_width
        below = Group(*self._jobs(), *self._machine(), *self._responses(width))
        rows = None
        if self.height:
            others = sum(len(console.render_lines(part, options)) for part in (head, below))
            rows = max((self.height - others - 1) // (CURVE_HEIGHT + 2), 1)
        yield head
        yield from self._curves(width, rows)
        yield below

    def _head(self) -> Iterator[RenderableType]:
        """Yield the state, the progress and the time left."""
        view, step = self.view, self.view.steps[-1]["step"] if self.view.steps else 0
        facts = []
        if step or view.total:
            facts.append(f"step {step:,}" + (f" of {view.total:,}" if view.total else ""))
        if view.state == "running":
            facts += [f"{view.left} left"] if view.left else []
            if view.throughput:
                facts.append(f"{view.throughput:,.0f} tokens/s")
            facts += [f"last step {format_duration(view.age)} ago"] if view.age is not None else []
            if view.job and view.job.holder and view.job.holder.is_alive is None:
                facts.append(f"on {view.job.holder.host}")
        elif view.state == "finished" and view.job and view.job.seconds is not None:
            facts.append(f"took {format_duration(view.job.seconds)}")
        elif view.job is None:
            facts.append(f"for a build: snakemake --cores 1 output/{view.name}")
        head = Text.assemble(
            (printable_line(view.name), "bold"),
            "  ",
            (f"{MARKS[view.state]} {view.state}", STYLES[view.state]),
        )
        yield head.append("  ").append(printable_line(" · ".join(facts)))
        if view.job and view.job.state == "failed":
            log = f"output/logs/{view.job.rule}/{view.job.name}.log"
            error = view.job.error or f"it ended without an error message; its log is {log}"
            yield Text(printable_line(error), "red")
        if view.total:
            done = view.total if view.state == "finished" else step
            bar = ProgressBar(view.total, done, complete_style="cyan", finished_style="green")
            yield Padding(bar, (0, 0, 1, 0))

    def _curves(self, width: int, rows: int | None) -> Iterator[RenderableType]:
        """Yield the curves of the main metrics, side by side as far as they fit."""
        stage = self.view.name.partition("/")[0]
        curves = [
            curve
            for curve in CURVES[stage].items()
            if any(is_finite(line, curve[0]) for line in self.view.steps)
        ]
        if not curves:
            return
        count = min(max((width + GAP) // (PANEL_WIDTH + GAP), 1), len(curves))
        each = (width - GAP * (count - 1)) // count
        table = Table.grid(padding=(0, GAP, 0, 0))
        for first in range(0, len(curves), count)[:rows]:
            table.add_row(*(self._curve(*curve, each) for curve in curves[first : first + count]))
        yield table

    def _curve(self, key: str, label: str, width: int) -> RenderableType:
        """Return the curve of a metric, with its newest value and that of held-out rows."""
        points = [(line["step"], line[key]) for line in self.view.steps if is_finite(line, key)]
        held_out = [line for line in self.view.steps if is_finite(line, f"eval_{key}")]
        title = Text.assemble((format_value(key, points[-1][1]), "bold"), "  ", label)
        if held_out:
            title.append(f"  held-out {format_value(key, held_out[-1][f'eval_{key}'])}", "yellow")
        title.truncate(width, overflow="ellipsis")
        plot = plot_curve(points, max(width - NUMBER_WIDTH - 1, 1), CURVE_HEIGHT)
        bounds = {CURVE_HEIGHT // 2: plot.low}
        if plot.high > plot.low:
            bounds = {0: plot.high, CURVE_HEIGHT - 1: plot.low}
        lines = [title]
        for number, line in enumerate(plot.lines):
            text = format_value(key, bounds[number]) if number in bounds else ""
            lines.append(Text.assemble((f"{text:>{NUMBER_WIDTH}} ", "dim"), (line, "cyan")))
        return Group(*lines, "")

    def _jobs(self) -> Iterator[RenderableType]:
        """Yield the queue of jobs: those that failed, run and wait, and how many have finished."""
        jobs = self.view.jobs
        if not jobs:
            return
        waiting = [job for job in jobs if job.state == "waits"]
        hidden = waiting[MAX_WAITING:]
        shown = [job for job in jobs if job.state != "finished" and job not in hidden]
        finished = [job for job in jobs if job.state == "finished"]
        yield heading("jobs")
        table = Table.grid(padding=(0, 2, 0, 0))
        for job in shown:
            table.add_row(*job_row(job))
        if shown:
            yield table
        counts = [f"{len(hidden)} more wait"] if hidden else []
        seconds = sum(job.seconds or 0 for job in finished)
        counts.append(f"{len(finished)} of {len(jobs)} finished in {format_duration(seconds)}")
        yield Text("; ".join(counts), "dim")

    def _machine(self) -> Iterator[RenderableType]:
        """Yield what the GPUs and the process of the training use."""
        view = self.view
        if not view.gpus and not view.process:
            return
        yield heading("machine")
        if view.gpus:
            table = Table.grid(padding=(0, 2, 0, 0))
            for gpu in view.gpus:
                table.add_row(*gpu_row(gpu))
            yield table
        if view.process and view.job and view.job.holder:
            memory = format_memory(view.process.memory_mb)
            yield Text(
                f"process {view.job.holder.process}: {view.process.cores:.1f} cores on average,"
                f" {memory} of memory"
            )

    def _responses(self, width: int) -> Iterator[RenderableType]:
        """Yield the responses that were logged last: the ends of prompts, the starts of responses.

        width: Characters of a line.
        """
        responses, limit = self.view.responses, MAX_LINES * width
        if not responses:
            return
        yield heading(f"responses of step {responses[0]['step']:,}")
        for line in responses[:MAX_RESPONSES]:
            prompt, response = (
                printable_line(" ".join(str(line.get(key, "")).split()))
                for key in ("prompt", "response")
            )
            yield Text(prompt if len(prompt) <= limit else f"…{prompt[-limit:]}", "dim")
            text = Text(response if len(response) <= limit else f"{response[:limit]}…")
            if is_finite(line, "score"):
                text.append(f"  score {format_significant(float(line['score']))}", "cyan")
            yield Padding(text, (0, 0, 0, 2))


def heading(title: str) -> RenderableType:
    """Return the heading of a part of a frame."""
    return Rule(Text(title, "bold"), align="left", style="dim")


def is_finite(line: Mapping[str, object], key: str) -> bool:
    """Return whether a line has a number of a name that can be drawn."""
    value = line.get(key)
    return isinstance(value, (int, float)) and math.isfinite(value)


def format_value(key: str, value: float) -> str:
    """Format a metric of metrics.jsonl."""
    return format_share(value) if is_share(key) else format_significant(float(value))


def job_row(job: JobState) -> list[Text]:
    """Return the cells of a job: its state, rule, name and time."""
    seconds = "" if job.seconds is None else format_duration(job.seconds)
    return [
        Text(f"{MARKS[job.state]} {job.state}", STYLES[job.state]),
        Text(printable_line(job.rule)),
        Text(printable_line(job.name)),
        Text(seconds),
    ]


def gpu_row(gpu: GpuUsage) -> list[RenderableType]:
    """Return the cells of a GPU: its name, utilization, memory, temperature and power."""
    used = gpu.utilization
    memory = [gpu.memory_used, gpu.memory_total]
    in_gib = " of ".join(f"{value / 1024:.1f}" for value in memory if value is not None)
    return [
        Text(printable_line(f"GPU {gpu.number} {gpu.name}")),
        Text("" if used is None else f"{used:.0f} %", "cyan", justify="right"),
        ProgressBar(100, used or 0, width=12, complete_style="cyan", finished_style="cyan"),
        Text(f"{in_gib} GiB"),
        Text("" if gpu.temperature is None else f"{gpu.temperature:.0f} °C"),
        Text("" if gpu.power is None else f"{gpu.power:.0f} W"),
    ]
