// The microscope: the groups of a step as a grid, one of them token by token.
(() => {
  "use strict";
  const U = window.Unspiral;
  const { node, number } = U;

  const HELP = "A square is a trajectory, right (✓) or wrong (✗), dashed where it was invalid or cut off; its colour is what the update did to it: orange lost likelihood, blue gained it. Keys: j and k for the next and the previous group, arrows from token to token, m for the one that lost most.";

  class Microscope {
    // `on.changed` is told what is shown; `on.step` is asked for another step.
    constructor(root, on) {
      this.root = root;
      this.on = on;
      this.filters = { which: "", source: "", order: "mixed", text: "", rule: "" };
      this.choice = {};
      this.asked = 0;
      this.form = this.makeForm();
      this.why = node("div", { class: "panel why", hidden: true });
      this.grid = node("div", { class: "groups", role: "group", "aria-label": "Groups of the step" });
      this.note = node("p", { class: "hint", role: "status" });
      this.help = node("details", { class: "hint reading", open: !matchMedia("(max-width: 800px)").matches }, node("summary", {}, "How to read this"), node("p", {}, HELP));
      this.panel = node("section", { class: "panel group-panel", id: "group-panel", tabindex: "-1", "aria-label": "Tokens of a group", hidden: true });
      this.bar = node("div", { class: "readout", role: "status", "aria-live": "polite", hidden: true });
      root.replaceChildren(this.form, this.why, this.note, this.help, this.grid, this.panel, this.bar);
      this.panel.addEventListener("mouseover", (e) => this.point(e.target, false));
      this.panel.addEventListener("click", (e) => this.point(e.target, true));
      document.addEventListener("keydown", (e) => this.key(e));
    }

    makeForm() {
      const select = (name, label, options) => {
        const input = node("select", { name, onchange: () => this.filter() }, ...options.map(([value, text]) => node("option", { value }, text)));
        return node("label", {}, `${label} `, input);
      };
      const text = node("input", { type: "search", name: "text", maxlength: "200", placeholder: "question, tokens, documents", oninput: () => this.soon() });
      return node(
        "form",
        { class: "filters", onsubmit: (e) => (e.preventDefault(), this.filter()) },
        select("which", "Show", [["", "all"], ["right", "right"], ["wrong", "wrong"], ["invalid", "invalid action"], ["truncated", "cut off"]]),
        select("order", "First", [["mixed", "right beside wrong"], ["falls", "falls most"], ["longest", "longest"], ["alarm", "weighs in the alarm"]]),
        select("source", "From", [["", "all sources"]]),
        node("label", { class: "search" }, "Text ", text),
      );
    }

    filter() {
      const given = new FormData(this.form);
      for (const name of ["which", "source", "order", "text"]) this.filters[name] = given.get(name) ?? "";
      this.choice = {};
      return this.read();
    }
    soon() {
      clearTimeout(this.due);
      this.due = setTimeout(() => this.filter(), 300);
    }

    // Show a step of a run. `choice`: group, a, b, at (of a token), as the address has them.
    show(run, step, filters = {}, choice = {}) {
      Object.assign(this, { run, step, choice });
      Object.assign(this.filters, { which: "", source: "", order: filters.rule ? "alarm" : "mixed", text: "", rule: "" }, filters);
      for (const name of ["which", "order", "text"]) this.form.elements[name].value = this.filters[name];
      return this.read();
    }

    async read() {
      const turn = ++this.asked;
      const heads = await U.samples.heads(this.run, this.step, this.filters);
      if (turn !== this.asked) return;
      this.heads = heads;
      this.drawForm();
      this.drawGrid();
      const heaviest = heads.heaviest;
      const linked = !this.choice.group && this.filters.rule && heaviest;
      if (linked) this.choice = { group: heaviest.group, a: heaviest.uid, at: heaviest.place ? `${heaviest.place.segment}.${heaviest.place.token}` : null };
      const group = heads.groups.find((g) => g.group === this.choice.group) || heads.groups[0];
      await (group ? this.open(group.group, this.choice) : this.close());
      this.on.changed?.(this);
    }

    drawForm() {
      const source = this.form.elements.source;
      source.replaceChildren(node("option", { value: "" }, "all sources"), ...this.heads.sources.map((s) => node("option", { value: s }, s)));
      source.value = this.filters.source;
      source.parentElement.hidden = this.heads.sources.length < 2;
      this.form.elements.order.querySelector("[value=alarm]").hidden = !this.filters.rule;
      const { trajectories, matching, more_groups: more, kept_groups: kept, step_groups: had, step_trajectories: all } = this.heads;
      const part = all > trajectories ? ` Shown here are ${kept} of ${had} groups of this step, ${trajectories} of ${all} trajectories${U.source.live ? ": so many are kept token by token (store.trajectory_groups)" : ""}.` : "";
      this.form.hidden = !trajectories;
      if (!trajectories) this.drawKept();
      else this.note.textContent = `${matching === trajectories ? trajectories : `${matching} of ${trajectories}`} ${trajectories === 1 ? "trajectory" : "trajectories"}, ${this.heads.groups.length} group${this.heads.groups.length === 1 ? "" : "s"}${more ? `, and ${more} more groups` : ""}.${part}`;
      this.help.hidden = !trajectories;
    }

    // Of a step without trajectories: of which steps there are some, and which one is the run's last.
    async drawKept() {
      const turn = this.asked;
      this.note.textContent = `No trajectories of step ${this.step} are kept token by token.`;
      const { steps, last } = await U.samples.kept(this.run);
      if (turn !== this.asked) return;
      const parts = [last === null ? " No step of the run has ended." : ` The run's last step is ${last}.`];
      if (steps.length) {
        const shown = steps.length > 20 ? [...steps.slice(0, 3), ...steps.slice(-15)] : steps;
        parts.push(" Kept are those of ", ...shown.flatMap((step, i) => [i ? (i === 3 && shown !== steps ? " … " : ", ") : `step${steps.length === 1 ? "" : "s"} `, U.samples.live ? node("a", { href: `/runs/${encodeURIComponent(this.run)}/steps/${step}` }, String(step)) : String(step)]), ".");
      }
      this.note.append(...parts);
    }

    drawGrid() {
      const heads = this.heads.groups.flatMap((g) => g.trajectories);
      const sizes = heads.map((h) => Math.abs(h.change ?? 0)).sort((x, y) => x - y);
      const scale = Math.max(0.02, sizes[sizes.length - 1] || 0);
      this.grid.replaceChildren(...this.heads.groups.map((g) => this.card(g, scale)));
    }

    card(group, scale) {
      const all = group.trajectories;
      const { whole } = group; // a filter leaves squares out, and changes no mean
      const squares = all.map((h) => {
        const [sign, word] = U.verdict(h.right);
        const known = h.change !== null && h.change !== undefined;
        const mark = node("span", { class: `square ${word.replace(" ", "-")}${known ? "" : " unscored"}${h.valid === false || h.finish === "length" ? " flagged" : ""}`, title: `${word}, change ${U.signed(h.change)} nats per token` }, sign);
        if (known) mark.style.background = U.tint(h.change, scale);
        return mark;
      });
      const pair = (name, value) => node("div", {}, node("dt", {}, name), node("dd", {}, value));
      return node(
        "button",
        { type: "button", class: "card", "data-group": group.group, "aria-pressed": "false", onclick: () => this.pick(group.group) },
        node("span", { class: "asked" }, group.question ? U.short(group.question, 110) : `Group ${group.group}`),
        node("span", { class: "squares" }, ...squares),
        node("dl", {}, pair("reward", number(whole.reward)), pair("trajectories that fell", U.percent(whole.falling)), pair("nats per token", U.signed(whole.change)), pair("searches", number(whole.searches))),
      );
    }

    async pick(group) {
      this.choice = { group };
      await this.open(group, {});
      this.panel.focus({ preventScroll: true });
      this.panel.scrollIntoView({ block: "start" });
      this.on.changed?.(this);
    }

    close() {
      this.why.hidden = this.panel.hidden = this.bar.hidden = true;
      this.view = null;
    }

    async open(group, choice) {
      const turn = this.asked;
      const trajectories = await U.samples.group(this.run, this.step, group);
      if (turn !== this.asked) return;
      const shown = this.heads.groups.find((g) => g.group === group)?.trajectories || [];
      const kept = new Set(shown.map((h) => h.uid));
      const all = trajectories.filter((t) => kept.has(t.uid));
      for (const t of all) t.verdict = shown.find((h) => h.uid === t.uid).right ?? null;
      const falls = (t) => shown.find((h) => h.uid === t.uid).change ?? 0;
      const right = all.filter((t) => t.verdict === true).sort((x, y) => falls(x) - falls(y));
      const a = all.find((t) => t.uid === choice.a) || right[0] || all[0];
      const b = all.find((t) => t.uid === choice.b && t.uid !== a.uid) || U.partner(all, a);
      this.choice = { ...choice, group };
      this.view = { trajectories: all, heads: shown, untouched: this.heads.untouched, a, b, scale: U.scaleOf(all), through: U.samples.through(this.run, all[0]), choose: (side, uid) => this.choose(side, uid) };
      this.draw();
      for (const card of this.grid.children) card.setAttribute("aria-pressed", String(card.dataset.group === group));
      const pressed = this.grid.querySelector("[aria-pressed=true]");
      if (pressed) this.grid.scrollLeft = pressed.offsetLeft - this.grid.offsetLeft; // on a phone the groups are one row
      this.drawWhy();
      const [, side, at] = /^(b?)(.*)$/.exec(choice.at || "");
      const of = side ? this.view.b : a;
      if (at && of) this.go(of.uid, at, Boolean(this.filters.rule));
      else this.bar.hidden = true;
    }

    draw() {
      this.panel.hidden = false;
      this.panel.replaceChildren(...U.drawGroup(this.view));
    }

    choose(side, uid) {
      const other = side === "a" ? "b" : "a";
      const chosen = { a: this.view.a.uid, b: this.view.b?.uid, [side]: uid };
      if (chosen[other] === uid) return;
      this.choice = { group: this.choice.group, ...chosen };
      Object.assign(this.view, { a: this.view.trajectories.find((t) => t.uid === chosen.a), b: this.view.trajectories.find((t) => t.uid === chosen.b) });
      this.draw();
      this.panel.querySelector(`input[name="side-${side}"]:checked`)?.focus();
      this.bar.hidden = true;
      this.on.changed?.(this);
    }

    // Why the reader was led here, and back to that token.
    drawWhy() {
      const { rule } = this.filters;
      const heaviest = this.heads.heaviest;
      this.why.hidden = !rule || !heaviest;
      if (this.why.hidden) return;
      const head = this.heads.groups.flatMap((g) => g.trajectories).find((h) => h.uid === heaviest.uid);
      const [, word] = U.verdict(head?.right);
      const nats = heaviest.place?.nats;
      const what = nats === undefined ? "" : `; its token that ${nats < 0 ? "lost" : "changed"} most: ${U.signed(nats)} nats`;
      const back = node("button", { type: "button", onclick: () => this.lead() }, "To that token");
      this.why.replaceChildren(node("span", {}, "Alarm ", node("strong", {}, rule), `: of this step, ${heaviest.uid} (${word}, change ${U.signed(head?.change)} nats per token) weighs most${what}. `), heaviest.place ? back : "");
    }
    async lead() {
      const { group, uid, place } = this.heads.heaviest;
      await this.open(group, { a: uid, at: `${place.segment}.${place.token}` });
      this.on.changed?.(this);
    }

    // ---- tokens

    tokens() {
      return [...this.panel.querySelectorAll(".t[data-at]")];
    }
    point(element, fix) {
      const token = element.closest?.(".t[data-at]");
      if (!token || (this.fixed && !fix)) return;
      if (fix) this.fix(token);
      this.say(token);
    }
    say(token) {
      const uid = token.closest("[data-uid]").dataset.uid;
      const trajectory = this.view.trajectories.find((t) => t.uid === uid);
      this.bar.replaceChildren(...U.readout(trajectory, token.dataset.at));
      this.bar.hidden = false;
    }
    fix(token) {
      this.panel.querySelector(".t.at")?.classList.remove("at");
      token.classList.add("at");
      this.fixed = token;
      this.choice.a = this.view.a.uid;
      this.choice.b = this.view.b?.uid;
      this.choice.at = `${token.closest("[data-uid]").dataset.uid === this.choice.a ? "" : "b"}${token.dataset.at}`;
      this.tell();
    }
    // A browser takes few changes of the address a second: an arrow key that is held down makes more.
    tell() {
      clearTimeout(this.telling);
      this.telling = setTimeout(() => this.on.changed?.(this), 200);
    }
    // To a token of a trajectory that is shown.
    go(uid, at, scroll = true) {
      const token = [...this.panel.querySelectorAll(`[data-at="${CSS.escape(at)}"]`)].find((t) => t.closest("[data-uid]").dataset.uid === uid);
      if (!token) return;
      this.fix(token);
      this.say(token);
      if (scroll) token.scrollIntoView({ block: "center" });
    }

    key(e) {
      if (!this.view || e.ctrlKey || e.metaKey || e.altKey || e.target.matches("input, select, textarea")) return;
      const cards = [...this.grid.children];
      const now = cards.findIndex((c) => c.getAttribute("aria-pressed") === "true");
      if (e.key === "j" || e.key === "k") {
        const next = cards[now + (e.key === "j" ? 1 : -1)];
        if (next) this.pick(next.dataset.group);
      } else if (e.key === "m") {
        const change = (t) => {
          const [s, k] = t.dataset.at.split(".").map(Number);
          const uid = t.closest("[data-uid]").dataset.uid;
          return U.change(this.view.trajectories.find((x) => x.uid === uid).segments[s], k) ?? 0;
        };
        const lowest = this.tokens().reduce((x, y) => (x && change(x) <= change(y) ? x : y), null);
        if (lowest) this.go(lowest.closest("[data-uid]").dataset.uid, lowest.dataset.at);
      } else if (e.key === "ArrowRight" || e.key === "ArrowLeft") {
        if (e.target.closest?.(".wide")) return;
        const all = this.tokens();
        const at = all.indexOf(this.panel.querySelector(".t.at"));
        const next = all[at < 0 ? 0 : at + (e.key === "ArrowRight" ? 1 : -1)];
        if (next) {
          this.fix(next);
          this.say(next);
          next.scrollIntoView({ block: "nearest" });
        }
      } else if (e.key === "Escape") {
        this.panel.querySelector(".t.at")?.classList.remove("at");
        this.fixed = null;
        this.choice.at = null;
        this.tell();
        this.bar.hidden = true;
      } else return;
      e.preventDefault();
    }
  }
  U.Microscope = Microscope;
})();
