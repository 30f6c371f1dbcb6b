//! Tokens to a tree, by the grammar of Jinja: expressions.

use super::ast::{Args, Binary, Compare, Expr, Kind};
use super::lexer::Tok;
use super::parser::{Parsed, Parser};
use std::sync::Arc;

/// Levels of one expression's tree.
const MAX_TREE: u16 = 200;

impl Parser {
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
    pub(super) fn tuple_expr(&mut self, conditional: bool) -> Parsed<Expr> {
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

    pub(super) fn expression(&mut self) -> Parsed<Expr> {
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
    pub(super) fn filters(
        &mut self,
        mut value: Option<Expr>,
        inline: bool,
    ) -> Parsed<Option<Expr>> {
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
