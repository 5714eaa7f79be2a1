// Draws the tree of a round. Where a node stands (row, depth) is in the data; how large rows and
// columns are is decided here, by the room there is and the zoom. page.js does all else.

const data = JSON.parse(document.getElementById("data").textContent);
const rounds = data.rounds;
const element = (id) => document.getElementById(id);
const canvas = element("canvas");
const svg = element("tree");

const FULL_ROW = 30, LIT_ROW = 25, LABEL_ROW = 18, LEAST_ROW = 0.6; // px; below LABEL_ROW no text
const FULL_COLUMN = 160, LEAST_COLUMN = 84, GAP = 26; // px; edges bend within the gap
const MARGIN = 16, TOP = 30, LARGEST = 2.5; // px, px, times the full size
const LIKELY = 0.05; // nodes that are at least as probable always have a label
const PLAY_MS = 1200;

const state = { round: 0, zoom: 1, timer: null, drawn: null };

// Text and probabilities.

const pen = document.createElement("canvas").getContext("2d");
const widths = new Map();

function widthOf(text) {
  if (!widths.has(text)) widths.set(text, pen.measureText(text).width);
  return widths.get(text);
}

function shortened(text, room) {
  if (widthOf(text) <= room) return text;
  const letters = [...text];
  while (letters.length && widthOf(letters.join("") + "…") > room) letters.pop();
  return letters.join("") + "…";
}

function percent(p) {
  if (p >= 0.995 && p < 1) return ">99%";
  return p >= 0.0005 ? `${(100 * p).toFixed(p >= 0.1 ? 0 : 1)}%` : "<0.1%";
}

function count(n, what) {
  return `${n} ${what}${n === 1 ? "" : "s"}`;
}

// Elements: attributes by name, children as strings or elements; text is never taken as markup.

function make(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function draw(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// The nodes of a round.

function nodesOf(round) {
  const n = round.nodes;
  return n.token_ids.map((tokenId, index) => ({
    index,
    tokenId,
    name: data.tokens[tokenId],
    parent: n.parents[index],
    depth: n.depths[index],
    row: n.rows[index],
    rank: n.ranks[index],
    p: n.probabilities[index],
    pathP: n.path_probabilities[index],
    state: n.states[index],
  }));
}

function ancestry(nodes, index) {
  const found = [];
  for (let i = index; i >= 0; i = nodes[i].parent) found.push(i);
  return found;
}

// Sizes: compressed until the tree fits, but rows that matter keep their text. Zooming in first
// spreads rows and columns to their full size, then magnifies.

function measure(nodes, zoom) {
  const numRows = Math.max(...nodes.map((n) => n.row)) + 1;
  const numColumns = Math.max(...nodes.map((n) => n.depth)) + 1;
  const matters = (n) => n.state !== "rejected" || n.pathP >= LIKELY;
  const lit = new Set(nodes.filter(matters).map((n) => n.row));
  const room = canvas.clientHeight - TOP - MARGIN;
  const even = room / numRows;
  const squeezed = (room - lit.size * LIT_ROW) / Math.max(1, numRows - lit.size);
  const fitRow = clamp(even >= LIT_ROW ? even : squeezed, LEAST_ROW, FULL_ROW);
  const fitColumn = clamp((canvas.clientWidth - 2 * MARGIN) / numColumns, LEAST_COLUMN, FULL_COLUMN);
  const full = Math.max(FULL_ROW / fitRow, FULL_COLUMN / fitColumn);
  const row = Math.min(FULL_ROW, fitRow * zoom);
  const column = Math.min(FULL_COLUMN, fitColumn * zoom);
  const heights = Array.from({ length: numRows }, (_, i) => (lit.has(i) ? Math.max(row, LIT_ROW) : row));
  const tops = [TOP];
  for (const height of heights) tops.push(tops.at(-1) + height);
  return {
    column,
    heights,
    tops,
    numColumns,
    magnified: Math.max(1, zoom / full),
    largestZoom: LARGEST * full,
    width: 2 * MARGIN + numColumns * column,
    height: tops.at(-1) + MARGIN,
  };
}

function clamp(value, least, most) {
  return Math.min(most, Math.max(least, value));
}

function place(node, sizes) {
  const rowHeight = sizes.heights[node.row];
  const labelled = rowHeight >= LABEL_ROW;
  const room = sizes.column - GAP;
  const chance = labelled && node.p !== null && room >= 90 ? percent(node.p) : "";
  const chanceWidth = chance ? 6.8 * chance.length + 6 : 0;
  const label = labelled ? shortened(node.name, room - 16 - chanceWidth) : "";
  return {
    label,
    chance,
    labelled,
    x: MARGIN + node.depth * sizes.column,
    y: sizes.tops[node.row] + rowHeight / 2,
    width: labelled ? Math.min(room, Math.max(22, widthOf(label) + 16 + chanceWidth)) : 14,
    height: Math.min(22, rowHeight * 0.78),
  };
}

// How strongly a node is drawn, from 0 to 1; small probabilities must still be seen.
function strength(node) {
  return node.state === "rejected" ? 0.2 + 0.8 * Math.sqrt(node.pathP) : 1;
}

// From the parent's column to the child; what siblings share is the parent's stem.
function drawEdge(node, to, from, sizes) {
  const bend = from.x + sizes.column - GAP, middle = (bend + to.x) / 2;
  const lit = node.state !== "rejected";
  const start = lit ? `M${from.x + from.width} ${from.y}H${bend}` : `M${bend} ${from.y}`;
  const d = `${start}C${middle} ${from.y} ${middle} ${to.y} ${to.x} ${to.y}`;
  const edge = draw("path", { class: `edge ${node.state}`, d, "data-node": node.index });
  edge.style.setProperty("--strength", strength(node));
  return edge;
}

function drawStem(node, at, sizes) {
  const d = `M${at.x + at.width} ${at.y}H${at.x + sizes.column - GAP}`;
  const stem = draw("path", { class: "stem", d, "data-node": node.index });
  stem.style.setProperty("--strength", strength(node));
  return stem;
}

function drawNode(node, at) {
  const rect = draw("rect", {
    x: at.x,
    y: at.y - at.height / 2,
    width: at.width,
    height: at.height,
    rx: Math.min(6, at.height / 2),
  });
  const group = draw("g", {
    class: `node ${node.state}${at.labelled ? " labelled" : ""}`,
    role: "treeitem",
    tabindex: node.index === 0 ? 0 : -1,
    "aria-level": node.depth + 1,
    "aria-label": described(node),
    "data-node": node.index,
  }, rect);
  group.style.setProperty("--strength", strength(node));
  if (at.label) group.append(draw("text", { x: at.x + 8, y: at.y }, at.label));
  if (at.chance) {
    const x = at.x + at.width - 7;
    group.append(draw("text", { class: "chance", x, y: at.y, "text-anchor": "end" }, at.chance));
  }
  return group;
}

function described(node) {
  const known = node.p === null ? "" : `, ${percent(node.p)} given its parent, ` +
    `${percent(node.pathP)} with its path, rank ${node.rank}`;
  return `${node.name}, depth ${node.depth}, ${node.state}${known}`;
}

function drawTree() {
  const nodes = nodesOf(rounds[state.round]);
  pen.font = `600 13px ${getComputedStyle(document.documentElement).getPropertyValue("--mono")}`;
  let sizes = measure(nodes, state.zoom);
  state.zoom = clamp(state.zoom, 1, sizes.largestZoom);
  sizes = measure(nodes, state.zoom);
  const places = nodes.map((node) => place(node, sizes));
  const depths = Array.from({ length: sizes.numColumns }, (_, depth) => draw(
    "text", { class: "depth", "aria-hidden": true, x: MARGIN + depth * sizes.column, y: 15 }, depth ? String(depth) : "depth 0",
  ));
  // What is drawn later lies on top: the probable over the less probable, then what is lit.
  const order = [...nodes].reverse().sort((a, b) => (a.state !== "rejected") - (b.state !== "rejected"));
  const edges = order.filter((n) => n.parent >= 0)
    .map((n) => drawEdge(n, places[n.index], places[n.parent], sizes));
  const parents = new Set(nodes.filter((n) => n.state === "rejected").map((n) => n.parent));
  const stems = [...parents].map((i) => drawStem(nodes[i], places[i], sizes));
  const marks = nodes.map((n) => drawNode(n, places[n.index]));
  svg.setAttribute("viewBox", `0 0 ${sizes.width} ${sizes.height}`);
  svg.setAttribute("width", sizes.width * sizes.magnified);
  svg.setAttribute("height", sizes.height * sizes.magnified);
  svg.replaceChildren(draw("g", { role: "none" }, ...depths, ...stems, ...edges, ...marks));
  const inReadingOrder = [...nodes].sort((a, b) => a.row - b.row || a.depth - b.depth);
  state.drawn = { nodes, places, sizes, order: inReadingOrder.map((n) => n.index) };
  element("zoom-out").setAttribute("aria-disabled", state.zoom <= 1);
  element("zoom-in").setAttribute("aria-disabled", state.zoom >= sizes.largestZoom);
  showDetails(null);
}

