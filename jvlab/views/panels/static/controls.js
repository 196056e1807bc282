// The parts of a panel (HTML, buttons, fields) as the kernel describes them in `parts`, laid out by `arrangement`.
// Only what changed is touched, so that a field keeps its cursor and a list its place.

function jvParts(model, el, special = {}) {
  const made = new Map(); // part's id -> {node, update, seen}
  const ends = [];

  const button = (id, state) => {
    const node = document.createElement("button");
    node.type = "button";
    node.className = `jv-push ${state.class}`;
    node.addEventListener("click", () => {
      if (state.kind === "toggle") model.send({ part: id, value: node.getAttribute("aria-pressed") !== "true" });
      else model.send({ part: id, press: true, ...jvWhen(model) });
    });
    return {
      node,
      update: (now) => {
        node.textContent = now.description;
        node.disabled = Boolean(now.why);
        node.title = now.why ? `not now: ${now.why}` : now.tooltip;
        node.classList.toggle("jv-danger", now.style === "danger");
        if (now.kind === "toggle") node.setAttribute("aria-pressed", String(Boolean(now.value)));
      },
    };
  };
  const field = (id, state) => {
    const node = document.createElement("label");
    node.className = `jv-field ${state.class}`;
    const name = document.createElement("span");
    const input = document.createElement(state.kind === "select" ? "select" : "input");
    if (state.kind === "number" || state.kind === "check") input.type = { number: "number", check: "checkbox" }[state.kind];
    const wrong = document.createElement("span");
    wrong.className = "jv-wrong";
    wrong.setAttribute("role", "alert");
    const read = () => (state.kind === "check" ? input.checked : input.value);
    const send = () => model.send({ part: id, value: read() });
    input.addEventListener("change", send);
    input.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter") { send(); model.send({ part: id, press: true, ...jvWhen(model) }); }
    });
    node.append(...(state.kind === "check" ? [input, name] : [name, input]), wrong);
    let options = "";
    return {
      node,
      update: (now) => {
        name.textContent = now.description;
        node.title = now.why ? `not now: ${now.why}` : now.tooltip;
        input.disabled = Boolean(now.why);
        if (now.kind === "select" && JSON.stringify(now.options) !== options) {
          options = JSON.stringify(now.options);
          input.replaceChildren(...now.options.map((text) => new Option(text, text)));
        }
        if (now.width) input.style.width = now.width;
        if (now.placeholder) input.placeholder = now.placeholder;
        if (now.kind === "check") input.checked = Boolean(now.value);
        else if (document.activeElement !== input) input.value = now.value ?? "";
        wrong.textContent = now.wrong ?? "";
        node.dataset.wrong = String(Boolean(now.wrong));
      },
    };
  };
  const html = (id, state) => {
    const node = document.createElement("div");
    node.className = `jv-part ${state.class}`;
    return { node, update: (now) => { node.innerHTML = now.value; } }; // escaped by the kernel
  };
  const drawn = (id, state) => {
    const node = document.createElement("div");
    node.className = `jv-part ${state.class}`;
    ends.push(special[state.draw]({ model, el: node }));
    return { node, update: () => {} };
  };
  const kinds = { html, button, toggle: button, text: field, number: field, select: field, check: field, draw: drawn };

  const part = (id) => {
    const state = model.get("parts")[id];
    if (!state) return null;
    if (!made.has(id)) made.set(id, { ...kinds[state.kind](id, state), seen: "" });
    const found = made.get(id);
    const text = JSON.stringify(state);
    if (found.seen !== text) {
      found.seen = text;
      found.update(state);
      found.node.style.display = state.hidden ? "none" : "";
    }
    return found.node;
  };
  const box = (tree) => {
    const node = document.createElement("div");
    node.className = `${tree.row ? "jv-row-of-parts" : "jv-column"} ${tree.class ?? ""}`;
    node.append(...tree.of.map((one) => (typeof one === "string" ? part(one) : box(one))).filter(Boolean));
    return node;
  };
  let tree = "";
  const arrange = () => {
    const now = JSON.stringify(model.get("arrangement"));
    if (now === tree) return;
    tree = now;
    el.replaceChildren(box(model.get("arrangement")));
  };
  const update = () => {
    for (const id of made.keys()) part(id);
    for (const id of [...made.keys()]) if (!model.get("parts")[id]) made.delete(id);
    arrange();
  };
  arrange();
  model.on("change:parts", update);
  model.on("change:arrangement", update);
  return () => {
    model.off("change:parts", update);
    model.off("change:arrangement", update);
    ends.forEach((end) => end?.());
  };
}
