// The table of entries (rows) and functions (columns): where a score is moved, its weights move beside it.

const controls = []; // all that shows a number of the state
let entries = []; // of the table, one for each entry of x
const measures = {};
let titles = []; // of the functions, which name their temperature or alpha

// A cell of the table: a bar and a number.
function cell(key) {
  const bar = make("div", { class: `bar of-${key}` }), text = make("span");
  const track = make("div", { class: "track", "aria-hidden": "true" }, bar);
  const element = make("td", { role: "cell", class: "weight" }, track, text);
  function update(value, { isBest = false, note = "" } = {}) {
    element.dataset.value = value;
    element.title = Number.isNaN(value) ? "not defined: no such entry" : `${value}${note && `: ${note}`}`;
    bar.style.width = `${Number.isNaN(value) ? 0 : 100 * between(value, [0, 1])}%`;
    text.textContent = rounded(value) + (note && " ⚠");
    text.className = note ? "doubtful" : value === 0 ? "zero" : isBest ? "best" : "";
  }
  return { element, update };
}

function buildTable() {
  titles = FUNCTIONS.map(method => make("th", { role: "columnheader", scope: "col" }, ...named(method)));
  $("names").append(make("th", { role: "columnheader", scope: "col" }, "score ", make("i", {}, "x")), ...titles);
  for (const legend of document.querySelectorAll(".legend")) {
    for (const method of FUNCTIONS) legend.append(make("span", {}, ...named(method)));
  }

  const add = make("button", { type: "button", id: "add" }, "Add a score");
  add.addEventListener("click", () => {
    change(() => state.x.push(0));
    entries.at(-1).control.range.focus();
  });
  controls.push({ update() { add.disabled = state.x.length >= MOST; } });
  const mean = make("input", { type: "checkbox", id: "mean" });
  // the mean as it is taken over into slider and box
  const current = () => state.threshold === "mean" ? Number(short(result.threshold)) : state.threshold;
  mean.addEventListener("change", () => {
    const value = mean.checked ? "mean" : current();
    change(() => { state.threshold = value; });
  });
  controls.push({ update() { mean.checked = state.threshold === "mean"; } });
  const setting = (id, title, letter, get, set, ...more) => {
    const inputs = control(id, title, id === "threshold" ? "x" : id, get, set);
    controls.push(inputs);
    const label = make("label", { for: id }, `${title} `, make("i", {}, letter));
    return make("div", { class: "setting" }, label, ...more, inputs.range, inputs.number);
  };
  $("settings").append(
    add,
    setting("threshold", "threshold", "ε", current, value => { state.threshold = value; },
      make("label", { class: "mean" }, mean, " the mean")),
    setting("temperature", "softmax", "T", () => state.temperature, value => { state.temperature = value; }),
    setting("alpha", "entmax", "α", () => state.alpha, value => { state.alpha = value; }),
  );
  $("alpha").setAttribute("aria-label", "alpha of entmax");
  $("alpha-number").setAttribute("aria-label", "alpha of entmax, as a number");
  $("temperature").setAttribute("aria-label", "temperature of softmax");
  $("temperature-number").setAttribute("aria-label", "temperature of softmax, as a number");
  const about = { M: ["multi-modality", "relevant near the largest"], S: ["sparsity", "the others near zero"] };
  for (const [letter, [name, meaning]] of Object.entries(about)) {
    measures[letter] = FUNCTIONS.map(({ key }) => cell(key));
    $("measures").append(make("tr", { role: "row", id: letter },
      make("th", { role: "rowheader", scope: "row" }, make("strong", {}, letter), ` ${name}`,
        make("span", { class: "quiet" }, `: ${meaning}`)),
      ...measures[letter].map(one => one.element)));
  }
}

function buildEntries() {
  entries = state.x.map((_, i) => {
    const score = control(`x${i + 1}`, `x${i + 1}`, "x", () => state.x[i], value => { state.x[i] = value; });
    const cells = FUNCTIONS.map(({ key }) => cell(key));
    const name = `Remove x${i + 1}`, remove = make("button", { type: "button", "aria-label": name, title: name }, "×");
    remove.addEventListener("click", () => {
      change(() => state.x.splice(i, 1));
      // the focus would be lost with the row
      entries[Math.min(i, entries.length - 1)].control.range.focus();
    });
    const dot = make("span", { class: "dot" }), relevance = make("span", { class: "hear" });
    const row = make("tr", { role: "row" },
      make("th", { role: "rowheader", scope: "row", class: "entry" },
        make("label", { for: `x${i + 1}` }, dot, ...symbol("x", i + 1), relevance), score.range, score.number, remove),
      ...cells.map(one => one.element));
    return { control: score, cells, remove, row, relevance };
  });
  $("entries").replaceChildren(...entries.map(entry => entry.row));
}

function updateTable() {
  if (entries.length !== state.x.length) buildEntries();
  entries.forEach(({ control, cells, remove, row, relevance }, i) => {
    const isRelevant = state.x[i] > result.threshold;
    control.update();
    remove.disabled = state.x.length <= FEWEST;
    row.classList.toggle("relevant", isRelevant);
    row.title = `σ(x${i + 1}) = ${short(result.sigma[i])}`;
    relevance.textContent = isRelevant ? ", relevant" : ", not relevant";
    FUNCTIONS.forEach(({ key }, k) => cells[k].update(result.weights[key][i]));
  });
  // where a larger score gets less weight, M and S do not say what they should, and are not compared
  const isFair = key => key !== "multimax" || !result.falls.parts.length;
  for (const letter of ["M", "S"]) {
    const best = Math.max(...FUNCTIONS.map(({ key }) => isFair(key) ? result[letter][key] : -Infinity));
    FUNCTIONS.forEach(({ key }, k) => {
      const value = result[letter][key];
      const note = isFair(key) ? "" : "not comparable, since sigma falls between these scores";
      measures[letter][k].update(value, { isBest: value === best, note });
    });
  }
  const named = { softmax: state.temperature === 1 ? "" : `T = ${state.temperature}`, entmax: `α = ${state.alpha}` };
  FUNCTIONS.forEach(({ key, title }, k) => {
    titles[k].querySelector(".title").replaceChildren(title, ...named[key] ? [make("small", {}, ` ${named[key]}`)] : []);
  });
  controls.forEach(item => item.update());
}
