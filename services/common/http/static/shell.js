// The colour theme: as the system, light or dark, remembered by the browser. A page without other scripts of its own says `data-alone`.
(() => {
  "use strict";
  const U = (window.Unspiral ||= {});
  const KEY = "unspiral-theme";
  const ORDER = ["system", "light", "dark"];
  const system = matchMedia("(prefers-color-scheme: dark)");

  U.theme = {
    chosen: "system",
    apply() {
      try {
        this.chosen = localStorage.getItem(KEY) || this.chosen;
      } catch {
        // storage is switched off: the choice lasts as long as the page
      }
      const dark = this.chosen === "dark" || (this.chosen === "system" && system.matches);
      document.documentElement.dataset.theme = dark ? "dark" : "light";
      const button = document.getElementById("theme");
      button.textContent = `Theme: ${this.chosen}`;
      button.setAttribute("aria-label", `Colour theme: ${this.chosen}`);
    },
    // Apply the theme, and call `redraw` whenever it changes.
    start(redraw) {
      const change = () => {
        this.apply();
        redraw();
      };
      this.apply();
      system.addEventListener("change", change);
      document.getElementById("theme").onclick = () => {
        this.chosen = ORDER[(ORDER.indexOf(this.chosen) + 1) % ORDER.length];
        try {
          localStorage.setItem(KEY, this.chosen);
        } catch {
          // as above
        }
        change();
      };
    },
  };
  if (document.currentScript?.dataset.alone !== undefined) U.theme.start(() => {});
})();
