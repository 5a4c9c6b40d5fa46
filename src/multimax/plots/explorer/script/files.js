// Files of the user's: layers with their sets of parameters, from safetensors or JSON. Read in the page, never sent.

const LARGEST_HEADER = 100e6, LARGEST_JSON = 10e6, MOST_HEADS = 1024; // the first is the format's own limit
const PAIRS = { coefs: "knots", ts: "ranges", multimax_ts: "multimax_ranges" }; // the last two: of the published code
const TYPES = {
  F64: [8, (view, at) => view.getFloat64(at, true)],
  F32: [4, (view, at) => view.getFloat32(at, true)],
  F16: [2, (view, at) => halfFloat(view.getUint16(at, true))],
  BF16: [2, (view, at) => bfloat(view.getUint16(at, true))],
};

function halfFloat(bits) {
  const sign = bits >> 15 ? -1 : 1, exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * fraction / 1024);
}

function bfloat(bits) {
  const view = new DataView(new ArrayBuffer(4));
  view.setUint32(0, bits << 16);
  return view.getFloat32(0);
}

function parsed(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    return refuse(what, error.message);
  }
}

const isObject = value => typeof value === "object" && value !== null && !Array.isArray(value);
const isCount = value => Number.isSafeInteger(value) && value >= 0;

// One set of parameters, checked.
function checkedSet(name, set) {
  for (const { key, kind } of PARAMETERS) {
    const values = set[key], [low, high] = LIMITS[kind];
    if (values.length !== set.t_b.length) refuse(`${key} of ${name} with ${set.t_b.length} numbers`, values.length);
    for (const value of values) {
      const fits = typeof value === "number" && value >= low && value <= high;
      if (!fits) refuse(`${key} of ${name} to be a number between ${low} and ${high}`, shown(String(value)));
    }
  }
  return set;
}

// ---- safetensors: 8 bytes with the header's length, the header in JSON, then the tensors ----

async function readHeader(file) {
  const what = "a safetensors file, whose first 8 bytes tell the length of its header";
  if (file.size < 8) refuse(what, `a file of ${file.size} bytes`);
  const length = Number(new DataView(await file.slice(0, 8).arrayBuffer()).getBigUint64(0, true));
  const most = Math.min(LARGEST_HEADER, file.size - 8);
  if (length > most) refuse(what, `a length of ${length}, where at most ${most} bytes can follow`);
  const header = parsed(await file.slice(8, 8 + length).text(), "a safetensors file with a header in JSON");
  if (!isObject(header)) refuse("a safetensors file with tensors by name", shown(JSON.stringify(header)));
  delete header.__metadata__;
  return { header, start: 8 + length };
}

async function readTensor(file, start, name, entry) {
  const { dtype, shape, data_offsets: offsets } = isObject(entry) ? entry : {};
  if (!Object.hasOwn(TYPES, dtype)) refuse(`${name} in ${Object.keys(TYPES).join(", ")}`, shown(String(dtype)));
  const hasShape = Array.isArray(shape) && shape.every(isCount);
  if (!hasShape) refuse(`${name} with a shape`, shown(JSON.stringify(shape) ?? "none"));
  const [size, read] = TYPES[dtype], count = shape.reduce((product, length) => product * length, 1);
  const isRange = Array.isArray(offsets) && offsets.length === 2 && offsets.every(isCount)
    && offsets[1] - offsets[0] === count * size && start + offsets[1] <= file.size;
  if (!isRange) refuse(`${name} with ${count * size} bytes inside the file`, shown(JSON.stringify(offsets) ?? "none"));
  if (count > 4 * MOST_HEADS) refuse(`${name} with at most ${MOST_HEADS} heads of order 2`, `${count} numbers`);
  const view = new DataView(await file.slice(start + offsets[0], start + offsets[1]).arrayBuffer());
  return { shape, values: Array.from({ length: count }, (_, i) => read(view, i * size)) };
}

// A set of parameters of a layer whose numbers are used as they are stored.
function asStored({ lower, upper, b, d }) {
  return { t_b: lower.map(c => 1 - c), t_d: upper.map(c => 1 + c), b, d };
}

// The same of a layer with monotone=True, which uses other numbers: see MultiMax.parameters_in_use. Nothing in a file says
// which of the two its layers are. Null where the numbers would be beyond the limits of the page.
function monotoneSets(name, stored) {
  try {
    return stored.map(({ lower, upper, b, d }) => checkedSet(name, {
      t_b: lower.map((c, n) => n ? 1 + Math.abs(c) : 1 + Math.expm1(-c)),
      t_d: upper.map((c, n) => n ? 1 + Math.abs(c) : 1 + Math.expm1(c)),
      b: b.map((knot, n) => n ? knot : Math.min(knot, d[n])),
      d: d.map((knot, n) => n ? knot : Math.max(knot, b[n])),
    }));
  } catch {
    return null;
  }
}

async function readSafetensors(file) {
  const { header, start } = await readHeader(file), layers = [];
  for (const name of Object.keys(header)) {
    const [, prefix, last] = /^(.*?)([^.]*)$/s.exec(name);
    if (!Object.hasOwn(PAIRS, last)) continue;
    const partner = prefix + PAIRS[last];
    if (!Object.hasOwn(header, partner)) refuse(`${partner} beside ${name}`, "none");
    const coefs = await readTensor(file, start, name, header[name]);
    const knots = await readTensor(file, start, partner, header[partner]);
    if (String(coefs.shape) !== String(knots.shape)) {
      refuse(`${name} and ${partner} of one shape`, `(${coefs.shape}) and (${knots.shape})`);
    }
    // (N, 2), or (H, N, 2) for one set per head; the published code has one vector of length 2 N
    const isVector = last !== "coefs", order = isVector ? coefs.shape[0] / 2 : coefs.shape.at(-2);
    const fits = isVector ? coefs.shape.length === 1 : [2, 3].includes(coefs.shape.length) && coefs.shape.at(-1) === 2;
    const shapes = isVector ? "(2) or (4)" : "(1, 2), (2, 2) or (heads, 1 or 2, 2)";
    if (!fits || ![1, 2].includes(order) || !coefs.values.length) {
      refuse(`${name} of shape ${shapes}`, `(${coefs.shape.join(", ")})`);
    }
    const layer = prefix.replace(/\.$/, "") || "model";
    const stored = Array.from({ length: coefs.values.length / (2 * order) }, (_, head) => {
      const of = ({ values }, side) => Array.from({ length: order }, (_, n) => values[(head * order + n) * 2 + side]);
      return { lower: of(coefs, 0), upper: of(coefs, 1), b: of(knots, 0), d: of(knots, 1) };
    });
    const sets = stored.map(set => checkedSet(layer, asStored(set)));
    layers.push({ name: layer, sets, monotone: isVector ? undefined : monotoneSets(layer, stored) });
  }
  if (!layers.length) {
    const names = Object.keys(header);
    refuse("layers with coefs and knots, as multimax.MultiMax stores them",
      names.length ? `${names.length} tensors such as ${shown(names[0])}` : "no tensors");
  }
  // as stored, which need not be the layers' order: numbers in the names count as numbers
  return layers.sort((one, other) => one.name.localeCompare(other.name, "en", { numeric: true }));
}

// ---- JSON: layers in a list, or by name, with t_b, t_d, b and d: a list with one number per order, or one per head ----

function readLayer(name, layer) {
  const keys = PARAMETERS.map(({ key }) => key);
  const complete = isObject(layer) && keys.every(key => Array.isArray(layer[key]));
  if (!complete) refuse(`${name} with lists ${keys.join(", ")}`, shown(JSON.stringify(layer)));
  const perHead = Array.isArray(layer.t_b[0]), heads = perHead ? layer.t_b.length : 1;
  if (heads > MOST_HEADS) refuse(`at most ${MOST_HEADS} heads in ${name}`, heads);
  const sets = Array.from({ length: heads }, (_, head) => {
    const set = Object.fromEntries(keys.map(key => [key, perHead ? layer[key][head] : layer[key]]));
    for (const key of keys) {
      const got = set[key];
      const isSet = Array.isArray(got) && (got.length === 1 || got.length === 2);
      const fits = isSet && (!perHead || layer[key].length === heads), whose = perHead ? `, for ${heads} heads` : "";
      if (!fits) refuse(`${key} of ${name} with one number per order, 1 or 2${whose}`, shown(JSON.stringify(layer[key])));
    }
    return checkedSet(name, set);
  });
  return { name, sets };
}

async function readJson(file) {
  if (file.size > LARGEST_JSON) refuse(`JSON of at most ${LARGEST_JSON} bytes`, file.size);
  const found = parsed(await file.text(), "a file in JSON");
  const isList = Array.isArray(found);
  if (!isList && !isObject(found)) refuse("layers in a list or by name", shown(JSON.stringify(found)));
  const nameOf = key => isList ? `layer ${Number(key) + 1}` : key;
  const layers = Object.entries(found).map(([key, layer]) => readLayer(nameOf(key), layer));
  return layers.length ? layers : refuse("at least one layer", "none");
}

function readLayers(file) {
  if (/\.safetensors$/i.test(file.name)) return readSafetensors(file);
  if (/\.json$/i.test(file.name)) return readJson(file);
  return refuse("a file that ends in .safetensors or .json", shown(file.name));
}
