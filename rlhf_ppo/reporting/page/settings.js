"use strict";
// What the runs were started with.
(() => {
  const head = ["argument", ...data.groups.map((_, group) => groupName(group))];
  const rows = (settings) => table(head, settings.map((row) => [row.name, ...row.values]), settings.map((row) => (row.differs ? "differs" : "")));
  const place = byId("settings-tables");
  if (data.settings.length === 0) {
    place.append(nothing("The settings of these runs are not known: an earlier version did not write them."));
    return;
  }
  const changed = data.settings.filter((row) => row.changed || (row.differs && data.groups.length > 1));
  place.append(make("h3", {}, "Other than the defaults"), make("div", { class: "wide" }, rows(changed)));
  place.append(make("details", {}, make("summary", {}, `All ${data.settings.length} arguments`), make("div", { class: "wide" }, rows(data.settings))));
  const versions = Object.entries(data.versions);
  if (versions.length > 0) place.append(make("h3", {}, "Versions"), make("div", { class: "wide" }, table(["package", "version"], versions)));
  const seeds = data.groups.map((group) => group.seeds.join(", "));
  place.append(make("p", { class: "quiet" }, `Seeds: ${data.groups.map((_, group) => `${groupName(group)}: ${seeds[group] || "not known"}`).join("; ")}. Where runs differ in their seed, the settings are those of the first.`));
})();
