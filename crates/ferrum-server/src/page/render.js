// Markdown trees as elements.
import { copyText, icon, make } from "./dom.js";
import { highlightTree } from "./highlight.js";
import { parseFences, parseMarkdown } from "./markdown.js";
import { mathElement } from "./mathml.js";

/** Draws `text` into `place`, touching only the blocks that are not what they were. */
export function renderMarkdown(place, text) {
  const blocks = parseMarkdown(text);
  const drawn = (place.drawnBlocks ??= []);
  blocks.forEach((block, i) => {
    if (drawn[i] === block.source) return;
    const element = blockElement(block);
    if (i < place.children.length) place.children[i].replaceWith(element);
    else place.append(element);
    drawn[i] = block.source;
  });
  while (place.children.length > blocks.length) place.lastElementChild.remove();
  drawn.length = blocks.length;
}

/** Draws what a person wrote: as it is, but for code that they fenced. */
export function renderPlain(place, text) {
  const parts = parseFences(text);
  const draw = (part) => (part.type === "text" ? make("div", { dir: "auto" }, part.text) : codeElement(part));
  place.replaceChildren(...parts.map(draw));
}

function blockElement(block) {
  switch (block.type) {
    case "code":
      return codeElement(block);
    case "heading":
      // The page's own headings come first.
      return make(`h${Math.min(block.level + 2, 6)}`, { dir: "auto" }, ...inlineNodes(block.inline));
    case "rule":
      return make("hr");
    case "quote":
      return make("blockquote", {}, ...block.blocks.map(blockElement));
    case "list":
      return listElement(block);
    case "table":
      return tableElement(block);
    case "math":
      return mathElement(block);
    case "notes":
      return notesElement(block);
    default:
      return make("p", { dir: "auto" }, ...inlineNodes(block.inline));
  }
}

function codeElement({ language, text, closed, title }) {
  const copy = make("button", { type: "button", class: "copy-code" }, icon("copy"), "Copy");
  copy.addEventListener("click", () => copyText(text, copy));
  const head = make("div", { class: "code-head" }, make("span", {}, title ?? (language || "text")), copy);
  // Long lines are scrolled by keyboard, too.
  const label = title ? `File ${title}` : language ? `Code, ${language}` : "Code";
  const code = make("code", {}, ...codeNodes(language, text, closed));
  const body = make("pre", { tabindex: "0", role: "region", "aria-label": label }, code);
  return make("div", { class: "code" }, head, body);
}

/** The nodes of a code block's text. */
function codeNodes(language, text, closed) {
  const tree = language === "" ? null : highlightTree(language, text, closed);
  return tree ? tree.children.map(wordElement) : [text];
}

function wordElement(node) {
  if (typeof node === "string") return node;
  const children = node.children.map(wordElement);
  // `title.function` and its like have the colour of their first part.
  const name = /^[a-z]+/.exec(node.scope)?.[0];
  return make("span", { class: name && `code-${name}` }, ...children);
}

function listElement({ ordered, start, items, tasks }) {
  const entries = items.map((blocks, i) => {
    // A single paragraph is the item's text.
    const tight = blocks[0]?.type === "paragraph";
    const first = tight ? inlineNodes(blocks[0].inline) : [];
    const done = tasks[i];
    if (done !== undefined) {
      const box = make("input", { type: "checkbox", disabled: true, checked: done, "aria-label": done ? "Done" : "To do" });
      first.unshift(box);
    }
    return make("li", { dir: "auto", class: done !== undefined && "task" }, ...first, ...blocks.slice(tight ? 1 : 0).map(blockElement));
  });
  const from = ordered && start !== 1 ? start : undefined;
  return make(ordered ? "ol" : "ul", { start: from }, ...entries);
}

function tableElement({ head, align, rows }) {
  const cell = (tag) => (inline, i) => make(tag, { class: align[i] ?? "left", dir: "auto" }, ...inlineNodes(inline));
  const row = (tag) => (cells) => make("tr", {}, ...cells.map(cell(tag)));
  const table = make("table", {}, make("thead", {}, row("th")(head)), make("tbody", {}, ...rows.map(row("td"))));
  return make("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, table);
}

function inlineNodes(inline) {
  return inline.map((node) => {
    if (typeof node === "string") return node;
    switch (node.type) {
      case "break":
        return make("br");
      case "code":
        return make("code", {}, node.text);
      case "math":
        return mathElement(node);
      case "reference":
        return referenceElement(node);
      case "link":
        // `safeAddress` has made the address: it is one of http or https.
        return make("a", { href: node.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...inlineNodes(node.inline));
      default:
        return make(node.type, {}, ...inlineNodes(node.inline));
    }
  });
}

/** A reference to a footnote. It is a button: the page's address says which conversation is open. */
function referenceElement({ id, number }) {
  if (number === undefined) return `[^${id}]`;
  const label = `Footnote ${number}`;
  const go = () => reveal(button.closest(".body").querySelector(`.notes li[value="${number}"]`));
  const button = make("button", { type: "button", class: "reference", "aria-label": label, "data-note": number, onclick: go }, String(number));
  return make("sup", {}, button);
}

function notesElement({ notes }) {
  const entries = notes.map(({ number, blocks }) => {
    const back = () => reveal(entry.closest(".body").querySelector(`[data-note="${number}"]`));
    const button = make("button", { type: "button", class: "reference", "aria-label": "Back to the text", onclick: back }, "↩");
    const entry = make("li", { value: number, tabindex: "-1", dir: "auto" }, ...blocks.map(blockElement), button);
    return entry;
  });
  return make("section", { class: "notes", "aria-label": "Footnotes" }, make("ol", {}, ...entries));
}

function reveal(element) {
  element?.scrollIntoView({ block: "nearest" });
  element?.focus();
}
