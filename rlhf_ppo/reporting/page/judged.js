"use strict";
// Win rates with their intervals, and the judged pairs.
(() => {
  const FIRST = 8;
  const OUTCOMES = { model: "the model wins", opponent: "the opponent wins", tie: "tie", none: "no verdict" };
  const FILTERS = {
    all: ["all pairs", () => true],
    model: ["won by the model", (row) => row.outcome === "model"],
    opponent: ["won by the opponent", (row) => row.outcome === "opponent"],
    tie: ["ties", (row) => row.outcome === "tie"],
    contradicted: ["orders contradict each other", (row) => row.first !== null && row.second !== null && row.first * row.second < 0],
    none: ["without a verdict", (row) => row.outcome === "none"],
  };
  const now = { rows: [], all: false };

  function summary() {
    const head = ["", "win rate", "0 to 100%", "95% interval", "at equal length", "won", "lost", "ties", "failed", "orders agree"];
    const rows = data.judged.map((each) => [
      make("span", {}, each.name, make("span", { class: "quiet block" }, `${each.model || "?"} against ${each.opponent || "?"}, judged by ${each.judge || "?"}`)),
      make("b", {}, percent(each.win_rate)), rateBar(each.win_rate, each.interval, COLOURS[0]),
      each.win_rate === null ? "–" : `${percent(each.interval[0])} to ${percent(each.interval[1])}`, percent(each.length_controlled),
      each.wins, each.losses, each.ties, each.failed, percent(each.agreement),
    ]);
    const means = data.judged_seeds.map((each) => make("p", { class: "over-seeds" }, `${each.names.join(", ")}: mean `,
      make("b", {}, percent(each.mean)), ` over ${each.names.length} seeds, standard error ${(100 * each.standard_error).toFixed(1)}.`));
    byId("judged-table").append(table(head, rows), ...means, note("A tie counts half; failed verdicts do not count. The interval is over prompts. "
      + "A judge of pairs sees each pair in both orders; a dash: the judge scores single responses."));
  }

  function side(title, text, isBetter) {
    return turn(isBetter ? "response" : "other", [title, ...(isBetter ? [make("b", {}, " · better")] : [])],
      ...folded(make("p", { class: "answer" }, ...(text === null ? ["(no response)"] : text ? marked(text, wantedIn("judged-find")) : ["(empty)"])), wantedIn("judged-find")));
  }

  function order(place, verdict) {
    const outcome = verdict === null ? "no verdict" : verdict > 0 ? "model better" : verdict < 0 ? "opponent better" : "tie";
    return `model ${place}: ${outcome}`;
  }

  function pair(row) {
    const orders = data.judged[now.number].agreement === null ? [] : [order("first", row.first), order("second", row.second)];
    return make("div", { class: "sample", "data-outcome": row.outcome }, make("p", { class: "about" }, [OUTCOMES[row.outcome], ...orders].join(" · ")),
      promptTurn(row.prompt, wantedIn("judged-find")),
      make("div", { class: "pair" }, side("Response of the model", row.model, row.outcome === "model"), side("Response of the opponent", row.opponent, row.outcome === "opponent")));
  }

  function list() {
    const wanted = wantedIn("judged-find");
    const chosen = now.rows.filter(FILTERS[byId("judged-filter").value][1]).filter((row) => [row.prompt, row.model, row.opponent].join("\n").toLowerCase().includes(wanted));
    const few = now.all ? chosen : chosen.slice(0, FIRST);
    byId("judged-list").replaceChildren(...(few.length > 0 ? few.map(pair) : [note("No pair matches.")]));
    byId("judged-more").hidden = few.length === chosen.length;
    byId("judged-more").textContent = `Show all ${chosen.length}`;
  }

  function choose(number) {
    Object.assign(now, { number, rows: data.judged[number].rows, all: false });
    const { wins, losses, ties, failed } = data.judged[number];
    const totals = { all: wins + losses + ties + failed, model: wins, opponent: losses, tie: ties, none: failed };
    const options = Object.entries(FILTERS).map(([name, [text, fits]]) => [name, text, now.rows.filter(fits).length]);
    byId("judged-filter").replaceChildren(...options.filter((option) => option[2] > 0)
      .map(([name, text, count]) => make("option", { value: name }, `${text} (${count < totals[name] ? `${count} of ${totals[name]}` : count})`)));
    list();
  }

  if (data.judged.length === 0) {
    byId("judged").querySelectorAll(".controls, #judged-more").forEach((each) => { each.hidden = true; });
    byId("judged-table").append(note("No judge compared these runs. Run rlhf-ppo judge with --output_dir RUN/judged, or name the judge's directory with --judged."));
    return;
  }
  data.judged.forEach((each, number) => byId("judged-of").append(make("option", { value: number }, each.name)));
  byId("judged-of").parentElement.hidden = data.judged.length < 2;
  byId("judged-of").addEventListener("change", () => choose(Number(byId("judged-of").value)));
  for (const [id, kind] of [["judged-filter", "change"], ["judged-find", "input"]]) byId(id).addEventListener(kind, () => { now.all = false; list(); });
  byId("judged-more").addEventListener("click", () => { now.all = true; list(); });
  summary();
  choose(0);
})();
