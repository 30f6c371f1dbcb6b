//! Template text to tokens, with the white-space rules that chat templates are written for:
//! `trim_blocks` and `lstrip_blocks` on, one line break at the end of the template dropped.

use super::error::TemplateError;
use std::sync::Arc;

/// A token and the line it is on.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Token {
    pub(super) kind: Tok,
    pub(super) line: u32,
}

/// Kinds of token.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Tok {
    Text(Arc<str>),
    PrintStart,
    PrintEnd,
    BlockStart,
    BlockEnd,
    Name(Arc<str>),
    Str(Arc<str>),
    Int(i128),
    Float(f64),
    /// An operator or bracket.
    Op(&'static str),
    End,
}

impl Tok {
    /// How the token reads in a message.
    pub(super) fn describe(&self) -> String {
        match self {
            Tok::Text(_) => "template data".into(),
            Tok::PrintStart => "begin of print statement".into(),
            Tok::PrintEnd => "end of print statement".into(),
            Tok::BlockStart => "begin of statement block".into(),
            Tok::BlockEnd => "end of statement block".into(),
            Tok::Name(name) => name.to_string(),
            Tok::Str(text) => text.to_string(),
            Tok::Int(number) => number.to_string(),
            Tok::Float(number) => number.to_string(),
            Tok::Op(op) => (*op).into(),
            Tok::End => "end of template".into(),
        }
    }
}

/// Longest first.
const OPERATORS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}",
    ">", "<", "=", ".", ":", "|", ",", ";",
];

/// White space as Python's `str` has it.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

struct Lexer<'a> {
    source: &'a str,
    at: usize,
    line: u32,
    /// Whether what was taken last ended a line; so does the start of the template.
    after_break: bool,
    tokens: Vec<Token>,
}

/// The tokens of a template, ending with [`Tok::End`].
pub(super) fn tokenize(source: &str) -> Result<Vec<Token>, TemplateError> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let source = source.strip_suffix('\n').unwrap_or(&source);
    let mut lexer = Lexer {
        source,
        at: 0,
        line: 1,
        after_break: true,
        tokens: Vec::new(),
    };
    while lexer.at < source.len() {
        lexer.text_and_tag()?;
    }
    lexer.push(Tok::End);
    Ok(lexer.tokens)
}

impl<'a> Lexer<'a> {
    fn push(&mut self, kind: Tok) {
        self.tokens.push(Token {
            kind,
            line: self.line,
        });
    }

    fn fail<T>(&self, reason: impl Into<String>) -> Result<T, TemplateError> {
        Err(TemplateError::Syntax {
            line: self.line,
            reason: reason.into(),
        })
    }

    fn rest(&self) -> &'a str {
        &self.source[self.at..]
    }

    fn take(&mut self, bytes: usize) -> &'a str {
        let taken = &self.source[self.at..self.at + bytes];
        self.line += taken.matches('\n').count() as u32;
        self.at += bytes;
        if !taken.is_empty() {
            self.after_break = taken.ends_with('\n');
        }
        taken
    }

    fn push_text(&mut self, text: &str) {
        if !text.is_empty() {
            self.push(Tok::Text(text.into()));
        }
    }

    /// Text up to the next tag as it is put out: `strip` is the sign after the tag's start.
    fn trim_before<'t>(&self, text: &'t str, sign: Option<u8>, is_print: bool) -> &'t str {
        if sign == Some(b'-') {
            return text.trim_end_matches(is_space);
        }
        if sign == Some(b'+') || is_print {
            return text;
        }
        let line_start = text.rfind('\n').map(|at| at + 1);
        let start = match line_start {
            Some(start) => start,
            None if self.after_break => 0,
            None => return text,
        };
        if text[start..].chars().all(is_space) {
            &text[..start]
        } else {
            text
        }
    }

    fn text_and_tag(&mut self) -> Result<(), TemplateError> {
        let rest = self.rest();
        let tag = rest
            .match_indices('{')
            .map(|(at, _)| at)
            .find(|&at| matches!(rest.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#')));
        let Some(tag) = tag else {
            let text = self.take(rest.len());
            self.push_text(text);
            return Ok(());
        };
        let opener = rest.as_bytes()[tag + 1];
        let sign = rest
            .as_bytes()
            .get(tag + 2)
            .copied()
            .filter(|c| matches!(c, b'-' | b'+'));
        let text = self.trim_before(&rest[..tag], sign, opener == b'{');
        self.push_text(text);
        self.take(tag);
        self.take(2 + usize::from(sign.is_some()));
        match opener {
            b'#' => self.comment(),
            b'%' if self.raw_start().is_some() => self.raw(),
            b'%' => {
                self.push(Tok::BlockStart);
                self.inside("%}", Tok::BlockEnd)
            }
            _ => {
                self.push(Tok::PrintStart);
                self.inside("}}", Tok::PrintEnd)
            }
        }
    }

    /// Takes the white space that the end of a block or comment swallows.
    fn after_block(&mut self, sign: Option<u8>) {
        let rest = self.rest();
        match sign {
            Some(b'-') => {
                let spaces = rest.len() - rest.trim_start_matches(is_space).len();
                self.take(spaces);
            }
            Some(_) => {}
            None => {
                self.take(usize::from(rest.starts_with('\n')));
            }
        }
    }

    fn comment(&mut self) -> Result<(), TemplateError> {
        let Some(end) = self.rest().find("#}") else {
            return self.fail("missing end of comment tag");
        };
        let body = &self.rest()[..end];
        let sign = body
            .as_bytes()
            .last()
            .copied()
            .filter(|c| matches!(c, b'-' | b'+'));
        self.take(end + 2);
        self.after_block(sign);
        Ok(())
    }

    /// Length of ` raw %}` after the start of a block, with the sign at its end.
    fn raw_start(&self) -> Option<(usize, Option<u8>)> {
        raw_tag(self.rest(), "raw").filter(|(_, sign)| *sign != Some(b'+'))
    }

    fn raw(&mut self) -> Result<(), TemplateError> {
        let (len, sign) = self.raw_start().unwrap_or_default();
        self.take(len);
        self.after_block(sign.filter(|&sign| sign == b'-').or(Some(b'+')));
        let rest = self.rest();
        for (start, _) in rest.match_indices("{%") {
            let inside = &rest[start + 2..];
            let sign = inside
                .as_bytes()
                .first()
                .copied()
                .filter(|c| matches!(c, b'-' | b'+'));
            let skip = usize::from(sign.is_some());
            let Some((len, end_sign)) = raw_tag(&inside[skip..], "endraw") else {
                continue;
            };
            let text = self.trim_before(&rest[..start], sign, false);
            self.push_text(text);
            self.take(start + 2 + skip + len);
            self.after_block(end_sign);
            return Ok(());
        }
        self.fail("missing end of raw directive")
    }

    /// Tokens inside a tag.
    fn inside(&mut self, end: &'static str, end_token: Tok) -> Result<(), TemplateError> {
        let mut open: Vec<&'static str> = Vec::new();
        loop {
            let spaces = self.rest().len() - self.rest().trim_start_matches(is_space).len();
            self.take(spaces);
            let rest = self.rest();
            if rest.is_empty() {
                return self.fail("unexpected end of template inside a tag");
            }
            if open.is_empty() {
                let sign = rest.as_bytes()[0];
                let signed = sign == b'-' || (sign == b'+' && end == "%}");
                if signed && rest[1..].starts_with(end) {
                    self.push(end_token);
                    self.take(3);
                    self.after_block(Some(sign));
                    return Ok(());
                }
                if rest.starts_with(end) {
                    self.push(end_token);
                    self.take(2);
                    if end == "%}" {
                        self.after_block(None);
                    }
                    return Ok(());
                }
            }
            self.token(&mut open)?;
        }
    }

    fn token(&mut self, open: &mut Vec<&'static str>) -> Result<(), TemplateError> {
        let rest = self.rest();
        let first = rest.chars().next().unwrap_or('\0');
        if first == '_' || first.is_alphabetic() {
            let len = rest
                .find(|c: char| !(c == '_' || c.is_alphanumeric() || is_mark(c)))
                .unwrap_or(rest.len());
            self.push(Tok::Name(rest[..len].into()));
            self.take(len);
            return Ok(());
        }
        if first.is_ascii_digit() {
            return self.number();
        }
        if matches!(first, '"' | '\'') {
            return self.string(first);
        }
        let Some(op) = OPERATORS.into_iter().find(|op| rest.starts_with(op)) else {
            return self.fail(format!("unexpected char {first:?}"));
        };
        match op {
            "(" => open.push(")"),
            "[" => open.push("]"),
            "{" => open.push("}"),
            ")" | "]" | "}" => match open.pop() {
                Some(expected) if expected == op => {}
                Some(expected) => {
                    return self.fail(format!("unexpected `{op}`, expected `{expected}`"));
                }
                None => return self.fail(format!("unexpected `{op}`")),
            },
            _ => {}
        }
        self.push(Tok::Op(op));
        self.take(op.len());
        Ok(())
    }

    fn number(&mut self) -> Result<(), TemplateError> {
        let rest = self.rest();
        let after_dot = self.at > 0 && self.source.as_bytes()[self.at - 1] == b'.';
        let digits = |text: &str| {
            let mut len = 0;
            let bytes = text.as_bytes();
            while let Some(c) = bytes.get(len) {
                let joined =
                    *c == b'_' && len > 0 && bytes.get(len + 1).is_some_and(u8::is_ascii_digit);
                if !c.is_ascii_digit() && !joined {
                    break;
                }
                len += 1;
            }
            len
        };
        for (prefix, radix) in [("0x", 16), ("0o", 8), ("0b", 2)] {
            if rest.len() > 2 && rest.as_bytes()[..2].eq_ignore_ascii_case(prefix.as_bytes()) {
                let len = rest[2..]
                    .find(|c: char| c != '_' && !c.is_digit(radix))
                    .unwrap_or(rest.len() - 2);
                let text = rest[2..2 + len].replace('_', "");
                let Ok(number) = i128::from_str_radix(&text, radix) else {
                    return self.fail("a number is malformed or too large");
                };
                self.push(Tok::Int(number));
                self.take(2 + len);
                return Ok(());
            }
        }
        let whole = digits(rest);
        let mut len = whole;
        if !after_dot {
            if rest[len..].starts_with('.') && digits(&rest[len + 1..]) > 0 {
                len += 1 + digits(&rest[len + 1..]);
            }
            if rest[len..].starts_with(['e', 'E']) {
                let sign = usize::from(rest[len + 1..].starts_with(['+', '-']));
                let exponent = digits(&rest[len + 1 + sign..]);
                if exponent > 0 {
                    len += 1 + sign + exponent;
                }
            }
        }
        let text = rest[..len].replace('_', "");
        let token = if len > whole {
            text.parse().ok().map(Tok::Float)
        } else {
            text.parse().ok().map(Tok::Int)
        };
        let Some(token) = token else {
            return self.fail("a number is too large");
        };
        self.push(token);
        self.take(len);
        Ok(())
    }

    fn string(&mut self, quote: char) -> Result<(), TemplateError> {
        let rest = self.rest();
        let mut escaped = false;
        let end = rest[1..].find(|c: char| {
            let ends = c == quote && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        let Some(end) = end else {
            return self.fail("a string does not end");
        };
        match unescape(&rest[1..=end]) {
            Ok(text) => self.push(Tok::Str(text.into())),
            Err(reason) => return self.fail(reason),
        }
        self.take(end + 2);
        Ok(())
    }
}

/// Characters that go on with a name without being letters or digits.
fn is_mark(c: char) -> bool {
    matches!(c, '\u{300}'..='\u{36f}' | '\u{200c}' | '\u{200d}' | '\u{900}'..='\u{d7f}')
}

/// Length of ` name %}` at the start of `text`, and the sign before its end.
fn raw_tag(text: &str, name: &str) -> Option<(usize, Option<u8>)> {
    let rest = text.trim_start_matches(is_space).strip_prefix(name)?;
    let rest = rest.trim_start_matches(is_space);
    let sign = rest
        .as_bytes()
        .first()
        .copied()
        .filter(|c| matches!(c, b'-' | b'+'));
    let rest = rest[usize::from(sign.is_some())..].strip_prefix("%}")?;
    Some((text.len() - rest.len(), sign))
}

/// Python's escapes in a string.
fn unescape(text: &str) -> Result<String, &'static str> {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        let Some(c) = chars.next() else {
            return Err("a string ends in a backslash");
        };
        let simple = match c {
            'n' => Some('\n'),
            't' => Some('\t'),
            'r' => Some('\r'),
            '\\' | '\'' | '"' => Some(c),
            'a' => Some('\x07'),
            'b' => Some('\x08'),
            'f' => Some('\x0c'),
            'v' => Some('\x0b'),
            _ => None,
        };
        if let Some(simple) = simple {
            out.push(simple);
            continue;
        }
        let digits = match c {
            '\n' => continue,
            'x' => 2,
            'u' => 4,
            'U' => 8,
            '0'..='7' => {
                let octal: String = std::iter::once(c)
                    .chain(chars.clone().take(2).take_while(|c| matches!(c, '0'..='7')))
                    .collect();
                for _ in 1..octal.len() {
                    chars.next();
                }
                let code = u32::from_str_radix(&octal, 8).unwrap_or(0);
                out.extend(char::from_u32(code));
                continue;
            }
            'N' => return Err("characters cannot be given by name"),
            other => {
                out.extend(['\\', other]);
                continue;
            }
        };
        let hex: String = chars.by_ref().take(digits).collect();
        let code = u32::from_str_radix(&hex, 16).map_err(|_| "an escape lacks hex digits")?;
        if hex.len() != digits {
            return Err("an escape lacks hex digits");
        }
        // Python keeps lone surrogates, which no prompt can hold.
        out.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
    }
    Ok(out)
}
