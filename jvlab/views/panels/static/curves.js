// A run's curves on one canvas, with a second run behind them. Which curves, their order and colours are in `charts`
// (views/_run_view.py). Rows are float32, one number per column; `snapshot` holds all rows and is updated
// occasionally, messages append the newer ones. Painted at most once per frame.
const RED = PALETTE.tones.bad, GREY = PALETTE.phases.idle;
const CHART = 140, GAP = 16, TOP = 20, BOTTOM = 16, LEFT = 46; // px

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

// Whether the text is light, so that the page is dark: true for every front end, whatever it calls its themes.
function onDark(el) {
  const [r, g, b] = (getComputedStyle(el).color.match(/[\d.]+/g) ?? [0, 0, 0]).map(Number);
  return r + g + b > 384;
}

// Means of the last `steps` values that there are.
function smoothed(series, steps) {
  const out = new Float64Array(series.count), recent = [];
  let sum = 0;
  for (let i = 0; i < series.count; i += 1) {
    const v = series.y(i);
    if (Number.isFinite(v)) {
      recent.push(v);
      sum += v;
      if (recent.length > steps) sum -= recent.shift();
    }
    out[i] = recent.length && Number.isFinite(v) ? sum / recent.length : NaN;
  }
  return { ...series, y: (i) => out[i] };
}

function drawCurves({ model, el }) {
  const columns = model.get("columns");
  const index = Object.fromEntries(columns.map((name, i) => [name, i]));
  const rows = new Rows(columns.length);
  let other = new Rows(columns.length);
  const canvas = document.createElement("canvas");
  canvas.className = "jv-curves";
  canvas.setAttribute("role", "img");
  canvas.style.cssText = "display:block;width:100%";
  el.append(canvas);
  const ctx = canvas.getContext("2d");
  let frame = 0, hover = null, ink = "#000", faint = "#777", line = "#ccc", font = "sans-serif", dark = false;

  function theme() {
    const style = getComputedStyle(el);
    const read = (name, otherwise) => style.getPropertyValue(name).trim() || otherwise;
    ink = read("--jp-ui-font-color1", style.color);
    faint = read("--jp-ui-font-color2", "#888");
    line = read("--jp-border-color2", "rgba(128,128,128,.35)");
    font = read("--jp-ui-font-family", "sans-serif");
    dark = onDark(el);
  }
  const seen = (colour) => (dark ? PALETTE.onDark[colour] ?? colour : colour);

  // As much of a text as fits.
  function fit(text, width) {
    if (ctx.measureText(text).width <= width) return text;
    let cut = text.length - 1;
    while (cut > 0 && ctx.measureText(`${text.slice(0, cut)}…`).width > width) cut -= 1;
    return cut > 0 ? `${text.slice(0, cut)}…` : "";
  }

  function title(box, text, value, colour) {
    ctx.font = `600 11px ${font}`;
    ctx.textAlign = "right";
    ctx.fillStyle = colour ?? ink;
    const number = fit(value, box.w - 40); // a number is worth more than its name
    ctx.fillText(number, box.x + box.w, box.y + 11);
    ctx.fillStyle = faint;
    ctx.textAlign = "left";
    ctx.fillText(fit(text, box.w - ctx.measureText(number).width - 8), box.x, box.y + 11);
  }

  const ofRows = (table, column) => ({ count: table.count, x: (i) => table.at(i, index.step), y: (i) => table.at(i, column) });
  const ofPairs = (pairs) => ({ count: pairs.length, x: (i) => pairs[i][0], y: (i) => pairs[i][1] ?? NaN });
  const seriesOf = (chart, table, pairs) =>
    chart.column === "evaluation" ? ofPairs(pairs ?? []) : ofRows(table, index[chart.column]);
  const some = (series) => { for (let i = 0; i < series.count; i += 1) if (Number.isFinite(series.y(i))) return true; return false; };

  function path(series, px, py) {
    ctx.beginPath();
    let down = false;
    for (let i = 0; i < series.count; i += 1) {
      const v = series.y(i);
      if (!Number.isFinite(v)) { down = false; continue; }
      if (down) ctx.lineTo(px(series.x(i)), py(v)); else ctx.moveTo(px(series.x(i)), py(v));
      down = true;
    }
    ctx.stroke();
  }

  // The step's values around it as a band.
  function band(series, spread, px, py) {
    ctx.beginPath();
    for (let i = 0; i < series.count; i += 1) ctx.lineTo(px(series.x(i)), py(series.y(i) + (spread(i) || 0)));
    for (let i = series.count - 1; i >= 0; i -= 1) ctx.lineTo(px(series.x(i)), py(series.y(i) - (spread(i) || 0)));
    ctx.globalAlpha = 0.15;
    ctx.fill();
    ctx.globalAlpha = 1;
  }

  function axes(box, low, high, first, last, back) {
    const { x0, x1, y0, y1 } = box;
    ctx.strokeStyle = line;
    ctx.lineWidth = 1;
    ctx.strokeRect(x0, y0, x1 - x0, y1 - y0);
    ctx.fillStyle = faint;
    ctx.font = `10px ${font}`;
    ctx.textAlign = "right";
    ctx.fillText(short(back(high)), x0 - 4, y0 + 8);
    ctx.fillText(short(back(low)), x0 - 4, y1);
    ctx.fillText(`step ${last}`, x1, y1 + 12);
    ctx.textAlign = "left";
    ctx.fillText(String(first), x0, y1 + 12);
  }

  // A chart over steps; `alarm` draws a threshold, and points above it in red. Returns how many are.
  function curve(place, chart, main, behind, range, alarm) {
    const box = { ...place, x0: place.x + LEFT, x1: place.x + place.w, y0: place.y + TOP, y1: place.y + place.h - BOTTOM };
    const f = (v) => (chart.log ? Math.log10(v) : v), back = (v) => (chart.log ? 10 ** v : v);
    const spread = chart.spread ? (i) => rows.at(i, index[chart.spread]) : () => 0;
    let low = Infinity, high = -Infinity;
    const take = (v) => { if (Number.isFinite(v) && (v > 0 || !chart.log)) { low = Math.min(low, f(v)); high = Math.max(high, f(v)); } };
    for (let i = 0; i < main.count; i += 1) { const v = main.y(i), s = spread(i) || 0; take(v + s); take(v - s); }
    for (let i = 0; i < behind.count; i += 1) take(behind.y(i));
    if (alarm !== null) take(alarm);
    if (chart.zero) low = Math.min(low, 0);
    if (chart.zero && low === 0 && high === 0) high = 1; // a share or a count is never below zero
    if (!(high > low)) { low = Number.isFinite(low) ? low - 0.5 : 0; high = low + 1; }
    const [first, last] = range, wide = last - first || 1;
    const px = (step) => box.x0 + ((box.x1 - box.x0) * (step - first)) / wide;
    // on a log scale an exact zero is drawn at the bottom
    const py = (v) => box.y1 - ((box.y1 - box.y0) * Math.max(0, f(v) - low)) / (high - low);
    axes(box, low, high, first, last, back);
    ctx.save();
    ctx.beginPath();
    ctx.rect(box.x0, box.y0, box.x1 - box.x0, box.y1 - box.y0);
    ctx.clip();
    const steps = model.get("smoothing"), colour = seen(chart.colour), smooth = steps > 1 && main.count > 2;
    if (alarm !== null) drawAlarm(box, py(alarm));
    ctx.strokeStyle = faint;
    ctx.setLineDash([4, 3]);
    ctx.lineWidth = 1.2;
    path(smooth ? smoothed(behind, steps) : behind, px, py);
    ctx.setLineDash([]);
    ctx.fillStyle = ctx.strokeStyle = colour;
    if (chart.spread) band(main, spread, px, py);
    ctx.lineWidth = 1.5;
    ctx.globalAlpha = smooth ? 0.3 : 1;
    path(main, px, py);
    ctx.globalAlpha = 1;
    if (smooth) path(smoothed(main, steps), px, py);
    let over = 0;
    for (let i = 0; i < main.count; i += 1) {
      const v = main.y(i), bad = alarm !== null && v > alarm;
      over += bad;
      if (!bad && main.count > 1 && chart.column !== "evaluation") continue; // points: single, evaluated, over the alarm
      ctx.fillStyle = bad ? RED : colour;
      ctx.beginPath();
      ctx.arc(px(main.x(i)), py(v), 3, 0, 7);
      ctx.fill();
    }
    ctx.restore();
    label(box, chart, main, px, over);
    return over;
  }

  function drawAlarm(box, y) {
    ctx.strokeStyle = ctx.fillStyle = RED;
    ctx.setLineDash([4, 3]);
    ctx.beginPath();
    ctx.moveTo(box.x0, y);
    ctx.lineTo(box.x1, y);
    ctx.stroke();
    ctx.setLineDash([]);
    ctx.font = `10px ${font}`;
    ctx.textAlign = "right";
    ctx.fillText("alarm", box.x1 - 3, y + (y < box.y0 + 12 ? 10 : -3));
  }

  // A chart's name and its newest value, or that under the pointer.
  function label(box, chart, main, px, over) {
    let shown = main.count - 1;
    const inside = hover && hover.x >= box.x0 && hover.x <= box.x1 && hover.y >= box.y && hover.y <= box.y + box.h;
    if (inside && main.count) {
      for (let i = 0, best = Infinity; i < main.count; i += 1) {
        const far = Math.abs(px(main.x(i)) - hover.x);
        if (far < best) { best = far; shown = i; }
      }
      ctx.strokeStyle = faint;
      ctx.lineWidth = 1;
      ctx.beginPath();
      ctx.moveTo(px(main.x(shown)), box.y0);
      ctx.lineTo(px(main.x(shown)), box.y1);
      ctx.stroke();
    }
    const value = main.count ? main.y(shown) : NaN;
    const text = chart.form.endsWith("%") && Number.isFinite(value) ? `${(100 * value).toFixed(1)} %` : short(value);
    const where = inside ? `${text} at step ${main.x(shown)}` : text;
    title(box, chart.title, over ? `${where}: ${over} over the alarm` : where, over ? RED : ink);
  }

  function histogram(box, pairs) {
    const total = pairs.reduce((sum, [, n]) => sum + n, 0);
    title(box, "staleness of tokens", total ? `${total} tokens` : "–");
    if (!total) return;
    const y0 = box.y + TOP, y1 = box.y + box.h - BOTTOM, w = Math.min(60, (box.w - LEFT) / pairs.length);
    const most = Math.max(...pairs.map(([, n]) => n));
    pairs.forEach(([age, n], i) => {
      const h = ((y1 - y0 - 14) * n) / most, x = box.x + LEFT + i * w;
      ctx.fillStyle = PALETTE.phases.sync;
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
    title(box, "time of a step", total ? `last ${Math.min(20, rows.count)} steps` : "–", faint);
    if (!total) return;
    let x = box.x + 4;
    const wide = box.w - 4, y = box.y + TOP + 4;
    names.forEach((name, i) => {
      const w = (wide * found[name]) / total;
      ctx.fillStyle = seen(PALETTE.phases[name] ?? GREY);
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

  // The charts that have something to show, each a function of its place.
  function contents(facts, second) {
    const pairs = model.get("evaluations") ?? [], empty = { count: 0 };
    const ends = (table) => (table.count ? [table.at(0, index.step), table.at(table.count - 1, index.step)] : []);
    const steps = [...ends(rows), ...ends(other), ...pairs.map(([step]) => step)];
    const range = steps.length ? [Math.min(...steps), Math.max(...steps)] : [0, 1];
    const out = [];
    let over = 0;
    for (const chart of model.get("charts")) {
      const main = seriesOf(chart, rows, pairs);
      if (!chart.always && !some(main)) continue;
      const behind = second.name ? seriesOf(chart, other, second.evaluations) : empty;
      const alarm = chart.column === "gap" ? facts.alarm ?? null : null;
      out.push([chart.title, (box) => { over += curve(box, chart, main, behind, range, alarm); }]);
    }
    out.push(["staleness of tokens", (box) => histogram(box, facts.histogram ?? [])]);
    out.push(["time of a step", (box) => split(box, facts.split ?? {})]);
    return { out, over: () => over };
  }

  function paint() {
    frame = 0;
    const wide = canvas.clientWidth;
    if (!wide) return;
    const facts = model.get("facts") ?? {}, second = model.get("other") ?? {};
    const { out, over } = contents(facts, second);
    const across = wide >= 1100 ? 4 : wide >= 560 ? 3 : wide >= 360 ? 2 : 1;
    const legend = second.name ? 18 : 0;
    const height = rows.count ? legend + Math.ceil(out.length / across) * (CHART + GAP) - GAP : 60;
    const scale = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(wide * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(wide * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.height = `${height}px`;
    }
    theme();
    ctx.setTransform(scale, 0, 0, scale, 0, 0);
    ctx.clearRect(0, 0, wide, height);
    const w = (wide - (across - 1) * GAP) / across;
    if (rows.count) {
      out.forEach(([, draw], i) => draw({
        x: (i % across) * (w + GAP), y: legend + Math.floor(i / across) * (CHART + GAP), w, h: CHART,
      }));
      if (legend) {
        ctx.font = `11px ${font}`;
        ctx.textAlign = "left";
        ctx.fillStyle = faint;
        ctx.fillText(fit(`- - -  ${second.name}`, wide), 0, 11);
      }
    } else {
      ctx.fillStyle = faint;
      ctx.font = `13px ${font}`;
      ctx.textAlign = "center";
      ctx.fillText("curves begin with the first step", wide / 2, height / 2);
    }
    Object.assign(canvas.dataset, {
      rows: rows.count, alarms: over(), charts: out.map(([name]) => name).join(","), across,
      ages: (facts.histogram ?? []).map(([age]) => age).join(","), other: second.name ? other.count : 0,
      smoothing: model.get("smoothing"), paints: Number(canvas.dataset.paints ?? 0) + 1,
    });
    const last = rows.count ? rows.at(rows.count - 1, index.reward) : NaN;
    canvas.setAttribute("aria-label", `${rows.count} steps, reward ${short(last)}`);
  }
  const later = () => { if (!frame) frame = requestAnimationFrame(paint); };

  function takeSnapshot() {
    const view = model.get("snapshot");
    if (view && view.byteLength) rows.put(0, view);
    later();
  }
  function takeOther() {
    const view = model.get("other_rows");
    other = new Rows(columns.length);
    if (view && view.byteLength) other.put(0, view);
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
  const heard = {
    "change:snapshot": takeSnapshot, "change:other_rows": takeOther, "change:other": later, "change:facts": later,
    "change:evaluations": later, "change:smoothing": later, "msg:custom": message,
  };
  for (const [event, act] of Object.entries(heard)) model.on(event, act);
  const resized = new ResizeObserver(later);
  resized.observe(canvas);
  // a change of theme does not resize the canvas: repaint explicitly
  const themed = new MutationObserver(later);
  for (const node of [document.body, document.documentElement]) {
    themed.observe(node, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class", "data-theme"] });
  }
  takeSnapshot();
  takeOther();
  model.send({ have: rows.count });
  return () => {
    cancelAnimationFrame(frame);
    resized.disconnect();
    themed.disconnect();
    for (const [event, act] of Object.entries(heard)) model.off(event, act);
  };
}

export default jvLive(({ model, el }) => jvParts(model, el, { curves: drawCurves }));
