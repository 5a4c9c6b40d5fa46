// The figure of the two measures: sparsity to the right, multi-modality up, and softmax at every temperature as a line.

function drawTradeOff() {
  const [width, height] = figureSize($("trade-off"), size => between(size * 0.56, [220, 270]));
  const left = 38, right = width - 14, top = 12, bottom = height - 36;
  const drawn = FUNCTIONS.map(({ key }) => result.M[key]).filter(value => !Number.isNaN(value));
  const high = Math.max(1, ...drawn) > 1 ? 2 : 1; // above 1 the order of the scores is lost
  const place = { x: value => left + value * (right - left), y: value => bottom - value / high * (bottom - top) };
  const parts = [], line = (x1, y1, x2, y2, kind) => parts.push(draw("line", { x1, y1, x2, y2, class: kind }));
  const label = (x, y, text, more) => parts.push(draw("text", { x, y, ...more }, text));
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    const [x, y] = [place.x(share), place.y(share * high)];
    line(x, top, x, bottom, share ? "grid" : "axis");
    line(left, y, right, y, share ? "grid" : "axis");
    label(x, bottom + 16, share, { "text-anchor": "middle" });
    label(left - 6, y + 4, share * high, { "text-anchor": "end" });
  }
  if (high > 1) line(left, place.y(1), right, place.y(1), "identity");
  label(right, bottom + 31, "sparsity S", { class: "name", "text-anchor": "end" });
  label(left + 7, bottom - 10, "↑ multi-modality M", { class: "name over" });
  const isDefined = ({ M, S }) => !Number.isNaN(M) && !Number.isNaN(S);
  const path = result.tradeOff.filter(isDefined);
  if (path.length) {
    const points = path.map(({ M, S }) => `${place.x(S)},${place.y(M)}`);
    parts.push(draw("polyline", { class: "path", points: points.join(" ") }));
    const taken = [];
    for (const temperature of [0.5, 2, 0.25, 5]) {
      const weights = softmax(state.x, temperature);
      const [x, y] = [place.x(sparsity(state.x, weights, result.threshold)),
        place.y(multiModality(state.x, weights, result.threshold))];
      if (taken.some(([a, b]) => Math.hypot(a - x, b - y) < 30)) continue; // no room for its name
      taken.push([x, y]);
      parts.push(draw("circle", { class: "tick", cx: x, cy: y, r: 2.4 }));
      const [dx, dy, anchor] = x < left + 60 ? [8, 1, "start"] : [-7, 14, "end"]; // beside the line
      label(x + dx, y + dy, `T = ${temperature}`, { class: "over", "text-anchor": anchor });
    }
    for (const { key, title } of FUNCTIONS) {
      const { [key]: M } = result.M, { [key]: S } = result.S;
      const element = mark(key, place.x(S), place.y(M), key === "multimax" ? 10 : 7.5);
      element.append(draw("title", {}, `${title}: S ${short(S)}, M ${short(M)}`));
      element.dataset.function = key;
      parts.push(element);
      if (key === "multimax") { // the one to look for
        const isRight = place.x(S) > left + 100;
        label(place.x(S) + (isRight ? -15 : 15), place.y(M) + 5, result.falls.parts.length ? `${title} ⚠` : title,
          { class: "by-multimax over", "text-anchor": isRight ? "end" : "start" });
      }
    }
  } else {
    const what = Number.isNaN(result.M.softmax) ? "M needs a relevant score beside the largest"
      : "S needs a score below the threshold";
    label((left + right) / 2, (top + bottom) / 2, what, { "text-anchor": "middle", class: "over" });
  }
  $("trade-off").replaceChildren(...parts);
  const all = FUNCTIONS.map(({ key, title }) => `${title} S ${rounded(result.S[key])}, M ${rounded(result.M[key])}`);
  $("trade-off").setAttribute("aria-label", `Sparsity and multi-modality. ${all.join("; ")}.`);
}
