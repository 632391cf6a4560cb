"use strict";
// Curves of a page: the values at a step, series switched off by the legend, zoom over steps.
// In print and without this script, the figures are as plots.py has drawn them.

function set(element, attributes) {
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function add(parent, name, attributes) {
  const child = document.createElementNS("http://www.w3.org/2000/svg", name);
  return parent.appendChild(set(child, attributes));
}

function nearest(steps, step) {
  const distances = steps.map((each) => Math.abs(each - step));
  return distances.indexOf(Math.min(...distances));
}

// Round numbers within bounds, about 4, at least a distance apart.
function ticksWithin(low, high, least) {
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const distance = Math.max([1, 2, 5, 10].find((each) => each * power >= rough) * power, least);
  const first = Math.ceil(low / distance), count = Math.floor(high / distance) - first + 1;
  return Array.from({length: count}, (_, place) => (first + place) * distance);
}

function makeCurve(source) {
  const data = JSON.parse(source.textContent), svg = source.previousElementSibling;
  const readout = document.createElement("div");
  const frame = svg.querySelector("clipPath rect");
  const [left, top, width, height] =
    ["x", "y", "width", "height"].map((key) => Number(frame.getAttribute(key)));
  // The lines and markers of the series, and where they are drawn.
  const drawn = [...svg.querySelectorAll("[data-series] > path, [data-series] use")]
    .map((part) => [part, ...["d", "x", "y"].map((key) => part.getAttribute(key))]);
  const zoomed = add(svg, "g", {class: "zoomed"}), cursor = add(svg, "g", {class: "cursor"});
  const off = new Set(), shown = () => data.series.filter((series) => !off.has(series.number));
  let limits = data.limits, step = null, start = null;

  const toX = (of) => left + width * (of - limits[0]) / (limits[1] - limits[0]);
  const toY = (value) => top + height * (limits[3] - value) / (limits[3] - limits[2]);
  const toStep = (x) =>
    limits[0] + (limits[1] - limits[0]) * Math.min(Math.max((x - left) / width, 0), 1);
  const placeOf = (event) =>
    new DOMPoint(event.clientX, 0).matrixTransform(svg.getScreenCTM().inverse()).x;

  function format(value) {
    const number = data.percent ? 100 * value : value;
    const text = number.toLocaleString("en", {maximumSignificantDigits: 4});
    return text.replace("-", "\u2212") + (data.percent ? "\u00a0%" : "");
  }

  // What the series that are on have next to a step, if it is within the axes.
  function pointsAt(wanted) {
    return shown().map(({number, name, steps, values, lowest, highest}) => {
      const place = nearest(steps, wanted), value = format(values[place]);
      const range = lowest && ` [${format(lowest[place])}, ${format(highest[place])}]`;
      return {number, name, at: steps[place], y: toY(values[place]), text: value + (range ?? "")};
    }).filter(({at}) => at >= limits[0] && at <= limits[1]);
  }

  function hide() {
    step = null;
    cursor.replaceChildren();
    readout.replaceChildren();
    readout.hidden = true;
  }

  function show(wanted) {
    const points = pointsAt(wanted);
    hide();
    if (!points.length) return;
    step = points[nearest(points.map(({at}) => at), wanted)].at;
    add(cursor, "path", {d: `M${toX(step)} ${top}v${height}`});
    readout.append(`${data.x} ${step.toLocaleString("en")}`);
    for (const {number, name, at, y, text} of points) {
      const fill = `var(--series-${number % 8})`;
      if (y >= top && y <= top + height) add(cursor, "circle", {cx: toX(at), cy: y, r: 3.2, fill});
      const line = readout.appendChild(document.createElement("div"));
      line.style.setProperty("--colour", fill);
      line.append(at === step ? name : `${name} (${data.x} ${at.toLocaleString("en")})`);
      line.appendChild(document.createElement("b")).textContent = text;
    }
    readout.hidden = false;
  }

  // Show the parts of the series within limits; those of the whole axes are as drawn.
  function zoom(to = data.limits) {
    hide();
    limits = to;
    const [firstStep, lastStep, low, high] = data.limits, isWhole = to === data.limits;
    const x = (place) => toX(firstStep + (lastStep - firstStep) * (place - left) / width);
    const y = (place) => toY(high - (high - low) * (place - top) / height);
    const move = (_, kind, a, b) => `${kind} ${x(a)} ${y(b)}`;
    for (const [part, line, a, b] of drawn) {
      if (line) part.setAttribute("d", isWhole ? line : line.replace(/([ML]) (\S+) (\S+)/g, move));
      else set(part, isWhole ? {x: a, y: b} : {x: x(a), y: y(b)});
    }
    for (const tick of svg.querySelectorAll(".tick")) tick.style.display = isWhole ? "" : "none";
    zoomed.replaceChildren();
    if (!isWhole) drawTicks();
  }

  function drawTicks() {
    for (const tick of ticksWithin(limits[0], limits[1], 1)) {
      const label = {x: toX(tick), y: top + height + 10.4, "text-anchor": "middle"};
      add(zoomed, "text", label).textContent = tick.toLocaleString("en");
    }
    for (const tick of ticksWithin(limits[2], limits[3], 0)) {
      add(zoomed, "path", {d: `M${left} ${toY(tick)}h${width}`});
      // Within the axes: the margin has the width of the labels that it was drawn for.
      add(zoomed, "text", {x: left + 3, y: toY(tick) - 2.5}).textContent = format(tick);
    }
  }

  // Show the steps between two, with the range of their values.
  function zoomInto(from, to) {
    const values = shown().flatMap(({steps, values, lowest = values, highest = values}) =>
      [...lowest, ...highest].filter((_, place) =>
        steps[place % steps.length] >= from && steps[place % steps.length] <= to));
    if (!values.length) return;
    const low = Math.min(...values), high = Math.max(...values);
    const margin = 0.05 * (high - low || Math.abs(high) || 1);
    zoom([from, to, low - margin, high + margin]);
  }

  svg.classList.add("live");
  svg.setAttribute("tabindex", 0);
  readout.className = "readout";
  readout.setAttribute("role", "status");
  svg.closest("figure").append(readout);
  hide();
  svg.addEventListener("pointerdown", (event) => {
    // A finger scrolls the page, and reads values.
    if (event.pointerType !== "touch" && event.button === 0) start = placeOf(event);
    if (start !== null) svg.setPointerCapture(event.pointerId);
    show(toStep(placeOf(event)));
  });
  svg.addEventListener("pointermove", (event) => {
    show(toStep(placeOf(event)));
    if (start === null) return;
    const [from, to] = [start, placeOf(event)].map((x) => toX(toStep(x))).sort((a, b) => a - b);
    add(cursor, "rect", {x: from, y: top, width: to - from, height});
  });
  svg.addEventListener("pointerup", (event) => {
    const [from, to] = start === null ? [0, 0] : [start, placeOf(event)].sort((a, b) => a - b);
    start = null;
    if (to - from > 4) zoomInto(toStep(from), toStep(to));
  });
  svg.addEventListener("pointerleave", () => { if (start === null) hide(); });
  svg.addEventListener("pointercancel", () => { start = null; hide(); });
  svg.addEventListener("blur", hide);
  svg.addEventListener("dblclick", () => zoom());
  svg.addEventListener("keydown", (event) => {
    if (event.key === "Escape") zoom();
    const direction = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!direction) return;
    event.preventDefault();
    const steps = [...new Set(shown().flatMap((series) => series.steps))].sort((a, b) => a - b);
    show(step === null ? limits[0] : steps[nearest(steps, step) + direction] ?? step);
  });
  addEventListener("beforeprint", () => zoom());
  return (number, isOff) => {
    hide();
    off[isOff ? "add" : "delete"](number);
    const parts = svg.querySelectorAll(`[data-series="${number}"]`);
    for (const part of parts) part.classList.toggle("off", isOff);
  };
}

for (const section of document.querySelectorAll("section")) {
  const curves = [...section.querySelectorAll(".curve-data")].map(makeCurve);
  const entries = curves.length ? section.querySelectorAll(".legend > li") : [];
  for (const [number, entry] of entries.entries()) {
    const button = document.createElement("button");
    button.type = "button";
    button.setAttribute("aria-pressed", "true");
    button.append(...entry.childNodes);
    entry.append(button);
    button.addEventListener("click", () => {
      const isOff = button.getAttribute("aria-pressed") === "true";
      button.setAttribute("aria-pressed", String(!isOff));
      for (const toggle of curves) toggle(number, isOff);
    });
  }
}
for (const hint of document.querySelectorAll(".hint")) hint.hidden = false;
