"use strict";
// Line charts in SVG, the large view, and downloads as PNG and CSV.

const view = { smoothing: 0, log: false, marks: true };
const PATH_SMOOTHING = 0.6; // of the line through score and KL, whose points are drawn as they are
const LEFT = 46, RIGHT = 8, TOP = 12, BOTTOM = 24;

/** Smooth values by an exponential moving average without bias at the start, as TensorBoard does. */
function smooth(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/** Return the lines of a chart as they are drawn: without points that a log axis lacks, with the mean around each point of a thinned curve, smoothed. */
function visibleLines(chart) {
  return chart.lines().filter(({ group }) => shownGroups[group]).map((line) => {
    const points = line.points.filter((each) => !view.log || each.y > 0);
    const weight = chart.isPath ? Math.max(PATH_SMOOTHING, view.smoothing) : view.smoothing;
    const smoothed = smooth(points.map((each) => each.level ?? each.y), weight);
    const across = chart.isPath ? smooth(points.map((each) => each.x), weight) : [];
    const isSmooth = weight > 0 || points[0]?.level !== undefined;
    const isEnd = (index) => chart.isPath && index === points.length - 1; // a path ends at its last values
    return { ...line, isSmooth, points: points.map((each, index) => ({ ...each,
      sx: isEnd(index) ? each.x : across[index] ?? each.x, sy: isSmooth && !isEnd(index) ? smoothed[index] : each.y })) };
  }).filter((line) => line.points.length > 0);
}

function scaleOf(lines, width, height) {
  const points = lines.flatMap((line) => line.points);
  let left = Infinity, right = -Infinity, low = Infinity, high = -Infinity;
  for (const { x, y, std } of points) {
    left = Math.min(left, x);
    right = Math.max(right, x);
    low = Math.min(low, view.log ? y : y - std);
    high = Math.max(high, y + std);
  }
  if (left === right) [left, right] = [left - 1, right + 1];
  const to = view.log ? Math.log10 : (value) => value;
  let [bottom, top] = [to(low), to(high)];
  const room = top - bottom < 1e-12 * Math.max(1, Math.abs(top)) ? Math.abs(bottom) * 0.1 || 1 : (top - bottom) * 0.05;
  [bottom, top] = [bottom - room, top + room];
  return {
    left, right, bottom, top, width, height,
    x: (value) => LEFT + (value - left) / (right - left) * (width - LEFT - RIGHT),
    y: (value) => TOP + (top - to(Math.max(value, view.log ? low : value))) / (top - bottom) * (height - TOP - BOTTOM),
  };
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${format(value / 1e6)}M`;
  if (size >= 1e4) return `${format(value / 1e3)}k`;
  return size !== 0 && size < 1e-3 ? value.toExponential().replaceAll("-", MINUS) : format(value);
}

/** Return the ticks of the vertical axis; on a log axis powers of ten, and 2 and 5 times these if it is short. */
function verticalTicks(scale, count) {
  if (!view.log) return ticks(scale.bottom, scale.top, count);
  const decades = scale.top - scale.bottom;
  if (decades < 0.4) return ticks(10 ** scale.bottom, 10 ** scale.top, count);
  const found = [];
  for (let power = Math.floor(scale.bottom); power <= Math.ceil(scale.top); power += Math.ceil(decades / 8)) {
    for (const factor of decades < 2.5 ? [1, 2, 5] : [1]) found.push(Number((factor * 10 ** power).toPrecision(6)));
  }
  return found.filter((tick) => Math.log10(tick) >= scale.bottom && Math.log10(tick) <= scale.top);
}

function drawAxes(svg, scale, chart) {
  const { width, height } = scale;
  for (const tick of verticalTicks(scale, height > 300 ? 8 : 4)) {
    const y = scale.y(tick);
    svg.append(draw("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }),
      draw("text", { x: LEFT - 5, y: y + 4, "text-anchor": "end" }, short(tick)));
  }
  for (const tick of ticks(scale.left, scale.right, Math.max(4, Math.round(width / 110))).filter((each) => chart.isPath || Number.isInteger(each))) {
    const x = scale.x(tick), anchor = x > width - 24 ? "end" : "middle";
    if (x >= LEFT - 1 && x <= width - RIGHT + 1) svg.append(draw("text", { x, y: height - 7, "text-anchor": anchor }, short(tick)));
  }
  if (!chart.isPath) return;
  svg.append(draw("text", { x: LEFT + 6, y: TOP + 6, class: "axis-name" }, "↑ score"),
    draw("text", { x: width - RIGHT, y: height - BOTTOM - 6, "text-anchor": "end", class: "axis-name" }, "KL, nats →"));
}

function drawLine(svg, line, scale, isPath) {
  const colour = colourOf(line.group), { points } = line;
  const path = (values) => values.map(([x, y]) => `${scale.x(x).toFixed(1)},${scale.y(y).toFixed(1)}`).join(" ");
  const stroke = (values, attributes) => draw("polyline", { points: path(values), fill: "none", stroke: colour, "stroke-linejoin": "round", ...attributes });
  if (!isPath && data.groups[line.group].runs.length > 1) {
    const upper = points.map((each) => [each.x, each.y + each.std]), lower = points.map((each) => [each.x, each.y - each.std]).reverse();
    svg.append(draw("polygon", { points: path([...upper, ...lower]), fill: colour, opacity: 0.2, class: "band" }));
  }
  if (points.length === 1) {
    svg.append(draw("circle", { cx: scale.x(points[0].x), cy: scale.y(points[0].y), r: 3, fill: colour, class: "line" }));
    return;
  }
  if (line.isSmooth && !isPath) svg.append(stroke(points.map((each) => [each.x, each.y]), { opacity: 0.3, "stroke-width": 1, class: "raw" }));
  svg.append(stroke(points.map((each) => [each.sx, each.sy]), { "stroke-width": isPath ? 2.4 : 1.8, class: "line" }));
  if (!isPath) return;
  points.forEach((each, index) => {
    const isFirst = index === 0, isLast = index === points.length - 1;
    svg.append(draw("circle", { cx: scale.x(each.x), cy: scale.y(each.y), r: isFirst || isLast ? 5 : 2.5,
      stroke: colour, "stroke-width": isFirst ? 2 : 0, fill: isFirst ? "none" : colour, opacity: isFirst || isLast ? 1 : 0.15 + 0.35 * index / points.length }));
  });
}

/** Return a line's point that is nearest to an update or episode. */
const nearest = (points, value, of = (each) => each.x) => points.reduce((best, each) => (Math.abs(of(each) - value) < Math.abs(of(best) - value) ? each : best));

/** Draw a triangle for each warning of a health check, at the update at which it spoke. */
function drawMarks(svg, lines, scale, chart) {
  if (!view.marks) return;
  for (const line of lines) {
    for (const warning of warningsOf(line.group)) {
      const at = nearest(line.points, warning.step, (each) => each.step);
      const x = scale.x(at.sx), y = chart.isPath ? scale.y(at.sy) - 8 : TOP - 2;
      const colour = data.groups.length > 1 ? { style: `--mark: ${colourOf(line.group)}` } : {};
      if (!chart.isPath) svg.append(draw("line", { class: "mark-line", ...colour, x1: x, x2: x, y1: TOP, y2: scale.height - BOTTOM }));
      svg.append(draw("path", { class: "mark", ...colour, d: `M${x - 4.5},${y - 8} h9 l-4.5,8 z`, "data-check": warning.check },
        draw("title", {}, `${warning.check}, update ${warning.step}: ${warning.words}`)));
    }
  }
}

const warningsOf = (group) => data.groups[group].runs.flatMap((run) => data.runs[run].health.flatMap(
  ({ check, said }) => said.map(({ step, words }) => ({ check, step, words }))));

/** Draw a chart; returns its lines and scale, for reading values. */
function drawChart(svg, chart, width, height) {
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren();
  const lines = visibleLines(chart);
  if (lines.length === 0) {
    const text = view.log ? "no value above 0 for a log axis" : "not logged by the runs shown";
    svg.append(draw("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, text));
    return { lines };
  }
  const scale = scaleOf(lines, width, height);
  drawAxes(svg, scale, chart);
  for (const line of lines) drawLine(svg, line, scale, chart.isPath);
  drawMarks(svg, lines, scale, chart);
  return { lines, scale };
}

/** Show the values under the pointer in place of the chart's meaning. */
function readable(svg, says, chart, drawn) {
  const holder = says.parentElement;
  const leave = () => {
    svg.querySelectorAll(".cursor").forEach((each) => each.remove());
    holder.classList.remove("reading");
    says.replaceChildren(chart.says);
  };
  const point = (event) => {
    const { lines, scale } = drawn();
    if (lines.length === 0) return;
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * scale.width, y = (event.clientY - box.top) / box.height * scale.height;
    leave();
    holder.style.minHeight = `${holder.offsetHeight}px`; // a longer text lies over the chart, which keeps its place
    holder.classList.add("reading");
    says.replaceChildren(...(chart.isPath ? readPath(svg, lines, scale, x, y) : readLines(svg, lines, scale, x, chart)));
  };
  for (const kind of ["pointermove", "pointerdown"]) svg.addEventListener(kind, point);
  svg.addEventListener("pointerleave", leave);
  leave();
}

function readLines(svg, lines, scale, x, chart) {
  const wanted = scale.left + (x - LEFT) / (scale.width - LEFT - RIGHT) * (scale.right - scale.left);
  const found = lines.map((line) => ({ line, at: nearest(line.points, wanted) }));
  const place = scale.x(found[0].at.x);
  svg.append(draw("line", { class: "cursor", x1: place, x2: place, y1: TOP, y2: scale.height - BOTTOM }));
  const values = found.map(({ line, at }) => {
    const spread = data.groups[line.group].runs.length > 1 ? ` ± ${format(at.std)}` : "";
    const smoothed = line.isSmooth ? ` (${view.smoothing > 0 ? "smoothed" : "mean around it"} ${format(at.sy)})` : "";
    return make("span", { style: `color: ${colourOf(line.group)}` }, " ● ", make("span", { class: "readout" }, format(at.y) + spread + smoothed));
  });
  const warnings = view.marks ? found.flatMap(({ line, at }) => warningsOf(line.group).filter((each) => nearest(line.points, each.step, (point) => point.step) === at)) : [];
  return [`${chart.unit().slice(0, -1)} ${format(found[0].at.x)}:`, ...values,
    ...warnings.map((each) => make("span", { class: "warned" }, ` ▼ ${each.check}: ${each.words}`))];
}

function readPath(svg, lines, scale, x, y) {
  const distance = (each) => (scale.x(each.x) - x) ** 2 + (scale.y(each.y) - y) ** 2;
  const [line, at] = lines.map((each) => [each, nearest(each.points, 0, distance)]).sort((one, other) => distance(one[1]) - distance(other[1]))[0];
  svg.append(draw("circle", { class: "cursor", cx: scale.x(at.x), cy: scale.y(at.y), r: 8, fill: "none" }));
  return [make("span", { style: `color: ${colourOf(line.group)}` }, "● "),
    make("span", { class: "readout" }, `update ${at.step}: score ${format(at.y)} at a KL of ${format(at.x)} nats`)];
}

// ---- Downloads ----

function download(name, blob) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

const fileName = (chart, ending) => `${chart.key.replace(/[^\w.-]+/g, "-")}.${ending}`;

/** Quote a cell of a CSV file; an apostrophe keeps a spreadsheet from reading a text as a formula. */
const csvCell = (value) => {
  const text = value === null || value === undefined ? "" : String(value);
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
};

function csvOf(chart) {
  const head = chart.isPath ? ["run", "step", "kl", "score"] : ["run", "step", "episode", "mean", "std"];
  const rows = chart.lines().filter(({ group }) => shownGroups[group]).flatMap(({ group, points }) => points.map((each) => (
    chart.isPath ? [groupName(group), each.step, each.x, each.y] : [groupName(group), each.step, each.episode, each.y, each.std])));
  return [head, ...rows].map((row) => row.map(csvCell).join(",")).join("\r\n") + "\r\n";
}

const saveCsv = (chart) => download(fileName(chart, "csv"), new Blob([csvOf(chart)], { type: "text/csv" }));

/** Draw a chart as a picture of 1600 pixels with title, meaning and legend, and download it. */
function savePng(chart) {
  const width = 800, height = 420, head = 44, legend = data.groups.length > 1 ? 20 * shownGroups.filter(Boolean).length + 6 : 0;
  const paper = getComputedStyle(document.querySelector("section")).backgroundColor, ink = getComputedStyle(document.body).color;
  const svg = draw("svg", {});
  svg.style.width = `${width}px`;
  document.body.append(svg); // styles are computed for elements of the document only
  drawChart(svg, chart, width, height);
  for (const each of svg.querySelectorAll("*")) {
    const style = getComputedStyle(each);
    for (const name of ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-family"]) each.style.setProperty(name, style.getPropertyValue(name));
  }
  svg.remove();
  const text = (x, y, words, size, weight) => draw("text", { x, y, fill: ink, "font-size": size, "font-weight": weight, "font-family": "system-ui, sans-serif" }, words);
  const names = data.groups.map((_, group) => group).filter((group) => legend && shownGroups[group]).flatMap((group, row) => {
    const y = head + height + 14 + 20 * row;
    return [draw("circle", { cx: LEFT, cy: y - 4, r: 5, fill: colourOf(group) }), text(LEFT + 12, y, groupName(group), 12, 400)];
  });
  const page = draw("svg", { width: 2 * width, height: 2 * (head + height + legend), viewBox: `0 0 ${width} ${head + height + legend}` },
    draw("rect", { width, height: head + height + legend, fill: paper }), text(12, 20, chart.key, 15, 700), text(12, 37, chart.says, 12, 400),
    draw("g", { transform: `translate(0 ${head})` }, ...svg.childNodes), ...names);
  const picture = new Image();
  picture.onload = () => {
    const canvas = make("canvas", { width: 2 * width, height: 2 * (head + height + legend) });
    canvas.getContext("2d").drawImage(picture, 0, 0);
    canvas.toBlob((blob) => download(fileName(chart, "png"), blob), "image/png");
  };
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(page))}`;
}

// ---- The large view ----

const large = { chart: null, drawn: { lines: [] }, among: () => [] };

function drawLarge() {
  if (!large.chart || !byId("large").open) return;
  const width = Math.max(320, byId("large-chart").clientWidth), height = Math.round(Math.min(width * 0.8, Math.max(260, innerHeight * 0.6)));
  const svg = draw("svg", { role: "img", "aria-label": large.chart.key });
  byId("large-chart").replaceChildren(svg);
  large.drawn = drawChart(svg, large.chart, width, height);
  readable(svg, byId("large-says"), large.chart, () => large.drawn);
}

/** Open a chart in the large view; the arrows go through the charts of `among`. */
function enlarge(chart, among) {
  Object.assign(large, { chart, among });
  byId("large-title").textContent = chart.key;
  byId("large-legend").replaceChildren(...data.groups.map((_, group) => group).filter((group) => shownGroups[group])
    .map((group) => make("span", {}, make("span", { class: "dot", style: `--colour: ${colourOf(group)}` }), groupName(group))));
  if (!byId("large").open) byId("large").showModal();
  drawLarge();
}

function enlargeNext(step) {
  const charts = large.among(), at = charts.indexOf(large.chart);
  enlarge(charts[(at + step + charts.length) % charts.length], large.among);
}

byId("large-before").addEventListener("click", () => enlargeNext(-1));
byId("large-after").addEventListener("click", () => enlargeNext(1));
byId("large-close").addEventListener("click", () => byId("large").close());
byId("large-png").addEventListener("click", () => savePng(large.chart));
byId("large-csv").addEventListener("click", () => saveCsv(large.chart));
byId("large").addEventListener("click", (event) => { if (event.target === byId("large")) byId("large").close(); });
byId("large").addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (step && event.target.tagName !== "INPUT") enlargeNext(step);
});
