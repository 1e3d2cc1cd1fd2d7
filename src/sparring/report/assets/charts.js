// Curves with bands, lanes of stages, bars. Each redraws itself when its width or its data changes.

const view = { axis: "total_steps", smooth: 0.6, hidden: new Set(), open: new Set() };

// gives every drawing its width, also at first: reading it from the browser between two drawings would be slow
const widths = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    target.chart.width = contentRect.width;
    target.chart.draw();
  }
});

class Drawing {
  constructor(title, name, height) {
    this.title = title;
    this.height = height;
    this.width = 0;
    this.value = html("span", { class: "value" });
    this.plot = html("div", { class: "plot" });
    this.node = html("figure", { class: "card chart", tabindex: 0 }, html("figcaption", {}, html("span", { title: explained(name) }, title), this.value), this.plot);
    this.plot.chart = this;
    widths.observe(this.plot);
    this.plot.addEventListener("pointermove", (event) => this.point(event.clientX, event.clientY));
    this.plot.addEventListener("pointerdown", (event) => this.point(event.clientX, event.clientY));
    // a tooltip opened by touch stays until the next tap
    this.plot.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && tip.hide());
    this.node.addEventListener("blur", () => tip.of === this && tip.hide());
    this.node.addEventListener("keydown", (event) => this.key(event));
  }

  leave() {
    this.cursor?.replaceChildren();
  }

  key() {}
}

// Curves over the chosen axis. A series: {label, colour, dash, x, y, low, high, faint, dots, smooth}.
class Curves extends Drawing {
  constructor(title, name, { height = 150, isShare = false } = {}) {
    super(title, name, height);
    this.isShare = isShare;
    this.series = [];
    this.at = null;
  }

  set(series) {
    this.series = series.filter((one) => one.x && one.y.some(known)).map((one) => ({ ...one, line: one.smooth ? smoothed(one.y, view.smooth) : one.y }));
    const lasts = this.series.filter((one) => !one.faint && !one.level).map((one) => html("span", { style: `color:${one.colour}` }, this.text(lastOf(one.y))));
    this.value.replaceChildren(...(lasts.length <= 3 ? lasts : []));
    const summary = this.series.map((one) => `${one.label}: last ${this.text(lastOf(one.y))}, from ${this.text(least(one.y))} to ${this.text(most(one.y))}`);
    this.node.setAttribute("role", "img");
    this.node.setAttribute("aria-label", `${this.title} over ${AXES[view.axis].label}. ${summary.join("; ")}`);
    this.draw();
  }

  // the tooltip moves between the points of the curve with the most points
  get finest() {
    return this.series.reduce((a, b) => (b.x.length > a.x.length ? b : a));
  }

  text(value) {
    return this.isShare ? percent(value) : number(value);
  }

  draw() {
    if (!this.width) return;
    const box = { left: 46, right: this.width - 10, top: 8, bottom: this.height - 22 };
    const root = svg("svg", { width: this.width, height: this.height, "aria-hidden": "true" });
    const xs = this.series.flatMap((one) => [least(one.x), most(one.x)]);
    let [x0, x1] = [Math.min(...xs), Math.max(...xs)];
    // a single point is where the run ended
    if (!(x1 > x0)) [x0, x1] = [0, x0 || 1];
    if (x0 > 0 && x0 < x1 / 4) x0 = 0;
    const [y0, y1] = this.isShare ? [0, 1] : range(this.series);
    const x = (value) => box.left + ((value - x0) / (x1 - x0)) * (box.right - box.left);
    const y = (value) => box.bottom - ((value - y0) / (y1 - y0)) * (box.bottom - box.top);
    Object.assign(this, { x, box, y });

    for (const tick of steps(y0, y1, this.height > 200 ? 5 : 4)) {
      root.append(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: y(tick), y2: y(tick) }));
      root.append(svg("text", { class: "tick", x: box.left - 7, y: y(tick) + 3.5, "text-anchor": "end" }, this.isShare ? percent(tick, 0) : number(tick)));
    }
    const axis = AXES[view.axis];
    for (const tick of steps(x0, x1, Math.max(2, Math.min(7, this.width / 95)), axis.sizes)) {
      const anchor = x(tick) > box.right - 14 ? "end" : "middle";
      root.append(svg("text", { class: "tick", x: Math.min(x(tick), box.right), y: this.height - 6, "text-anchor": anchor }, axis.tick(tick)));
    }
    const clip = `clip${(Curves.count = (Curves.count || 0) + 1)}`;
    root.append(svg("clipPath", { id: clip }, svg("rect", { x: box.left - 4, y: box.top - 4, width: box.right - box.left + 8, height: box.bottom - box.top + 8 })));
    const inside = svg("g", { "clip-path": `url(#${clip})` });
    for (const one of this.series) {
      if (one.low) inside.append(svg("path", { class: "band", fill: one.colour, d: area(one.x, one.low, one.high, x, y) }));
    }
    for (const one of this.series) {
      const stroke = { stroke: one.colour, "stroke-dasharray": one.level ? "2 4" : one.dash };
      if (one.smooth && one.line !== one.y) inside.append(svg("path", { class: "curve raw", ...stroke, d: path(one.x, one.y, x, y) }));
      const isOne = one.y.filter(known).length === 1;
      const d = one.level && isOne ? `M${box.left} ${y(lastOf(one.y)).toFixed(1)}H${box.right}` : path(one.x, one.line, x, y);
      inside.append(svg("path", { class: one.faint || one.level ? "curve faint" : "curve", ...stroke, d }));
      if (one.dots || (isOne && !one.level)) {
        for (let i = 0; i < one.x.length; i++) {
          if (known(one.y[i]) && known(one.x[i])) inside.append(svg("circle", { class: "dot", fill: one.colour, cx: x(one.x[i]), cy: y(one.y[i]), r: isOne ? 4 : one.y.length > 60 ? 1.5 : 3 }));
        }
      }
    }
    root.append(inside, svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
    this.cursor = svg("g", { class: "cursor" });
    root.append(this.cursor);
    this.plot.replaceChildren(root);
  }

  point(clientX, clientY) {
    if (!this.series.length || !this.box) return;
    const left = this.plot.getBoundingClientRect().left;
    const { x } = this.finest;
    this.at = nearest(x, clientX - left, this.x);
    this.showAt(x[this.at], clientX, clientY);
  }

  showAt(where, clientX, clientY) {
    const marks = [], lines = [];
    for (const one of this.series) {
      const i = nearest(one.x, this.x(where), this.x, one.y);
      if (i === null) continue;
      if (!one.level) marks.push(svg("circle", { fill: one.colour, cx: this.x(one.x[i]), cy: this.y(one.line[i]), r: 3.5 }));
      const band = one.low && known(one.low[i]) && one.low[i] < one.high[i];
      lines.push({ colour: one.colour, label: one.label, value: this.text(one.line[i]), range: band ? `${this.text(one.low[i])} to ${this.text(one.high[i])}` : null });
    }
    const at = this.x(where);
    this.cursor.replaceChildren(svg("line", { x1: at, x2: at, y1: this.box.top, y2: this.box.bottom }), ...marks);
    tip.show(this, clientX, clientY, AXES[view.axis].text(where), lines);
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !this.series.length) return;
    event.preventDefault();
    const { x } = this.finest;
    this.at = Math.max(0, Math.min(x.length - 1, (this.at ?? x.length) + move));
    const place = this.plot.getBoundingClientRect();
    this.showAt(x[this.at], place.left + this.x(x[this.at]), place.top + this.height / 2);
  }
}

// Rows of stages over time: busy shares of bins, or single spans.
class Lanes extends Drawing {
  constructor(title, name) {
    super(title, name, 0);
  }

  set({ lanes, end, from, note }) {
    Object.assign(this, { lanes, end, from });
    this.value.textContent = note;
    this.height = lanes.length * 24 + 26;
    const summary = lanes.map((lane) => `${lane.who} ${lane.stage} ${percent(lane.of)}`);
    this.node.setAttribute("role", "img");
    this.node.setAttribute("aria-label", `${this.title}, ${note}. ${summary.join("; ")}`);
    this.draw();
  }

  draw() {
    if (!this.width || !this.lanes) return;
    const narrow = this.width < 480, left = narrow ? 116 : 168, right = this.width - 8;
    const x = (seconds) => left + (seconds / this.end) * (right - left);
    this.left = left;
    this.seconds = (pixels) => ((pixels - left) / (right - left)) * this.end;
    const root = svg("svg", { width: this.width, height: this.height, "aria-hidden": "true" });
    this.lanes.forEach((lane, row) => {
      const top = row * 24 + 2;
      const name = `${narrow ? lane.who.replace("collector", "coll.") : lane.who} · ${lane.stage}`;
      root.append(svg("text", { class: "lane", x: left - 10, y: top + 14, "text-anchor": "end" }, name));
      root.append(svg("rect", { class: "track", x: left, y: top, width: right - left, height: 20, rx: 3 }));
      root.append(svg("path", { class: "busy", fill: stageColour(lane.stage), d: lane.turns ? turns(lane.turns, x, top) : shares(lane, x, top) }));
    });
    for (const tick of steps(0, this.end, Math.max(2, Math.min(8, this.width / 130)), this.end > 20 ? MINUTES : null)) {
      root.append(svg("text", { class: "tick", x: Math.min(x(tick), right), y: this.height - 6, "text-anchor": x(tick) > right - 14 ? "end" : "middle" }, this.end > 20 ? clock(tick) : tick ? duration(tick) : "0"));
    }
    this.cursor = svg("g", { class: "cursor" });
    root.append(this.cursor);
    this.plot.replaceChildren(root);
  }

  point(clientX, clientY) {
    const place = this.plot.getBoundingClientRect();
    const at = Math.max(this.left, clientX - place.left), seconds = this.seconds(at);
    if (!this.lanes || seconds > this.end) return;
    const lines = this.lanes.map((lane) => ({ colour: stageColour(lane.stage), label: `${lane.who} · ${lane.stage}`, value: lane.turns ? turnAt(lane.turns, seconds) : percent(lane.share[Math.floor(seconds / lane.bin)] ?? 0, 0) }));
    this.cursor.replaceChildren(svg("line", { x1: at, x2: at, y1: 0, y2: this.height - 22 }));
    tip.show(this, clientX, clientY, duration(this.from + seconds), lines.filter((line) => line.value !== null));
  }
}

// Shares that add up to one, side by side for every run.
class Bars extends Drawing {
  set(rows) {
    this.rows = rows;
    this.node.setAttribute("role", "img");
    this.node.setAttribute("aria-label", `${this.title}. ${rows.map((row) => `${row.label}: ${row.bars.map(([k, share]) => `${k} behind ${percent(share)}`).join(", ")}`).join("; ")}`);
    this.draw();
  }

  draw() {
    if (!this.width || !this.rows) return;
    const kinds = [...new Set(this.rows.flatMap((row) => row.bars.map(([k]) => k)))].sort((a, b) => a - b);
    const [left, bottom] = [46, this.height - 22];
    const slot = (this.width - left - 10) / kinds.length, bar = Math.min(48, (slot * 0.7) / this.rows.length);
    const root = svg("svg", { width: this.width, height: this.height, "aria-hidden": "true" });
    const y = (share) => bottom - share * (bottom - 20);
    for (const tick of [0, 0.5, 1]) {
      root.append(svg("line", { class: "grid", x1: left, x2: this.width - 10, y1: y(tick), y2: y(tick) }));
      root.append(svg("text", { class: "tick", x: left - 7, y: y(tick) + 3.5, "text-anchor": "end" }, percent(tick, 0)));
    }
    kinds.forEach((kind, place) => {
      const middle = left + slot * (place + 0.5);
      root.append(svg("text", { class: "tick", x: middle, y: this.height - 6, "text-anchor": "middle" }, `${kind} behind`));
      this.rows.forEach((row, i) => {
        const share = Object.fromEntries(row.bars)[kind] ?? 0;
        const start = middle + (i - this.rows.length / 2) * bar;
        root.append(svg("rect", { class: "share", fill: row.colour, x: start + 1, y: y(share), width: bar - 2, height: bottom - y(share), rx: 2 }));
        root.append(svg("text", { class: "tick strong", x: start + bar / 2, y: y(share) - 5, "text-anchor": "middle" }, percent(share, 0)));
      });
    });
    this.plot.replaceChildren(root);
  }

  point(clientX, clientY) {
    const lines = this.rows.map((row) => ({ colour: row.colour, label: row.label, value: row.bars.map(([k, share]) => `${k}: ${percent(share)}`).join("  ") }));
    tip.show(this, clientX, clientY, "updates behind", lines);
  }
}

const STAGES = { simulate: "--stage0", infer: "--stage1", learn: "--stage2", collect: "--stage3", wait: "--stage5" };
const stageColour = (stage) => `var(${STAGES[stage] || "--stage4"})`;

function turns(pairs, x, top) {
  return pairs.map(([begin, end]) => `M${x(begin).toFixed(1)} ${top}h${Math.max(x(end) - x(begin), 0.6).toFixed(1)}v20H${x(begin).toFixed(1)}z`).join("");
}

function shares(lane, x, top) {
  const part = (share, i) => {
    const height = Math.min(1, share) * 20;
    return `M${x(i * lane.bin).toFixed(1)} ${(top + 20 - height).toFixed(1)}H${x((i + 1) * lane.bin).toFixed(1)}V${top + 20}H${x(i * lane.bin).toFixed(1)}z`;
  };
  return lane.share.map((share, i) => (share > 0 ? part(share, i) : "")).join("");
}

function turnAt(pairs, seconds) {
  const found = pairs.find(([begin, end]) => begin <= seconds && seconds <= end);
  return found ? duration(found[1] - found[0]) : null;
}

// connects the neighbours of a missing value
function path(xs, ys, x, y) {
  const there = [...xs.keys()].filter((i) => known(xs[i]) && known(ys[i]));
  return there.length ? "M" + there.map((i) => `${x(xs[i]).toFixed(1)} ${y(ys[i]).toFixed(1)}`).join("L") : "";
}

function area(xs, lows, highs, x, y) {
  const there = [...xs.keys()].filter((i) => known(xs[i]) && known(lows[i]) && known(highs[i]));
  if (!there.length) return "";
  // a single value gets a visible width
  const spread = there.length === 1 ? [-4, 4] : [0, 0];
  const above = there.map((i) => `${(x(xs[i]) + spread[1]).toFixed(1)} ${y(highs[i]).toFixed(1)}`);
  const below = there.map((i) => `${(x(xs[i]) + spread[0]).toFixed(1)} ${y(lows[i]).toFixed(1)}`).reverse();
  if (there.length === 1) return `M${above[0]}H${(x(xs[there[0]]) - 4).toFixed(1)}L${below[0]}h8z`;
  return `M${above.join("L")}L${below.join("L")}z`;
}

// an exponential moving average with bias correction
function smoothed(values, weight) {
  if (!weight || values.length < 8) return values;
  let sum = 0, total = 0;
  return values.map((value) => {
    if (!known(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

const least = (values) => values.reduce((a, b) => (known(b) && (a === null || b < a) ? b : a), null);
const most = (values) => values.reduce((a, b) => (known(b) && (a === null || b > a) ? b : a), null);
const lastOf = (values) => values.findLast(known) ?? null;

// the y range: all of the lines, and the bands without their extremes
function range(series) {
  const lines = series.flatMap((one) => [least(one.y), most(one.y)]);
  const bands = series.filter((one) => one.low).flatMap((one) => [quantile(one.low, 0.03), quantile(one.high, 0.97)]);
  let low = Math.min(...lines, ...bands), high = Math.max(...lines, ...bands);
  if (!(high > low)) [low, high] = [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
  const margin = (high - low) * 0.06;
  return [low >= 0 && low < high * 0.25 ? 0 : low - margin, high + margin];
}

function quantile(values, share) {
  const sorted = values.filter(known).sort((a, b) => a - b);
  return sorted[Math.round(share * (sorted.length - 1))];
}

// the index of the point nearest to a position, among those with a value
function nearest(xs, place, x, ys = xs) {
  let best = null;
  for (let i = 0; i < xs.length; i++) {
    if (known(xs[i]) && known(ys[i]) && (best === null || Math.abs(x(xs[i]) - place) < Math.abs(x(xs[best]) - place))) best = i;
  }
  return best;
}
