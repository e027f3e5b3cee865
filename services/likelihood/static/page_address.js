// The view in the address: which runs and steps, and how they are drawn. A reload, or whoever gets the link, sees the same.
(() => {
  "use strict";
  const U = window.Unspiral;

  // What the address says. Steps and spans are numbers; what is none is left out.
  U.readAddress = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    // People type `/?run=NAME`, too. What is chosen then stands behind the #, as ever.
    const asked = new URLSearchParams(location.search);
    const list = (name) => (given.get(name) || "").split(",").map(decode).filter(Boolean);
    const whole = (name) => (/^\d{1,7}$/.test(given.get(name) || "") ? Number(given.get(name)) : null);
    const [from, to] = [whole("from"), whole("to")];
    return {
      runs: [...new Set([...list("runs"), ...list("run"), ...(given.has("runs") ? [] : [...asked.getAll("run"), ...asked.getAll("runs")].flatMap((names) => names.split(",")).filter(Boolean))])],
      window: from !== null && to !== null && to > from ? [from, to] : null,
      smooth: [1, 5, 15, 50].includes(whole("smooth")) ? whole("smooth") : null,
      pin: whole("pin"),
      minus: given.get("minus"),
      log: new Set(list("log")),
      full: given.get("full"),
      off: new Set(list("off")),
      others: given.get("others") === "1",
      find: given.get("find") || "",
      tab: given.get("tab") || "curves",
    };
  };
  // A comma within a name is written as %2C, and the whole is encoded once more by the address.
  const decode = (text) => {
    try {
      return decodeURIComponent(text);
    } catch {
      return "";
    }
  };
  const encode = (text) => encodeURIComponent(text).replace(/%2F/g, "/");
  const joined = (names) => [...names].map((name) => encode(encode(name))).join(",");

  U.writeAddress = (names, view, range) => {
    const parts = [`runs=${joined(names)}`];
    if (range) parts.push(`from=${Math.round(range[0])}`, `to=${Math.round(range[1])}`);
    if (view.smooth !== null) parts.push(`smooth=${view.smooth}`);
    if (view.pin !== null) parts.push(`pin=${view.pin}`);
    for (const name of ["minus", "full", "find"]) if (view[name]) parts.push(`${name}=${encode(view[name])}`);
    for (const name of ["log", "off"]) if (view[name].size) parts.push(`${name}=${joined(view[name])}`);
    if (view.others) parts.push("others=1");
    if (view.tab !== "curves") parts.push(`tab=${encode(view.tab)}`);
    history.replaceState(null, "", `${/[?&]runs?=/.test(location.search) ? location.pathname : ""}#${parts.join("&")}`);
  };

  // Someone has put another address into this window: replaceState is not told.
  window.addEventListener("hashchange", () => location.reload());
})();
