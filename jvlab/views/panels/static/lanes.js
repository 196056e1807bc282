// Swim lanes on a canvas: bars in rows over time, wheel to zoom, drag to pan, a line of text for the bar under the pointer.
//
// Concatenated before a panel's own file. Data: {lanes: [name], bars: {row, start, seconds, colour, label, ink, hatch,
// text, link: arrays}, marks: [{at, text}], window: [low, high], folds: [[time, drawn time]]}. Text and grid follow the
// page's theme. Between the two ends of a fold nobody worked: it is drawn narrow.

const LANE = 26; // px
const LEFT = 92, WIDEST = 220; // for the names of lanes: at least, and at most
const FOOT = 24; // for the times

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function humanSeconds(s, step = Math.abs(s)) {
  if (s === 0) return "0";
  if (step < 1e-6) return `${Number((s * 1e9).toPrecision(4))} ns`;
  if (step < 1e-3) return `${Number((s * 1e6).toPrecision(4))} µs`;
  if (step < 1) return `${Number((s * 1e3).toPrecision(4))} ms`;
  return `${Number(s.toPrecision(4))} s`;
}

class Lanes {
  constructor({ onView, onPick }) {
    this.onView = onView || (() => {});
    this.onPick = onPick || (() => {});
    this.root = element("div", "jv-lanes");
    this.canvas = element("canvas", "jv-lanes-canvas");
    this.canvas.tabIndex = 0;
    this.tip = element("div", "jv-lanes-tip", "");
    this.root.append(this.canvas, this.tip);
    this.paints = 0;
    this.left = LEFT;
    this.hover = -1;
    const on = (name, handler, options) => this.canvas.addEventListener(name, handler, options);
    on("wheel", (e) => this.wheel(e), { passive: false });
    on("pointerdown", (e) => this.press(e));
    on("pointermove", (e) => this.move(e));
    on("pointerup", (e) => this.release(e));
    on("pointerleave", () => this.point(-1));
    on("dblclick", () => this.reset());
    this.watcher = new ResizeObserver(() => this.later());
    this.watcher.observe(this.root);
    // a change of theme does not resize: observe the attribute that JupyterLab sets
    this.themes = new MutationObserver(() => this.later());
    this.themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-name", "class"] });
  }

  setData(data, keep = false) {
    this.data = data;
    this.count = data.bars.row.length;
    if (!keep || !this.view) this.view = [...data.window];
    this.canvas.style.height = `${Math.max(data.lanes.length, 1) * LANE + FOOT}px`;
    this.hover = -1;
    this.updateTip();
    this.later();
  }

  setView(low, high, notify = true) {
    const [first, last] = this.data.window;
    const most = last - first || 1;
    const width = Math.min(Math.max(high - low, most * 1e-6), most * 1.05);
    const middle = (low + high) / 2;
    const start = Math.min(Math.max(middle - width / 2, first - most * 0.05), last + most * 0.05 - width);
    this.view = [start, start + width];
    if (notify) this.onView(this.view);
    this.later();
  }

  reset() {
    this.setView(...this.data.window);
  }

  wheel(event) {
    // Without focus the wheel scrolls the notebook; a click on the lanes focuses them.
    if (document.activeElement !== this.canvas && !event.ctrlKey && !event.altKey) return;
    event.preventDefault();
    const [low, high] = this.view;
    const at = this.time(event.offsetX);
    const factor = Math.exp(Math.sign(event.deltaY) * 0.2);
    this.setView(at - (at - low) * factor, at + (high - at) * factor);
  }

  press(event) {
    this.drag = { x: event.offsetX, view: [...this.view], moved: false };
    this.canvas.setPointerCapture(event.pointerId);
  }

  move(event) {
    if (this.drag) {
      const [low, high] = this.drag.view.map((t) => this.warp(t));
      const by = ((event.offsetX - this.drag.x) / this.width()) * (high - low);
      this.drag.moved ||= Math.abs(event.offsetX - this.drag.x) > 3;
      if (this.drag.moved) this.setView(this.unwarp(low - by), this.unwarp(high - by));
    } else this.point(this.find(event.offsetX, event.offsetY));
  }

  release(event) {
    if (this.drag && !this.drag.moved) {
      const at = this.find(event.offsetX, event.offsetY);
      if (at >= 0) this.onPick(at);
    }
    this.drag = null;
  }

  point(at) {
    if (at === this.hover) return;
    this.hover = at;
    this.updateTip();
    this.later();
  }

  updateTip() {
    this.tip.textContent = this.hover >= 0 ? this.data.bars.text[this.hover]
      : "click, then use the wheel to zoom; drag to pan; double-click to show all";
    this.root.dataset.hover = this.hover;
  }

  width() {
    return Math.max(this.canvas.clientWidth - this.left - 8, 10);
  }

  // Time to drawn time and back: both run evenly between the ends of folds, and alike elsewhere.
  warp(t, from = 0, to = 1) {
    const knots = this.data.folds ?? [];
    let before = null;
    for (const knot of knots) {
      if (t < knot[from]) {
        if (!before) break;
        const share = (t - before[from]) / (knot[from] - before[from]);
        return before[to] + share * (knot[to] - before[to]);
      }
      before = knot;
    }
    return before ? t + before[to] - before[from] : t;
  }

  unwarp(w) {
    return this.warp(w, 1, 0);
  }

  time(x) {
    const low = this.warp(this.view[0]);
    return this.unwarp(low + ((x - this.left) / this.width()) * (this.warp(this.view[1]) - low));
  }

  place(t) {
    const low = this.warp(this.view[0]);
    return this.left + ((this.warp(t) - low) / (this.warp(this.view[1]) - low)) * this.width();
  }

  folds() {
    const knots = this.data.folds ?? [];
    return Array.from({ length: knots.length / 2 }, (_, i) => [knots[2 * i][0], knots[2 * i + 1][0]]);
  }

  find(x, y) {
    const { row, start, seconds } = this.data.bars;
    const lane = Math.floor(y / LANE);
    const t = this.time(x), slack = Math.abs(this.time(x + 2) - t);
    for (let i = this.count - 1; i >= 0; i--) {
      if (row[i] === lane && t >= start[i] - slack && t <= start[i] + seconds[i] + slack) return i;
    }
    return -1;
  }

  later() {
    if (this.due) return; // one paint per frame, however many events
    this.due = requestAnimationFrame(() => { this.due = 0; this.draw(); });
  }

  draw() {
    if (!this.data || !this.canvas.clientWidth) return;
    const scale = window.devicePixelRatio || 1;
    const width = this.canvas.clientWidth;
    const height = this.data.lanes.length * LANE + FOOT;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    const g = this.canvas.getContext("2d");
    g.scale(scale, scale);
    const ink = getComputedStyle(this.root).color;
    g.font = "11px sans-serif";
    const widest = Math.max(0, ...this.data.lanes.map((name) => g.measureText(name).width));
    this.left = Math.min(Math.max(LEFT, widest + 16), WIDEST); // names are whole
    g.textBaseline = "middle";
    this.drawGrid(g, ink, width, height);
    g.save();
    g.beginPath();
    g.rect(this.left, 0, width - this.left, height - FOOT + 4);
    g.clip();
    const { row, start, seconds, colour, label, hatch } = this.data.bars;
    const inks = this.data.bars.ink;
    for (let i = 0; i < this.count; i++) {
      if (start[i] > this.view[1] || start[i] + seconds[i] < this.view[0]) continue;
      const x = this.place(start[i]);
      const w = Math.max(this.place(start[i] + seconds[i]) - x, 1);
      const y = row[i] * LANE + 3;
      if (hatch[i]) this.drawHatch(g, ink, x, y, w);
      else {
        g.fillStyle = colour[i];
        g.fillRect(x, y, w > 4 ? w - 1 : w, LANE - 6); // a gap between neighbours of one colour
      }
      if (i === this.hover) {
        g.strokeStyle = ink;
        g.lineWidth = 2;
        g.strokeRect(x, y, w, LANE - 6);
      }
      if (label[i] && g.measureText(label[i]).width + 6 < w) {
        g.fillStyle = inks[i];
        g.textAlign = "center";
        const left = Math.max(x, this.left);
        g.fillText(label[i], (left + Math.min(x + w, width)) / 2, y + LANE / 2 - 3);
      }
    }
    this.drawMarks(g, height);
    this.drawFolds(g, ink, height);
    g.restore();
    this.paints += 1;
    Object.assign(this.root.dataset, { paints: this.paints, bars: this.count, folds: this.folds().length, low: this.view[0], high: this.view[1] });
  }

  drawGrid(g, ink, width, height) {
    g.fillStyle = ink;
    g.strokeStyle = ink;
    g.lineWidth = 1;
    this.data.lanes.forEach((name, i) => {
      g.textAlign = "right";
      g.globalAlpha = 1;
      g.fillText(name, this.left - 8, i * LANE + LANE / 2);
    });
    const span = this.warp(this.view[1]) - this.warp(this.view[0]), folds = this.folds();
    const step = this.tickStep(g, span);
    let ticks = 0;
    g.textAlign = "center";
    for (let k = Math.ceil(this.view[0] / step); k * step <= this.view[1]; k++) {
      if (folds.some(([a, b]) => k * step > a && k * step < b)) {
        k = Math.max(k, Math.ceil(folds.find(([a, b]) => k * step > a && k * step < b)[1] / step) - 1);
        continue; // no time of day inside a fold
      }
      const x = this.place(k * step);
      ticks += 1;
      g.globalAlpha = 0.15;
      g.fillRect(x, 0, 1, height - FOOT + 4);
      g.globalAlpha = 0.8;
      g.fillText(humanSeconds(k * step, step * 5), Math.min(x, width - 24), height - 9);
    }
    g.globalAlpha = 1;
    this.root.dataset.ticks = ticks;
  }

  // Seconds between two times of the grid: about 90 px, in a narrow panel as near as their words allow.
  tickStep(g, span) {
    const room = Math.min(90, this.width() / 5);
    const power = 10 ** Math.floor(Math.log10((span * room) / this.width()));
    const words = (step) => g.measureText(humanSeconds(Math.round(this.view[1] / step) * step, step * 5)).width + 14;
    const steps = [1, 2, 5, 10, 20, 50].map((k) => k * power);
    return steps.find((step) => (step / span) * this.width() >= Math.max(room, words(step))) ?? 100 * power;
  }

  drawHatch(g, ink, x, y, w) {
    g.save();
    g.beginPath();
    g.rect(x, y, w, LANE - 6);
    g.clip();
    g.strokeStyle = ink;
    g.globalAlpha = 0.6;
    g.beginPath();
    for (let at = Math.max(x, this.left) - LANE; at < Math.min(x + w, this.canvas.clientWidth); at += 6) {
      g.moveTo(at, y + LANE);
      g.lineTo(at + LANE, y);
    }
    g.stroke();
    g.restore();
  }

  drawFolds(g, ink, height) {
    g.fillStyle = ink;
    for (const [from, to] of this.folds()) {
      const x = this.place(from), w = Math.max(this.place(to) - x, 2);
      g.globalAlpha = 0.12;
      g.fillRect(x, 0, w, height - FOOT + 4);
      g.globalAlpha = 0.7;
      g.save();
      g.translate(x + w / 2, (height - FOOT) / 2);
      g.rotate(-Math.PI / 2);
      g.textAlign = "center";
      const text = humanSeconds(to - from);
      if (g.measureText(text).width < height - FOOT) g.fillText(text, 0, 0);
      g.restore();
    }
    g.globalAlpha = 1;
  }

  drawMarks(g, height) {
    for (const { at, text } of this.data.marks || []) {
      const x = this.place(at);
      g.strokeStyle = g.fillStyle = "#D55E00";
      g.setLineDash([3, 3]);
      g.beginPath();
      g.moveTo(x, 0);
      g.lineTo(x, height - FOOT);
      g.stroke();
      g.setLineDash([]);
      g.textAlign = "left";
      g.fillText(text, x + 3, height - FOOT - 4);
    }
  }

  close() {
    cancelAnimationFrame(this.due);
    this.watcher.disconnect();
    this.themes.disconnect();
  }
}
