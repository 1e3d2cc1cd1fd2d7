// The page: receives changes and redraws the affected parts.

const live = document.body.dataset.mode === "live";
const state = { version: 0, runs: {}, together: null };
const SECONDS_BETWEEN = 1;

function take(news) {
  state.version = news.version;
  state.made = news.made;
  state.together = news.together || state.together;
  Object.assign(meanings, state.together.meanings);
  for (const [id, parts] of Object.entries(news.runs)) state.runs[id] = { ...state.runs[id], ...parts };
}

function runsInOrder() {
  const { order, labels, names } = state.together;
  return order.map((id, i) => ({ id, label: labels[i], name: names[i], colour: colour(i), dash: dashes(i), ...state.runs[id] }));
}

function drawAll() {
  const runs = runsInOrder();
  const axes = Object.keys(AXES).filter((axis) => runs.some((run) => most(run.metrics?.axes?.[axis] || [0]) > 0));
  if (axes.length && !axes.includes(view.axis)) view.axis = axes.includes("update") ? "update" : axes[0];
  drawHead(runs);
  drawBar(runs, axes);
  const curves = curveSections(runs);
  const success = successSection(runs);
  const sections = [
    // videos come before dozens of curves
    mediaSection(runs, "videos", "videos", "Videos", "Failures first, then the newest.", videoCard),
    mediaSection(runs, "strips", "strips", "Predicted and true frames", "Left: predicted by the world model; right: the true frame. One row per camera.", stripCard),
    // without a success rate, evaluations matter most
    success || curves.evaluation, curves.learning, success && curves.evaluation, curves.rewards, curves.world,
    timelineSection(runs), stalenessSection(runs), curves.speed,
    settingsSection(runs, state.together), systemSection(runs),
  ].filter(Boolean);
  drawSections(sections);
  drawFoot(runs);
}

function drawHead(runs) {
  const same = (name) => new Set(runs.map((run) => run.about?.[name])).size === 1 && runs[0].about?.[name];
  const subject = [same("phase"), same("task")].filter(Boolean).join(" · ");
  const title = runs.length > 1 ? `${runs.length} runs${subject ? " of " + subject : ""}` : subject || runs[0].name;
  document.title = `${title} – sparring`;
  document.getElementById("head").replaceChildren(
    html("p", { class: "brand" }, html("b", {}, "sparring"), live ? html("span", { id: "pulse", class: "live" }, "live") : " report"),
    html("h1", {}, title),
    html("div", { class: "grid runs" }, ...runs.map((run) => runCard(run, runs.length > 1))));
}

function drawBar(runs, axes) {
  const choose = (axis) => html("button", { type: "button", "aria-pressed": String(view.axis === axis), onclick: () => { view.axis = axis; drawAll(); } }, AXES[axis].label);
  const legend = runs.length > 1 ? runs.map((run) => html("button", { type: "button", class: "legend", style: `--own:${run.colour}`, "aria-pressed": String(!view.hidden.has(run.id)), title: "show or hide this run",
    onclick: () => { view.hidden.has(run.id) ? view.hidden.delete(run.id) : view.hidden.add(run.id); drawAll(); } }, html("span", { class: "swatch" }), run.label)) : [];
  const bar = document.getElementById("bar");
  // a slider that is being moved stays
  const slider = bar.querySelector("input") || html("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: view.smooth, "aria-label": "smoothing of the curves", oninput: (event) => { view.smooth = Number(event.target.value); drawAll(); } });
  const key = JSON.stringify([axes, view, [...view.hidden], runs.map((run) => run.label)]);
  if (bar.key === key) return;
  bar.key = key;
  const smooth = bar.querySelector(".smooth") || html("label", { class: "smooth" }, "smooth", slider, html("output", {}));
  smooth.querySelector("output").textContent = view.smooth ? view.smooth.toFixed(2) : "off";
  const groups = [legend.length ? html("div", { class: "group" }, ...legend) : null, axes.length > 1 ? html("div", { class: "group choice", role: "group", "aria-label": "x axis of the curves" }, ...axes.map(choose)) : null];
  for (const old of [...bar.children]) if (old !== smooth) old.remove();
  bar.prepend(...groups.filter(Boolean));
  if (!smooth.isConnected) bar.append(smooth);
  bar.hidden = !axes.length;
}

// sections and grids keep their elements, so that a video keeps playing and a tooltip stays
function drawSections(sections) {
  const nodes = sections.map(({ id, title, lead, nodes }) => {
    const kept = drawing(`section ${id}`, () => ({ body: html("div", { class: "body" }), lead: html("p", { class: "lead" }) }));
    kept.node = kept.node || html("section", { id, "aria-labelledby": `${id}-title` }, html("h2", { id: `${id}-title` }, title), kept.lead, kept.body);
    kept.lead.textContent = lead || "";
    settle(kept.body, nodes.map((node, i) => (node.kind === undefined ? node : gridElement(`${id} ${i}`, node))));
    return kept.node;
  });
  if (!nodes.length) nodes.push(note("Nothing to show yet. ", live ? "This page refreshes every second." : "The run wrote no metrics."));
  settle(document.getElementById("main"), nodes);
}

function gridElement(key, { kind, nodes }) {
  const { node } = drawing(`grid ${key} ${kind}`, () => ({ node: html("div", { class: `grid ${kind}` }) }));
  settle(node, nodes);
  return node;
}

// give a parent these children, without moving those that are in place
function settle(parent, nodes) {
  for (const child of [...parent.childNodes]) if (!nodes.includes(child)) child.remove();
  nodes.forEach((node, i) => {
    if (parent.childNodes[i] !== node) parent.insertBefore(node, parent.childNodes[i] || null);
  });
}

function drawFoot(runs) {
  const damaged = runs.flatMap((run) => (run.about?.damage || []).map((what) => `${run.label}: ${what}.`));
  const made = new Date(state.made * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
  document.getElementById("foot").replaceChildren(...damaged.map((text) => note(text)), html("p", {}, `${live ? "Last read" : "Made"} ${made} by sparring ${state.together.sparring}. ${live ? "" : "Everything is in this file; it needs no network."}`));
}

async function follow() {
  const pulse = () => document.getElementById("pulse");
  try {
    const answer = await fetch(`data.json?since=${state.version}`);
    const news = await answer.json();
    const changed = news.together || Object.keys(news.runs).length;
    take(news);
    if (changed) drawAll();
    pulse().className = "live";
    pulse().textContent = "live";
  } catch (error) {
    // no answer, or the answer of a proxy
    if (!(error instanceof TypeError || error instanceof SyntaxError)) throw error;
    pulse().className = "live lost";
    pulse().textContent = "no answer: is sparring watch still running?";
  }
  setTimeout(follow, 1000 * SECONDS_BETWEEN);
}

take(JSON.parse(document.getElementById("content").textContent));
drawAll();
if (live) setTimeout(follow, 1000 * SECONDS_BETWEEN);
addEventListener("scroll", () => tip.hide(), { passive: true });
addEventListener("pointerdown", (event) => event.target.closest(".plot") || tip.hide());
