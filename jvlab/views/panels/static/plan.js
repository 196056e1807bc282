// The plan: a heat map of bytes per link (SVG from the kernel), the buckets as lanes (lanes.js), predicted and measured
// seconds. A click on a link requests its boxes; a new bandwidth requests a new prediction.

function render({ model, el }) {
  el.classList.add("jv-lanes-panel", "jv-plan");
  const head = element("div", "jv-title");
  const headline = element("div", "jv-plan-headline");
  const parts = element("div", "jv-plan-parts");
  const heat = element("div", "jv-plan-heat");
  const times = element("div", "jv-plan-times");
  const detail = element("div", "jv-plan-detail");
  const bar = element("div", "jv-bar");
  const speed = element("input", "jv-speed");
  speed.type = "number";
  speed.min = "0.001";
  speed.step = "any";
  speed.setAttribute("aria-label", "GB/s per device and rank");
  speed.title = "plan.predict(link_gbps), plan.schedule(link_gbps)";
  const note = element("span", "jv-note jv-faint");
  bar.append(element("span", "jv-faint", "buckets on their way, if each device sends and each rank takes"), speed,
    element("span", "jv-faint", "GB/s:"), note);
  const lanes = new Lanes({ onPick: (i) => pick(model.get("lanes").bars.link[i]) });
  const pick = (link) => { model.set("picked", link); model.save_changes(); };
  speed.addEventListener("change", () => model.send({ do: "predict", gbps: Number(speed.value) }));
  speed.addEventListener("keydown", (event) => event.stopPropagation());
  heat.addEventListener("click", (event) => {
    const cell = event.target.closest("rect[data-link]");
    if (cell) pick(Number(cell.dataset.link));
  });
  const texts = () => {
    head.textContent = model.get("title");
    headline.innerHTML = model.get("headline"); // escaped by the kernel, as is what follows
    heat.innerHTML = model.get("heat");
    times.innerHTML = model.get("times");
    detail.innerHTML = model.get("detail");
    note.textContent = model.get("note");
    const picked = heat.querySelector(`rect[data-link="${model.get("picked")}"]`);
    if (picked) picked.classList.add("jv-picked");
  };
  const load = () => {
    speed.value = model.get("gbps");
    lanes.setData(model.get("lanes"));
  };
  const events = { "change:lanes": load, "change:gbps": load };
  for (const name of ["title", "headline", "heat", "times", "detail", "picked", "note"]) events[`change:${name}`] = texts;
  for (const [name, handler] of Object.entries(events)) model.on(name, handler);
  parts.append(heat, times);
  el.append(head, headline, parts, detail, bar, lanes.root);
  texts();
  load();
  return () => {
    lanes.close();
    for (const [name, handler] of Object.entries(events)) model.off(name, handler);
  };
}

export default jvLive(render);
