const SHADES = {
  advantage: { column: "advantages", label: "advantage" },
  value: { column: "values", label: "value" },
  kl: { column: "kl", label: "log-prob − reference" },
};
const KINDS = { train: "training", eval: "evaluation" };
const view = { kind: "train", rollout: null, row: 0, shade: "advantage", token: 0 };

const difference = (a, b) => a.map((value, i) => (isNumber(value) && isNumber(b[i]) ? value - b[i] : null));
for (const sample of run.samples) sample.kl = difference(sample.logProbs, sample.refLogProbs);

const ofKind = (kind) => run.samples.filter((sample) => sample.kind === kind);
const rolloutsOf = (kind) => [...new Set(ofKind(kind).map((sample) => sample.rollout))];
const listed = () => ofKind(view.kind).filter((sample) => sample.rollout === view.rollout);
const hasColumn = (sample, shade) => sample[SHADES[shade].column].some(isNumber);

function segmented(label, choices, choose) {
  const group = element("div", { class: "segments", role: "group", "aria-label": label });
  for (const [value, text] of Object.entries(choices)) {
    const button = element("button", { type: "button", "data-value": value }, text);
    button.addEventListener("click", () => { choose(value); render(); });
    group.append(button);
  }
  return group;
}

function press(group, value, enabled) {
  for (const button of group.children) {
    button.setAttribute("aria-pressed", String(button.dataset.value === value));
    button.disabled = !enabled(button.dataset.value);
  }
}

function buildControls() {
  const slider = element("input", { type: "range", min: 0, step: 1, "aria-label": "Rollout of the samples" });
  const output = element("output", {});
  const step = (text, label, by) => {
    const button = element("button", { type: "button", class: "plain", "aria-label": label }, text);
    button.addEventListener("click", () => { chooseRollout(rolloutsOf(view.kind).indexOf(view.rollout) + by); render(); });
    return button;
  };
  const [previous, next] = [step("‹", "Earlier rollout", -1), step("›", "Later rollout", 1)];
  slider.addEventListener("input", () => { chooseRollout(Number(slider.value)); render(); });
  const kinds = segmented("Kind of samples", KINDS, chooseKind);
  const shades = segmented("Shade tokens by", { advantage: "advantage", value: "value", kl: "KL" }, (value) => { view.shade = value; });
  const label = (text) => element("span", { class: "label" }, text);
  const bar = element("div", { class: "card controls" },
    element("div", { class: "control grow" }, label("Rollout"), output, previous, slider, next),
    element("div", { class: "control" }, kinds), element("div", { class: "control" }, label("Shade by"), shades));
  return { bar, slider, output, previous, next, kinds, shades };
}

function chooseRollout(position) {
  const ids = rolloutsOf(view.kind);
  view.rollout = ids[Math.min(ids.length - 1, Math.max(0, position))];
  view.row = Math.min(view.row, listed().length - 1);
  view.token = 0;
}

function chooseKind(kind) {
  view.kind = kind;
  const ids = rolloutsOf(kind);
  // stay near the rollout that was shown
  const near = ids.reduce((best, id) => (Math.abs(id - view.rollout) < Math.abs(best - view.rollout) ? id : best), ids[0]);
  chooseRollout(ids.indexOf(near));
}

function renderControls(controls) {
  const ids = rolloutsOf(view.kind);
  const position = ids.indexOf(view.rollout);
  controls.slider.max = ids.length - 1;
  controls.slider.value = position;
  controls.slider.setAttribute("aria-valuetext", `rollout ${view.rollout}`);
  controls.output.textContent = view.rollout;
  controls.previous.disabled = position === 0;
  controls.next.disabled = position === ids.length - 1;
  press(controls.kinds, view.kind, (kind) => ofKind(kind).length > 0);
  const sample = listed()[view.row];
  press(controls.shades, hasColumn(sample, view.shade) ? view.shade : null, (shade) => hasColumn(sample, shade));
}

function renderList(list) {
  list.replaceChildren(...listed().map((sample, row) => {
    const line = (kind, text) => element("span", { class: kind }, text.trim().replace(/\s+/g, " "));
    const from = sample.dataSet && run.evalSets.length > 1 ? `${sample.dataSet}: ` : "";
    const text = element("span", { class: "text" }, line("of-prompt", from + sample.prompt), line("of-response", sample.response));
    const button = element("button", { type: "button", "aria-current": String(row === view.row) },
      element("span", { class: "reward", title: "reward" }, formatReward(sample.reward)), text);
    button.addEventListener("click", () => { view.row = row; view.token = 0; render(); list.children[row].focus(); });
    return button;
  }));
}

// One scale for all samples of a rollout, so that their colours compare.
function shadeLimit(shade) {
  const sizes = listed().flatMap((sample) => sample[SHADES[shade].column]).filter(isNumber).map(Math.abs);
  return sizes.reduce((a, b) => Math.max(a, b), 0) || 1;
}

function tint(value, limit) {
  if (!isNumber(value) || value === 0) return "";
  const strength = 0.6 * Math.min(1, Math.abs(value) / limit);
  return `background-color:rgba(var(${value < 0 ? "--negative" : "--positive"}), ${strength.toFixed(3)})`;
}

function tokenElement(sample, i, limit) {
  const masked = sample.mask.length > 0 && !sample.mask[i];
  const node = element("span", { class: `token${masked ? " masked" : ""}${i === view.token ? " current" : ""}`, tabindex: i === view.token ? 0 : -1, role: "option", "data-token": i });
  // a line break keeps its effect and shows a mark
  sample.tokens[i].split("\n").forEach((piece, k) => {
    if (k > 0) node.append(element("span", { class: "mark", "aria-hidden": "true" }, "↵"), "\n");
    node.append(piece);
  });
  if (!masked && hasColumn(sample, view.shade)) node.setAttribute("style", tint(sample[SHADES[view.shade].column][i], limit));
  return node;
}

// three decimals, so that a list of rewards lines up
const formatReward = (value) => (isNumber(value) && Math.abs(value) < 1000 ? value.toFixed(3).replace("-", "−") : format(value));
const visible = (text) => text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "␣");

function renderReadout(readout, sample) {
  const i = view.token;
  if (sample.tokens.length === 0) return readout.replaceChildren();
  const masked = sample.mask.length > 0 && !sample.mask[i];
  const entries = [["token", `${visible(sample.tokens[i])}${masked ? " (masked)" : ""}`]];
  for (const [name, column] of [["log-prob", "logProbs"], ["ref log-prob", "refLogProbs"], ["value", "values"], ["advantage", "advantages"], ["return", "returns"]]) {
    if (sample[column].length) entries.push([name, format(sample[column][i])]);
  }
  return readout.replaceChildren(...entries.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

function buildScale(sample) {
  if (!hasColumn(sample, view.shade)) return element("p", { class: "hint" }, "No per-token figures were computed for this sample.");
  const limit = shadeLimit(view.shade);
  return element("div", { class: "scale" }, `${SHADES[view.shade].label} ${format(-limit)}`, element("span", { class: "ramp" }), format(limit));
}

function wireTokens(response, readout, sample) {
  const select = (i, focus) => {
    const next = Math.min(sample.tokens.length - 1, Math.max(0, i));
    response.children[view.token].classList.remove("current");
    response.children[view.token].tabIndex = -1;
    view.token = next;
    response.children[next].classList.add("current");
    response.children[next].tabIndex = 0;
    if (focus) response.children[next].focus();
    renderReadout(readout, sample);
  };
  const over = (event) => {
    const node = event.target.closest("[data-token]");
    if (node) select(Number(node.dataset.token), false);
  };
  for (const kind of ["pointerover", "click", "focusin"]) response.addEventListener(kind, over);
  response.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: view.token - 1, ArrowRight: view.token + 1, Home: 0, End: sample.tokens.length - 1 };
    if (!Object.hasOwn(moves, event.key)) return;
    event.preventDefault();
    select(moves[event.key], true);
  });
}

function renderDetail(detail) {
  const sample = listed()[view.row];
  const fact = (name, value) => element("span", {}, `${name} `, element("b", {}, String(value)));
  const limit = shadeLimit(view.shade);
  const response = element("div", { class: "response", role: "listbox", "aria-orientation": "horizontal", "aria-label": "Response tokens" },
    ...sample.tokens.map((_, i) => tokenElement(sample, i, limit)));
  if (sample.tokens.length === 0) response.textContent = sample.response;
  const readout = element("dl", { class: "readout", "aria-live": "polite", "aria-label": "Figures of the token" });
  detail.replaceChildren(
    element("div", { class: "facts" }, fact("reward", formatReward(sample.reward)), fact("sample", sample.id), fact("tokens", sample.tokens.length), fact("ended by", sample.finish),
      ...(sample.dataSet ? [fact("data set", sample.dataSet)] : [])),
    element("h3", { class: "field" }, "Prompt"), element("div", { class: "prompt" }, sample.prompt),
    element("h3", { class: "field" }, "Response"), readout, response, buildScale(sample));
  if (sample.tokens.length) wireTokens(response, readout, sample);
  renderReadout(readout, sample);
}

let render = () => {};

function buildViewer() {
  const hint = document.getElementById("samples-hint");
  if (run.samples.length === 0) {
    hint.textContent = "No samples were logged.";
    return;
  }
  hint.textContent = "Point at a token, tap it, or press ← → in the response to read its figures. Struck tokens are masked: they are not trained on.";
  const controls = buildControls();
  const list = element("div", { class: "card sample-list", role: "group", "aria-label": "Samples of the rollout" });
  const detail = element("article", { class: "card detail", "aria-label": "Sample" });
  document.getElementById("viewer").append(controls.bar, element("div", { class: "browser" }, list, detail));
  render = () => {
    renderControls(controls);
    renderList(list);
    renderDetail(detail);
  };
  view.kind = ofKind("train").length ? "train" : "eval";
  chooseRollout(Infinity);
  if (!hasColumn(listed()[0], "advantage") && hasColumn(listed()[0], "value")) view.shade = "value";
  render();
}

buildViewer();
