// What the page is built from. Elements are made once and then only given new values: the focus stays where it is. Text
// only ever goes in as text.

const $ = id => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const short = value => String(Math.round(value * 1e4) / 1e4);
const minus = value => String(value).replace("-", "−"); // as it is printed
const between = (value, [low, high]) => Math.min(Math.max(value, low), high);

// A symbol with its index, such as t_b1, in a line of text and in a figure.
const symbol = (letter, index) => [make("i", {}, letter), make("sub", {}, index)];
const drawnSymbol = (letter, index) =>
  [draw("tspan", { class: "symbol" }, letter), draw("tspan", { class: "index", dy: 3 }, index)];

// Exactly zero and close to it are different things here.
function rounded(value) {
  if (Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  return value > 0 && value < 0.0005 ? "<.001" : value.toFixed(3);
}

// A slider of a temperature is logarithmic: as many steps from 0.1 to 1 as from 1 to 10.
const LINEAR = { to: value => value, from: value => value };
const LOGARITHMIC = { to: Math.log10, from: value => Number((10 ** value).toPrecision(3)) };

// A slider and a number box for one number of the state. The slider shows the number at its own step, the box in full.
function control(id, name, kind, get, set) {
  const [min, max] = LIMITS[kind], step = STEPS[kind], scale = kind === "temperature" ? LOGARITHMIC : LINEAR;
  const [low, high] = SLIDERS[kind].map(scale.to);
  const range = make("input", { type: "range", id, min: low, max: high, step, "aria-label": name });
  const number = make("input",
    { type: "number", id: `${id}-number`, min, max, step, "aria-label": `${name}, as a number` });
  // the value is read first: a change stops what is being played, and that shows the state as it was
  range.addEventListener("input", () => {
    const value = scale.from(Number(range.value));
    change(() => set(value), id);
  });
  number.addEventListener("input", () => {
    const fits = number.value !== "" && Number(number.value) >= min && Number(number.value) <= max;
    number.setAttribute("aria-invalid", !fits);
    const value = Number(number.value);
    if (fits) change(() => set(value), id);
    else say(`${name}: expected a number between ${min} and ${max}; the last one is kept`);
  });
  number.addEventListener("blur", () => { number.setAttribute("aria-invalid", false); update(); });
  function update() {
    range.value = scale.to(get());
    range.setAttribute("aria-valuetext", short(get()));
    if (document.activeElement !== number) number.value = get(); // else it would be changed under the fingers
  }
  return { range, number, update };
}

// A function's mark, the same in the table and the figures: its shape tells it apart without colour.
function mark(key, x, y, size) {
  const polygon = (corners, turn, inner = 1) => Array.from({ length: corners }, (_, i) => {
    const angle = turn + i * 2 * Math.PI / corners, radius = size * (i % 2 ? inner : 1);
    return `${x + radius * Math.cos(angle)},${y + radius * Math.sin(angle)}`;
  }).join(" ");
  const style = { class: `mark of-${key}` }, up = -Math.PI / 2;
  if (key === "softmax") return draw("circle", { ...style, cx: x, cy: y, r: size * 0.86 });
  const points = {
    sparsemax: polygon(4, Math.PI / 4), entmax: polygon(3, up), evsoftmax: polygon(4, up),
    multimax: polygon(10, up, 0.5),
  }[key];
  return draw("polygon", { ...style, points });
}

function named({ key, title }) {
  const icon = draw("svg", { viewBox: "-8 -8 16 16", "aria-hidden": "true" });
  icon.append(mark(key, 0, 0, key === "multimax" ? 8.5 : 7));
  return [icon, make("span", { class: "title" }, title)];
}

// ---- figures ----

const REACH = 14; // pixels around a point within which it is taken: targets are to be at least 24 wide

// A figure is drawn in the screen's own pixels, so that its letters and points have the same size on any screen.
function figureSize(svg, height) {
  const width = Math.max(Math.round(svg.parentElement.clientWidth), 240), tall = Math.round(height(width));
  svg.setAttribute("viewBox", `0 0 ${width} ${tall}`);
  return [width, tall];
}

// A point of a figure that can be dragged, or moved by the keys: a slider to those who do not see it.
function handle(id, shape, { grab, drag, key }) {
  const element = draw("g", { id, class: "handle", role: "slider", tabindex: 0 });
  const rings = [draw("circle", { class: "reach", r: REACH }), draw("circle", { class: "ring", r: REACH - 2 })];
  element.append(...rings, ...shape);
  element.addEventListener("keydown", event => {
    if (!event.ctrlKey && !event.metaKey && !event.altKey && key(event.key)) event.preventDefault();
  });
  for (const kind of ["focus", "blur"]) element.addEventListener(kind, () => renderFigures());
  return {
    element, grab, drag, x: 0, y: 0,
    place(x, y, isShown = true) {
      this.x = x;
      this.y = y;
      element.setAttribute("transform", `translate(${x} ${y})`);
      element.style.display = isShown ? "" : "none";
    },
  };
}

// Of points that lie on each other, the nearest is taken.
function makeDraggable(svg, handles) {
  let held = null, from = null;
  const point = event => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    return { x: (event.clientX - box.left) * scale, y: (event.clientY - box.top) * scale };
  };
  const release = () => {
    held?.element.classList.remove("held");
    held = null;
    endOfChange();
  };
  svg.addEventListener("pointerdown", event => {
    if (event.button !== 0 || !event.target.closest(".handle")) return;
    from = point(event);
    const distance = one => Math.hypot(one.x - from.x, one.y - from.y);
    const inReach = handles.filter(one => one.element.style.display !== "none");
    held = inReach.reduce((best, one) => distance(one) < distance(best) ? one : best);
    event.preventDefault(); // no text is selected
    held.element.focus({ preventScroll: true });
    held.element.classList.add("held");
    svg.setPointerCapture(event.pointerId);
    held.grab(from);
  });
  // a finger on a point drags it, and beside it moves the page; touch-action has no effect inside of a figure
  svg.addEventListener("touchstart", event => {
    if (event.target.closest(".handle")) event.preventDefault();
  }, { passive: false });
  svg.addEventListener("pointermove", event => { if (held) held.drag(point(event), from); });
  for (const kind of ["pointerup", "pointercancel", "lostpointercapture"]) svg.addEventListener(kind, release);
}

// How far a key moves a number, in steps; undefined for other keys.
function stepsOf(key) {
  return { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10 }[key];
}
