// Every panel: drawn beside its snapshot in the notebook's output, and honest about the kernel behind it.
//
// The output of a cell holds only HTML, the last snapshot, so that a saved notebook never shows a widget without its
// model. In JupyterLab and Notebook 7 this module finds that HTML by its data-jv-panel, hides it, and draws the panel
// next to it. Elsewhere the widget is shown by its mime type, and the panel is drawn into the view.
const JV_TICK = 1000;     // ms between looks at the kernel's beat
const JV_SILENCE = 7;     // looks without a beat, which comes every two seconds: the kernel is gone
const JV_DETACHED = 30;   // looks after which a panel that left the page is given up

function jvLive(draw, { alone = false } = {}) {
  // alone: its buttons work without a kernel
  const initialize = ({ model }) => {
    const panelId = () => model.get("panel_id"); // sent right after the model was made
    const places = new Map(); // host element -> place
    let silent = 0, gone = "", frame = 0;

    const open = (host) => {
      const root = document.createElement("div");
      root.className = "jv-live";
      // JupyterLab would read j, k or x in a field as its own commands
      root.dataset.lmSuppressShortcuts = "true";
      const notice = document.createElement("div");
      notice.className = "jv-notice";
      notice.setAttribute("role", "status");
      const body = document.createElement("div");
      body.className = "jv-body";
      for (const name of model.get("classes") ?? []) body.classList.add(name);
      root.append(notice, body);
      host.append(root);
      const place = { host, root, notice, body, detached: 0, end: draw({ model, el: body }) };
      places.set(host, place);
      tell(place);
      return place;
    };
    const shut = (place) => {
      places.delete(place.host);
      place.end?.();
      place.host.classList.remove("jv-hosted");
      place.root.remove();
    };
    // The kernel is gone, or what the panel shows is: say so, show no green dot, and disable what cannot work.
    const tell = (place) => {
      const text = gone || model.get("notice") || "";
      place.notice.replaceChildren(...jvWords(text));
      place.root.classList.toggle("jv-gone", text !== "");
      place.root.dataset.gone = gone ? "kernel" : text ? "subject" : "";
      if (!gone) return;
      place.body.querySelectorAll('[data-jv="state"]').forEach((dot) => { dot.textContent = "○"; dot.style.color = PALETTE.tones.idle; });
      if (alone) return;
      place.body.querySelectorAll("button, input, select").forEach((control) => {
        control.disabled = true;
        control.title = "the kernel is gone";
      });
    };
    const tellAll = () => places.forEach(tell);
    const redraw = (place) => {
      place.end?.();
      place.body.replaceChildren();
      place.end = draw({ model, el: place.body });
      tell(place);
    };
    const lost = () => {
      if (gone) return;
      gone = model.get("beat")?.line || "snapshot; kernel gone";
      tellAll();
    };
    // the front end cut the model off or found it again: the next beat is due within two seconds
    const cutOff = () => { silent = Math.max(silent, JV_SILENCE - 4); };
    const beat = () => {
      silent = 0;
      jvBeats.set(model, [model.get("beat")?.number ?? 0, performance.now()]);
      if (!gone) return;
      gone = "";
      places.forEach(redraw);
    };
    const scan = () => {
      frame = 0;
      if (!panelId()) return;
      jvPanels.set(panelId(), { open, shut });
      for (const still of document.querySelectorAll(`[data-jv-panel="${panelId()}"]`)) {
        const host = still.closest(".jp-OutputArea-child");
        if (!host) continue;
        host.classList.add("jv-hosted");
        if (!places.has(host)) {
          open(host);
          model.send({ mounted: true });
        }
      }
    };
    const watch = new MutationObserver(() => { if (!frame) frame = requestAnimationFrame(scan); });
    watch.observe(document.body, { childList: true, subtree: true });
    const timer = setInterval(() => {
      silent += 1;
      if (silent >= JV_SILENCE) lost();
      for (const place of [...places.values()]) {
        place.detached = place.root.isConnected ? 0 : place.detached + 1;
        if (place.detached > JV_DETACHED) shut(place);
      }
    }, JV_TICK);
    model.on("change:beat", beat);
    model.on("change:notice", tellAll);
    model.on("comm_live_update", cutOff);
    model.on("change:panel_id", scan);
    scan();
    return () => {
      clearInterval(timer);
      cancelAnimationFrame(frame);
      watch.disconnect();
      jvPanels.delete(panelId());
      model.off("change:panel_id", scan);
      [...places.values()].forEach(shut);
      model.off("change:beat", beat);
      model.off("change:notice", tellAll);
      model.off("comm_live_update", cutOff);
    };
  };
  const render = ({ model, el }) => {
    const panel = jvPanels.get(model.get("panel_id"));
    const place = panel.open(el);
    if (el.closest(".jp-OutputArea")) model.send({ hosted: true }); // the output may hold HTML only
    return () => panel.shut(place);
  };
  return { initialize, render };
}

// When a click happened, in words that need no common clock: the kernel's last beat, and milliseconds since it came.
const jvBeats = new WeakMap(); // model -> [its last beat's number, when it came]
function jvWhen(model) {
  const [number, came] = jvBeats.get(model) ?? [0, 0];
  return number ? { beat: number, ms: performance.now() - came } : {};
}

const jvPanels = new Map(); // panel id -> how to draw one more view of it

// Text with `code` in backquotes, as nodes.
function jvWords(text) {
  return text.split("`").map((part, i) => {
    const made = document.createElement(i % 2 ? "code" : "span");
    made.textContent = part;
    return made;
  });
}
