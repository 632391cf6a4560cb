"""The layout of a lineage: no job is hidden, and no edge runs behind a job."""

import itertools
import random

import pytest

from snakechat.reporting.layered_layout import Lane, crossings, distance, layered_layout
from snakechat.reporting.lineage_plot import lineage_svg
from snakechat.workflow.lineage import direct_inputs, lineage_columns


def random_jobs(seed):
    """A lineage of random jobs, each with some of the jobs before it as inputs."""
    draw = random.Random(seed)
    names = [f"job-{number:02}" for number in range(18)]
    return {
        name: {
            "rule": "train_sft",
            "name": name,
            "spec": "0" * 64,
            "inputs": sorted(draw.sample(names[:place], min(place, draw.randint(0, 3)))),
        }
        for place, name in enumerate(names)
    }


def layout_of(jobs):
    return layered_layout(lineage_columns(jobs), {job: direct_inputs(jobs, job) for job in jobs})


@pytest.mark.parametrize("seed", range(8))
def test_jobs_and_lanes_of_a_column_keep_their_distance(seed):
    layout = layout_of(random_jobs(seed))
    columns = {}
    for node, position in layout.positions.items():
        column = node.column if isinstance(node, Lane) else layout.columns[node]
        columns.setdefault(column, []).append((position, node))
    for nodes in columns.values():
        ordered = sorted(nodes, key=lambda node: node[0])
        for (above, first), (below, second) in itertools.pairwise(ordered):
            assert below - above >= distance(first, second) - 1e-9


@pytest.mark.parametrize("seed", range(8))
def test_every_edge_has_a_lane_in_each_column_that_it_spans(seed):
    jobs = random_jobs(seed)
    layout = layout_of(jobs)
    edges = {(source, job) for job in jobs for source in direct_inputs(jobs, job)}
    assert layout.routes.keys() == edges
    for (source, target), route in layout.routes.items():
        between = range(layout.columns[source] + 1, layout.columns[target])
        assert route == [source, *(Lane(source, target, each) for each in between), target]


def test_edges_that_need_not_cross_do_not():
    jobs = {
        "a": [], "b": [], "c": [],
        "x": ["c"], "y": ["b"], "z": ["a"],
    }  # fmt: skip
    layout = layered_layout([["a", "b", "c"], ["x", "y", "z"]], jobs)
    order = [
        sorted(column, key=layout.positions.__getitem__)
        for column in (["a", "b", "c"], ["x", "y", "z"])
    ]
    after = {"a": ["z"], "b": ["y"], "c": ["x"]}
    assert crossings(order, after) == 0
    # Straight lines.
    assert all(layout.positions[s] == layout.positions[t] for s, [t] in after.items())


def test_the_graph_shows_names_as_text():
    jobs = random_jobs(1)
    jobs["job-00"]["name"] = "<b>" + "x" * 40
    svg = lineage_svg(jobs, "jobs & more")
    assert "<b>" not in svg and "&lt;b&gt;" in svg and "…</text>" in svg
    assert 'aria-label="jobs &amp; more"' in svg
    assert svg.count("<rect") == len(jobs)
