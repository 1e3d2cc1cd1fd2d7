"use strict";
// Elements, numbers and scales: what every drawing here is made of.

const SVG = "http://www.w3.org/2000/svg";

function make(parent, name, attributes = {}, ...children) {
  const node = parent === SVG ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const html = (name, attributes, ...children) => make(null, name, attributes, ...children);
const svg = (name, attributes, ...children) => make(SVG, name, attributes, ...children);

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);
const trimmed = (text) => (text.includes(".") ? text.replace(/0+$/, "").replace(/\.$/, "") : text);

function number(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9) return trimmed((value / 1e9).toPrecision(3)) + " G";
  if (size >= 1e6) return trimmed((value / 1e6).toPrecision(3)) + " M";
  if (size >= 1e4) return trimmed((value / 1e3).toPrecision(3)) + " k";
  if (size >= 1000) return value.toFixed(0);
  if (size < 1e-3) return value.toExponential(1).replace("e-", "e−").replace(/^-/, "−");
  return trimmed(value.toPrecision(3)).replace(/^-/, "−");
}

const percent = (value, digits = 1) => (known(value) ? trimmed((100 * value).toFixed(digits)) + " %" : "–");
const whole = (value) => (known(value) ? Math.round(value).toLocaleString("en") : "–");

function duration(seconds) {
  if (!known(seconds)) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 1e-3) return number(seconds * 1e6) + " µs";
  if (seconds < 1) return number(seconds * 1e3) + " ms";
  if (seconds < 60) return number(seconds) + " s";
  if (seconds < 3600) return Math.floor(seconds / 60) + " min " + Math.round(seconds % 60) + " s";
  if (seconds < 86400) return Math.floor(seconds / 3600) + " h " + Math.round((seconds % 3600) / 60) + " min";
  return Math.floor(seconds / 86400) + " d " + Math.round((seconds % 86400) / 3600) + " h";
}

function bytes(count) {
  if (count < 1000) return count + " bytes";
  return count >= 1e6 ? number(count / 1e6) + " MB" : number(count / 1e3) + " kB";
}

const SPELLED = { lr: "Learning rate", avg_loss: "Loss", avg_acc: "Accuracy", approx_kl: "KL divergence", ess: "Effective sample size", grad_norm: "Gradient norm" };

// name -> meaning, filled by the page
const meanings = {};
const explained = (name) => (name in meanings ? `${name}: ${meanings[name]}` : name);

// "train/policy_loss" -> "Policy loss"
function words(name) {
  const short = name.slice(name.lastIndexOf("/") + 1);
  if (short in SPELLED) return SPELLED[short];
  const last = name.slice(name.indexOf("/") + 1).replaceAll("_", " ").replaceAll("/", " · ");
  return last.charAt(0).toUpperCase() + last.slice(1);
}

function steps(low, high, count, sizes = null) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = (sizes || []).find((size) => size >= rough) || [1, 2, 2.5, 5, 10].map((m) => m * power).find((size) => size >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

const MINUTES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400];

const AXES = {
  total_steps: { label: "steps", text: (x) => whole(x) + " steps", tick: number },
  update: { label: "updates", text: (x) => "update " + whole(x), tick: number },
  episode: { label: "episodes", text: (x) => whole(x) + " episodes", tick: number },
  timestamp: { label: "time", text: duration, tick: clock, sizes: MINUTES },
};

function clock(seconds) {
  const [h, m, s] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.round(seconds % 60)];
  const two = (value) => String(value).padStart(2, "0");
  return h ? `${h}:${two(m)} h` : `${m}:${two(s)}`;
}

// eight colours that colour-blind people can distinguish (after Okabe and Ito), then the same dashed
const colour = (index) => `var(--run${index % 8})`;
const dashes = (index) => (index >= 8 ? "6 3" : null);

// the tooltip at the pointer; one drawing at a time
const tip = {
  of: null,
  show(drawing, x, y, title, lines) {
    if (tip.of !== drawing) tip.of?.leave();
    tip.of = drawing;
    const box = document.getElementById("tip");
    box.replaceChildren(
      html("div", { class: "when" }, title),
      ...lines.map((line) =>
        html("div", { class: "line" },
          html("span", { class: "swatch", style: `background:${line.colour}` }),
          html("span", { class: "label" }, line.label),
          html("b", {}, line.value),
          line.range ? html("span", { class: "range" }, line.range) : null)),
    );
    box.hidden = false;
    const width = box.offsetWidth, height = box.offsetHeight;
    const room = document.documentElement.clientWidth;
    const left = x + 14 + width > room - 8 ? x - 14 - width : x + 14;
    box.style.left = Math.max(8, Math.min(left, room - width - 8)) + "px";
    box.style.top = Math.max(8, Math.min(y - height - 12 < 8 ? y + 16 : y - height - 12, innerHeight - height - 8)) + "px";
  },
  hide() {
    document.getElementById("tip").hidden = true;
    tip.of?.leave();
    tip.of = null;
  },
};
