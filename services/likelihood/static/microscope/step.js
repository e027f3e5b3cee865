// The page of a step: what the address says is shown, and what is shown stands in the address.
(() => {
  "use strict";
  const U = window.Unspiral;
  const $ = (id) => document.getElementById(id);
  const [, , run, , step] = location.pathname.split("/").map(decodeURIComponent);
  const NAMES = ["which", "source", "order", "text", "rule"];

  const address = (of) => {
    const query = new URLSearchParams(NAMES.filter((n) => of.filters[n] && !(n === "order" && of.filters[n] === (of.filters.rule ? "alarm" : "mixed"))).map((n) => [n, of.filters[n]]));
    const place = new URLSearchParams(["group", "a", "b", "at"].filter((n) => of.choice[n]).map((n) => [n, of.choice[n]]));
    return `${location.pathname}${[...query].length ? `?${query}` : ""}#${place}`;
  };
  const link = (to, text, label) => U.node(to === null || to === undefined ? "span" : "a", { class: "step-link", "aria-label": label, href: to === null || to === undefined ? null : `/runs/${encodeURIComponent(run)}/steps/${to}` }, text);

  const status = ({ previous, next, trajectories }) => {
    $("status").className = "status live";
    U.redraw($("status"), U.node("span", {}, run, ", step "), link(previous, "◂", "previous kept step"), U.node("strong", {}, step), link(next, "▸", "next kept step"), trajectories ? "" : " (nothing kept)");
  };

  const view = new U.Microscope($("microscope"), {
    changed: (of) => {
      history.replaceState(null, "", address(of));
      status(of.heads);
      document.title = `${run}, step ${step}: microscope`;
    },
  });
  for (const id of ["back", "way-back"]) $(id).href = `/#runs=${encodeURIComponent(encodeURIComponent(run))}`;
  $("way-back").textContent = `← run ${run}`;
  U.theme.start(() => view.view && view.draw());
  const query = new URLSearchParams(location.search);
  const place = new URLSearchParams(location.hash.slice(1));
  const given = (from, names) => Object.fromEntries(names.filter((n) => from.get(n)).map((n) => [n, from.get(n)]));

  // More steps were kept while this one is read: the ways to its neighbours follow, and it is read anew where it had nothing.
  U.followSamples(run, async () => {
    const kept = await U.source.get(`/v1/runs/${encodeURIComponent(run)}/samples`).catch(() => null);
    if (!kept || !view.heads) return;
    const steps = kept.map((s) => s.step);
    if (!view.heads.trajectories && steps.includes(Number(step))) return view.read();
    Object.assign(view.heads, { previous: steps.findLast((s) => s < step), next: steps.find((s) => s > step) });
    status(view.heads);
  });

  U.patiently(() => view.show(run, Number(step), given(query, NAMES), given(place, ["group", "a", "b", "at"])), (line) => {
    $("status").className = "status lost";
    $("status").textContent = line;
  });
})();
