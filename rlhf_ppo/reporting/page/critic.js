"use strict";
// The audit of a run's critic: what it explains and ranks beside baselines.
(() => {
  const FIGURES = [
    ["explained variance", "explained_variance", "the critic"],
    ["explained variance", "explained_variance_of_prompt", "the prompt's mean"],
    ["Kendall's tau", "tau", "the critic"],
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

  function show(run) {
    const audit = data.runs[run].critic;
    const found = audit.findings.length > 0 ? [make("ul", {}, ...audit.findings.map((each) => make("li", { class: "fired" }, each)))] : [make("p", {}, "No defect found.")];
    byId("critic-audit").replaceChildren(
      note(`Values against the returns of ${audit.num_continuations} continuations of each of ${audit.num_prefixes} beginnings of responses to ${audit.num_prompts} held-out prompts.`),
      ...found, make("div", { class: "wide" }, figures(audit)));
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
