// The mapping inspector: fields and table (table.js) on top, details of one tensor below. The details are HTML, escaped
// by the kernel; fields and buttons call the panel's methods there.

function option(select, value, text) {
  const made = make("option", "", text);
  made.value = value;
  select.append(made);
}

// Records the milliseconds until a change was painted in the element's dataset, for tests.
function measure(el, name, began) {
  afterPaint(() => {
    const spent = performance.now() - began;
    el.dataset[`${name}Ms`] = spent.toFixed(1);
    el.dataset[`${name}MaxMs`] = Math.max(spent, Number(el.dataset[`${name}MaxMs`] || 0)).toFixed(1);
    el.dataset[`${name}Count`] = Number(el.dataset[`${name}Count`] || 0) + 1;
  });
}

function makeFields() {
  const bar = make("div", "jv-bar");
  const search = make("input", "jv-search");
  search.type = "search";
  search.placeholder = "search: words in any column";
  search.setAttribute("aria-label", "search rows");
  const selects = {};
  for (const [key, label] of [["status", "any status"], ["rule", "any rule"], ["rank", "any rank"]]) {
    selects[key] = make("select", `jv-select jv-by-${key}`);
    selects[key].setAttribute("aria-label", key);
    selects[key].dataset.any = label;
  }
  const count = make("span", "jv-count");
  bar.append(search, ...Object.values(selects), count);
  return { bar, search, selects, count };
}

function makeEditor(model) {
  const box = make("div", "jv-editor");
  const rule = make("input", "jv-rule-text");
  rule.spellcheck = false;
  rule.setAttribute("aria-label", "the rule of the selected row");
  rule.placeholder = "leaf -> tensor : axes -> axes";
  const apply = make("button", "jv-push jv-apply", "Apply");
  apply.title = "mapping.edit(rule): bind the model by the changed rules and show what they cover";
  const undo = make("button", "jv-push jv-undo", "Undo");
  undo.title = "panel.reset(): discard the edits";
  const path = make("input", "jv-path");
  path.setAttribute("aria-label", "file for the rules");
  path.value = "rules.txt";
  const save = make("button", "jv-push jv-save", "Save rules");
  save.title = "mapping.save_rules(path): a file for rules=path";
  const edit = () => model.send({ do: "edit", rule: rule.value, replace: model.get("rule") });
  apply.addEventListener("click", edit);
  undo.addEventListener("click", () => model.send({ do: "reset" }));
  save.addEventListener("click", () => model.send({ do: "save", path: path.value }));
  for (const field of [rule, path]) {
    field.addEventListener("keydown", (event) => {
      event.stopPropagation(); // JupyterLab would treat single letters as commands
      if (event.key === "Enter" && field === rule) edit();
    });
  }
  box.append(rule, apply, undo, path, save);
  return { box, rule };
}

function render({ model, el }) {
  const began = performance.now();
  el.classList.add("jv-inspector");
  const headline = make("div", "jv-mapping-headline");
  const line = make("div", "jv-line");
  const fields = makeFields();
  const editor = makeEditor(model);
  const note = make("div", "jv-note");
  const detail = make("div", "jv-detail");
  const values = make("div", "jv-values");
  const compare = make("button", "jv-push jv-compare", "Compare values");
  compare.title = "mapping.values(name): histograms of both sides and of their difference";
  compare.addEventListener("click", () => model.send({ do: "values" }));
  const ask = make("div", "jv-editor jv-ask");
  const name = make("input", "jv-params");
  name.placeholder = "policy.params";
  name.setAttribute("aria-label", "the variable that holds the parameters");
  const take = make("button", "jv-push jv-take", "Compare with this variable");
  const give = () => model.send({ do: "params", name: name.value });
  take.addEventListener("click", give);
  name.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Enter") give();
  });
  ask.append(name, take);

  const table = new VirtualTable({
    onSelect: (i) => { model.set("selected", i); model.save_changes(); },
    paint: (cell, column, i) => {
      if (column.key === "dtype") cell.textContent = cell.textContent.replaceAll("bfloat", "bf").replaceAll("float", "f");
      if (column.key === "status") {
        const dot = make("span", "jv-dot", "● ");
        dot.style.color = column.colours[column.codes[i]];
        cell.prepend(dot);
      }
    },
  });
  let later = 0;
  let equals = {}; // a new object whenever a selection changed: the table compares it to see if it can reuse its rows
  const choose = () => {
    const { status, rule, rank } = fields.selects;
    equals = {};
    for (const [key, select] of [["status", status], ["rule", rule]]) {
      if (select.value !== "") equals[key] = (code) => code === Number(select.value);
    }
    if (rank.value !== "") {
      const sets = table.byKey.ranks.sets;
      equals.ranks = (code) => sets[code].includes(Number(rank.value));
    }
  };
  const filter = (notify) => {
    const { rank } = fields.selects;
    table.filter(fields.search.value, equals);
    el.dataset.shown = table.rows.length;
    const of = table.total.toLocaleString("en");
    fields.count.textContent = table.count < table.total ? `${of} rows` : `${table.rows.length.toLocaleString("en")} of ${of} rows`;
    if (!notify) return;
    // the model holds it at once: rows that arrive now are shown by it
    const named = (key) => (fields.selects[key].value === "" ? "" : table.byKey[key].names[fields.selects[key].value]);
    model.off("change:query", fromQuery);
    model.set("query", { text: fields.search.value, status: named("status"), rule: named("rule"), rank: rank.value });
    model.on("change:query", fromQuery);
    clearTimeout(later); // the kernel is notified when typing pauses; it is not needed for the rows
    later = setTimeout(() => model.save_changes(), 200);
  };
  const load = (part) => {
    const data = unpack(model.get(part));
    for (const [key, select] of Object.entries(fields.selects)) {
      const kept = select.value;
      select.replaceChildren();
      option(select, "", select.dataset.any);
      const names = key === "rank" ? data.ranks.map(String) : data.columns.find((c) => c.key === key).names;
      names.forEach((name, code) => option(select, key === "rank" ? name : code, (key === "rank" ? `rank ${name}` : name) || "no rule"));
      if (key !== "rule" && [...select.options].some((o) => o.value === kept)) select.value = kept;
    }
    table.setData(data, model.get("count"));
    const longest = table.byKey.leaf.values.reduce((most, name) => Math.max(most, name.length), 0);
    table.root.style.setProperty("--jv-leaf-room", `${Math.min(8 + 6.8 * longest, 260)}px`); // of a small monospaced font
    el.dataset.rows = table.count;
    fromQuery();
  };
  const fromQuery = () => {
    const query = model.get("query");
    fields.search.value = query.text || "";
    for (const key of ["status", "rule"]) {
      const code = table.byKey[key].names.indexOf(query[key] || "\u0000");
      fields.selects[key].value = code < 0 ? "" : String(code);
    }
    fields.selects.rank.value = query.rank ?? "";
    choose();
    filter(false);
  };
  const texts = () => {
    headline.innerHTML = model.get("headline"); // escaped by the kernel
    line.textContent = model.get("line");
    line.dataset.state = model.get("state");
    note.textContent = model.get("note");
    note.dataset.bad = model.get("bad");
    editor.box.style.display = model.get("editable") ? "" : "none";
    editor.rule.value = model.get("rule");
    detail.innerHTML = model.get("detail"); // escaped by the kernel
    values.innerHTML = model.get("values");
    compare.style.display = model.get("selected") >= 0 ? "" : "none";
    compare.disabled = model.get("no_values") !== "";
    compare.title = compare.disabled ? `not now: ${model.get("no_values")}`
      : "mapping.values(name): histograms of both sides and of their difference";
    ask.style.display = model.get("ask") ? "" : "none";
  };
  fields.search.addEventListener("input", () => {
    const start = performance.now();
    filter(true);
    measure(el, "filter", start);
  });
  fields.search.addEventListener("keydown", (event) => event.stopPropagation());
  for (const select of Object.values(fields.selects)) {
    select.addEventListener("change", () => {
      const start = performance.now();
      choose();
      filter(true);
      measure(el, "filter", start);
    });
  }
  // The first screen is painted from the first rows; all rows are unpacked right after.
  const all = (since) => {
    load("table");
    table.show(model.get("selected"));
    measure(el, "ready", since);
    afterPaint(() => table.warm());
  };
  const events = {
    "change:table": () => all(performance.now()),
    "change:query": fromQuery,
    "change:selected": () => { table.show(model.get("selected")); texts(); },
  };
  for (const name of ["headline", "line", "state", "note", "bad", "detail", "values", "editable", "rule", "no_values", "ask"]) events[`change:${name}`] = texts;
  for (const [name, handler] of Object.entries(events)) model.on(name, handler);
  el.append(headline, line, fields.bar, table.root, editor.box, note, detail, compare, ask, values);
  load("head");
  texts();
  measure(el, "paint", began);
  afterPaint(() => { if (el.isConnected || el.dataset.rows) all(began); });
  return () => {
    clearTimeout(later);
    table.close();
    for (const [name, handler] of Object.entries(events)) model.off(name, handler);
  };
}

export default jvLive(render);
