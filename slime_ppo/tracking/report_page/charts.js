// A curve per evaluation data set; the sampled one has the first colour.
function evalSeries() {
  return run.evalSets.map((name, i) => ({ key: `eval/${name}`, name, color: `--c${2 + (i % 3)}`, sparse: true }));
}

const CHARTS = [
  { title: "Reward", sub: "mean of the rollout's sampled answers, and of answers to held-out prompts", size: "wide", height: 270,
    series: [{ key: "rollout/raw_reward", name: "sampled", color: "--c1" },
             ...evalSeries()] },
  { title: "Loss", sub: "negative log-likelihood of given responses, nats per token", size: "wide", height: 270,
    series: [{ key: "train/nll", name: "training", color: "--c1" },
             { key: "eval/nll", name: "held-out", color: "--c2", sparse: true }] },
  { title: "KL to the reference", sub: "nats per token", zero: true, series: [{ key: "rollout/kl", name: "KL", color: "--c1" }] },
  { title: "Entropy", sub: "nats per token", zero: true, series: [{ key: "rollout/entropy", name: "entropy", color: "--c3" }] },
  { title: "Clip fractions", sub: "tokens where the clipped branch is active", zero: true, show: formatPercent,
    series: [{ key: "train/pg_clipfrac_low", name: "policy low", color: "--c1" },
             { key: "train/pg_clipfrac_high", name: "policy high", color: "--c3" },
             { key: "train/critic-value_clipfrac", name: "value", color: "--c2" }] },
  { title: "Response length", sub: "tokens: mean; band: shortest to longest", zero: true,
    series: [{ key: "rollout/response_len/mean", name: "mean", color: "--c1", band: ["rollout/response_len/min", "rollout/response_len/max"] }] },
  { title: "Value loss", sub: "of the critic", zero: true, series: [{ key: "train/critic-value_loss", name: "value loss", color: "--c2" }] },
  { title: "Explained variance", sub: "of the returns by the values; 1 is perfect", zero: true, floor: -1,
    series: [{ key: "train/critic-explained_variance", name: "explained", color: "--c2" }] },
  { title: "Engine–trainer log-prob gap", sub: "|engine − trainer| on the same tokens, nats, log scale", log: true,
    series: [{ key: "rollout/logprob_gap_mean", name: "mean", color: "--c1" }, { key: "rollout/logprob_gap_max", name: "largest", color: "--c4" }] },
  { title: "Gradient norms", sub: "before clipping", zero: true,
    series: [{ key: "train/grad_norm", name: "actor", color: "--c3" }, { key: "train/critic-grad_norm", name: "critic", color: "--c2" }] },
  { title: "Policy moved per update", sub: "KL of the old to the new policy, nats per token", zero: true,
    series: [{ key: "train/ppo_kl", name: "KL", color: "--c1" }] },
  // a flat line at 1 tells nothing
  { title: "Effective sample size", sub: "share of the tokens that count after the engine–trainer ratio", zero: true, below: 0.999,
    series: [{ key: "rollout/ess", name: "share", color: "--c4" }] },
];
const TIME_CHART = { title: "Time per phase", sub: "seconds of each rollout", size: "full", height: 230, zero: true, show: formatSeconds };
const MARGIN = { left: 46, right: 14, top: 10, bottom: 24 };

// The rollout under the pointer, shared by all charts: they move together.
const cursor = { index: null, listeners: [] };
function setCursor(index) {
  cursor.index = index;
  for (const listener of cursor.listeners) listener();
}
const shownIndex = () => (cursor.index === null ? run.rollouts.length - 1 : cursor.index);

function niceTicks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const ticks = [];
  for (let i = Math.floor(low / step + 1e-9); i * step < high + step * (1 - 1e-9); i += 1) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

function decadeTicks(values) {
  const low = Math.floor(Math.log10(Math.min(...values)));
  const high = Math.max(Math.ceil(Math.log10(Math.max(...values))), low + 1);
  const stride = Math.ceil((high - low) / 5);
  const ticks = [];
  for (let power = low; power < high + stride; power += stride) ticks.push(10 ** power);
  return ticks;
}

function yTicks(spec, values) {
  if (spec.log) return decadeTicks(values);
  let [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  if (spec.zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  if (low === high) high = low + (Math.abs(low) || 1);
  return niceTicks(low, high, 4);
}

function scales(spec, values, width, height) {
  const ticks = yTicks(spec, values);
  const place = spec.log ? Math.log10 : (value) => value;
  const [low, high] = [place(ticks[0]), place(ticks[ticks.length - 1])];
  const [first, last] = [run.rollouts[0], run.rollouts[run.rollouts.length - 1]];
  const inset = spec.bars ? (width - MARGIN.left - MARGIN.right) / run.rollouts.length / 2 : 6;
  const span = width - MARGIN.left - MARGIN.right - 2 * inset;
  return {
    ticks, width, height, left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom,
    x: (id) => MARGIN.left + inset + (first === last ? span / 2 : (span * (id - first)) / (last - first)),
    y: (value) => height - MARGIN.bottom - ((Math.max(place(value), low) - low) / (high - low)) * (height - MARGIN.top - MARGIN.bottom),
  };
}

function tickFormat(spec) {
  if (spec.log) return (value) => `1e${Math.round(Math.log10(value))}`.replace("-", "−");
  return spec.bars ? (value) => `${format(value)} s` : spec.show || format;
}

function drawFrame(svg, at, show) {
  for (const value of at.ticks) {
    svg.append(svgElement("line", { class: "gridline", x1: at.left, x2: at.right, y1: at.y(value), y2: at.y(value) }));
    svg.append(svgElement("text", { x: at.left - 8, y: at.y(value) + 4, "text-anchor": "end" }, show(value)));
  }
  svg.append(svgElement("line", { class: "axis", x1: at.left, x2: at.right, y1: at.bottom, y2: at.bottom }));
  const [first, last] = [run.rollouts[0], run.rollouts[run.rollouts.length - 1]];
  const wanted = first === last ? [first] : niceTicks(first, last, Math.max(2, Math.floor((at.right - at.left) / 90)));
  for (const id of wanted) {
    if (!Number.isInteger(id) || id < first || id > last) continue;
    svg.append(svgElement("line", { class: "axis", x1: at.x(id), x2: at.x(id), y1: at.bottom, y2: at.bottom + 4 }));
    svg.append(svgElement("text", { x: at.x(id), y: at.bottom + 17, "text-anchor": "middle" }, String(id)));
  }
}

function criticOnlySpans() {
  const spans = [];
  run.criticOnly.forEach((only, i) => {
    if (only && i > 0 && run.criticOnly[i - 1]) spans[spans.length - 1][1] = run.rollouts[i];
    else if (only) spans.push([run.rollouts[i], run.rollouts[i]]);
  });
  return spans;
}

function drawCriticOnly(svg, at) {
  for (const [from, to] of criticOnlySpans()) {
    const left = Math.max(at.left, at.x(from - 0.5));
    const width = Math.min(at.right, at.x(to + 0.5)) - left;
    svg.append(svgElement("rect", { class: "region", x: left, y: at.top, width, height: at.bottom - at.top }));
    if (width > 66) svg.append(svgElement("text", { x: left + width / 2, y: at.top + 14, "text-anchor": "middle" }, "critic only"));
  }
}

// Runs of [x, y]; a rollout without a value ends one, unless the series is sparse by nature.
function segments(values, at, spec, sparse) {
  const found = [[]];
  values.forEach((value, i) => {
    if (isNumber(value) && (!spec.log || value > 0)) found[found.length - 1].push([at.x(run.rollouts[i]), at.y(value)]);
    else if (!sparse && found[found.length - 1].length) found.push([]);
  });
  return found.filter((segment) => segment.length > 0);
}

const pathOf = (list) => list.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");

// Means of neighbours, about 100 of them: what the eye should follow when a run has hundreds of rollouts.
function smoothed(segment) {
  const size = Math.ceil(segment.length / 100);
  const means = [];
  for (let i = 0; i < segment.length; i += size) {
    const part = segment.slice(i, i + size);
    means.push([mean(part.map(([x]) => x)), mean(part.map(([, y]) => y))]);
  }
  return means;
}

function drawSeries(svg, series, at, spec) {
  const color = `var(${series.color})`;
  if (series.band) {
    const [low, high] = series.band.map((key) => segments(metric(key), at, spec, true)[0] || []);
    if (low.length && high.length) svg.append(svgElement("path", { class: "band", style: `fill:${color}`, d: `M${pathOf(low)}L${pathOf([...high].reverse())}Z` }));
  }
  for (const segment of segments(metric(series.key), at, spec, series.sparse)) {
    const dense = segment.length > 200;
    if (dense) svg.append(svgElement("path", { class: "line raw", style: `stroke:${color}`, d: `M${pathOf(segment)}` }));
    svg.append(svgElement("path", { class: "line", style: `stroke:${color}`, d: `M${pathOf(dense ? smoothed(segment) : segment)}` }));
    const dots = segment.length === 1 || (series.sparse && segment.length < 60) ? segment : [];
    for (const [x, y] of dots) svg.append(svgElement("circle", { cx: x, cy: y, r: 3.5, style: `fill:${color};stroke:var(--card);stroke-width:1.5` }));
  }
}

function drawBars(svg, at) {
  // neighbours share a bar (their mean) when there are more rollouts than pixels can show
  const perBar = Math.ceil((run.rollouts.length * 3) / (at.right - at.left));
  const slot = ((at.right - at.left) / run.rollouts.length) * perBar;
  for (let start = 0; start < run.rollouts.length; start += perBar) {
    const indices = run.rollouts.slice(start, start + perBar).map((_, i) => start + i);
    let base = 0;
    for (const phase of run.phases) {
      const seconds = mean(indices.map((i) => phase.seconds[i] || 0));
      if (seconds <= 0) continue;
      const gap = slot > 5 ? 0.1 * slot : 0;
      const x = at.left + (start / perBar) * slot + gap;
      const y = at.y(base + seconds);
      svg.append(svgElement("rect", { x: x.toFixed(2), y: y.toFixed(2), width: (slot - 2 * gap).toFixed(2),
        height: Math.max(0, at.y(base) - y).toFixed(2), style: `fill:${phaseColor(phase.name)}` }));
      base += seconds;
    }
  }
}

function phaseColor(name) {
  return `var(--p-${name.replace(/[^a-z]+/g, "-")}, var(--p-other))`;
}

function plottedValues(spec) {
  if (spec.bars) return run.rollouts.map((_, i) => run.phases.reduce((sum, phase) => sum + (phase.seconds[i] || 0), 0));
  const keys = spec.series.flatMap((series) => [series.key, ...(series.band || [])]);
  const values = keys.flatMap(metric).filter((value) => isNumber(value) && (!spec.log || value > 0));
  return spec.floor === undefined ? values : values.map((value) => Math.max(value, spec.floor));
}

function legendEntries(spec) {
  if (spec.bars) return run.phases.map((phase) => ({ name: phase.name, color: phaseColor(phase.name), values: phase.seconds, box: true }));
  return spec.series.filter((series) => points(series.key).length)
    .map((series) => ({ name: series.name, color: `var(${series.color})`, values: metric(series.key), box: false, sparse: series.sparse }));
}

const worthShowing = (spec, value) => (!spec.log || value > 0) && (spec.below === undefined || value < spec.below);

// A sparse series shows its latest value up to the cursor.
function valueAt(entry, index) {
  let i = index;
  while (entry.sparse && i > 0 && !isNumber(entry.values[i])) i -= 1;
  return entry.values[i];
}

function buildChart(spec) {
  const show = spec.show || format;
  const entries = legendEntries(spec);
  const at = element("span", { class: "at" });
  const legend = element("div", { class: "legend" });
  for (const entry of entries) {
    entry.output = element("b", {});
    legend.append(element("span", {}, element("i", { class: entry.box ? "box" : "", style: `background:${entry.color}` }), entry.name, entry.output));
  }
  const svg = svgElement("svg", { tabindex: 0, role: "slider", "aria-label": `${spec.title}, by rollout`,
    style: `flex-basis:${spec.height || 180}px`, "aria-valuemin": run.rollouts[0], "aria-valuemax": run.rollouts[run.rollouts.length - 1] });
  const card = element("div", { class: `card chart ${spec.size || ""}` }, element("div", { class: "chart-head" }, element("h3", {}, spec.title), at),
    element("p", { class: "chart-sub" }, spec.sub), legend, svg);
  const view = { scale: null, line: null };

  function update() {
    const index = shownIndex();
    at.textContent = `rollout ${run.rollouts[index]}`;
    for (const entry of entries) entry.output.textContent = show(valueAt(entry, index));
    svg.setAttribute("aria-valuenow", run.rollouts[index]);
    svg.setAttribute("aria-valuetext", `rollout ${run.rollouts[index]}: ${entries.map((e) => `${e.name} ${show(valueAt(e, index))}`).join(", ")}`);
    if (view.line === null) return;
    const x = view.scale.x(run.rollouts[index]);
    view.line.setAttribute("visibility", cursor.index === null ? "hidden" : "visible");
    for (const end of ["x1", "x2"]) view.line.setAttribute(end, x);
  }

  function draw() {
    const [width, height] = [svg.clientWidth, svg.clientHeight];
    if (width === 0 || (view.scale && view.scale.width === width && view.scale.height === height)) return;
    const scale = scales(spec, plottedValues(spec), width, height);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.replaceChildren();
    drawCriticOnly(svg, scale);
    drawFrame(svg, scale, tickFormat(spec));
    if (spec.bars) drawBars(svg, scale);
    else for (const series of spec.series) drawSeries(svg, series, scale, spec);
    view.line = svgElement("line", { class: "cursor", y1: scale.top, y2: scale.bottom });
    view.scale = scale;
    svg.append(view.line);
    update();
  }

  listen(svg, view);
  cursor.listeners.push(update);
  new ResizeObserver(() => requestAnimationFrame(draw)).observe(svg);
  update();
  return card;
}

function listen(svg, view) {
  const last = run.rollouts.length - 1;
  const point = (event) => {
    const x = event.clientX - svg.getBoundingClientRect().left;
    let best = 0;
    run.rollouts.forEach((id, i) => { if (Math.abs(view.scale.x(id) - x) < Math.abs(view.scale.x(run.rollouts[best]) - x)) best = i; });
    setCursor(best);
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") setCursor(null); });
  svg.addEventListener("blur", () => setCursor(null));
  svg.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: shownIndex() - 1, ArrowRight: shownIndex() + 1, Home: 0, End: last, Escape: null };
    if (!Object.hasOwn(moves, event.key)) return;
    event.preventDefault();
    setCursor(moves[event.key] === null ? null : Math.min(last, Math.max(0, moves[event.key])));
  });
}

function buildCharts() {
  const box = document.getElementById("charts");
  const hint = document.getElementById("curves-hint");
  if (run.rollouts.length === 0) {
    hint.textContent = "No rollout has finished yet.";
    return;
  }
  hint.textContent = "By rollout. Point at a chart, or focus it and press ← →, to read every chart at that rollout.";
  if (criticOnlySpans().length) hint.append(" ", element("span", { class: "key" }), "only the critic trains");
  const shown = CHARTS.filter((spec) => spec.series.some((series) => points(series.key).some(([, value]) => worthShowing(spec, value))));
  shown.forEach((spec, i) => {
    box.append(buildChart(spec));
    if (i === 0) box.append(...notesCard());
  });
  if (shown.length === 0) box.append(...notesCard());
  if (run.phases.length) box.append(buildChart({ ...TIME_CHART, bars: true }));
}

buildCharts();
