// Markdown trees as elements.
import { copyText, icon, make } from "./dom.js";
import { parseMarkdown } from "./markdown.js";

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
    default:
      return make("p", { dir: "auto" }, ...inlineNodes(block.inline));
  }
}

function codeElement({ language, text }) {
  const copy = make("button", { type: "button", class: "copy-code" }, icon("copy"), "Copy");
  copy.addEventListener("click", () => copyText(text, copy));
  const head = make("div", { class: "code-head" }, make("span", {}, language || "text"), copy);
  // Long lines are scrolled by keyboard, too.
  const label = language ? `Code, ${language}` : "Code";
  const body = make("pre", { tabindex: "0", role: "region", "aria-label": label }, make("code", {}, text));
  return make("div", { class: "code" }, head, body);
}

function listElement({ ordered, start, items }) {
  const entries = items.map((blocks) => {
    // A single paragraph is the item's text.
    const tight = blocks[0]?.type === "paragraph";
    const first = tight ? inlineNodes(blocks[0].inline) : [];
    return make("li", { dir: "auto" }, ...first, ...blocks.slice(tight ? 1 : 0).map(blockElement));
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
      case "link":
        // `safeAddress` has made the address: it is one of http or https.
        return make("a", { href: node.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...inlineNodes(node.inline));
      default:
        return make(node.type, {}, ...inlineNodes(node.inline));
    }
  });
}
