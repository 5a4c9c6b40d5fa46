// The figure of sigma: its knots are dragged along the curve, its slopes up and down.

const BESIDE = [3, 1.5]; // by order: how far from its knot a slope has its point

const sigmaHandles = []; // { key, n, handle }
let plot = null; // from numbers to pixels, as last drawn

function buildSigma() {
  for (const n of [0, 1]) {
    for (const { key, kind, letter, index, about } of PARAMETERS) {
      const id = `${key}${n + 1}-point`, side = letter === "b" || index === "b" ? -1 : 1, step = STEPS[kind];
      const set = value => {
        const stepped = Number((Math.round(value / step) * step).toFixed(2)); // without what 0.1 + 0.2 leaves behind
        change(() => { state[key][n] = between(stepped, LIMITS[kind]); }, id);
      };
      let before;
      const shape = kind === "knot"
        ? [draw("circle", { class: "point", r: 6 })]
        : [draw("polygon", { class: "point", points: "0,-8 8,0 0,8 -8,0" })];
      const made = handle(id, shape, {
        grab() { before = state[key][n]; },
        drag({ x, y }, from) {
          if (kind === "knot") return set(before + (x - from.x) / plot.perX);
          // sigma there changes with the slope by this much
          return set(before + side * (from.y - y) / plot.perY / BESIDE[n] ** (n + 1));
        },
        key(name) {
          if (name === "Home" || name === "End") set(SLIDERS[kind][name === "Home" ? 0 : 1]);
          else if (stepsOf(name)) set(state[key][n] + stepsOf(name) * step);
          else return false;
          return true;
        },
      });
      made.element.setAttribute("aria-label", `${key}${n + 1}, ${about}`);
      made.element.setAttribute("aria-orientation", kind === "knot" ? "horizontal" : "vertical");
      sigmaHandles.push({ key, kind, letter, index, n, side, handle: made });
    }
  }
  $("sigma").append(draw("g", { id: "sigma-back" }), draw("g", { id: "sigma-points" }));
  $("sigma-points").append(...sigmaHandles.map(item => item.handle.element));
  makeDraggable($("sigma"), sigmaHandles.map(item => item.handle));
}

function drawSigma() {
  const [width, height] = figureSize($("sigma"), size => between(size * 0.7, [310, 480]));
  const left = 34, right = width - 10, top = 28, bottom = height - 36, { curve, low, high } = result;
  const margin = (high - low) / 4;
  const perX = (right - left) / (high - low), perY = (bottom - top) / (high - low + 2 * margin);
  const place = { x: value => left + (value - low) * perX, y: value => bottom - (value - low + margin) * perY };
  plot = { perX, perY };
  const parts = [], clip = draw("clipPath", { id: "inside" });
  clip.append(draw("rect", { x: left, y: top, width: right - left, height: bottom - top }));
  const inside = draw("g", { "clip-path": "url(#inside)" });
  const line = (x1, y1, x2, y2, kind, to = parts) => to.push(draw("line", { x1, y1, x2, y2, class: kind }));
  const label = (x, y, text, more) => parts.push(draw("text", { x, y, ...more }, text));
  const step = high - low > 14 || width < 420 ? 4 : 2;
  const ticks = (from, to) => {
    const found = [];
    for (let value = Math.ceil(from / step) * step; value <= to; value += step) found.push(value);
    return found;
  };
  for (const [from, to] of result.fallsInSight) {
    const x = place.x(from), w = Math.max(place.x(to) - x, 2);
    parts.push(draw("rect", { class: "falling", x, y: top, width: w, height: bottom - top }));
  }
  for (const value of ticks(low, high)) {
    line(place.x(value), top, place.x(value), bottom, value ? "grid" : "axis");
    label(place.x(value), bottom + 16, minus(value), { "text-anchor": "middle" });
  }
  for (const value of ticks(low - margin, high + margin)) {
    line(left, place.y(value), right, place.y(value), value ? "grid" : "axis");
    label(left - 6, place.y(value) + 4, minus(value), { "text-anchor": "end" });
  }
  const lines = [];
  for (const other of neighbours()) {
    const points = curve.x.map(x => `${place.x(x).toFixed(1)},${place.y(sigma(x, other)).toFixed(1)}`);
    lines.push(draw("polyline", { class: "ghost", points: points.join(" ") }));
  }
  line(place.x(low), place.y(low), place.x(high), place.y(high), "identity", lines);
  for (let n = 0; n < state.order; n++) {
    for (const [i, letter] of ["b", "d"].entries()) {
      const at = place.x(state[letter][n]);
      if (at < left || at > right) continue;
      line(at, top, at, bottom, "knot");
      // each knot's name at its own height, so that names of close knots stay apart
      const room = at < right - 20 ? { x: at + 4 } : { x: at - 4, "text-anchor": "end" };
      const y = bottom - 8 - 14 * (2 * n + i);
      parts.push(draw("text", { ...room, y, class: "over" }, ...drawnSymbol(letter, n + 1)));
    }
  }
  const points = curve.x.map((x, i) => `${place.x(x)},${place.y(curve.y[i])}`);
  lines.push(draw("polyline", { class: "curve", points: points.join(" ") }));
  inside.append(...lines);
  parts.push(clip, inside);
  for (const [i, x] of state.x.entries()) {
    const [at, up] = [place.x(x), place.y(result.sigma[i])];
    line(at, bottom - 5, at, bottom, "rug");
    if (up >= top && up <= bottom) {
      const dot = draw("circle", { class: "on-curve", cx: at, cy: up, r: 3.6 });
      dot.append(draw("title", {}, `σ(${short(x)}) = ${short(result.sigma[i])}`));
      parts.push(dot);
    }
  }
  label(right, bottom + 31, "score x", { class: "name", "text-anchor": "end" });
  label(left + 7, top + 15, "σ(x)", { class: "name" });
  const known = playing ? chosen : locate(state);
  if (known) label(left, top - 11, titleOf(known), { class: "title" });
  $("sigma-back").replaceChildren(...parts);

  for (const { key, kind, letter, index, n, side, handle } of sigmaHandles) {
    const value = state[key][n], x = kind === "knot" ? value : state[side < 0 ? "b" : "d"][n] + side * BESIDE[n];
    const at = between(place.x(x), [left + 4, right - 4]);
    const up = between(place.y(sigma(x, state)), [top + 8, bottom - 8]);
    handle.place(at, up, n < state.order);
    if (kind === "t" && n < state.order) {
      const beside = { x: at + 13 * side, y: up + 14, "text-anchor": side < 0 ? "end" : "start", class: "over" };
      $("sigma-back").append(draw("text", beside, ...drawnSymbol(letter, `${index}${n + 1}`)));
    }
    const { element } = handle, [min, max] = SLIDERS[kind];
    const values = { valuemin: Math.min(min, value), valuemax: Math.max(max, value), valuenow: value };
    for (const [name, number] of Object.entries(values)) element.setAttribute(`aria-${name}`, number);
    element.setAttribute("aria-valuetext", short(value));
    if (document.activeElement === element && n < state.order) bubble(at, up, width, letter, `${index}${n + 1}`, value);
  }
  const all = state.x.map((x, i) => `sigma of ${short(x)} is ${short(result.sigma[i])}`);
  $("sigma").setAttribute("aria-label", `Curve of sigma. ${all.join("; ")}.`);
}

// The name and number of the point that has the focus, beside it.
function bubble(x, y, width, letter, index, value) {
  const isRight = x > width - 120, at = x + (isRight ? -20 : 20), up = y > 44 ? y - 20 : y + 32;
  const text = draw("text", { class: "bubble", x: at, y: up, "text-anchor": isRight ? "end" : "start" },
    ...drawnSymbol(letter, index), draw("tspan", { dy: -3 }, ` = ${minus(short(value))}`));
  $("sigma-back").append(text);
}
