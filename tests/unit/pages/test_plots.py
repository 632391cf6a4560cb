"""Figures: bytes, texts, lines, averages."""

import re

from snakechat.pages.plots import MAX_POINTS, averaged, curve_panels, draw_lines, points_of
from support.pages import texts_in


def test_a_curve_has_the_numbers_of_a_metric():
    values = (None, "a", 2, 0.5)
    lines = [{"step": 0}, *({"step": n, "loss": value} for n, value in enumerate(values, 1))]
    assert points_of(lines, "loss") == [(3, 2), (4, 0.5)]


def test_neighbouring_steps_and_seeds_are_averaged():
    points = [(step, step / 2) for step in range(1, 3 * MAX_POINTS + 1)]
    assert len(averaged(points)) == MAX_POINTS
    assert averaged(points)[:2].tolist() == [[2, 1, 0.5, 1.5], [5, 2.5, 2, 3]]
    assert averaged([(1, 2.0), (2, 3.0)]).tolist() == [[1, 2, 2, 2], [2, 3, 3, 3]]
    seeds = [(1, 1.0), (2, 4.0), (1, 3.0)]
    assert averaged(seeds).tolist() == [[1, 2, 1, 3], [2, 4, 4, 4]]


def test_curves_have_a_line_for_each_name_that_has_the_metric():
    lines = {"training": [(1, 2.0), (2, 1.0)], "held-out rows": [(0, 3.0)], "<b>损失": []}
    of_key = {name: {"loss": points}.get for name, points in lines.items()}
    [panel] = curve_panels({"loss": "loss (nats per token)", "kl": "KL"}, of_key)
    assert panel.title == "loss (nats per token)"
    texts = {*texts_in(panel.svg, "text")}
    assert {"training", "held-out rows", "step"} <= texts and "<b>损失" not in texts


def test_the_same_data_gives_the_same_bytes_and_figures_refer_to_ids_of_their_own():
    lines = {"a": [(1, 2.0), (2, 1.0)], "b": [], "c": [(0, 3.0)]}
    first, again, other = (draw_lines(title, lines) for title in ("a", "a", "b"))
    assert first == again
    ids = [set(re.findall(r'url\(#(.*?)\)|href="#(.*?)"', panel.svg)) for panel in (first, other)]
    assert ids[0] and not ids[0] & ids[1]
    # Names are escaped, and text stays text for other scripts.
    points = [(1, 0.5)]
    panel = draw_lines("ties", {"<script>&": points, "损失": points}, percent=True)
    assert "&lt;script&gt;&amp;" in panel.svg and "<script" not in panel.svg
    assert "损失" in texts_in(panel.svg, "text")
