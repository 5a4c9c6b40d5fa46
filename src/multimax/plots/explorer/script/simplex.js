// The figure of the simplex: the first entry lies at the left, the second at the right, the third on top. The points of
// softmax and of MultiMax are dragged: the scores are moved so that the function gives these weights.

const LEAST_WEIGHT = 1e-3; // of a point that is dragged: at 0 a score would be -infinity
const AIMED = ["softmax", "multimax"];
const simplexHandles = {};
let corners = null;

const onSimplex = weights => [0, 1].map(axis => sum(weights.map((weight, i) => weight * corners[i][axis])));

// The weights at a point of the figure; outside of the triangle, those of a point on its edge.
function weightsAt({ x, y }) {
  const [[x0, y0], [x1], [, y2]] = corners;
  const third = (y - y0) / (y2 - y0), second = (x - x0) / (x1 - x0) - third / 2;
  const cut = [1 - second - third, second, third].map(weight => Math.max(weight, LEAST_WEIGHT));
  return cut.map(weight => weight / sum(cut));
}

function aim(key, weights) {
  change(() => {
    const found = scoresFor(key, weights, state, LIMITS.x).map(value => Number(between(value, LIMITS.x).toFixed(4)));
    state.x.splice(0, 3, ...found);
  }, `${key}-point`);
}

function buildSimplex() {
  $("simplex").append(draw("g", { id: "simplex-back" }), draw("g", { id: "simplex-points" }));
  for (const key of AIMED) {
    const { title } = FUNCTIONS.find(method => method.key === key);
    const made = handle(`${key}-point`, [mark(key, 0, 0, key === "multimax" ? 10 : 8)], {
      grab() {},
      drag: point => aim(key, weightsAt(point)),
      key(name) {
        const [dx, dy] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[name] ?? [];
        if (dx === undefined) return false;
        // a hundredth of an edge; where a step does not leave the spot, the scores are at their ends
        const [x, y] = onSimplex(result.simplex[key]), size = (corners[1][0] - corners[0][0]) / 100;
        aim(key, weightsAt({ x: x + dx * size, y: y + dy * size }));
        return true;
      },
    });
    const about = `${title} of x1, x2, x3: left and right between x1 and x2, up and down for x3`;
    made.element.setAttribute("aria-label", about);
    made.element.setAttribute("aria-valuemin", 0);
    made.element.setAttribute("aria-valuemax", 1);
    made.element.dataset.function = key;
    simplexHandles[key] = made;
    $("simplex-points").append(made.element);
  }
  makeDraggable($("simplex"), Object.values(simplexHandles));
}

function drawSimplex() {
  const [width, height] = figureSize($("simplex"), size => between(size * 0.62, [230, 300]));
  const bottom = height - 34, side = Math.min(width - 70, (bottom - 30) * 2 / Math.sqrt(3)), middle = width / 2;
  corners = [[middle - side / 2, bottom], [middle + side / 2, bottom], [middle, bottom - side / 2 * Math.sqrt(3)]];
  const parts = [], segment = (from, to, kind) => {
    const [[x1, y1], [x2, y2]] = [onSimplex(from), onSimplex(to)];
    parts.push(draw("line", { x1, y1, x2, y2, class: kind }));
  };
  for (const share of [0.2, 0.4, 0.6, 0.8]) {
    for (const turn of [0, 1, 2]) {
      const turned = weights => weights.map((_, i) => weights[(i + turn) % 3]);
      segment(turned([share, 1 - share, 0]), turned([share, 0, 1 - share]), "grid");
    }
  }
  parts.push(draw("polygon", { class: "edge", points: corners.map(String).join(" ") }));
  corners.forEach(([x, y], i) => {
    const place = { class: "name", x, y: y + (i === 2 ? -10 : 22), "text-anchor": "middle" };
    const value = draw("tspan", { dy: -3 }, ` = ${minus(short(state.x[i]))}`);
    parts.push(draw("text", place, ...drawnSymbol("x", i + 1), value));
  });
  parts.push(draw("polyline", { class: "path", points: result.path.map(onSimplex).map(String).join(" ") }));
  for (const temperature of [2, 5]) { // cold ones lie near a corner or an edge, among the other functions
    const [x, y] = onSimplex(softmax(state.x.slice(0, 3), temperature));
    parts.push(draw("circle", { class: "tick", cx: x, cy: y, r: 2.4 }));
    parts.push(draw("text", { class: "over", x: x + 7, y: y - 3 }, `T = ${temperature}`));
  }
  for (const { key, title } of FUNCTIONS) {
    const [x, y] = onSimplex(result.simplex[key]), words = result.simplex[key].map(short).join(", ");
    if (AIMED.includes(key)) {
      const { element } = simplexHandles[key];
      simplexHandles[key].place(x, y);
      element.setAttribute("aria-valuenow", result.simplex[key][0]);
      element.setAttribute("aria-valuetext", words);
      continue;
    }
    const element = mark(key, x, y, 7.5);
    element.append(draw("title", {}, `${title}: ${words}`));
    element.dataset.function = key;
    parts.push(element);
  }
  $("simplex-back").replaceChildren(...parts);
  const all = FUNCTIONS.map(({ key, title }) => `${title} ${result.simplex[key].map(short).join(", ")}`);
  $("simplex").setAttribute("aria-label", `Weights of the first three entries. ${all.join("; ")}.`);
  $("simplex-of").textContent = `the weights of x1, x2 and x3${state.x.length > 3 ? " alone" : ""}`;
}
