"use strict";
// The section that is read is marked in the navigation.
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
})();
