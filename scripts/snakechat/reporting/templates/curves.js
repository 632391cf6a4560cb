"use strict";
// Curves of a page: the values at a step, series switched off by the legend, zoom over steps.
// In print and without this script, the figures are as plots.py has drawn them.

function add(parent, name, attributes) {
  const child = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) child.setAttribute(key, value);
  parent.append(child);
  return child;
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
  const [left, top, width, height] = ["x", "y", "width", "height"].map((key) => Number(frame.getAttribute(key)));
  // Paths and markers of the series, where they are drawn.
  const paths = [...svg.querySelectorAll("[data-series] > path")].map((path) => [path, path.getAttribute("d")]);
  const markers = [...svg.querySelectorAll("[data-series] use")].map((use) => [use, use.getAttribute("x"), use.getAttribute("y")]);
  const zoomed = add(svg, "g", {class: "zoomed"}), cursor = add(svg, "g", {class: "cursor"});
  const off = new Set();
  let limits = data.limits, step = null, start = null;

  const toX = (of) => left + width * (of - limits[0]) / (limits[1] - limits[0]);
  const toY = (value) => top + height * (limits[3] - value) / (limits[3] - limits[2]);
  const toStep = (x) => limits[0] + (limits[1] - limits[0]) * Math.min(Math.max((x - left) / width, 0), 1);
  const placeOf = (event) => new DOMPoint(event.clientX, 0).matrixTransform(svg.getScreenCTM().inverse()).x;

  function format(value) {
    const number = (data.percent ? 100 * value : value).toLocaleString("en", {maximumSignificantDigits: 4});
    return number.replace("-", "\u2212") + (data.percent ? "\u00a0%" : "");
  }

  // What the series that are on have next to a step, of the steps within the axes.
  function pointsAt(wanted) {
    return data.series.filter((series) => !off.has(series.number)).map((series) => {
      const place = nearest(series.steps, wanted);
      const [at, value, lowest, highest] = ["steps", "values", "lowest", "highest"].map((key) => series[key]?.[place]);
      return {...series, at, value, lowest, highest};
    }).filter((point) => point.at >= limits[0] && point.at <= limits[1]);
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
    step = points[nearest(points.map((point) => point.at), wanted)].at;
    const x = toX(step);
    add(cursor, "path", {d: `M${x} ${top}v${height}`});
    readout.append(`${data.x} ${step.toLocaleString("en")}`);
    for (const {number, name, at, value, lowest, highest} of points) {
      const y = toY(value), colour = `var(--series-${number % 8})`;
      if (y >= top && y <= top + height) add(cursor, "circle", {cx: toX(at), cy: y, r: 3.2, fill: colour});
      const line = readout.appendChild(document.createElement("div"));
      line.style.setProperty("--colour", colour);
      line.append(at === step ? name : `${name} (${data.x} ${at.toLocaleString("en")})`);
      const range = lowest === undefined ? "" : ` [${format(lowest)}, ${format(highest)}]`;
      line.appendChild(document.createElement("b")).textContent = format(value) + range;
    }
    readout.hidden = false;
  }

  // Show the steps between two, and their values; or as drawn.
  function zoom(from, to) {
    hide();
    const whole = data.limits, isWhole = from === undefined;
    const values = isWhole ? [] : data.series.filter((series) => !off.has(series.number)).flatMap((series) =>
      [series.lowest ?? series.values, series.highest ?? series.values].flatMap((column) =>
        column.filter((_, place) => series.steps[place] >= from && series.steps[place] <= to)));
    if (!isWhole && !values.length) return;
    const low = Math.min(...values), high = Math.max(...values), margin = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
    limits = isWhole ? whole : [from, to, low - margin, high + margin];
    const x = (drawn) => toX(whole[0] + (whole[1] - whole[0]) * (drawn - left) / width);
    const y = (drawn) => toY(whole[3] - (whole[3] - whole[2]) * (drawn - top) / height);
    for (const [path, d] of paths)
      path.setAttribute("d", isWhole ? d : d.replace(/([ML]) (\S+) (\S+)/g, (_, kind, a, b) => `${kind} ${x(a)} ${y(b)}`));
    for (const [use, a, b] of markers) {
      use.setAttribute("x", isWhole ? a : x(a));
      use.setAttribute("y", isWhole ? b : y(b));
    }
    for (const tick of svg.querySelectorAll(".tick")) tick.style.display = isWhole ? "" : "none";
    zoomed.replaceChildren();
    if (isWhole) return;
    for (const tick of ticksWithin(limits[0], limits[1], 1))
      add(zoomed, "text", {x: toX(tick), y: top + height + 10.4, "text-anchor": "middle"}).textContent = tick.toLocaleString("en");
    for (const tick of ticksWithin(limits[2], limits[3], 0)) {
      add(zoomed, "path", {d: `M${left} ${toY(tick)}h${width}`});
      // Within the axes: the margin has the width of the labels that it was drawn for.
      add(zoomed, "text", {x: left + 3, y: toY(tick) - 2.5}).textContent = format(tick);
    }
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
    if (to - from > 4) zoom(toStep(from), toStep(to));
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
    const steps = [...new Set(data.series.flatMap((series) => series.steps))].sort((a, b) => a - b);
    show(step === null ? limits[0] : steps[nearest(steps, step) + direction] ?? step);
  });
  addEventListener("beforeprint", () => zoom());
  return (number, isOff) => {
    isOff ? off.add(number) : off.delete(number);
    for (const part of svg.querySelectorAll(`[data-series="${number}"]`)) part.classList.toggle("off", isOff);
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
