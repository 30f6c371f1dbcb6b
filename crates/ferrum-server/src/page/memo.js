// What was computed lately: while an answer comes, its last block is drawn anew with each piece.

/** `compute`, with its last `most` results kept under its arguments. */
export function remember(most, compute) {
  const kept = new Map();
  return (...given) => {
    const name = JSON.stringify(given);
    if (!kept.has(name)) kept.set(name, compute(...given));
    if (kept.size > most) kept.delete(kept.keys().next().value);
    return kept.get(name);
  };
}
