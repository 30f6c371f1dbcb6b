// The part of Markdown that models write, as a tree of plain objects.
//
// Nothing here knows of HTML: what is not understood stays text. The text is hostile, so work is linear
// in its length but for small factors: nesting is bounded, and a search that found no end is not repeated.

const DEEPEST = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])[ \t]*(\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const TABLE_RULE = /^\|?( *:?-+:? *\|)+( *:?-+:?)?$/;

/**
 * The blocks of a text. Each has its `source`, so that a text that grows is drawn again only where it
 * changed.
 */
export function parseMarkdown(text) {
  return parseBlocks(text.replaceAll("\r\n", "\n").split("\n"), 0);
}

function parseBlocks(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const start = at;
    const [block, next] = parseBlock(lines, at, depth);
    block.source = lines.slice(start, next).join("\n");
    blocks.push(block);
    at = next;
  }
  return blocks;
}

/** The block at `at`, and the line after it. */
function parseBlock(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return codeBlock(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const text = heading[2].replace(/[ \t]#+[ \t]*$/, "");
    return [{ type: "heading", level: heading[1].length, inline: parseInline(text) }, at + 1];
  }
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (depth < DEEPEST) {
    if (QUOTE.test(line)) return quote(lines, at, depth);
    if (ITEM.test(line)) return list(lines, at, depth);
  }
  if (isTable(lines, at)) return table(lines, at);
  return paragraph(lines, at, depth);
}

function codeBlock(lines, at, fence) {
  const [, marks, info] = fence;
  const indent = lines[at].indexOf(marks[0]);
  const isEnd = (line) => {
    const text = line.trim();
    return text.length >= marks.length && text === marks[0].repeat(text.length);
  };
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  const strip = (line) => line.slice(Math.min(indent, indentOf(line)));
  const text = lines.slice(at + 1, end).map(strip).join("\n");
  const language = info.trim().split(/\s/)[0].slice(0, 40);
  return [{ type: "code", language, text, closed: end < lines.length }, Math.min(end + 1, lines.length)];
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [{ type: "quote", blocks: parseBlocks(inner, depth + 1) }, end];
}

function list(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = mark.length > 1;
  const items = [];
  let end = at;
  while (end < lines.length) {
    const match = ITEM.exec(lines[end]);
    const continues = match && match[1].length <= indent.length + 1 && match[2].length > 1 === ordered;
    if (!continues || RULE.test(lines[end])) break;
    const [inner, next] = item(lines, end, match);
    items.push(parseBlocks(inner, depth + 1));
    end = next;
  }
  const start = ordered ? Number.parseInt(mark, 10) : undefined;
  return [{ type: "list", ordered, start, items }, end];
}

/** The lines of a list's item, without its mark and indent, and the line after it. */
function item(lines, at, match) {
  // Four spaces or more after the mark would be code; models mean text.
  const width = match[1].length + match[2].length + Math.min(Math.max(match[3].length, 1), 4);
  const least = Math.min(width, match[1].length + 2);
  const inner = [lines[at].slice(match[0].length)];
  let end = at + 1;
  while (end < lines.length) {
    let next = end;
    while (next < lines.length && lines[next].trim() === "") next += 1;
    if (next === lines.length) break;
    const line = lines[next];
    const indent = indentOf(line);
    if (indent < least && next > end) {
      // Items with blank lines between them are one list; anything else ends it.
      if (ITEM.test(line)) end = next;
      break;
    }
    // Without a blank line before it, a paragraph goes on even where it is not indented.
    if (indent < least && startsBlock(line)) break;
    for (; end < next; end += 1) inner.push("");
    inner.push(line.slice(Math.min(indent, width)));
    end += 1;
  }
  return [inner, end];
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function isTable(lines, at) {
  const next = lines[at + 1];
  return lines[at].includes("|") && next !== undefined && next.length < 2000 && TABLE_RULE.test(next.trim());
}

function cells(line) {
  const text = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return text.split("|").map((cell) => cell.trim());
}

function table(lines, at) {
  const head = cells(lines[at]);
  const align = cells(lines[at + 1]).map((cell) => {
    const right = cell.endsWith(":");
    return right && cell.startsWith(":") ? "center" : right ? "right" : "left";
  });
  const rows = [];
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) {
    const row = cells(lines[end]).slice(0, head.length);
    rows.push(row.map(parseInline));
    end += 1;
  }
  return [{ type: "table", head: head.map(parseInline), align, rows }, end];
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  const ends = (i) => {
    const line = lines[i];
    if (line.trim() === "" || isTable(lines, i)) return true;
    // A number at the beginning of a line is seldom a list, unless it is 1.
    const number = /^ *(\d+)[.)]/.exec(line);
    if (number && number[1] !== "1") return false;
    return depth < DEEPEST ? startsBlock(line) : FENCE.test(line) || HEADING.test(line);
  };
  while (end < lines.length && !ends(end)) end += 1;
  const text = lines.slice(at, end).map((line) => line.trim()).join("\n");
  return [{ type: "paragraph", inline: parseInline(text) }, end];
}

const STYLES = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];
const WORD = /[\p{L}\p{N}]/u;
const BARE_LINK = /https?:\/\/[^\s<>"'`\]]+/y;

/** Text with its emphasis, code and links: strings and `{type, …}`. */
export function parseInline(text, depth = 0) {
  const out = [];
  // Delimiters of which the rest of this text has no end, and where the next link's middle is.
  const hopeless = new Set();
  const links = { middle: -1 };
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
      : char === "[" || char === "!" ? link(text, at, depth, links)
      : char === "h" || char === "<" ? bareLink(text, at)
      : "*_~".includes(char) && depth < DEEPEST ? styled(text, at, depth, hopeless)
      : null;
    if (found) {
      give(...found);
    } else if (char === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else if ("`*_~".includes(char)) {
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
