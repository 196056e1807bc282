// Sliders over the settings of a run; the kernel answers each change with a forecast (HTML, escaped there).

function make(tag, name, text) {
  const found = document.createElement(tag);
  if (name) found.className = name;
  if (text !== undefined) found.textContent = text;
  return found;
}

function render({ model, el }) {
  el.classList.add("jv-forecast");
  const title = make("div", "jv-title", model.get("title"));
  const parts = make("div", "jv-forecast-parts");
  const bar = make("div", "jv-forecast-sliders");
  const result = make("div", "jv-forecast-result");
  result.setAttribute("aria-live", "polite");
  const note = make("div", "jv-forecast-note");
  const inputs = {};
  let timer = 0;
  const values = () => {
    const out = { placement: place.value };
    for (const [name, { input, stops }] of Object.entries(inputs)) out[name] = stops[Number(input.value)];
    return out;
  };
  const ask = () => {
    clearTimeout(timer); // one question when the pointer rests, not one for every pixel
    el.classList.add("jv-waiting");
    timer = setTimeout(() => model.send({ do: "predict", values: values() }), 120);
  };
  for (const { name, label, values: stops } of model.get("sliders")) {
    const line = make("label", "jv-forecast-line");
    const input = make("input", `jv-slider jv-${name}`);
    const shown = make("output", "jv-forecast-value");
    Object.assign(input, { type: "range", min: 0, max: stops.length - 1, step: 1 });
    input.title = `plan.predict(${name}=…)`;
    input.addEventListener("input", () => { shown.textContent = stops[Number(input.value)]; ask(); });
    input.addEventListener("keydown", (event) => event.stopPropagation());
    line.append(make("span", "", label), input, shown);
    bar.append(line);
    inputs[name] = { input, shown, stops };
  }
  const line = make("label", "jv-forecast-line");
  const place = make("select", "jv-placement");
  for (const name of model.get("places")) place.append(make("option", "", name));
  place.title = "plan.predict(placement=…): who shares a device";
  place.addEventListener("change", ask);
  line.append(make("span", "", "devices"), place);
  const reset = make("button", "jv-push jv-reset", "As measured");
  reset.title = "panel.reset()";
  reset.addEventListener("click", () => { clearTimeout(timer); model.send({ do: "reset" }); });
  bar.append(line, reset);
  const load = () => {
    const chosen = model.get("chosen");
    for (const [name, { input, shown, stops }] of Object.entries(inputs)) {
      const at = stops.indexOf(chosen[name]);
      if (at >= 0) input.value = at;
      shown.textContent = chosen[name];
    }
    place.value = chosen.placement;
    result.innerHTML = model.get("result");
    note.textContent = model.get("note");
    el.dataset.answers = model.get("answers");
    el.classList.remove("jv-waiting");
  };
  const names = ["change:answers", "change:note"];
  for (const name of names) model.on(name, load);
  parts.append(bar, result);
  el.append(title, parts, note);
  load();
  return () => {
    clearTimeout(timer);
    for (const name of names) model.off(name, load);
  };
}

export default jvLive(render);
