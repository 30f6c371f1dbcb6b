// Colours of code. highlight.js, a script before this one, finds the words; here they become elements.
//
// The library can give markup, which this page does not take: an emitter of ours gathers its findings as a
// tree instead, so that code is text in elements and nothing else.
import { remember } from "./memo.js";

/** Characters that are coloured. While a block still comes, it is coloured anew with each piece. */
const LONGEST = 10_000;
const LONGEST_OPEN = 4_000;
/** The time that patterns take grows with the square of a word's or a line's length: no such code is coloured. */
const UNUSUAL = /[\w$-]{200}|.{1000}/;

/** What the library calls while it reads: `{scope, children}` with strings as leaves. */
class TreeEmitter {
  root = { scope: "", children: [] };
  #open = [this.root];

  addText(text) {
    if (text !== "") this.#open.at(-1).children.push(text);
  }

  startScope(scope) {
    const node = { scope: String(scope), children: [] };
    this.#open.at(-1).children.push(node);
    this.#open.push(node);
  }

  endScope() {
    if (this.#open.length > 1) this.#open.pop();
  }

  openNode(scope) {
    this.startScope(scope);
  }

  closeNode() {
    this.endScope();
  }

  __addSublanguage(emitter) {
    this.#open.at(-1).children.push(emitter.root);
  }

  finalize() {
    this.#open.length = 1;
  }

  toHTML() {
    return "";
  }
}

/** The tree of a code's words; null where it stays plain: an unknown language, or a long text. */
export function highlightTree(language, text, closed) {
  const { hljs } = globalThis;
  if (!hljs || !hljs.getLanguage(language)) return null;
  if (text.length > (closed ? LONGEST : LONGEST_OPEN) || UNUSUAL.test(text)) return null;
  return read(language, text);
}

const read = remember(50, (language, text) => {
  const { hljs } = globalThis;
  hljs.configure({ __emitter: TreeEmitter });
  const { _emitter: emitter, errorRaised } = hljs.highlight(text, { language, ignoreIllegals: true });
  return errorRaised || !emitter.root ? null : emitter.root;
});
