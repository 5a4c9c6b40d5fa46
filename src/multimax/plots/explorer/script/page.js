// The page: its state, what happens to it, and undo.

let state = null, result = null;

function render() {
  result = compute(state);
  chosen = locate(state) ?? chosen;
  updateTable();
  updateChoice();
  updateFalls();
  updateSummary();
  renderFigures();
  $("python").textContent = toPython(state);
  $("undo").setAttribute("aria-disabled", past.length === 0);
  $("redo").setAttribute("aria-disabled", future.length === 0);
}

function renderFigures() {
  drawSigma();
  drawSimplex();
  drawTradeOff();
}

// The badge: a larger score gets less weight where sigma falls.
function updateFalls() {
  const { parts } = result.falls, range = ([from, to]) => `${minus(from.toFixed(2))} to ${minus(to.toFixed(2))}`;
  const text = parts.length ? `σ falls from ${parts.map(range).join(" and from ")}: there a larger score gets less weight`
    : "σ rises between these scores: a larger score gets more weight";
  $("falls").classList.toggle("badge", parts.length > 0);
  if ($("falls").textContent !== text) $("falls").textContent = text; // else it would be read out again
}

function updateSummary() {
  const isRelevant = (_, i) => state.x[i] > result.threshold, count = state.x.filter(isRelevant).length;
  const share = key => `${(100 * sum(result.weights[key].filter(isRelevant))).toFixed(1)} %`;
  $("summary").hidden = count === 0 || count === state.x.length;
  $("summary").replaceChildren(
    make("strong", { class: "by-multimax" }, share("multimax")), ` of MultiMax’s weight goes to the `,
    count === 1 ? "relevant score" : `${count} relevant scores`, ", ",
    make("strong", { class: "by-softmax" }, share("softmax")), " of softmax’s",
    state.temperature === 1 ? "." : ` at T = ${state.temperature}.`,
  );
}

// ---- changes and undo ----

const MOST_STEPS = 200;
const past = [], future = [];
let ongoing = null, pause; // the control that is being moved: all of one movement is undone at once

function remember() {
  past.push(structuredClone(state));
  if (past.length > MOST_STEPS) past.shift();
  future.length = 0;
}

function change(alter, key = null) {
  stopPlaying();
  if (key === null || key !== ongoing) remember();
  ongoing = key;
  clearTimeout(pause);
  pause = setTimeout(endOfChange, 800);
  alter();
  $("message").hidden = true;
  render();
  writeAddress();
}

function endOfChange() {
  ongoing = null;
}

function travel(from, to) {
  stopPlaying();
  endOfChange();
  if (!from.length) return;
  to.push(state);
  state = from.pop();
  render();
  writeAddress();
}

// ---- links ----

let pending;

// browsers refuse more than some 100 new addresses in 30 seconds, and a slider gives more
function writeAddress() {
  clearTimeout(pending);
  pending = setTimeout(() => history.replaceState(null, "", toHash(state)), 400);
}

function open() {
  clearTimeout(pending);
  stopPlaying();
  endOfChange();
  if (state) remember();
  try {
    state = fromHash(location.hash);
    $("message").hidden = true;
  } catch (error) {
    state = defaultState();
    warn(`The link was not understood: ${error.message}. What you see is the default state.`);
  }
  chosen = locate(state);
  render();
}

// From a disk, a link would work on this machine alone: if the page is known to be on the web, the link leads there.
function link() {
  const published = location.protocol === "file:" && document.querySelector("link[rel=canonical]")?.href;
  return (published || location.href.split("#")[0]) + toHash(state);
}

// ---- messages ----

let fading;

function warn(text, ...more) {
  $("message-text").replaceChildren(text, ...more);
  $("message").hidden = false;
}

function say(text) {
  $("status").textContent = text;
  clearTimeout(fading);
  fading = setTimeout(() => { $("status").textContent = ""; }, 4000);
}

async function copy(what, text) {
  try {
    await navigator.clipboard.writeText(text);
    say(`${what} copied`);
  } catch { // no clipboard, or it is not allowed
    const area = make("textarea", { id: "by-hand", readonly: "", "aria-label": what });
    area.value = text;
    warn(`The browser does not let this page copy. ${what} to copy by hand:`, area);
    area.select();
  }
}

// ---- start ----

function buildParameters() {
  for (const n of [0, 1]) {
    const rows = PARAMETERS.map(({ key, kind, letter, index, about }) => {
      const id = `${key}${n + 1}`;
      const inputs = control(id, `${id}, ${about}`, kind, () => state[key][n], value => { state[key][n] = value; });
      controls.push(inputs);
      const label = make("label", { for: id }, ...symbol(letter, `${index}${n + 1}`));
      return make("div", { class: "parameter" }, label, inputs.range, inputs.number);
    });
    const title = n ? "order 2, beyond the knots by the square" : "order 1, beyond the knots in proportion";
    const group = make("fieldset", { class: "order" }, make("legend", {}, title), ...rows);
    $("parameters").append(group);
    controls.push({ update() { group.disabled = state.order < n + 1; } });
  }
  for (const radio of document.getElementsByName("order")) {
    radio.addEventListener("change", () => change(() => { state.order = Number(radio.value); }));
    controls.push({ update() { radio.checked = state.order === Number(radio.value); } });
  }
}

function start() {
  buildTable();
  buildParameters();
  buildChoice();
  buildSigma();
  buildSimplex();
  buildPictures();
  $("undo").addEventListener("click", () => travel(past, future));
  $("redo").addEventListener("click", () => travel(future, past));
  $("copy-link").addEventListener("click", () => copy("Link", link()));
  $("copy-python").addEventListener("click", () => copy("Python", toPython(state)));
  $("reset").addEventListener("click", () => { change(() => { state = defaultState(); }); say("As at the start"); });
  $("dismiss").addEventListener("click", () => { $("message").hidden = true; });
  addEventListener("keydown", event => {
    const hasItsOwn = event.target.matches("input[type=number], textarea");
    if (hasItsOwn || !event.ctrlKey && !event.metaKey) return;
    const key = event.key.toLowerCase(), isRedo = key === "y" || key === "z" && event.shiftKey;
    if (key !== "z" && key !== "y") return;
    event.preventDefault();
    if (isRedo) travel(future, past);
    else travel(past, future);
  });
  addEventListener("hashchange", open);
  open();
  let width = document.documentElement.clientWidth;
  new ResizeObserver(() => {
    if (width !== (width = document.documentElement.clientWidth)) renderFigures();
  }).observe(document.documentElement);
}

start();
