"use strict";
// Helpers of all scripts. Texts of runs are only ever set as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
const COLOURS = isDark
  ? ["#4da3e0", "#f08232", "#2fc99a", "#e39ac4", "#e0b83c", "#9ad0f5", "#c79287", "#b0b0b0"]
  : ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#8c564b", "#7f7f7f"];
const MINUS = "\u2212", LONG = 900, MANY_LINES = 10; // of a text that is not folded
const shownGroups = data.groups.map(() => true);

const byId = (id) => document.getElementById(id);
const colourOf = (group) => COLOURS[group % COLOURS.length];

/** Make an element with attributes and children; texts become text nodes. */
function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Make an SVG element. */
function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

/** Format a number with four significant digits; a dash for a missing number. */
function format(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  let text = String(Number(value.toPrecision(digits)));
  if (size !== 0 && (size >= 1e6 || size < 1e-4)) text = value.toExponential(2).replace("e+", "e");
  return text.replaceAll("-", MINUS);
}

const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)}%`);

/** Return about `count` round numbers inside a range. */
function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= raw * 0.999);
  const found = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) found.push(tick);
  return found.map((tick) => Number(tick.toPrecision(10)));
}

/** Make a table; a cell is a text, a number or an element. On a phone each row is a list of its cells. */
function table(head, rows, classes = []) {
  const cell = (tag) => (value, column) => {
    const isNumber = typeof value === "number" || value === null;
    return make(tag, { class: isNumber ? "number" : "text", "data-head": head[column] }, isNumber ? format(value) : value);
  };
  return make("table", { class: "stacked" },
    make("thead", {}, make("tr", {}, ...head.map(cell("th")))),
    make("tbody", {}, ...rows.map((row, index) => make("tr", { class: classes[index] || "" }, ...row.map(cell("td"))))));
}

const note = (text) => make("p", { class: "quiet" }, text);

/** Fill a menu with the runs that have something to show; hide it for a single run. */
function runMenu(select, runs, change) {
  for (const run of runs) select.append(make("option", { value: run }, data.runs[run].name));
  select.parentElement.hidden = runs.length < 2;
  select.addEventListener("change", () => change(Number(select.value)));
}

function groupName(group) {
  const { label, runs, seeds } = data.groups[group];
  return label + (runs.length > 1 ? ` (${runs.length} ${new Set(seeds).size === runs.length ? "seeds" : "runs"})` : "");
}

const groupOfRun = (run) => data.groups.findIndex((group) => group.runs.includes(run));

// ---- Prompts, responses and what is searched in them ----

/** Make a labelled block of a conversation: a prompt or a response. */
function turn(kind, title, ...children) {
  return make("div", { class: `turn of-${kind}` }, make("span", { class: "who" }, ...[title].flat()), ...children);
}

/** Fold a long text behind a button: a prompt shows its end, other texts their beginning; a text that is searched stays open. */
function folded(element, wanted) {
  const length = element.textContent.length;
  const isShort = length <= LONG && element.textContent.split("\n").length <= MANY_LINES;
  if (isShort || wanted) return [element];
  const button = make("button", { type: "button", class: "unfold", "aria-expanded": "false" }, `Show all ${length} characters`);
  button.addEventListener("click", () => {
    const isOpen = !element.classList.toggle("folded");
    button.setAttribute("aria-expanded", String(isOpen));
    button.textContent = isOpen ? "Show less" : `Show all ${length} characters`;
  });
  element.classList.add("folded");
  return [element, button];
}

const promptTurn = (text, wanted, images) => turn("prompt", "Prompt",
  ...(images || []).map((src) => make("img", { src, alt: "image of the prompt", class: "thumbnail" })), ...folded(make("p", { class: "prompt" }, ...marked(text || "", wanted)), wanted));

/** Return the start and end of each occurrence of a text in lower case. */
function occurrences(text, wanted) {
  const found = [], lower = text.toLowerCase();
  for (let at = wanted ? lower.indexOf(wanted) : -1; at >= 0; at = lower.indexOf(wanted, at + wanted.length)) found.push([at, at + wanted.length]);
  return found;
}

/** Return a text as nodes, with each occurrence of the wanted text in a <mark>. */
function marked(text, wanted) {
  const nodes = [];
  let done = 0;
  for (const [start, end] of occurrences(text, wanted)) {
    nodes.push(text.slice(done, start), make("mark", {}, text.slice(start, end)));
    done = end;
  }
  return [...nodes, text.slice(done)];
}

const wantedIn = (id) => byId(id).value.trim().toLowerCase();

/** Draw a figure as a dot and its interval as a line, on an axis with a mark; what is outside is at its end. */
function intervalBar(value, interval, colour, [from, to], mark, label) {
  const width = 220, x = (each) => 6 + (width - 12) * Math.min(1, Math.max(0, (each - from) / (to - from)));
  const svg = draw("svg", { viewBox: `0 0 ${width} 24`, class: "rate", role: "img", "aria-label": label },
    draw("line", { class: "grid", x1: x(from), x2: x(to), y1: 12, y2: 12 }),
    draw("line", { class: "cursor", x1: x(mark), x2: x(mark), y1: 2, y2: 22 }));
  if (value === null) return svg;
  if (interval[0] !== null) svg.append(draw("line", { x1: x(interval[0]), x2: x(interval[1]), y1: 12, y2: 12, stroke: colour, "stroke-width": 5, opacity: 0.4 }));
  svg.append(draw("circle", { cx: x(value), cy: 12, r: 5, fill: colour }));
  return svg;
}

/** Draw a win rate on an axis from 0 to 100%; the middle is a draw. */
const rateBar = (rate, interval, colour) => intervalBar(rate, interval, colour, [0, 1], 0.5, `win rate ${percent(rate)}`);
