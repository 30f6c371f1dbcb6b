//! Tokens to a tree, by the grammar of Jinja.

use super::ast::{Args, Binary, Compare, Expr, For, Kind, Macro, Reads, Stmt, Target};
use super::error::TemplateError;
use super::lexer::{Tok, Token};
use std::sync::Arc;

/// Tags within each other, and brackets within each other.
const MAX_NESTING: u32 = 60;
/// Levels of one expression's tree.
const MAX_TREE: u16 = 200;

type Parsed<T> = Result<T, TemplateError>;

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

struct Parser {
    tokens: Vec<Token>,
    at: usize,
    nesting: u32,
    /// Loops around this place, within its macro.
    loops: u32,
    /// What the macros around this place read.
    reads: Vec<Reads>,
}

impl Parser {
    fn peek(&self) -> &Tok {
        self.ahead(0)
    }

    fn ahead(&self, by: usize) -> &Tok {
        self.tokens
            .get(self.at + by)
            .map_or(&Tok::End, |token| &token.kind)
    }

    fn line(&self) -> u32 {
        self.tokens
            .get(self.at)
            .or(self.tokens.last())
            .map_or(1, |token| token.line)
    }

    fn next(&mut self) -> Tok {
        let token = self.peek().clone();
        self.at += 1;
        token
    }

    fn fail<T>(&self, reason: impl Into<String>) -> Parsed<T> {
        Err(TemplateError::Syntax {
            line: self.line(),
            reason: reason.into(),
        })
    }

    fn is_op(&self, op: &str) -> bool {
        matches!(self.peek(), Tok::Op(found) if *found == op)
    }

    fn skip_op(&mut self, op: &str) -> bool {
        let found = self.is_op(op);
        self.at += usize::from(found);
        found
    }

    fn expect_op(&mut self, op: &str) -> Parsed<()> {
        if self.skip_op(op) {
            return Ok(());
        }
        self.fail(format!("expected `{op}`, found {}", self.peek().describe()))
    }

    fn is_name(&self, name: &str) -> bool {
        matches!(self.peek(), Tok::Name(found) if **found == *name)
    }

    fn skip_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        self.at += usize::from(found);
        found
    }

    fn expect_name(&mut self, name: &str) -> Parsed<()> {
        if self.skip_name(name) {
            return Ok(());
        }
        self.fail(format!(
            "expected `{name}`, found {}",
            self.peek().describe()
        ))
    }

    fn name(&mut self) -> Parsed<Arc<str>> {
        match self.next() {
            Tok::Name(name) => Ok(name),
            other => {
                self.at -= 1;
                self.fail(format!("expected a name, found {}", other.describe()))
            }
        }
    }

    fn nested<T>(&mut self, work: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        if self.nesting == MAX_NESTING {
            return self.fail(format!("more than {MAX_NESTING} levels within each other"));
        }
        self.nesting += 1;
        let result = work(self);
        self.nesting -= 1;
        result
    }

    // Statements

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

    // Expressions

    fn make(&self, line: u32, kind: Kind) -> Parsed<Expr> {
        let depth = kind.parts_depth() + 1;
        if depth > MAX_TREE {
            return self.fail(format!("an expression of more than {MAX_TREE} levels"));
        }
        Ok(Expr {
            kind: Box::new(kind),
            line,
            depth,
        })
    }

    /// An expression, or a tuple without parentheses.
    fn tuple_expr(&mut self, conditional: bool) -> Parsed<Expr> {
        let line = self.line();
        let first = self.either(conditional)?;
        if !self.is_op(",") {
            return Ok(first);
        }
        let mut items = vec![first];
        while self.skip_op(",") {
            let ends = matches!(self.peek(), Tok::BlockEnd | Tok::PrintEnd) || self.is_op(")");
            if ends || self.is_name("recursive") {
                break;
            }
            items.push(self.either(conditional)?);
        }
        self.make(line, Kind::Tuple(items))
    }

    fn either(&mut self, conditional: bool) -> Parsed<Expr> {
        if conditional {
            self.expression()
        } else {
            self.nested(Self::or)
        }
    }

    fn expression(&mut self) -> Parsed<Expr> {
        self.nested(Self::conditional)
    }

    fn conditional(&mut self) -> Parsed<Expr> {
        let line = self.line();
        let mut value = self.or()?;
        while self.skip_name("if") {
            let condition = self.or()?;
            let other = if self.skip_name("else") {
                Some(self.expression()?)
            } else {
                None
            };
            value = self.make(line, Kind::Cond(value, condition, other))?;
        }
        Ok(value)
    }

    fn or(&mut self) -> Parsed<Expr> {
        let line = self.line();
        let mut left = self.and()?;
        while self.skip_name("or") {
            let right = self.and()?;
            left = self.make(line, Kind::Or(left, right))?;
        }
        Ok(left)
    }

    fn and(&mut self) -> Parsed<Expr> {
        let line = self.line();
        let mut left = self.not()?;
        while self.skip_name("and") {
            let right = self.not()?;
            left = self.make(line, Kind::And(left, right))?;
        }
        Ok(left)
    }

    fn not(&mut self) -> Parsed<Expr> {
        let line = self.line();
        if self.skip_name("not") {
            let value = self.nested(Self::not)?;
            return self.make(line, Kind::Not(value));
        }
        self.comparison()
    }

    fn comparison(&mut self) -> Parsed<Expr> {
        let line = self.line();
        let left = self.sum()?;
        let mut rest = Vec::new();
        loop {
            let op = match self.peek() {
                Tok::Op("==") => Compare::Eq,
                Tok::Op("!=") => Compare::Ne,
                Tok::Op("<") => Compare::Lt,
                Tok::Op("<=") => Compare::Le,
                Tok::Op(">") => Compare::Gt,
                Tok::Op(">=") => Compare::Ge,
                Tok::Name(name) if &**name == "in" => Compare::In,
                Tok::Name(name) if &**name == "not" => match self.ahead(1) {
                    Tok::Name(next) if &**next == "in" => {
                        self.at += 1;
                        Compare::NotIn
                    }
                    _ => break,
                },
                _ => break,
            };
            self.at += 1;
            rest.push((op, self.sum()?));
        }
        if rest.is_empty() {
            Ok(left)
        } else {
            self.make(line, Kind::Compare(left, rest))
        }
    }

    fn sum(&mut self) -> Parsed<Expr> {
        let line = self.line();
        let mut left = self.concat()?;
        loop {
            let op = match self.peek() {
                Tok::Op("+") => Binary::Add,
                Tok::Op("-") => Binary::Sub,
                _ => return Ok(left),
            };
            self.at += 1;
            let right = self.concat()?;
            left = self.make(line, Kind::Binary(op, left, right))?;
        }
    }

    fn concat(&mut self) -> Parsed<Expr> {
        let line = self.line();
        let first = self.product()?;
        if !self.is_op("~") {
            return Ok(first);
        }
        let mut parts = vec![first];
        while self.skip_op("~") {
            parts.push(self.product()?);
        }
        self.make(line, Kind::Concat(parts))
    }

    fn product(&mut self) -> Parsed<Expr> {
        let line = self.line();
        let mut left = self.power()?;
        loop {
            let op = match self.peek() {
                Tok::Op("*") => Binary::Mul,
                Tok::Op("/") => Binary::Div,
                Tok::Op("//") => Binary::FloorDiv,
                Tok::Op("%") => Binary::Mod,
                _ => return Ok(left),
            };
            self.at += 1;
            let right = self.power()?;
            left = self.make(line, Kind::Binary(op, left, right))?;
        }
    }

    fn power(&mut self) -> Parsed<Expr> {
        let line = self.line();
        let mut left = self.unary(true)?;
        while self.skip_op("**") {
            let right = self.unary(true)?;
            left = self.make(line, Kind::Binary(Binary::Pow, left, right))?;
        }
        Ok(left)
    }

    fn unary(&mut self, with_filter: bool) -> Parsed<Expr> {
        let line = self.line();
        let value = if self.skip_op("-") {
            let value = self.nested(|parser| parser.unary(false))?;
            self.make(line, Kind::Neg(value))?
        } else if self.skip_op("+") {
            let value = self.nested(|parser| parser.unary(false))?;
            self.make(line, Kind::Pos(value))?
        } else {
            self.primary()?
        };
        let value = self.postfix(value)?;
        if with_filter {
            self.filters_and_tests(value)
        } else {
            Ok(value)
        }
    }

    fn primary(&mut self) -> Parsed<Expr> {
        let line = self.line();
        let kind = match self.next() {
            Tok::Name(name) => match &*name {
                "true" | "True" => Kind::Bool(true),
                "false" | "False" => Kind::Bool(false),
                "none" | "None" => Kind::None,
                _ => {
                    if let Some(reads) = self.reads.last_mut() {
                        reads.varargs |= &*name == "varargs";
                        reads.kwargs |= &*name == "kwargs";
                        reads.caller |= &*name == "caller";
                    }
                    Kind::Name(name)
                }
            },
            Tok::Str(text) => {
                let mut text = text;
                while let Tok::Str(more) = self.peek() {
                    text = [&*text, &**more].concat().into();
                    self.at += 1;
                }
                Kind::Str(text)
            }
            Tok::Int(number) => Kind::Int(number),
            Tok::Float(number) => Kind::Float(number),
            Tok::Op("(") => {
                if self.skip_op(")") {
                    return self.make(line, Kind::Tuple(Vec::new()));
                }
                let value = self.nested(|parser| parser.tuple_expr(true))?;
                self.expect_op(")")?;
                return Ok(value);
            }
            Tok::Op("[") => {
                let mut items = Vec::new();
                while !self.skip_op("]") {
                    if !items.is_empty() {
                        self.expect_op(",")?;
                        if self.skip_op("]") {
                            break;
                        }
                    }
                    items.push(self.expression()?);
                }
                Kind::List(items)
            }
            Tok::Op("{") => {
                let mut pairs = Vec::new();
                while !self.skip_op("}") {
                    if !pairs.is_empty() {
                        self.expect_op(",")?;
                        if self.skip_op("}") {
                            break;
                        }
                    }
                    let key = self.expression()?;
                    self.expect_op(":")?;
                    pairs.push((key, self.expression()?));
                }
                Kind::Dict(pairs)
            }
            other => {
                self.at -= 1;
                return self.fail(format!("unexpected '{}'", other.describe()));
            }
        };
        self.make(line, kind)
    }

    fn postfix(&mut self, mut value: Expr) -> Parsed<Expr> {
        loop {
            let line = self.line();
            let kind = if self.skip_op(".") {
                match self.next() {
                    Tok::Name(name) => Kind::Attr(value, name),
                    Tok::Int(number) => {
                        let index = self.make(line, Kind::Int(number))?;
                        Kind::Item(value, index)
                    }
                    _ => {
                        self.at -= 1;
                        return self.fail("expected name or number");
                    }
                }
            } else if self.skip_op("[") {
                self.subscript(value)?
            } else if self.is_op("(") {
                Kind::Call(value, self.args()?)
            } else {
                return Ok(value);
            };
            value = self.make(line, kind)?;
        }
    }

    fn subscript(&mut self, value: Expr) -> Parsed<Kind> {
        let line = self.line();
        let mut parts: [Option<Expr>; 3] = [None, None, None];
        let mut colons = 0;
        for (at, part) in parts.iter_mut().enumerate() {
            if !self.is_op(":") && !self.is_op("]") && !self.is_op(",") {
                *part = Some(self.expression()?);
            }
            if at == 2 || !self.skip_op(":") {
                break;
            }
            colons += 1;
        }
        if colons > 0 {
            self.expect_op("]")?;
            return Ok(Kind::Slice(value, parts));
        }
        let [Some(first), ..] = parts else {
            return self.fail("expected subscript expression");
        };
        if self.skip_op("]") {
            return Ok(Kind::Item(value, first));
        }
        let mut items = vec![first];
        while self.skip_op(",") {
            items.push(self.expression()?);
        }
        self.expect_op("]")?;
        let index = self.make(line, Kind::Tuple(items))?;
        Ok(Kind::Item(value, index))
    }

    fn args(&mut self) -> Parsed<Args> {
        let mut args = Args::default();
        self.expect_op("(")?;
        let mut first = true;
        while !self.skip_op(")") {
            if !first {
                self.expect_op(",")?;
                if self.skip_op(")") {
                    break;
                }
            }
            first = false;
            if self.skip_op("**") {
                args.more_named = Some(self.expression()?);
            } else if self.skip_op("*") {
                args.more = Some(self.expression()?);
            } else if let (Tok::Name(name), Tok::Op("=")) = (self.peek().clone(), self.ahead(1)) {
                self.at += 2;
                args.named.push((name, self.expression()?));
            } else if args.named.is_empty() && args.more_named.is_none() {
                args.positional.push(self.expression()?);
            } else {
                return self.fail("invalid syntax for function call expression");
            }
        }
        Ok(args)
    }

    fn filters_and_tests(&mut self, mut value: Expr) -> Parsed<Expr> {
        loop {
            if self.is_op("|") {
                if let Some(filtered) = self.filters(Some(value), false)? {
                    value = filtered;
                    continue;
                }
                return self.fail("expected a filter");
            }
            if self.is_name("is") {
                value = self.test(value)?;
            } else if self.is_op("(") {
                let line = self.line();
                let call = Kind::Call(value, self.args()?);
                value = self.make(line, call)?;
            } else {
                return Ok(value);
            }
        }
    }

    fn dotted_name(&mut self) -> Parsed<Arc<str>> {
        let mut name = self.name()?;
        while self.skip_op(".") {
            name = format!("{name}.{}", self.name()?).into();
        }
        Ok(name)
    }

    /// `| a | b(c)`; in a filter block the first has no bar.
    fn filters(&mut self, mut value: Option<Expr>, inline: bool) -> Parsed<Option<Expr>> {
        let mut inline = inline;
        while inline || self.is_op("|") {
            let line = self.line();
            if !inline {
                self.at += 1;
            }
            inline = false;
            let name = self.dotted_name()?;
            let args = if self.is_op("(") {
                self.args()?
            } else {
                Args::default()
            };
            value = Some(self.make(line, Kind::Filter(value, name, args))?);
        }
        Ok(value)
    }

    fn test(&mut self, value: Expr) -> Parsed<Expr> {
        let line = self.line();
        self.expect_name("is")?;
        let negated = self.skip_name("not");
        let name = self.dotted_name()?;
        let word = matches!(self.peek(), Tok::Name(_))
            && !self.is_name("else")
            && !self.is_name("or")
            && !self.is_name("and");
        let args = if self.is_op("(") {
            self.args()?
        } else if self.is_name("is") {
            return self.fail("You cannot chain multiple tests with is");
        } else if word
            || matches!(
                self.peek(),
                Tok::Str(_) | Tok::Int(_) | Tok::Float(_) | Tok::Op("[") | Tok::Op("{")
            )
        {
            let argument = self.primary()?;
            let argument = self.postfix(argument)?;
            Args {
                positional: vec![argument],
                ..Args::default()
            }
        } else {
            Args::default()
        };
        let test = self.make(line, Kind::Test(value, name, args))?;
        if negated {
            self.make(line, Kind::Not(test))
        } else {
            Ok(test)
        }
    }
}
