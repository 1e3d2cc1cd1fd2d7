// The sections of the page, from top to bottom. Each function returns the nodes of one section, or nothing to omit it.

const drawings = new Map();

function drawing(key, create) {
  if (!drawings.has(key)) drawings.set(key, create());
  return drawings.get(key);
}

function section(id, title, lead, ...nodes) {
  const there = nodes.filter(Boolean);
  return there.length ? { id, title, lead, nodes: there } : null;
}

// a description, not an element: the page keeps existing elements, because a video stops when it is moved
const grid = (nodes, kind = "") => (nodes.length ? { kind, nodes } : null);
const note = (...content) => html("p", { class: "note" }, ...content);

// --- runs -----------------------------------------------------------------------------------------------------------

const STATES = { running: "●", finished: "✓", interrupted: "❚❚", crashed: "✕", killed: "✕", waiting: "…", unknown: "?" };

function runCard(run, several) {
  const about = run.about, progress = about.progress || {};
  const facts = [["steps", whole(progress.env_steps)], ["updates", whole(progress.updates)], ["episodes", whole(progress.episodes)]];
  if (about.seconds > 0) facts.push(["time", duration(about.seconds)]);
  return html("article", { class: "card run", style: `--own:${run.colour}` },
    html("div", { class: "top" },
      html("h3", {}, several ? html("span", { class: "swatch" }) : null, several ? run.label : run.name),
      html("span", { class: `state ${about.state}` }, `${STATES[about.state] || ""} ${about.state}`)),
    html("p", { class: "path" }, several ? [about.phase, about.task, about.path].filter(Boolean).join(" · ") : about.path),
    about.why ? html("p", { class: "why" }, about.why) : null,
    about.last ? gauge(about) : null,
    about.state === "running" && known(progress.fraction)
      ? html("div", { class: "progress", role: "progressbar", "aria-valuenow": Math.round(100 * progress.fraction), "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": "progress of the run" }, html("i", { style: `width:${100 * progress.fraction}%` }), html("span", {}, percent(progress.fraction, 0)))
      : null,
    html("dl", {}, ...facts.filter(([, value]) => value !== "–").map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, value)))));
}

// the last success as a dot in its interval, the best as a mark
function gauge({ last, best }) {
  const place = (share) => `${(100 * share).toFixed(2)}%`;
  const interval = known(last.low) && known(last.high);
  const range = interval ? `95 % interval ${trimmed((100 * last.low).toFixed(1))} to ${percent(last.high)}` : "";
  return html("div", { class: "success" },
    html("div", { class: "big" }, percent(last.success_rate), html("small", {}, "success")),
    html("div", { class: "gauge", role: "img", "aria-label": `success ${percent(last.success_rate)}, ${range}` },
      interval ? html("i", { class: "interval", style: `left:${place(last.low)};width:${place(last.high - last.low)}` }) : null,
      best && known(best.success_rate) ? html("i", { class: "best", style: `left:${place(best.success_rate)}` }) : null,
      html("i", { class: "dot", style: `left:${place(last.success_rate)}` })),
    html("p", { class: "small" }, [range, known(last.episodes) ? `${whole(last.episodes)} episodes` : null,
      best && best.success_rate > last.success_rate ? `best ${percent(best.success_rate)} at update ${whole(best.update)}` : null].filter(Boolean).join(" · ")));
}

// --- curves -----------------------------------------------------------------------------------------------------------

const axisOf = (part) => part?.axes?.[view.axis];

function line(run, part, name, more = {}) {
  const curve = part?.curves?.[name];
  return curve ? { label: run.label, colour: run.colour, dash: run.dash, x: axisOf(part), y: curve.mean, low: curve.low, high: curve.high, ...more } : null;
}

const shown = (runs) => runs.filter((run) => !view.hidden.has(run.id));
const firstOf = (part, names) => names.find((name) => part?.curves?.[name]);
// success of training, now and in earlier versions
const ROLLED = ["rollout/success_rate", "success_rate"];
const areSeveral = (runs) => runs.length > 1;

// success of evaluations with Wilson intervals, of rollouts in a lighter line, and of random actions as a level
function successSeries(runs, before, rollouts) {
  return shown(runs).flatMap((run) => {
    const part = run.evaluations, curves = part?.curves || {};
    const name = areSeveral(runs) ? run.label + ", " : "";
    const low = curves[`${before}success_low`]?.mean, high = curves[`${before}success_high`]?.mean;
    return [
      line(run, part, `${before}success_rate`, { label: `${name}evaluation`, low, high: low && high, dots: true }),
      rollouts ? line(run, run.metrics, firstOf(run.metrics, ROLLED), { label: `${name}rollouts`, faint: true, smooth: true, low: null }) : null,
    ].filter(Boolean);
  }).concat(levels(runs, `${before}random_success_rate`));
}

// the result of random actions, as a dotted line
function levels(runs, name) {
  return shown(runs).map((run) => line(run, run.evaluations, name, { label: areSeveral(runs) ? `${run.label}, random actions` : "random actions", colour: areSeveral(runs) ? run.colour : "var(--muted)", low: null, level: true })).filter(Boolean);
}

function successSection(runs) {
  const evaluated = runs.some((run) => run.evaluations?.curves?.["eval/success_rate"]);
  const rolled = runs.some((run) => firstOf(run.metrics, ROLLED));
  const names = namesOf(runs, "evaluations");
  const tasks = names.filter((name) => /^eval\/.+\/success_rate$/.test(name));
  const nodes = [];
  if (evaluated || rolled) {
    const chart = drawing("success", () => new Curves("Success", "eval/success_rate", { height: 300, isShare: true }));
    chart.set(successSeries(runs, "eval/", true));
    nodes.push(chart.node);
  }
  if (rolled && !evaluated) nodes.push(note("There are no evaluations; the curve shows the sampled actions of training. Set ", html("code", {}, "evaluation.every"), " to evaluate during training."));
  nodes.push(grid(tasks.map((name) => {
    const chart = drawing(name, () => new Curves(words(name.replace(/\/success_rate$/, "")), name, { isShare: true }));
    chart.set(successSeries(runs, name.replace("success_rate", ""), false));
    return chart.node;
  })));
  const lead = evaluated ? "Held-out episodes with 95 % Wilson intervals; lighter: the sampled rollouts of training; dotted: random actions." : null;
  return section("success", "Success", lead, ...nodes);
}

const namesOf = (runs, part) => [...new Set(runs.flatMap((run) => Object.keys(run[part]?.curves || {})))].sort();

// names without a group are those of earlier versions
function groupOf(name) {
  if (name.includes("/")) return name.split("/")[0];
  if (/_seconds$|per_second$|_idle$|^(staleness|behind_|queue_depth|gradient_steps)/.test(name)) return "perf";
  return /^(success_rate|episode_reward|episode_length)$/.test(name) ? "rollout" : "train";
}

// runs with the same kind may be compared in one plot: losses of PPO and of a world model may not
function kindOf(run, part, name) {
  const kinds = run.about?.kinds || {};
  if (groupOf(name) === "world_model") return "";
  if (/reward|return_|advantage/.test(name)) return kinds[part === "evaluations" ? "evaluation" : "reward"] || "";
  return part === "metrics" && /loss|avg_acc|grad_norm/.test(name) ? kinds.loss || "" : "";
}

// groups of runs that may share an axis, each with its kind if there are several
function comparable(runs, part, name) {
  const groups = new Map();
  for (const run of runs.filter((run) => run[part]?.curves?.[name])) {
    const kind = kindOf(run, part, name);
    groups.set(kind, [...(groups.get(kind) || []), run]);
  }
  return groups.size > 1 ? [...groups] : [["", runs]];
}

function curvesSection(id, title, lead, runs, part, names, before = []) {
  const constant = [], single = [], nodes = [];
  for (const name of names) for (const [kind, among] of comparable(runs, part, name)) {
    const title = words(name) + (kind ? `, ${kind}` : "");
    const series = shown(among).map((run) => line(run, run[part], name, { smooth: part === "metrics", dots: part === "evaluations" })).filter((one) => one?.y.some(known));
    const values = series.flatMap((one) => [least(one.low || one.y), most(one.high || one.y)]);
    const flat = series.some((one) => part === "metrics" || one.y.length > 1) && Math.min(...values) === Math.max(...values);
    if (flat) {
      constant.push(html("span", {}, title + " ", html("b", {}, number(values[0]))));
      continue;
    }
    const random = part === "evaluations" ? levels(among, name.replace(/([^/]+)$/, "random_$1")) : [];
    // a single point is shown as text, not as a curve
    if (series.length && series.every((one) => one.y.filter(known).length === 1)) {
      const value = (one) => html("b", { style: `color:${one.colour}`, title: one.label }, number(lastOf(one.y)) + " ");
      single.push(html("span", {}, title + " ", ...series.map(value), random.length ? `random actions ${random.map((one) => number(lastOf(one.y))).join(", ")}` : null));
      continue;
    }
    series.push(...random);
    const isShare = /(success_rate|_acc|accuracy)$/.test(name) && values.every((value) => value >= 0 && value <= 1);
    const chart = drawing(`${part}:${name}:${kind}`, () => new Curves(title, name, { isShare }));
    chart.set(series);
    if (series.length) nodes.push(chart.node);
  }
  const same = constant.length ? html("p", { class: "constant" }, "Constant: ", ...constant) : null;
  const once = single.length ? html("p", { class: "constant" }, "Measured once: ", ...single) : null;
  return section(id, title, lead, grid([...before, ...nodes]), once, same);
}

const STALE = /staleness/;
const FIRST = ["episode_reward", "rollout/episode_reward", "avg_loss", "avg_acc", "rollout/episode_length", "episode_length"];
const rank = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);

// in finetune, avg_acc is the success rate
function isSuccess({ metrics }) {
  const text = (name) => JSON.stringify(metrics?.curves?.[name]?.mean);
  return !metrics?.curves?.avg_acc || text("avg_acc") === text(firstOf(metrics, ROLLED));
}

function curveSections(runs) {
  const isDrawn = runs.every(isSuccess) ? /(^|\/)(behind_\d+|success_rate|avg_acc)$/ : /(^|\/)(behind_\d+|success_rate)$/;
  const names = namesOf(runs, "metrics").sort((a, b) => rank(a) - rank(b)).filter((name) => !isDrawn.test(name));
  const of = (...groups) => names.filter((name) => groups.includes(groupOf(name)) && !STALE.test(name));
  const others = names.filter((name) => !["rollout", "train", "perf", "reward", "world_model"].includes(groupOf(name)));
  const drawnElsewhere = /\/(success_rate|(sampled_)?success_(low|high)|random_[^/]+)$|^eval\/episodes$/;
  const evaluations = namesOf(runs, "evaluations").filter((name) => name.startsWith("eval/") && !drawnElsewhere.test(name));
  return {
    evaluation: curvesSection("evaluation", "Evaluation", "Other metrics of the held-out episodes.", runs, "evaluations", evaluations),
    learning: curvesSection("learning", "Learning", bandLead(runs), runs, "metrics", [...of("rollout", "train"), ...others]),
    rewards: curvesSection("rewards", "Reward terms", "Mean reward of each term.", runs, "metrics", of("reward")),
    world: curvesSection("world", "World model", null, runs, "metrics", of("world_model")),
    speed: curvesSection("speed", "Speed", "Seconds are per update.", runs, "metrics", of("perf")),
  };
}

function bandLead(runs) {
  const width = Math.max(1, ...runs.map((run) => run.metrics?.width || 1));
  return width > 1 ? `A point is the mean of up to ${whole(width)} rows; the band is their range.` : null;
}

// --- pictures ---------------------------------------------------------------------------------------------------------

const AT_FIRST = 9;
const WORST_FIRST = { false: 0, null: 1, true: 2 };

function mediaSection(runs, kind, id, title, lead, card) {
  const there = shown(runs).filter((run) => run.media?.[`${kind}_found`]);
  if (!there.length) return null;
  const all = there.flatMap((run) => run.media[kind].map((one, place) => ({ run, one, place })));
  // videos of several runs alternate
  if (kind === "videos") all.sort((a, b) => WORST_FIRST[a.one.success] - WORST_FIRST[b.one.success] || a.place - b.place);
  const nodes = all.map(({ run, one }) => drawing(`${run.id}/${one.file}/${one.bytes}`, () => ({ node: card(run, one, areSeveral(runs)) })).node);
  const open = view.open.has(id) ? nodes.length : AT_FIRST;
  const more = nodes.length > open ? html("button", { type: "button", class: "more", onclick: () => { view.open.add(id); drawAll(); } }, `show ${nodes.length - open} more`) : null;
  return section(id, title, lead, note(mediaSummary(there, kind)), grid(nodes.slice(0, open), kind), more);
}

function mediaSummary(runs, kind) {
  const sum = (count) => runs.reduce((total, run) => total + count(run.media), 0);
  const found = sum((media) => media[`${kind}_found`]), chosen = sum((media) => media[kind].length);
  const size = sum((media) => media[kind].reduce((total, one) => total + one.bytes, 0));
  const count = (chosen < found ? `${chosen} of ${found} ${kind}` : `${found} ${kind}`).replace(/^1 (\w+)s$/, "1 $1");
  return live ? `${count}.` : `${count}, ${bytes(size)}; limit for videos and images of these runs: ${bytes(sum((media) => media.budget))} (--media-mb).`;
}

const KINDS = { rollout: "training", evaluation: "evaluation", eval: "sparring eval", prediction: "predicted | true", "pred vs gt": "predicted | true" };
const OUTCOMES = { true: ["succeeded", "✓ success"], false: ["failed", "✕ failure"] };

function caption(run, one, several) {
  const [state, outcome] = OUTCOMES[one.success] || [];
  const when = known(one.update) ? `update ${whole(one.update)}` : known(one.episode) ? `after ${whole(one.episode)} episodes` : null;
  const facts = [KINDS[one.kind] || one.kind, one.settings, when, one.task, known(one.steps) ? `${whole(one.steps)} steps` : null, known(one.reward) ? `reward ${number(one.reward)}` : null];
  return html("figcaption", {},
    outcome ? html("span", { class: `outcome ${state}` }, outcome) : null,
    several ? html("span", { class: "swatch", style: `background:${run.colour}`, title: run.label }) : null,
    html("span", {}, facts.filter(Boolean).join(" · ")));
}

// the browser gets a video when it scrolls into view
const sight = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (isIntersecting && !target.src) {
      // some browsers show nothing of an unplayed video unless a time is requested
      target.src = (target.source.startsWith("data:") ? URL.createObjectURL(blob(target.source)) : target.source) + "#t=0.1";
      sight.unobserve(target);
    }
  }
}, { rootMargin: "400px" });

function blob(uri) {
  const [head, body] = uri.split(",");
  return new Blob([Uint8Array.from(atob(body), (letter) => letter.charCodeAt(0))], { type: head.slice(5, head.indexOf(";")) });
}

function videoCard(run, one, several) {
  const video = html("video", { controls: true, muted: true, loop: true, playsinline: true, preload: "metadata", "aria-label": `video ${one.file}` });
  video.source = one.src;
  sight.observe(video);
  return html("figure", { class: "card" }, video, caption(run, one, several));
}

function stripCard(run, one, several) {
  return html("figure", { class: "card" }, html("img", { src: one.src, alt: `${one.kind}, ${one.file}` }), caption(run, one, several));
}

// --- stages -----------------------------------------------------------------------------------------------------------

const FINE = ["simulate", "infer"];

function timelineSection(runs) {
  const there = shown(runs).filter((run) => run.timeline);
  const nodes = there.flatMap((run, place) => {
    const lanes = timelineDrawings(run);
    if (!areSeveral(runs)) return lanes;
    // one fold per run, the first one open
    const fold = drawing(`${run.id}/lanes`, () => ({ node: html("details", { open: place === 0 }, html("summary", {}, run.label)) }));
    settle(fold.node, [fold.node.firstChild, ...lanes]);
    return [fold.node];
  });
  return section("stages", "Stages", "Active stages over time. Overlapping spans of robots and learner run in parallel; simulate, infer, reset and complete are parts of collect; gaps are waiting time.", ...nodes);
}

function timelineDrawings(run) {
  const { lanes, bin_seconds: bin, close_began: from } = run.timeline;
  const total = lanes[0].share.length * bin;
  const all = drawing(`${run.id}/whole`, () => new Lanes("The whole run", "timeline.jsonl"));
  // simulate and infer are written at the beginning only, rollouts always; stages that take almost no time are left out
  const rollouts = lanes.some((lane) => lane.stage === "collect");
  const worth = lanes.filter((lane) => lane.seconds > total / 200 && !(rollouts && FINE.includes(lane.stage)));
  all.set({ lanes: (worth.length ? worth : lanes).map(({ turns, ...lane }) => ({ ...lane, bin, of: lane.seconds / total })), end: total, from: 0, note: "height: share of the time" });
  const end = Math.max(0, ...lanes.flatMap((lane) => lane.turns.map((turn) => turn[1])));
  if (!end) return [all.node];
  const close = drawing(`${run.id}/close`, () => new Lanes("Close-up", "timeline.jsonl"));
  close.set({ lanes: lanes.filter((lane) => lane.turns.length).map((lane) => ({ ...lane, of: lane.seconds / total })), end, from, note: `${duration(end)}, from ${duration(from)} on` });
  return [all.node, close.node];
}

function stalenessSection(runs) {
  const rows = shown(runs).filter((run) => run.metrics?.behind?.length).map((run) => ({ label: run.label, colour: run.colour, bars: run.metrics.behind }));
  if (!rows.length) return null;
  const bars = drawing("behind", () => new Bars("Rollouts by updates behind", "behind_k", 150));
  bars.set(rows);
  const names = namesOf(runs, "metrics").filter((name) => STALE.test(name));
  return curvesSection("staleness", "Staleness", "Age of the weights that collected the training data, in updates.", runs, "metrics", names, [bars.node]);
}

// --- tables -----------------------------------------------------------------------------------------------------------

function table(heads, rows) {
  return html("div", { class: "card rows" }, html("table", {},
    html("thead", {}, html("tr", {}, ...heads.map((head) => html("th", { scope: "col" }, head)))),
    html("tbody", {}, ...rows.map(([key, ...values]) => html("tr", {},
      html("th", { scope: "row" }, key),
      ...values.map((value, i) => html("td", { "data-head": heads[i + 1] }, value ?? "–")))))));
}

function settingsSection(runs, together) {
  const { settings, columns } = together;
  const one = runs.length === 1;
  const heads = ["setting", ...(columns || runs.map((run) => run.label))];
  const lead = one ? "Settings that differ from the defaults." : "Settings that differ between the runs.";
  if (settings.length) return section("settings", "Settings", lead, table(heads, settings.map((row) => [row.key, ...row.values])));
  if (!one) return section("settings", "Settings", null, note("All runs have the same settings."));
  return columns ? section("settings", "Settings", null, note("All settings have their default values.")) : null;
}

const SYSTEM = { sparring: "sparring", python: "Python", torch: "torch", platform: "platform", cpus: "CPU cores", device: "device", gpu: "GPU", trainable: "trainable parameters", frozen: "frozen parameters", command: "command" };

function systemSection(runs) {
  const described = runs.filter((run) => run.about?.system);
  const rows = Object.entries(SYSTEM).map(([key, name]) => [name, ...described.map((run) => run.about.system[key])]);
  const there = rows.filter((row) => row.slice(1).some((value) => value !== null && value !== undefined));
  const cell = (value) => (typeof value === "number" ? whole(value) : value);
  return there.length ? section("system", "System", null, table(["", ...described.map((run) => run.label)], there.map(([name, ...values]) => [name, ...values.map(cell)]))) : null;
}
