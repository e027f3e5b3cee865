// Requests that change something. They need the service's token, where it has one: the page's cookie may only read. The token lives
// in this function alone, in no storage, cookie or address, and is forgotten with the page, or once the service refuses it.
(() => {
  "use strict";
  const U = window.Unspiral;
  let token = null;

  U.token = {
    get known() {
      return token !== null;
    },
    forget: () => (token = null),
    // Whether the service takes a token; it is kept if so.
    async enter(given) {
      const answer = await fetch("/v1/runs?limit=1", { headers: { Authorization: `Bearer ${given}` }, credentials: "omit" }).catch(() => null);
      if (!answer?.ok) return answer?.status === 401 ? "That is not the token." : "The service did not answer.";
      token = given;
      return null;
    },
    use: (given) => (token = given),
  };

  // A request to this service with the token. Gives {ok, token: whether one is lacking, text, body}.
  U.send = async (method, path, body) => {
    const headers = { "Content-Type": "application/json", ...(token ? { Authorization: `Bearer ${token}` } : {}) };
    let answer;
    try {
      answer = await fetch(path, { method, headers, body: body && JSON.stringify(body), credentials: "same-origin" });
    } catch {
      return { ok: false, token: false, text: "the service did not answer" };
    }
    const said = await answer.json().catch(() => ({}));
    if (answer.status === 401) token = null;
    return { ok: answer.ok, token: answer.status === 401, text: String(said.detail || said.text || `the service answered ${answer.status}`), body: said };
  };
})();
