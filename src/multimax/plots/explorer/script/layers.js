// The choice of a layer, of the tables or of a file; and playing all layers of a table, one after the other.

const SECONDS_PER_LAYER = 1.1;
const calm = matchMedia("(prefers-reduced-motion: reduce)");
let playing = null; // { table, head, elapsed, last, frame }

function titleOf({ table, layer, head }) {
  const { title, layers } = TABLES.get(table), { name, sets } = layers[layer];
  return `${title}, ${name}${sets.length > 1 ? `, head ${head + 1}` : ""}`;
}

// What is drawn faintly behind a layer's sigma: the layer's heads, or else the table's layers.
function neighbours() {
  const found = chosen && TABLES.get(chosen.table);
  if (!found || isSoftmax(state)) return [];
  const { sets } = found.layers[chosen.layer];
  const others = sets.length > 1 ? sets : found.layers.map(layer => layer.sets[0]);
  return others.slice(0, 48).map(set => ({ order: set.t_b.length, ...set }));
}

function choose(place) {
  chosen = place;
  Object.assign(state, modulatorOf(TABLES.get(place.table).layers[place.layer].sets[place.head]));
}

function buildChoice() {
  fillChoice();
  $("preset").addEventListener("change", () => {
    const [table, layer] = $("preset").value.split(":");
    change(() => {
      if (table === "softmax") Object.assign(state, structuredClone(SOFTMAX));
      else choose({ table, layer: Number(layer) - 1, head: 0 });
    });
  });
  $("head").addEventListener("change", () => {
    const head = Number($("head").value) - 1;
    change(() => choose({ ...chosen, head }));
  });
  $("play").addEventListener("click", () => playing ? stopPlaying() : startPlaying());
  $("load").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => {
    if ($("file").files.length) load($("file").files[0]);
    $("file").value = ""; // the same file may be loaded again
  });
  addEventListener("dragover", event => event.preventDefault());
  addEventListener("drop", event => {
    event.preventDefault();
    if (event.dataTransfer.files.length) load(event.dataTransfer.files[0]);
  });
}

function fillChoice() {
  const options = [make("option", { value: "", disabled: "" }, "your own numbers"),
    make("option", { value: "softmax" }, "softmax, σ(x) = x")];
  for (const [table, { title, layers, isPreset }] of TABLES) {
    options.push(make("optgroup", { label: title }, ...layers.map(({ name }, i) =>
      make("option", { value: `${table}:${i + 1}` }, isPreset ? `${title}, ${name}` : `${i + 1}: ${name}`))));
  }
  $("preset").replaceChildren(...options);
}

function updateChoice() {
  const place = locate(state), layers = TABLES.get(tableToPlay()).layers;
  const isKnown = playing || place;
  $("preset").value = isKnown ? `${chosen.table}:${chosen.layer + 1}` : isSoftmax(state) ? "softmax" : "";
  const heads = chosen && !isSoftmax(state) ? TABLES.get(chosen.table).layers[chosen.layer].sets.length : 1;
  $("head-choice").hidden = heads < 2;
  if ($("head").length !== heads) {
    $("head").replaceChildren(...Array.from({ length: heads }, (_, i) => make("option", {}, i + 1)));
  }
  $("head").value = place ? place.head + 1 : "";
  updateOrigin();
  $("play-text").textContent = playing ? "Pause" : `Play layers 1 to ${layers.length}`;
  $("play").classList.toggle("playing", Boolean(playing));
  $("play").disabled = layers.length < 2;
}

// A file's layers, and a second time, as layers with monotone=True, those that can be either.
function addFile(title, layers) {
  TABLES.set("file", { title, layers, isPreset: false });
  TABLES.delete("monotone");
  const either = layers.filter(layer => layer.monotone);
  if (either.length) {
    const named = either.map(({ name, monotone }) => ({ name: `${name}, monotone`, sets: monotone }));
    TABLES.set("monotone", { title: `${title}, with monotone=True`, layers: named, isPreset: false });
  }
}

// A file does not say whether its layers are monotone, and they would then compute with other numbers. Stays while the
// layer's points are dragged: the figure below must not jump.
function updateOrigin() {
  const layer = chosen?.table === "file" && TABLES.get("file").layers[chosen.layer];
  const isEither = layer && layer.monotone !== undefined;
  const asked = "The file does not say if this layer has monotone=True.";
  const text = isSoftmax(state) ? ""
    : chosen?.table === "monotone" ? "Taken as a layer with monotone=True."
    : !isEither ? ""
    : layer.monotone ? `${asked} If so, choose it in the last group listed.`
    : `${asked} If so, it cannot be shown: its slopes are beyond 100.`;
  $("origin").hidden = !text;
  if ($("origin").textContent !== text) $("origin").textContent = text; // else it would be read out again
}

async function load(file) {
  try {
    const layers = await readLayers(file);
    stopPlaying(); // of the file before it
    addFile(file.name, layers);
    fillChoice();
    change(() => choose({ table: "file", layer: 0, head: 0 }));
    const heads = layers[0].sets.length;
    const perHead = heads > 1 ? `, ${heads} heads` : "";
    say(`${layers.length} layer${layers.length > 1 ? "s" : ""}${perHead}, from ${file.name}`);
  } catch (error) {
    warn(`${file.name} was not loaded: ${error.message}.`);
  }
}

// ---- playing ----

const tableToPlay = () => chosen?.table ?? "deit_small";

function startPlaying() {
  remember();
  playing = { table: tableToPlay(), head: chosen?.head ?? 0, elapsed: 0, last: null };
  playing.frame = requestAnimationFrame(playOn);
  updateChoice();
}

// Stands at a layer for a while, then goes over to the next; at once, if the system asks for less motion.
function playOn(now) {
  const { layers } = TABLES.get(playing.table);
  const setOf = layer => layers[layer].sets[Math.min(playing.head, layers[layer].sets.length - 1)];
  playing.elapsed += Math.min(now - (playing.last ?? now), 100); // a page in the background waits
  playing.last = now;
  const position = Math.min(playing.elapsed / 1000 / SECONDS_PER_LAYER, layers.length - 1);
  const layer = Math.floor(position);
  const head = layers[layer].sets.indexOf(setOf(layer)), share = Math.max(position - layer - 0.45, 0) / 0.55;
  choose({ table: playing.table, layer, head });
  if (share > 0 && !calm.matches && setOf(layer).t_b.length === setOf(layer + 1).t_b.length) {
    const next = modulatorOf(setOf(layer + 1)), smooth = share * share * (3 - 2 * share);
    for (const { key } of PARAMETERS) {
      state[key] = state[key].map((value, n) => value + smooth * (next[key][n] - value));
    }
  }
  if (position === layers.length - 1) stopPlaying();
  else {
    playing.frame = requestAnimationFrame(playOn);
    render();
  }
}

// At the layer that was reached, not between two.
function stopPlaying() {
  if (!playing) return;
  cancelAnimationFrame(playing.frame);
  playing = null;
  choose(chosen);
  render();
  writeAddress();
}
