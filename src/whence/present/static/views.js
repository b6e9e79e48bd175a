// Views of scores: plain data in, DOM out. Used by the one-file report and by the explorer.
//
// Data is not trusted: it is inserted through textContent, except for `html`, which only the user's
// own renderer can return (whence.report.HTML). Styles are set through the CSSOM, so that a strict
// Content-Security-Policy works.
//
// ctx, the context that a host passes to every view:
//   overview            the result of `overview(scores)`
//   examples            {column: rendered example}; other columns are shown by their index
//   ids                 {column: [id, stage]} of columns that are not in examples (optional)
//   onExample(column)   called when a training example is selected (optional)
//   onQuery(row)        called when a query is selected (optional)
//   extra(entry)        returns a node to add to an entry's card, or null (optional)
"use strict";

var Whence = (typeof Whence === "undefined") ? {} : Whence;

Whence.views = (() => {
  const SVG = "http://www.w3.org/2000/svg";

  // -- building blocks -----------------------------------------------------------------------

  function add(node, children) {
    for (const child of children.flat(2)) {
      if (child === null || child === undefined || child === false) continue;
      node.append(child instanceof Node ? child : String(child));
    }
    return node;
  }

  function set(node, attributes) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name === "class") node.setAttribute("class", value);
      else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value === true ? "" : String(value));
    }
    return node;
  }

  const el = (tag, attributes, ...children) =>
    add(set(document.createElement(tag), attributes), children);
  const svg = (tag, attributes, ...children) =>
    add(set(document.createElementNS(SVG, tag), attributes), children);

  // Text for screen readers, before what is seen.
  const unseen = (text) => el("span", { class: "unseen" }, text);

  // Text of unknown direction, isolated so that it cannot reorder the text around it.
  const bdi = (text, attributes) => el("bdi", { dir: "auto", ...attributes }, text);

  function number(value, digits = 3) {
    if (value === null || value === undefined) return "not finite";
    if (value === 0) return "0";
    const size = Math.abs(value);
    let text;
    if (size >= 1e5 || size < 1e-4) {
      const [mantissa, power] = size.toExponential(digits - 1).split("e");
      text = `${mantissa} × 10${superscript(Number(power))}`;
    } else {
      text = size >= 10 ** digits ? count(Math.round(size)) : size.toPrecision(digits);
    }
    return (value < 0 ? "−" : "") + text;
  }

  function superscript(power) {
    const signs = "⁰¹²³⁴⁵⁶⁷⁸⁹";
    return (power < 0 ? "⁻" : "") + [...String(Math.abs(power))].map((d) => signs[d]).join("");
  }

  const signed = (value, digits) => (value > 0 ? "+" : "") + number(value, digits);
  const count = (value) => value.toLocaleString("en-US");
  const plural = (n, word) => `${count(n)} ${n === 1 ? word : word.replace(/y$/, "ie") + "s"}`;
  const helps = (value, ctx) => (ctx.overview.higher_is_better ? value : -value) > 0;
  const side = (value, ctx) => (helps(value, ctx) ? "helpful" : "harmful");

  function panel(title, note, ...children) {
    const head = el("div", { class: "panel-head" }, el("h3", {}, title),
      note ? el("p", { class: "muted" }, note) : null);
    return el("section", { class: "panel" }, head, ...children);
  }

  // -- examples ------------------------------------------------------------------------------

  // An example: large for a query or a dialog, otherwise a thumbnail.
  // beside: another example; words and cells that both have are marked.
  function example(rendered, { large = false, lazy = false, entry = null, ctx = null, beside = null } = {}) {
    const box = el("div", { class: `example ${rendered.kind}${large ? " large" : ""}` });
    if (entry && entry.tokens && rendered.pieces) {
      box.classList.add("text");
      add(box, [tokens(rendered.pieces, entry.tokens, ctx)]);
    } else if (rendered.kind === "image") {
      const image = el("img", {
        src: rendered.image, alt: altText(rendered), decoding: "async", loading: lazy ? "lazy" : null, draggable: "false",
      });
      image.addEventListener("load", () => {
        if (image.naturalWidth <= 40 && image.naturalHeight <= 64) image.classList.add("pixels");
      });
      add(box, [image]);
    } else if (rendered.kind === "text") {
      const text = beside && beside.kind === "text" ? marked(rendered.text, sharedWords(rendered.text, beside.text)) : rendered.text;
      add(box, [el("p", { class: "words", dir: "auto" }, text.length ? text : "(empty text)")]);
    } else if (rendered.kind === "row") {
      const rows = large ? rendered.row : rendered.row.slice(0, 12);
      const other = new Map(beside && beside.kind === "row" ? beside.row : []);
      add(box, [el("dl", { class: "cells" }, rows.map(([name, value]) =>
        el("div", { class: other.get(name) === value ? "shared" : null }, el("dt", {}, bdi(name)), el("dd", {}, bdi(value)))))]);
      if (rows.length < rendered.row.length) {
        add(box, [el("p", { class: "muted small" }, `and ${rendered.row.length - rows.length} more values`)]);
      }
    } else if (rendered.kind === "custom") {
      box.innerHTML = rendered.html; // from the user's own renderer, which marked it as HTML
    } else {
      add(box, [el("p", { class: "muted" }, `#${rendered.id}`)]);
    }
    if (large && rendered.more) add(box, [el("p", { class: "muted small" }, `… ${rendered.more}`)]);
    if (rendered.note && (large || rendered.kind === "missing")) {
      add(box, [el("p", { class: "muted small" }, bdi(rendered.note))]);
    }
    return box;
  }

  const altText = ({ id, label }) => `image ${id}${label === null ? "" : `, label ${label}`}`;

  // A text with its tokens marked: a solid line helped, a wavy line harmed.
  function tokens(pieces, values, ctx) {
    const most = Math.max(...values.map((v) => Math.abs(v || 0))) || 1;
    const text = el("p", { class: "words tokens", dir: "auto" });
    pieces.forEach((piece, k) => {
      const value = values[k];
      const weight = Math.abs(value || 0) / most;
      if (value === undefined || weight < 0.15) return text.append(piece);
      const word = piece.trimStart();
      const mark = el("span", { class: `token ${side(value, ctx)}`, title: signed(value) }, word);
      mark.style.setProperty("--weight", weight.toFixed(2));
      text.append(piece.slice(0, piece.length - word.length), mark);
    });
    return text;
  }

  // -- two examples side by side ---------------------------------------------------------------

  const LONG = 5, RUN = 3; // a shared word is marked if it is this long, or in a run of this many words

  // [{text, key}]: the text in parts; a word has a key, and what is between words has none.
  function partsOf(text) {
    if (typeof Intl !== "undefined" && Intl.Segmenter) {
      const parts = new Intl.Segmenter(undefined, { granularity: "word" }).segment(text);
      return Array.from(parts, (part) => ({ text: part.segment, key: part.isWordLike ? part.segment.toLowerCase() : null }));
    }
    return (text.match(/[\p{L}\p{N}]+|[^\p{L}\p{N}]+/gu) || []).map((part) =>
      ({ text: part, key: /^[\p{L}\p{N}]/u.test(part) ? part.toLowerCase() : null }));
  }

  function sharedWords(a, b) {
    const others = new Set(partsOf(b).map((part) => part.key));
    return new Set(partsOf(a).map((part) => part.key).filter((key) => key !== null && others.has(key)));
  }

  // The text as nodes, with shared words marked; short ones only in a run of shared words.
  function marked(text, shared) {
    const nodes = [];
    let run = [], between = [];
    const flush = () => {
      const whole = run.map((part) => part.text).join(""), words = run.filter((part) => part.key !== null);
      const worth = words.length >= RUN || words.some((part) => part.key.length >= LONG);
      if (whole) nodes.push(worth ? el("mark", {}, whole) : whole);
      nodes.push(...between.map((part) => part.text));
      run = [];
      between = [];
    };
    for (const part of partsOf(text)) {
      if (part.key === null) between.push(part); // in the run only if the run continues
      else if (shared.has(part.key)) {
        if (run.length) run.push(...between, part); else { flush(); run = [part]; }
        between = [];
      } else { flush(); nodes.push(part.text); }
    }
    flush();
    return nodes;
  }

  // A query beside a training example: what they share, and where they differ.
  function beside(query, rendered, ctx, entry) {
    const side = (title, what, content) => el("figure", {}, el("figcaption", {}, el("span", { class: "muted small" }, title),
      what === null || what === undefined ? null : [" ", el("strong", {}, bdi(what))]), content);
    const colored = entry && entry.tokens && rendered.pieces;
    const pair = [side(`query ${query.id}`, query.label, example(query, { large: true, beside: rendered })),
      side(`training example ${naming(rendered)}`, rendered.label, example(rendered, { large: true, beside: query, entry, ctx }))];
    if (query.kind === "row" && rendered.kind === "row") return columns(query, rendered, ctx);
    if (query.kind === "image" && rendered.kind === "image") {
      const difference = el("div", { class: "example image large difference", role: "img", "aria-label": "difference of the two pictures" },
        [query, rendered].map((one) => el("img", { src: one.image, alt: "", "aria-hidden": "true" })));
      pair.push(side("difference", null, difference));
    }
    const common = query.kind === "text" && rendered.kind === "text" && !colored
      ? el("p", { class: "muted small" }, `Marked: common words (${count(sharedWords(query.text, rendered.text).size)} distinct ones).`) : null;
    return el("div", {}, el("div", { class: `pair ${rendered.kind}` }, pair), common);
  }

  // Two rows of a table, column by column. A bar is the difference, relative to the range of the column
  // in what is at hand.
  function columns(query, rendered, ctx) {
    const theirs = new Map(rendered.row);
    const atHand = [query, ...Object.values(ctx.examples)].filter((one) => one.row).map((one) => new Map(one.row));
    const numeric = (value) => (value !== undefined && value.trim() !== "" && Number.isFinite(Number(value)) ? Number(value) : null);
    const line = ([name, value]) => {
      const other = theirs.get(name), same = other === value;
      const [a, b] = [numeric(value), numeric(other)];
      const every = atHand.map((row) => numeric(row.get(name))).filter((x) => x !== null);
      const range = Math.max(...every, a, b) - Math.min(...every, a, b);
      const share = a === null || b === null ? Number(!same) : range ? Math.abs(a - b) / range : 0;
      const bar = el("span", { class: "bar neutral", "aria-hidden": "true" });
      bar.style.setProperty("--length", `${(100 * share).toFixed(1)}%`);
      return el("tr", { class: same ? "shared" : null }, el("th", { scope: "row" }, bdi(name)), el("td", {}, bdi(value)),
        el("td", {}, other === undefined ? "–" : bdi(other)),
        el("td", { class: "bar-cell" }, same ? el("span", { class: "muted small" }, "same") : el("span", { class: "track" }, bar)));
    };
    const label = query.label === null && rendered.label === null ? null : el("tr", { class: query.label === rendered.label ? "shared" : null },
      el("th", { scope: "row" }, "label"), el("td", {}, bdi(query.label ?? "–")), el("td", {}, bdi(rendered.label ?? "–")), el("td", {}, query.label === rendered.label ? el("span", { class: "muted small" }, "same") : ""));
    return table(["", `query ${query.id}`, `example ${naming(rendered)}`, "difference"], [label, query.row.map(line)], "query and training example, column by column");
  }

  function renderedOf(column, ctx) {
    if (ctx.examples[column]) return ctx.examples[column];
    const [id, stage] = (ctx.ids && ctx.ids[column]) || [column, null];
    return { id, stage, kind: "missing", label: null };
  }

  // Whether there is more to show of an example than its index.
  const known = (rendered) => rendered.kind !== "missing" || Boolean(rendered.note);
  const naming = ({ id, stage }) => `#${id}${stage ? ` of ${stage}` : ""}`;

  // How large a score is: a change with its interval if the scores are calibrated. Otherwise only
  // the order is known, and the number is in the tooltip.
  function size(entry, rank, ctx) {
    const { unit, calibrated } = ctx.overview;
    const kind = `value ${side(entry.value, ctx)}`;
    const around = (half) => (half === undefined ? "" : `± ${half === null ? "∞" : number(half, 2)}`);
    if (calibrated) {
      return el("span", { class: kind, title: `expected change in ${unit}, with its 95 % interval` }, signed(entry.value),
        " ", el("span", { class: "muted" }, around(entry.within)));
    }
    return el("span", { class: kind, title: `score ${[signed(entry.value), around(entry.spread), unit].filter(Boolean).join(" ")}, not calibrated` }, `rank ${rank}`);
  }

  // A bar whose length is relative to the strongest score of its list.
  function track(value, strongest, ctx) {
    const bar = el("span", { class: `bar ${side(value, ctx)}`, "aria-hidden": "true" });
    bar.style.setProperty("--length", `${(100 * Math.abs(value / strongest)).toFixed(1)}%`);
    return el("span", { class: "track" }, bar);
  }

  const strongestOf = (entries) => Math.max(...entries.map((entry) => Math.abs(entry.value)), 0) || 1;

  // One training example in a ranking.
  function card(entry, rank, strongest, ctx) {
    const rendered = renderedOf(entry.column, ctx);
    const which = side(entry.value, ctx);
    const open = ctx.onExample && (() => ctx.onExample(entry.column, entry));
    return el("li", { class: `card ${rendered.kind}` },
      el(open ? "button" : "div", {
        class: "card-face", type: open ? "button" : null, onclick: open || null,
      },
        unseen(`training example ${naming(rendered)}, ${which === "helpful" ? "helped" : "harmed"}`
          + `${entry.also ? `, with ${plural(entry.also.length, "near-duplicate")}` : ""}: `),
        known(rendered) ? example(rendered, { entry, ctx, beside: ctx.beside }) : null,
        el("span", { class: "card-facts" },
          el("span", { class: "card-line" },
            rendered.label === null ? el("span", { class: "muted" }, naming(rendered))
              : el("span", { class: "label", title: `label ${rendered.label}` }, bdi(rendered.label)),
            size(entry, rank, ctx)),
          track(entry.value, strongest, ctx),
          entry.segments ? timeline(entry.segments, ctx) : null,
          rendered.label === null ? null : el("span", { class: "card-id muted" }, naming(rendered)),
          entry.also ? el("span", { class: "also-like small", title: `near-duplicates in this list: ${entry.also.map((one) => naming(renderedOf(one, ctx))).join(", ")}` }, `+ ${entry.also.length} alike`) : null)),
      ctx.extra ? ctx.extra(entry) : null);
  }

  // Whether cards need the whole width: texts and rows do, images do not.
  const widely = (entries, ctx) => entries.some((entry) => ["text", "row", "custom"].includes(renderedOf(entry.column, ctx).kind));

  function ranking(title, mark, which, entries, empty, ctx) {
    const strongest = strongestOf(entries);
    const wide = widely(entries, ctx);
    return el("section", { class: `ranking ${which}` },
      el("h3", {}, el("span", { class: `mark ${which}`, "aria-hidden": "true" }, mark), title),
      entries.length ? el("ol", { class: `cards${wide ? " wide" : ""}` },
        entries.map((entry, k) => card(entry, k + 1, strongest, ctx)))
        : el("p", { class: "muted" }, empty));
  }

  // -- charts --------------------------------------------------------------------------------

  // The contribution of each segment: up helped, down harmed.
  function timeline(parts, ctx) {
    const width = 14 * parts.length, height = 20;
    const most = Math.max(...parts.map((part) => Math.abs(part || 0))) || 1;
    const names = ctx.overview.segments.map((segment) => segment.name);
    const step = width / parts.length;
    const summary = parts.map((part, k) => `${names[k]}: ${signed(part)}`).join("; ");
    const chart = svg("svg", {
      class: "timeline", width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
      preserveAspectRatio: "none",
      "aria-label": `when it mattered: ${summary}`,
    }, svg("title", {}, `When it mattered\n${summary.replaceAll("; ", "\n")}`));
    parts.forEach((part, k) => {
      const size = (Math.abs(part || 0) / most) * (height / 2 - 1);
      chart.append(svg("rect", {
        class: part ? side(part, ctx) : "none", x: k * step + 1, width: Math.max(1, step - 2),
        y: part && helps(part, ctx) ? height / 2 - size : height / 2, height: Math.max(size, 0.5),
      }));
    });
    chart.append(svg("line", { class: "axis", x1: 0, x2: width, y1: height / 2, y2: height / 2 }));
    return chart;
  }

  // Distribution of the scores. Heights are logarithmic, because most scores are close to zero.
  function histogram(bins, ctx) {
    const width = 320, height = 120, bottom = 18;
    const { low, width: step, counts } = bins;
    const most = Math.log1p(Math.max(...counts));
    const total = counts.reduce((sum, n) => sum + n, 0);
    const at = (value) => ((value - low) / (step * counts.length)) * width;
    const zero = at(0);
    const chart = svg("svg", {
      class: "histogram", viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `distribution of ${count(total)} scores from ${number(low)} to `
        + `${number(low + step * counts.length)}`,
    });
    counts.forEach((n, k) => {
      if (!n) return;
      const size = Math.max(1.5, (Math.log1p(n) / most) * (height - bottom - 4));
      const middle = low + (k + 0.5) * step;
      chart.append(svg("rect", {
        class: side(middle, ctx), x: at(low + k * step) + 0.5, y: height - bottom - size,
        width: Math.max(0.5, width / counts.length - 1), height: size,
      }, svg("title", {}, `${plural(n, "score")} from ${number(low + k * step)} to ${number(low + (k + 1) * step)}`)));
    });
    const line = height - bottom;
    chart.append(svg("line", { class: "axis", x1: 0, x2: width, y1: line, y2: line }),
      svg("line", { class: "axis zero", x1: zero, x2: zero, y1: 0, y2: line + 4 }));
    const end = low + step * counts.length;
    const label = (x, text, anchor) => chart.append(svg("text", { x, y: height - 4, "text-anchor": anchor }, text));
    if (zero > 60) label(0, number(low, 2), "start");
    if (zero < width - 60) label(width, number(end, 2), "end");
    label(Math.min(Math.max(zero, 6), width - 6), "0", "middle");
    return chart;
  }

  // Counts of the labels of the displayed examples.
  function mix(classes, ctx) {
    const most = Math.max(...["helpful", "harmful"].flatMap((s) => classes[s].map(([, n]) => n)), 1);
    const half = (which, title) => el("div", { class: "mix" },
      el("h4", {}, title),
      classes[which].length ? el("ul", {}, classes[which].map(([name, n]) => {
        const bar = el("span", { class: `bar ${which}`, "aria-hidden": "true" });
        bar.style.setProperty("--length", `${((100 * n) / most).toFixed(1)}%`);
        return el("li", {}, el("span", { class: "mix-name" }, bdi(name)),
          el("span", { class: "track" }, bar), el("span", { class: "mix-count" }, n));
      })) : el("p", { class: "muted small" }, "none"));
    const [first, second] = ctx.overview.self ? ["Most memorised", "Least memorised"] : ["▲ Helped", "▼ Harmed"];
    return el("div", { class: "mixes" }, half("helpful", first), half("harmful", second));
  }

  // How much all examples together helped and harmed in each segment. With `curve`, [update, value]
  // pairs of the query's measurement, segments are as wide as they are long, and the curve is over them.
  function when(parts, ctx, curve) {
    const width = 320, top = curve ? 62 : 2, height = 128 + top, bottom = 30;
    const middle = (height - bottom + top) / 2;
    const most = Math.max(...parts.flat().map((part) => Math.abs(part || 0))) || 1;
    const { segments } = ctx.overview;
    const last = segments[segments.length - 1].end;
    const timed = last > 0 && segments.every((segment) => segment.start !== null && segment.end !== null);
    const left = (k) => (timed ? (segments[k].start / last) : k / parts.length) * width;
    const right = (k) => (timed ? (segments[k].end / last) : (k + 1) / parts.length) * width;
    const chart = svg("svg", {
      class: "when", viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": parts.map(([helped, harmed], k) =>
        `${ctx.overview.segments[k].name}: helped ${number(helped)}, harmed ${number(harmed)}`).join("; "),
    });
    parts.forEach(([helped, harmed], k) => {
      const segment = ctx.overview.segments[k];
      const step = right(k) - left(k), centre = (left(k) + right(k)) / 2;
      const bar = Math.min(Math.max(step - 6, step / 2), curve ? step : 64), x = centre - bar / 2;
      const title = () => svg("title", {}, `${segment.name}${segment.stage ? ` (${segment.stage})` : ""}\n`
        + `helped ${signed(helped)}, harmed ${signed(harmed)}`);
      const up = (Math.abs(helped || 0) / most) * (middle - top);
      const down = (Math.abs(harmed || 0) / most) * (middle - top);
      chart.append(
        svg("rect", { class: "helpful", x, y: middle - up, width: bar, height: up }, title()),
        svg("rect", { class: "harmful", x, y: middle, width: bar, height: down }, title()));
      const words = segment.end === null ? String(k + 1)
        : segment.start === null ? `to ${segment.end}` : `${segment.start}–${segment.end}`;
      if (step >= 50) {
        chart.append(svg("text", { x: centre, y: height - 16, "text-anchor": "middle" }, words));
        if (segment.stage) {
          chart.append(svg("text", { x: centre, y: height - 3, "text-anchor": "middle" }, segment.stage));
        }
      }
    });
    chart.append(svg("line", { class: "axis", x1: 0, x2: width, y1: middle, y2: middle }));
    if (curve && timed) chart.append(...line(curve, ctx, (update) => (update / last) * width, top - 6));
    return chart;
  }

  // The measurement of a query during training, in the upper `height` of a chart.
  function line(curve, ctx, across, height) {
    const values = curve.map(([, value]) => value).filter((value) => value !== null);
    if (!values.length) return [];
    const low = Math.min(...values), span = Math.max(...values) - low || 1;
    const at = ([update, value]) => [across(update), height - 2 - ((value - low) / span) * (height - 18)];
    const known = curve.filter(([, value]) => value !== null);
    const word = ctx.overview.measurement.replaceAll("_", " ");
    return [svg("text", { x: 0, y: 10 }, `${word} of the query: ${number(known[0][1])} → ${number(known[known.length - 1][1])}`),
      svg("polyline", { class: "curve", points: known.map((pair) => at(pair).map((x) => x.toFixed(1)).join(",")).join(" ") }),
      ...known.map((pair) => svg("circle", { class: "curve-dot", cx: at(pair)[0], cy: at(pair)[1], r: 2.5 },
        svg("title", {}, `${word} after update ${pair[0]}: ${number(pair[1])}`)))];
  }

  function charts(view, ctx) {
    const panels = [];
    if (view.histogram) {
      panels.push(panel("Distribution of scores", "training examples by score (log scale)", histogram(view.histogram, ctx)));
    }
    if (view.segments) {
      panels.push(panel("When it mattered", `sum over all training examples, per segment of training${view.curve ? ", under the query's own curve" : ""}`, when(view.segments, ctx, view.curve)));
    }
    if (view.classes) {
      panels.push(panel("Classes", "labels of the displayed examples", mix(view.classes, ctx)));
    }
    return panels.length ? el("div", { class: "charts" }, panels) : null;
  }

  // -- whole views ---------------------------------------------------------------------------

  const wrong = (view) => view.prediction !== null && view.prediction !== undefined
    && view.label !== null && view.comparable && view.prediction !== view.label;

  function fact(name, ...value) {
    return el("div", { class: "fact" }, el("dt", {}, name), el("dd", {}, ...value));
  }

  // One query: the query itself, the examples that helped it, those that harmed it.
  function query(view, ctx) {
    const { overview } = ctx;
    const ranked = { ...ctx, beside: view.query, onExample: ctx.onExample && ((column, entry) => ctx.onExample(column, entry, view.query)) };
    const facts = el("dl", { class: "facts" });
    if (view.label !== null) add(facts, [fact("label", bdi(view.label))]);
    if (view.prediction !== null && view.prediction !== undefined) {
      add(facts, [fact("prediction", bdi(view.prediction),
        view.probability === null ? null : el("span", { class: "muted" }, ` ${percent(view.probability)}`),
        wrong(view) ? el("span", { class: "wrong" }, "✗ wrong") : null)]);
    }
    if (view.measurement !== null && view.measurement !== undefined) {
      add(facts, [fact(overview.measurement.replaceAll("_", " "), number(view.measurement), el("span", { class: "muted" }, ` ${overview.unit}`))]);
    }
    if (view.residual !== null && view.residual !== undefined) {
      add(facts, [fact("one retraining differs by", `± ${number(view.residual, 2)}`, el("span", { class: "muted" }, ` ${overview.unit}`))]);
    }
    const bad = view.not_numbers ? el("p", { class: "notice" },
      `${plural(view.not_numbers, "score")} of this query ${view.not_numbers === 1 ? "is not finite and is" : "are not finite and are"} left out.`) : null;
    return el("article", { class: "query-view" },
      el("header", { class: "query-head" },
        known(view.query) ? example(view.query, { large: true }) : null,
        el("div", { class: "query-about" }, el("h2", {}, `Query ${view.id}`), facts, bad)),
      el("div", { class: "rankings" },
        ranking("Most helpful", "▲", "helpful", view.helpful, "No training example helped this query.", ranked),
        ranking("Most harmful", "▼", "harmful", view.harmful, "No training example harmed this query.", ranked)),
      overview.calibrated ? null : el("p", { class: "muted small sizes" },
        "Bars are relative to the strongest of each list. Only calibrated scores (whence.evaluate.calibrate) tell how large the changes are."),
      charts(view, ctx));
  }

  const percent = (value) => `${(100 * value).toFixed(value > 0.9995 || value < 0.0005 ? 2 : 1)} %`;

  // Self-influence: the examples that the model had to memorise, strongest first.
  function audit(view, ctx) {
    const predicted = view.helpful.some((entry) => renderedOf(entry.column, ctx).prediction !== undefined);
    const strongest = strongestOf(view.helpful);
    const row = (entry, rank) => {
      const rendered = renderedOf(entry.column, ctx);
      return el("tr", {},
        el("td", { class: "rank" }, rank + 1),
        exampleCell(entry, rendered, ctx),
        el("td", {}, rendered.label === null ? "–" : bdi(rendered.label)),
        predicted ? el("td", {}, predictionOf(rendered)) : null,
        el("td", { class: "bar-cell", title: `${signed(entry.value)} ${ctx.overview.unit}, not calibrated` }, track(entry.value, strongest, ctx)),
        entry.segments ? el("td", {}, timeline(entry.segments, ctx)) : null);
    };
    const heads = ["", "example", "label", predicted && "prediction", "self-influence", view.segments && "when"].filter((head) => head !== false && head !== null);
    return el("article", {},
      el("header", { class: "plain-head" }, el("h2", {}, "Most memorised training examples"),
        el("p", { class: "muted" }, "How much training on each example changed its own "
          + `${ctx.overview.measurement.replaceAll("_", " ")}. The top of the list has examples that the model could not `
          + "learn from the others: rare, hard or mislabelled ones. Check their labels before you trust them.")),
      charts(view, ctx),
      table(heads, view.helpful.map(row), "most memorised training examples"));
  }

  function predictionOf(rendered) {
    if (rendered.prediction === undefined || rendered.prediction === null) return "";
    const differs = rendered.comparable && rendered.label !== null && rendered.prediction !== rendered.label;
    return [bdi(rendered.prediction), differs ? el("span", { class: "wrong" }, "✗ differs") : null];
  }

  function exampleCell(entry, rendered, ctx) {
    return el("td", { class: "example-cell" }, el("button", {
      type: "button", class: "example-button", onclick: () => ctx.onExample && ctx.onExample(entry.column, entry),
    }, unseen("training example "), known(rendered) ? example(rendered) : null, el("span", { class: "muted small" }, naming(rendered))));
  }

  function table(heads, rows, caption) {
    return el("div", { class: "table-frame", tabindex: "0", role: "region", "aria-label": caption },
      el("table", { class: "listing" },
        el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
        el("tbody", {}, rows)));
  }

  // Most harmful over all queries: candidates for relabelling.
  function harmful(view, ctx) {
    const { overview } = ctx;
    const predicted = view.entries.some((entry) => renderedOf(entry.column, ctx).prediction !== undefined);
    const strongest = strongestOf(view.entries);
    const meanSize = (entry) => (overview.calibrated
      ? el("td", { class: "numeric" }, el("span", { class: "value harmful" }, signed(entry.value)))
      : el("td", { class: "bar-cell", title: `${signed(entry.value)} ${overview.unit}, not calibrated` }, track(entry.value, strongest, ctx)));
    const rows = view.entries.map((entry, rank) => {
      const rendered = renderedOf(entry.column, ctx);
      const here = !ctx.hasQuery || ctx.hasQuery(entry.worst);
      return el("tr", {},
        el("td", { class: "rank" }, rank + 1),
        exampleCell(entry, rendered, ctx),
        el("td", {}, rendered.label === null ? "–" : bdi(rendered.label)),
        predicted ? el("td", {}, predictionOf(rendered)) : null,
        meanSize(entry),
        el("td", { class: "numeric" }, plural(entry.queries, "query")),
        el("td", {}, ctx.onQuery && here
          ? el("button", { type: "button", class: "link", onclick: () => ctx.onQuery(entry.worst) }, `query ${entry.worst}`)
          : `query ${entry.worst}`,
          overview.calibrated ? el("span", { class: "muted" }, ` ${signed(entry.worst_value)}`) : null),
        ctx.extra ? el("td", {}, ctx.extra(entry)) : null);
    });
    const heads = ["", "example", "label", predicted && "prediction", "mean score", `in top ${view.near} of`,
      "harmed most", ctx.extra ? "" : false].filter((head) => head !== false);
    return el("article", {},
      el("header", { class: "plain-head" }, el("h2", {}, "Most harmful over all queries"),
        el("p", { class: "muted" }, `Training examples with the worst mean score over ${plural(view.over, "query")}`
          + `${overview.calibrated ? `, in ${overview.unit}` : ""}. They are candidates for relabelling: check the label first.`)),
      rows.length ? table(heads, rows, "most harmful training examples")
        : el("p", { class: "muted" }, "No training example is harmful on average."));
  }

  // What to look at first: the model, the strongest examples, suspects, and which classes matter.
  function summary(view, ctx) {
    const { overview } = ctx;
    const facts = [];
    if (view.right) {
      const [right, of] = view.right;
      facts.push(fact("queries predicted correctly", `${percent(right / of)}`, el("span", { class: "muted" }, ` ${count(right)} of ${count(of)}`)));
    }
    if (view.measured !== null) facts.push(fact(`mean ${overview.measurement.replaceAll("_", " ")} of the queries`, number(view.measured), el("span", { class: "muted" }, ` ${overview.unit}`)));
    facts.push(fact("scores", plural(view.queries, "query"), el("span", { class: "muted" }, ` × ${plural(view.examples, "training example")}`)));
    for (const [name, text] of view.judged) facts.push(fact(name, bdi(text)));
    const differs = (entry) => { const r = renderedOf(entry.column, ctx); return r.comparable && r.label !== null && r.prediction && r.prediction !== r.label; };
    const suspects = (view.suspects || []).filter(differs);
    const shown = suspects.slice(0, 12);
    return el("article", { class: "summary" },
      el("header", { class: "plain-head" }, el("h2", {}, "Overview"),
        el("p", { class: "muted" }, `Which training examples mattered to ${plural(view.queries, "query")}, by ${overview.method}.`)),
      el("dl", { class: "facts" }, facts),
      el("div", { class: "rankings" },
        ranking("Most helpful overall", "▲", "helpful", view.helpful, "No training example helps on average.", ctx),
        ranking("Most harmful overall", "▼", "harmful", view.harmful, "No training example harms on average.", ctx)),
      shown.length ? el("section", { class: "ranking harmful" },
        el("h3", {}, el("span", { class: "mark harmful", "aria-hidden": "true" }, "?"), "Suspected label errors"),
        el("p", { class: "muted small sizes" }, `Harmful on average, and the model predicts another label: ${plural(suspects.length, "suspect")}${suspects.length > shown.length ? `, the first ${shown.length} here` : ""}. Check them first.`),
        el("ol", { class: `cards${widely(shown, ctx) ? " wide" : ""}` }, shown.map((entry) => suspect(entry, ctx)))) : null,
      view.classes ? panel("Which classes mattered to which", `mean score of the training examples of a class (columns) for the queries of a class (rows)${overview.calibrated ? `, in ${overview.unit}` : ", as a share of the strongest"}; blue helped, orange harmed`, matrix(view.classes, ctx)) : null);
  }

  function suspect(entry, ctx) {
    const rendered = renderedOf(entry.column, ctx);
    return el("li", { class: `card ${rendered.kind}` }, el("button", { class: "card-face", type: "button",
      onclick: () => ctx.onExample && ctx.onExample(entry.column, entry) },
    unseen(`training example ${naming(rendered)}, label `), known(rendered) ? example(rendered) : null,
    el("span", { class: "card-facts" }, el("span", { class: "card-line" }, el("span", { class: "label" }, bdi(rendered.label))),
      el("span", { class: "small" }, "predicted ", bdi(rendered.prediction)), el("span", { class: "card-id muted" }, naming(rendered)))),
    ctx.extra ? ctx.extra(entry) : null);
  }

  function matrix({ names, means }, ctx) {
    const most = Math.max(...means.flat().map((x) => Math.abs(x || 0))) || 1;
    const cell = (value, row, column) => {
      if (value === null) return el("td", {}, "");
      const shown = ctx.overview.calibrated ? signed(value, 2) : `${value / most < 0 ? "−" : "+"}${Math.abs(value / most).toFixed(2)}`;
      const td = el("td", { class: `heat ${side(value, ctx)}`, title: `${names[column]} for ${names[row]}: ${shown}` }, Math.abs(value / most) < 0.005 ? "0" : shown);
      td.style.setProperty("--weight", Math.abs(value / most).toFixed(3));
      return td;
    };
    return el("div", { class: "table-frame", tabindex: "0", role: "region", "aria-label": "mean score by class" },
      el("table", { class: "listing heatmap" },
        el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "query ↓  training →"), names.map((name) => el("th", { scope: "col" }, bdi(name))))),
        el("tbody", {}, means.map((line, row) => (line.every((x) => x === null) ? null
          : el("tr", {}, el("th", { scope: "row" }, bdi(names[row])), line.map((value, column) => cell(value, row, column))))))));
  }

  // What to know before relying on the scores, on top of every page; null if there is nothing.
  function warnings(overview) {
    if (!overview.warnings.length) return null;
    return el("ul", { class: "notices warnings", role: "alert" }, overview.warnings.map((text) =>
      el("li", { class: "notice" }, el("strong", {}, "Warning: "), bdi(text))));
  }

  // A description of the scores.
  function about(ctx) {
    const { overview } = ctx;
    const better = overview.higher_is_better ? "higher is better" : "lower is better";
    const facts = (rows) => el("dl", { class: "sheet" }, rows.map(([name, value]) =>
      [el("dt", {}, name), el("dd", {}, value instanceof Node ? value : bdi(value))]));
    const shape = overview.self ? `${count(overview.examples)} training examples, each scored on itself`
      : `${plural(overview.queries, "query")} × ${plural(overview.examples, "training example")}`;
    const segments = overview.segments.filter((segment) => segment.share !== null);
    const part = (title, node) => (node ? el("section", { class: "panel" }, el("h3", {}, title), node) : null);
    return el("article", { class: "about" },
      el("header", { class: "plain-head" }, el("h2", {}, "About these scores")),
      overview.notes.length ? el("ul", { class: "notices" }, overview.notes.map((note) => el("li", { class: "notice" }, note))) : null,
      part("Meaning of a score", facts([
        ["method", overview.method],
        ["measurement", `${overview.measurement.replaceAll("_", " ")}, ${better}`],
        ["unit", overview.unit],
        ...(overview.calibrated ? [["size", overview.calibrated]] : []),
        ["sign", `${overview.sign}: ${overview.higher_is_better ? "positive helped, negative harmed" : "negative helped, positive harmed"}`],
        ["shape", shape],
        ...(overview.stages.length ? [["stages", overview.stages.join(", ")]] : []),
      ])),
      part("Settings", overview.settings.length ? facts(overview.settings) : null),
      part("Segments", segments.length ? facts(segments.map((segment) =>
        [segment.name, `${percent(segment.share)} of the scores${segment.stage ? `, stage ${segment.stage}` : ""}`])) : null),
      part("Excluded", overview.excluded.length ? facts(overview.excluded.map((left) =>
        [left.name, [left.share === null ? "" : `${percent(left.share)} of the trained parameters`, left.reason].filter(Boolean).join(": ")]))
        : el("p", { class: "muted" }, "Nothing: every trained parameter contributes to the scores.")),
      part("Diagnostics", overview.diagnostics.length ? facts(overview.diagnostics) : null),
      part("Provenance", overview.provenance.length ? facts(overview.provenance) : null));
  }

  // One training example, large, with the queries it appears in. related: [[row, value], ...]
  // query: the rendered query to compare it with (optional).
  function detail(column, related, ctx, entry = null, query = null) {
    const rendered = renderedOf(column, ctx);
    const also = (entry && entry.also) || [];
    const link = ([row, value]) => el("li", {},
      el("button", { type: "button", class: "link", onclick: () => ctx.onQuery(row) }, `query ${row}`),
      el("span", { class: `value ${side(value, ctx)}` }, ` ${signed(value)}`));
    const groups = [["▲ Among the most helpful for", related.filter(([, v]) => helps(v, ctx))],
      ["▼ Among the most harmful for", related.filter(([, v]) => !helps(v, ctx))]];
    return el("div", { class: "detail" },
      el("h2", {}, `Training example ${naming(rendered)}`),
      !known(rendered) ? null : query && known(query) ? beside(query, rendered, ctx, entry) : example(rendered, { large: true, entry, ctx }),
      el("dl", { class: "facts" },
        rendered.label === null ? null : fact("label", bdi(rendered.label)),
        rendered.prediction ? fact("prediction", predictionOf(rendered)) : null,
        entry ? fact("score", el("span", { class: `value ${side(entry.value, ctx)}` }, signed(entry.value))) : null,
        also.length ? fact("near-duplicates", also.slice(0, 12).map((one, k) => [k ? ", " : "", el("button", { type: "button", class: "link",
          onclick: () => ctx.onExample(one, null, query) }, naming(renderedOf(one, ctx)))]), also.length > 12 ? ` and ${also.length - 12} more` : null) : null),
      groups.map(([title, rows]) => (rows.length && ctx.onQuery
        ? el("section", {}, el("h4", {}, `${title} ${plural(rows.length, "query")}`),
          el("ul", { class: "related" }, rows.slice(0, 60).map(link)),
          rows.length > 60 ? el("p", { class: "muted small" }, `and ${rows.length - 60} more`) : null) : null)));
  }

  const queryName = (id, isWrong) => el("span", { class: "query-name" }, unseen("query "), `${id}`,
    isWrong ? el("span", { class: "wrong" }, "✗", unseen(" wrong prediction")) : null);

  // -- the list of queries -------------------------------------------------------------------

  // items: [{row, id, label, prediction, comparable, measurement, harmed, query}]; onSelect(row).
  // Returns {node, select(row), move(step), focusFilter()}.
  function queryList(items, { onSelect, overview }) {
    const buttons = new Map();
    const list = el("ul", { class: "query-list", "aria-label": "queries" });
    const search = el("input", { type: "search", placeholder: "Filter", "aria-label": "filter queries by number, label, prediction or text" });
    const any = items.some(wrong);
    const onlyWrong = el("input", { type: "checkbox" });
    const order = el("select", { "aria-label": "order of the queries" }, el("option", { value: "row" }, "in order"));
    if (items.some((item) => item.measurement !== null && item.measurement !== undefined)) {
      order.append(el("option", { value: "measurement" }, "worst first"));
    }
    if (items.some((item) => item.harmed !== null && item.harmed !== undefined)) {
      order.append(el("option", { value: "harmed" }, "most harmed first"));
    }
    const status = el("p", { class: "muted small", role: "status" });
    const direction = overview.higher_is_better ? 1 : -1;
    let visible = [], current = null;

    const words = (item) => [item.id, item.label, item.prediction, item.query.text,
      ...(item.query.row || []).flat()].filter((w) => w !== null && w !== undefined).join(" ").toLowerCase();
    const strength = { row: (item) => item.row, measurement: (item) => direction * item.measurement,
      harmed: (item) => -Math.abs(item.harmed) };

    function button(item) {
      if (buttons.has(item.row)) return buttons.get(item.row);
      const arrow = item.prediction === null || item.prediction === undefined ? "" : ` → ${item.prediction}`;
      const node = el("li", {}, el("button", {
        type: "button", class: "query-item", onclick: () => select(item.row),
      },
        item.query.kind === "image" ? example(item.query, { lazy: true }) : null,
        el("span", { class: "query-words" },
          queryName(item.id, wrong(item)),
          item.query.kind === "text" ? bdi(item.query.text.slice(0, 90), { class: "clip small" }) : null,
          item.label === null && !arrow ? null : bdi(`${item.label === null ? "" : item.label}${arrow}`, { class: "clip small muted" }))));
      buttons.set(item.row, node);
      return node;
    }

    function filter() {
      const wanted = search.value.trim().toLowerCase();
      const rank = strength[order.value];
      visible = items.filter((item) => (!onlyWrong.checked || wrong(item)) && (!wanted || words(item).includes(wanted)));
      if (order.value !== "row") visible = [...visible].sort((a, b) => rank(a) - rank(b));
      list.replaceChildren(...visible.map(button));
      status.textContent = visible.length === items.length ? plural(items.length, "query")
        : `${count(visible.length)} of ${count(items.length)} queries`;
    }

    function mark(row, scroll = true) {
      if (current !== null && buttons.has(current)) buttons.get(current).firstChild.removeAttribute("aria-current");
      current = row;
      const chosen = buttons.get(row);
      if (!chosen) return;
      chosen.firstChild.setAttribute("aria-current", "true");
      if (scroll) chosen.scrollIntoView({ block: "nearest", inline: "nearest" });
    }

    function select(row) {
      mark(row);
      onSelect(row);
    }

    function move(step) {
      const at = visible.findIndex((item) => item.row === current);
      const next = visible[at < 0 ? 0 : Math.min(Math.max(at + step, 0), visible.length - 1)];
      if (next && next.row !== current) select(next.row);
    }

    search.addEventListener("input", filter);
    onlyWrong.addEventListener("change", filter);
    order.addEventListener("change", filter);
    filter();
    const node = el("nav", { class: "sidebar", "aria-label": "queries" },
      el("div", { class: "sidebar-head" }, search,
        el("div", { class: "sidebar-options" },
          order.options.length > 1 ? order : null,
          any ? el("label", { class: "small" }, onlyWrong, " wrong only") : null), status),
      list);
    return { node, select, mark, move, first: () => (visible[0] ? visible[0].row : null), focusFilter: () => search.focus() };
  }

  // -- light and dark ------------------------------------------------------------------------

  function themeButton() {
    const root = document.documentElement;
    const stored = () => { try { return localStorage.getItem("whence-theme"); } catch { return null; } };
    const keep = (theme) => { try { localStorage.setItem("whence-theme", theme); } catch { /* storage is not allowed */ } };
    const dark = () => root.dataset.theme === "dark"
      || (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
    if (stored()) root.dataset.theme = stored();
    const button = el("button", { type: "button", class: "theme", "aria-label": "switch between light and dark" });
    const name = () => { button.textContent = dark() ? "☀ Light" : "☾ Dark"; };
    button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; keep(root.dataset.theme); name(); });
    name();
    return button;
  }

  return { el, svg, bdi, unseen, queryName, number, signed, count, example, card, ranking, timeline, histogram, mix, when,
    charts, query, summary, audit, harmful, about, warnings, detail, queryList, themeButton, renderedOf };
})();
