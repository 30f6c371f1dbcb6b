//! The tree of a parsed template.

use std::sync::Arc;

/// An expression.
#[derive(Debug)]
pub(super) struct Expr {
    pub(super) kind: Box<Kind>,
    pub(super) line: u32,
    /// Levels below, itself included.
    pub(super) depth: u16,
}

/// What an expression is.
#[derive(Debug)]
pub(super) enum Kind {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<str>),
    Name(Arc<str>),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    /// `a.b`
    Attr(Expr, Arc<str>),
    /// `a[b]`
    Item(Expr, Expr),
    /// `a[b:c:d]`
    Slice(Expr, [Option<Expr>; 3]),
    Call(Expr, Args),
    /// `a | name(args)`; without `a` in a filter block.
    Filter(Option<Expr>, Arc<str>, Args),
    /// `a is name(args)`
    Test(Expr, Arc<str>, Args),
    Not(Expr),
    Neg(Expr),
    Pos(Expr),
    And(Expr, Expr),
    Or(Expr, Expr),
    Binary(Binary, Expr, Expr),
    /// `a ~ b ~ c`
    Concat(Vec<Expr>),
    /// `a < b <= c`
    Compare(Expr, Vec<(Compare, Expr)>),
    /// `a if b else c`
    Cond(Expr, Expr, Option<Expr>),
}

/// Arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Mod,
    Pow,
}

/// Comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compare {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    In,
    NotIn,
}

/// Arguments of a call.
#[derive(Debug, Default)]
pub(super) struct Args {
    pub(super) positional: Vec<Expr>,
    pub(super) named: Vec<(Arc<str>, Expr)>,
    /// `*args`
    pub(super) more: Option<Expr>,
    /// `**kwargs`
    pub(super) more_named: Option<Expr>,
}

/// What an assignment writes to.
#[derive(Debug)]
pub(super) enum Target {
    Name(Arc<str>),
    /// `ns.attr`
    Field(Arc<str>, Arc<str>),
    Tuple(Vec<Target>),
}

/// A statement.
#[derive(Debug)]
pub(super) enum Stmt {
    /// Text between tags.
    Text(Arc<str>),
    /// `{{ … }}`
    Print(Expr),
    /// `{% if %}`: branches in order, the last one maybe without condition.
    If(Vec<(Option<Expr>, Vec<Stmt>)>),
    For(Arc<For>),
    Set(Target, Expr),
    /// `{% set x %}…{% endset %}`, with filters.
    SetBlock(Target, Option<Expr>, Vec<Stmt>),
    Macro(Arc<Macro>),
    /// `{% call(args) f() %}…{% endcall %}`: the body is the macro `caller`.
    CallBlock(Arc<Macro>, Expr),
    /// `{% filter f %}…{% endfilter %}`
    FilterBlock(Expr, Vec<Stmt>),
    With(Vec<(Target, Expr)>, Vec<Stmt>),
    /// A body with names of its own (`generation`, `autoescape`, `block`).
    Scoped(Vec<Stmt>),
    Break,
    Continue,
}

/// `{% for %}`
#[derive(Debug)]
pub(super) struct For {
    pub(super) target: Target,
    pub(super) iter: Expr,
    pub(super) filter: Option<Expr>,
    pub(super) recursive: bool,
    pub(super) body: Vec<Stmt>,
    pub(super) otherwise: Vec<Stmt>,
}

/// `{% macro %}`, and the body of `{% call %}`.
#[derive(Debug)]
pub(super) struct Macro {
    pub(super) name: Arc<str>,
    pub(super) params: Vec<(Arc<str>, Option<Expr>)>,
    pub(super) body: Vec<Stmt>,
    /// Which of these names the body reads.
    pub(super) reads: Reads,
}

/// Names with a meaning inside a macro.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Reads {
    pub(super) varargs: bool,
    pub(super) kwargs: bool,
    pub(super) caller: bool,
}

impl Kind {
    /// Greatest depth of the parts.
    pub(super) fn parts_depth(&self) -> u16 {
        let of = |expr: &Expr| expr.depth;
        let args = |args: &Args| {
            let named = args.named.iter().map(|(_, expr)| expr.depth);
            let more = args.more.iter().chain(&args.more_named).map(of);
            args.positional
                .iter()
                .map(of)
                .chain(named)
                .chain(more)
                .max()
                .unwrap_or(0)
        };
        let list = |list: &[Expr]| list.iter().map(of).max().unwrap_or(0);
        match self {
            Kind::None | Kind::Bool(_) | Kind::Int(_) | Kind::Float(_) => 0,
            Kind::Str(_) | Kind::Name(_) => 0,
            Kind::List(items) | Kind::Tuple(items) | Kind::Concat(items) => list(items),
            Kind::Dict(pairs) => pairs
                .iter()
                .map(|(k, v)| k.depth.max(v.depth))
                .max()
                .unwrap_or(0),
            Kind::Attr(a, _) | Kind::Not(a) | Kind::Neg(a) | Kind::Pos(a) => a.depth,
            Kind::Item(a, b) | Kind::And(a, b) | Kind::Or(a, b) | Kind::Binary(_, a, b) => {
                a.depth.max(b.depth)
            }
            Kind::Slice(a, parts) => parts
                .iter()
                .flatten()
                .map(of)
                .max()
                .unwrap_or(0)
                .max(a.depth),
            Kind::Call(a, call) | Kind::Test(a, _, call) => a.depth.max(args(call)),
            Kind::Filter(a, _, call) => a.as_ref().map_or(0, of).max(args(call)),
            Kind::Compare(a, rest) => rest
                .iter()
                .map(|(_, b)| b.depth)
                .max()
                .unwrap_or(0)
                .max(a.depth),
            Kind::Cond(a, b, c) => a.depth.max(b.depth).max(c.as_ref().map_or(0, of)),
        }
    }
}
