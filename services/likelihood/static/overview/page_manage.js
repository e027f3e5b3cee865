// A run's title and tags, whether the list shows it, and its end. Changes need the service's token (page_token.js), where it has one.
(() => {
  "use strict";
  const U = window.Unspiral;
  const { node } = U;

  const ask = async (method, run, body) => {
    const done = await U.send(method, `/v1/runs/${encodeURIComponent(run)}`, body);
    return done.ok ? null : done;
  };

  U.manage = (run) => {
    const label = `Change ${run.run}`;
    const field = (label, input, note) => node("label", { class: "field" }, node("span", {}, label), input, note ? node("span", { class: "muted" }, note) : null);
    const title = node("input", { type: "text", maxlength: "200", value: run.title || "", placeholder: run.run });
    const tags = node("input", { type: "text", value: (run.tags || []).join(", "), placeholder: "seed 1, baseline" });
    const hidden = node("input", { type: "checkbox" });
    hidden.checked = Boolean(run.hidden);
    const secret = node("input", { type: "password", autocomplete: "off" });
    const secretField = field("API token", secret, "this service asks for it before it changes anything");
    secretField.hidden = true;
    const repeated = node("input", { type: "text", autocomplete: "off", "aria-label": `Type ${run.run} to delete it`, oninput: () => (remove.disabled = repeated.value !== run.run) });
    const said = node("p", { role: "alert", class: "flag" });
    const done = async (method, body) => {
      if (secret.value) U.token.use(secret.value);
      const problem = await ask(method, run.run, body);
      if (!problem) {
        box.close();
        if (method === "DELETE") U.app.forget(run.run);
        return U.app.again(0);
      }
      if (problem.token) secretField.hidden = false;
      said.textContent = problem.token ? (secret.value ? "That is not the token." : "A token is needed.") : problem.text;
      if (problem.token) secret.focus();
    };
    const save = () => done("PATCH", { title: title.value.trim() || null, tags: tags.value.split(",").map((t) => t.trim()).filter(Boolean), hidden: hidden.checked });
    const remove = node("button", { type: "button", class: "danger", disabled: "", onclick: () => done("DELETE") }, "Delete for good");
    const form = node(
      "form",
      { class: "manage", onsubmit: (e) => (e.preventDefault(), save()) },
      node("h2", {}, run.run),
      field("Title", title, "the run's own name stays its address"),
      field("Tags", tags, "separated by commas"),
      node("label", {}, hidden, " hide it from the list (a link to it still works)"),
      secretField,
      said,
      node("div", { class: "row" }, node("button", { type: "submit" }, "Save"), node("button", { type: "button", onclick: () => box.close() }, "Cancel")),
      node("details", {}, node("summary", {}, "Delete this run"), node("p", {}, "Steps, curves, trajectories, alarms and events go. Type its name: ", node("code", {}, run.run)), node("div", { class: "row" }, repeated, remove)),
    );
    // The button that opened it may have been drawn anew, and then the browser gives the focus to nothing.
    const leave = () => {
      box.remove();
      if (document.activeElement === document.body) opener()?.focus();
    };
    const opener = () => [...document.querySelectorAll("#runs button.edit")].find((b) => b.getAttribute("aria-label") === label);
    const box = node("dialog", { onclose: leave, "aria-label": label }, form);
    document.body.append(box);
    box.showModal();
  };
})();
