"""Figures: bytes, texts, lines, averages."""

import re

import numpy as np

from snakechat.pages.metrics import Figure
from snakechat.pages.plots import COLOUR, averaged, curve_panels, draw_estimates, draw_lines
from support.pages import texts_in


def paths_of(panel, colour):
    """The lines of a colour: their numbers of points."""
    styled = re.findall(r'<path d="([^"]*)"[^>]*style="([^"]*)"', panel.svg, re.DOTALL)
    return [len(re.findall("[ML]", path)) for path, style in styled if f"stroke: {colour}" in style]


def test_long_lines_show_raw_values_and_their_means():
    points = [(step, float(step % 2)) for step in range(60)]
    assert len(paths_of(draw_lines("loss", {"": points}), COLOUR)) == 2
    assert paths_of(draw_lines("loss", {"": points[:3]}), COLOUR)[0] == 3


def test_many_points_are_averaged():
    points = np.array([(step, step / 2) for step in range(1, 901)])
    assert len(averaged(points, 300)) == 300
    assert averaged(points, 300)[:2].tolist() == [[2.0, 1.0], [5.0, 2.5]]
    assert averaged(points[:300], 300).tolist() == points[:300].tolist()


def test_curves_have_a_line_for_each_name_that_has_the_metric():
    lines = {"training": [(1, 2.0), (2, 1.0)], "held-out rows": [(0, 3.0)]}
    of_key = {name: {"loss": points}.get for name, points in lines.items()}
    [panel] = curve_panels("sft", of_key, [])
    assert panel.title == "loss (nats per token)"
    assert {"training", "held-out rows", "step"} <= {*texts_in(panel.svg, "text")}


def test_the_same_data_gives_the_same_bytes_and_figures_refer_to_ids_of_their_own():
    estimates = {"a": Figure(0.5, [0.25, 0.75]), "b": None, "c": Figure(2.0, [2.5, 3.0])}
    first, again, other = (draw_estimates(title, estimates) for title in ("a", "a", "b"))
    assert first == again
    ids = [set(re.findall(r'url\(#(.*?)\)|href="#(.*?)"', panel.svg)) for panel in (first, other)]
    assert ids[0] and not ids[0] & ids[1]


def test_names_are_escaped_and_text_stays_text_for_other_scripts():
    panel = draw_estimates("ties", {"<script>&": Figure(0.5), "损失": Figure(1.0)}, percent=True)
    assert "&lt;script&gt;&amp;" in panel.svg and "<script" not in panel.svg
    assert "损失" in texts_in(panel.svg, "text")
