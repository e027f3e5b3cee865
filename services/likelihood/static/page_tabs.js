// Tabs below the head of the page. Another tab is a file of its own that calls `U.tabs.add({ id, title, draw })`:
// `draw(panel, runs)` fills its panel with the chosen runs, whenever it is shown or they change. It may return a promise.
(() => {
  "use strict";
  const U = window.Unspiral;
  const { node } = U;
  const $ = (id) => document.getElementById(id);

  U.tabs = {
    list: [],
    add({ id, title, draw = null, panel = null }) {
      const shown = panel || node("section", { class: "tab-panel" });
      shown.id = `tab-${id}`;
      shown.setAttribute("role", "tabpanel");
      shown.setAttribute("aria-labelledby", `tab-of-${id}`);
      if (!panel) $("tab-panels").append(shown);
      const button = node("button", { type: "button", role: "tab", id: `tab-of-${id}`, "aria-controls": shown.id, onclick: () => this.show(id), onkeydown: (e) => this.key(e) }, title);
      this.list.push({ id, draw, panel: shown, button });
      $("tabs").append(button);
    },
    get current() {
      return this.list.find((tab) => tab.id === U.app.view.tab) || this.list[0];
    },
    show(id) {
      U.app.view.tab = id;
      U.app.remember();
      U.app.draw();
    },
    draw(runs) {
      const { current } = this;
      for (const tab of this.list) {
        tab.panel.hidden = tab !== current;
        tab.button.setAttribute("aria-selected", String(tab === current));
        tab.button.tabIndex = tab === current ? 0 : -1;
      }
      return current.draw?.(current.panel, runs);
    },
    key(e) {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
      if (!step) return;
      const at = this.list.findIndex((tab) => tab.button === e.target);
      const next = this.list[(at + step + this.list.length) % this.list.length];
      next.button.focus();
      this.show(next.id);
      e.preventDefault();
    },
  };
})();
