// Text with its emphasis, code, links and formulas: what stands inside the blocks of Markdown.
//
// As for blocks, what is not understood stays text, and a search that found no end is not repeated.

export const DEEPEST = 8;

/** What closes a formula. */
export const MATH_MARKS = { "$": "$", "$$": "$$", "\\(": "\\)", "\\[": "\\]" };
/** Characters of one formula, at most; between single dollars, which prices have as well, fewer. */
const LONGEST = { "$": 400, "$$": 5000, "\\(": 2000, "\\[": 5000 };

const STYLES = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];
const WORD = /[\p{L}\p{N}]/u;
const BARE_LINK = /https?:\/\/[^\s<>"'`\]]+/y;

/** The few that models write where Markdown has nothing; all other HTML stays text. */
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', "#39": "'", apos: "'", nbsp: "\u00a0" };
const ENTITY = /^&(amp|lt|gt|quot|#39|apos|nbsp);/;
/** Characters inside a tag, at most. */
const LONGEST_TAG = 200;

/** Text with its emphasis, code, links, formulas and references to footnotes: strings and `{type, …}`. */
export function parseInline(text, depth = 0) {
  const out = [];
  // Delimiters of which the rest of this text has no end, and where the next link's middle and formulas' ends are.
  const hopeless = new Set();
  const links = { middle: -1 };
  const closes = new Map();
  let plain = "";
  let at = 0;
  const give = (node, next) => {
    if (plain !== "") out.push(plain);
    plain = "";
    out.push(node);
    at = next;
  };
  while (at < text.length) {
    const char = text[at];
    const found =
      char === "\n" ? [{ type: "break" }, at + 1]
      : char === "`" ? codeSpan(text, at, hopeless)
      : char === "$" || char === "\\" ? formula(text, at, closes)
      : char === "[" || char === "!" ? reference(text, at) ?? link(text, at, depth, links)
      : char === "h" ? bareLink(text, at)
      : char === "<" ? bareLink(text, at) ?? tag(text, at, depth)
      : "*_~".includes(char) && depth < DEEPEST ? styled(text, at, depth, hopeless)
      : null;
    const entity = char === "&" ? ENTITY.exec(text.slice(at, at + 8)) : null;
    if (found) {
      give(...found);
    } else if (entity) {
      plain += ENTITIES[entity[1]];
      at += entity[0].length;
    } else if (char === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else if ("`*_~$".includes(char)) {
      // A run of marks that mean nothing is passed as a whole, so that a long one costs nothing.
      const run = runLength(text, at);
      plain += text.slice(at, at + run);
      at += run;
    } else {
      plain += char;
      at += 1;
    }
  }
  if (plain !== "") out.push(plain);
  return out;
}

function runLength(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

/** A formula between dollars or `\\(` and its like, or null. */
function formula(text, at, closes) {
  const two = text.slice(at, at + 2);
  const open = two in MATH_MARKS ? two : text[at];
  const close = MATH_MARKS[open];
  if (!close) return null;
  const from = at + open.length;
  let end = nextClose(text, close, from, closes);
  if (open === "$") {
    // Not the end of a word, and none of a price: a formula has no space inside its dollars.
    if (/\s/.test(text[from] ?? " ") || WORD.test(text[at - 1] ?? "")) return null;
    const isInside = () => /[\s\\]/.test(text[end - 1]) || WORD.test(text[end + 1] ?? "");
    while (end - from <= LONGEST[open] && isInside()) end = nextClose(text, close, end + 1, new Map());
  }
  if (end - from > LONGEST[open]) return null;
  const tex = text.slice(from, end);
  if (tex.trim() === "" || tex.includes("\n\n") || (open === "$" && isProse(tex))) return null;
  const next = end + close.length;
  return [{ type: "math", tex: tex.trim(), display: open === "$$" || open === "\\[", source: text.slice(at, next) }, next];
}

/** Where a formula may end; what was found for an earlier one holds until it is passed. */
function nextClose(text, close, from, closes) {
  if (!(closes.get(close) >= from)) {
    const found = text.indexOf(close, from);
    closes.set(close, found < 0 ? Infinity : found);
  }
  return closes.get(close);
}

/** Whether it says words, as what stands between two prices does. */
function isProse(tex) {
  const words = tex.replace(/\\[A-Za-z]+(?:\{[^{}]*\})?/g, "");
  return words.includes("`") || /[A-Za-z]{2,}[,;]?\s+[A-Za-z]{2,}|^[\d.,]+\s+[A-Za-z]{2,}/.test(words);
}

/** `[^name]`, or null. */
function reference(text, at) {
  const match = /^\[\^([^\]\s]{1,40})\]/.exec(text.slice(at, at + 44));
  return match && [{ type: "reference", id: match[1] }, at + match[0].length];
}

/** A break in a cell of a table, or a short text raised or lowered; null for all other tags. */
function tag(text, at, depth) {
  const line = /^<br ?\/?>/i.exec(text.slice(at, at + 6));
  if (line) return [{ type: "break" }, at + line[0].length];
  const open = /^<(sub|sup)>/i.exec(text.slice(at, at + 5));
  if (!open || depth >= DEEPEST) return null;
  const from = at + open[0].length;
  const type = open[1].toLowerCase();
  const end = text.slice(from, from + LONGEST_TAG).toLowerCase().indexOf(`</${type}>`);
  if (end < 0) return null;
  return [{ type, inline: parseInline(text.slice(from, from + end), depth + 1) }, from + end + type.length + 3];
}

function codeSpan(text, at, hopeless) {
  const run = runLength(text, at);
  const marks = `\`${run}`;
  if (hopeless.has(marks)) return null;
  let end = text.indexOf("`", at + run);
  while (end >= 0) {
    const length = runLength(text, end);
    if (length === run) {
      const inner = text.slice(at + run, end).replaceAll("\n", " ");
      const padded = /^ .*[^ ].* $/.test(inner);
      return [{ type: "code", text: padded ? inner.slice(1, -1) : inner }, end + run];
    }
    end = text.indexOf("`", end + length);
  }
  hopeless.add(marks);
  return null;
}

function styled(text, at, depth, hopeless) {
  for (const [marks, type] of STYLES) {
    if (!text.startsWith(marks, at) || hopeless.has(marks)) continue;
    const from = at + marks.length;
    const inside = text[from];
    if (inside === undefined || /\s/.test(inside)) continue;
    // snake_case and 2_000 are words.
    if (marks[0] === "_" && WORD.test(text[at - 1] ?? "")) continue;
    const end = styleEnd(text, from + 1, marks);
    if (end < 0) {
      hopeless.add(marks);
      continue;
    }
    return [{ type, inline: parseInline(text.slice(from, end), depth + 1) }, end + marks.length];
  }
  return null;
}

/** Where `marks` closes: after no space, and not as a part of a longer run unless it is its end. */
function styleEnd(text, from, marks) {
  let end = text.indexOf(marks, from);
  while (end >= 0) {
    const after = text[end + marks.length];
    const single = marks.length === 1;
    const partOfLonger = single && (after === marks || text[end - 1] === marks);
    const inWord = marks[0] === "_" && WORD.test(after ?? "");
    // `**a *b***` closes the inner mark first.
    const late = !single && after === marks[0] ? 1 : 0;
    if (!partOfLonger && !inWord && !/\s/.test(text[end - 1])) return end + late;
    end = text.indexOf(marks, end + (partOfLonger ? runLength(text, end) : marks.length));
  }
  return -1;
}

/** `[text](address)`; an image becomes a link, as this page loads nothing from elsewhere. */
function link(text, at, depth, links) {
  const from = text[at] === "!" ? at + 1 : at;
  if (text[from] !== "[" || depth >= DEEPEST) return null;
  if (links.middle <= from) {
    const found = text.indexOf("](", from + 1);
    links.middle = found < 0 ? Infinity : found;
  }
  const middle = links.middle;
  if (middle === Infinity) return null;
  const label = text.slice(from + 1, middle);
  // The nearest bracket is the one that is meant.
  if (label.length > 1000 || label.includes("[") || label.includes("\n\n")) return null;
  const rest = text.slice(middle + 2, middle + 2050);
  const match = /^<?([^\s<>()]*(?:\([^\s()]*\)[^\s<>()]*)*)>?(?:\s+"[^"]*")?\)/.exec(rest);
  if (!match) return null;
  const end = middle + 2 + match[0].length;
  const href = safeAddress(match[1]);
  if (!href) return [text.slice(at, end), end];
  const inline = label === "" ? [match[1]] : plainLinks(parseInline(label, depth + 1));
  return [{ type: "link", href, inline }, end];
}

/** A link in a link is its text. */
function plainLinks(inline) {
  return inline.flatMap((node) => (node.type === "link" ? node.inline : [node]));
}

function bareLink(text, at) {
  const angled = text[at] === "<";
  const from = angled ? at + 1 : at;
  if (!angled && WORD.test(text[at - 1] ?? "")) return null;
  BARE_LINK.lastIndex = from;
  const match = BARE_LINK.exec(text);
  if (!match || match[0].length > 2000) return null;
  let found = match[0];
  if (angled && text[from + found.length] !== ">") return null;
  // Punctuation after an address is the sentence's, and so is a bracket that it did not open.
  while (!angled && /[.,;:!?*_~)]$/.test(found)) {
    if (found.endsWith(")") && found.includes("(")) break;
    found = found.slice(0, -1);
  }
  const href = safeAddress(found);
  if (!href) return null;
  return [{ type: "link", href, inline: [found] }, from + found.length + (angled ? 1 : 0)];
}

/** The address if it is one of the web, else null: no scripts, no data, nothing relative. */
export function safeAddress(text) {
  try {
    const url = new URL(text);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}
