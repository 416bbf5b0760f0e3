"use strict";
const run = JSON.parse(document.getElementById("payload").textContent);

// Text reaches the page only through textContent and setAttribute, never as markup.
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function svgElement(tag, attributes = {}, text = null) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== null) node.textContent = text;
  return node;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function format(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  let text;
  if (size === 0) text = "0";
  else if (size < 1e-3 || size >= 1e5) text = value.toExponential(1);
  else if (size >= 1000) text = String(Math.round(value));
  else text = size < 1 ? value.toFixed(size < 0.1 ? 4 : 3).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "") : String(Number(value.toPrecision(3)));
  return text.replace(/-/g, "−");
}

function formatPercent(value) {
  return isNumber(value) ? `${format(Number((100 * value).toPrecision(2)))}%` : "–";
}

function formatSeconds(value) {
  if (!isNumber(value)) return "–";
  if (value >= 7200) return `${format(value / 3600)} h`;
  if (value >= 120) return `${format(value / 60)} min`;
  return value > 0 && value < 0.1 ? `${format(1000 * value)} ms` : `${format(value)} s`;
}

function metric(name) {
  return Object.hasOwn(run.metrics, name) ? run.metrics[name] : [];
}

// [rollout id, value] of every rollout that has the metric
function points(name) {
  return metric(name).map((value, i) => [run.rollouts[i], value]).filter(([, value]) => isNumber(value));
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

const rollouts = (count) => `${count} ${count === 1 ? "rollout" : "rollouts"}`;

function tile(name, value, unit, detail) {
  const big = element("div", { class: "value" }, value);
  if (unit) big.append(element("small", {}, unit));
  return element("div", { class: "card tile" }, element("div", { class: "name" }, name), big, element("div", { class: "more" }, detail));
}

// two decimals: what a reward means, and what a tile has room for
const formatShort = (value) => (Math.abs(value) < 100 ? value.toFixed(2).replace(/^-(?=0\.00$)/, "").replace("-", "−") : format(value));

function rewardTile(name, key) {
  const found = points(key);
  if (found.length === 0) return null;
  const [first, last] = [found[0], found[found.length - 1]];
  if (found.length === 1) return tile(name, formatShort(first[1]), "", `at rollout ${first[0]}`);
  return tile(name, `${formatShort(first[1])} → ${formatShort(last[1])}`, "", `rollout ${first[0]} → ${last[0]}`);
}

function sampledRewardTile() {
  const found = points("rollout/raw_reward").map(([, value]) => value);
  const built = rewardTile("Sampled reward", "rollout/raw_reward");
  if (built && found.length >= 10) built.lastChild.textContent = `mean of the last 5: ${formatShort(mean(found.slice(-5)))}`;
  return built;
}

function klTile() {
  const found = points("rollout/kl");
  if (found.length === 0) return null;
  const whole = points("rollout/kl_trajectory");
  const detail = whole.length ? `${format(whole[whole.length - 1][1])} per response` : `rollout ${found[found.length - 1][0]}`;
  return tile("KL to the reference, last", format(found[found.length - 1][1]), "nats/token", detail);
}

function gapTile() {
  const found = points("rollout/logprob_gap_max");
  if (found.length === 0) return null;
  const largest = found.reduce((best, point) => (point[1] > best[1] ? point : best));
  return tile("Engine–trainer gap, largest", format(largest[1]), "nats", `at rollout ${largest[0]}`);
}

function timeTile() {
  const found = points("perf/step_time").map(([, value]) => value);
  if (found.length === 0) return null;
  const sorted = [...found].sort((a, b) => a - b);
  const middle = sorted[Math.floor(sorted.length / 2)];
  const total = found.reduce((sum, value) => sum + value, 0);
  return tile("Time per rollout, median", formatSeconds(middle), "", `${formatSeconds(total)} in ${rollouts(found.length)}`);
}

function buildHead() {
  document.getElementById("title").textContent = run.title;
  const done = run.rollouts.length;
  const state = done < run.numRollout ? `${done} of ${rollouts(run.numRollout)} so far` : rollouts(done);
  document.getElementById("subtitle").textContent = run.runFolder ? `${state} · run folder ${run.runFolder}` : state;
  const tiles = [
    sampledRewardTile(), ...run.evalSets.map((name) => rewardTile(`Evaluation: ${name}`, `eval/${name}`)), klTile(), gapTile(), timeTile(),
  ].filter((built) => built !== null);
  document.getElementById("tiles").append(...tiles);
}

function buildConfig() {
  const box = document.getElementById("config");
  if (run.config) box.querySelector("pre").textContent = run.config;
  else box.remove();
}

buildHead();
buildConfig();
