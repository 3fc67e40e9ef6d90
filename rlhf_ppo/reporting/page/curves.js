"use strict";
// A panel for each metric, and the score against the KL.
(() => {
  const MAIN = ["objective/scores", "objective/kl", "objective/rlhf_reward", "policy/entropy_avg",
    "response/length_mean", "response/ended_frac", "val/explained_variance", "policy/clipfrac_avg", "loss/value_avg"];
  const WIDTH = 340, HEIGHT = 190, FRONTIER = "score against KL";

  /** Return the points of a curve on the chosen axis, without those that have no place or value on it. */
  function pointsOf(curve) {
    const axis = byId("axis").value;
    return curve.mean.map((y, index) => ({ x: curve[axis][index], y, std: curve.std[index] || 0, level: curve.level?.[index],
      step: curve.step[index], episode: curve.episode[index] })).filter((each) => each.x !== null && each.y !== null);
  }

  const chartOf = (metric) => ({
    key: metric.key, says: metric.says, unit: () => byId("axis").selectedOptions[0].text,
    lines: () => metric.curves.flatMap((curve, group) => (curve ? [{ group, points: pointsOf(curve) }] : [])),
  });

  const frontier = {
    key: FRONTIER, isPath: true, says: "how far the policy went for its score: ○ start, ● end; small dots are updates, their line is smoothed by at least 0.6",
    lines: () => data.frontier.map((points, group) => ({ group, points: points.map(({ step, kl, score }) => ({ step, x: kl, y: score, std: 0 })) })),
  };

  function panelOf(chart) {
    const svg = draw("svg", { role: "img", "aria-label": chart.key }), says = make("p", {}), holder = make("div", { class: "says" }, says);
    const button = (text, title, act) => {
      const found = make("button", { type: "button", title, "aria-label": `${title}: ${chart.key}` }, text);
      found.addEventListener("click", act);
      return found;
    };
    const open = () => enlarge(chart, () => panels.filter((each) => each.panel.isConnected).map((each) => each.chart));
    const tools = make("div", { class: "tools" }, button("Enlarge", "Enlarge", open),
      button("PNG", "Download as PNG", () => savePng(chart)), button("CSV", "Download as CSV", () => saveCsv(chart)));
    const title = make("h4", {}, ...chart.key.split("/").flatMap((part, index) => (index > 0 ? ["/", make("wbr"), part] : [part])));
    const panel = make("div", { class: chart.isPath ? "panel double" : "panel", "data-metric": chart.key }, title, holder, svg, tools);
    const found = { chart, panel, svg, drawn: { lines: [] }, draw: (width) => { found.drawn = drawChart(svg, chart, width, HEIGHT); } };
    readable(svg, says, chart, () => found.drawn);
    svg.addEventListener("click", open);
    return found;
  }

  const hasFrontier = data.frontier.some((points) => points.length > 1);
  const panels = [...(hasFrontier ? [frontier] : []), ...data.metrics.map(chartOf)].map(panelOf);

  /** Draw the panels of the page; those in a closed list are drawn when it opens. */
  function drawAll() {
    const isShown = (each) => each.panel.isConnected && (byId("others").open || !byId("others").contains(each.panel));
    const shown = panels.filter(isShown).map((each) => [each, each.svg.clientWidth || WIDTH]); // all widths first: one layout
    for (const [each, width] of shown) each.draw(width);
    drawLarge();
  }

  function arrange() {
    const wanted = wantedIn("find");
    const isMain = ({ key, isPath }) => isPath || MAIN.includes(key) || /^(eval_(score|kl)|rewards\/.*\/mean)$/.test(key);
    const fits = ({ key, says }) => `${key} ${says}`.toLowerCase().includes(wanted);
    const found = panels.filter(({ chart }) => (wanted ? fits(chart) : isMain(chart)));
    const rest = wanted ? [] : panels.filter(({ chart }) => !isMain(chart));
    byId("panels").replaceChildren(...(found.length > 0 ? found.map((each) => each.panel) : [note("No metric matches.")]));
    byId("other-panels").replaceChildren(...rest.map((each) => each.panel));
    byId("others").hidden = rest.length === 0;
    byId("others").firstElementChild.textContent = `All other metrics (${rest.length})`;
    drawAll();
  }

  /** Buttons that hide and show the runs of each setting. */
  function toggles() {
    byId("toggles").hidden = data.groups.length < 2;
    data.groups.forEach((_, group) => {
      const chip = make("button", { type: "button", class: "chip", "aria-pressed": "true", style: `--colour: ${colourOf(group)}` }, groupName(group));
      chip.addEventListener("click", () => {
        shownGroups[group] = !shownGroups[group];
        chip.setAttribute("aria-pressed", String(shownGroups[group]));
        drawAll();
      });
      byId("toggles").append(chip);
    });
  }

  /** Let each control of the charts, here and in the large view, change the same value. */
  function controls() {
    for (const input of document.querySelectorAll("[data-view]")) {
      input.addEventListener("input", () => {
        const name = input.dataset.view;
        view[name] = input.type === "checkbox" ? input.checked : Number(input.value);
        document.querySelectorAll(`[data-view="${name}"]`).forEach((each) => Object.assign(each, { value: input.value, checked: input.checked }));
        document.querySelectorAll(`[data-shows="${name}"]`).forEach((each) => { each.textContent = input.value; });
        drawAll();
      });
    }
    byId("axis").addEventListener("change", drawAll);
    byId("find").addEventListener("input", arrange);
    byId("others").addEventListener("toggle", drawAll);
    window.addEventListener("resize", drawAll);
    const hasMarks = data.groups.some((_, group) => warningsOf(group).length > 0);
    byId("marks").parentElement.hidden = byId("marks-note").hidden = !hasMarks;
    if (hasMarks) byId("marks-note").replaceChildren(make("span", { class: "warned" }, "▼"), " A health check warned at this update. Point at it to read the warning.");
  }

  toggles();
  controls();
  arrange();
})();
