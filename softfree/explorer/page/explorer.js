"use strict";

const $ = (id) => document.getElementById(id);
const VIRIDIS = ["440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725"];
const COLOURS = colourTable(VIRIDIS);
const CONVERGED = 1e-2;

// `wanted`: what is chosen; `captured`: the choice that is shown, once the server has its `layers`. `layer` is one of
// them. `steps` null: as many as the layer uses.
const state = {
  setup: null, wanted: { model: 0, photo: null, size: 224 }, captured: null, layers: [], layer: null,
  heads: new Set([0, 1]), hidden: new Set(), steps: null, inverse: null, x: 0.5, y: 0.5, pinned: false, remembered: {},
};
let panels = [];
const narrow = matchMedia("(max-width: 48rem)");
let loading = null;

// ---- talking to the server

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new Error("The explorer does not answer. Is `softfree explore` still running?");
  }
  if (response.ok) return response;
  const detail = await response.json().then((answer) => answer.detail, () => null);
  throw new Error(typeof detail === "string" ? detail : `The explorer failed (${response.status}).`);
}

function layerQuery(more = {}) {
  return new URLSearchParams({ ...state.captured, stage: state.layer.stage, block: state.layer.block, ...more });
}

function say(message) {
  $("message").textContent = message;
  $("message").hidden = !message;
}

// ---- a photo at a size: capture, then maps

async function load() {
  loading?.abort();
  const mine = loading = new AbortController();
  document.body.classList.add("busy");
  try {
    const wanted = { ...state.wanted };
    const response = await ask(`api/capture?${new URLSearchParams(wanted)}`, { signal: mine.signal });
    const { layers, top } = await response.json();
    if (mine !== loading) return;
    say("");
    state.captured = wanted;
    state.layers = layers;
    showPhoto(wanted.photo);
    showClasses(top);
    const { stage = layers[0].stage, block = -1 } = state.layer ?? state.remembered;
    state.remembered = {};
    // The user waits for the maps, so they come first.
    await chooseLayer(stage, block);
  } catch (problem) {
    if (problem.name !== "AbortError") say(problem.message);
  } finally {
    if (mine === loading) document.body.classList.remove("busy", "starting");
  }
}

function blocksOf(stage) {
  return state.layers.filter((layer) => layer.stage === stage);
}

// The layer of this stage and block; if there is none, of the first stage or the last block.
function chooseLayer(stage, block) {
  const blocks = blocksOf(blocksOf(stage).length ? stage : state.layers[0].stage);
  state.layer = blocks.find((layer) => layer.block === block) ?? blocks.at(-1);
  state.inverse = null;
  for (const id of ["residual", "kept", "curve"]) $(id).replaceChildren();  // what they said of another layer
  const heads = [...state.heads].filter((head) => head < state.layer.heads);
  state.heads = new Set(heads.length || !state.heads.size ? heads : [0, 1].slice(0, state.layer.heads));
  $("warning").textContent = state.layer.warning ? `This layer ${state.layer.warning}.` : "";
  showControls();
  buildMaps();
  fetchInverse();
  return refresh();
}

let moving = null, moved = false;

// One request at a time. When it is answered, only the newest position is requested, and those in between are skipped.
// Ends when the newest is drawn.
function refresh() {
  if (!state.layer) return Promise.resolve();
  moved = true;
  moving ??= followNewest().finally(() => { moving = null; });
  return moving;
}

async function followNewest() {
  while (moved) {
    moved = false;
    try {
      await fetchMaps();
    } catch (problem) {
      say(problem.message);
    }
  }
  remember();
}

// ---- the address bar: the current view survives a reload

function remember() {
  const { captured, layer, x, y } = state;
  const heads = [...state.heads].sort((a, b) => a - b).join(".");
  const fields = { ...captured, stage: layer.stage, block: layer.block, heads, x: x.toFixed(3), y: y.toFixed(3) };
  history.replaceState(null, "", `#${new URLSearchParams(fields)}`);
}

// The view in the address, as far as this explorer has it.
function recall() {
  const fields = new URLSearchParams(location.hash.slice(1));
  const number = (name, least, most) => {
    const value = fields.has(name) ? Number(fields.get(name)) : NaN;
    return value >= least && value <= most ? value : undefined;
  };
  const model = number("model", 0, state.setup.models.length - 1);
  const heads = (fields.get("heads") ?? "").split(".").filter(Boolean).map(Number).filter(Number.isInteger);
  return {
    model: Number.isInteger(model) ? model : 0, photo: fields.get("photo"), size: number("size", 1, 1 << 16),
    stage: number("stage", 1, 1 << 8), block: number("block", 1, 1 << 8), heads, x: number("x", 0, 1), y: number("y", 0, 1),
  };
}

async function fetchMaps() {
  const { layer, x, y } = state;
  const began = performance.now();
  const steps = layer.steps !== undefined && state.steps !== null ? { steps: state.steps } : {};
  const response = await ask(`api/maps?${layerQuery({ x, y, ...steps })}`);
  const content = await response.arrayBuffer();
  if (layer !== state.layer) return;
  draw(layer, content);
  placePatches(x, y);
  const took = performance.now() - began;
  $("speed").textContent = `Last maps: ${took.toFixed(0)} ms from request to drawing.`;
}

// ---- drawing

// The judgement of a map: it attends to something, to next to nothing, or to everything alike.
const JUDGED = ["", "next to nothing: ", "all alike: "];

function colourTable(stops) {
  const rgb = stops.map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  const table = new Uint32Array(256);
  for (let value = 0; value < 256; value++) {
    const place = (value / 255) * (rgb.length - 1);
    const low = Math.min(Math.floor(place), rgb.length - 2);
    const [r, g, b] = [0, 1, 2].map((c) => Math.round(rgb[low][c] + (place - low) * (rgb[low + 1][c] - rgb[low][c])));
    new Uint8Array(table.buffer, 4 * value, 4).set([r, g, b, 255]);
  }
  return table;
}

// `content`: smallest and largest value of every map as float32, the judgement of each as a byte, then the maps as
// bytes (variants, heads, H, W).
function draw(layer, content) {
  const [height, width] = layer.grid;
  const count = layer.variants.length * layer.heads;
  const ranges = new DataView(content, 0, 8 * count);
  for (const { variant, head, canvas, caption } of panels) {
    const index = variant * layer.heads + head;
    const values = new Uint8Array(content, 9 * count + index * height * width, height * width);
    const image = new ImageData(width, height);
    const pixels = new Uint32Array(image.data.buffer);
    for (let i = 0; i < values.length; i++) pixels[i] = COLOURS[values[i]];
    canvas.getContext("2d").putImageData(image, 0, 0);
    const [least, most] = [0, 4].map((at) => ranges.getFloat32(8 * index + at, true));
    const judged = JUDGED[new Uint8Array(content, 8 * count + index, 1)[0]];
    caption.textContent = `${judged}${short(least)} to ${short(most)}`;
  }
}

function short(value) {
  const digits = Math.abs(value) < 1e-3 ? value.toExponential(2) : value.toPrecision(3);
  return value === 0 ? "0" : digits.replace("-", "−").replace("e-", "e−");
}

function patchAt(x, y) {
  const [height, width] = state.layer.grid;
  return [Math.min(Math.floor(y * height), height - 1), Math.min(Math.floor(x * width), width - 1)];
}

function placePatches(x, y) {
  const [height, width] = state.layer.grid;
  const [row, column] = patchAt(x, y);
  for (const patch of document.querySelectorAll(".patch")) {
    Object.assign(patch.style, {
      left: `${(100 * column) / width}%`, top: `${(100 * row) / height}%`,
      width: `${100 / width}%`, height: `${100 / height}%`,
    });
  }
  return [row, column];
}

// A row for each head and a column for each attention, or the other way round if there are more heads: the longer
// side of the table goes along the longer side of a screen.
function buildMaps() {
  const { layer } = state;
  const shown = layer.variants.map((name, variant) => ({ name, variant })).filter(({ name }) => !isHidden(name));
  const heads = [...state.heads].sort((a, b) => a - b);
  panels = [];
  if (!heads.length || !shown.length) {
    const what = heads.length ? "attention" : "head";
    const button = element("button", { type: "button", id: "show-all" }, `Show every ${what}`);
    button.addEventListener("click", () => (heads.length ? showEveryAttention() : showEveryHead()));
    const words = element("p", { className: "nothing" }, `No ${what} is selected, so there is no map. `, button);
    $("maps").replaceChildren(words);
    return;
  }
  const across = heads.length > shown.length && !narrow.matches;
  const cells = [element("span")];
  const title = ({ name }) => element("div", { className: "title" }, name,
    element("small", {}, name === layer.kind ? "this model" : "what if"));
  const number = (head) => element("span", { className: "head" }, `head ${head + 1}`);
  const [rows, columns] = across ? [shown, heads] : [heads, shown];
  cells.push(...columns.map(across ? number : title));
  for (const row of rows) {
    cells.push(across ? title(row) : number(row));
    for (const column of columns) cells.push(buildMap(...(across ? [row, column] : [column, row])));
  }
  $("maps").style.setProperty("--columns", columns.length);
  $("maps").classList.toggle("across", across);
  $("maps").replaceChildren(...cells);
}

function buildMap({ name, variant }, head) {
  const [height, width] = state.layer.grid;
  const canvas = element("canvas", { width, height });
  const caption = element("figcaption");
  const image = element("img", { src: seenUrl(), alt: "", draggable: false });
  const map = element("div", { className: "map" }, image, canvas, element("span", { className: "patch" }));
  map.setAttribute("role", "img");
  map.setAttribute("aria-label", `${name}, head ${head + 1}`);
  panels.push({ name, variant, head, canvas, caption, image });
  return element("figure", {}, map, caption);
}

function showEveryHead() {
  state.heads = new Set(Array.from({ length: state.layer.heads }, (_, head) => head));
  rebuild();
}

function showEveryAttention() {
  state.hidden.clear();
  rebuild();
}

function rebuild() {
  showControls();
  buildMaps();
  refresh();
}

function isHidden(name) {
  return state.layer.variants.length > 1 && state.hidden.has(name);
}

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// ---- the inverse: Newton's steps, or what a solve keeps

async function fetchInverse() {
  const { layer } = state;
  $("inverse").hidden = layer.landmarks === undefined;
  if (layer.landmarks === undefined) return;
  for (const id of ["newton", "steps", "own-steps"]) $(id).hidden = layer.steps === undefined;
  $("solve").hidden = layer.steps !== undefined;
  try {
    const inverse = await (await ask(`api/inverse?${layerQuery()}`)).json();
    if (layer !== state.layer) return;
    state.inverse = inverse;
    showInverse();
  } catch (problem) {
    say(problem.message);
  }
}

function showInverse() {
  const { layer, inverse } = state;
  const steps = layer.steps === undefined ? 0 : state.steps ?? layer.steps;
  $("steps").value = steps;
  $("steps-value").textContent = steps === layer.steps ? `${steps} (this model's)` : `${steps} (this model: ${layer.steps})`;
  if (!inverse) return;
  const { residuals, kept, shares } = inverse;
  const residual = residuals[steps];
  $("kept").textContent = `It inverts ${kept[steps]} of ${layer.landmarks} eigenvalues by more than half.`;
  let reached = "";
  if (layer.steps === undefined) {
    drawShares(shares);
  } else {
    reached = residual <= CONVERGED ? ", converged" : ", not converged: small eigenvalues are cut off";
    $("steps").setAttribute("aria-valuetext", `${steps} steps, residual ${short(residual)}`);
    drawResiduals(residuals, steps);
  }
  $("residual").textContent = `Residual |AYA − A| / |A|: ${short(residual)}${reached}.`;
}

// The frame of a curve: places across for 0 to `last`, and down for 0 at the top to 1 at the bottom.
function frame(last) {
  const [left, right, top, bottom] = [30, 230, 6, 56];
  return {
    across: (value) => left + ((right - left) * value) / last,
    down: (part) => top + (bottom - top) * part,
    line: (y) => shape("line", { class: "goal", x1: left, x2: right, y1: y, y2: y }),
    rows: (labels) => labels.map(([y, text]) => shape("text", { x: left - 3, y: y + 3, "text-anchor": "end" }, text)),
    columns: (labels) => labels.map(([x, text]) => shape("text", { x, y: 67, "text-anchor": "middle" }, String(text))),
  };
}

// The height covers residuals from 1 to 1e-6; smaller ones are drawn at the bottom.
function drawResiduals(residuals, steps) {
  const { across, down, line, rows, columns } = frame(residuals.length - 1);
  const at = (value) => down(Math.min(6, -Math.log10(Math.max(value, 1e-9))) / 6);
  $("curve").setAttribute("aria-label", "Residual against Newton steps");
  $("curve").replaceChildren(
    line(at(CONVERGED)),
    shape("polyline", { class: "line", points: residuals.map((value, step) => `${across(step)},${at(value)}`).join(" ") }),
    shape("circle", { class: "now", cx: across(steps), cy: at(residuals[steps]), r: 4 }),
    ...rows([[at(1), "1"], [at(CONVERGED), "1e−2"], [at(1e-6), "1e−6"]]),
    ...columns([0, 10, 20, 30, 40].map((step) => [across(step), step])),
  );
}

function drawShares(shares) {
  const { across, down, line, rows, columns } = frame(Math.max(1, shares.length - 1));
  const at = (share) => down(1 - share);
  const last = shares.length - 1;
  $("curve").setAttribute("aria-label", "How far each eigenvalue is inverted, the largest first");
  $("curve").replaceChildren(
    line(at(0.5)),
    shape("polyline", { class: "line", points: shares.map((share, place) => `${across(place)},${at(share)}`).join(" ") }),
    ...(last === 0 ? [shape("circle", { class: "now", cx: across(0), cy: at(shares[0]), r: 4 })] : []), // a line has two ends
    ...rows([[at(1), "1"], [at(0.5), "half"], [at(0), "0"]]),
    ...columns([...new Set([0, last >> 1, last])].map((place) => [across(place), place + 1])),
  );
}

function shape(tag, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

// ---- controls

function showControls() {
  const { layer, layers } = state;
  $("block").disabled = false;
  const stages = [...new Set(layers.map(({ stage }) => stage))];
  chips("stages", "radio", stages.map((stage) => ({
    text: String(stage), on: stage === layer.stage, change: () => chooseLayer(stage, -1),
  })));
  $("block").replaceChildren(...blocksOf(layer.stage).map(({ block, kind }) =>
    element("option", { value: block, selected: block === layer.block }, `${block}: ${kind}`)));
  chips("heads", "checkbox", Array.from({ length: layer.heads }, (_, head) => ({
    text: String(head + 1), on: state.heads.has(head), change: (on) => toggle(state.heads, head, on),
  })));
  $("variants-field").hidden = layer.variants.length === 1;
  chips("variants", "checkbox", layer.variants.map((name) => ({
    text: name, on: !state.hidden.has(name), change: (on) => toggle(state.hidden, name, !on),
  })));
  const [height, width] = layer.grid;
  const landmarks = layer.landmarks ? `, ${layer.landmarks} landmarks` : "";
  $("grid").textContent = `${height} × ${width} = ${(height * width).toLocaleString("en")} tokens${landmarks}`;
  $("compared").textContent = layer.variants.length === 1
    ? `This layer is ${layer.kind}: the maps show what it computes.`
    : "All attentions use the same queries, which this layer computed from the photo; in SOFT they are also the keys. "
      + `SOFT and ${layer.variants[1]} differ only in the normalisation of the inverse. Softmax shows what softmax attention `
      + "would do with these queries and keys; it is not a model trained with softmax."
      + (layer.steps === undefined ? "" : ` Newton steps affect SOFT and ${layer.variants[1]}.`);
  showInverse();
}

function chips(id, type, items) {
  const focused = [...$(id).querySelectorAll("input")].indexOf(document.activeElement);
  $(id).replaceChildren(...items.map(({ text, on, change }) => {
    const input = element("input", { type, name: id, checked: on });
    input.addEventListener("change", () => change(input.checked));
    return element("label", {}, input, element("span", {}, text));
  }));
  $(id).querySelectorAll("input")[focused]?.focus();
}

function toggle(set, item, on) {
  if (on) set.add(item); else set.delete(item);
  buildMaps();
  refresh();
}

function showClasses(top) {
  $("classes").hidden = !top;
  $("top").replaceChildren(...(top ?? []).map(({ label, probability }) => element("li", {},
    element("span", { className: "label" }, label), element("span", {}, `${(100 * probability).toFixed(1)} %`),
    element("progress", { max: 1, value: probability }))));
}

function showModel() {
  const { own_size: own, sizes, trained } = state.setup.models[state.wanted.model];
  $("untrained").hidden = trained;
  $("size").max = sizes.length - 1;
  $("size").value = own > sizes.at(-1) ? sizes.length - 1 : sizes.indexOf(own);
  Object.assign(state, { steps: null, layer: null, remembered: {}, heads: new Set([0, 1]) });
  chooseSize();
}

function chooseSize() {
  const { own_size: own, sizes } = state.setup.models[state.wanted.model];
  const chosen = state.wanted.size = sizes[$("size").value];
  $("size-value").textContent = `${chosen} × ${chosen}${chosen === own ? " (this model's)" : ""}`;
  $("size").setAttribute("aria-valuetext", `${chosen} pixels`);
}

// ---- photos

function photoUrl(id) {
  return `api/photos/${id}`;
}

/** What the captured model sees of its photo; maps are drawn over it. */
function seenUrl() {
  return `${photoUrl(state.captured.photo)}?model=${state.captured.model}`;
}

function addPhoto(id, name) {
  if (document.querySelector(`#photos [data-photo="${id}"]`)) return;
  const button = element("button", { type: "button", title: name }, element("img", { src: photoUrl(id), alt: name }));
  button.dataset.photo = id;
  button.addEventListener("click", () => choosePhoto(id));
  $("photos").append(button);
}

function choosePhoto(id) {
  state.wanted.photo = id;
  return load();
}

function showPhoto(id) {
  $("picture").src = seenUrl();
  for (const button of $("photos").children) button.setAttribute("aria-pressed", button.dataset.photo === id);
}

async function upload(file) {
  if (!file) return;
  const { bytes } = state.setup.limits;
  if (file.size > bytes) {
    say(`${file.name} has ${(file.size / 2 ** 20).toFixed(0)} MB; the limit is ${bytes / 2 ** 20} MB.`);
    return;
  }
  document.body.classList.add("busy");
  try {
    const { id } = await (await ask("api/photos", { method: "POST", body: file })).json();
    addPhoto(id, file.name);
    await choosePhoto(id);
  } catch (problem) {
    say(`${file.name}: ${problem.message}`);
  } finally {
    document.body.classList.remove("busy");
  }
}

// ---- the query

function moveTo(x, y, aloud = false) {
  if (!state.layer) return;
  [state.x, state.y] = [x, y].map((part) => Math.min(1, Math.max(0, part)));
  const [row, column] = placePatches(state.x, state.y);
  const [height, width] = state.layer.grid;
  $("where").textContent = aloud ? `Patch in row ${row + 1} of ${height}, column ${column + 1} of ${width}.` : "";
  refresh();
}

function follow(event) {
  const box = $("photo").getBoundingClientRect();
  moveTo((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
}

// ---- the picture as a file

// The photo with its patch, then the maps as shown, with their labels.
async function save() {
  if (!panels.length) return;
  const [side, gap, margin, text] = [240, 12, 16, 18];
  const heads = [...new Set(panels.map(({ head }) => head))], kinds = [...new Set(panels.map(({ name }) => name))];
  const [columns, rows] = heads.length > kinds.length ? [heads, kinds] : [kinds, heads];
  const label = (item) => (typeof item === "number" ? `head ${item + 1}` : item);
  const picture = element("canvas", {
    width: 2 * margin + (columns.length + 1) * (side + gap), height: 2 * margin + 3 * text + rows.length * (side + 2 * text),
  });
  const pen = picture.getContext("2d");
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, picture.width, picture.height);
  const write = (words, x, y, font = "13px system-ui, sans-serif", most = side) => {
    pen.fillStyle = "#1d1d22";
    pen.font = font;
    pen.fillText(words, x, y, most);
  };
  const { layer, captured } = state;
  const { title } = state.setup.models[captured.model];
  const place = `stage ${layer.stage}, block ${layer.block}, ${layer.grid.join(" × ")} tokens, photo at ${captured.size}²`;
  const top = margin + 3 * text;
  write(`Where the marked patch attends to: ${title}`, margin, margin + 14, "600 16px system-ui, sans-serif", picture.width - 2 * margin);
  drawFramed(pen, [$("picture")], margin, top, side);
  write(place, margin, top + side + text);
  for (const { name, head, canvas, caption, image } of panels) {
    const [column, row] = [columns.indexOf(columns === heads ? head : name), rows.indexOf(rows === heads ? head : name)];
    const [x, y] = [margin + (column + 1) * (side + gap), top + row * (side + 2 * text)];
    if (row === 0) write(label(columns[column]), x, top - 6, "600 13px system-ui, sans-serif");
    drawFramed(pen, [image, canvas], x, y, side);
    write(`${label(rows[row])}: ${caption.textContent}`, x, y + side + text - 2);
  }
  const blob = await new Promise((done) => picture.toBlob(done, "image/png"));
  const link = element("a", { href: URL.createObjectURL(blob), download: `attention_stage${layer.stage}.png` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

// A photo, grey if a map is drawn over it, and the marked patch.
function drawFramed(pen, [image, map], x, y, side) {
  pen.save();
  if (map) pen.filter = "grayscale(1)";
  pen.drawImage(image, x, y, side, side);
  pen.filter = "none";
  if (map) {
    pen.globalAlpha = 0.75;
    pen.imageSmoothingEnabled = false;
    pen.drawImage(map, x, y, side, side);
  }
  pen.restore();
  const [height, width] = state.layer.grid;
  const [row, column] = patchAt(state.x, state.y);
  const box = [x + (side * column) / width, y + (side * row) / height, side / width, side / height];
  for (const [style, wide] of [["#fff", 6], ["#e5202b", 3]]) {
    pen.strokeStyle = style;
    pen.lineWidth = wide;
    pen.strokeRect(...box);
  }
}

function pin(on) {
  state.pinned = on;
  $("pinned").hidden = !on;
}

// Moves from the centre of one patch to that of another; Enter holds it, Esc releases it.
function step(event) {
  if (event.key === "Enter" || event.key === "Escape") {
    pin(event.key === "Enter");
    return;
  }
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const move = moves[event.key];
  if (!move || !state.layer || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  const far = event.shiftKey ? 4 : 1;
  const [height, width] = state.layer.grid;
  const along = (part, count, by) => (Math.min(count - 1, Math.max(0, Math.floor(part * count) + by)) + 0.5) / count;
  pin(true);
  moveTo(along(state.x, width, far * move[0]), along(state.y, height, far * move[1]), true);
}

function listen() {
  const photo = $("photo");
  photo.addEventListener("pointermove", (event) => {
    if (event.pointerType === "mouse" ? !state.pinned : event.buttons) follow(event);
  });
  photo.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse" && event.button !== 0) return;
    pin(event.pointerType === "mouse" && !state.pinned);
    follow(event);
  });
  photo.addEventListener("keydown", step);
  // Regardless of the focus, since the photo may have been clicked.
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") pin(false); });
  // An error disappears with the next action; moving the mouse is not one.
  for (const action of ["click", "keydown", "change", "input", "paste", "drop"]) {
    document.addEventListener(action, () => say(""), { capture: true });
  }
  $("save").addEventListener("click", save);
  narrow.addEventListener("change", () => { if (state.layer) { buildMaps(); refresh(); } });
  $("model").addEventListener("change", () => { state.wanted.model = Number($("model").value); showModel(); load(); });
  $("block").addEventListener("change", () => chooseLayer(state.layer.stage, Number($("block").value)));
  $("all-heads").addEventListener("click", () => {
    if (!state.layer) return;
    if (state.heads.size < state.layer.heads) return showEveryHead();
    state.heads = new Set([0]);
    rebuild();
  });
  $("steps").addEventListener("input", () => { state.steps = Number($("steps").value); showInverse(); refresh(); });
  $("own-steps").addEventListener("click", () => { state.steps = null; showInverse(); refresh(); });
  $("size").addEventListener("input", chooseSize);
  $("size").addEventListener("change", load);
  $("file").addEventListener("change", () => { upload($("file").files[0]); $("file").value = ""; });
  document.addEventListener("paste", (event) => upload(event.clipboardData.files[0]));
  document.addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("dropping"); });
  document.addEventListener("dragleave", () => document.body.classList.remove("dropping"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dropping");
    upload(event.dataTransfer.files[0]);
  });
}

async function start() {
  try {
    state.setup = await (await ask("api/setup")).json();
  } catch (problem) {
    say(problem.message);
    return;
  }
  const { models, photos, limits } = state.setup;
  const { model, photo, size, stage, block, heads, x = 0.5, y = 0.5 } = recall();
  $("model").replaceChildren(...models.map(({ title }, index) => element("option", { value: index }, title)));
  $("model").disabled = false;
  $("model").value = model;
  $("steps").max = limits.steps;
  for (const { id, name } of photos) addPhoto(id, name);
  listen();
  state.wanted.model = model;
  showModel();
  const { sizes } = models[model];
  if (sizes.includes(size)) {
    $("size").value = sizes.indexOf(size);
    chooseSize();
  }
  Object.assign(state, { remembered: stage ? { stage, block } : {}, x, y });
  if (heads.length) state.heads = new Set(heads);
  if (photo && !photos.some(({ id }) => id === photo) && await isKept(photo)) addPhoto(photo, "your photo");
  const known = document.querySelector(`#photos [data-photo="${CSS.escape(photo ?? "")}"]`);
  choosePhoto(known ? photo : photos[0].id);
}

// The server keeps opened photos for a while.
async function isKept(photo) {
  return ask(photoUrl(encodeURIComponent(photo))).then(() => true, () => false);
}

start();
