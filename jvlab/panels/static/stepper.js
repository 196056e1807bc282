// The list of tensors of a sync: what was sent, what is next, which digests were compared, where a run stops.
// Virtualised: only visible rows exist in the page.
const ROW = 20;
const HEIGHT = 220;
const COLOURS = { sent: "#009E73", next: "#E69F00", waits: "#888888", bad: "#D55E00", brk: "#D55E00" };

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

function render({ model, el }) {
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

  function row(i, names, sizes, position, ticks, breaks, over) {
    const state = i < position ? "sent" : over ? "waits" : i === position ? "next" : "waits";
    const made = document.createElement("div");
    made.setAttribute("role", "listitem");
    made.dataset.index = i;
    made.dataset.state = state;
    made.title = `${names[i]}: ${state}; click to compare what the engine holds with what it will hold`;
    made.style.cssText =
      `position:absolute;left:0;right:0;top:${i * ROW}px;height:${ROW}px;display:flex;gap:10px;padding:0 8px;` +
      "cursor:pointer;white-space:nowrap;box-sizing:border-box;" +
      (state === "next" ? "background:var(--jp-layout-color2, rgba(128,128,128,.15));font-weight:600" : "");
    const tick = ticks[i] === "=" ? "✓" : ticks[i] === "x" ? "✗" : "";
    made.append(
      cell(breaks.has(i) ? "◆" : "", `width:10px;color:${COLOURS.brk}`),
      cell(state === "sent" ? "●" : state === "next" ? "▶" : "○", `width:12px;color:${COLOURS[state]}`),
      cell(names[i], "flex:1;overflow:hidden;text-overflow:ellipsis"),
      cell(tick, `width:14px;font-weight:700;color:${tick === "✗" ? COLOURS.bad : COLOURS.sent}`),
      cell(size(sizes[i]), "width:80px;text-align:right;color:var(--jp-ui-font-color2, #777)"),
    );
    made.addEventListener("click", () => model.send({ look: i }));
    return made;
  }

  function paint() {
    frame = 0;
    const names = model.get("names");
    inner.style.cssText = `position:relative;height:${names.length * ROW}px`;
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - 2);
    const last = Math.min(names.length, first + Math.ceil(HEIGHT / ROW) + 4);
    const given = [names, model.get("sizes"), model.get("position"), model.get("ticks"), new Set(model.get("breaks"))];
    const rows = [];
    for (let i = first; i < last; i += 1) rows.push(row(i, ...given, model.get("over")));
    inner.replaceChildren(...rows);
    box.dataset.position = model.get("position");
    box.dataset.rows = names.length;
    box.dataset.ticked = [...model.get("ticks")].filter((t) => t === "=").length;
    box.dataset.painted = Number(box.dataset.painted ?? 0) + 1;
  }
  const later = () => { if (!frame) frame = requestAnimationFrame(paint); };  // many changes, one paint

  function follow() {
    // keep the current position visible, a third from the top
    box.scrollTop = Math.max(0, model.get("position") * ROW - HEIGHT / 3);
    later();
  }
  box.addEventListener("scroll", later);
  model.on("change:position", follow);
  for (const name of ["names", "sizes", "ticks", "breaks", "over"]) model.on(`change:${name}`, later);
  follow();
  return () => {
    cancelAnimationFrame(frame);
    model.off("change:position", follow);
    for (const name of ["names", "sizes", "ticks", "breaks", "over"]) model.off(`change:${name}`, later);
  };
}

export default { render };
