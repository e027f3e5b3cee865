// Whether the service of a page can be asked: looked at all the time, so that a page holds a question until it can be, and says why.
(() => {
  "use strict";
  const U = (window.Unspiral ||= {});
  const SOON = 2000, LATER = 10000; // milliseconds to the next look: while it cannot be asked, and while it can
  const LATE = 10000; // after which no answer is one
  let timer = 0, looks = 0;
  const waiting = new Set();

  U.service = {
    state: "unknown", // ready, loading (its `says` has its own words), or gone
    says: "",
    // Look now and from then on; `changed` is called with every state that is another one, or is told in other words.
    start(changed) {
      this.changed = changed;
      document.addEventListener("visibilitychange", () => { if (!document.hidden) this.look(); });
      return this.look();
    },
    async look() {
      const mine = ++looks;
      let state = "gone", says = "";
      try {
        const answer = await fetch("readyz", { cache: "no-store", signal: AbortSignal.timeout(LATE) });
        const told = await answer.json().catch(() => ({}));
        state = answer.ok ? "ready" : "loading";
        says = told.error?.message || told.detail || "";
        this.told = told;
      } catch {
        // no answer: it is gone
      }
      if (mine !== looks) return; // a later look knows better
      clearTimeout(timer);
      timer = setTimeout(() => this.look(), state === "ready" ? LATER : SOON);
      const other = state !== this.state || says !== this.says;
      Object.assign(this, { state, says });
      if (other) this.changed?.(state, says);
      if (state === "ready") for (const go of [...waiting]) go();
    },
    // Resolves once the service can be asked by a look that begins now. Rejects when `signal` ends the wait.
    async ready(signal) {
      signal.throwIfAborted();
      const known = new Promise((done, fail) => {
        const go = () => { waiting.delete(go); done(); };
        waiting.add(go);
        signal.addEventListener("abort", () => { waiting.delete(go); fail(signal.reason); }, { once: true });
      });
      this.look();
      await known;
    },
    // So many seconds, or until `signal` ends them.
    pause(seconds, signal) {
      return new Promise((done, fail) => {
        const end = setTimeout(done, 1000 * seconds);
        signal.addEventListener("abort", () => { clearTimeout(end); fail(signal.reason); }, { once: true });
      });
    },
    // As `fetch`; where nobody answers the error is `away`, which one of the page's own code is not.
    reach: (...request) => fetch(...request).catch((error) => { throw Object.assign(error, { away: error.name === "TypeError" }); }),
    // Whether an answer of this status says that the same may be asked again later.
    passes: (status) => status === 429 || status === 502 || status === 503,
    // Seconds that a refusal asks its client to wait.
    after: (answer) => Math.min(60, Math.max(1, Number(answer.headers.get("retry-after")) || 2)),
  };
})();
