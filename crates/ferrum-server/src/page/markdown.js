// The part of Markdown that models write, as a tree of plain objects: blocks, and where they end.
//
// Nothing here knows of HTML: what is not understood stays text. The text is hostile, so work is linear
// in its length but for small factors: nesting is bounded, and a search that found no end is not repeated.

import { DEEPEST, MATH_MARKS, parseInline } from "./inline.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])[ \t]*(\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const TASK = /^\[([ xX])\] +(?=\S)/;
const NOTE = /^ {0,3}\[\^([^\]\s]{1,40})\]:[ \t]*(.*)$/;
/** Lines and characters of one formula, at most. */
const MATH_LINES = 50;
const LONGEST = 5000;
const TABLE_RULE = /^\|?( *:?-+:? *\|)+( *:?-+:?)?$/;

/**
 * The blocks of a text. Each has its `source`, so that a text that grows is drawn again only where it
 * changed.
 */
export function parseMarkdown(text) {
  const blocks = parseBlocks(text.replaceAll("\r\n", "\n").split("\n"), 0);
  return text.includes("[^") ? withNotes(blocks) : blocks;
}

/** What a person wrote: plain text, and code where they fenced it. */
export function parseFences(text) {
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  const blocks = [];
  let from = 0;
  const giveText = (to) => {
    const plain = lines.slice(from, to).join("\n").replace(/^\n+|\n+$/g, "");
    if (plain.trim() !== "") blocks.push({ type: "text", text: plain });
  };
  for (let at = 0; at < lines.length; ) {
    const fence = FENCE.exec(lines[at]);
    const [block, next] = fence ? codeBlock(lines, at, fence) : [null, at + 1];
    if (block?.closed) {
      giveText(at);
      blocks.push(block);
      from = next;
    }
    at = block && !block.closed ? lines.length : next;
  }
  giveText(lines.length);
  return blocks;
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
  const formula = mathBlock(lines, at);
  if (formula) return formula;
  if (depth === 0 && NOTE.test(line)) return note(lines, at);
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
  // After the language there may be the name of a file.
  const [, language, rest] = /^(\S*)\s*(.*)$/.exec(info.trim());
  const title = /^[\w./ ()-]{1,80}$/.test(rest) ? rest : undefined;
  const block = { type: "code", language: language.slice(0, 40), text, closed: end < lines.length, title };
  return [block, Math.min(end + 1, lines.length)];
}

/** A formula on lines of its own, or null. */
function mathBlock(lines, at) {
  const open = lines[at].trimStart().slice(0, 2);
  if (open !== "$$" && open !== "\\[") return null;
  const close = MATH_MARKS[open];
  let end = at;
  let length = 0;
  for (let line = lines[at].trimStart().slice(2); !line.includes(close); line = lines[end]) {
    end += 1;
    length += line.length;
    const isOver = end === lines.length || end - at === MATH_LINES || length > LONGEST || FENCE.test(lines[end]);
    if (isOver || (open === "$$" && lines[end].trim() === "")) return null;
  }
  const inner = lines.slice(at, end + 1).map((line) => line.trim()).filter((line) => line !== "");
  const [tex, ...after] = inner.join("\n").slice(2).split(close);
  // What stands behind a formula makes it a part of a paragraph.
  if (tex.trim() === "" || !/^\s*[.,;:]?\s*$/.test(after.join(""))) return null;
  const source = lines.slice(at, end + 1).join("\n");
  return [{ type: "math", tex: tex.trim(), display: true, source }, end + 1];
}

/** A footnote's text: the line, and those after it that are indented. */
function note(lines, at) {
  const [, id, first] = NOTE.exec(lines[at]);
  const inner = [first];
  let end = at + 1;
  while (end < lines.length) {
    const next = lines[end].trim() === "" ? end + 1 : end;
    if (next === lines.length || indentOf(lines[next]) < 2) break;
    for (; end < next; end += 1) inner.push("");
    inner.push(lines[end].slice(Math.min(indentOf(lines[end]), 4)));
    end += 1;
  }
  return [{ type: "note", id, blocks: parseBlocks(inner, 1) }, end];
}

/** Gathers the footnotes at the end, numbered as the text refers to them. */
function withNotes(blocks) {
  const found = blocks.filter((block) => block.type === "note");
  const byId = new Map(found.map((note) => [note.id, note]).reverse());
  const text = blocks.filter((block) => block.type !== "note");
  // In the order of their numbers.
  const notes = [];
  const add = (note) => (note.number = notes.push(note));
  const number = (block) => {
    const seen = [];
    for (const reference of referencesOf(block)) {
      const note = byId.get(reference.id);
      if (note && note.number === undefined) add(note);
      reference.number = note?.number;
      seen.push(note?.number ?? 0);
    }
    // What is drawn depends on the notes, too.
    if (seen.length > 0) block.source += `\0${seen}`;
  };
  let done = 0;
  const follow = () => {
    for (; done < notes.length; done += 1) number(notes[done]);
  };
  text.forEach(number);
  // A note may refer to others; one that nothing refers to is still said.
  follow();
  for (const note of found) {
    if (note.number === undefined) add(note);
    follow();
  }
  if (notes.length === 0) return text;
  const source = notes.map((note) => `${note.number} ${note.source}`).join("\n");
  return [...text, { type: "notes", notes, source }];
}

function* referencesOf(node) {
  if (typeof node === "string") return;
  if (node.type === "reference") yield node;
  const parts = [node.inline, node.blocks, node.items?.flat(), node.head?.flat(), node.rows?.flat(2)];
  for (const inner of parts.flatMap((part) => part ?? [])) yield* referencesOf(inner);
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
  const tasks = [];
  let end = at;
  while (end < lines.length) {
    const match = ITEM.exec(lines[end]);
    const continues = match && match[1].length <= indent.length + 1 && match[2].length > 1 === ordered;
    if (!continues || RULE.test(lines[end])) break;
    const [inner, next] = item(lines, end, match);
    const task = TASK.exec(inner[0]);
    if (task) inner[0] = inner[0].slice(task[0].length);
    tasks.push(task ? task[1] !== " " : undefined);
    items.push(parseBlocks(inner, depth + 1));
    end = next;
  }
  const start = ordered ? Number.parseInt(mark, 10) : undefined;
  return [{ type: "list", ordered, start, items, tasks }, end];
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
  const text = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return text.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
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
    if (line.trim() === "" || isTable(lines, i) || mathBlock(lines, i)) return true;
    if (depth === 0 && NOTE.test(line)) return true;
    // A number at the beginning of a line is seldom a list, unless it is 1.
    const number = /^ *(\d+)[.)]/.exec(line);
    if (number && number[1] !== "1") return false;
    return depth < DEEPEST ? startsBlock(line) : FENCE.test(line) || HEADING.test(line);
  };
  while (end < lines.length && !ends(end)) end += 1;
  const text = lines.slice(at, end).map((line) => line.trim()).join("\n");
  return [{ type: "paragraph", inline: parseInline(text) }, end];
}
