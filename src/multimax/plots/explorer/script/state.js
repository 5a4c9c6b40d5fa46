// The state: what the controls set and a link carries.

const LIMITS = { t: [-100, 100], knot: [-100, 100], x: [-10, 10], temperature: [0.1, 10], alpha: [1.01, 4] };
const SLIDERS = { ...LIMITS, t: [-2, 6], knot: [-5, 5] }; // a number box and a file may go beyond
const STEPS = { t: 0.01, knot: 0.05, x: 0.05, temperature: 0.01, alpha: 0.01 };
const FEWEST = 3, MOST = 10, VERSION = "1";
const PARAMETERS = [
  { key: "t_b", kind: "t", letter: "t", index: "b", about: "slope below b" },
  { key: "b", kind: "knot", letter: "b", index: "", about: "lower knot" },
  { key: "t_d", kind: "t", letter: "t", index: "d", about: "slope above d" },
  { key: "d", kind: "knot", letter: "d", index: "", about: "upper knot" },
];
// the knots that a multimax.MultiMax starts with
const SOFTMAX = { order: 2, t_b: [1, 1], t_d: [1, 1], b: [-0.5, -1], d: [0.5, 1] };

// The state's part of a set of parameters, which has one or two orders.
function modulatorOf(set) {
  const order = set.t_b.length;
  const filled = Object.fromEntries(PARAMETERS.map(({ key }) => [key, [...set[key], ...SOFTMAX[key].slice(order)]]));
  return { order, ...filled };
}

function defaultState() {
  return {
    ...modulatorOf(TABLES.get("deit_small").layers[8].sets[0]),
    x: [2.4, 2, 0.3, -0.2, -1], threshold: 1, temperature: 1, alpha: 1.5,
  };
}

function refuse(expected, got) {
  throw new Error(`expected ${expected}, got ${got}`);
}

// What of a link or a file is shown in a message: it may be anything.
const shown = text => text.length > 40 ? `“${text.slice(0, 40)}…”` : `“${text}”`;

// ---- links ----

function toHash(state) {
  const lists = ["t_b", "t_d", "b", "d", "x"].map(key => `${key}=${state[key].join(",")}`);
  const numbers = ["threshold", "temperature", "alpha"].map(key => `${key}=${state[key]}`);
  return `#v=${VERSION}&order=${state.order}&${[...lists, ...numbers].join("&")}`;
}

// Browsers and mail programs write some characters of a link as %2C and so on.
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch { // a % that stands for itself
    return text;
  }
}

function readNumber(text, name, [low, high]) {
  if (!/^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(text)) refuse(`a number for ${name}`, shown(text));
  const value = Number(text);
  if (value < low || value > high) refuse(`${name} between ${low} and ${high}`, shown(text));
  return value;
}

function readNumbers(text, name, limits, fewest, most) {
  const items = text.split(","), wanted = fewest === most ? most : `${fewest} to ${most}`;
  if (items.length < fewest || items.length > most) refuse(`${name} with ${wanted} numbers`, items.length);
  return items.map((item, i) => readNumber(item, `${name}${i + 1}`, limits));
}

const READERS = {
  v: text => text === VERSION ? text : refuse(`version ${VERSION} of links`, shown(text)),
  order: text => text === "1" || text === "2" ? Number(text) : refuse("order 1 or 2", shown(text)),
  ...Object.fromEntries(PARAMETERS.map(({ key, kind }) => [key, text => readNumbers(text, key, LIMITS[kind], 2, 2)])),
  x: text => readNumbers(text, "x", LIMITS.x, FEWEST, MOST),
  threshold: text => text === "mean" ? text : readNumber(text, "threshold", LIMITS.x),
  temperature: text => readNumber(text, "temperature", LIMITS.temperature),
  alpha: text => readNumber(text, "alpha", LIMITS.alpha),
};

// The state of a link; what it leaves out is as by default. Anything wrong in it is an error in words.
function fromHash(hash) {
  const text = decoded(hash.replace(/^#/, "")), found = {};
  if (text.length > 4000) refuse("at most 4000 characters", text.length);
  for (const part of text === "" ? [] : text.split("&")) {
    const [key, value] = [part.split("=")[0], part.slice(part.indexOf("=") + 1)];
    const known = part.includes("=") && Object.hasOwn(READERS, key);
    if (!known) refuse(`${Object.keys(READERS).join(", ")} with values`, shown(part));
    if (Object.hasOwn(found, key)) refuse(`${key} once`, "it twice");
    found[key] = READERS[key](value);
  }
  delete found.v;
  return { ...defaultState(), ...found };
}

// ---- Python ----

function toPython(state) {
  const list = values => `[${values.join(", ")}]`, place = locate(state);
  const symbols = ["t_b", "t_d", "b", "d"].map(key => list(state[key].slice(0, state.order)));
  const parameters = place && TABLES.get(place.table).isPreset
    ? `multimax.presets["${place.table}"][${place.layer}]  # layer ${place.layer + 1} of the paper's table`
    : symbols.join(", ");
  return `import torch

import multimax
from multimax import metrics, reweighting

x = torch.tensor(${list(state.x)}, dtype=torch.float64)
threshold = ${state.threshold === "mean" ? "x.mean()" : state.threshold}  # above it, an entry is relevant
t_b, t_d, b, d = ${parameters}
coefs, knots = multimax.from_paper(*(torch.tensor(values, dtype=x.dtype) for values in (t_b, t_d, b, d)))
weights = {
    "softmax": reweighting.softmax(x, temperature=${state.temperature}),
    "sparsemax": reweighting.sparsemax(x),
    "entmax": reweighting.entmax(x, alpha=${state.alpha}),
    "Ev-SoftMax": reweighting.evsoftmax(x),
    "MultiMax": multimax.multimax(x, coefs, knots),
}
for name, phi in weights.items():
    M = metrics.multi_modality(x, phi, threshold=threshold).item()
    S = metrics.sparsity(x, phi, threshold=threshold).item()
    print(f"{name:<10}  M {M:.3f}  S {S:.3f}  ", *(f"{weight:.3f}" for weight in phi.tolist()))
`;
}
