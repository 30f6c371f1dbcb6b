//! Tokens to a tree, by the grammar of Jinja: statements.

use super::ast::{Expr, For, Kind, Macro, Reads, Stmt, Target};
use super::error::TemplateError;
use super::lexer::{Tok, Token};
use std::sync::Arc;

/// Tags within each other, and brackets within each other.
const MAX_NESTING: u32 = 60;
pub(super) type Parsed<T> = Result<T, TemplateError>;

/// Parses the tokens of a template.
pub(super) fn parse(tokens: Vec<Token>) -> Parsed<Vec<Stmt>> {
    let mut parser = Parser {
        tokens,
        at: 0,
        nesting: 0,
        loops: 0,
        reads: Vec::new(),
    };
    let body = parser.body(&[])?;
    match parser.peek() {
        Tok::End => Ok(body),
        other => parser.fail(format!("unexpected {}", other.describe())),
    }
}

/// Where parsing is.
pub(super) struct Parser {
    tokens: Vec<Token>,
    pub(super) at: usize,
    nesting: u32,
    /// Loops around this place, within its macro.
    loops: u32,
    /// What the macros around this place read.
    pub(super) reads: Vec<Reads>,
}

impl Parser {
    pub(super) fn peek(&self) -> &Tok {
        self.ahead(0)
    }

    pub(super) fn ahead(&self, by: usize) -> &Tok {
        self.tokens
            .get(self.at + by)
            .map_or(&Tok::End, |token| &token.kind)
    }

    pub(super) fn line(&self) -> u32 {
        self.tokens
            .get(self.at)
            .or(self.tokens.last())
            .map_or(1, |token| token.line)
    }

    pub(super) fn next(&mut self) -> Tok {
        let token = self.peek().clone();
        self.at += 1;
        token
    }

    pub(super) fn fail<T>(&self, reason: impl Into<String>) -> Parsed<T> {
        Err(TemplateError::Syntax {
            line: self.line(),
            reason: reason.into(),
        })
    }

    pub(super) fn is_op(&self, op: &str) -> bool {
        matches!(self.peek(), Tok::Op(found) if *found == op)
    }

    pub(super) fn skip_op(&mut self, op: &str) -> bool {
        let found = self.is_op(op);
        self.at += usize::from(found);
        found
    }

    pub(super) fn expect_op(&mut self, op: &str) -> Parsed<()> {
        if self.skip_op(op) {
            return Ok(());
        }
        self.fail(format!("expected `{op}`, found {}", self.peek().describe()))
    }

    pub(super) fn is_name(&self, name: &str) -> bool {
        matches!(self.peek(), Tok::Name(found) if **found == *name)
    }

    pub(super) fn skip_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        self.at += usize::from(found);
        found
    }

    pub(super) fn expect_name(&mut self, name: &str) -> Parsed<()> {
        if self.skip_name(name) {
            return Ok(());
        }
        self.fail(format!(
            "expected `{name}`, found {}",
            self.peek().describe()
        ))
    }

    pub(super) fn name(&mut self) -> Parsed<Arc<str>> {
        match self.next() {
            Tok::Name(name) => Ok(name),
            other => {
                self.at -= 1;
                self.fail(format!("expected a name, found {}", other.describe()))
            }
        }
    }

    pub(super) fn nested<T>(&mut self, work: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        if self.nesting == MAX_NESTING {
            return self.fail(format!("more than {MAX_NESTING} levels within each other"));
        }
        self.nesting += 1;
        let result = work(self);
        self.nesting -= 1;
        result
    }

    /// Statements up to a tag with one of these names, which is left at its name.
    fn body(&mut self, ends: &[&str]) -> Parsed<Vec<Stmt>> {
        let mut body = Vec::new();
        loop {
            match self.next() {
                Tok::Text(text) => body.push(Stmt::Text(text)),
                Tok::PrintStart => {
                    body.push(Stmt::Print(self.tuple_expr(true)?));
                    self.end_of(&Tok::PrintEnd)?;
                }
                Tok::BlockStart => {
                    if let Tok::Name(name) = self.peek()
                        && ends.contains(&&**name)
                    {
                        return Ok(body);
                    }
                    self.nested(|parser| parser.statement(&mut body))?;
                }
                Tok::End if ends.is_empty() => {
                    self.at -= 1;
                    return Ok(body);
                }
                Tok::End => {
                    self.at -= 1;
                    return self.fail(format!(
                        "unexpected end of template, expected one of the tags: {}",
                        ends.join(", ")
                    ));
                }
                other => {
                    self.at -= 1;
                    return self.fail(format!("unexpected {}", other.describe()));
                }
            }
        }
    }

    fn end_of(&mut self, end: &Tok) -> Parsed<()> {
        if self.peek() != end {
            let (expected, found) = (end.describe(), self.peek().describe());
            return self.fail(format!("expected {expected}, found {found}"));
        }
        self.at += 1;
        Ok(())
    }

    /// The rest of a tag, a body, and the tag that ends it.
    fn body_until(&mut self, end: &str) -> Parsed<Vec<Stmt>> {
        self.end_of(&Tok::BlockEnd)?;
        let body = self.body(&[end])?;
        self.at += 1;
        self.end_of(&Tok::BlockEnd)?;
        Ok(body)
    }

    fn statement(&mut self, out: &mut Vec<Stmt>) -> Parsed<()> {
        let line = self.line();
        let name = self.name()?;
        let statement = match &*name {
            "if" => return self.if_statement(out),
            "for" => return self.for_statement(out),
            "set" => self.set_statement()?,
            "macro" => return self.macro_statement(out),
            "call" => return self.call_statement(out),
            "filter" => {
                let filter = self.filters(None, true)?;
                match filter {
                    Some(filter) => Stmt::FilterBlock(filter, self.body_until("endfilter")?),
                    None => return self.fail("expected a filter"),
                }
            }
            "with" => self.with_statement()?,
            "generation" => Stmt::Scoped(self.body_until("endgeneration")?),
            "autoescape" => {
                self.expression()?;
                Stmt::Scoped(self.body_until("endautoescape")?)
            }
            "block" => {
                self.name()?;
                self.skip_name("scoped");
                self.skip_name("required");
                self.end_of(&Tok::BlockEnd)?;
                let body = self.body(&["endblock"])?;
                self.at += 1;
                if matches!(self.peek(), Tok::Name(_)) {
                    self.at += 1;
                }
                self.end_of(&Tok::BlockEnd)?;
                out.push(Stmt::Scoped(body));
                return Ok(());
            }
            "print" => {
                loop {
                    out.push(Stmt::Print(self.expression()?));
                    if !self.skip_op(",") {
                        break;
                    }
                }
                return self.end_of(&Tok::BlockEnd);
            }
            "break" | "continue" => {
                if self.loops == 0 {
                    return self.fail(format!("`{name}` outside of a loop"));
                }
                self.end_of(&Tok::BlockEnd)?;
                if &*name == "break" {
                    Stmt::Break
                } else {
                    Stmt::Continue
                }
            }
            "extends" | "include" | "import" | "from" => {
                let reason = format!("`{name}`: a chat template has no other templates to load");
                return Err(TemplateError::Syntax { line, reason });
            }
            other => {
                let reason = format!("encountered unknown tag '{other}'");
                return Err(TemplateError::Syntax { line, reason });
            }
        };
        out.push(statement);
        Ok(())
    }

    fn if_statement(&mut self, out: &mut Vec<Stmt>) -> Parsed<()> {
        let mut branches = Vec::new();
        let mut condition = Some(self.tuple_expr(false)?);
        loop {
            self.end_of(&Tok::BlockEnd)?;
            let last = condition.is_none();
            let ends: &[&str] = if last {
                &["endif"]
            } else {
                &["elif", "else", "endif"]
            };
            let body = self.body(ends)?;
            branches.push((condition.take(), body));
            if self.skip_name("endif") {
                break;
            }
            if self.skip_name("elif") {
                condition = Some(self.tuple_expr(false)?);
            } else {
                self.expect_name("else")?;
            }
        }
        out.push(Stmt::If(branches));
        self.end_of(&Tok::BlockEnd)
    }

    fn for_statement(&mut self, out: &mut Vec<Stmt>) -> Parsed<()> {
        let target = self.target(false)?;
        self.expect_name("in")?;
        let iter = self.tuple_expr(false)?;
        let filter = if self.skip_name("if") {
            Some(self.expression()?)
        } else {
            None
        };
        let recursive = self.skip_name("recursive");
        self.end_of(&Tok::BlockEnd)?;
        self.loops += 1;
        let body = self.body(&["endfor", "else"]);
        self.loops -= 1;
        let body = body?;
        let otherwise = if self.skip_name("else") {
            self.end_of(&Tok::BlockEnd)?;
            self.body(&["endfor"])?
        } else {
            Vec::new()
        };
        self.expect_name("endfor")?;
        let node = For {
            target,
            iter,
            filter,
            recursive,
            body,
            otherwise,
        };
        out.push(Stmt::For(Arc::new(node)));
        self.end_of(&Tok::BlockEnd)
    }

    fn set_statement(&mut self) -> Parsed<Stmt> {
        let target = self.target(true)?;
        if self.skip_op("=") {
            let value = self.tuple_expr(true)?;
            self.end_of(&Tok::BlockEnd)?;
            return Ok(Stmt::Set(target, value));
        }
        let filter = self.filters(None, false)?;
        let body = self.body_until("endset")?;
        Ok(Stmt::SetBlock(target, filter, body))
    }

    fn with_statement(&mut self) -> Parsed<Stmt> {
        let mut values = Vec::new();
        while *self.peek() != Tok::BlockEnd {
            if !values.is_empty() {
                self.expect_op(",")?;
            }
            let target = self.target(false)?;
            self.expect_op("=")?;
            values.push((target, self.expression()?));
        }
        Ok(Stmt::With(values, self.body_until("endwith")?))
    }

    fn params(&mut self) -> Parsed<Vec<(Arc<str>, Option<Expr>)>> {
        let mut params: Vec<(Arc<str>, Option<Expr>)> = Vec::new();
        self.expect_op("(")?;
        while !self.skip_op(")") {
            if !params.is_empty() {
                self.expect_op(",")?;
            }
            let name = self.name()?;
            let default = if self.skip_op("=") {
                Some(self.expression()?)
            } else if params.last().is_some_and(|(_, default)| default.is_some()) {
                return self.fail("non-default argument follows default argument");
            } else {
                None
            };
            params.push((name, default));
        }
        Ok(params)
    }

    fn macro_body(
        &mut self,
        name: Arc<str>,
        params: Vec<(Arc<str>, Option<Expr>)>,
        end: &str,
    ) -> Parsed<Macro> {
        let loops = std::mem::take(&mut self.loops);
        self.reads.push(Reads::default());
        let body = self.body_until(end);
        let reads = self.reads.pop().unwrap_or_default();
        self.loops = loops;
        Ok(Macro {
            name,
            params,
            body: body?,
            reads,
        })
    }

    fn macro_statement(&mut self, out: &mut Vec<Stmt>) -> Parsed<()> {
        let name = self.name()?;
        let params = self.params()?;
        let node = self.macro_body(name, params, "endmacro")?;
        out.push(Stmt::Macro(Arc::new(node)));
        Ok(())
    }

    fn call_statement(&mut self, out: &mut Vec<Stmt>) -> Parsed<()> {
        let params = if self.is_op("(") {
            self.params()?
        } else {
            Vec::new()
        };
        let call = self.expression()?;
        if !matches!(*call.kind, Kind::Call(..)) {
            return self.fail("expected call");
        }
        let node = self.macro_body("caller".into(), params, "endcall")?;
        out.push(Stmt::CallBlock(Arc::new(node), call));
        Ok(())
    }

    fn target(&mut self, fields: bool) -> Parsed<Target> {
        let mut targets = Vec::new();
        let mut tuple = false;
        loop {
            let ends = self.is_name("in") || self.is_op("=") || self.is_op(")");
            if !targets.is_empty() && (ends || *self.peek() == Tok::BlockEnd) {
                break;
            }
            targets.push(self.nested(|parser| parser.one_target(fields))?);
            if !self.skip_op(",") {
                break;
            }
            tuple = true;
        }
        match targets.pop() {
            Some(target) if !tuple => Ok(target),
            last => {
                targets.extend(last);
                Ok(Target::Tuple(targets))
            }
        }
    }

    fn one_target(&mut self, fields: bool) -> Parsed<Target> {
        if self.skip_op("(") {
            let target = self.target(fields)?;
            self.expect_op(")")?;
            return Ok(target);
        }
        let name = self.name()?;
        if matches!(
            &*name,
            "true" | "false" | "none" | "True" | "False" | "None"
        ) {
            return self.fail(format!("can't assign to '{name}'"));
        }
        if fields && self.skip_op(".") {
            return Ok(Target::Field(name, self.name()?));
        }
        Ok(Target::Name(name))
    }
}
