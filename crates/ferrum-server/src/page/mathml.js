// Formulas as elements. The library's tree is drawn here and not by the library: what is not listed is left out, so
// nothing that a formula says becomes an address, a style attribute (which the policy forbids) or markup.
import { make } from "./dom.js";
import { mathTree } from "./math.js";

const SPACE = "http://www.w3.org/1998/Math/MathML";
const ELEMENTS = new Set(
  (
    "math menclose mfrac mi mmultiscripts mn mo mover mpadded mphantom mprescripts mroot mrow ms mspace msqrt " +
    "mstyle msub msubsup msup mtable mtd mtext mtr munder munderover none"
  ).split(" "),
);
const ATTRIBUTES = new Set(
  (
    "accent accentunder columnalign columnlines columnspacing columnspan depth display displaystyle fence form height " +
    "largeop linethickness lspace mathbackground mathcolor mathsize mathvariant maxsize minsize movablelimits " +
    "notation rowlines rowspacing rowspan rspace scriptlevel separator side stretchy symmetric voffset width"
  ).split(" "),
);
const STYLES =
  /^(?:bottom|color|display|font-family|font-style|font-weight|height|justify-content|left|math-depth|position|right|text-align|transform|width|(?:margin|padding)(?:-\w+)?|border(?:-\w+)?|background-color)$/;

/** A length or a number that makes no formula larger than a page. */
function isModest(value) {
  const numbers = String(value).replace(/#[0-9a-f]+/gi, "").match(/\d[\d.]*(?:e[+-]?\d+)?/gi) ?? [];
  return numbers.every((number) => Number(number) <= 500);
}

/** The formula as an element; where it cannot be drawn, its text. */
export function mathElement({ tex, display, source }) {
  const tree = mathTree(tex, display);
  const drawn = tree ? draw(tree) : make("code", {}, source);
  if (tree) drawn.setAttribute("alttext", tex);
  return display ? make("span", { class: "formula" }, drawn) : drawn;
}

function draw(node) {
  if (typeof node.text === "string") return document.createTextNode(node.text);
  const children = (node.children ?? []).map(draw);
  if (node.type === undefined && !node.attributes) {
    const fragment = document.createDocumentFragment();
    fragment.append(...children);
    return fragment;
  }
  const element = ELEMENTS.has(node.type) ? document.createElementNS(SPACE, node.type) : make("span");
  for (const [name, value] of Object.entries(node.attributes ?? {})) {
    if (name === "style") styleText(element, String(value));
    else if (ATTRIBUTES.has(name) && isModest(value)) element.setAttribute(name, value);
  }
  for (const [name, value] of Object.entries(node.style ?? {})) setStyle(element, name, String(value));
  const classes = (node.classes ?? []).filter((name) => /^[\w-]+$/.test(name));
  if (classes.length > 0) element.classList.add(...classes);
  element.append(...children);
  return element;
}

function styleText(element, text) {
  for (const declaration of text.split(";")) {
    const [name, value] = declaration.split(":");
    if (value !== undefined) setStyle(element, name.trim(), value.trim());
  }
}

/** By the object model, which the policy allows: it forbids styles in markup. */
function setStyle(element, name, value) {
  const dashed = name.replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`);
  if (STYLES.test(dashed) && isModest(value)) element.style.setProperty(dashed, value);
}
