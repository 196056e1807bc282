// A virtualised table: only visible rows are in the page.
//
// Concatenated before a panel's own file (views/panels/_live.py; there is no bundler), so nothing is exported. Data is sent
// once, as columns; searching, filtering and sorting happen here, without the kernel.
//   {kind: "text", key, title, text}           one value per line
//   {kind: "code", key, title, names, codes}   few distinct values: each name once, and a number per row
//   {kind: "number", key, title, values}       sorted as numbers, shown as bytes
// When sent, a column's text, codes or values are a range of bytes {at, length} after a JSON header.

const ROW = 24; // px; fixed, so that positions of rows need no measuring
const MOST = 12; // visible rows
const SPARE = 8; // rows above and below the visible ones, so that scrolling shows no gap

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text; // never innerHTML: names come from models
  return element;
}

function humanBytes(n) {
  for (const unit of ["B", "KB", "MB", "GB"]) {
    if (Math.abs(n) < 1000) return unit === "B" ? `${n} B` : `${n.toFixed(1)} ${unit}`;
    n /= 1000;
  }
  return `${n.toFixed(1)} TB`;
}

// Calls back after the next paint: an animation frame's callback runs before the paint, a task posted from it after.
function afterPaint(callback) {
  requestAnimationFrame(() => setTimeout(callback, 0));
}

function unpack(view) {
  const bytes = new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
  const decoder = new TextDecoder();
  const size = new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
  const data = JSON.parse(decoder.decode(bytes.subarray(4, 4 + size)));
  // copied, because a typed array must start at a multiple of its width
  const part = ({ at, length }) => bytes.slice(4 + size + at, 4 + size + at + length);
  for (const column of data.columns) {
    if (column.kind === "text") column.text = decoder.decode(part(column.bytes));
    if (column.kind === "code") column.codes = new Uint32Array(part(column.bytes).buffer);
    if (column.kind === "number") column.values = new Float64Array(part(column.bytes).buffer);
  }
  return data;
}

class Column {
  constructor(given, count) {
    Object.assign(this, given);
    this.count = count;
    if (this.kind === "text") this.values = count ? this.text.split("\n") : [];
    this.lowered = null;
    this.order = null;
  }

  // Lower case, computed on first use: it would double the time to the first paint.
  get low() {
    if (!this.lowered) {
      if (this.kind === "text") this.lowered = this.count ? this.text.toLowerCase().split("\n") : [];
      else this.lowered = this.names.map((name) => name.toLowerCase());
    }
    return this.lowered;
  }

  at(i) {
    if (this.kind === "text") return this.values[i];
    if (this.kind === "code") return this.names[this.codes[i]];
    return humanBytes(this.values[i]);
  }

  // A test of one word against a row. In coded columns each distinct value is tested once.
  tester(word) {
    if (this.kind === "text") {
      const low = this.low;
      return (i) => low[i].includes(word);
    }
    if (this.kind === "code" && this.searched !== false) {
      const hit = this.low.map((name) => name.includes(word));
      return hit.includes(true) ? (i) => hit[this.codes[i]] : null;
    }
    return null;
  }

  // All rows in this column's order; computed once. Digits are padded: layers.9 comes before layers.10.
  rank(count) {
    if (this.order) return this.order;
    const natural = (s) => s.replace(/\d+/g, (d) => d.padStart(8, "0"));
    let keys;
    if (this.kind === "number") keys = this.values;
    else if (this.kind === "text") keys = this.values.map(natural);
    else {
      const names = this.names.map(natural);
      const sorted = names.map((_, i) => i).sort((a, b) => (names[a] < names[b] ? -1 : names[a] > names[b] ? 1 : 0));
      const place = [];
      sorted.forEach((name, at) => { place[name] = at; });
      keys = Array.from(this.codes, (c) => place[c]);
    }
    const rows = Array.from({ length: count }, (_, i) => i);
    rows.sort((a, b) => (keys[a] < keys[b] ? -1 : keys[a] > keys[b] ? 1 : a - b));
    this.order = rows;
    return rows;
  }
}

class VirtualTable {
  constructor({ onSelect, paint }) {
    this.onSelect = onSelect;
    this.paint = paint || (() => {}); // decorates a cell: (cell, column, row)
    this.root = make("div", "jv-table");
    this.head = make("div", "jv-table-head");
    this.body = make("div", "jv-table-body");
    this.body.tabIndex = 0;
    this.body.setAttribute("role", "grid");
    this.space = make("div", "jv-table-space");
    this.body.append(this.space);
    this.root.append(this.head, this.body);
    this.selected = -1;
    this.sortKey = null;
    this.sortUp = true;
    this.conditions = { text: "", equals: {} };
    this.pool = [];
    this.body.addEventListener("scroll", () => this.draw(), { passive: true });
    this.body.addEventListener("keydown", (event) => this.key(event));
    this.body.addEventListener("click", (event) => {
      const row = event.target.closest(".jv-row");
      if (row) this.choose(Number(row.dataset.row));
    });
    // The panel may be laid out after it is built, or resized.
    this.watcher = new ResizeObserver(() => this.draw());
    this.watcher.observe(this.body);
  }

  // `total`: how many rows there will be, if `data` holds the first ones only.
  setData(data, total = data.count) {
    this.count = data.count;
    this.total = total;
    this.last = null;
    this.columns = data.columns.map((c) => new Column(c, data.count));
    this.byKey = Object.fromEntries(this.columns.map((c) => [c.key, c]));
    this.shownColumns = this.columns.filter((c) => c.title);
    this.head.replaceChildren();
    for (const column of this.shownColumns) {
      const cell = make("button", `jv-cell jv-${column.key}`, column.title);
      cell.title = `sort by ${column.title}`;
      cell.addEventListener("click", () => this.sort(column.key));
      this.head.append(cell);
    }
    // Rows of the same columns stay: a click that began on one would be lost with it.
    const keys = this.shownColumns.map((c) => c.key).join();
    if (keys !== this.keys) {
      this.pool.forEach((row) => row.remove());
      this.pool = [];
      this.keys = keys;
    }
    for (const row of this.pool) for (const cell of row.children) cell.title = "";
    this.markSort();
    this.apply();
  }

  // `equals`: {column key: (code) => bool}, tested on coded columns.
  filter(text, equals) {
    this.conditions = { text, equals };
    this.apply();
  }

  sort(key) {
    this.sortUp = this.sortKey === key ? !this.sortUp : true;
    this.sortKey = key;
    this.markSort();
    this.apply();
  }

  markSort() {
    this.shownColumns.forEach((column, i) => {
      const mine = column.key === this.sortKey;
      this.head.children[i].textContent = column.title + (mine ? (this.sortUp ? " ▲" : " ▼") : "");
    });
  }

  apply() {
    const words = this.conditions.text.toLowerCase().split(/\s+/).filter(Boolean);
    const tests = words.map((word) => this.columns.map((c) => c.tester(word)).filter(Boolean));
    const codes = Object.entries(this.conditions.equals).map(([key, allowed]) => {
      const column = this.byKey[key];
      const passes = column.names.map((_, code) => allowed(code));
      return (i) => passes[column.codes[i]];
    });
    const keep = (i) => {
      for (const passes of codes) if (!passes(i)) return false;
      for (const any of tests) {
        let hit = false;
        for (let t = 0; t < any.length && !hit; t++) hit = any[t](i);
        if (!hit) return false;
      }
      return true;
    };
    this.rows = this.candidates().filter(keep);
    this.last = { ...this.conditions, key: this.sortKey, up: this.sortUp };
    this.space.style.height = `${(this.count < this.total ? this.total : this.rows.length) * ROW}px`;
    this.body.style.height = `${Math.min(Math.max(this.total, 3), MOST) * ROW + 2}px`; // independent of the filter: constant while typing
    this.body.scrollTop = 0;
    this.draw();
  }

  // The rows to search: if the text was extended, only those that matched before.
  candidates() {
    const { last } = this;
    const same = last && last.key === this.sortKey && last.up === this.sortUp;
    if (same && this.conditions.text.startsWith(last.text) && last.equals === this.conditions.equals) return this.rows;
    const order = this.sortKey ? this.byKey[this.sortKey].rank(this.count) : Array.from({ length: this.count }, (_, i) => i);
    return this.sortKey && !this.sortUp ? [...order].reverse() : order;
  }

  // Prepares what the first keystroke needs, one column at a time, when idle.
  warm() {
    const rest = this.columns.filter((c) => c.kind !== "number" && !c.lowered);
    if (!rest.length) return;
    void rest[0].low;
    this.warming = setTimeout(() => this.warm(), 0);
  }

  draw() {
    if (!this.rows) return;
    this.head.style.paddingRight = `${8 + this.body.offsetWidth - this.body.clientWidth}px`; // space for the scroll bar
    const height = this.body.clientHeight || MOST * ROW;
    const first = Math.max(0, Math.floor(this.body.scrollTop / ROW) - SPARE);
    const last = Math.min(this.rows.length, Math.ceil((this.body.scrollTop + height) / ROW) + SPARE);
    while (this.pool.length < last - first) this.pool.push(this.makeRow());
    this.pool.forEach((row, k) => {
      const at = first + k;
      row.style.display = at < last ? "" : "none";
      if (at < last) this.fill(row, at);
    });
  }

  makeRow() {
    const row = make("div", "jv-row");
    row.setAttribute("role", "row");
    for (const column of this.shownColumns) {
      const cell = make("div", `jv-cell jv-${column.key}`);
      if (column.kind === "text") cell.append(make("bdi")); // truncated at the start: names differ at their end
      row.append(cell);
    }
    this.space.append(row);
    return row;
  }

  fill(row, at) {
    const i = this.rows[at];
    row.style.transform = `translateY(${at * ROW}px)`;
    row.dataset.row = i;
    row.classList.toggle("jv-selected", i === this.selected);
    this.shownColumns.forEach((column, k) => {
      const cell = row.children[k];
      const text = column.at(i);
      if (cell.title === text && cell.title) return;
      cell.title = text;
      if (column.kind === "text") cell.firstChild.textContent = text;
      else cell.textContent = text;
      this.paint(cell, column, i);
    });
  }

  choose(i) {
    this.show(i);
    this.onSelect(i);
  }

  // Marks a row, and scrolls to it if it is not visible.
  show(i) {
    this.selected = i;
    const at = this.rows ? this.rows.indexOf(i) : -1;
    if (at >= 0) {
      const top = at * ROW;
      const height = this.body.clientHeight;
      if (top < this.body.scrollTop || top + ROW > this.body.scrollTop + height) this.body.scrollTop = Math.max(0, top - height / 2);
    }
    this.draw();
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (!step || !this.rows.length) return;
    event.preventDefault();
    event.stopPropagation(); // JupyterLab would move to the next cell
    const now = this.rows.indexOf(this.selected);
    this.choose(this.rows[Math.min(Math.max(now + step, 0), this.rows.length - 1)]);
  }

  close() {
    clearTimeout(this.warming);
    this.watcher.disconnect();
  }
}
