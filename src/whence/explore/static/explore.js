// The explorer: the report's views (views.js) on live data, and what-if.
//
// The address after "#" holds the current view, as page=...&row=...; the session holds the ticks.
// In this page a training example's "column" is its place among the examples of all scores.
"use strict";

(() => {
  const V = Whence.views;
  const { el, svg, bdi, unseen, number, signed, count } = V;
  const TOKEN = document.querySelector('meta[name="whence-token"]').content;
  const PAGE = 50;
  let overview = null;

  // -- requests ------------------------------------------------------------------------------

  const wait = (milliseconds) => new Promise((done) => { setTimeout(done, milliseconds); });

  async function ask(path, options = {}) {
    let answer;
    for (let tries = 0; !answer || (answer.status === 503 && tries < 200); tries += 1) {
      if (answer) await wait(200); // it is being computed
      try {
        answer = await fetch(path, { ...options, headers: { "x-whence-token": TOKEN, ...options.headers } });
      } catch {
        throw new Error("The explorer does not respond: is whence explore still running?");
      }
    }
    const json = (answer.headers.get("content-type") || "").startsWith("application/json");
    const body = json ? await answer.json() : await answer.text();
    if (!answer.ok) throw new Error(json && body.error ? body.error : String(body).slice(0, 300));
    return body;
  }

  const get = (path, asked = {}) => {
    const given = Object.entries(asked).filter(([, v]) => v !== "" && v !== null && v !== undefined && v !== false);
    return ask(`${path}?${new URLSearchParams(given)}`);
  };
  const post = (path, body = {}) => ask(path, {
    method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" },
  });

  // -- current view ------------------------------------------------------------------------------

  const here = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const hash = (where) => `#${new URLSearchParams(Object.entries(where).filter(([, v]) => v !== null && v !== undefined && v !== ""))}`;
  const go = (where) => { location.hash = hash(where); };
  const replace = (change) => history.replaceState(null, "", hash({ ...here(), ...change }));
  const scoresName = () => (overview.sets.includes(here().scores) ? here().scores : overview.sets[0]);

  // -- ticked examples ---------------------------------------------------------------------------

  const ticked = new Set();
  const ticksKey = () => `whence-ticked ${overview.examples} ${[...overview.sets, ...overview.self_influence].join(" ")}`;

  function remember() {
    try { for (const place of JSON.parse(sessionStorage.getItem(ticksKey())) || []) ticked.add(place); } catch { /* nothing is ticked */ }
  }

  function tick(places, on) {
    for (const place of places) { if (on) ticked.add(place); else ticked.delete(place); }
    try { sessionStorage.setItem(ticksKey(), JSON.stringify([...ticked])); } catch { /* ticks last as long as the page */ }
    for (const box of document.querySelectorAll("input[data-place]")) box.checked = ticked.has(Number(box.dataset.place));
    badge();
    if (here().page === "whatif") show();
  }

  function badge() {
    const spot = document.querySelector("#ticked");
    if (spot) { spot.textContent = ticked.size ? String(ticked.size) : ""; spot.hidden = !ticked.size; }
  }

  function tickBox(example, words = "leave out") {
    const { place } = example;
    const box = el("input", { type: "checkbox", "data-place": place, "aria-label": `leave out training example ${naming(example)}` });
    box.checked = ticked.has(place);
    box.addEventListener("change", () => tick([place], box.checked));
    return el("label", { class: "tick small" }, box, words ? ` ${words}` : null);
  }

  // -- small parts ---------------------------------------------------------------------------------

  const option = (value, text, chosen) => el("option", { value, selected: value === chosen }, text);
  const naming = (example) => `#${example.id}${example.stage ? ` of ${example.stage}` : ""}`;
  const queries = (n) => `${count(n)} ${n === 1 ? "query" : "queries"}`;
  const examples = (n) => `${count(n)} training example${n === 1 ? "" : "s"}`;
  const notice = (text) => el("p", { class: "notice" }, text);
  const fact = (name, ...value) => el("div", { class: "fact" }, el("dt", {}, name), el("dd", {}, ...value));
  const button = (text, onclick, more = {}) => el("button", { type: "button", class: "action", onclick, ...more }, text);

  function panel(title, note, ...children) {
    return el("section", { class: "panel" }, el("div", { class: "panel-head" }, el("h3", {}, title),
      note ? el("p", { class: "muted" }, note) : null), ...children);
  }

  function table(heads, rows, caption) {
    return el("div", { class: "table-frame", tabindex: "0", role: "region", "aria-label": caption },
      el("table", { class: "listing" },
        el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))), el("tbody", {}, rows)));
  }

  function choose(name, label, options, value, onchange) {
    const select = el("select", { "aria-label": label, id: `filter-${name}` }, options.map(([v, text]) => option(v, text, value)));
    select.addEventListener("change", () => onchange(select.value));
    return select;
  }

  function field(label, input) { return el("label", { class: "field" }, el("span", { class: "small muted" }, label), input); }

  function searchBox(placeholder, value, oninput) {
    const input = el("input", { type: "search", placeholder, "aria-label": placeholder, value, class: "search" });
    let timer = null;
    input.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => oninput(input.value), 180); });
    return input;
  }

  function pager(total, offset, length, onmove) {
    const last = offset + length;
    return el("nav", { class: "pager", "aria-label": "pages of the list" },
      button("← Previous", () => onmove(Math.max(0, offset - PAGE)), { disabled: offset === 0 }),
      el("span", { class: "muted", role: "status" }, total ? `${count(offset + 1)}–${count(last)} of ${count(total)}` : "no matches"),
      button("Next →", () => onmove(offset + PAGE), { disabled: last >= total }));
  }

  function exampleCell(example) {
    return el("td", { class: "example-cell" }, el("button", {
      type: "button", class: "example-button", onclick: () => openExample(example.place),
    }, unseen("training example "), example.kind === "missing" && !example.note ? null : V.example(example), el("span", { class: "muted small" }, naming(example))));
  }

  function queryCell(item) {
    return el("td", { class: "example-cell" }, el("button", {
      type: "button", class: "example-button", onclick: () => go({ page: "queries", row: item.row, scores: scoresName() }),
    }, item.query.kind === "missing" ? null : V.example(item.query), el("span", { class: "muted small" }, `query ${item.id}`)));
  }

  function labelsOf(item) {
    return el("td", {}, item.label === null ? "–" : bdi(item.label),
      item.prediction ? el("span", { class: "muted small" }, " → ", bdi(item.prediction)) : null,
      item.wrong ? el("span", { class: "wrong" }, "✗ wrong") : null);
  }

  function valueOf(value, higher = true, digits = 3) {
    if (value === null) return el("span", { class: "muted" }, "–");
    return el("span", { class: `value ${(higher ? value : -value) >= 0 ? "helpful" : "harmful"}` }, signed(value, digits));
  }

  const ctxOf = (name, byColumn, more = {}) => ({
    overview: overview.about[name], examples: byColumn, onExample: (column, entry, query) => openExample(column, entry, query, byColumn),
    onQuery: (row) => { dialog.close(); go({ page: "queries", row, scores: name }); }, ...more,
  });

  // -- a training example in a dialog ------------------------------------------------------------

  const dialog = el("dialog", { "aria-label": "training example" });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });

  function inDialog(...content) {
    dialog.replaceChildren(el("button", { type: "button", class: "close", "aria-label": "close", onclick: () => dialog.close() }, "×"), ...content);
    if (!dialog.open) dialog.showModal();
  }

  // others: examples at hand, by place, for the ranges of their columns.
  async function openExample(place, entry = null, query = null, others = {}) {
    const name = overview.sets.length ? scoresName() : "";
    try {
      const { example, helped = [], harmed = [] } = await get("/api/example", { place, scores: name });
      const ctx = ctxOf(name || overview.self_influence[0], { ...others, [place]: example });
      const detail = V.detail(place, [...helped, ...harmed], ctx, entry, query);
      detail.querySelector(".facts").after(tickBox(example, "leave it out in What if"));
      inDialog(detail);
    } catch (error) { inDialog(notice(error.message)); }
  }

  // -- overview ----------------------------------------------------------------------------------

  async function overviewPage() {
    if (!overview.sets.length) return notice("These scores are self-influence and have no queries. See the Audit page.");
    const name = scoresName();
    const view = await get("/api/summary", { scores: name });
    if (view.more) later(1000); // predictions are being computed
    return V.summary(view, ctxOf(name, view.examples_shown, { extra: (entry) => tickBox(view.examples_shown[entry.column]) }));
  }

  // -- queries -----------------------------------------------------------------------------------

  const asked = { text: "", label: "", wrong: false, order: "number" };
  let listed = { items: [], total: 0, of: 0 };
  let current = null;
  const list = el("ul", { class: "query-list", "aria-label": "queries" });
  const listStatus = el("p", { class: "muted small", role: "status" });
  const sidebarHead = el("div", { class: "sidebar-head" });
  const sidebar = el("nav", { class: "sidebar", "aria-label": "queries" }, sidebarHead, list);
  let loading = null;

  function buildSidebar() {
    const search = searchBox("Search queries", asked.text, (text) => { asked.text = text; loadList(); });
    const order = choose("order", "order of the queries", [["number", "in order"], ["worst", "worst first"]], asked.order, (v) => { asked.order = v; loadList(); });
    const wrong = el("input", { type: "checkbox" });
    wrong.checked = asked.wrong;
    wrong.addEventListener("change", () => { asked.wrong = wrong.checked; loadList(); });
    const labels = choose("query-label", "label of the queries", [["", "all labels"], ...overview.labels.map((l) => [l, `label ${l}`])], asked.label, (v) => { asked.label = v; loadList(); });
    sidebarHead.replaceChildren(search, el("div", { class: "sidebar-options" },
      overview.labels.length ? labels : "", overview.measured ? order : "",
      overview.wrong === null ? "" : el("label", { class: "small" }, wrong, ` wrong only (${count(overview.wrong)})`)), listStatus);
  }

  async function loadList(more = false) {
    if (loading && more) return;
    const mine = {};
    loading = mine;
    try {
      const answer = await get("/api/queries", { ...asked, offset: more ? listed.items.length : 0, limit: 100 });
      if (loading !== mine) return;
      listed = { ...answer, items: more ? [...listed.items, ...answer.items] : answer.items };
      if (!more) list.replaceChildren();
      list.append(...answer.items.map(queryButton));
      listStatus.textContent = listed.total === listed.of ? queries(listed.of) : `${count(listed.total)} of ${queries(listed.of)}`;
      mark();
    } catch (error) {
      if (loading === mine) listStatus.textContent = error.message;
    } finally {
      if (loading === mine) loading = null;
    }
  }

  function queryButton(item) {
    const prediction = item.prediction ? ` → ${item.prediction}` : "";
    return el("li", { "data-row": item.row }, el("button", {
      type: "button", class: "query-item", onclick: () => go({ ...here(), page: "queries", row: item.row }),
    },
      item.query.kind === "image" ? V.example(item.query) : null,
      el("span", { class: "query-words" },
        V.queryName(item.id, item.wrong),
        item.query.kind === "text" ? bdi(item.query.text.slice(0, 90), { class: "clip small" }) : null,
        item.label === null && !prediction ? null : bdi(`${item.label === null ? "" : item.label}${prediction}`, { class: "clip small muted" }))));
  }

  list.addEventListener("scroll", () => {
    const end = list.scrollHeight - list.scrollTop - list.clientHeight < 400 || list.scrollWidth - list.scrollLeft - list.clientWidth < 400;
    if (end && listed.items.length < listed.total) loadList(true);
  });

  function mark() {
    for (const item of list.children) {
      const chosen = Number(item.dataset.row) === current;
      item.firstChild.toggleAttribute("aria-current", chosen);
      if (chosen) item.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
  }

  function move(step) {
    const at = listed.items.findIndex((item) => item.row === current);
    const next = listed.items[at < 0 ? 0 : Math.min(Math.max(at + step, 0), listed.items.length - 1)];
    if (next && next.row !== current) go({ ...here(), row: next.row });
    if (at > listed.items.length - 5 && listed.items.length < listed.total) loadList(true);
  }

  async function queryPage(where) {
    if (!overview.sets.length) return notice("These scores are self-influence and have no queries. See the Audit page.");
    const name = scoresName();
    if (!listed.of) await loadList();
    current = Number(where.row ?? (listed.items[0] ? listed.items[0].row : 0));
    // an address may name a query further down: extend the list to it, if it is near enough
    const all = listed.total === listed.of && asked.order === "number";
    for (let turns = 0; all && listed.items.length <= current && turns < 10 && !loading; turns += 1) await loadList(true);
    mark();
    const k = Number(where.k || 10);
    const view = await get("/api/query", { scores: name, row: current, k });
    const ctx = ctxOf(name, view.examples, { extra: (entry) => tickBox(view.examples[entry.column]) });
    const ends = (which) => view[which].flatMap((entry) => [entry.column, ...(entry.also || [])]);
    return el("div", {},
      V.query(view, ctx),
      el("div", { class: "row-of-actions" },
        field("show", choose("k", "how many examples at either end", [10, 25, 50, 100].map((n) => [String(n), `${n} each`]), String(k), (v) => go({ ...here(), k: v }))),
        button("Tick the helpful ones", () => tick(ends("helpful"), true)), button("Tick the harmful ones", () => tick(ends("harmful"), true)),
        el("a", { class: "action", href: cardOf(name, current), download: "" }, "⤓ Card (SVG)"), button("⤓ Card (PNG)", () => savePng(name, current)),
        ticked.size ? button("What if they were missing? →", () => go({ page: "whatif", scores: name }), { class: "action primary" }) : null));
  }

  const cardOf = (name, row) => `/api/card.svg?${new URLSearchParams({ scores: name, row })}`;

  // The query's card as a PNG file, drawn by the browser.
  async function savePng(name, row) {
    try {
      const picture = new Image();
      picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(await ask(cardOf(name, row)))}`;
      await picture.decode();
      const canvas = el("canvas", { width: 2 * picture.width, height: 2 * picture.height });
      canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
      el("a", { href: canvas.toDataURL("image/png"), download: `query-${row}.png` }).click();
    } catch (error) { inDialog(notice(`The card could not be drawn: ${error.message}`)); }
  }

  // -- training data -----------------------------------------------------------------------------

  function filters(where, { sign = false, order = null, query = false, first = null } = {}) {
    const change = (what) => (value) => { replace({ [what]: value, offset: "" }); show({ keep: true }); };
    const bar = [first, searchBox("Search text or #number", where.text || "", change("text"))];
    if (overview.labels.length) bar.push(field("label", choose("label", "label", [["", "all"], ...overview.labels.map((l) => [l, l])], where.label || "", change("label"))));
    if (overview.stages.length > 1) bar.push(field("stage", choose("stage", "stage", [["", "all"], ...overview.stages.map((s) => [s, s])], where.stage || "", change("stage"))));
    if (query) {
      const row = el("input", { type: "number", min: 0, max: overview.queries - 1, value: where.row || "", placeholder: "all", "aria-label": "query" });
      row.addEventListener("change", () => change("row")(row.value));
      bar.push(field("for query", row));
    }
    if (sign) bar.push(field("effect", choose("sign", "effect", [["", "all"], ["helpful", "helpful"], ["harmful", "harmful"]], where.sign || "", change("sign"))));
    if (order) bar.push(field("order", choose("sort", "order", order, where.order || order[0][0], change("order"))));
    return el("div", { class: "filters", role: "search" }, bar);
  }

  const reading = () => (overview.reading ? notice(`Still reading the data (${count(overview.reading.done)} of ${count(overview.reading.of)}). Search covers only what has been read.`) : null);

  async function examplesPage(where) {
    const name = scoresName();
    if (!name) return notice("These scores are self-influence. See the Audit page.");
    const offset = Number(where.offset || 0);
    const answer = await get("/api/examples", {
      scores: name, row: where.row, text: where.text, label: where.label, stage: where.stage, sign: where.sign, order: where.order, offset, limit: PAGE,
    });
    const { higher_is_better: higher } = overview.about[name];
    const strongest = Math.max(...answer.items.map((item) => Math.abs(item.value || 0))) || 1;
    const rows = answer.items.map(({ example, value }) => {
      const bar = el("span", { class: `bar ${(higher ? value : -value) >= 0 ? "helpful" : "harmful"}`, "aria-hidden": "true" });
      bar.style.setProperty("--length", `${((100 * Math.abs(value || 0)) / strongest).toFixed(1)}%`);
      return el("tr", {}, el("td", {}, tickBox(example, "")), exampleCell(example), el("td", {}, example.label === null ? "–" : bdi(example.label)),
        overview.stages.length > 1 ? el("td", {}, example.stage || "") : null,
        el("td", { class: "numeric" }, valueOf(value, higher)), el("td", { class: "wide-bar" }, el("span", { class: "track" }, bar)));
    });
    const what = where.row ? `score for query ${where.row}` : `mean score over ${queries(overview.queries)}`;
    return el("article", {},
      el("header", { class: "plain-head" }, el("h2", {}, "Training data"),
        el("p", { class: "muted" }, `${examples(answer.total)}${answer.total === answer.of ? "" : ` of ${count(answer.of)}`}, with their ${what} by ${name}, in ${answer.unit}.`)),
      filters(where, { sign: true, query: true, order: [["helpful", "most helpful"], ["harmful", "most harmful"], ["strongest", "strongest"], ["number", "by number"]] }),
      reading(),
      answer.unknown ? notice(`${examples(answer.unknown)} of these have no score: it was not kept, or is not a number.`) : null,
      el("div", { class: "row-of-actions" }, button("Tick this page", () => tick(answer.items.map((item) => item.example.place), true))),
      table(["", "example", "label", ...(overview.stages.length > 1 ? ["stage"] : []), "score", ""], rows, "training examples"),
      pager(answer.total, answer.offset, answer.items.length, (to) => go({ ...here(), offset: to })));
  }

  // -- map ---------------------------------------------------------------------------------------

  let drawn = null; // the map's points, once they are loaded

  async function mapPage(where) {
    const name = scoresName();
    if (!name) return notice("These scores are self-influence. See the Audit page.");
    drawn = drawn || await get("/api/map");
    if (drawn.refused) return notice(`There is no map: ${drawn.refused}.`);
    const values = Whence.map.floats((await get("/api/map/values", { scores: name, row: where.row })).values);
    const byClass = where.colour === "class" && drawn.classes;
    const status = el("p", { class: "small", role: "status" }, "Draw around points to select them. Click one to open it.");
    const actions = el("div", { class: "row-of-actions" });
    const said = (places) => {
      status.textContent = `${examples(places.length)} selected.`;
      actions.replaceChildren(...(places.length ? [button("Tick them", () => tick(places, true)),
        button("What if they were missing? →", () => { tick(places, true); go({ page: "whatif", scores: name }); }, { class: "action primary" })] : []));
    };
    const map = Whence.map.create(Whence.map.floats(drawn.points), { onOpen: (place) => openExample(place), onSelect: said,
      onMove: (place, value, rank) => { status.textContent = `Example at place ${place}: rank ${count(rank)} by strength, ${value >= 0 ? "helped" : "harmed"}. Enter opens it, x selects it.`; } });
    const mode = button("Move", () => {
      const on = mode.getAttribute("aria-pressed") !== "true";
      mode.setAttribute("aria-pressed", String(on));
      map.setMoving(on);
      map.node.firstChild.classList.toggle("moving", on);
    }, { "aria-pressed": "false", title: "drag moves the map instead of selecting (or hold Shift)" });
    const row = el("input", { type: "number", min: 0, max: overview.queries - 1, value: where.row || "", placeholder: "all", "aria-label": "query" });
    row.addEventListener("change", () => go({ ...here(), row: row.value }));
    const colour = () => map.colour(values, byClass ? Whence.map.bytes(drawn.classes) : null);
    requestAnimationFrame(colour);
    const theme = new MutationObserver(() => { if (map.node.isConnected) colour(); else theme.disconnect(); });
    theme.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    const what = where.row ? `query ${where.row}` : `${queries(overview.queries)} on average`;
    return el("article", { class: "map-page" },
      el("header", { class: "plain-head" }, el("h2", {}, "Map"), el("p", { class: "muted" },
        `${examples(overview.examples)} as the model sees them: the first two principal components of their representations (${drawn.source}). Colour is the score for ${what}, by ${name}.`)),
      el("div", { class: "filters" }, field("for query", row),
        drawn.classes ? field("colour", choose("colour", "colour", [["score", "score"], ["class", "class"]], where.colour || "score", (v) => go({ ...here(), colour: v }))) : null,
        mode, button("+", () => map.zoom(1.4), { "aria-label": "zoom in" }), button("−", () => map.zoom(1 / 1.4), { "aria-label": "zoom out" }), button("Reset", () => map.reset())),
      map.node,
      el("p", { class: "small muted legend" }, byClass ? "colours are classes; size is the strength of the score"
        : [el("span", { class: "mark helpful" }, "■ helped"), " ", el("span", { class: "mark harmful" }, "■ harmed"), " strong scores are large and opaque"]),
      status, actions);
  }

  // -- comparing -----------------------------------------------------------------------------------

  function scatter(dots, { x, y, onpick, same = false, width = 560, height = 340 }) {
    const pad = { left: 62, right: 12, top: 10, bottom: 40 };
    const known = dots.filter((dot) => dot.x !== null && dot.y !== null);
    const chart = svg("svg", { class: "scatter", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${y} by ${x}, ${known.length} points` });
    if (!known.length) return el("p", { class: "muted" }, "Nothing to plot.");
    const reach = (values) => {
      const low = Math.min(0, ...values), high = Math.max(0, ...values);
      const room = (high - low) * 0.06 || 1;
      return [low - room, high + room];
    };
    const across = reach(known.map((dot) => dot.x));
    const up = reach(known.flatMap((dot) => (dot.e ? [dot.y - dot.e, dot.y + dot.e] : [dot.y])));
    const px = (v) => pad.left + ((v - across[0]) / (across[1] - across[0])) * (width - pad.left - pad.right);
    const py = (v) => height - pad.bottom - ((v - up[0]) / (up[1] - up[0])) * (height - pad.top - pad.bottom);
    const line = (x1, y1, x2, y2, kind) => chart.append(svg("line", { class: kind, x1, y1, x2, y2 }));
    line(pad.left, height - pad.bottom, width - pad.right, height - pad.bottom, "axis");
    line(pad.left, pad.top, pad.left, height - pad.bottom, "axis");
    if (across[0] < 0 && across[1] > 0) line(px(0), pad.top, px(0), height - pad.bottom, "axis zero");
    if (up[0] < 0 && up[1] > 0) line(pad.left, py(0), width - pad.right, py(0), "axis zero");
    const [from, to] = [Math.max(across[0], up[0]), Math.min(across[1], up[1])];
    if (same && from < to) line(px(from), py(from), px(to), py(to), "axis same");
    const words = (text, at, anchor, more = {}) => chart.append(svg("text", { ...at, "text-anchor": anchor, ...more }, text));
    for (const v of ticks(across)) words(number(v, 2), { x: px(v), y: height - pad.bottom + 15 }, "middle");
    for (const v of ticks(up)) words(number(v, 2), { x: pad.left - 6, y: py(v) + 4 }, "end");
    words(x, { x: (pad.left + width - pad.right) / 2, y: height - 6 }, "middle", { class: "name" });
    words(y, { x: 12, y: (pad.top + height - pad.bottom) / 2 }, "middle", { class: "name", transform: `rotate(-90 12 ${(pad.top + height - pad.bottom) / 2})` });
    for (const dot of known) {
      if (dot.e) line(px(dot.x), py(dot.y - dot.e), px(dot.x), py(dot.y + dot.e), "error");
      const mark = svg("circle", { class: `dot ${dot.kind || ""}`, cx: px(dot.x), cy: py(dot.y), r: dot.r || 3.5 }, svg("title", {}, dot.title));
      mark.addEventListener("click", () => onpick(dot));
      chart.append(mark);
    }
    return chart;
  }

  function ticks([low, high]) {
    const raw = (high - low) / 6, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw);
    const positions = [];
    for (let v = Math.ceil(low / step) * step; v <= high; v += step) positions.push(Math.abs(v) < step / 1e6 ? 0 : v);
    return positions;
  }

  // The share of the first k that two rankings have in common, by k.
  function curve(points) {
    const width = 560, height = 340, left = 48, right = 24, top = 12, bottom = 40;
    const most = Math.log(points[points.length - 1][0]) || 1;
    const px = (k) => left + (Math.log(k) / most) * (width - left - right);
    const py = (share) => height - bottom - share * (height - top - bottom);
    const chart = svg("svg", { class: "scatter", viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": points.map(([k, up, down]) => `top ${k}: helpful ${percent(up)}, harmful ${percent(down)}`).join("; ") });
    for (const share of [0, 0.5, 1]) {
      chart.append(svg("line", { class: "axis zero", x1: left, x2: width - right, y1: py(share), y2: py(share) }),
        svg("text", { x: left - 6, y: py(share) + 4, "text-anchor": "end" }, percent(share)));
    }
    points.forEach(([k], at) => {
      if (at % 3 === 0 || at === points.length - 1) chart.append(svg("text", { x: px(k), y: height - bottom + 15, "text-anchor": "middle" }, count(k)));
    });
    chart.append(svg("text", { class: "name", x: (left + width - right) / 2, y: height - 5, "text-anchor": "middle" }, "top k examples"));
    [["helpful", 1], ["harmful", 2]].forEach(([kind, at]) => {
      const known = points.filter((point) => point[at] !== null);
      chart.append(svg("polyline", { class: `line ${kind}`, points: known.map((p) => `${px(p[0])},${py(p[at])}`).join(" ") }));
      for (const p of known) {
        const shape = kind === "helpful" ? svg("circle", { class: kind, cx: px(p[0]), cy: py(p[at]), r: 4 })
          : svg("rect", { class: kind, x: px(p[0]) - 3.5, y: py(p[at]) - 3.5, width: 7, height: 7 });
        shape.append(svg("title", {}, `${percent(p[at])} of the ${p[0]} most ${kind}`));
        chart.append(shape);
      }
    });
    return el("div", {}, chart, el("p", { class: "small muted legend" }, el("span", { class: "mark helpful" }, "● helpful"), " ", el("span", { class: "mark harmful" }, "■ harmful")));
  }

  const percent = (share) => (share === null ? "–" : `${Math.round(100 * share)} %`);
  const decimals = (value) => (value === null ? "–" : value.toFixed(2).replace("-", "−"));

  async function comparePage(where) {
    if (overview.sets.length < 2) return notice("There is only one set of scores. Start the explorer with two to compare them (whence explore A B).");
    const a = overview.sets.includes(where.a) ? where.a : overview.sets[0];
    const b = overview.sets.includes(where.b) ? where.b : overview.sets.find((name) => name !== a);
    const k = Number(where.k || 10), row = Number(where.row || 0);
    current = row;
    const view = await get("/api/compare", { a, b, row, k });
    const pick = (what) => (value) => go({ ...here(), a, b, [what]: value });
    const sets = overview.sets.map((name) => [name, name]);
    const rowInput = el("input", { type: "number", min: 0, max: overview.queries - 1, value: row, "aria-label": "query" });
    rowInput.addEventListener("change", () => pick("row")(rowInput.value));
    const step = (by) => pick("row")(Math.min(Math.max(row + by, 0), overview.queries - 1));
    const overall = el("div", { class: "overall", "aria-live": "polite" }, el("p", { class: "muted" }, "Comparing all queries …"));
    followOverall(overall, a, b, k);
    const side = (name, other) => {
      const ctx = ctxOf(name, view.examples, { extra: (entry) => el("div", { class: "card-extra" },
        el("span", { class: entry.other && entry.other <= view.k ? "also" : "muted" }, entry.other ? `#${entry.other} by ${other}` : `not near the top by ${other}`), tickBox(view.examples[entry.column])) });
      return (end) => V.ranking(`${name}: most ${end}`, end === "helpful" ? "▲" : "▼", end, view.lists[name][end], "none", ctx);
    };
    const [left, right] = [side(a, b), side(b, a)];
    return el("article", { class: "compare" },
      el("header", { class: "plain-head" }, el("h2", {}, "Compare"), el("p", { class: "muted" }, "Do two methods, or two runs, point to the same training examples? Positive means helpful in both.")),
      el("div", { class: "filters" }, field("first", choose("a", "first scores", sets, a, pick("a"))), field("second", choose("b", "second scores", sets, b, pick("b"))),
        field("query", rowInput), el("span", { class: "steps" }, button("←", () => step(-1), { "aria-label": "previous query" }), button("→", () => step(1), { "aria-label": "next query" })),
        field("top", choose("topk", "how many at the top", [5, 10, 25, 50].map((n) => [String(n), String(n)]), String(k), pick("k")))),
      panel("Over all queries", null, overall),
      el("header", { class: "query-head compare-head" }, view.query.query.kind === "missing" ? null : V.example(view.query.query, { large: true }),
        el("div", { class: "query-about" }, el("h2", {}, `Query ${view.query.id}`), el("dl", { class: "facts" },
          view.query.label === null ? null : fact("label", bdi(view.query.label)),
          view.query.prediction ? fact("prediction", bdi(view.query.prediction), view.query.wrong ? el("span", { class: "wrong" }, "✗ wrong") : null) : null,
          fact("rank correlation", decimals(view.spearman)), fact("correlation", decimals(view.pearson)),
          fact(`overlap of top ${view.k}`, `${percent(view.overlap.helpful)} helpful, ${percent(view.overlap.harmful)} harmful`)),
        view.why ? notice(`${view.why}.`) : null)),
      el("div", { class: "charts" },
        panel("Scores", `${examples(view.common)}; each dot is one example`, comparison(view.dots, a, b)),
        panel("Overlap", "share of the top k that both have in common", curve(view.curve))),
      el("div", { class: "rankings" }, left("helpful"), right("helpful"), left("harmful"), right("harmful")));
  }

  // Sizes of scores that are not calibrated cannot be compared: they are shares of the strongest.
  function comparison(dots, a, b) {
    const scale = (name, at) => {
      const { calibrated, unit } = overview.about[name];
      const most = Math.max(...dots.map((dot) => Math.abs(dot[at]))) || 1;
      return calibrated ? { by: 1, text: `${name}, in ${unit}` } : { by: 1 / most, text: `${name}, relative to the strongest` };
    };
    const [x, y] = [scale(a, 1), scale(b, 2)];
    return scatter(dots.map(([place, u, v]) => ({ x: u * x.by, y: v * y.by, place, r: 2.5,
      title: `training example at place ${place}: ${signed(u * x.by)} by ${a}, ${signed(v * y.by)} by ${b}` })),
    { x: x.text, y: y.text, onpick: (dot) => openExample(dot.place) });
  }

  async function followOverall(spot, a, b, k) {
    try {
      for (let first = true; first || spot.isConnected; first = false) {
        const answer = await get("/api/compare/overall", { a, b, k });
        const strip = el("div", { class: "strip", role: "group", "aria-label": `${answer.what} of ${answer.done} queries` });
        const wide = answer.per_query.length > 400 ? Math.ceil(answer.per_query.length / 400) : 1;
        answer.per_query.forEach((value, row) => {
          if (row % wide) return;
          const bar = el("button", { type: "button", tabindex: "-1", class: value !== null && value < 0 ? "below" : "", title: `query ${row}: ${decimals(value)}`, onclick: () => go({ ...here(), row }) });
          bar.style.setProperty("--height", `${Math.max(2, 100 * Math.abs(value || 0))}%`);
          strip.append(bar);
        });
        spot.replaceChildren(el("dl", { class: "facts" },
          answer.spearman === null ? null : fact("mean rank correlation", decimals(answer.spearman)),
          fact(`overlap of top ${answer.k}`, `${percent(answer.overlap.helpful)} helpful, ${percent(answer.overlap.harmful)} harmful`),
          fact("least agreement", answer.least.slice(0, 4).map((row) => [el("button", { type: "button", class: "link", onclick: () => go({ ...here(), row }) }, `query ${row}`), " "]))),
        strip, el("p", { class: "muted small" }, answer.done < answer.of ? `${answer.what} by query; ${count(answer.done)} of ${queries(answer.of)} so far` : `${answer.what} by query; click a bar to open the query`));
        if (answer.done >= answer.of) return;
      }
    } catch (error) { spot.replaceChildren(notice(error.message)); }
  }

  // -- audit -----------------------------------------------------------------------------------------

  async function auditPage(where) {
    const every = [...overview.self_influence, ...overview.sets];
    const name = every.includes(where.audit) ? where.audit : every[0];
    const offset = Number(where.offset || 0);
    const given = { scores: name, text: where.text, label: where.label, stage: where.stage };
    const kinds = every.map((one) => [one, `${one}: ${overview.self_influence.includes(one) ? "self-influence" : "mean harm"}`]);
    const pick = field("by", choose("audit", "scores to audit by", kinds, name, (v) => go({ ...here(), audit: v, offset: "" })));
    let answer;
    try { answer = await get("/api/audit", { ...given, offset, limit: PAGE }); } catch (error) {
      return el("article", {}, el("header", { class: "plain-head" }, el("h2", {}, "Audit")), el("div", { class: "filters" }, pick), notice(error.message));
    }
    if (answer.more) later(1000); // predictions are being computed
    const harm = answer.items.some((item) => item.worst !== undefined);
    const predicted = answer.items.some((item) => item.example.prediction);
    const rows = answer.items.map((item) => {
      const example = item.example, differs = example.comparable && example.label !== null && example.prediction !== example.label;
      return el("tr", {}, el("td", {}, tickBox(example, "")), el("td", { class: "rank" }, count(item.rank)), exampleCell(example),
        el("td", {}, example.label === null ? "–" : bdi(example.label)),
        predicted ? el("td", {}, example.prediction ? bdi(example.prediction) : "–", differs ? el("span", { class: "wrong" }, "✗ differs") : null) : null,
        el("td", { class: "numeric" }, item.value === null ? el("span", { class: "muted" }, "not a number") : el("span", { class: "value" }, signed(item.value))),
        harm ? el("td", {}, item.worst === undefined ? "" : el("button", { type: "button", class: "link", onclick: () => go({ page: "queries", row: item.worst, scores: name }) }, `query ${item.worst}`),
          item.worst === undefined ? null : el("span", { class: "muted small" }, ` in the top 10 of ${queries(item.queries)}`)) : null);
    });
    const file = `/api/audit.csv?${new URLSearchParams(Object.entries(given).filter(([, v]) => v))}`;
    const self = overview.self_influence.includes(name);
    const ctx = { overview: { ...overview.about[name], higher_is_better: self } }; // harm is bad
    return el("article", {},
      el("header", { class: "plain-head" }, el("h2", {}, "Audit"), el("p", { class: "muted" },
        self ? `Sorted by ${answer.meaning}. Examples at the top could not be learned from the others: they are rare, hard, or mislabelled.`
          : `Sorted by ${answer.meaning}: candidates for relabelling. Check the label before you trust the score.`)),
      el("div", { class: "with-chart" }, el("div", {}, filters(where, { first: pick }),
        el("div", { class: "row-of-actions" }, el("a", { class: "action", href: file, download: "" }, "⤓ Export as CSV"),
          button("Tick this page", () => tick(answer.items.map((item) => item.example.place), true)))),
        answer.histogram ? panel("Distribution", `of all ${count(answer.of)} examples, logarithmic`, V.histogram(answer.histogram, ctx)) : null),
      reading(),
      table(["", "", "example", "label", ...(predicted ? ["prediction"] : []), self ? "self-influence" : "mean harm", ...(harm ? ["harmed most"] : [])], rows, "audit list"),
      pager(answer.total, answer.offset, answer.items.length, (to) => go({ ...here(), offset: to })));
  }

  // -- what if -----------------------------------------------------------------------------------------

  async function whatIfPage(where) {
    if (!overview.sets.length) return notice("What if needs scores of queries, but these are self-influence.");
    const places = [...ticked].sort((x, y) => x - y);
    const jobsSpot = el("div", { class: "jobs" });
    const parts = [el("header", { class: "plain-head" }, el("h2", {}, "What if"),
      el("p", { class: "muted" }, "What if some training examples were missing? The scores predict how the measurement of every query changes: by minus the sum of their scores. Retraining without them shows the actual change."))];
    let shown; // the state of the job that the page shows
    if (where.job) {
      const job = await get(`/api/jobs/${encodeURIComponent(where.job)}`).catch((error) => ({ missing: error.message }));
      shown = job.state;
      parts.push(job.missing ? notice(job.missing) : await jobResult(job));
    } else {
      parts.push(await tickedPanel(places), places.length ? await prediction(places) : null);
    }
    parts.push(panel("Retrainings", null, jobsSpot));
    followJobs(jobsSpot, where.job, shown);
    return el("article", { class: "whatif" }, parts);
  }

  // Training examples, small.
  async function chips(places, away = false) {
    const items = places.length ? await get("/api/chosen", { places: places.slice(0, 60).join(",") }) : [];
    return el("ul", { class: "chips" }, items.map((one) => el("li", { class: "chip" },
      el("button", { type: "button", class: "chip-face", onclick: () => openExample(one.place) },
        unseen(`training example ${naming(one)} `), one.kind === "image" ? V.example(one) : el("span", { class: "clip small" }, bdi(one.text || (one.row || []).map((cell) => cell.join(" ")).join(", ") || `#${one.id}`)),
        el("span", { class: "small" }, one.label === null ? naming(one) : bdi(one.label))),
      away ? el("button", { type: "button", class: "chip-away", "aria-label": `keep training example ${naming(one)}`, onclick: () => tick([one.place], false) }, "×") : null)),
    places.length > 60 ? el("li", { class: "muted small" }, `and ${count(places.length - 60)} more`) : null);
  }

  async function tickedPanel(places) {
    const seeds = el("input", { type: "number", min: 1, max: 100, value: 3, "aria-label": "seeds" });
    const status = el("p", { class: "small", role: "status" });
    const start = button("Retrain without them", async () => {
      start.disabled = true;
      try {
        const job = await post("/api/jobs", { places, seeds: Number(seeds.value) });
        go({ page: "whatif", scores: scoresName(), job: job.id });
      } catch (error) { status.replaceChildren(notice(error.message)); start.disabled = false; }
    }, { class: "action primary" });
    const { refused } = overview.retrain;
    return panel(places.length ? `${examples(places.length)} ticked` : "No examples ticked",
      places.length ? null : "Tick “leave out” next to examples in Queries, Training data, Compare or Audit, then come back.",
      places.length ? await chips(places, true) : null,
      places.length ? el("div", { class: "row-of-actions" }, button("Untick all", () => tick(places, false)),
        refused ? null : [field("seeds", seeds), start]) : null,
      places.length && refused ? notice(`Retraining is not available: ${refused}.`) : null, status);
  }

  // Queries by predicted change.
  async function prediction(places) {
    const answer = await get("/api/whatif", { places: places.join(",") });
    const name = scoresName(), selected = answer.sets[name];
    const others = overview.sets.filter((one) => one !== name);
    const known = selected.change.filter((x) => x !== null);
    const higher = overview.about[name].higher_is_better;
    const better = known.filter((x) => (higher ? x : -x) > 0).length, worse = known.filter((x) => (higher ? x : -x) < 0).length;
    const after = (row) => (answer.measured && answer.measured[row] !== null && selected.change[row] !== null ? answer.measured[row] + selected.change[row] : null);
    const { becomes } = selected;
    const order = selected.change.map((_, row) => row).sort((x, y) => Math.abs(selected.change[y] || 0) - Math.abs(selected.change[x] || 0));
    const word = answer.measurement.replaceAll("_", " ");
    return panel("Predicted change", `of the ${word}, in ${selected.unit}, by ${name}`,
      el("dl", { class: "facts" }, fact("better", queries(better)), fact("worse", queries(worse)),
        becomes ? fact("predicted to flip", queries(becomes.filter((word) => word).length)) : null,
        fact("mean change", known.length ? valueOf(known.reduce((s, x) => s + x, 0) / known.length, higher) : "–")),
      selected.note ? notice(`${selected.note}.`) : null,
      selected.within ? null : notice(`${name} is not calibrated: go by the order of these changes, not by their size.`),
      await queryTable(order, ["", ...(answer.measured ? [`${word} now`] : []), `predicted by ${name}`, ...(answer.measured ? ["after"] : []), ...others.map((one) => (answer.sets[one].within ? one : `${one}, rank`))], (row) => [
        answer.measured ? el("td", { class: "numeric" }, number(answer.measured[row])) : null,
        el("td", { class: "numeric" }, selected.change[row] === null ? unknown(selected.unknown[row]) : valueOf(selected.change[row], higher),
          selected.within && selected.within[row] !== null ? el("span", { class: "muted", title: "95 % interval of one retraining" }, ` ± ${number(selected.within[row], 2)}`) : null),
        !answer.measured ? null : el("td", { class: "numeric" }, after(row) === null ? "–" : number(after(row)), becomes && becomes[row] ? el("span", { class: becomes[row] }, becomes[row] === "right" ? "✓ becomes right" : "✗ becomes wrong") : null),
        ...others.map((one) => el("td", { class: "numeric" }, answer.sets[one].change[row] === null ? unknown(answer.sets[one].unknown[row])
          : answer.sets[one].within ? valueOf(answer.sets[one].change[row], higher) : rankOf(answer.sets[one].change, row, overview.about[one].higher_is_better))),
      ]));
  }

  // The place of a query in the order of its changes, without their size.
  function rankOf(changes, row, higher) {
    const stronger = changes.filter((x) => x !== null && Math.abs(x) > Math.abs(changes[row])).length;
    const up = (higher ? changes[row] : -changes[row]) >= 0;
    return el("span", { class: `value ${up ? "helpful" : "harmful"}` }, `${up ? "▲" : "▼"} rank ${count(stronger + 1)}`);
  }

  const unknown = (n) => el("span", { class: "muted small" }, `unknown: ${n} ${n === 1 ? "score is" : "scores are"} missing`);

  // A table of queries in a given order, a page at a time.
  async function queryTable(order, heads, cells) {
    const spot = el("div", {});
    const fill = async (offset) => {
      const rows = order.slice(offset, offset + PAGE);
      const items = rows.length ? await get("/api/rows", { rows: rows.join(",") }) : [];
      spot.replaceChildren(table(["query", "label", ...heads.slice(1)], items.map((item) => el("tr", {}, queryCell(item), labelsOf(item), cells(item.row))), "queries"),
        order.length > PAGE ? pager(order.length, offset, rows.length, fill) : "");
    };
    await fill(0);
    return spot;
  }

  async function jobResult(job) {
    const back = el("p", {}, el("button", { type: "button", class: "link", onclick: () => go({ page: "whatif", scores: scoresName() }) }, "← ticked examples"));
    const title = `Without ${examples(job.removed)}`;
    const retick = button("Tick these examples", () => { tick([...ticked], false); tick(job.examples, true); go({ page: "whatif", scores: scoresName() }); });
    if (!job.judged) {
      return el("div", { class: "result" }, back, panel(title, job.at_work ? "Predicted vs. actual change appears here when the retraining is done." : null,
        job.error ? notice(`The retraining failed: ${job.error}`) : null, await chips(job.examples), el("div", { class: "row-of-actions" }, retick)));
    }
    const name = scoresName(), { judged } = job, selected = judged.sets[name];
    const { higher_is_better: higher, measurement, unit } = overview.about[name];
    const word = measurement.replaceAll("_", " ");
    const became = (row) => (judged.becomes ? judged.becomes[row] : null);
    const flips = (judged.becomes || []).filter((one) => one === "wrong").length;
    const dots = judged.real.map((real, row) => ({ x: selected.change[row], y: real, e: judged.error[row], row, kind: became(row) === "wrong" ? "harmful" : "helpful",
      title: `query ${row}: predicted ${signed(selected.change[row])}, actual ${signed(real)}${judged.error[row] === null ? "" : ` ± ${number(judged.error[row], 2)}`}` }));
    const order = judged.real.map((_, row) => row).sort((x, y) => Math.abs(judged.real[y] || 0) - Math.abs(judged.real[x] || 0));
    const rates = el("table", { class: "listing compact" }, el("thead", {}, el("tr", {}, ["scores", "rank correlation", "correlation", "slope"].map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, overview.sets.map((one) => el("tr", { class: one === name ? "chosen" : "" },
        el("td", {}, el("button", { type: "button", class: "link", onclick: () => go({ ...here(), scores: one }) }, one)),
        el("td", { class: "numeric" }, decimals(judged.sets[one].spearman)), el("td", { class: "numeric" }, decimals(judged.sets[one].pearson)),
        el("td", { class: "numeric" }, judged.sets[one].slope === null ? "–" : number(judged.sets[one].slope))))));
    const lost = judged.seeds - judged.sound;
    return el("div", { class: "result" }, back,
      el("div", { class: "result-head" }, el("h2", {}, title), el("p", { class: "muted" },
        `Retrained with ${judged.seeds} seed${judged.seeds === 1 ? "" : "s"}, with and without the examples, in ${duration(job.seconds)}. Change of the ${word} in ${unit}.`)),
      lost ? notice(`${lost} of ${judged.seeds} seeds diverged and ${lost === 1 ? "is" : "are"} excluded.`) : null,
      judged.seeds === 1 ? notice("One seed cannot separate the effect from chance: use three or more.") : null,
      el("div", { class: "charts judged" },
        panel("Predicted vs. actual", `each dot is a query; on the dashed line, the prediction is exact${judged.sound > 1 ? "; bars are standard errors over seeds" : ""}${flips ? "; queries that became wrong are orange" : ""}`,
          scatter(dots, { x: `predicted change by ${name}`, y: "actual change", same: true, width: 640, height: 400, onpick: (dot) => go({ page: "queries", row: dot.row, scores: name }) })),
        panel("Agreement", "over all queries; a slope of 1 is perfect, a larger one means that the scores understate", rates,
          el("dl", { class: "facts" }, judged.becomes ? fact("became wrong", queries(flips)) : null,
            fact("mean actual change", valueOf(mean(judged.real), higher))),
          el("h4", {}, "Left out"), await chips(job.examples), el("div", { class: "row-of-actions" }, retick))),
      await queryTable(order, ["", `${word} with all data`, `predicted by ${name}`, "actual", "± over seeds"], (row) => [
        el("td", { class: "numeric" }, judged.baseline[row] === null ? "–" : number(judged.baseline[row])),
        el("td", { class: "numeric" }, selected.change[row] === null ? unknown(selected.unknown[row]) : valueOf(selected.change[row], higher)),
        el("td", { class: "numeric" }, valueOf(judged.real[row], higher), became(row) ? el("span", { class: became(row) }, became(row) === "right" ? "✓ became right" : "✗ became wrong") : null),
        el("td", { class: "numeric muted" }, judged.error[row] === null ? "–" : number(judged.error[row], 2)),
      ]));
  }

  const mean = (values) => { const known = values.filter((x) => x !== null); return known.length ? known.reduce((s, x) => s + x, 0) / known.length : null; };
  const duration = (s) => (s < 90 ? `${s < 9.5 ? s.toFixed(1) : Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`);
  const STATES = { waiting: "waiting", running: "retraining", done: "done", failed: "failed", cancelled: "cancelled" };

  function jobRow(job, open) {
    const act = (what) => async () => { try { await post(`/api/jobs/${job.id}/${what}`); } catch (error) { inDialog(notice(error.message)); }
      if (what === "remove" && job.id === open) go({ page: "whatif", scores: scoresName() }); else show({ keep: true });
    };
    const { share, left, done, of } = job.progress;
    const bar = el("progress", { max: 1, value: job.state === "waiting" ? null : share, "aria-label": `${Math.round(100 * share)} % done` });
    const mine = !overview.retrain.refused;
    return el("li", { class: `job ${job.state}${job.id === open ? " chosen" : ""}` },
      el("div", { class: "job-line" },
        el("button", { type: "button", class: "link job-name", onclick: () => go({ page: "whatif", scores: scoresName(), job: job.id }) }, `without ${examples(job.removed)}`),
        el("span", { class: "muted small" }, `${job.seeds} seed${job.seeds === 1 ? "" : "s"} · ${new Date(job.created * 1000).toLocaleString()}`),
        el("span", { class: "state" }, STATES[job.state] || job.state),
        mine && job.at_work ? button("Cancel", act("cancel")) : null,
        mine && ["failed", "cancelled"].includes(job.state) ? button("Resume", act("resume")) : null,
        mine && !job.at_work ? button("Remove", act("remove"), { "aria-label": "remove this retraining from the list" }) : null),
      job.at_work && mine ? el("div", { class: "job-progress" }, bar, el("span", { class: "small muted", role: "status" },
        job.state === "waiting" ? "waiting for other jobs" : `${Math.round(100 * share)} % · ${done} of ${of} trainings${left === null ? "" : ` · about ${duration(left)} left`}`)) : null,
      job.error ? notice(job.error) : null);
  }

  async function followJobs(spot, open, shown) {
    try {
      for (let first = true; first || spot.isConnected; first = false) {
        const answer = await get("/api/jobs");
        const opened = answer.jobs.find((job) => job.id === open);
        const notes = overview.retrain.others ? el("p", { class: "muted small" }, `${overview.retrain.others} more in ${overview.retrain.folder} belong to another recipe or other queries.`) : "";
        const focused = spot.contains(document.activeElement) ? document.activeElement.textContent : null;
        spot.replaceChildren(answer.jobs.length ? el("ul", {}, answer.jobs.map((job) => jobRow(job, open)))
          : el("p", { class: "muted" }, answer.refused ? `Retraining is not available: ${answer.refused}.` : "None yet. Tick examples and retrain without them."), notes);
        const again = [...spot.querySelectorAll("button")].find((one) => one.textContent === focused);
        if (again) again.focus({ preventScroll: true });
        if (opened && opened.state !== shown) { show({ keep: true }); return; }
        if (!answer.jobs.some((job) => job.at_work)) return;
        await wait(500);
      }
    } catch (error) { spot.replaceChildren(notice(error.message)); }
  }

  // -- about -------------------------------------------------------------------------------------------

  async function aboutPage(where) {
    const every = [...overview.sets, ...overview.self_influence];
    const name = every.includes(where.scores) ? where.scores : every[0];
    const { recipe, folder, refused } = overview.retrain;
    return el("div", { class: "about" },
      every.length > 1 ? el("div", { class: "filters" }, field("scores", choose("about", "scores", every.map((one) => [one, one]), name, (v) => go({ page: "about", scores: v })))) : null,
      V.about(ctxOf(name, {})),
      overview.notes.length ? el("section", { class: "panel" }, el("h3", {}, "The data"),
        el("ul", { class: "notices" }, overview.notes.map((note) => el("li", { class: "notice" }, note)))) : null,
      el("section", { class: "panel" }, el("h3", {}, "Retraining"), refused ? notice(`Retraining is not available: ${refused}.`) : null,
        recipe ? el("dl", { class: "sheet" }, el("dt", {}, "recipe"), el("dd", {}, recipe), el("dt", {}, "stored in"), el("dd", {}, folder)) : null));
  }

  // -- frame -------------------------------------------------------------------------------------------

  const PAGES = [["overview", "Overview", overviewPage], ["queries", "Queries", queryPage], ["examples", "Training data", examplesPage], ["map", "Map", mapPage], ["compare", "Compare", comparePage],
    ["audit", "Audit", auditPage], ["whatif", "What if", whatIfPage], ["about", "About", aboutPage]];
  const main = el("main", { tabindex: "-1" });
  const tabs = el("nav", { class: "tabs", "aria-label": "pages" });
  const brand = el("div", { class: "brand" });
  const alerts = el("div");
  const keys = el("footer", { class: "keys muted small" });
  let turn = 0;

  function frame() {
    const where = here();
    const page = PAGES.some(([name]) => name === where.page) ? where.page : (overview.sets.length ? "overview" : "audit");
    document.body.dataset.page = page;
    tabs.replaceChildren(...PAGES.map(([name, text]) => el("a", { href: hash({ page: name, scores: overview.sets.length ? scoresName() : null, row: ["queries", "compare"].includes(name) ? current : null }), class: "tab", "aria-current": name === page ? "page" : null },
      text, name === "whatif" ? el("span", { id: "ticked", class: "badge", "aria-label": "ticked" }) : null)));
    badge();
    const pick = overview.sets.length > 1 && page !== "compare" && page !== "audit"
      ? choose("scores", "scores", overview.sets.map((name) => [name, name]), scoresName(), (v) => go({ ...here(), scores: v }))
      : el("span", {}, page === "compare" || page === "audit" ? "" : [...overview.sets, ...overview.self_influence][0]);
    const about = overview.about[overview.sets.length ? scoresName() : overview.self_influence[0]];
    const notes = overview.notes.length + about.notes.length;
    alerts.replaceChildren(V.warnings(about) || "");
    brand.replaceChildren(el("h1", {}, "whence", el("span", { class: "muted" }, " explore")), el("p", { class: "muted small" }, pick, ` ${about.measurement.replaceAll("_", " ")} in ${about.unit}`,
      notes ? [" · ", el("a", { href: hash({ page: "about", scores: here().scores }), class: "notice-link" }, `⚠ ${notes} ${notes === 1 ? "note" : "notes"}`)] : null));
    return page;
  }

  async function show({ keep = false } = {}) {
    const mine = ++turn;
    const page = frame();
    main.setAttribute("aria-busy", "true");
    let content;
    try { content = await PAGES.find(([name]) => name === page)[2](here()); } catch (error) { content = notice(error.message); }
    if (mine !== turn) return;
    // restore the focus, so that typing continues
    const before = main.contains(document.activeElement) ? document.activeElement : null;
    const name = (one) => one.getAttribute("aria-label") || one.textContent;
    const caret = before && before.type === "search" ? before.selectionStart : null;
    main.replaceChildren(content);
    main.removeAttribute("aria-busy");
    const again = before && [...main.querySelectorAll(before.tagName)].find((one) => name(one) === name(before));
    if (again) again.focus({ preventScroll: true });
    if (again && caret !== null) { again.value = before.value; again.setSelectionRange(caret, caret); }
    if (!keep) scrollTo(0, 0);
    document.documentElement.dataset.ready = page;
  }

  // Reload the page after a while, if it is still open.
  function later(milliseconds) {
    const then = location.hash;
    setTimeout(() => { if (location.hash === then && !dialog.open) show({ keep: true }); }, milliseconds);
  }

  function help() {
    const rows = [["j k ↓ ↑", "next and previous query"], ["/", "search"], ["1 … 8", "pages"], ["x", "tick the focused example, or the one under the cursor"], ["?", "this help"], ["Esc", "close"]];
    inDialog(el("h2", {}, "Keys"), el("dl", { class: "sheet" }, rows.map(([key, what]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)])));
  }

  document.addEventListener("keydown", (event) => {
    if (dialog.open || event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.closest("input:not([type=checkbox]), select, textarea");
    if (typing) { if (event.key === "Escape") typing.blur(); return; }
    const page = document.body.dataset.page;
    if (event.key === "?") { event.preventDefault(); help(); return; }
    if (event.key === "/") {
      const box = (page === "queries" ? sidebar : main).querySelector("input[type=search]");
      if (box) { event.preventDefault(); box.focus(); }
      return;
    }
    if (/^[1-8]$/.test(event.key)) { event.preventDefault(); tabs.children[Number(event.key) - 1].click(); return; }
    if (event.key === "x") {
      const around = event.target.closest("li, tr") || document.querySelector("li.card:hover, tr:hover");
      const box = around && around.querySelector("input[data-place]");
      if (box) { event.preventDefault(); box.click(); }
      return;
    }
    const step = { j: 1, k: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || event.target.closest(".table-frame")) return;
    if (page === "queries") { event.preventDefault(); move(step); }
    if (page === "compare" && !event.key.startsWith("Arrow")) { event.preventDefault(); go({ ...here(), row: Math.min(Math.max(current + step, 0), overview.queries - 1) }); }
  });

  async function begin() {
    // keep the token out of the history and the address bar
    if (location.search) history.replaceState(null, "", location.pathname + location.hash);
    try { overview = await get("/api/overview"); } catch (error) { document.body.replaceChildren(notice(error.message)); return; }
    keys.append(el("kbd", {}, "j"), " ", el("kbd", {}, "k"), " next and previous query · ", el("kbd", {}, "/"), " search · ", el("kbd", {}, "1"), "–", el("kbd", {}, "8"), " pages · ", el("kbd", {}, "x"), " tick · ", el("kbd", {}, "?"), " all keys");
    remember();
    buildSidebar();
    document.body.replaceChildren(el("header", { class: "top" }, brand, tabs, V.themeButton()),
      el("div", { class: "frame" }, sidebar, el("div", { class: "content" }, alerts, main, keys)), dialog);
    addEventListener("hashchange", () => show());
    await show();
    while (overview.reading) {
      await wait(700);
      try { overview = await get("/api/overview"); } catch { return; }
      if (!overview.reading) { buildSidebar(); loadList(); show({ keep: true }); }
    }
  }

  begin();
})();
