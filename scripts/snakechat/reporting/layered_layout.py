"""Positions of the jobs of a graph in columns, with a lane for each edge.

The method of Sugiyama, Tagawa and Toda (1981). An edge that spans several columns gets a lane in
each column between its ends, with the same distance from the jobs there as these have from one
another. So no edge runs behind a job.
"""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

# Sweeps over the columns: for their order, and for the positions in them.
ORDER_SWEEPS, POSITION_SWEEPS = 24, 24


class Lane(NamedTuple):
    """The place of an edge in a column between its ends."""

    source: str
    target: str
    column: int


Node = str | Lane
Edge = tuple[str, str]


class Layout(NamedTuple):
    """Columns and vertical positions.

    Attributes:
        columns: The column of each job.
        positions: The vertical centre of each job and lane, in units of the height of a job.
        routes: For each edge its ends and the lanes between them, from left to right.
    """

    columns: dict[str, int]
    positions: dict[Node, float]
    routes: dict[Edge, list[Node]]


def layered_layout(columns: Sequence[Sequence[str]], inputs: Mapping[str, Sequence[str]]) -> Layout:
    """Lay out a graph.

    Args:
        columns: The jobs of each column; the inputs of a job are in columns further left.
        inputs: The jobs that each job has an edge from.
    """
    column_of = {job: number for number, jobs in enumerate(columns) for job in jobs}
    ranks: list[list[Node]] = [list(jobs) for jobs in columns]
    routes: dict[Edge, list[Node]] = {}
    for target, sources in inputs.items():
        for source in sources:
            between = range(column_of[source] + 1, column_of[target])
            lanes = [Lane(source, target, column) for column in between]
            routes[source, target] = [source, *lanes, target]
            for lane in lanes:
                ranks[lane.column].append(lane)
    before: dict[Node, list[Node]] = {node: [] for rank in ranks for node in rank}
    after: dict[Node, list[Node]] = {node: [] for rank in ranks for node in rank}
    for route in routes.values():
        for left, right in itertools.pairwise(route):
            before[right].append(left)
            after[left].append(right)
    ranks = _order(ranks, before, after)
    return Layout(column_of, _positions(ranks, before, after), routes)


def _order(
    ranks: list[list[Node]], before: dict[Node, list[Node]], after: dict[Node, list[Node]]
) -> list[list[Node]]:
    """Return the columns in an order with few crossings, by the barycentre heuristic."""
    best, fewest = ranks, crossings(ranks, after)
    ranks = [list(rank) for rank in ranks]
    for sweep in range(ORDER_SWEEPS):
        forwards = sweep % 2 == 0
        neighbours = before if forwards else after
        order = range(1, len(ranks)) if forwards else range(len(ranks) - 2, -1, -1)
        for number in order:
            fixed = ranks[number - 1 if forwards else number + 1]
            places = {node: float(place) for place, node in enumerate(fixed)}
            key = _barycentre(neighbours, places, ranks[number])
            ranks[number] = sorted(ranks[number], key=key)
        found = crossings(ranks, after)
        if found < fewest:
            best, fewest = [list(rank) for rank in ranks], found
    return best


def _barycentre(
    neighbours: Mapping[Node, Sequence[Node]], places: Mapping[Node, float], rank: Sequence[Node]
) -> Callable[[Node], float]:
    """Return a sort key: the mean place of the neighbours; of a node without any, its own place."""
    own = {node: float(place) for place, node in enumerate(rank)}

    def key(node: Node) -> float:
        found = [places[other] for other in neighbours[node]]
        return statistics.fmean(found) if found else own[node]

    return key


def crossings(ranks: Sequence[Sequence[Node]], after: Mapping[Node, Sequence[Node]]) -> int:
    """Return the number of pairs of edges that cross between neighbouring columns."""
    count = 0
    for rank, following in itertools.pairwise(ranks):
        places = {node: place for place, node in enumerate(following)}
        ends = [
            places[other] for node in rank for other in sorted(after[node], key=places.__getitem__)
        ]
        count += sum(a > b for n, a in enumerate(ends) for b in ends[n + 1 :])
    return count


def _positions(
    ranks: list[list[Node]], before: dict[Node, list[Node]], after: dict[Node, list[Node]]
) -> dict[Node, float]:
    """Return positions that keep edges straight, with a distance of at least 1 in each column.

    Lanes are thinner than jobs: next to one another, they need less distance.
    """
    positions: dict[Node, float] = {}
    for rank in ranks:
        place = 0.0
        for above, node in zip([None, *rank], rank, strict=False):
            place += distance(above, node) if above is not None else 0
            positions[node] = place
        for node in rank:
            positions[node] -= place / 2
    for sweep in range(POSITION_SWEEPS):
        forwards = sweep % 2 == 0
        for rank in ranks if forwards else reversed(ranks):
            wanted = []
            for node in rank:
                near = before[node] + after[node] if sweep >= 2 else (before, after)[sweep][node]
                found = [positions[other] for other in near]
                wanted.append(statistics.fmean(found) if found else positions[node])
            positions |= zip(rank, _separated(rank, wanted), strict=True)
    lowest = min(positions.values(), default=0)
    return {node: position - lowest for node, position in positions.items()}


def distance(above: Node, below: Node) -> float:
    """Return the distance that the centres of two neighbours in a column have at least."""
    thin = isinstance(above, Lane) + isinstance(below, Lane)
    return (1.0, 0.75, 0.3)[thin]


def _separated(rank: Sequence[Node], wanted: Sequence[float]) -> list[float]:
    """Return the positions that are nearest to the wanted ones and keep order and distances.

    Isotonic regression by pooling adjacent violators, after subtracting the distances.
    """
    offsets = [0.0]
    for above, below in itertools.pairwise(rank):
        offsets.append(offsets[-1] + distance(above, below))
    blocks: list[list[float]] = []
    for value, offset in zip(wanted, offsets, strict=False):
        blocks.append([value - offset])
        while len(blocks) > 1 and statistics.fmean(blocks[-2]) > statistics.fmean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    levels = [statistics.fmean(block) for block in blocks for _ in block]
    return [level + offset for level, offset in zip(levels, offsets, strict=False)]
