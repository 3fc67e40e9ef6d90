"use strict";
// Samples through training, the histogram of scores, search, and responses with coloured tokens.
(() => {
  const FIRST = 6, NUM_BINS = 20;

  /** Let a slider choose one of a run's updates. */
  function slider(id, updates, change) {
    const input = byId(`${id}-slider`);
    input.max = updates.length - 1;
    input.value = updates.length - 1;
    const moved = () => {
      const update = updates[Number(input.value)];
      byId(`${id}-step`).textContent = update.step;
      input.setAttribute("aria-valuetext", `update ${update.step}`);
      change(update);
    };
    input.oninput = moved;
    moved();
  }

  function without(id, text) {
    byId(id).querySelectorAll(".controls, .quiet, #legend, #inspector, #histogram, #more").forEach((each) => { each.hidden = true; });
    byId(id).append(note(text));
  }

  // ---- Samples ----

  function answer(title, row) {
    return turn("response", [title, make("span", { class: "about" }, " · score ", make("b", {}, format(row.score)))],
      ...folded(make("p", { class: "answer" }, row.response || "(empty)")));
  }

  function samplesOf(run) {
    const tables = data.runs[run].samples;
    slider("samples", tables, (update) => {
      byId("samples-list").replaceChildren(...update.rows.map((row) => {
        const first = tables[0].rows.find((each) => each.prompt === row.prompt && String(each.images) === String(row.images));
        const both = first && update !== tables[0] ? [answer(`Response after update ${tables[0].step}`, first)] : [];
        return make("div", { class: "sample" }, promptTurn(row.prompt, "", row.images),
          make("div", { class: "pair" }, ...both, answer(`Response after update ${update.step}`, row)));
      }));
    });
  }

  const withSamples = data.runs.map((_, run) => run).filter((run) => data.runs[run].samples.length > 0);
  if (withSamples.length > 0) {
    runMenu(byId("samples-run"), withSamples, samplesOf);
    samplesOf(withSamples[0]);
  } else {
    without("samples", "These runs have no sample tables. Set num_sample_generations to write them.");
  }

  // ---- Responses ----

  const now = { updates: [], update: null, edges: [], bin: null, all: false, chosen: null };
  const colouring = () => document.querySelector("input[name=colour]:checked").value;
  const ENDS = { answer: "ended by the policy", done: "ended by the environment", length: "cut by its length", calls: "cut by the number of calls", time: "cut by the time limit", environment: "cut by the environment" };
  const NAMES = { value: "value", advantage: "advantage (whitened)", kl: "KL, nats", reward: "reward" };

  function responsesOf(run) {
    const updates = data.runs[run].responses;
    const scores = updates.flatMap((update) => update.rows.map((row) => row.score)).filter((score) => score !== null);
    let [low, high] = scores.length > 0 ? [Math.min(...scores), Math.max(...scores)] : [0, 1];
    if (low === high) [low, high] = [low - 0.5, high + 0.5];
    now.edges = Array.from({ length: NUM_BINS + 1 }, (_, index) => low + (high - low) * index / NUM_BINS);
    now.updates = updates;
    slider("responses", updates, (update) => {
      Object.assign(now, { update, bin: null, all: false, chosen: null });
      show();
    });
  }

  function show() {
    histogram();
    legend();
    found();
    list();
    inspect(null);
  }

  const hits = (row, wanted) => `${row.prompt || ""}\n${row.text.join("")}`.toLowerCase().includes(wanted);

  /** Count the responses of each update that hold the wanted text; a click shows those of an update. */
  function found() {
    const wanted = wantedIn("responses-find"), updates = now.updates;
    byId("found-in").replaceChildren(...(wanted ? ["Found at update", ...updates.map((update, index) => {
      const count = update.rows.filter((row) => hits(row, wanted)).length;
      const button = make("button", { type: "button", "aria-pressed": String(update === now.update) }, `${update.step}: ${count} of ${update.rows.length}`);
      button.addEventListener("click", () => { byId("responses-slider").value = index; byId("responses-slider").oninput(); });
      return button;
    })] : []));
  }

  const binOf = (score) => {
    const place = Math.floor((score - now.edges[0]) / (now.edges[NUM_BINS] - now.edges[0]) * NUM_BINS);
    return Math.min(NUM_BINS - 1, Math.max(0, place));
  };

  function histogram() {
    const rows = now.update.rows.filter((row) => row.score !== null);
    const counts = Array(NUM_BINS).fill(0);
    rows.forEach((row) => { counts[binOf(row.score)] += 1; });
    const width = Math.max(280, Math.min(760, byId("histogram").clientWidth)), height = 150, bottom = 22;
    const wide = width / NUM_BINS, most = Math.max(1, ...counts);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Scores of the responses" });
    counts.forEach((count, bin) => {
      const tall = (height - bottom - 16) * count / most;
      const label = `score ${format(now.edges[bin])} to ${format(now.edges[bin + 1])}: ${count} response${count === 1 ? "" : "s"}`;
      const dim = now.bin !== null && now.bin !== bin ? " dim" : "";
      const bar = draw("rect", { x: bin * wide + 1, width: wide - 2, y: height - bottom - tall, height: tall,
        class: `bar${dim}${count === 0 ? " empty" : ""}`, "data-bin": bin, "aria-label": label,
        ...(count > 0 ? { tabindex: 0, role: "button", "aria-pressed": String(now.bin === bin) } : {}) }, draw("title", {}, label));
      const choose = () => { Object.assign(now, { bin: now.bin === bin ? null : bin, all: false }); histogram(); list(); };
      if (count > 0) {
        bar.addEventListener("click", choose);
        bar.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(); } });
        svg.append(draw("text", { x: (bin + 0.5) * wide, y: height - bottom - tall - 4, "text-anchor": "middle" }, count));
      }
      svg.append(bar);
    });
    svg.append(draw("line", { class: "grid", x1: 0, x2: width, y1: height - bottom, y2: height - bottom }));
    for (const tick of ticks(now.edges[0], now.edges[NUM_BINS], 5)) {
      const x = (tick - now.edges[0]) / (now.edges[NUM_BINS] - now.edges[0]) * width;
      svg.append(draw("text", { x, y: height - 6, "text-anchor": x < 14 ? "start" : x > width - 14 ? "end" : "middle" }, format(tick)));
    }
    const unscored = now.update.rows.length - rows.length;
    const kept = now.update.kept > now.update.rows.length ? ` of the ${now.update.kept} kept` : "";
    const left = unscored > 0 ? `, ${unscored} without a score` : "";
    byId("histogram").replaceChildren(
      note(`Scores of ${now.update.rows.length} responses${kept}${left}. Click a bar to see its responses.`), svg);
  }

  const hasMean = () => colouring() === "value";

  /** Centre and half width of the colours: 0 for what has a sign, else the mean; outliers get the full colour. */
  function range() {
    const figures = now.update.rows.flatMap((row) => row.tokens[colouring()]).filter((value) => value !== null);
    if (figures.length === 0) return { centre: 0, half: 1 };
    const centre = hasMean() ? figures.reduce((sum, value) => sum + value, 0) / figures.length : 0;
    const sizes = figures.map((value) => Math.abs(value - centre)).sort((one, other) => one - other);
    return { centre, half: sizes[Math.floor((sizes.length - 1) * 0.98)] || sizes[sizes.length - 1] || 1 };
  }

  const tint = (share) => `rgba(var(--${share < 0 ? "low" : "high"}), ${(0.75 * Math.min(1, Math.abs(share))).toFixed(3)})`;

  function legend() {
    const { centre, half } = range();
    const ramp = make("span", { class: "ramp", style: `background: linear-gradient(to right, ${tint(-1)}, ${tint(0)}, ${tint(1)})` });
    const middle = hasMean() ? `uncoloured: the mean, ${format(centre)}` : "uncoloured: 0";
    const bar = make("span", { class: "bar-of-colours" }, make("span", {}, format(centre - half)), ramp, make("span", {}, format(centre + half)));
    byId("legend").replaceChildren(make("span", {}, NAMES[colouring()]), bar, make("span", { class: "quiet" }, middle));
  }

  function list() {
    const order = byId("order").value, { centre, half } = range();
    const wanted = wantedIn("responses-find");
    let rows = now.update.rows.filter((row) => hits(row, wanted) && (now.bin === null || (row.score !== null && binOf(row.score) === now.bin)));
    const rank = (row) => row.score ?? (order === "best" ? -Infinity : Infinity);
    if (order !== "sampled") rows = [...rows].sort((one, other) => (order === "best" ? rank(other) - rank(one) : rank(one) - rank(other)));
    const few = now.all ? rows : rows.slice(0, FIRST);
    byId("response-list").replaceChildren(...(few.length > 0 ? few.map((row) => response(row, wanted, centre, half)) : [note("No response matches.")]));
    byId("more").hidden = few.length === rows.length;
    byId("more").textContent = `Show all ${rows.length}`;
  }

  /** Return for each token whether it is a part of the wanted text. */
  function tokensOf(row, wanted) {
    const places = occurrences(row.text.join(""), wanted);
    let start = 0;
    return row.text.map((text) => {
      const from = start;
      start += text.length;
      return places.some(([first, last]) => from < last && start > first);
    });
  }

  function response(row, wanted, centre, half) {
    const figures = row.tokens[colouring()], isHit = tokensOf(row, wanted);
    const spans = row.text.map((text, index) => {
      const span = make("span", { "data-index": index }, text);
      if (isHit[index]) span.classList.add("hit");
      if (text === "") span.classList.add("part");
      if (!row.written[index]) span.classList.add("gap");
      else if (figures[index] !== null) span.style.background = tint((figures[index] - centre) / half);
      return span;
    });
    const block = (kind, title, part) => turn(kind, title, ...folded(make("p", { class: "tokens", tabindex: "0" }, ...part), wanted));
    const tokens = make("div", {}, ...(row.episode ? conversation(row, spans, block) : [block("response", "Response", spans)]));
    const choose = (event) => { if (event.target.dataset.index) inspect(event.target, row); };
    tokens.addEventListener("pointerover", choose);
    tokens.addEventListener("click", choose);
    tokens.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const at = spans.includes(now.chosen) ? Number(now.chosen.dataset.index) + step : 0;
      if (spans[at]) inspect(spans[at], row);
    });
    const paid = Object.entries(row.rewards).map(([name, score]) => `${name} ${format(score)}`);
    const several = paid.length > 1 ? [`rewards: ${paid.join(", ")}`] : [];
    const extra = Object.entries(row.extra).map(([name, value]) => `${name} ${value}`);
    const about = [...several, `KL ${format(row.kl)}`, row.length === 1 ? "1 token" : `${row.length} tokens`, row.episode ? ENDS[row.episode.end] : row.ended ? "ended" : "cut off", ...extra];
    return make("div", { class: "response" },
      make("p", { class: "about" }, "score ", make("b", {}, format(row.score)), ` · ${about.join(" · ")}`),
      promptTurn(row.prompt, wanted, row.images), tokens);
  }

  /** Return the blocks of an episode: turns with value, advantage and reward, and between them who answered. */
  function conversation(row, spans, block) {
    const blocks = [], sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);
    let number = 0;
    for (let from = 0, to = 0; from < spans.length; from = to) {
      while (to < spans.length && row.written[to] === row.written[from]) to += 1;
      const part = (name) => row.tokens[name].slice(from, to);
      const figures = ` · value ${format(row.tokens.value[from], 3)} · advantage ${format(sum(part("advantage")) / (to - from), 3)} · reward ${format(sum(part("reward")), 3)} (environment ${format(row.episode.turn_reward[number] ?? 0, 3)})`;
      blocks.push(row.written[from]
        ? block("response", [`Turn ${number + 1}`, make("span", { class: "about" }, figures)], spans.slice(from, to))
        : block("prompt", `Answer: ${row.episode.speakers[number - 1] || "environment"}`, spans.slice(from, to)));
      if (row.written[from]) number += 1;
    }
    return blocks;
  }

  function inspect(span, row) {
    now.chosen?.classList.remove("chosen");
    now.chosen = span;
    if (span === null) {
      byId("inspector").replaceChildren(make("span", { class: "quiet" }, "Point at a token, or tap it, to read its figures."));
      return;
    }
    span.classList.add("chosen");
    const index = Number(span.dataset.index);
    const figures = row.written[index] ? Object.keys(row.tokens).map((name) => `${NAMES[name]} ${format(row.tokens[name][index])}`)
      : ["not written by the policy"];
    const text = row.text[index] === "" ? "(part of a character)" : JSON.stringify(row.text[index]).slice(1, -1);
    byId("inspector").replaceChildren(make("code", {}, text), ` token ${index + 1}, id ${row.id[index]} · ${figures.join(" · ")}`);
  }

  const withResponses = data.runs.map((_, run) => run).filter((run) => data.runs[run].responses.length > 0);
  if (withResponses.length > 0) {
    runMenu(byId("responses-run"), withResponses, responsesOf);
    responsesOf(withResponses[0]);
    byId("order").addEventListener("change", list);
    byId("colour").addEventListener("change", () => { legend(); list(); inspect(null); });
    byId("more").addEventListener("click", () => { now.all = true; list(); });
    byId("responses-find").addEventListener("input", () => { now.all = false; found(); list(); inspect(null); });
    window.addEventListener("resize", histogram);
  } else {
    without("responses", "These runs kept no responses.");
  }
})();
