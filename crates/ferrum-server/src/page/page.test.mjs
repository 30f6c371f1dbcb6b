// The modules that need no browser: `node --test` in this folder; `cargo test` runs it where there is Node.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { runInThisContext } from "node:vm";
import { Answer, statWords } from "./answer.js";
import { EventReader } from "./events.js";
import { fileBlock, fileSize, readTextFile } from "./files.js";
import { highlightTree } from "./highlight.js";
import { parseInline, safeAddress } from "./inline.js";
import { parseFences, parseMarkdown } from "./markdown.js";
import { mathTree } from "./math.js";
import { searchChats, searchable } from "./search.js";
import { exportText, keepImported, readExport } from "./transfer.js";
import * as tree from "./tree.js";

/** A tree in short: `p(a strong(b))`. */
function short(node) {
  if (typeof node === "string") return node;
  const inside = (nodes) => (nodes ?? []).map(short).join("");
  switch (node.type) {
    case "paragraph": return `p(${inside(node.inline)})`;
    case "heading": return `h${node.level}(${inside(node.inline)})`;
    case "code": return node.language === undefined ? `code(${node.text})` : `pre:${node.language}(${node.text})`;
    case "list": return `${node.ordered ? `ol${node.start}` : "ul"}(${node.items.map((item, i) => task(node.tasks[i]) + inside(item)).join("|")})`;
    case "math": return `${node.display ? "M" : "m"}{${node.tex}}`;
    case "reference": return `^${node.number ?? node.id}`;
    case "notes": return `notes(${node.notes.map((note) => `${note.number}:${inside(note.blocks)}`).join("|")})`;
    case "quote": return `quote(${inside(node.blocks)})`;
    case "table": return `table(${[node.head, ...node.rows].map((row) => row.map(inside).join(",")).join("|")})`;
    case "link": return `a:${node.href}(${inside(node.inline)})`;
    case "break": return "/";
    case "rule": return "hr";
    default: return `${node.type}(${inside(node.inline)})`;
  }
}

const task = (done) => (done === undefined ? "" : done ? "[x]" : "[ ]");
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
    ["|a\\|b|c|\n|-|-|\n|`x\\|y`|z|", "table(a|b,c|code(x|y),z)"],
    ["- [ ] a\n- [x] b\n- [X] c\n- d\n- [y] e\n- [ ]", "ul([ ]p(a)|[x]p(b)|[x]p(c)|p(d)|p([y] e)|p([ ]))"],
    ["$$\nx = 1\n$$", "M{x = 1}"],
    ["so\n$$x$$.\nand", "p(so) M{x} p(and)"],
    ["\\[\na\n\n+ b\n\\]\nafter", "M{a\n+ b} p(after)"],
    ["1. a\n   \\[\n   x\n   \\]\n2. b", "ol1(p(a)M{x}|p(b))"],
    ["$$ a\nb", "p($$ a/b)"],
    ["$$\na\n\nb\n$$", "p($$/a) p(b/$$)"],
    ["$$x$$ and more", "p(M{x} and more)"],
    ["```\n$$\n```", "pre:($$)"],
    ["a[^x] b[^1] c[^none]\n\n[^1]: one\n[^x]: two [^q]\n  goes on\n\n  more\n[^u]: unused\n[^q]: three\nend",
      "p(a^1 b^2 c^none) p(end) notes(1:p(two ^3/goes on)p(more)|2:p(one)|3:p(three)|4:p(unused))"],
    ["[^a]: only", "notes(1:p(only))"],
    ["- [^a]: in a list", "ul(p(^a: in a list))"],
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
    ["a $x^2$ b", "a m{x^2} b"],
    ["**$x_1$** and $y_1$", "strong(m{x_1}) and m{y_1}"],
    ["\\(a_1 * b_2 * c\\) and \\[d\\]", "m{a_1 * b_2 * c} and M{d}"],
    ["$$x$$", "M{x}"],
    ["$a\\$b$", "m{a\\$b}"],
    ["$n log n$", "m{n log n}"],
    ["$\\text{if it is so}$", "m{\\text{if it is so}}"],
    ["costs $5 and $6", "costs $5 and $6"],
    ["$5-$10", "$5-$10"],
    ["from $5 to 10$.", "from $5 to 10$."],
    ["US$5$ x", "US$5$ x"],
    ["\\$5 and \\$6", "$5 and $6"],
    ["$5 `$x` $", "$5 code($x) $"],
    ["`$x$` \\\\(y)", "code($x$) \\(y)"],
    ["\\(open", "(open"],
    ["[^1]", "^1"],
    ["a<br>b<BR/>c<br />d", "a/b/c/d"],
    ["`<br>` \\<br>", "code(<br>) <br>"],
    ["H<sub>2</sub>O, x<sup>*n*</sup>", "Hsub(2)O, xsup(em(n))"],
    ["<sub>open", "<sub>open"],
    ["<sub onclick=x>y</sub>", "<sub onclick=x>y</sub>"],
    ["<b>y</b> <script>z</script>", "<b>y</b> <script>z</script>"],
    ["a &lt;b&gt; &amp;amp; &nbsp;c &unknown; & `&lt;`", "a <b> &amp; \u00a0c &unknown; & code(&lt;)"],
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
  marks.push("$", "$$", "$a$", "\\(", "\\[\n", "$$\n", "[^a]", "[^a]: b\n", "- [ ] ", "<br>", "<sub>", "</sub>", "&", "&lt;");
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
  const stats = { first: 0.5, tokens: 9, whole: false, rate: 4, exact: true, prompt: 5, cached: 0 };
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
  // A message that is its own parent is the first one.
  assert.deepEqual(found.nodes, [{ id: "a", parent: null, role: "user", content: "hi" }]);
  assert.deepEqual(tree.pathOf(found), found.nodes);
});

test("every answer has a rate", () => {
  const rateOf = (times, tokens) => {
    const node = { content: "" };
    const answer = new Answer(node, 0);
    for (const now of times) answer.add({ choices: [{ delta: { content: "x" } }] }, now);
    if (tokens) answer.add({ choices: [], usage: { completion_tokens: tokens, prompt_tokens: 5 } }, 1000);
    return [node.stats.rate, node.stats.whole];
  };
  assert.deepEqual(rateOf([500, 1000, 1500], 11), [10, false]);
  assert.deepEqual(rateOf([500], 1), [2, true], "one token");
  assert.deepEqual(rateOf([500, 505, 505], 10), [10 / 0.505, true], "all at once");
  assert.deepEqual(rateOf([500, 1000]), [2, true], "stopped");
  assert.deepEqual(rateOf([], 2), [2, true], "tokens without a text");
});

test("a person's message shows what they fenced", () => {
  const parts = (text) => parseFences(text).map((part) => (part.type === "text" ? part.text : `${part.language}:${part.title}:${part.text}`));
  assert.deepEqual(parts("a *b*\n\n```python x y.py\nc\n```\nd"), ["a *b*", "python:x y.py:c", "d"]);
  assert.deepEqual(parts("``` open"), ["``` open"]);
  assert.deepEqual(parts("```\na\n```\n```\nb\n```"), ["::a", "::b"].map((part) => part.replace("::", ":undefined:")));
});

test("files become fenced blocks, if they are text", async () => {
  assert.equal(fileBlock({ name: "a.py", text: "x = 1\n" }), "```python a.py\nx = 1\n```");
  const nested = { name: "n.md", text: "````\n```js\n````" };
  assert.deepEqual(parseFences(fileBlock(nested)).map((part) => part.text), [nested.text]);
  const file = (name, bytes) => new File([bytes], name);
  assert.deepEqual(await readTextFile(file("a`\nb.txt", "\ufeffä\r\nb")), { name: "a__b.txt", text: "ä\nb", size: 8 });
  assert.equal((await readTextFile(file("Übersicht (größer) 表.md", ""))).name, "Übersicht (größer) 表.md");
  assert.deepEqual([0, 23, 1023, 1024, 2_000_000].map(fileSize), ["0 B", "23 B", "1,023 B", "1 KiB", "1,953 KiB"]);
  await assert.rejects(readTextFile(file("a.png", new Uint8Array([0x89, 0x50]))), /not a text file/);
  await assert.rejects(readTextFile(file("a.bin", "a\0b")), /not a text file/);
  await assert.rejects(readTextFile(file("a.txt", "a".repeat(300_000))), /too large/);
});

test("search finds words in titles and messages", () => {
  const chat = (id, updated, title, ...texts) => {
    const made = { ...tree.newConversation(id), title, updated };
    texts.forEach((content, i) => made.nodes.push({ id: `${id}${i}`, parent: null, role: "user", content }));
    return searchable(made);
  };
  const chats = [
    chat("a", 1, "Foxes", "A story about a Fox, please", "Once there was a red fox. ".repeat(20)),
    chat("b", 3, "Iron", "What melts iron?", "Heat İ melts IRON ore"),
    chat("c", 2, "", "nothing"),
  ];
  const ids = (query) => searchChats(chats, query).map(({ id, node }) => node ?? id).join(" ");
  assert.equal(ids(""), "b c a");
  assert.equal(ids("fox"), "a0");
  assert.equal(ids("RED fox"), "a1");
  assert.equal(ids("iron melts"), "b0");
  assert.equal(ids("melts ore"), "b1");
  assert.equal(ids("nowhere"), "");
  assert.equal(ids("foxes"), "a");
  const [{ parts }] = searchChats(chats, "red once");
  assert.deepEqual(parts.filter((part) => part.found).map((part) => part.text).slice(0, 2), ["Once", "red"]);
  assert.ok(parts.map((part) => part.text).join("").length < 200);
  assert.equal(searchChats(Array.from({ length: 99 }, (_, i) => chat(`x${i}`, i, "same", "same")), "same").length, 30);
});

test("an export is read again, and nothing else is", () => {
  const chat = tree.newConversation("chat-1", "be brief");
  tree.addNode(chat, null, { id: "u", role: "user", content: "hi" });
  const stats = { exact: true, whole: false, tokens: 3, rate: 2 };
  tree.addNode(chat, "u", { id: "a", role: "assistant", content: "lo", model: "m", finish: "stop", stats, calls: [{ id: "1", name: "f", arguments: "{}" }] });
  chat.title = "Greeting";
  const text = exportText([chat], 0);
  assert.deepEqual(readExport(text), { conversations: [chat], refused: 0 });

  const kept = new Map();
  const store = { load: (id) => kept.get(id) ?? null, save: (one) => kept.size < 2 && Boolean(kept.set(one.id, one)) };
  assert.deepEqual(keepImported([chat], store, () => "fresh"), { added: 1, known: 0, full: false });
  assert.deepEqual(keepImported([chat], store, () => "fresh"), { added: 0, known: 1, full: false });
  const changed = { ...chat, nodes: chat.nodes.slice(0, 1) };
  assert.deepEqual(keepImported([changed], store, () => "fresh"), { added: 1, known: 0, full: false });
  assert.deepEqual([...kept.keys()], ["chat-1", "fresh"]);
  assert.deepEqual(kept.get("chat-1"), chat);
  assert.deepEqual(keepImported([{ ...chat, id: "third" }], store, () => "x"), { added: 0, known: 0, full: true });

  const wrap = (conversations, more) => JSON.stringify({ format: "ferrum.conversations", version: 1, conversations, ...more });
  for (const [file, fault] of [["{", /not JSON/], ["null", /no conversations/], ["[]", /no conversations/], [wrap({}), /no conversations/],
    [wrap([], { version: 9 }), /version 9/], [wrap(Array.from({ length: 10_001 }, () => 1)), /more than/]]) {
    assert.throws(() => readExport(file), fault);
  }
  const node = { id: "u", role: "user", content: "x" };
  const hostile = [null, 5, {}, { id: "x" }, { id: "../x", nodes: [node] }, { id: "x", nodes: [] }, { id: "x", nodes: [null, { ...node, role: "system" }] },
    { id: "y", nodes: Array.from({ length: 10_001 }, () => node) }];
  assert.deepEqual(readExport(wrap(hostile)), { conversations: [], refused: hostile.length });
  const nodes = [{ ...node, parent: "b", __proto__: null, constructor: 1, stats: { tokens: "x" }, status: {}, calls: [null, { id: {} }] }, { ...node, id: "b", parent: "u" }, { ...node, content: "twice" }];
  const [read] = readExport(wrap([{ id: "z", title: "t".repeat(999), updated: 1e99, leaf: "none", nodes, more: 1 }])).conversations;
  assert.equal(read.title.length, 200);
  assert.ok(read.updated <= Date.now());
  assert.deepEqual(Object.keys(read).sort(), ["id", "leaf", "nodes", "system", "title", "updated"]);
  assert.deepEqual(read.nodes, [
    { id: "u", role: "user", content: "x", parent: null, calls: [{ id: "", name: "", arguments: "" }, { id: "[object Object]", name: "", arguments: "" }] },
    { id: "b", role: "user", content: "x", parent: "u" },
  ]);
});

for (const library of ["temml", "highlight"]) runInThisContext(readFileSync(new URL(`vendor/${library}.min.js`, import.meta.url), "utf8"));

test("formulas are drawn, and hostile ones are not", () => {
  for (const tex of ["x", "\\frac{a}{b}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\sum_{i=0}^n i^2", "\\pmb{x} \\textcolor{red}{y}"]) {
    assert.ok(mathTree(tex, true), tex);
  }
  const bomb = "\\def\\a{xxxxxxxxxx}\\def\\b{\\a\\a\\a\\a\\a\\a\\a\\a\\a\\a}\\b\\b\\b";
  for (const tex of [bomb, "\\href{javascript:1}{x}", "\\includegraphics{https://a.b/c.png}", "\\htmlStyle{color:red}{x}", "\\frac{a", "\\unheard{x}", "x".repeat(6000), "{".repeat(2400) + "}".repeat(2400), "\\newcommand{\\x}{\\x\\x}\\x",
    "\\let\\a=b", "\\sqrt{".repeat(500) + "}".repeat(500)]) {
    assert.equal(mathTree(tex, false), null, tex.slice(0, 40));
  }
});

test("code is read as a tree with all of its text", () => {
  const textOf = (node) => (typeof node === "string" ? node : node.children.map(textOf).join(""));
  const hostile = "</code><script>x</script> <!-- \"'`${ /* // # -- {% <? \\";
  for (const language of globalThis.hljs.listLanguages()) {
    for (const text of ["def f(x): return 'a' # b\n", hostile, hostile.repeat(50)]) {
      assert.equal(textOf(highlightTree(language, text, true) ?? text), text, language);
    }
  }
  const scopes = highlightTree("python", "def f(): return 1", true).children.map((node) => node.scope);
  for (const scope of ["keyword", "title.function", "number"]) assert.ok(scopes.includes(scope), scope);
  assert.equal(highlightTree("nonsense", "x", true), null);
  assert.equal(highlightTree("python", "x".repeat(50_000), true), null);
});
