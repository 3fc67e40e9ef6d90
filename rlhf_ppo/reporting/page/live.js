"use strict";
// The section that is read is marked in the navigation; the page of a run that goes on reloads itself and keeps its place.
(() => {
  const links = [...document.querySelectorAll("nav a")];
  const sections = links.map((link) => byId(link.getAttribute("href").slice(1)));

  function markSection() {
    const isAtEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 2;
    const passed = sections.filter((section) => section.getBoundingClientRect().top < 140);
    const current = isAtEnd ? sections.length - 1 : Math.max(0, passed.length - 1);
    links.forEach((link, index) => {
      if (index !== current) link.removeAttribute("aria-current");
      else if (!link.hasAttribute("aria-current")) {
        link.setAttribute("aria-current", "true");
        link.parentElement.scrollTo({ left: link.offsetLeft - link.parentElement.clientWidth / 2 + link.offsetWidth / 2 });
      }
    });
  }
  addEventListener("scroll", markSection, { passive: true });
  addEventListener("resize", markSection);
  markSection();

  const KEY = `report ${location.pathname}`;
  const named = () => [...document.querySelectorAll("input[id], select[id]")];

  /** Keep the scroll position and the controls for the page that replaces this one. */
  function keep() {
    const controls = named().map((each) => [each.id, each.value, each.checked, each.type === "range" && each.value === each.max]);
    const state = { scroll: scrollY, controls, colour: document.querySelector("input[name=colour]:checked").value, shown: shownGroups,
      open: [...document.querySelectorAll("details")].map((each) => each.open), focus: document.activeElement?.id };
    sessionStorage.setItem(KEY, JSON.stringify(state));
  }

  function restore(state) {
    for (const [id, value, checked, atEnd] of state.controls) {
      const input = byId(id);
      if (!input || (input.value === value && input.checked === checked)) continue;
      Object.assign(input, { value: atEnd && id.endsWith("-slider") ? input.max : value, checked });
      for (const kind of ["input", "change"]) input.dispatchEvent(new Event(kind, { bubbles: true }));
    }
    const colour = document.querySelector(`input[name=colour][value="${state.colour}"]`);
    if (colour && !colour.checked) colour.click();
    document.querySelectorAll(".chip").forEach((chip, group) => { if (state.shown[group] === false) chip.click(); });
    document.querySelectorAll("details").forEach((each, index) => { each.open = Boolean(state.open[index]); });
    if (state.focus) byId(state.focus)?.focus({ preventScroll: true });
    history.scrollRestoration = "manual"; // the browser would look for the element that was at the top
    const scroll = () => scrollTo({ top: state.scroll, behavior: "instant" });
    requestAnimationFrame(scroll);
    addEventListener("load", () => requestAnimationFrame(scroll), { once: true });
  }

  try {
    const kept = sessionStorage.getItem(KEY);
    sessionStorage.removeItem(KEY);
    if (kept) restore(JSON.parse(kept));
  } catch (error) {
    console.info(`The page begins at its top: ${error}`); // without storage
  }

  if (data.refresh_seconds === null) return;
  byId("live").hidden = false;
  byId("live").textContent = "running";
  byId("live").title = `The run goes on. This page reloads every ${data.refresh_seconds} seconds.`;
  setInterval(() => {
    const isInUse = document.hidden || byId("large").open || String(getSelection()) !== "";
    if (isInUse) return;
    try { keep(); } catch { /* without storage */ }
    location.reload();
  }, 1000 * data.refresh_seconds);
})();
