"use strict";
// What all panels share. Texts of runs are only ever set as text, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
const COLOURS = isDark
  ? ["#4da3e0", "#f08232", "#2fc99a", "#e39ac4", "#e0b83c", "#9ad0f5", "#c79287", "#b0b0b0"]
  : ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#8c564b", "#7f7f7f"];
const MINUS = "\u2212";
const shownGroups = data.groups.map(() => true);

const byId = (id) => document.getElementById(id);
const colourOf = (group) => COLOURS[group % COLOURS.length];

/** Make an element with attributes and children; texts become text nodes. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  return filled(element, attributes, children);
}

/** The same in SVG. */
function draw(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

/** Say a number in about four digits, or a dash where there is none. */
function said(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  let text = String(Number(value.toPrecision(4)));
  if (size !== 0 && (size >= 1e6 || size < 1e-4)) text = value.toExponential(2).replace("e+", "e");
  return text.replaceAll("-", MINUS);
}

/** Round numbers inside a range, about `count` of them. */
function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= raw * 0.999);
  const found = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) found.push(tick);
  return found.map((tick) => Number(tick.toPrecision(10)));
}

/** A table: rows of cells, each a text, a number or an element. */
function table(head, rows, classes = []) {
  const cell = (tag) => (value) => {
    const isNumber = typeof value === "number" || value === null;
    return make(tag, { class: isNumber ? "number" : "text" }, isNumber ? said(value) : value);
  };
  return make("table", {},
    make("thead", {}, make("tr", {}, ...head.map(cell("th")))),
    make("tbody", {}, ...rows.map((row, index) => make("tr", { class: classes[index] || "" }, ...row.map(cell("td"))))));
}

const nothing = (text) => make("p", { class: "quiet" }, text);

/** A menu of the runs that have something to show; hidden where there is but one. */
function runMenu(select, runs, change) {
  for (const run of runs) select.append(make("option", { value: run }, data.runs[run].name));
  select.parentElement.hidden = runs.length < 2;
  select.addEventListener("change", () => change(Number(select.value)));
}

function groupName(group) {
  const { label, runs, seeds } = data.groups[group];
  return label + (runs.length > 1 ? ` (${runs.length} ${new Set(seeds).size === runs.length ? "seeds" : "runs"})` : "");
}
