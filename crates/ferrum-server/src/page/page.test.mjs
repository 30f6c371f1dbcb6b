// The modules that need no browser: `node --test` in this folder; `cargo test` runs it where there is Node.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Answer, statWords } from "./answer.js";
import { EventReader } from "./events.js";
import { parseInline, parseMarkdown, safeAddress } from "./markdown.js";
import * as tree from "./tree.js";

/** A tree in short: `p(a strong(b))`. */
function short(node) {
  if (typeof node === "string") return node;
  const inside = (nodes) => (nodes ?? []).map(short).join("");
  switch (node.type) {
    case "paragraph": return `p(${inside(node.inline)})`;
    case "heading": return `h${node.level}(${inside(node.inline)})`;
    case "code": return node.language === undefined ? `code(${node.text})` : `pre:${node.language}(${node.text})`;
    case "list": return `${node.ordered ? `ol${node.start}` : "ul"}(${node.items.map(inside).join("|")})`;
    case "quote": return `quote(${inside(node.blocks)})`;
    case "table": return `table(${[node.head, ...node.rows].map((row) => row.map(inside).join(",")).join("|")})`;
    case "link": return `a:${node.href}(${inside(node.inline)})`;
    case "break": return "/";
    case "rule": return "hr";
    default: return `${node.type}(${inside(node.inline)})`;
  }
}

const shortBlocks = (text) => parseMarkdown(text).map(short).join(" ");
const shortInline = (text) => parseInline(text).map(short).join("");

test("blocks", () => {
  const cases = [
    ["", ""],
    ["one\ntwo\n\nthree", "p(one/two) p(three)"],
    ["# A\n## B ##\ntext", "h1(A) h2(B) p(text)"],
    ["#no heading", "p(#no heading)"],
    ["```js\na\n\n  b\n```\nc", "pre:js(a\n\n  b) p(c)"],
    ["```\nnever closed", "pre:(never closed)"],
    ["~~~\n```\n~~~", "pre:(```)"],
    ["````\n```\n````", "pre:(```)"],
    ["- a\n- b", "ul(p(a)|p(b))"],
    ["text\n- a", "p(text) ul(p(a))"],
    ["2024. was a year", "ol2024(p(was a year))"],
    ["in\n2024. a year", "p(in/2024. a year)"],
    ["3. a\n4. b", "ol3(p(a)|p(b))"],
    ["- a\n\n- b", "ul(p(a)|p(b))"],
    ["- a\n  - b\n    - c\n- d", "ul(p(a)ul(p(b)ul(p(c)))|p(d))"],
    ["1. a\n   ```\n   x\n\n\n   y\n   ```\n2. b", "ol1(p(a)pre:(x\n\n\ny)|p(b))"],
    ["- a\ngoes on\n\nafter", "ul(p(a/goes on)) p(after)"],
    ["* a\n1. b", "ul(p(a)) ol1(p(b))"],
    ["> a\n> > b\n\nc", "quote(p(a)quote(p(b))) p(c)"],
    ["a\n\n---\n\nb", "p(a) hr p(b)"],
    ["|a|b|\n|:-|-:|\n|1|**2**|\n\nc", "table(a,b|1,strong(2)) p(c)"],
    ["a | b\nno table", "p(a | b/no table)"],
    ["<b>x</b>", "p(<b>x</b>)"],
    ["a\r\nb", "p(a/b)"],
  ];
  for (const [text, expected] of cases) assert.equal(shortBlocks(text), expected, text);
});

test("inline", () => {
  const cases = [
    ["a **b** c", "a strong(b) c"],
    ["**a *b* c**", "strong(a em(b) c)"],
    ["**a *b***", "strong(a em(b))"],
    ["*a*b", "em(a)b"],
    ["2 * 3 * 4", "2 * 3 * 4"],
    ["snake_case_name", "snake_case_name"],
    ["_a b_", "em(a b)"],
    ["~~gone~~", "del(gone)"],
    ["**open", "**open"],
    ["`a *b*`", "code(a *b*)"],
    ["`` a`b ``", "code(a`b)"],
    ["`open", "`open"],
    ["\\*a\\*", "*a*"],
    ["[x](https://a.b/c)", "a:https://a.b/c(x)"],
    ["[x](https://a.b/c_(d) \"title\")", "a:https://a.b/c_(d)(x)"],
    ["![x](https://a.b/c.png)", "a:https://a.b/c.png(x)"],
    ["[**x**](http://a.b)", "a:http://a.b/(strong(x))"],
    ["see https://a.b/c.", "see a:https://a.b/c(https://a.b/c)."],
    ["(https://a.b/c)", "(a:https://a.b/c(https://a.b/c))"],
    ["<https://a.b>", "a:https://a.b/(https://a.b)"],
    ["[x](javascript:alert(1))", "[x](javascript:alert(1))"],
    ["[x](data:text/html,y)", "[x](data:text/html,y)"],
    ["[x](/relative)", "[x](/relative)"],
    ["[x](//a.b)", "[x](//a.b)"],
    ["[x]( javascript:1 )", "[x]( javascript:1 )"],
    ["[x](java\nscript:1)", "[x](java/script:1)"],
    ["[https://a.b](https://c.d)", "a:https://c.d/(https://a.b)"],
    ["array[0](x)", "array[0](x)"],
  ];
  for (const [text, expected] of cases) assert.equal(shortInline(text), expected, text);
});

test("addresses", () => {
  for (const bad of ["javascript:1", "JAVASCRIPT:1", "\u0001javascript:1", "vbscript:x", "data:,x", "file:///x", "blob:x", "x", ""]) {
    assert.equal(safeAddress(bad), null, bad);
  }
  assert.equal(safeAddress("HTTPS://A.b"), "https://a.b/");
});

test("whatever is written is kept, and takes no time to speak of", () => {
  const marks = ["*", "_", "`", "[", "](", "> ", "- ", "|", "\n", "a", " ", "#", "~~", "http://a.b", ")", "1. ", "\\", "<", "```"];
  let seed = 7;
  const random = (n) => (seed = (seed * 48271) % 2147483647) % n;
  for (let round = 0; round < 300; round += 1) {
    const text = Array.from({ length: random(60) }, () => marks[random(marks.length)]).join("");
    const letters = (value) => (JSON.stringify(value).match(/a/g) ?? []).length;
    const inline = parseInline(text);
    assert.ok(letters(inline) >= (text.match(/a/g) ?? []).length, text);
    parseMarkdown(text);
  }
  for (const mark of marks) parseMarkdown(mark.repeat(50_000));
  for (const mark of marks) parseMarkdown(`a${mark}`.repeat(30_000));
});

test("events are the same wherever the bytes are cut", () => {
  const bytes = new TextEncoder().encode(': keep-alive\n\ndata: {"a": "ä€😀"}\r\n\r\ndata: two\n\nevent: x\ndata: [DONE]\n\n');
  for (let cut = 0; cut <= bytes.length; cut += 1) {
    const reader = new EventReader();
    const found = [...reader.push(bytes.slice(0, cut)), ...reader.push(bytes.slice(cut))];
    assert.deepEqual(found, ['{"a": "ä€😀"}', "two", "[DONE]"], String(cut));
  }
});

test("chunks make an answer", () => {
  const node = { content: "" };
  const answer = new Answer(node, 1000);
  const add = (now, delta, finish) => answer.add({ model: "m", choices: [{ delta, finish_reason: finish }] }, now);
  add(1100, { role: "assistant", content: "" });
  add(1500, { reasoning_content: "hm" });
  add(2500, { reasoning_content: "m" });
  add(3000, { content: "Hel" });
  add(3500, { content: "lo" });
  add(3500, { tool_calls: [{ index: 0, id: "c", function: { name: "f", arguments: "{" } }] });
  add(3500, { tool_calls: [{ index: 0, function: { arguments: "}" } }, { index: 7 }] });
  assert.equal(answer.complete, false);
  assert.equal(node.stats.exact, undefined);
  add(3500, {}, "tool_calls");
  answer.add({ choices: [], usage: { prompt_tokens: 5, completion_tokens: 9 } }, 3600);
  assert.equal(answer.complete, true);
  const stats = { first: 0.5, tokens: 9, rate: 4, exact: true, prompt: 5, cached: 0 };
  const calls = [{ id: "c", name: "f", arguments: "{}" }];
  assert.deepEqual(node, { content: "Hello", model: "m", reasoning: "hmm", thought: 1, calls, finish: "tool_calls", stats });
  assert.equal(statWords(stats), "9 tokens · 4.0 tokens/s · first after 0.50 s");
  assert.equal(statWords({ tokens: 1, first: 0 }), "≈ 1 token · first after 0.00 s");
  assert.equal(statWords(undefined), "");
});

test("versions are branches", () => {
  const chat = tree.newConversation("c", " be brief ");
  const add = (parent, id, role, more) => tree.addNode(chat, parent, { id, role, content: id, ...more });
  add(null, "u1", "user");
  const a1 = add("u1", "a1", "assistant");
  add("a1", "u2", "user");
  add("u2", "a2", "assistant");
  add("u1", "b1", "assistant");
  const path = () => tree.pathOf(chat).map((node) => node.id).join(" ");
  assert.equal(path(), "u1 b1");
  assert.deepEqual(tree.versionsOf(chat, a1).map((node) => node.id), ["a1", "b1"]);
  tree.showVersion(chat, tree.nodeOf(chat, "b1"), -1);
  assert.equal(path(), "u1 a1 u2 a2");
  tree.showVersion(chat, a1, 5);
  assert.equal(path(), "u1 a1 u2 a2");
  assert.deepEqual(tree.toMessages(chat)[0], { role: "system", content: "be brief" });
  assert.equal(tree.toMessages(chat).length, 5);
});

test("calls wait for their results", () => {
  const chat = tree.newConversation("c");
  const calls = [{ id: "1", name: "f", arguments: "{}" }];
  const node = tree.addNode(chat, null, { id: "a", role: "assistant", calls });
  assert.deepEqual(tree.openCalls(chat, node), calls);
  tree.addNode(chat, "a", { id: "t", role: "tool", callId: "1", content: "x" });
  assert.deepEqual(tree.openCalls(chat, node), []);
  assert.deepEqual(tree.toMessages(chat), [
    { role: "assistant", content: "", tool_calls: [{ id: "1", type: "function", function: { name: "f", arguments: "{}" } }] },
    { role: "tool", content: "x", tool_call_id: "1" },
  ]);
});

test("what was stored is not believed", () => {
  for (const value of [null, 5, "x", [], {}, { id: 5, nodes: [] }, { id: "x", nodes: {} }]) {
    assert.equal(tree.readConversation(value), null);
  }
  const found = tree.readConversation({
    id: "x",
    leaf: "a",
    nodes: [null, 5, { id: "a", role: "system", content: "" }, { id: "a", parent: "a", role: "user", content: "hi", calls: 5, error: {} }],
  });
  assert.equal(found.nodes.length, 1);
  // A message that is its own parent ends no loop.
  assert.ok(tree.pathOf(found).length <= 2);
});
