// The map: training examples as points on a canvas, coloured by score, to be lassoed.
//
// Points are written into the pixels of the canvas, without a library and without a GPU: 60,000 of
// them take a few milliseconds a frame.
"use strict";

Whence.map = (() => {
  const { el } = Whence.views;
  const CLICK = 5; // pixels that a click may move
  const NEAR = 14; // pixels within which a click finds a point
  const CLASSES = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8a6d00", "#7a5cc2"];

  const floats = (text) => new Float32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

  // A CSS colour as a pixel (little-endian RGBA), mixed with the ground.
  function pixel(colour, ground = null, share = 1) {
    const [r, g, b] = colour, [x, y, z] = ground || colour;
    const mix = (u, v) => Math.round(share * u + (1 - share) * v);
    return (255 << 24 | mix(b, z) << 16 | mix(g, y) << 8 | mix(r, x)) >>> 0;
  }
  const parse = (text) => (text.startsWith("#") ? [1, 3, 5].map((k) => parseInt(text.slice(k, k + 2), 16)) : text.match(/[\d.]+/g).slice(0, 3).map(Number));
  function resolved(kind, parent) {
    const probe = el("span", { class: kind });
    parent.append(probe);
    const colour = parse(getComputedStyle(probe).color);
    probe.remove();
    return colour;
  }

  // points: (2n) floats; onOpen(place); onSelect(places); onMove(text)
  function create(points, { onOpen, onSelect, onMove }) {
    const n = points.length / 2;
    const canvas = el("canvas", { class: "map", tabindex: "0", role: "application",
      "aria-label": "map of the training data. Arrow keys move, plus and minus zoom, brackets go from one strong example to the next, Enter opens it, x ticks it" });
    const frame = el("div", { class: "map-frame" }, canvas);
    const lasso = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    lasso.setAttribute("class", "lasso");
    lasso.setAttribute("aria-hidden", "true");
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    lasso.append(path);
    frame.append(lasso);
    const context = canvas.getContext("2d", { alpha: false });
    const order = Uint32Array.from({ length: n }, (_, k) => k); // weakest first
    const colours = new Uint32Array(n), sizes = new Uint8Array(n);
    const chosen = new Uint8Array(n);
    let image = null, pixels = null, ground = 0, ring = 0;
    let scale = 1, cx = 0, cy = 0, wide = 0, high = 0, ratio = 1;
    let waiting = false, current = -1, values = null, moving = false;
    const box = bounds();

    function bounds() {
      let [a, b, c, d] = [Infinity, -Infinity, Infinity, -Infinity];
      for (let k = 0; k < n; k += 1) {
        const x = points[2 * k], y = points[2 * k + 1];
        if (x === x) { a = Math.min(a, x); b = Math.max(b, x); c = Math.min(c, y); d = Math.max(d, y); }
      }
      return [a, b, c, d];
    }

    function reset() {
      cx = (box[0] + box[1]) / 2; cy = (box[2] + box[3]) / 2;
      scale = 0.92 * Math.min(wide / (box[1] - box[0] || 1), high / (box[3] - box[2] || 1));
      draw();
    }

    function resize() {
      ratio = Math.min(2, devicePixelRatio || 1);
      const w = Math.round(canvas.clientWidth * ratio), h = Math.round(canvas.clientHeight * ratio);
      if (!w || (w === wide && h === high)) return;
      const first = !wide;
      wide = canvas.width = w; high = canvas.height = h;
      image = context.createImageData(wide, high);
      pixels = new Uint32Array(image.data.buffer);
      if (first) reset(); else draw();
    }

    // by: help of each example (NaN: unknown); classes: the class of each, to colour by instead
    function colour(by, classes = null) {
      values = by;
      const helpful = resolved("value helpful", frame), harmful = resolved("value harmful", frame), muted = resolved("muted", frame);
      const back = parse(getComputedStyle(canvas).backgroundColor);
      ground = pixel(back); ring = pixel(resolved("ink", frame));
      const palette = CLASSES.map((one) => pixel(parse(one), back, 0.85));
      const strengths = Float32Array.from(by, (v) => (v === v ? Math.abs(v) : 0));
      const sorted = Float32Array.from(strengths).sort();
      const most = sorted[Math.max(0, Math.floor(0.995 * n) - 1)] || sorted[n - 1] || 1;
      for (let k = 0; k < n; k += 1) {
        const weight = Math.min(1, strengths[k] / most);
        const score = by[k] !== by[k] ? pixel(muted, back, 0.25) : pixel(by[k] >= 0 ? helpful : harmful, back, 0.12 + 0.88 * Math.sqrt(weight));
        colours[k] = classes ? palette[classes[k] % palette.length] : score;
        sizes[k] = weight > 0.6 ? 3 : weight > 0.25 ? 2 : 1;
      }
      order.sort((a, b) => strengths[a] - strengths[b]);
      draw();
    }

    function draw() {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => { waiting = false; paint(); });
    }

    function square(x, y, r, value) {
      const x0 = Math.max(0, x - r), x1 = Math.min(wide - 1, x + r), y0 = Math.max(0, y - r), y1 = Math.min(high - 1, y + r);
      for (let v = y0; v <= y1; v += 1) {
        for (let at = v * wide + x0, end = at + x1 - x0; at <= end; at += 1) pixels[at] = value;
      }
    }

    function paint() {
      if (!pixels) return;
      pixels.fill(ground);
      const ox = wide / 2 - cx * scale, oy = high / 2 + cy * scale;
      const grow = Math.max(0, Math.round(Math.log2(scale * 2.2 / Math.min(wide, high)))) + (n < 4000 ? 1 : 0);
      for (let j = 0; j < n; j += 1) {
        const k = order[j], u = ox + points[2 * k] * scale, v = oy - points[2 * k + 1] * scale;
        if (!(u >= 0 && v >= 0 && u < wide && v < high)) continue;
        const x = u | 0, y = v | 0;
        const r = sizes[k] + Math.min(5, grow);
        if (chosen[k]) square(x, y, r + 2, ring);
        square(x, y, r, colours[k]);
      }
      if (current >= 0) {
        const x = Math.round(ox + points[2 * current] * scale), y = Math.round(oy - points[2 * current + 1] * scale);
        square(x, y, 9, ring); square(x, y, 7, ground); square(x, y, 5, colours[current]);
      }
      context.putImageData(image, 0, 0);
    }

    const toMap = (x, y) => [cx + (x * ratio - wide / 2) / scale, cy - (y * ratio - high / 2) / scale];
    function zoom(by, x = canvas.clientWidth / 2, y = canvas.clientHeight / 2) {
      const [u, v] = toMap(x, y);
      scale *= by;
      const [p, q] = toMap(x, y);
      cx += u - p; cy += v - q;
      draw();
    }
    function pan(x, y) { cx -= (x * ratio) / scale; cy += (y * ratio) / scale; draw(); }

    function nearest(x, y) {
      const [u, v] = toMap(x, y);
      let best = -1, least = (NEAR * ratio / scale) ** 2;
      for (let k = 0; k < n; k += 1) {
        const d = (points[2 * k] - u) ** 2 + (points[2 * k + 1] - v) ** 2;
        if (d <= least) { least = d; best = k; }
      }
      return best;
    }

    function inside(corners) { // of a polygon, in the map's coordinates
      const xs = corners.map((c) => c[0]), ys = corners.map((c) => c[1]);
      const [a, b, c, d] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
      const within = [];
      for (let k = 0; k < n; k += 1) {
        const x = points[2 * k], y = points[2 * k + 1];
        if (!(x >= a && x <= b && y >= c && y <= d)) continue;
        let odd = false;
        for (let i = 0, j = corners.length - 1; i < corners.length; j = i, i += 1) {
          if ((ys[i] > y) !== (ys[j] > y) && x < ((xs[j] - xs[i]) * (y - ys[i])) / (ys[j] - ys[i]) + xs[i]) odd = !odd;
        }
        if (odd) within.push(k);
      }
      return within;
    }

    function select(places) {
      chosen.fill(0);
      for (const place of places) chosen[place] = 1;
      draw();
      onSelect(places);
    }

    function step(by) { // to the next strongest example
      const at = current < 0 ? n : order.indexOf(current);
      const next = current < 0 ? n - 1 : Math.min(Math.max(at - by, 0), n - 1);
      current = order[next];
      cx = points[2 * current]; cy = points[2 * current + 1];
      draw();
      onMove(current, values[current], n - next);
    }

    let trail = null;
    const at = (event) => { const r = canvas.getBoundingClientRect(); return [event.clientX - r.left, event.clientY - r.top]; };
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      canvas.focus({ preventScroll: true });
      trail = { move: moving || event.shiftKey || event.button === 1, points: [at(event)] };
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!trail) return;
      const here = at(event), last = trail.points[trail.points.length - 1];
      if (trail.move) pan(here[0] - last[0], here[1] - last[1]);
      trail.points.push(here);
      if (!trail.move) path.setAttribute("d", `M${trail.points.map((p) => p.map((v) => v.toFixed(1)).join(",")).join("L")}Z`);
    });
    canvas.addEventListener("pointerup", () => {
      if (!trail) return;
      const done = trail, [x, y] = done.points[0];
      trail = null;
      path.setAttribute("d", "");
      const far = Math.max(...done.points.map((p) => Math.hypot(p[0] - x, p[1] - y)));
      if (far < CLICK) { const k = nearest(x, y); if (k >= 0) onOpen(k); return; }
      if (!done.move) select(inside(done.points.map((p) => toMap(...p))));
    });
    canvas.addEventListener("wheel", (event) => { event.preventDefault(); zoom(Math.exp(-event.deltaY / 400), ...at(event)); }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: [40, 0], ArrowRight: [-40, 0], ArrowUp: [0, 40], ArrowDown: [0, -40] }[event.key];
      const actions = { "+": () => zoom(1.3), "=": () => zoom(1.3), "-": () => zoom(1 / 1.3), 0: reset, "]": () => step(1), "[": () => step(-1),
        Enter: () => { if (current >= 0) onOpen(current); }, x: () => { if (current >= 0) select([current]); } };
      const action = moves ? () => pan(...moves) : actions[event.key];
      if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      event.stopPropagation();
      action();
    });
    new ResizeObserver(resize).observe(canvas);
    return { node: frame, colour, reset, zoom, select, setMoving: (on) => { moving = on; } };
  }

  return { create, floats, bytes };
})();
