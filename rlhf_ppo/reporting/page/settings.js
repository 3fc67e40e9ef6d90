"use strict";
// The arguments of the runs, those that differ from the defaults first.
(() => {
  const FEW = 16; // options named at the top of the page
  const place = byId("settings-tables");
  if (data.settings.length === 0) {
    place.append(note("The settings of these runs are not known: they have no ppo_settings.json."));
    return;
  }
  const shown = (row) => (row.differs && new Set(row.values).size > 1 ? row.values.flatMap((value, group) => [
    make("span", { class: "dot", style: `--colour: ${colourOf(group)}` }), `${value} `]) : [row.values[0]]);
  const head = ["argument", ...data.groups.map((_, group) => groupName(group)), "default"];
  const name = (row) => make("span", {}, row.name, ...(row.help ? [make("span", { class: "quiet block" }, row.help)] : []));
  const rows = (settings) => table(head, settings.map((row) => [name(row), ...row.values, row.default ?? "–"]), settings.map((row) => (row.differs ? "differs" : "")));
  const changed = data.settings.filter((row) => row.changed || (row.differs && data.groups.length > 1));
  const find = make("input", { id: "settings-find", type: "search", placeholder: "learning_rate, kl ..." }), all = make("div", { class: "wide" });
  const list = () => {
    const wanted = wantedIn("settings-find");
    all.replaceChildren(rows(data.settings.filter((row) => `${row.name} ${row.help || ""}`.toLowerCase().includes(wanted))));
  };
  find.addEventListener("input", list);
  place.append(make("h3", {}, "Different from the defaults"), make("div", { class: "wide", id: "changed" }, rows(changed)),
    make("details", {}, make("summary", {}, `All ${data.settings.length} arguments`),
      make("div", { class: "row controls" }, make("label", {}, "Find ", find)), all));
  list();
  const few = changed.filter((row) => row.name !== "seed").slice(0, FEW);
  if (few.length > 0) byId("chosen").append(make("h3", {}, "Different from the defaults"), make("div", { class: "row" },
    ...few.map((row) => make("span", { class: "option", title: `default: ${row.default ?? "none"}` }, `${row.name} `, make("b", {}, ...shown(row)))),
    make("a", { href: "#settings" }, changed.length > FEW ? `${changed.length - FEW} more` : "all settings")));
  const versions = Object.entries(data.versions);
  if (versions.length > 0) place.append(note(`Versions: ${versions.map((each) => each.join(" ")).join(" · ")}.`));
  const seeds = data.groups.map((group, index) => `${groupName(index)}: ${group.seeds.join(", ") || "not known"}`);
  place.append(note(`Seeds: ${seeds.join("; ")}. Runs that differ only in their seed share a column, with the settings of the first.`));
})();
