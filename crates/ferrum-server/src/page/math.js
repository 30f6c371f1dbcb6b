// Mathematics: Temml, a script before this one, parses TeX into a tree of MathML. Formulas are hostile, too, so
// their size is bounded before and after.
import { remember } from "./memo.js";

/** The formulas of people are short; longer ones stay text. */
const LONGEST = 5000;
const MOST_NODES = 20_000;
const DEEPEST = 200;

/** Commands that define others: a few of them can make a text of any length. */
const DEFINES = /\\(?:[egx]?def|let|futurelet|(?:re|provide)?(?:new)?command|global|long|definecolor)(?![A-Za-z@])/;

/** The tree of a formula, or null if it is none that this page draws. */
export function mathTree(tex, display) {
  return globalThis.temml && tex.length <= LONGEST && !DEFINES.test(tex) ? parse(tex, display) : null;
}

const parse = remember(300, (tex, display) => {
  const { temml } = globalThis;
  try {
    const options = { displayMode: display, throwOnError: true, trust: false, maxExpand: 300, maxSize: [40, 480], wrap: "tex" };
    const tree = temml.__renderToMathMLTree(tex, options);
    return fits(tree) ? tree : null;
  } catch {
    // A fault in the TeX, or brackets nested deeper than the stack.
    return null;
  }
});

function fits(tree) {
  let count = 0;
  const walk = (node, depth) => {
    count += 1;
    if (count > MOST_NODES || depth > DEEPEST) return false;
    return (node.children ?? []).every((child) => walk(child, depth + 1));
  };
  return walk(tree, 0);
}
