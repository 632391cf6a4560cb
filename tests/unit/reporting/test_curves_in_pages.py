"""Curves of a page in a browser: values, series that are switched off, zoom, print."""

import json
import re

import pytest

from snakechat.reporting.curve_points import Line, curve_data
from snakechat.reporting.html_pages import write_sections
from snakechat.reporting.page_parts import Section
from snakechat.reporting.plots import Panel, draw_lines

HOSTILE = "</script><script>throw 'here'</script>\u202e"
NAMES = ["training", HOSTILE, "held-out rows"]
LINES = {
    NAMES[0]: Line([(step, 1 / step) for step in range(1, 41)]),
    NAMES[1]: Line([(step, 0.5, 0.25, 0.75) for step in range(1, 41)]),
    NAMES[2]: Line([(0, 1.5), (20, 0.4), (40, 0.123)], is_series=False),
}
CURVE = "document.querySelector('svg.live')"


@pytest.fixture
def page(tmp_path):
    """A page with the lines as numbers and in percent."""
    path = tmp_path / "page.html"
    panels = [Panel(title, draw_lines(title, LINES, "step", title == "%")) for title in ("n", "%")]
    section = Section("Curves", panels=panels, legend=NAMES)
    write_sections(path, "en", title="t", eyebrow="e", sections=[section])
    return path


def place_of(chromium, step, curve=0):
    """The point of the window where a step of a curve is drawn."""
    script = """(() => {
        const svg = document.querySelectorAll("svg.live")[CURVE];
        const frame = svg.querySelector("clipPath rect");
        const [low, high] = JSON.parse(svg.nextElementSibling.textContent).limits;
        svg.scrollIntoView();
        const [x, y, width] = ["x", "y", "width"].map((key) => Number(frame.getAttribute(key)));
        const at = new DOMPoint(x + width * (STEP - low) / (high - low), y + 9);
        const {x: left, y: top} = at.matrixTransform(svg.getScreenCTM());
        return [left, top];
    })()"""
    return chromium.run(script.replace("CURVE", str(curve)).replace("STEP", str(step)))


def mouse(chromium, kind, step, curve=0, **more):
    """Send an event of the mouse at a step of a curve."""
    x, y = place_of(chromium, step, curve)
    more = {"button": "left", "clickCount": 1, **more} if kind != "mouseMoved" else more
    chromium.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)


def readout(chromium, curve=0):
    """The values that are shown, as lines."""
    text = chromium.run(f"document.querySelectorAll('.readout')[{curve}].innerText")
    return [" ".join(line.split()) for line in re.split(r"\n(?!\d)", text)]


@pytest.mark.parametrize("width", [390, 1500])
def test_pointing_at_a_step_shows_its_values(chromium, page, width):
    chromium.resize(width)
    chromium.open(page)
    mouse(chromium, "mouseMoved", 8.2)
    assert readout(chromium) == [
        "step 8",
        "training 0.125",
        f"{HOSTILE[:-1]}\\u202e 0.5 [0.25, 0.75]",
        # The nearest step that it has.
        "held-out rows (step 0) 1.5",
    ]
    mouse(chromium, "mouseMoved", 40, curve=1)
    assert readout(chromium, 1)[0:4:3] == ["step 40", "held-out rows 12.3 %"]
    assert chromium.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert chromium.requests == [] and chromium.errors == []


def press(chromium, key, code):
    """Press a key."""
    for kind in ("rawKeyDown", "char", "keyUp"):
        text = {"text": "\r"} if key == "Enter" and kind == "char" else {}
        chromium.call(
            "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text
        )


def is_drawn(chromium, number):
    """Whether a series is drawn, in all curves."""
    parts = f"[...document.querySelectorAll('[data-series=\"{number}\"]')]"
    drawn = chromium.run(f"{parts}.map((part) => getComputedStyle(part).display !== 'none')")
    assert len(set(drawn)) == 1
    return drawn[0]


def test_the_keyboard_switches_series_off_and_reads_values(chromium, page):
    chromium.open(page)
    chromium.run("document.querySelector('.legend button').focus()")
    press(chromium, "Enter", 13)
    assert [is_drawn(chromium, number) for number in range(3)] == [False, True, True]
    assert chromium.run("document.activeElement.getAttribute('aria-pressed')") == "false"
    chromium.run(f"{CURVE}.focus()")
    for _ in range(3):
        press(chromium, "ArrowRight", 39)
    lines = readout(chromium)
    assert lines[0] == "step 2" and not any("training" in line for line in lines)
    # A print has all series, and nothing that was pointed at.
    chromium.call("Emulation.setEmulatedMedia", media="print")
    assert is_drawn(chromium, 0)
    assert chromium.run("getComputedStyle(document.querySelector('.readout')).display") == "none"
    chromium.call("Emulation.setEmulatedMedia", media="screen")
    chromium.run("document.querySelector('.legend button').focus()")
    press(chromium, "Enter", 13)
    assert is_drawn(chromium, 0)


def drawn_paths(chromium):
    """The paths of the series of the first curve, and where its markers are."""
    return chromium.run(
        f"[...{CURVE}.querySelectorAll('[data-series] > path, [data-series] use')]"
        ".map((part) => part.getAttribute('d') ?? part.getAttribute('x'))"
    )


def test_dragging_zooms_and_a_double_click_shows_all(chromium, page):
    chromium.open(page)
    before = drawn_paths(chromium)
    mouse(chromium, "mousePressed", 10, buttons=1)
    mouse(chromium, "mouseMoved", 21, buttons=1)
    mouse(chromium, "mouseReleased", 21)
    assert all(part != old for part, old in zip(drawn_paths(chromium), before, strict=True))
    labels = f"[...{CURVE}.querySelectorAll('.zoomed text')].map((text) => text.textContent)"
    assert {"10", "15", "20"} <= set(chromium.run(labels))
    assert chromium.run(f"getComputedStyle({CURVE}.querySelector('.tick')).display") == "none"
    # What was the first step is now the tenth.
    mouse(chromium, "mouseMoved", -1)
    assert readout(chromium)[:2] == ["step 10", "training 0.1"]
    mouse(chromium, "mousePressed", 20, clickCount=2)
    mouse(chromium, "mouseReleased", 20, clickCount=2)
    assert drawn_paths(chromium) == before
    assert chromium.run(f"getComputedStyle({CURVE}.querySelector('.tick')).display") != "none"
    assert chromium.errors == []


def test_without_scripts_a_page_has_its_figures_and_no_hints(chromium, page):
    chromium.call("Emulation.setScriptExecutionDisabled", value=True)
    chromium.open(page)
    assert chromium.run("document.querySelectorAll('figure svg').length") == 2
    assert chromium.run("document.querySelectorAll('button, svg.live').length") == 0
    assert chromium.run("document.querySelector('.hint').offsetHeight") == 0


def test_data_end_no_element_and_pages_without_curves_have_no_script(tmp_path):
    markup = curve_data(LINES, [0, 40, 0, 1.5], "</script>", percent=False)
    inner = markup.removeprefix('<script type="application/json" class="curve-data">')
    inner = inner.removesuffix("</script>")
    assert "<" not in inner and ">" not in inner
    data = json.loads(inner)
    assert data["x"] == "</script>" and data["series"][1]["lowest"] == [0.25] * 40
    assert data["series"][2]["steps"] == [0, 20, 40]
    path = tmp_path / "page.html"
    write_sections(path, "en", title="t", eyebrow="e", sections=[Section("none")])
    assert "script" not in path.read_text()
