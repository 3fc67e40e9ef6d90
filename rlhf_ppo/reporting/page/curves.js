"use strict";
// Summary, health checks and a panel for each metric.
(() => {
  const MAIN = ["objective/scores", "objective/kl", "objective/rlhf_reward", "policy/entropy_avg",
    "response/length_mean", "response/ended_frac", "val/explained_variance", "policy/clipfrac_avg", "loss/value_avg"];
  const WIDTH = 340, HEIGHT = 190, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 24;

  function curveOf(key, group) {
    const metric = data.metrics.find((each) => each.key === key);
    return metric ? metric.curves[group] : null;
  }

  function summary() {
    const keys = ["objective/scores", "eval_score", "objective/kl", "response/length_mean", "response/ended_frac"];
    const there = keys.filter((key) => data.metrics.some((metric) => metric.key === key));
    const head = ["", "updates", ...there];
    const rows = data.groups.map((group, index) => {
      const updates = Math.max(...group.runs.map((run) => data.runs[run].last_step));
      const cells = there.map((key) => {
        const curve = curveOf(key, index);
        if (!curve) return "–";
        const last = curve.mean.length - 1;
        const spread = group.runs.length > 1 ? ` ± ${said(curve.std[last])}` : "";
        return `${said(curve.mean[0])} → ${said(curve.mean[last])}${spread}`;
      });
      return [groupName(index), updates, ...cells];
    });
    const seeds = data.groups.some((group) => group.runs.length > 1) ? "; means over seeds, with the standard deviation at the end" : "";
    byId("summary-table").append(table(head, rows), nothing(`First log → last log${seeds}.`));
    data.groups.forEach((_, group) => {
      const chip = make("button", { type: "button", class: "chip", "aria-pressed": "true", style: `--colour: ${colourOf(group)}` },
        groupName(group));
      chip.addEventListener("click", () => {
        shownGroups[group] = !shownGroups[group];
        chip.setAttribute("aria-pressed", String(shownGroups[group]));
        drawAll();
      });
      byId("toggles").append(chip);
    });
  }

  function health() {
    const names = [...new Set(data.runs.flatMap((run) => run.health.map((each) => each.check)))];
    const of = (run, name) => run.health.find((each) => each.check === name);
    const fired = names.filter((name) => data.runs.some((run) => of(run, name)?.fired));
    const silent = names.filter((name) => !fired.includes(name));
    if (fired.length > 0) byId("health-table").append(table(["check", ...data.runs.map((run) => run.name)], fired.map((name) => [
      check(name), ...data.runs.map((run) => when(of(run, name)))])));
    const before = fired.length > 0 ? "The others found nothing" : "None has found anything";
    byId("health-table").after(nothing(names.length === 0 ? "These runs have logged no health checks."
      : silent.length > 0 ? `${before}: ${silent.join(", ")}.` : ""));
  }

  /** A check with what it means: what it looks for, what that likely comes from, and which option to turn. */
  function check(name) {
    const about = data.checks[name];
    const found = about ? about.symptom[0].toUpperCase() + about.symptom.slice(1) : "";
    const meaning = about ? [make("span", { class: "quiet block" }, `${found}. Likely cause: ${about.cause}. What to do: ${about.advice}.`)] : [];
    return make("span", {}, make("b", {}, name), ...meaning);
  }

  /** When a check found something, and the figures of what it said: mostly once, again where it was gone for long. */
  function when(found) {
    if (!found) return "–";
    if (!found.fired) return "never";
    const until = found.fired > 1 ? `, last at ${found.last}` : "";
    const said = found.said.map(({ step, words }) => make("span", { class: "block" },
      found.said.length > 1 ? `update ${step}: ${words}` : words));
    return make("span", {}, make("span", { class: "fired" },
      `at update ${found.first}${until} (${found.fired} of ${found.logs} logs)`), ...said);
  }

  function panelOf(metric) {
    const svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": metric.key });
    const says = make("p", {}, metric.says);
    const panel = make("div", { class: "panel", "data-metric": metric.key }, make("h4", {}, metric.key), says, svg);
    const place = { metric, svg, says, panel };
    svg.addEventListener("pointermove", (event) => point(place, event));
    svg.addEventListener("pointerdown", (event) => point(place, event));
    svg.addEventListener("pointerleave", () => leave(place));
    return place;
  }

  /** Points of a curve on the chosen axis, without those that have no place or value on it. */
  function points(curve, axis) {
    return curve.mean.map((mean, index) => ({ x: curve[axis][index], mean, std: curve.std[index] || 0 }))
      .filter((each) => each.x !== null && each.mean !== null);
  }

  function drawPanel(place) {
    const axis = byId("axis").value;
    place.lines = place.metric.curves.map((curve, group) => ({ group, points: curve && shownGroups[group] ? points(curve, axis) : [] }))
      .filter((line) => line.points.length > 0);
    place.svg.replaceChildren();
    const all = place.lines.flatMap((line) => line.points);
    if (all.length === 0) {
      place.svg.append(draw("text", { x: WIDTH / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "not logged by the runs shown"));
      return;
    }
    const scale = place.scale = scaleOf(all);
    drawAxes(place.svg, scale);
    for (const line of place.lines) drawLine(place.svg, line, scale);
  }

  function scaleOf(all) {
    let [left, right] = [Math.min(...all.map((each) => each.x)), Math.max(...all.map((each) => each.x))];
    let [low, high] = [Math.min(...all.map((each) => each.mean - each.std)), Math.max(...all.map((each) => each.mean + each.std))];
    if (left === right) [left, right] = [left - 1, right + 1];
    if (high - low < 1e-12 * Math.max(1, Math.abs(high))) {
      const room = Math.abs(low) * 0.1 || 1;
      [low, high] = [low - room, high + room];
    }
    const room = (high - low) * 0.05;
    [low, high] = [low - room, high + room];
    return {
      left, right, low, high,
      x: (value) => LEFT + (value - left) / (right - left) * (WIDTH - LEFT - RIGHT),
      y: (value) => TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM),
    };
  }

  function drawAxes(svg, scale) {
    for (const tick of ticks(scale.low, scale.high, 4)) {
      const y = scale.y(tick);
      svg.append(draw("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }),
        draw("text", { x: LEFT - 5, y: y + 4, "text-anchor": "end" }, short(tick)));
    }
    for (const tick of ticks(scale.left, scale.right, 4).filter(Number.isInteger)) {
      const anchor = scale.x(tick) > WIDTH - 24 ? "end" : "middle";
      svg.append(draw("text", { x: scale.x(tick), y: HEIGHT - 7, "text-anchor": anchor }, short(tick)));
    }
  }

  function short(value) {
    const size = Math.abs(value);
    if (size >= 1e6) return `${said(value / 1e6)}M`;
    if (size >= 1e4) return `${said(value / 1e3)}k`;
    return size !== 0 && size < 1e-3 ? value.toExponential().replaceAll("-", MINUS) : said(value);
  }

  function drawLine(svg, line, scale) {
    const colour = colourOf(line.group);
    const path = (values) => values.map(([x, y]) => `${scale.x(x).toFixed(1)},${scale.y(y).toFixed(1)}`).join(" ");
    if (data.groups[line.group].runs.length > 1) {
      const upper = line.points.map((each) => [each.x, each.mean + each.std]);
      const lower = line.points.map((each) => [each.x, each.mean - each.std]).reverse();
      svg.append(draw("polygon", { points: path([...upper, ...lower]), fill: colour, opacity: 0.2, class: "band" }));
    }
    if (line.points.length === 1) {
      const [only] = line.points;
      svg.append(draw("circle", { cx: scale.x(only.x), cy: scale.y(only.mean), r: 3, fill: colour, class: "line" }));
      return;
    }
    svg.append(draw("polyline", { points: path(line.points.map((each) => [each.x, each.mean])), fill: "none", stroke: colour,
      "stroke-width": 1.8, "stroke-linejoin": "round", class: "line" }));
  }

  function point(place, event) {
    if (!place.lines || place.lines.length === 0) return;
    const box = place.svg.getBoundingClientRect();
    const { left, right } = place.scale;
    const wanted = left + ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (right - left);
    const nearest = (line) => line.points.reduce((best, each) => (Math.abs(each.x - wanted) < Math.abs(best.x - wanted) ? each : best));
    const found = place.lines.map((line) => ({ line, at: nearest(line) }));
    place.svg.querySelectorAll(".cursor").forEach((each) => each.remove());
    const x = place.scale.x(found[0].at.x);
    place.svg.append(draw("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
    const texts = found.map(({ line, at }) => {
      const spread = data.groups[line.group].runs.length > 1 ? ` ± ${said(at.std)}` : "";
      return make("span", { style: `color: ${colourOf(line.group)}` }, ` ● `, make("span", { class: "readout" }, said(at.mean) + spread));
    });
    place.says.replaceChildren(`${byId("axis").selectedOptions[0].text.slice(0, -1)} ${said(found[0].at.x)}:`, ...texts);
  }

  function leave(place) {
    place.svg.querySelectorAll(".cursor").forEach((each) => each.remove());
    place.says.replaceChildren(place.metric.says);
  }

  const places = data.metrics.map(panelOf);
  const drawAll = () => places.forEach(drawPanel);

  function arrange() {
    const wanted = byId("find").value.trim().toLowerCase();
    const isMain = (key) => MAIN.includes(key) || /^eval_(score|kl)$/.test(key);
    const fits = (place) => `${place.metric.key} ${place.metric.says}`.toLowerCase().includes(wanted);
    const found = places.filter((place) => (wanted ? fits(place) : isMain(place.metric.key)));
    const rest = wanted ? [] : places.filter((place) => !isMain(place.metric.key));
    byId("panels").replaceChildren(...(found.length > 0 ? found.map((place) => place.panel) : [nothing("No metric is called so.")]));
    byId("other-panels").replaceChildren(...rest.map((place) => place.panel));
    byId("others").hidden = rest.length === 0;
    byId("others").firstElementChild.textContent = `All other metrics (${rest.length})`;
  }

  summary();
  health();
  arrange();
  drawAll();
  byId("axis").addEventListener("change", drawAll);
  byId("find").addEventListener("input", arrange);
})();
