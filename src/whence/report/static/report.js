// The host of the one-file report: the data is embedded in the page, the views are in views.js.
"use strict";

(() => {
  const V = Whence.views;
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const { overview, summary, queries, harmful, audit, title } = read("whence-scores");
  const { examples, ids } = read("whence-examples");
  const byRow = new Map(queries.map((view) => [view.row, view]));

  const main = V.el("main", { tabindex: "-1" });
  const dialog = V.el("dialog", { "aria-label": "training example" });
  const ctx = { overview, examples, ids, onExample: open, hasQuery: (row) => byRow.has(row),
    onQuery: (row) => { dialog.close(); location.hash = `query=${row}`; } };

  const pages = overview.self ? [["audit", "Audit list"], ["about", "About"]]
    : [["overview", "Overview"], ["queries", "Queries"], ["harmful", "Most harmful overall"], ["about", "About"]];
  const tabs = pages.map(([name, text]) => V.el("a", { href: `#${name}`, class: "tab" }, text));
  const list = overview.self ? null : V.queryList(queries, { overview, onSelect: (row) => { location.hash = `query=${row}`; } });

  // The displayed queries in which a training example appears.
  function related(column) {
    const appearances = [];
    for (const view of queries) {
      for (const entry of [...view.helpful, ...view.harmful]) {
        if (entry.column === column) appearances.push([view.row, entry.value]);
      }
    }
    return appearances.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
  }

  function open(column, entry, query) {
    const close = V.el("button", { type: "button", class: "close", "aria-label": "close", onclick: () => dialog.close() }, "×");
    dialog.replaceChildren(close, V.detail(column, related(column), ctx, entry, query));
    if (!dialog.open) dialog.showModal();
  }
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });

  function show() {
    const [name, value] = location.hash.slice(1).split("=");
    let page = pages.some(([known]) => known === name) ? name : pages[0][0];
    let view = null;
    if (!overview.self && (name === "query" || page === "queries")) {
      const row = name === "query" ? Number(value) : list.first();
      page = "queries";
      view = byRow.get(row);
      if (view) list.mark(row);
    }
    tabs.forEach((tab, k) => tab.toggleAttribute("aria-current", pages[k][0] === page));
    document.body.dataset.page = page;
    if (page === "queries") {
      main.replaceChildren(view ? V.query(view, ctx) : V.el("p", { class: "muted" }, "This report has no such query."));
    } else if (page === "overview") main.replaceChildren(V.summary({ ...summary, suspects: harmful.entries }, ctx));
    else if (page === "harmful") main.replaceChildren(V.harmful(harmful, ctx));
    else if (page === "audit") main.replaceChildren(V.audit(audit, ctx));
    else main.replaceChildren(V.about(ctx));
    main.scrollTop = 0;
    document.documentElement.scrollTop = 0;
  }

  const notes = overview.notes.length ? [" · ", V.el("a", { href: "#about", class: "notice-link" },
    `⚠ ${overview.notes.length} ${overview.notes.length === 1 ? "note" : "notes"}`)] : null;
  const header = V.el("header", { class: "top" },
    V.el("div", { class: "brand" }, V.el("h1", {}, V.bdi(title)),
      V.el("p", { class: "muted small" }, `${overview.method} · ${overview.measurement.replaceAll("_", " ")} in ${overview.unit}`, notes)),
    V.el("nav", { class: "tabs", "aria-label": "pages" }, tabs), V.themeButton());
  const keys = overview.self ? null : V.el("footer", { class: "keys muted small" },
    V.el("kbd", {}, "j"), " ", V.el("kbd", {}, "k"), " or arrow keys: next and previous query · ", V.el("kbd", {}, "/"), ": filter");
  document.body.replaceChildren(header, V.el("div", { class: "frame" }, list ? list.node : null,
    V.el("div", { class: "content" }, V.warnings(overview), main, keys)), dialog);

  document.addEventListener("keydown", (event) => {
    if (!list || dialog.open || event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.closest("input, select, textarea");
    if (typing) { if (event.key === "Escape") typing.blur(); return; }
    if (event.key === "/") { event.preventDefault(); list.focusFilter(); return; }
    if (document.body.dataset.page !== "queries") return;
    const inFrame = event.target.closest(".table-frame");
    const step = { j: 1, k: -1, ArrowDown: 1, ArrowUp: -1, ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || inFrame) return;
    event.preventDefault();
    list.move(step);
  });
  addEventListener("hashchange", show);
  show();
  document.documentElement.dataset.ready = "true";
})();
