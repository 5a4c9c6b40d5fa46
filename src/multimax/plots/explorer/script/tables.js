// Tables of learned parameters: the paper's two, and that of a file of the user's. A layer has one set, or one per head.

const TABLES = new Map();
for (const [key, { title, layers }] of Object.entries(JSON.parse(document.getElementById("presets").textContent))) {
  const named = layers.map(([t_b, t_d, b, d], i) => ({ name: `layer ${i + 1}`, sets: [{ t_b, t_d, b, d }] }));
  TABLES.set(key, { title, layers: named, isPreset: true });
}

let chosen = null; // the table, layer and head that were chosen last; of equal sets, these are shown

// Where a state's parameters are found in the tables, or null.
function locate(state) {
  const isSame = set => set.t_b.length === state.order
    && PARAMETERS.every(({ key }) => set[key].every((value, n) => value === state[key][n]));
  const set = chosen && TABLES.get(chosen.table)?.layers[chosen.layer]?.sets[chosen.head];
  if (set && isSame(set)) return chosen;
  for (const [table, { layers }] of TABLES) {
    for (const [layer, { sets }] of layers.entries()) {
      const head = sets.findIndex(isSame);
      if (head >= 0) return { table, layer, head };
    }
  }
  return null;
}

// With slopes of 1 every sigma is the identity.
const isSoftmax = ({ order, t_b, t_d }) => [...t_b.slice(0, order), ...t_d.slice(0, order)].every(t => t === 1);
