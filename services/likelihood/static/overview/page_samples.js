// The trajectories that a report carries, below its curves. The live page links to a page per step instead.
(() => {
  "use strict";
  const U = window.Unspiral;
  const { node } = U;
  const $ = (id) => document.getElementById(id);

  U.startSamples = () => {
    const kept = U.source.live ? [] : U.source.data.runs.filter((run) => run.samples?.length);
    if (!kept.length) return;
    const view = new U.Microscope($("samples"), {});
    const choices = kept.flatMap((run) => run.samples.map((s) => ({ run: run.run, step: s.step, why: s.why })));
    const select = node("select", { onchange: () => U.showSamples(...JSON.parse(select.value)) }, ...choices.map((c) => node("option", { value: JSON.stringify([c.run, c.step]) }, `${kept.length > 1 ? `${c.run}, ` : ""}step ${c.step} (${c.why})`)));
    $("sample-choice").replaceChildren(node("label", {}, "Step ", select), node("span", { class: "muted" }, "A report carries a few groups of a few steps; the service's own page has all that are kept."));
    $("sample-panel").hidden = false;
    U.showSamples = async (run, step, rule) => {
      select.value = JSON.stringify([run, step]);
      await view.show(run, step, rule ? { rule } : {});
      if (rule || document.activeElement?.closest?.("main")) (rule && view.fixed ? view.fixed : $("sample-panel")).scrollIntoView({ block: rule ? "center" : "start" });
    };
    U.redrawSamples = () => view.view && view.draw();
    view.show(choices[0].run, choices[0].step);
  };
})();
