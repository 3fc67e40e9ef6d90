"use strict";
// What a judge said: win rates with their intervals, and the judged pairs behind them.
(() => {
  const FIRST = 8;
  const SAYS = { model: "the model's is better", opponent: "the opponent's is better", tie: "tie", none: "no verdict" };
  const FILTERS = {
    all: ["all pairs", () => true],
    model: ["won by the model", (row) => row.outcome === "model"],
    opponent: ["won by the opponent", (row) => row.outcome === "opponent"],
    tie: ["ties", (row) => row.outcome === "tie"],
    contradicted: ["orders contradict each other", (row) => row.first !== null && row.second !== null && row.first * row.second < 0],
    none: ["without a verdict", (row) => row.outcome === "none"],
  };
  const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(1)}%`);
  const now = { rows: [], all: false };

  /** The win rate as a dot and its interval as a line, on an axis from 0 to 100%; the middle is a draw. */
  function bar(judged) {
    const width = 220, x = (share) => 6 + share * (width - 12);
    const svg = draw("svg", { viewBox: `0 0 ${width} 24`, class: "rate", role: "img", "aria-label": `win rate ${percent(judged.win_rate)}` },
      draw("line", { class: "grid", x1: x(0), x2: x(1), y1: 12, y2: 12 }),
      draw("line", { class: "cursor", x1: x(0.5), x2: x(0.5), y1: 2, y2: 22 }));
    if (judged.win_rate === null) return svg;
    const [low, high] = judged.interval;
    svg.append(draw("line", { x1: x(low), x2: x(high), y1: 12, y2: 12, stroke: COLOURS[0], "stroke-width": 5, opacity: 0.4 }),
      draw("circle", { cx: x(judged.win_rate), cy: 12, r: 5, fill: COLOURS[0] }));
    return svg;
  }

  function summary() {
    const head = ["", "win rate", "0 to 100%", "95% interval", "at equal length", "won", "lost", "ties", "failed", "orders agree"];
    const rows = data.judged.map((each) => [
      make("span", {}, each.name, make("span", { class: "quiet block" }, `${each.model || "?"} against ${each.opponent || "?"}, judged by ${each.judge || "?"}`)),
      make("b", {}, percent(each.win_rate)), bar(each),
      each.win_rate === null ? "–" : `${percent(each.interval[0])} to ${percent(each.interval[1])}`, percent(each.length_controlled),
      each.wins, each.losses, each.ties, each.failed, percent(each.agreement),
    ]);
    const means = data.judged_seeds.map((each) => make("p", { class: "over-seeds" }, `${each.names.join(", ")}: mean `,
      make("b", {}, percent(each.mean)), ` over ${each.names.length} seeds, standard error ${(100 * each.standard_error).toFixed(1)}.`));
    byId("judged-table").append(table(head, rows), ...means, nothing("A tie counts half; failed verdicts do not count. The interval is over prompts. "
      + "Where a judge is asked about pairs, each is asked in both orders: a dash for one that scores single responses."));
  }

  function side(title, text, isBetter) {
    const mark = isBetter ? make("b", {}, " · better") : "";
    return make("div", {}, make("p", { class: "about" }, title, mark),
      make("p", { class: "answer" }, text === null ? "(no response)" : text || "(empty)"));
  }

  function order(place, verdict) {
    const said = verdict === null ? "no verdict" : verdict > 0 ? "model better" : verdict < 0 ? "opponent better" : "tie";
    return `model's ${place}: ${said}`;
  }

  function pair(row) {
    const orders = data.judged[now.number].agreement === null ? [] : [order("first", row.first), order("second", row.second)];
    const said = [SAYS[row.outcome], ...orders].join(" · ");
    return make("div", { class: "sample", "data-outcome": row.outcome }, make("p", { class: "about" }, said),
      make("p", { class: "prompt" }, row.prompt || ""),
      make("div", { class: "pair" }, side("Model", row.model, row.outcome === "model"), side("Opponent", row.opponent, row.outcome === "opponent")));
  }

  function list() {
    const chosen = now.rows.filter(FILTERS[byId("judged-filter").value][1]);
    const few = now.all ? chosen : chosen.slice(0, FIRST);
    byId("judged-list").replaceChildren(...few.map(pair));
    byId("judged-more").hidden = few.length === chosen.length;
    byId("judged-more").textContent = `Show all ${chosen.length}`;
  }

  function choose(number) {
    Object.assign(now, { number, rows: data.judged[number].rows, all: false });
    const options = Object.entries(FILTERS).map(([name, [text, fits]]) => [name, text, now.rows.filter(fits).length]);
    byId("judged-filter").replaceChildren(...options.filter((option) => option[2] > 0)
      .map(([name, text, count]) => make("option", { value: name }, `${text} (${count})`)));
    list();
  }

  if (data.judged.length === 0) {
    byId("judged").querySelectorAll(".controls, #judged-more").forEach((each) => { each.hidden = true; });
    byId("judged-table").append(nothing("Nothing was judged: `rlhf-ppo judge --output_dir RUN/judged` does, or name its directory by --judged."));
    return;
  }
  data.judged.forEach((each, number) => byId("judged-of").append(make("option", { value: number }, each.name)));
  byId("judged-of").parentElement.hidden = data.judged.length < 2;
  byId("judged-of").addEventListener("change", () => choose(Number(byId("judged-of").value)));
  byId("judged-filter").addEventListener("change", () => { now.all = false; list(); });
  byId("judged-more").addEventListener("click", () => { now.all = true; list(); });
  summary();
  choose(0);
})();
