// A run's curves on one canvas. Rows are float32, one number per column; `snapshot` holds all rows and is updated
// occasionally, messages append the newer ones. Painted at most once per frame.
const C = { blue: "#0072B2", orange: "#E69F00", green: "#009E73", pink: "#CC79A7", sky: "#56B4E9", red: "#D55E00",
            grey: "#999999" };
const PHASES = { generate: C.blue, train: C.orange, sync: C.green, reward: C.pink, score: C.sky, idle: C.grey };
const HEIGHT = 300, GAP = 16, TOP = 20, BOTTOM = 16, LEFT = 46;

class Rows {
  constructor(width) { this.width = width; this.count = 0; this.data = new Float32Array(width * 64); }
  put(first, view) {
    // copied, because a Float32Array must be aligned and the buffer may start at any byte
    const bytes = new Uint8Array(view.byteLength);
    bytes.set(new Uint8Array(view.buffer, view.byteOffset, view.byteLength));
    const fresh = new Float32Array(bytes.buffer);
    const need = first * this.width + fresh.length;
    if (first > this.count) return false;  // rows in between are missing: the caller requests them
    if (need > this.data.length) {
      const grown = new Float32Array(Math.max(need, 2 * this.data.length));
      grown.set(this.data);
      this.data = grown;
    }
    this.data.set(fresh, first * this.width);
    this.count = need / this.width;
    return true;
  }
  at(i, column) { return this.data[i * this.width + column]; }
}

const short = (v) => {
  const a = Math.abs(v);
  if (!Number.isFinite(v)) return "–";
  if (a !== 0 && (a < 1e-3 || a >= 1e5)) return v.toExponential(1);
  return a >= 100 ? v.toFixed(0) : a >= 1 ? v.toFixed(2) : v.toFixed(3);
};

function render({ model, el }) {
  const columns = model.get("columns");
  const index = Object.fromEntries(columns.map((name, i) => [name, i]));
  const rows = new Rows(columns.length);
  const canvas = document.createElement("canvas");
  canvas.className = "jv-curves";
  canvas.setAttribute("role", "img");
  canvas.style.cssText = `display:block;width:100%;height:${HEIGHT}px`;
  el.append(canvas);
  const ctx = canvas.getContext("2d");
  let frame = 0, hover = null, ink = "#000", faint = "#777", line = "#ccc", font = "sans-serif", blue = C.blue;

  function theme() {
    const style = getComputedStyle(el);
    const read = (name, otherwise) => style.getPropertyValue(name).trim() || otherwise;
    ink = read("--jp-ui-font-color1", style.color);
    faint = read("--jp-ui-font-color2", "#777");
    line = read("--jp-border-color2", "rgba(128,128,128,.35)");
    font = read("--jp-ui-font-family", "sans-serif");
    blue = document.body.dataset.jpThemeLight === "false" ? C.sky : C.blue;  // dark blue is hard to see on black
  }

  function title(box, text, value, colour) {
    ctx.fillStyle = faint;
    ctx.font = `600 11px ${font}`;
    ctx.textAlign = "left";
    ctx.fillText(text, box.x, box.y + 11);
    const at = box.x + ctx.measureText(text).width + 6;
    ctx.fillStyle = colour ?? ink;
    ctx.fillText(value, at, box.y + 11);
  }

  // A curve over steps. `log`: logarithmic scale; `alarm` draws a threshold, and points above it in red.
  function curve(box, text, column, colour, { log = false, alarm = null, zero = false } = {}) {
    const x0 = box.x + LEFT, x1 = box.x + box.w, y0 = box.y + TOP, y1 = box.y + box.h - BOTTOM;
    let low = Infinity, high = -Infinity;
    const f = (v) => (log ? Math.log10(v) : v);
    for (let i = 0; i < rows.count; i += 1) {
      const v = rows.at(i, column);
      if (Number.isFinite(v) && (v > 0 || !log)) { low = Math.min(low, f(v)); high = Math.max(high, f(v)); }
    }
    if (alarm !== null) { low = Math.min(low, f(alarm)); high = Math.max(high, f(alarm)); }
    if (zero) low = Math.min(low, 0);
    if (!(high > low)) { low -= 0.5; high += 0.5; }
    const n = Math.max(rows.count - 1, 1);
    const px = (i) => x0 + ((x1 - x0) * i) / n;
    // on a log scale an exact zero is drawn at the bottom
    const py = (v) => y1 - ((y1 - y0) * Math.max(0, f(v) - low)) / (high - low);
    ctx.strokeStyle = line;
    ctx.lineWidth = 1;
    ctx.strokeRect(x0, y0, x1 - x0, y1 - y0);
    ctx.fillStyle = faint;
    ctx.font = `10px ${font}`;
    ctx.textAlign = "right";
    const back = (v) => (log ? 10 ** v : v);
    ctx.fillText(short(back(high)), x0 - 4, y0 + 8);
    ctx.fillText(short(back(low)), x0 - 4, y1);
    if (rows.count) {
      ctx.fillText(`step ${rows.at(rows.count - 1, index.step)}`, x1, y1 + 12);
      ctx.textAlign = "left";
      ctx.fillText(String(rows.at(0, index.step)), x0, y1 + 12);
    }
    if (alarm !== null) {
      ctx.strokeStyle = C.red;
      ctx.setLineDash([4, 3]);
      ctx.beginPath();
      ctx.moveTo(x0, py(alarm));
      ctx.lineTo(x1, py(alarm));
      ctx.stroke();
      ctx.setLineDash([]);
      ctx.fillStyle = C.red;
      ctx.textAlign = "right";
      ctx.fillText("alarm", x1 - 3, py(alarm) + (py(alarm) < y0 + 12 ? 10 : -3));
    }
    ctx.save();
    ctx.beginPath();
    ctx.rect(x0, y0, x1 - x0, y1 - y0);
    ctx.clip();
    ctx.strokeStyle = colour;
    ctx.lineWidth = 1.5;
    ctx.beginPath();
    let down = false, over = 0;
    for (let i = 0; i < rows.count; i += 1) {
      const v = rows.at(i, column);
      if (!Number.isFinite(v)) { down = false; continue; }
      if (alarm !== null && v > alarm) over += 1;
      if (down) ctx.lineTo(px(i), py(v)); else ctx.moveTo(px(i), py(v));
      down = true;
    }
    ctx.stroke();
    for (let i = 0; i < rows.count; i += 1) {
      const v = rows.at(i, column);
      if (alarm === null ? rows.count > 1 : !(v > alarm)) continue;  // draw a single point, or one over the alarm
      ctx.fillStyle = alarm === null ? colour : C.red;
      ctx.beginPath();
      ctx.arc(px(i), py(v), 3, 0, 7);
      ctx.fill();
    }
    ctx.restore();
    let shown = rows.count - 1;
    if (hover && hover.x >= x0 && hover.x <= x1 && hover.y >= box.y && hover.y <= box.y + box.h && rows.count) {
      shown = Math.round(((hover.x - x0) / (x1 - x0)) * n);
      ctx.strokeStyle = faint;
      ctx.lineWidth = 1;
      ctx.beginPath();
      ctx.moveTo(px(shown), y0);
      ctx.lineTo(px(shown), y1);
      ctx.stroke();
    }
    const value = rows.count ? rows.at(Math.min(shown, rows.count - 1), column) : NaN;
    const where = shown !== rows.count - 1 ? `${short(value)} at step ${rows.at(shown, index.step)}` : short(value);
    title(box, text, over ? `${where}: ${over} over the alarm` : where, over ? C.red : ink);
    return over;
  }

  function histogram(box, pairs) {
    const total = pairs.reduce((sum, [, n]) => sum + n, 0);
    title(box, "staleness of tokens", total ? `${total} tokens` : "–");
    if (!total) return;
    const y0 = box.y + TOP, y1 = box.y + box.h - BOTTOM, w = Math.min(60, (box.w - LEFT) / pairs.length);
    const most = Math.max(...pairs.map(([, n]) => n));
    pairs.forEach(([age, n], i) => {
      const h = ((y1 - y0 - 14) * n) / most, x = box.x + LEFT + i * w;
      ctx.fillStyle = C.orange;
      ctx.fillRect(x + 4, y1 - h, w - 8, h);
      ctx.fillStyle = faint;
      ctx.font = `10px ${font}`;
      ctx.textAlign = "center";
      ctx.fillText(String(age), x + w / 2, y1 + 12);
      ctx.fillText(`${Math.round((100 * n) / total)} %`, x + w / 2, y1 - h - 3);
    });
  }

  function split(box, found) {
    const names = Object.keys(found), total = names.reduce((sum, name) => sum + found[name], 0);
    title(box, "time per step", total ? `last ${Math.min(20, rows.count)} steps` : "–", faint);
    if (!total) return;
    let x = box.x + 4;
    const wide = box.w - 4, y = box.y + TOP + 4;
    names.forEach((name, i) => {
      const w = (wide * found[name]) / total;
      ctx.fillStyle = PHASES[name] ?? C.grey;
      ctx.fillRect(x, y, Math.max(1, w - 1), 16);
      x += w;
      const row = y + 34 + 14 * (i % 6);
      ctx.fillRect(box.x + 4, row - 8, 9, 9);
      ctx.fillStyle = ink;
      ctx.font = `11px ${font}`;
      ctx.textAlign = "left";
      const s = found[name], words = s < 1 ? `${(1000 * s).toFixed(0)} ms` : `${s.toFixed(2)} s`;
      ctx.fillText(`${name} ${words}, ${Math.round((100 * s) / total)} %`, box.x + 18, row);
    });
  }

  function paint() {
    frame = 0;
    const wide = canvas.clientWidth;
    if (!wide) return;
    const scale = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(wide * scale)) {
      canvas.width = Math.round(wide * scale);
      canvas.height = Math.round(HEIGHT * scale);
    }
    theme();
    ctx.setTransform(scale, 0, 0, scale, 0, 0);
    ctx.clearRect(0, 0, wide, HEIGHT);
    const facts = model.get("facts") ?? {};
    const w = (wide - 2 * GAP) / 3, h = (HEIGHT - GAP) / 2;
    const box = (i) => ({ x: (i % 3) * (w + GAP), y: Math.floor(i / 3) * (h + GAP), w, h });
    curve(box(0), "reward", index.reward, blue);
    const over = curve(box(1), "logprob gap", index.gap, C.green, { log: true, alarm: facts.alarm ?? null });
    curve(box(2), "tokens/s over 5 steps", index.tokens_per_s, C.pink, { zero: true });
    histogram(box(3), facts.histogram ?? []);
    curve(box(4), "staleness, mean", index.stale_mean, C.orange, { zero: true });
    split(box(5), facts.split ?? {});
    canvas.dataset.rows = rows.count;
    canvas.dataset.alarms = over;
    canvas.dataset.ages = (facts.histogram ?? []).map(([age]) => age).join(",");
    canvas.dataset.paints = Number(canvas.dataset.paints ?? 0) + 1;
    const last = rows.count ? rows.at(rows.count - 1, index.reward) : NaN;
    canvas.setAttribute("aria-label", `${rows.count} steps, reward ${short(last)}`);
  }
  const later = () => { if (!frame) frame = requestAnimationFrame(paint); };

  function takeSnapshot() {
    const view = model.get("snapshot");
    if (view && view.byteLength) rows.put(0, view);
    later();
  }
  function message(content, buffers) {
    if (!buffers?.length) return;
    if (!rows.put(content.first, buffers[0])) model.send({ have: rows.count });
    later();
  }
  const moved = (event) => {
    const at = canvas.getBoundingClientRect();
    hover = { x: event.clientX - at.left, y: event.clientY - at.top };
    later();
  };
  const left = () => { hover = null; later(); };
  canvas.addEventListener("mousemove", moved);
  canvas.addEventListener("mouseleave", left);
  model.on("change:snapshot", takeSnapshot);
  model.on("change:facts", later);
  model.on("msg:custom", message);
  const resized = new ResizeObserver(later);
  resized.observe(canvas);
  // a change of theme does not resize the canvas: repaint explicitly
  const themed = new MutationObserver(later);
  themed.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name"] });
  takeSnapshot();
  model.send({ have: rows.count });
  return () => {
    cancelAnimationFrame(frame);
    resized.disconnect();
    themed.disconnect();
    model.off("change:snapshot", takeSnapshot);
    model.off("change:facts", later);
    model.off("msg:custom", message);
  };
}

export default { render };
