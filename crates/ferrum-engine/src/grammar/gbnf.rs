//! llama.cpp's grammars as Lark.
//!
//! What does not refer to itself, however far around, is regular and becomes a terminal; the rest become
//! rules. A terminal takes as much text as it can, as in any lexer, so a grammar in which the end of one
//! depends on what follows may lose texts by it. None is gained: what comes out is of the grammar.

use super::{GrammarError, MAX_GRAMMAR_DEPTH, MAX_REPETITIONS, lark_string};
use std::collections::HashMap;
use std::fmt::Write;
use std::iter::Peekable;
use std::str::CharIndices;

#[derive(Clone, Debug, PartialEq)]
enum Node {
    Literal(String),
    /// Of a regular expression: `[…]`, or any character.
    Class(String),
    Rule(usize),
    Sequence(Vec<Node>),
    Choice(Vec<Node>),
    Repeat(Box<Node>, u64, Option<u64>),
}

/// Translates a grammar whose first symbol is `root`.
///
/// # Errors
/// `Invalid` with the line, for what is no GBNF and for tokens as symbols.
pub(super) fn to_lark(text: &str) -> Result<String, GrammarError> {
    let mut parser = Parser::new(text);
    parser.grammar()?;
    let undefined = parser.rules.iter().position(Option::is_none);
    if let Some(missing) = undefined {
        let name = parser.names.iter().find(|(_, index)| **index == missing);
        let name = name.map_or("", |(name, _)| name);
        return Err(GrammarError::Invalid(format!("there is no rule {name:?}")));
    }
    let Some(&root) = parser.names.get("root") else {
        return Err(GrammarError::Invalid("there is no rule \"root\"".into()));
    };
    let rules: Vec<Node> = parser.rules.into_iter().flatten().collect();
    let regular = regular(&rules);
    let mut writer = Writer {
        regular: &regular,
        terminals: Vec::new(),
    };
    let mut out = format!("start: {}\n", writer.name(root));
    for (index, rule) in rules.iter().enumerate() {
        let body = match regular[index] {
            true => terminal(rule),
            false => writer.rule(rule),
        };
        // Writing to a string does not fail.
        let _ = writeln!(out, "{}: {body}", writer.name(index));
    }
    for (index, body) in writer.terminals.iter().enumerate() {
        let _ = writeln!(out, "A{index}: {body}");
    }
    Ok(out)
}

struct Parser<'t> {
    text: &'t str,
    rest: Peekable<CharIndices<'t>>,
    names: HashMap<String, usize>,
    rules: Vec<Option<Node>>,
    depth: usize,
}

impl<'t> Parser<'t> {
    fn new(text: &'t str) -> Self {
        Self {
            text,
            rest: text.char_indices().peekable(),
            names: HashMap::new(),
            rules: Vec::new(),
            depth: 0,
        }
    }

    fn peek(&mut self) -> Option<char> {
        self.rest.peek().map(|&(_, c)| c)
    }

    fn take(&mut self, wanted: char) -> bool {
        self.rest.next_if(|&(_, c)| c == wanted).is_some()
    }

    fn wrong(&mut self, expected: &str) -> GrammarError {
        let at = self.rest.peek().map_or(self.text.len(), |&(at, _)| at);
        let line = self.text[..at].matches('\n').count() + 1;
        let found = match self.peek() {
            Some(c) => format!("{c:?}"),
            None => "the end".into(),
        };
        GrammarError::Invalid(format!("line {line}: found {found}, expected {expected}"))
    }

    /// Spaces and comments; lines only where a rule cannot end.
    fn space(&mut self, lines: bool) {
        loop {
            match self.peek() {
                Some(' ' | '\t') => {}
                Some('\r' | '\n') if lines => {}
                Some('#') => {
                    while self.rest.next_if(|&(_, c)| c != '\n').is_some() {}
                    continue;
                }
                _ => return,
            }
            self.rest.next();
        }
    }

    fn grammar(&mut self) -> Result<(), GrammarError> {
        self.space(true);
        while self.peek().is_some() {
            let name = self.name();
            if name.is_empty() {
                return Err(self.wrong("the name of a rule"));
            }
            self.space(false);
            for part in "::=".chars() {
                if !self.take(part) {
                    return Err(self.wrong("::="));
                }
            }
            self.space(true);
            let body = self.choice()?;
            let index = self.index(&name);
            if self.rules[index].replace(body).is_some() {
                let reason = format!("there are two rules {name:?}");
                return Err(GrammarError::Invalid(reason));
            }
            if !matches!(self.peek(), None | Some('\r' | '\n')) {
                return Err(self.wrong("the end of the rule"));
            }
            self.space(true);
        }
        Ok(())
    }

    fn name(&mut self) -> String {
        let mut name = String::new();
        let part = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        while let Some((_, c)) = self.rest.next_if(|&(_, c)| part(c)) {
            name.push(c);
        }
        name
    }

    fn index(&mut self, name: &str) -> usize {
        if let Some(&index) = self.names.get(name) {
            return index;
        }
        self.names.insert(name.into(), self.rules.len());
        self.rules.push(None);
        self.rules.len() - 1
    }

    fn choice(&mut self) -> Result<Node, GrammarError> {
        let mut options = vec![self.sequence()?];
        while self.take('|') {
            self.space(true);
            options.push(self.sequence()?);
        }
        Ok(match options.len() {
            1 => options.remove(0),
            _ => Node::Choice(options),
        })
    }

    fn sequence(&mut self) -> Result<Node, GrammarError> {
        let mut items = Vec::new();
        loop {
            let item = match self.peek() {
                Some('"') => self.literal()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.rest.next();
                    Node::Class("(?s:.)".into())
                }
                Some('(') => self.group()?,
                Some('<' | '!') => {
                    return Err(self.wrong("text: tokens as symbols are not supported"));
                }
                Some(c) if c.is_ascii_alphanumeric() || c == '-' || c == '_' => {
                    let name = self.name();
                    Node::Rule(self.index(&name))
                }
                _ => return Ok(Node::Sequence(items)),
            };
            self.space(self.depth > 0);
            let item = self.repeats(item)?;
            items.push(item);
        }
    }

    fn group(&mut self) -> Result<Node, GrammarError> {
        self.depth += 1;
        if self.depth > MAX_GRAMMAR_DEPTH {
            return Err(self.wrong("less depth"));
        }
        self.rest.next();
        self.space(true);
        let inner = self.choice()?;
        if !self.take(')') {
            return Err(self.wrong("`)`"));
        }
        self.depth -= 1;
        Ok(inner)
    }

    fn repeats(&mut self, mut item: Node) -> Result<Node, GrammarError> {
        let mut wraps = 0;
        loop {
            let (least, most) = match self.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => (0, None),
                _ => return Ok(item),
            };
            let braces = self.take('{');
            let (least, most) = match braces {
                true => self.bounds()?,
                false => (least, most),
            };
            // The closing brace, or the sign.
            if braces && self.peek() != Some('}') {
                return Err(self.wrong("`}`"));
            }
            self.rest.next();
            self.space(self.depth > 0);
            wraps += 1;
            if wraps > MAX_GRAMMAR_DEPTH {
                return Err(self.wrong("fewer repetitions of repetitions"));
            }
            item = Node::Repeat(Box::new(item), least, most);
        }
    }

    fn bounds(&mut self) -> Result<(u64, Option<u64>), GrammarError> {
        self.space(self.depth > 0);
        let least = self.number()?;
        self.space(self.depth > 0);
        if !self.take(',') {
            return Ok((least, Some(least)));
        }
        self.space(self.depth > 0);
        let most = match self.peek() {
            Some('}') => None,
            _ => Some(self.number()?),
        };
        self.space(self.depth > 0);
        match most {
            Some(most) if most < least => Err(self.wrong("a range from less to more")),
            _ => Ok((least, most)),
        }
    }

    fn number(&mut self) -> Result<u64, GrammarError> {
        let mut digits = String::new();
        while let Some((_, c)) = self.rest.next_if(|&(_, c)| c.is_ascii_digit()) {
            digits.push(c);
        }
        let number = digits.parse().ok().filter(|&n| n <= MAX_REPETITIONS);
        number.ok_or_else(|| self.wrong(&format!("a number up to {MAX_REPETITIONS}")))
    }

    fn literal(&mut self) -> Result<Node, GrammarError> {
        self.rest.next();
        let mut text = String::new();
        while !self.take('"') {
            text.push(self.character()?);
        }
        Ok(Node::Literal(text))
    }

    fn class(&mut self) -> Result<Node, GrammarError> {
        self.rest.next();
        let mut class = String::from(if self.take('^') { "[^" } else { "[" });
        let mut any = false;
        while !self.take(']') {
            let from = self.character()?;
            let mut to = from;
            // A dash at the end is only a dash.
            let mut ahead = self.rest.clone();
            if ahead.next_if(|&(_, c)| c == '-').is_some()
                && ahead.peek().is_some_and(|&(_, c)| c != ']')
            {
                self.rest.next();
                to = self.character()?;
            }
            if to < from {
                return Err(self.wrong("a range from lower to higher"));
            }
            let code = |c: char| format!("\\x{{{:x}}}", u32::from(c));
            class += &format!("{}-{}", code(from), code(to));
            any = true;
        }
        if !any {
            return Err(self.wrong("a character in `[]`"));
        }
        Ok(Node::Class(class + "]"))
    }

    /// A character of a literal or a class, which may be escaped.
    fn character(&mut self) -> Result<char, GrammarError> {
        let Some((_, c)) = self.rest.next() else {
            return Err(self.wrong("a character"));
        };
        if c != '\\' {
            return Ok(c);
        }
        let escaped = self.rest.next().map(|(_, c)| c);
        match escaped {
            Some('t') => Ok('\t'),
            Some('r') => Ok('\r'),
            Some('n') => Ok('\n'),
            Some(c @ ('\\' | '"' | '[' | ']')) => Ok(c),
            Some('x') => self.code(2),
            Some('u') => self.code(4),
            Some('U') => self.code(8),
            _ => Err(self.wrong("an escape of t, r, n, \\, \", [, ], x, u or U")),
        }
    }

    fn code(&mut self, digits: usize) -> Result<char, GrammarError> {
        let mut code = 0u32;
        for _ in 0..digits {
            let digit = self.peek().and_then(|c| c.to_digit(16));
            let Some(digit) = digit else {
                return Err(self.wrong("a hexadecimal digit"));
            };
            // Eight digits are the most.
            code = code << 4 | digit;
            self.rest.next();
        }
        char::from_u32(code).ok_or_else(|| self.wrong("the code of a character"))
    }
}

/// Which rules lead to no rule that refers to itself.
fn regular(rules: &[Node]) -> Vec<bool> {
    // A rule is regular when all that it names are; those in a circle never get there.
    let mut regular = vec![false; rules.len()];
    let mut waits: Vec<Vec<usize>> = rules.iter().map(names).collect();
    let mut users = vec![Vec::new(); rules.len()];
    for (rule, names) in waits.iter_mut().enumerate() {
        names.sort_unstable();
        names.dedup();
        for &name in names.iter() {
            users[name].push(rule);
        }
    }
    let mut open: Vec<usize> = waits.iter().map(Vec::len).collect();
    let mut ready: Vec<usize> = (0..rules.len()).filter(|&rule| open[rule] == 0).collect();
    while let Some(rule) = ready.pop() {
        regular[rule] = true;
        for &user in &users[rule] {
            open[user] -= 1;
            if open[user] == 0 {
                ready.push(user);
            }
        }
    }
    regular
}

/// The rules that a node names.
fn names(node: &Node) -> Vec<usize> {
    match node {
        Node::Literal(_) | Node::Class(_) => Vec::new(),
        Node::Rule(index) => vec![*index],
        Node::Sequence(items) | Node::Choice(items) => items.iter().flat_map(names).collect(),
        Node::Repeat(item, ..) => names(item),
    }
}

/// A regular node as a part of a terminal.
fn terminal(node: &Node) -> String {
    let joined = |items: &[Node], by: &str| {
        let items: Vec<_> = items.iter().map(terminal).collect();
        format!("({})", items.join(by))
    };
    match node {
        Node::Literal(text) => lark_string(text),
        Node::Class(class) => format!("/{class}/"),
        Node::Rule(index) => format!("T{index}"),
        Node::Sequence(items) if items.is_empty() => "\"\"".into(),
        Node::Sequence(items) => joined(items, " "),
        Node::Choice(items) => joined(items, " | "),
        Node::Repeat(item, least, most) => repeat(&terminal(item), *least, *most),
    }
}

fn repeat(item: &str, least: u64, most: Option<u64>) -> String {
    match (least, most) {
        (_, Some(0)) => "\"\"".into(),
        (least, None) => format!("({item}){{{least},}}"),
        (least, Some(most)) => format!("({item}){{{least},{most}}}"),
    }
}

struct Writer<'r> {
    regular: &'r [bool],
    /// Regular parts of rules that are none: only a name makes one terminal of them.
    terminals: Vec<String>,
}

impl Writer<'_> {
    fn name(&self, rule: usize) -> String {
        match self.regular[rule] {
            true => format!("T{rule}"),
            false => format!("r{rule}"),
        }
    }

    fn is_regular(&self, node: &Node) -> bool {
        names(node).iter().all(|&name| self.regular[name])
    }

    fn anonymous(&mut self, node: &Node) -> String {
        let body = terminal(node);
        let known = self.terminals.iter().position(|other| *other == body);
        let index = known.unwrap_or_else(|| {
            self.terminals.push(body);
            self.terminals.len() - 1
        });
        format!("A{index}")
    }

    /// A node as a part of a rule.
    fn rule(&mut self, node: &Node) -> String {
        match node {
            Node::Rule(index) => self.name(*index),
            node if self.is_regular(node) => self.anonymous(node),
            Node::Sequence(items) => self.sequence(items),
            Node::Choice(items) => {
                let items: Vec<_> = items.iter().map(|item| self.rule(item)).collect();
                format!("({})", items.join(" | "))
            }
            Node::Repeat(item, least, most) => repeat(&self.rule(item), *least, *most),
            // They are regular.
            Node::Literal(_) | Node::Class(_) => self.anonymous(node),
        }
    }

    /// Neighbours that are regular become one terminal together.
    fn sequence(&mut self, items: &[Node]) -> String {
        let mut parts = Vec::new();
        let regular: Vec<bool> = items.iter().map(|item| self.is_regular(item)).collect();
        let together = |i: usize| i > 0 && regular[i] && regular[i - 1];
        let starts: Vec<usize> = (0..items.len()).filter(|&i| !together(i)).collect();
        for (n, &from) in starts.iter().enumerate() {
            let to = starts.get(n + 1).copied().unwrap_or(items.len());
            match &items[from..to] {
                [item] => parts.push(self.rule(item)),
                run => parts.push(self.anonymous(&Node::Sequence(run.to_vec()))),
            }
        }
        format!("({})", parts.join(" "))
    }
}
