// The list of tensors of a sync, grouped by the bucket that sends them: what was sent, what is next, which digests were
// compared, where a run stops. Virtualised: only visible rows exist in the page.
const ROW = 20;
const HEIGHT = 220;
const COLOURS = { sent: PALETTE.tones.good, next: PALETTE.tones.wait, waits: PALETTE.tones.idle, bad: PALETTE.tones.bad,
                  brk: PALETTE.tones.bad };

function size(n) {
  const units = ["B", "KB", "MB", "GB"];
  let i = 0;
  while (n >= 1000 && i < units.length - 1) { n /= 1000; i += 1; }
  return i ? `${n.toFixed(1)} ${units[i]}` : `${n} B`;
}

// Always textContent, never innerHTML: names come from untrusted models.
function cell(text, style) {
  const made = document.createElement("span");
  made.textContent = text;
  made.style.cssText = style;
  return made;
}

// The rows to show: a line per tensor, below a line for its bucket if it shares one. {unit, tensor}: tensor -1 is a bucket.
function listed(units) {
  const rows = [];
  units.forEach((unit, i) => {
    if (units[i - 1] !== unit && units[i + 1] === unit) rows.push({ unit, tensor: -1, count: units.lastIndexOf(unit) - i + 1 });
    rows.push({ unit, tensor: i, inside: units[i - 1] === unit || units[i + 1] === unit });
  });
  return rows;
}

function drawTensors({ model, el }) {
  const box = document.createElement("div");
  box.className = "jv-tensors";
  box.tabIndex = 0;
  box.setAttribute("role", "list");
  box.style.cssText =
    `position:relative;overflow:auto;max-height:${HEIGHT}px;max-width:900px;margin:4px 0;` +
    "border:1px solid var(--jp-border-color2, rgba(128,128,128,.35));color:var(--jp-ui-font-color1, inherit);" +
    "font:12px/20px var(--jp-code-font-family, ui-monospace, monospace)";
  const inner = document.createElement("div");
  box.append(inner);
  el.append(box);
  let frame = 0;
  let rows = listed(model.get("units"));

  function row(at, { names, sizes, position, ticks, breaks, over }) {
    const { unit, tensor, inside, count } = rows[at];
    const state = unit < position ? "sent" : over ? "waits" : unit === position ? "next" : "waits";
    const made = document.createElement("div");
    made.setAttribute("role", "listitem");
    made.dataset.state = state;
    made.dataset.unit = unit;
    const narrow = box.clientWidth < 480; // names get the room
    made.style.cssText =
      `position:absolute;left:0;right:0;top:${at * ROW}px;height:${ROW}px;display:flex;gap:${narrow ? 6 : 10}px;padding:0 8px;` +
      (narrow ? "font-size:11px;" : "") +
      "white-space:nowrap;box-sizing:border-box;" +
      (state === "next" ? "background:var(--jp-layout-color2, rgba(128,128,128,.15));font-weight:600;" : "");
    const mark = cell(state === "sent" ? "●" : state === "next" ? "▶" : "○", `width:12px;color:${COLOURS[state]}`);
    const bytes = (text) => cell(text, `width:${narrow ? 56 : 80}px;text-align:right;color:var(--jp-ui-font-color2, #777)`);
    if (tensor < 0) {
      made.classList.add("jv-bucket");
      made.append(cell("", "width:10px"), mark, cell(`bucket ${unit + 1}: ${count} tensors together`,
        "flex:1;color:var(--jp-ui-font-color2, #777)"), bytes(size(sizes[unit])));
      return made;
    }
    // cut at its start where there is no room: names differ at their end
    const nameCell = (text) => {
      const name = cell("", "flex:1;min-width:0;overflow:hidden;text-overflow:ellipsis;direction:rtl;text-align:left");
      const whole = document.createElement("bdi");
      whole.style.direction = "ltr";
      whole.textContent = text;
      name.append(whole);
      return name;
    };
    made.dataset.index = tensor;
    made.classList.add("jv-tensor");
    made.title = `${names[tensor]}: ${state}; click to compare what the engine holds with what it will hold`;
    made.style.cursor = "pointer";
    const tick = ticks[tensor] === "=" ? "✓" : ticks[tensor] === "x" ? "✗" : "";
    made.append(
      cell(breaks.has(tensor) ? "◆" : "", `width:10px;color:${COLOURS.brk}`),
      inside ? cell("│", "width:12px;text-align:center;color:var(--jp-ui-font-color3, #999)") : mark,
      nameCell(names[tensor]),
      cell(tick, `width:14px;font-weight:700;color:${tick === "✗" ? COLOURS.bad : COLOURS.sent}`),
      ...(inside && narrow ? [] : [bytes(inside ? "" : size(sizes[unit]))]),
    );
    made.addEventListener("click", () => model.send({ look: tensor }));
    return made;
  }

  function paint() {
    frame = 0;
    inner.style.cssText = `position:relative;height:${rows.length * ROW}px`;
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - 2);
    const last = Math.min(rows.length, first + Math.ceil(HEIGHT / ROW) + 4);
    const now = { breaks: new Set(model.get("breaks")) };
    for (const name of ["names", "sizes", "position", "ticks", "over"]) now[name] = model.get(name);
    const shown = [];
    for (let i = first; i < last; i += 1) shown.push(row(i, now));
    inner.replaceChildren(...shown);
    box.dataset.position = model.get("position");
    box.dataset.rows = now.names.length;
    box.dataset.ticked = [...now.ticks].filter((t) => t === "=").length;
    box.dataset.painted = Number(box.dataset.painted ?? 0) + 1;
  }
  const later = () => { if (!frame) frame = requestAnimationFrame(paint); };  // many changes, one paint

  function follow() {
    // keep the current position visible, a third from the top, and rows whole
    const at = rows.findIndex((r) => r.unit >= model.get("position"));
    inner.style.cssText = `position:relative;height:${rows.length * ROW}px`; // nor can an empty one
    box.scrollTop = Math.max(0, (at < 0 ? rows.length : at) * ROW - 4 * ROW);
    later();
  }
  const regroup = () => { rows = listed(model.get("units")); later(); };
  const events = { "change:position": follow, "change:units": regroup };
  for (const name of ["names", "sizes", "ticks", "breaks", "over"]) events[`change:${name}`] = later;
  for (const [name, handler] of Object.entries(events)) model.on(name, handler);
  box.addEventListener("scroll", later);
  let placed = false; // a box that is not in the page yet cannot be scrolled
  const watcher = new ResizeObserver(() => {
    if (!placed && box.clientHeight) { placed = true; follow(); }
    later();
  });
  watcher.observe(box);
  follow();
  return () => {
    cancelAnimationFrame(frame);
    watcher.disconnect();
    for (const [name, handler] of Object.entries(events)) model.off(name, handler);
  };
}

export default jvLive(({ model, el }) => jvParts(model, el, { tensors: drawTensors }));
