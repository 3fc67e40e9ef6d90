"use strict";
// The verdict, key figures with their intervals, and the health checks.
(() => {
  const STATES = { better: "Better", worse: "Worse", undecided: "Undecided", "not judged": "Not judged" };

  /** Return a text as nodes, with commands and options between backticks as code. */
  const withCode = (text) => text.split("`").map((part, index) => (index % 2 === 1 ? make("code", {}, part) : part));

  function verdict(found, group) {
    const kind = found.outcome.replace(" ", "-");
    const name = data.groups.length > 1 ? [make("span", { class: "dot", style: `--colour: ${colourOf(group)}` }), `${groupName(group)} · `] : [];
    const reasons = found.reasons.map((each) => make("li", {}, ...withCode(each)));
    return make("div", { class: `verdict ${kind}` }, make("div", { class: "state" }, ...name, STATES[found.outcome] || found.outcome),
      make("p", { class: "sentence" }, ...withCode(found.sentence)),
      ...(reasons.length > 0 ? [make("ul", {}, ...reasons)] : []));
  }

  /** The curve of a metric of all groups, without axes. */
  function sparkline(key) {
    const metric = data.metrics.find((each) => each.key === key);
    const lines = (metric?.curves || []).map((curve, group) => ({ group, points: curve ? curve.step.map((x, index) => [x, curve.mean[index]]).filter((each) => each[1] !== null) : [] }))
      .filter((line) => line.points.length > 1);
    const all = lines.flatMap((line) => line.points);
    if (all.length === 0) return [];
    const bounds = (place) => [Math.min(...all.map((each) => each[place])), Math.max(...all.map((each) => each[place]))];
    const [left, right] = bounds(0), [low, high] = bounds(1);
    const at = ([x, y]) => `${(1 + 158 * (x - left) / (right - left || 1)).toFixed(1)},${(25 - 22 * (high > low ? (y - low) / (high - low) : 0.5)).toFixed(1)}`;
    return [draw("svg", { viewBox: "0 0 160 28", class: "spark", preserveAspectRatio: "none", "aria-hidden": "true" }, ...lines.map(({ group, points }) => draw("polyline",
      { points: points.map(at).join(" "), fill: "none", stroke: colourOf(group), "stroke-width": 1.6, "vector-effect": "non-scaling-stroke" })))];
  }

  function tile(figure) {
    const show = figure.is_share ? (share) => `${Number((100 * share).toFixed(1))}%` : (value) => format(value, 3);
    const values = figure.groups.map((each, group) => ({ each, group })).filter(({ each }) => each).map(({ each, group }) => {
      const dot = data.groups.length > 1 ? [make("span", { class: "dot", style: `--colour: ${colourOf(group)}` })] : [];
      const small = data.groups.length > 1 ? " small" : "";
      const within = each.low === null ? [] : [make("div", { class: "within" }, `95%: ${show(each.low)} to ${show(each.high)}`)];
      return make("div", {}, make("div", { class: `value${small}` }, ...dot, each.first === null ? show(each.last) : `${show(each.first)} → ${show(each.last)}`), ...within);
    });
    return make("div", { class: "tile", "data-figure": figure.key }, make("h3", { title: figure.key }, figure.name), ...values, ...sparkline(figure.key));
  }

  function winRates() {
    const judged = data.verdicts.map((each, group) => ({ each, group })).filter(({ each }) => each.win_rate !== null);
    if (judged.length === 0) return [];
    const isOne = new Set(judged.map(({ each }) => each.opponent)).size === 1;
    const values = judged.map(({ each, group }) => make("div", {},
      make("div", { class: "value" }, ...(data.groups.length > 1 ? [make("span", { class: "dot", style: `--colour: ${colourOf(group)}` })] : []), percent(each.win_rate)),
      make("div", { class: "within" }, `95%: ${percent(each.interval[0])} to ${percent(each.interval[1])}${isOne ? "" : `, against ${each.opponent}`}`), rateBar(each.win_rate, each.interval, colourOf(group))));
    return [make("div", { class: "tile", "data-figure": "win_rate" }, make("h3", {}, isOne ? `win rate against ${judged[0].each.opponent}` : "win rate"), ...values)];
  }

  function health() {
    const names = [...new Set(data.runs.flatMap((run) => run.health.map((each) => each.check)))];
    const of = (run, name) => run.health.find((each) => each.check === name);
    const fired = names.filter((name) => data.runs.some((run) => of(run, name)?.fired));
    const silent = names.filter((name) => !fired.includes(name));
    byId("health-list").append(...fired.map((name) => make("div", { class: "check" }, ...check(name),
      table(["run", "found", ""], data.runs.map((run) => [run.name, ...when(of(run, name))])))));
    const before = fired.length > 0 ? "No finding from the other checks" : "No check found a problem";
    byId("health-list").append(note(names.length === 0 ? "These runs logged no health checks."
      : silent.length > 0 ? `${before}: ${silent.join(", ")}.` : ""));
  }

  /** A check's name, symptom, likely cause and the options to change. */
  function check(name) {
    const about = data.checks[name];
    if (!about) return [make("h3", {}, name)];
    const line = (title, text) => make("p", {}, ...(title ? [make("b", {}, title)] : []), ...withCode(`${text[0].toUpperCase()}${text.slice(1)}.`));
    return [make("h3", {}, name), line("", about.symptom), line("Likely cause: ", about.cause), line("What to do: ", about.advice)];
  }

  /** The updates at which a check found a problem, and its warnings. */
  function when(found) {
    if (!found) return ["–", ""];
    if (!found.fired) return ["never", ""];
    const until = found.fired > 1 ? `, last at ${found.last}` : "";
    const said = found.said.map(({ step, words }) => make("span", { class: "block" }, found.said.length > 1 ? `update ${step}: ${words}` : words));
    return [make("span", { class: "fired" }, `at update ${found.first}${until} (${found.fired} of ${found.logs} logs)`), make("span", {}, ...said)];
  }

  byId("verdicts").append(...data.verdicts.map(verdict));
  byId("figures").append(...winRates(), ...data.figures.map(tile));
  if (data.figures.some((figure) => figure.groups.some((each) => each && each.low !== null))) {
    byId("figures").after(note("First log → end of the run, which is the mean of the last tenth of the logs (at least three). 95%: its confidence interval over these logs, or over the seeds of a setting."));
  }
  health();
})();
