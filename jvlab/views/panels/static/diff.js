// What two lists of tokens have in common: for a diff of two samples, and for a search in them.
const DIFF_CELLS = 4e6; // of the table of an exact alignment; longer middles are marked as a whole

// Which entries of `b` are not in a longest common subsequence with `a`: {fresh: Set of places, exact: bool}.
function jvDiff(a, b) {
  let from = 0, endA = a.length, endB = b.length;
  while (from < endA && from < endB && a[from] === b[from]) from += 1;
  while (endA > from && endB > from && a[endA - 1] === b[endB - 1]) { endA -= 1; endB -= 1; }
  const n = endA - from, m = endB - from, fresh = new Set();
  if (n * m > DIFF_CELLS) {
    for (let j = from; j < endB; j += 1) fresh.add(j);
    return { fresh, exact: false };
  }
  // length[i][j]: of the longest common subsequence of what is left from i and j on
  const wide = m + 1, length = new Uint32Array((n + 1) * wide);
  for (let i = n - 1; i >= 0; i -= 1) {
    for (let j = m - 1; j >= 0; j -= 1) {
      length[i * wide + j] = a[from + i] === b[from + j]
        ? length[(i + 1) * wide + j + 1] + 1
        : Math.max(length[(i + 1) * wide + j], length[i * wide + j + 1]);
    }
  }
  for (let i = 0, j = 0; j < m; ) {
    if (i < n && a[from + i] === b[from + j]) { i += 1; j += 1; }
    else if (i < n && length[(i + 1) * wide + j] >= length[i * wide + j + 1]) i += 1;
    else { fresh.add(from + j); j += 1; }
  }
  return { fresh, exact: true };
}

// Which pieces hold a part of a text that was found, ignoring case: Set of places.
function jvFound(pieces, query) {
  const found = new Set(), wanted = query.toLowerCase();
  if (!wanted) return found;
  const starts = [];
  let whole = "";
  for (const piece of pieces) { starts.push(whole.length); whole += piece; }
  const text = whole.toLowerCase();
  if (text.length !== whole.length) return found; // a letter that grows: places would be wrong
  for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + 1)) {
    pieces.forEach((piece, t) => {
      if (starts[t] < at + wanted.length && starts[t] + piece.length > at) found.add(t);
    });
  }
  return found;
}
