// The formulas of the Python package, in double precision.

const sum = values => values.reduce((total, value) => total + value, 0);

// Equation 6 of the paper. Each term is multiplied out from its coefficient, as in Python.
function sigma(x, { order, t_b, t_d, b, d }) {
  let y = x;
  for (let n = 0; n < order; n++) {
    let below = 1 - t_b[n], above = t_d[n] - 1;
    for (let power = 0; power <= n; power++) {
      below *= Math.max(b[n] - x, 0);
      above *= Math.max(x - d[n], 0);
    }
    y = y + below + above;
  }
  return y;
}

// The slope of sigma beside x: at its left for side = -1, at its right for side = 1. They differ at knots of order 1.
function slope(x, side, { order, t_b, t_d, b, d }) {
  let total = 1;
  for (let n = 0; n < order; n++) {
    const isBelow = side < 0 ? x <= b[n] : x < b[n], isAbove = side > 0 ? x >= d[n] : x > d[n];
    if (isBelow) total -= (1 - t_b[n]) * (n ? 2 * (b[n] - x) : 1);
    if (isAbove) total += (t_d[n] - 1) * (n ? 2 * (x - d[n]) : 1);
  }
  return total;
}

// Where sigma falls between two scores, exactly: between neighbouring knots its slope is a straight line.
function falls(low, high, state) {
  const { order, b, d } = state;
  const inside = [...b.slice(0, order), ...d.slice(0, order)].filter(knot => low < knot && knot < high);
  const edges = [low, ...inside.sort((a, z) => a - z), high], parts = [];
  let least = Infinity;
  for (let i = 1; i < edges.length; i++) {
    const [left, right] = [edges[i - 1], edges[i]], [first, last] = [slope(left, 1, state), slope(right, -1, state)];
    least = Math.min(least, first, last);
    if (left === right || (first >= 0 && last >= 0)) continue;
    const level = left + (right - left) * first / (first - last); // where the slope is 0, if it is anywhere
    const from = first < 0 ? left : level, to = last < 0 ? right : level;
    if (parts.length && parts.at(-1)[1] === from) parts.at(-1)[1] = to;
    else parts.push([from, to]);
  }
  return { least, parts };
}

// Only differences matter to the functions below; taken from the largest entry, no exponential overflows.
function fromTheLargest(x) {
  const top = Math.max(...x);
  return x.map(value => value - top);
}

function softmax(x, temperature = 1) {
  const powers = fromTheLargest(x).map(u => Math.exp(u / temperature));
  const total = sum(powers);
  return powers.map(power => power / total);
}

// max(u - tau, 0), with tau from the k largest entries for the largest k whose last one is still above it.
function sparsemax(x) {
  const u = fromTheLargest(x), ranked = [...u].sort((a, b) => b - a);
  let total = 0, tau = 0;
  ranked.forEach((value, i) => {
    total += value;
    if (1 + (i + 1) * value > total) tau = (total - 1) / (i + 1);
  });
  return u.map(value => Math.max(value - tau, 0));
}

// max(u / 2 - tau, 0)^2: on the support, that these sum to 1 is a quadratic equation for tau.
function entmax15(x) {
  const u = fromTheLargest(x).map(value => value / 2), ranked = [...u].sort((a, b) => b - a);
  let mean = 0, spread = 0, tau = 0;
  ranked.forEach((value, i) => {
    // the mean and the sum of squares about it, carried on without cancellation
    const step = value - mean;
    mean += step / (i + 1);
    spread += step * (value - mean);
    const found = mean - Math.sqrt(Math.max((1 - spread) / (i + 1), 0));
    if (found <= value) tau = found;
  });
  return u.map(value => Math.max(value - tau, 0) ** 2);
}

// (1 + (alpha - 1)(u - tau))^(1 / (alpha - 1)) where the base is positive, else 0. The sum of these falls with tau: from
// at least 1 at tau = 0 to at most 1 where the largest weight is 1 / K. Between them tau is found by halving.
function entmax(x, alpha) {
  if (alpha === 2) return sparsemax(x);
  if (alpha === 1.5) return entmax15(x);
  const u = fromTheLargest(x), a = alpha - 1;
  const weights = tau => u.map(value => {
    const scaled = a * (value - tau);
    return scaled > -1 ? Math.exp(Math.log1p(scaled) / a) : 0;
  });
  let low = 0, high = -Math.expm1(-a * Math.log(u.length)) / a;
  for (let step = 0; step < 100; step++) { // until rounding leaves no number between them
    const middle = (low + high) / 2;
    if (sum(weights(middle)) >= 1) low = middle;
    else high = middle;
  }
  return weights(low);
}

// Evaluated as its paper does: entries below the mean get exactly 0.
function evsoftmax(x) {
  const u = fromTheLargest(x), mean = sum(u) / u.length;
  const powers = u.map(value => value >= mean ? Math.exp(value) : 0), total = sum(powers);
  return powers.map(power => power / total);
}

const FUNCTIONS = [
  { key: "softmax", title: "softmax", of: (x, { temperature }) => softmax(x, temperature) },
  { key: "sparsemax", title: "sparsemax", of: sparsemax },
  { key: "entmax", title: "entmax", of: (x, { alpha }) => entmax(x, alpha) },
  { key: "evsoftmax", title: "Ev-SoftMax", of: evsoftmax },
  { key: "multimax", title: "MultiMax", of: (x, state) => softmax(x.map(value => sigma(value, state))) },
];

// Definition 3.2; NaN if no entry but the largest is relevant.
function multiModality(x, weights, threshold) {
  const top = Math.max(...x), peak = weights[x.indexOf(top)];
  const gaps = weights.filter((_, i) => x[i] > threshold && x[i] < top).map(weight => peak - weight);
  return 1 - sum(gaps) / gaps.length;
}

// Definition 3.3, with softmax's smallest weight for s; NaN if no entry is irrelevant.
function sparsity(x, weights, threshold) {
  const s = Math.min(...softmax(x));
  const scores = weights.filter((_, i) => x[i] < threshold).map(weight => weight === 0 ? 1 : Math.exp(-weight / s));
  return sum(scores) / scores.length;
}

const CURVE_POINTS = 201;
const TEMPERATURES = Array.from({ length: 121 }, (_, i) => 10 ** (-1.3 + i / 120 * 3.3)); // 0.05 to 100

// All that the page shows of a state.
function compute(state) {
  const { x } = state, first = x.slice(0, 3);
  const threshold = state.threshold === "mean" ? sum(x) / x.length : state.threshold;
  const measured = weights => ({ M: multiModality(x, weights, threshold), S: sparsity(x, weights, threshold) });
  const low = Math.min(-5, ...x), high = Math.max(5, ...x);
  const at = Array.from({ length: CURVE_POINTS }, (_, i) => low + (high - low) * i / (CURVE_POINTS - 1));
  const result = {
    threshold, low, high,
    curve: { x: at, y: at.map(value => sigma(value, state)) },
    sigma: x.map(value => sigma(value, state)),
    falls: falls(Math.min(...x), Math.max(...x), state), // among the scores
    fallsInSight: falls(low, high, state).parts,
    weights: {}, M: {}, S: {}, simplex: {},
    path: TEMPERATURES.map(temperature => softmax(first, temperature)),
    tradeOff: TEMPERATURES.map(temperature => measured(softmax(x, temperature))),
  };
  for (const { key, of } of FUNCTIONS) {
    const weights = of(x, state), { M, S } = measured(weights);
    result.weights[key] = weights;
    result.M[key] = M;
    result.S[key] = S;
    result.simplex[key] = of(first, state);
  }
  return result;
}

// Scores of three entries that give these weights, by softmax or by MultiMax, with the largest score kept. What sigma
// reaches nowhere between -10 and 10 gets the nearer end.
function scoresFor(key, weights, state, [low, high]) {
  const modulate = value => key === "softmax" ? value / state.temperature : sigma(value, state);
  const logs = weights.map(Math.log), largest = logs.indexOf(Math.max(...logs));
  const top = Math.max(...state.x.slice(0, 3));
  return logs.map((log, i) => {
    if (i === largest) return top;
    const wanted = modulate(top) + log - logs[largest];
    let [from, to] = [low, high];
    for (let step = 0; step < 60; step++) {
      const middle = (from + to) / 2;
      if (modulate(middle) < wanted) from = middle;
      else to = middle;
    }
    return (from + to) / 2;
  });
}
