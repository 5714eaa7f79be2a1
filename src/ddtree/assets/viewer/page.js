// Steps through the rounds of one generation and listens to keys and mouse; tree.js draws.

// Zoom and pan; `at` is the point of the canvas that stays where it is.

function zoomBy(factor, at = eye()) {
  const before = state.drawn.sizes;
  const row = rowAt((canvas.scrollTop + at.y) / before.magnified, before);
  const column = (canvas.scrollLeft + at.x) / before.magnified / before.column;
  state.zoom *= factor;
  redraw();
  const after = state.drawn.sizes;
  canvas.scrollLeft = column * after.column * after.magnified - at.x;
  canvas.scrollTop = yOf(row, after) * after.magnified - at.y;
}

// Where one looks: at the focused node, else at the end of the lit path.
function eye() {
  const { nodes, places, sizes } = state.drawn;
  const focused = document.activeElement.closest(".node");
  const lit = nodes.findLast((n) => n.state !== "rejected");
  const at = places[focused ? Number(focused.dataset.node) : lit.index];
  return {
    x: clamp(at.x * sizes.magnified - canvas.scrollLeft, 0, canvas.clientWidth),
    y: clamp(at.y * sizes.magnified - canvas.scrollTop, 0, canvas.clientHeight),
  };
}

function rowAt(y, sizes) {
  const next = sizes.tops.findIndex((top) => top > y);
  const row = next < 0 ? sizes.heights.length - 1 : Math.max(0, next - 1);
  return row + clamp((y - sizes.tops[row]) / sizes.heights[row], 0, 1);
}

function yOf(row, sizes) {
  const whole = Math.min(Math.floor(row), sizes.heights.length - 1);
  return sizes.tops[whole] + (row - whole) * sizes.heights[whole];
}

function showLitPath() {
  const { nodes, places, sizes } = state.drawn;
  const lit = nodes.filter((n) => n.state !== "rejected").map((n) => places[n.index]);
  const last = lit.at(-1), lowest = Math.max(...lit.map((p) => p.y));
  canvas.scrollLeft = Math.max(0, (last.x + last.width) * sizes.magnified + MARGIN - canvas.clientWidth);
  canvas.scrollTop = Math.max(0, lowest * sizes.magnified + 2 * FULL_ROW - canvas.clientHeight);
}

// Details of the node that is pointed at or has the focus; else what the colours mean.

function showDetails(index) {
  for (const old of svg.querySelectorAll(".traced, .pointed")) old.classList.remove("traced", "pointed");
  const details = element("details");
  if (index === null) {
    details.replaceChildren(...[
      ["root", ": the last token so far"], ["accepted", ""],
      ["bonus", ": the target's own next token"], ["rejected", ": the fainter, the less probable"],
    ].map(([name, more]) => make("span", { class: "key" }, make("span", { class: `swatch ${name}` }),
      make("span", {}, name, make("span", { class: "more" }, more)))));
    return;
  }
  const node = state.drawn.nodes[index];
  const fact = (name, value) => make("span", {}, `${name} `, make("b", {}, value));
  const facts = [make("b", { class: "token" }, node.name), make("span", {}, node.state), fact("id", node.tokenId)];
  if (node.p !== null) {
    facts.push(fact("p given parent", percent(node.p)), fact("p of path", percent(node.pathP)), fact("rank", node.rank));
  } else if (node.state === "bonus" && rounds[state.round].num_drafted) {
    facts.push(make("span", {}, "not drafted"));
  }
  details.replaceChildren(...facts, fact("depth", node.depth));
  for (const i of ancestry(state.drawn.nodes, index)) {
    for (const edge of svg.querySelectorAll(`.edge[data-node="${i}"]`)) edge.classList.add("traced");
  }
  svg.querySelector(`.node[data-node="${index}"]`).classList.add("pointed");
}

function nearest(event) {
  const box = svg.getBoundingClientRect(), { nodes, places, sizes } = state.drawn;
  const x = (event.clientX - box.left) / sizes.magnified, y = (event.clientY - box.top) / sizes.magnified;
  let found = null, least = 12;
  for (const { index } of nodes) {
    const at = places[index], distance = Math.abs(y - at.y);
    if (x >= at.x - 6 && x <= at.x + at.width + 6 && distance < least) [found, least] = [index, distance];
  }
  return found;
}

function focusNode(step) {
  const { order } = state.drawn;
  const focused = document.activeElement.closest(".node");
  const at = focused ? order.indexOf(Number(focused.dataset.node)) + step : 0;
  focusOn(order[clamp(at, 0, order.length - 1)]);
}

function focusOn(index) {
  for (const node of svg.querySelectorAll('.node[tabindex="0"]')) node.setAttribute("tabindex", -1);
  const next = svg.querySelector(`.node[data-node="${index}"]`);
  next.setAttribute("tabindex", 0);
  next.focus();
  next.scrollIntoView({ block: "nearest", inline: "nearest" });
}

// What stands beside the tree.

function showHeading() {
  const round = rounds[state.round], made = round.delivered.length;
  const facts = round.number === 0
    ? "the prompt is read, and the target says its first token"
    : round.num_drafted
      ? `${count(round.num_drafted, "node")}, ${made - 1} accepted, ${count(made, "token")} ` +
        `(${round.expected_tokens.toFixed(2)} expected)`
      : `not drafted, ${count(made, "token")}`;
  const name = round.number === 0 ? "Prefill" : `Round ${round.number} of ${rounds.length - 1}`;
  element("heading").replaceChildren(name, make("span", {}, make("span", { class: "dot" }, " · "), facts));
  element("slider").setAttribute("aria-valuetext", `${name}, ${facts}`);
}

function showText() {
  const pieces = [];
  for (const { number, delivered } of rounds.slice(0, state.round + 1)) {
    delivered.forEach(({ text }, i) => {
      const bonus = i === delivered.length - 1;
      const classes = number === state.round ? `now ${bonus ? "bonus" : "accepted"}` : "past";
      const piece = make("span", { class: classes, "data-round": number });
      // A line's end that is this round's own would not be seen.
      if (number === state.round && text.startsWith("\n")) piece.append(make("span", { class: "sign" }, "⏎"));
      piece.append(text);
      pieces.push(piece);
    });
  }
  element("text").replaceChildren(...pieces);
  element("text").scrollTop = element("text").scrollHeight;
}

function showTimeline() {
  const slider = element("slider");
  slider.max = rounds.length - 1;
  slider.style.setProperty("--num-rounds", rounds.length);
  const most = Math.max(...rounds.map((r) => r.delivered.length));
  element("bars").replaceChildren(...rounds.map(({ delivered }) => {
    const bar = make("i");
    bar.style.setProperty("--accepted-share", (delivered.length - 1) / most);
    bar.style.setProperty("--bonus-share", 1 / most);
    return bar;
  }));
}

function showSummary() {
  element("prompt").textContent = data.prompt;
  element("prompt").title = data.prompt;
  element("summary").replaceChildren(...data.summary.map(
    ([value, name]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)),
  ));
}

// Going from round to round.

function go(number) {
  state.round = clamp(number, 0, rounds.length - 1);
  const focused = svg.contains(document.activeElement);
  drawTree();
  svg.firstElementChild.classList.add("fresh");
  showLitPath();
  showHeading();
  showText();
  element("slider").value = state.round;
  [...element("bars").children].forEach((bar, i) => bar.classList.toggle("later", i > state.round));
  for (const id of ["first", "previous"]) element(id).setAttribute("aria-disabled", state.round === 0);
  for (const id of ["next", "last"]) element(id).setAttribute("aria-disabled", state.round === rounds.length - 1);
  history.replaceState(null, "", `#${state.round}`);
  if (focused) focusOn(0);
}

function play(wanted) {
  clearInterval(state.timer);
  state.timer = null;
  if (wanted) {
    go(state.round === rounds.length - 1 ? 0 : state.round + 1);
    state.timer = setInterval(() => {
      go(state.round + 1);
      if (state.round === rounds.length - 1) play(false);
    }, PLAY_MS);
  }
  element("play").setAttribute("aria-pressed", wanted);
  element("play").querySelector("span").textContent = wanted ? "Pause" : "Play";
}

function step(number) {
  play(false);
  go(number);
}

const KEYS = {
  ArrowLeft: () => step(state.round - 1),
  ArrowRight: () => step(state.round + 1),
  Home: () => step(0),
  End: () => step(rounds.length - 1),
  " ": () => play(state.timer === null),
  ArrowUp: () => focusNode(-1),
  ArrowDown: () => focusNode(1),
  "+": () => zoomBy(1.5),
  "=": () => zoomBy(1.5),
  "-": () => zoomBy(1 / 1.5),
  0: () => fit(),
};

function fit() {
  state.zoom = 1;
  redraw();
  showLitPath();
}

function redraw() {
  const focused = document.activeElement.closest(".node")?.dataset.node;
  drawTree();
  if (focused) focusOn(Number(focused));
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  // A slider has these keys already, a button its space, and a text scrolls.
  const at = event.target;
  if (at.id === "slider" && /^(Arrow|Home|End)/.test(event.key)) return;
  if (at.closest("button") && event.key === " ") return;
  if (at.id === "text" && /^Arrow(Up|Down)/.test(event.key)) return;
  const action = KEYS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

function listen() {
  document.addEventListener("keydown", onKey);
  element("slider").addEventListener("input", (event) => step(Number(event.target.value)));
  const clicks = {
    first: KEYS.Home, previous: KEYS.ArrowLeft, next: KEYS.ArrowRight, last: KEYS.End, play: KEYS[" "],
    "zoom-in": KEYS["+"], "zoom-out": KEYS["-"], "zoom-fit": KEYS[0],
  };
  for (const [id, action] of Object.entries(clicks)) element(id).addEventListener("click", action);
  element("text").addEventListener("click", (event) => {
    const round = event.target.closest("[data-round]")?.dataset.round;
    if (round) step(Number(round));
  });
  svg.addEventListener("focusin", (event) => {
    const node = event.target.closest(".node");
    if (node) showDetails(Number(node.dataset.node));
  });
  svg.addEventListener("focusout", () => showDetails(null));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const box = canvas.getBoundingClientRect();
    zoomBy(Math.exp(-event.deltaY / 300), { x: event.clientX - box.left, y: event.clientY - box.top });
  }, { passive: false });
  window.addEventListener("hashchange", () => step(roundOfAddress()));
  listenToPointer();
  new ResizeObserver(() => { redraw(); showLitPath(); }).observe(canvas);
}

function listenToPointer() {
  let from = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.pointerType === "touch") return; // touch pans by itself
    from = { x: event.clientX + canvas.scrollLeft, y: event.clientY + canvas.scrollTop };
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("panning");
  });
  canvas.addEventListener("pointermove", (event) => {
    if (from) canvas.scrollTo(from.x - event.clientX, from.y - event.clientY);
    else showDetails(nearest(event));
  });
  for (const end of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(end, () => { from = null; canvas.classList.remove("panning"); });
  }
  canvas.addEventListener("pointerleave", () => showDetails(null));
}

// The address says the round, so that one can be linked to; the prefill is little to begin with.
function roundOfAddress() {
  return /^#\d+$/.test(location.hash) ? Number(location.hash.slice(1)) : 1;
}

showSummary();
showTimeline();
listen();
go(roundOfAddress());
