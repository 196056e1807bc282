// The timeline: swim lanes (lanes.js) of the trainer, the replicas and the syncs.

function render({ model, el }) {
  el.classList.add("jv-lanes-panel", "jv-timeline");
  const title = element("div", "jv-title");
  const keys = element("div", "jv-keys");
  const bar = element("div", "jv-bar");
  const all = element("button", "jv-push jv-all", "Show all");
  all.title = "panel.reset()";
  const last = element("button", "jv-push jv-last", "Last steps");
  last.title = "panel.last(): the newest steps";
  let timer = 0;
  const press = (what) => { clearTimeout(timer); model.send({ do: what }); };
  all.addEventListener("click", () => press("reset"));
  last.addEventListener("click", () => press("last"));
  bar.append(all, last);
  const lanes = new Lanes({
    onView: (view) => {
      clearTimeout(timer); // the kernel is notified when the pointer rests
      timer = setTimeout(() => { model.set("view", view); model.save_changes(); }, 150);
    },
  });
  const load = () => {
    const data = model.get("data");
    title.textContent = data.title;
    keys.replaceChildren(...data.keys.map(([name, colour]) => {
      const key = element("span", "jv-key", name);
      const swatch = element("i");
      swatch.style.background = colour;
      key.prepend(swatch);
      return key;
    }));
    lanes.setData(data, true);
    showView();
  };
  const showView = () => {
    clearTimeout(timer); // a pending view of the pointer is outdated
    const view = model.get("view");
    if (view.length === 2) lanes.setView(view[0], view[1], false);
  };
  model.on("change:data", load);
  model.on("change:view", showView);
  el.append(title, keys, lanes.root, bar);
  load();
  return () => {
    clearTimeout(timer);
    lanes.close();
    model.off("change:data", load);
    model.off("change:view", showView);
  };
}

export default jvLive(render, { alone: true });
