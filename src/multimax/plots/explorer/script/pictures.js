// Figures as files, as they are seen: SVG with its style in it, or PNG.

const PIXELS = 3; // of a PNG, for one of the screen
const DRAWN = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity", "paint-order"];
const WRITTEN = ["font-family", "font-size", "font-style", "font-weight"];

function standalone(svg, title) {
  const copy = svg.cloneNode(true), { width, height } = svg.viewBox.baseVal, legend = svg.dataset.legend ? 30 : 0;
  const originals = [...svg.querySelectorAll("*")], copies = [...copy.querySelectorAll("*")];
  const leftOut = [];
  originals.forEach((element, i) => {
    const style = getComputedStyle(element), isText = element.matches("text, tspan");
    if (style.display === "none" || element.matches(".reach, .ring")) leftOut.push(copies[i]);
    if (element.matches("circle, line, polygon, polyline, rect, text, tspan")) {
      const names = isText ? [...DRAWN, ...WRITTEN] : DRAWN;
      for (const name of names) copies[i].setAttribute(name, style.getPropertyValue(name));
    }
    for (const { name } of [...copies[i].attributes]) {
      if (/^(class|style|role|tabindex|aria-.*|data-.*)$/.test(name)) copies[i].removeAttribute(name);
    }
  });
  leftOut.forEach(element => element.remove());
  for (const { name } of [...copy.attributes]) copy.removeAttribute(name);
  const sizes = { width, height: height + legend, viewBox: `0 0 ${width} ${height + legend}` };
  for (const [name, value] of Object.entries(sizes)) copy.setAttribute(name, value);
  const card = getComputedStyle(svg.closest(".card")).backgroundColor;
  copy.prepend(draw("title", {}, title), draw("rect", { width, height: height + legend, fill: card }));
  if (legend) copy.append(...legendOf(svg, width, height + 14));
  return new XMLSerializer().serializeToString(copy);
}

function legendOf(svg, width, y) {
  const icons = [...svg.closest("figure").querySelectorAll(".legend > span")], parts = [], gap = width / icons.length;
  const { color, fontFamily } = getComputedStyle(svg);
  FUNCTIONS.forEach(({ key, title }, i) => {
    const x = gap * i + 12, element = mark(key, x, y, 6);
    element.removeAttribute("class");
    element.setAttribute("fill", getComputedStyle(icons[i].querySelector(".mark")).fill);
    const text = { x: x + 10, y: y + 4, fill: color, "font-size": 10.5, "font-family": fontFamily };
    parts.push(element, draw("text", text, title));
  });
  return parts;
}

function download(blob, name) {
  const address = URL.createObjectURL(blob);
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
  say(`${name} saved`);
}

function toPng(text, { width, height }) {
  return new Promise((resolve, reject) => {
    const image = new Image();
    image.onload = () => {
      const canvas = make("canvas", { width: width * PIXELS, height: height * PIXELS });
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob(blob => blob ? resolve(blob) : reject(new Error("the browser makes no PNG")), "image/png");
    };
    image.onerror = () => reject(new Error("the browser does not read its own SVG"));
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  });
}

async function savePicture(svg, format) {
  const title = svg.closest("section").querySelector("h2").textContent, text = standalone(svg, `MultiMax: ${title}`);
  const { width, height } = new DOMParser().parseFromString(text, "image/svg+xml").documentElement.viewBox.baseVal;
  try {
    const blob = format === "png" ? await toPng(text, { width, height }) : new Blob([text], { type: "image/svg+xml" });
    download(blob, `multimax-${svg.id}.${format}`);
  } catch (error) {
    warn(`The figure was not saved: ${error.message}.`);
  }
}

function buildPictures() {
  for (const place of document.querySelectorAll("[data-save]")) {
    const svg = $(place.dataset.save), { textContent: title } = svg.closest("section").querySelector("h2");
    for (const format of ["svg", "png"]) {
      const name = `Save “${title}” as ${format.toUpperCase()}`;
      const attributes = { type: "button", class: "small", "aria-label": name, title: name };
      const button = make("button", attributes, format.toUpperCase());
      button.addEventListener("click", () => savePicture(svg, format));
      place.append(button);
    }
  }
}
