"use strict";
// The audit of a run's critic: what it explains and ranks beside baselines, its calibration, and figures by position.
(() => {
  const FIGURES = [
    ["explained variance", "explained_variance", "the critic"],
    ["explained variance", "explained_variance_of_prompt", "the prompt's mean"],
    ["explained variance", "explained_variance_of_position", "the position"],
    ["explained variance", "explained_variance_of_both", "prompt and position"],
    ["Kendall's tau", "tau", "the critic"],
    ["Kendall's tau", "tau_of_score", "the beginning's own score"],
    ["Kendall's tau", "tau_of_position", "the position"],
    ["Kendall's tau", "tau_ceiling", "noise ceiling"],
  ];
  const QUIET = "var(--gap)", RANGE = [-0.5, 1];

  function bar(name, value, interval, isCritic) {
    return intervalBar(value, interval, isCritic ? COLOURS[0] : QUIET, RANGE, 0, `${name} ${format(value, 3)}`);
  }

  function figures(audit) {
    const rows = FIGURES.filter(([, key]) => audit.figures[key]).map(([kind, key, of]) => {
      const { value, low, high } = audit.figures[key], isCritic = of === "the critic";
      const between = low === null ? "" : `${format(low, 3)} to ${format(high, 3)}`;
      const name = `${kind}: ${of}`;
      return [name, isCritic ? make("b", {}, format(value, 3)) : format(value, 3), bar(name, value, [low, high], isCritic), between];
    });
    return table(["", "value", `${format(RANGE[0])} to 1`, "95% interval"], rows);
  }

  function positions(audit) {
    const rows = audit.by_position.map((each) => [each.first === each.last ? `${each.first}` : `${each.first} to ${each.last}`, each.prefixes,
      each.explained_variance === null ? "–" : format(each.explained_variance, 3),
      bar("explained variance", each.explained_variance, [null, null], true)]);
    return table(["tokens", "beginnings", "explained variance", `${format(RANGE[0])} to 1`], rows);
  }

  /** Draw the mean return of each fifth of the values, with its interval, against their mean; the diagonal is calibrated. */
  function calibration(rows) {
    const width = 340, height = 260, left = 46, bottom = 34, all = rows.flatMap((row) => [row.value, row.low, row.high]).filter((each) => each !== null);
    let [low, high] = [Math.min(...all), Math.max(...all)];
    const room = 0.06 * (high - low || 1);
    [low, high] = [low - room, high + room];
    const x = (each) => left + (width - left - 8) * (each - low) / (high - low), y = (each) => (height - bottom) - (height - bottom - 8) * (each - low) / (high - low);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Mean return against value" });
    for (const tick of ticks(low, high, 4)) {
      svg.append(draw("line", { class: "grid", x1: left, x2: width - 8, y1: y(tick), y2: y(tick) }),
        draw("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, format(tick)),
        draw("text", { x: x(tick), y: height - bottom + 14, "text-anchor": "middle" }, format(tick)));
    }
    svg.append(draw("line", { class: "cursor", x1: x(low), y1: y(low), x2: x(high), y2: y(high) }),
      draw("text", { class: "axis-name", x: (left + width) / 2, y: height - 4, "text-anchor": "middle" }, "value"),
      draw("text", { class: "axis-name", x: 12, y: height / 2 - 10, "text-anchor": "middle", transform: `rotate(-90 12 ${height / 2 - 10})` }, "mean return"));
    for (const row of rows) {
      const label = `value ${format(row.value)}: return ${format(row.return)}, 95% ${format(row.low)} to ${format(row.high)}, ${row.prefixes} beginnings`;
      svg.append(draw("g", { class: "fifth" }, draw("title", {}, label),
        draw("line", { x1: x(row.value), x2: x(row.value), y1: y(row.low), y2: y(row.high), stroke: COLOURS[0], "stroke-width": 5, opacity: 0.4 }),
        draw("circle", { cx: x(row.value), cy: y(row.return), r: 5, fill: COLOURS[0] })));
    }
    return svg;
  }

  function show(run) {
    const audit = data.runs[run].critic;
    const found = audit.findings.length > 0 ? [make("ul", {}, ...audit.findings.map((each) => make("li", { class: "fired" }, each)))] : [make("p", {}, "No defect found.")];
    byId("critic-audit").replaceChildren(
      note(`Values against the returns of ${audit.num_continuations} continuations of each of ${audit.num_prefixes} beginnings of responses to ${audit.num_prompts} held-out prompts.`),
      ...found, make("div", { class: "wide" }, figures(audit)),
      make("div", { class: "pair" },
        make("div", {}, make("h3", {}, "Calibration"), ...(audit.calibration.length > 0 ? [calibration(audit.calibration)] : []),
          note("Fifths of the values, with 95% intervals of their mean return; on the dashed line values and returns are equal.")),
        make("div", {}, make("h3", {}, "By position"), positions(audit), note("A dash: the true values do not differ beyond the noise."))));
  }

  const audited = data.runs.map((_, run) => run).filter((run) => data.runs[run].critic);
  if (audited.length > 0) {
    runMenu(byId("critic-run"), audited, show);
    show(audited[0]);
  } else {
    byId("critic-runs").hidden = true;
    byId("critic-audit").append(note("No audit of these runs' critics. Call trainer.audit_critic()."));
  }
})();
