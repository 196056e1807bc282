// The rollout viewer: one prompt at a time, its samples side by side, every token coloured.
//
// All text comes from a model and is only written as textContent, so that it cannot become HTML. Python has already
// escaped invisible and direction-changing characters.

const NAMES = { logprob: "log-probability", gap: "engine − trainer", version: "weight version" };

// Two hues that are distinct for every kind of colour blindness; the text keeps the theme's colour on both.
const WARM = (share) => `rgba(213,94,0,${(0.55 * share).toFixed(3)})`;
const COLD = (share) => `rgba(0,114,178,${(0.55 * share).toFixed(3)})`;

function make(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text; // never innerHTML: a model wrote it
  return node;
}

const shown = (value, digits = 3) => (value === null || value === undefined ? "–" : value.toFixed(digits));
const signed = (value) => (value === null ? "–" : (value > 0 ? "+" : "") + value.toPrecision(3));

function versionColour(data, version) {
  const place = data.versions.indexOf(version);
  return place < 0 ? "transparent" : data.palette[place % data.palette.length];
}

function background(data, sample, t, colour) {
  if (colour === "logprob") {
    const value = sample.logprobs[t];
    return value === null ? "" : WARM(Math.min(1, Math.max(value, data.floor) / data.floor));
  }
  if (colour === "gap") {
    const value = sample.gap ? sample.gap[t] : null;
    if (value === null || !data.reach) return "";
    const share = Math.abs(value) / data.reach;
    return value > 0 ? WARM(share) : COLD(share);
  }
  return versionColour(data, sample.versions[t]) + "55"; // a third of the ribbon's opacity, behind the text
}

function tooltip(sample, t) {
  const parts = [`token ${sample.ids[t]}`, `place ${t}`, `log P ${shown(sample.logprobs[t], 4)}`];
  if (sample.gap) parts.push(`engine − trainer ${signed(sample.gap[t])}`);
  if (sample.versions.length) parts.push(`version ${sample.versions[t]}`);
  return parts.join(" · ");
}

function drawLegend(box, data, colour) {
  box.replaceChildren();
  if (colour === "version") {
    for (const version of data.versions) {
      const entry = make("span", "jv-entry");
      const swatch = make("span", "jv-swatch");
      swatch.style.background = versionColour(data, version);
      entry.append(swatch, `version ${version} `);
      box.append(entry);
    }
    if (!data.versions.length) box.append("no version is known");
    return;
  }
  const scale = make("span", "jv-scale");
  if (colour === "logprob") {
    scale.style.background = `linear-gradient(90deg, ${WARM(0)}, ${WARM(1)})`;
    box.append("certain", scale, `${data.floor} nats or less`);
  } else {
    scale.style.background = `linear-gradient(90deg, ${COLD(1)}, ${COLD(0)}, ${WARM(0)}, ${WARM(1)})`;
    box.append(`trainer higher by ${data.reach.toPrecision(2)}`, scale, `engine higher by ${data.reach.toPrecision(2)}`);
  }
}

function drawRibbon(data, sample) {
  const ribbon = make("div", "jv-ribbon");
  for (let from = 0; from < sample.versions.length; ) {
    let to = from;
    while (to < sample.versions.length && sample.versions[to] === sample.versions[from]) to += 1;
    const part = make("div");
    part.style.flexGrow = String(to - from);
    part.style.background = versionColour(data, sample.versions[from]);
    part.title = `version ${sample.versions[from]}: tokens ${from} to ${to - 1}`;
    ribbon.append(part);
    from = to;
  }
  return ribbon;
}

// What a reward is the sum of, as small numbers after it.
function drawParts(sample) {
  const parts = Object.entries(sample.parts ?? {});
  return make("span", "jv-parts jv-faint", parts.map(([name, value]) => `${name} ${shown(value)}`).join(" + "));
}

// `marks`: the sample that others are compared with, and a text that is searched for.
function drawSample(data, sample, colour, best, marks) {
  const card = make("div", "jv-sample");
  const head = make("div", "jv-head");
  head.append(make("b", "", `sample ${sample.number}`));
  if (sample.reward !== null) {
    head.append(make("span", "jv-reward", `reward ${shown(sample.reward)}${sample.reward === best ? " ★" : ""}`));
  }
  if (Object.keys(sample.parts ?? {}).length) head.append(drawParts(sample));
  const difference = marks.reference && marks.reference !== sample ? jvDiff(marks.reference.ids, sample.ids) : null;
  const found = jvFound(sample.pieces, marks.query);
  if (marks.reference === sample) head.append(make("span", "jv-difference", "the others are compared with this one"));
  else if (difference) {
    const how = difference.exact ? "" : " (too long to align: all between the common beginning and end)";
    head.append(make("span", "jv-difference", `${difference.fresh.size} ${difference.fresh.size === 1 ? "token differs" : "tokens differ"} from sample ${marks.reference.number}${how}`));
  }
  head.append(make("span", "jv-faint", `${sample.ids.length} tokens · ${sample.finish} · mean log P ${shown(sample.mean)}`));
  card.append(head, drawRibbon(data, sample));
  const text = make("div", "jv-model jv-text");
  const special = new Set(sample.special);
  sample.pieces.forEach((piece, t) => {
    // a character made of several tokens belongs to the last one; the others show a dot to hover over, by CSS, so that
    // copied text is unchanged
    const token = make("span", "jv-token" + (special.has(t) ? " jv-special" : "") + (piece ? "" : " jv-part"), piece);
    token.classList.toggle("jv-fresh", Boolean(difference?.fresh.has(t)));
    token.classList.toggle("jv-found", found.has(t));
    token.style.background = background(data, sample, t, colour);
    token.dataset.place = String(t);
    token.title = tooltip(sample, t);
    text.append(token);
  });
  card.append(text);
  if (sample.why) card.append(make("div", "jv-faint", `token ids are shown: ${sample.why}`), make("div", "jv-model", sample.text));
  if (sample.error) card.append(make("div", "jv-bad", sample.error));
  return card;
}

function render({ model, el }) {
  const root = make("div", "jv-rollout");
  root.tabIndex = 0;
  // Without this, JupyterLab would handle j, k and the arrow keys itself.
  root.dataset.lmSuppressShortcuts = "true";
  root.setAttribute("role", "group");
  root.setAttribute("aria-label", "rollout viewer");
  el.append(root);

  const bar = make("div", "jv-bar");
  const back = make("button", "jv-push jv-back", "◀");
  const on = make("button", "jv-push jv-on", "▶");
  const where = make("span", "jv-where");
  back.title = "previous prompt (↑ or k)";
  on.title = "next prompt (↓ or j)";
  const move = make("span", "jv-set");
  move.append(back, where, on);
  const choice = make("span", "jv-set");
  choice.append(make("span", "jv-faint", "colour"));
  const buttons = {};
  for (const name of Object.keys(NAMES)) {
    buttons[name] = make("button", `jv-push jv-by-${name}`, NAMES[name]);
    buttons[name].addEventListener("click", () => set({ colour: name }));
    choice.append(buttons[name]);
  }
  const legend = make("span", "jv-legend jv-faint");
  const compare = make("button", "jv-push jv-diff", "diff");
  compare.title = "compare the other samples with the chosen one (d)";
  compare.addEventListener("click", () => toggleDiff());
  const find = make("span", "jv-set");
  const search = make("input", "jv-search");
  search.type = "search";
  search.placeholder = "search";
  search.setAttribute("aria-label", "search prompts and answers");
  const hits = make("span", "jv-hits jv-faint");
  find.append(search, hits);
  search.addEventListener("input", () => set({ query: search.value }));
  search.addEventListener("keydown", (event) => {
    event.stopPropagation(); // j and k are letters here
    if (event.key === "Enter") toMatch(event.shiftKey ? -1 : 1);
  });
  bar.append(move, find, choice, compare, legend);
  const prompt = make("div", "jv-prompt jv-model");
  const samples = make("div", "jv-samples");
  const info = make("div", "jv-info jv-faint");
  const title = make("div", "jv-title");
  const notes = make("div", "jv-faint");
  root.append(title, bar, prompt, samples, info, notes);

  function set(values) {
    for (const [name, value] of Object.entries(values)) model.set(name, value);
    model.save_changes();
  }

  function clamped() {
    const groups = model.get("data").groups;
    const at = Math.max(0, Math.min(model.get("prompt"), groups.length - 1));
    const count = groups.length ? groups[at].samples.length : 0;
    return { groups, at, count, sample: Math.max(0, Math.min(model.get("sample"), count - 1)) };
  }

  const toggleDiff = () => {
    const { sample } = clamped();
    set({ reference: model.get("reference") === sample ? -1 : sample });
  };

  // The prompts that hold the text that is searched for, in their own text or in an answer's; all without one.
  function matches() {
    const wanted = model.get("query").toLowerCase();
    const holds = (text) => text.toLowerCase().includes(wanted);
    return model.get("data").groups.flatMap((group, at) =>
      !wanted || holds(group.prompt) || group.samples.some((s) => holds(s.text)) ? [at] : []);
  }
  function toMatch(by) {
    const { at } = clamped(), places = matches();
    const next = by > 0 ? places.find((p) => p > at) ?? places[0] : places.findLast((p) => p < at) ?? places.at(-1);
    if (next !== undefined && next !== at) set({ prompt: next, sample: 0, reference: -1 });
  }

  function draw() {
    const data = model.get("data");
    const query = model.get("query"), places = matches();
    if (document.activeElement !== search) search.value = query;
    hits.textContent = query ? `${places.length} of ${data.groups.length} prompts` : "";
    const colour = model.get("colour");
    const { groups, at, count } = clamped();
    title.textContent = data.title;
    where.textContent = groups.length ? `prompt ${at + 1} of ${groups.length}` : "no samples";
    back.disabled = at <= 0;
    on.disabled = at >= groups.length - 1;
    for (const [name, button] of Object.entries(buttons)) button.setAttribute("aria-pressed", String(name === colour));
    buttons.gap.disabled = !data.compared;
    buttons.gap.title = data.compared ? "" : "batch.compare(policy) brings the trainer's log-probabilities";
    drawLegend(legend, data, colour);
    samples.replaceChildren();
    const found = groups.length > 0 && !(query && places.length === 0); // what does not hold the text is not on show
    prompt.textContent = found ? groups[at].prompt : "";
    prompt.style.display = found ? "" : "none";
    const list = found ? groups[at].samples : [];
    if (groups.length && !found) samples.textContent = `no prompt and no answer holds “${query}”`;
    const rewards = list.map((s) => s.reward).filter((r) => r !== null);
    const most = Math.max(...rewards);
    const best = rewards.length > 1 && Math.min(...rewards) < most ? most : NaN; // where all are equal, none is best
    const marks = { reference: list[model.get("reference")], query };
    compare.setAttribute("aria-pressed", String(Boolean(marks.reference)));
    compare.disabled = list.length < 2;
    list.forEach((sample, index) => {
      const card = drawSample(data, sample, colour, best, marks);
      card.addEventListener("click", () => set({ sample: index }));
      samples.append(card);
    });
    notes.textContent = [data.left, ...data.notes].filter(Boolean).join(" · ");
    choose();
    root.dataset.prompt = String(at);
    root.dataset.colour = colour;
    root.dataset.samples = String(count);
    root.dataset.hits = query ? String(places.length) : "";
    root.dataset.reference = String(model.get("reference"));
  }

  function choose() {
    const { groups, at, sample } = clamped();
    [...samples.children].forEach((card, index) => card.classList.toggle("jv-chosen", index === sample));
    const card = samples.children[sample];
    // scroll only inside its own box: the notebook must not jump
    if (card && samples.scrollHeight > samples.clientHeight) samples.scrollTop = card.offsetTop - samples.offsetTop;
    root.dataset.sample = String(sample);
    info.textContent = groups.length ? "↑ ↓ or k j: prompts · ← → : samples · c: colour · d: diff · point at a token for its numbers" : "";
  }

  samples.addEventListener("mouseover", (event) => {
    const token = event.target.closest(".jv-token");
    if (token) info.textContent = token.title;
  });

  const go = (next) => next >= 0 && next < clamped().groups.length && set({ prompt: next, sample: 0, reference: -1 });
  back.addEventListener("click", () => go(clamped().at - 1));
  on.addEventListener("click", () => go(clamped().at + 1));
  root.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { at, count, sample } = clamped();
    const data = model.get("data");
    const colours = Object.keys(NAMES).filter((name) => name !== "gap" || data.compared);
    const to = (next) => () => go(next);
    const pick = (next) => () => next >= 0 && next < count && set({ sample: next });
    const keys = {
      ArrowDown: to(at + 1), j: to(at + 1), ArrowUp: to(at - 1), k: to(at - 1),
      ArrowRight: pick(sample + 1), l: pick(sample + 1), ArrowLeft: pick(sample - 1), h: pick(sample - 1),
      d: toggleDiff,
      c: () => set({ colour: colours[(colours.indexOf(model.get("colour")) + 1) % colours.length] }),
    };
    const act = keys[event.key];
    if (!act) return;
    act();
    event.preventDefault(); // the page would scroll
    event.stopPropagation();
  });

  model.on("change:data", draw);
  model.on("change:colour", draw);
  model.on("change:prompt", draw);
  model.on("change:sample", choose);
  model.on("change:reference", draw);
  model.on("change:query", draw);
  draw();
  return () => {
    model.off("change:data", draw);
    model.off("change:colour", draw);
    model.off("change:prompt", draw);
    model.off("change:sample", choose);
    model.off("change:reference", draw);
    model.off("change:query", draw);
  };
}

export default jvLive(render, { alone: true });
