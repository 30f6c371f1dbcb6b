//! Evaluating expressions: names, attributes, items, calls.

use super::ast::{Args, Expr, Kind};
use super::call::Given;
use super::checks;
use super::filters;
use super::globals;
use super::interp::Interp;
use super::meter::{Res, fail};
use super::methods::{self, Found};
use super::ops;
use super::value::{Func, Loop, Scope, SeqKind, Value, undefined};
use std::rc::Rc;
use std::sync::Arc;

impl Interp {
    /// The value of an expression.
    pub(super) fn eval(&self, expr: &Expr, scope: &Rc<Scope>) -> Res<Value> {
        self.meter.step(1)?;
        self.line.set(expr.line);
        self.meter.nested(|| self.eval_kind(&expr.kind, scope))
    }

    fn eval_all(&self, exprs: &[Expr], scope: &Rc<Scope>) -> Res<Vec<Value>> {
        exprs.iter().map(|expr| self.eval(expr, scope)).collect()
    }

    fn eval_kind(&self, kind: &Kind, scope: &Rc<Scope>) -> Res<Value> {
        let meter = &self.meter;
        Ok(match kind {
            Kind::None => Value::None,
            Kind::Bool(truth) => Value::Bool(*truth),
            Kind::Int(number) => Value::Int(*number),
            Kind::Float(number) => Value::Float(*number),
            Kind::Str(text) => Value::Str(text.clone()),
            Kind::Name(name) => scope
                .get(name)
                .or_else(|| globals::find(name))
                .unwrap_or_else(|| Value::Undefined(format!("'{name}' is undefined").into())),
            Kind::List(items) => Value::list(meter, self.eval_all(items, scope)?)?,
            Kind::Tuple(items) => Value::tuple(meter, self.eval_all(items, scope)?)?,
            Kind::Dict(pairs) => {
                let mut values = Vec::with_capacity(pairs.len());
                for (key, value) in pairs {
                    values.push((self.eval(key, scope)?, self.eval(value, scope)?));
                }
                Value::dict(meter, values)?
            }
            Kind::Attr(base, name) => self.attribute(&self.eval(base, scope)?, name)?,
            Kind::Item(base, index) => {
                let base = self.eval(base, scope)?;
                self.item(&base, &self.eval(index, scope)?)?
            }
            Kind::Slice(base, parts) => self.slice(base, parts, scope)?,
            Kind::Call(callee, args) => {
                let callee = self.eval(callee, scope)?;
                let given = self.args(args, scope)?;
                self.call(&callee, given)?
            }
            Kind::Filter(base, name, args) => {
                let base = match base {
                    Some(base) => self.eval(base, scope)?,
                    None => return fail("expected a value before the filter"),
                };
                let given = self.args(args, scope)?;
                filters::apply(self, name, base, given)?
            }
            Kind::Test(base, name, args) => {
                let base = self.eval(base, scope)?;
                Value::Bool(checks::check(self, name, &base, self.args(args, scope)?)?)
            }
            Kind::Not(value) => Value::Bool(!self.eval(value, scope)?.truth()),
            Kind::Neg(value) => ops::signed(&self.eval(value, scope)?, true)?,
            Kind::Pos(value) => ops::signed(&self.eval(value, scope)?, false)?,
            Kind::And(left, right) => match self.eval(left, scope)? {
                left if left.truth() => self.eval(right, scope)?,
                left => left,
            },
            Kind::Or(left, right) => match self.eval(left, scope)? {
                left if left.truth() => left,
                _ => self.eval(right, scope)?,
            },
            Kind::Binary(op, left, right) => {
                let left = self.eval(left, scope)?;
                ops::binary(*op, &left, &self.eval(right, scope)?, meter)?
            }
            Kind::Concat(parts) => ops::concat(&self.eval_all(parts, scope)?, meter)?,
            Kind::Compare(first, rest) => {
                let mut left = self.eval(first, scope)?;
                for (op, right) in rest {
                    let right = self.eval(right, scope)?;
                    if !ops::compare(*op, &left, &right, meter)? {
                        return Ok(Value::Bool(false));
                    }
                    left = right;
                }
                Value::Bool(true)
            }
            Kind::Cond(value, condition, other) => {
                if self.eval(condition, scope)?.truth() {
                    return self.eval(value, scope);
                }
                match other {
                    Some(other) => self.eval(other, scope)?,
                    None => Value::Undefined(
                        "the inline if-expression evaluated to false and no else section was \
                         defined."
                            .into(),
                    ),
                }
            }
        })
    }

    fn args(&self, args: &Args, scope: &Rc<Scope>) -> Res<Given> {
        let mut given = Given {
            positional: self.eval_all(&args.positional, scope)?,
            named: Vec::with_capacity(args.named.len()),
        };
        for (name, value) in &args.named {
            given.named.push((name.clone(), self.eval(value, scope)?));
        }
        if let Some(more) = &args.more {
            given
                .positional
                .extend(self.eval(more, scope)?.items(&self.meter)?);
        }
        if let Some(more) = &args.more_named {
            let Value::Dict(dict) = self.eval(more, scope)? else {
                return fail("argument after ** must be a mapping");
            };
            for (key, value) in &dict.entries {
                let Value::Str(name) = key else {
                    return fail("keywords must be strings");
                };
                given.named.push((name.clone(), value.clone()));
            }
        }
        Ok(given)
    }

    /// A call expression, with one more named argument `caller`.
    pub(super) fn call_with(
        &self,
        call: &Expr,
        caller: Option<Value>,
        scope: &Rc<Scope>,
    ) -> Res<Value> {
        let Kind::Call(callee, args) = &*call.kind else {
            return fail("expected call");
        };
        let callee = self.eval(callee, scope)?;
        let mut given = self.args(args, scope)?;
        given
            .named
            .extend(caller.map(|caller| ("caller".into(), caller)));
        self.call(&callee, given)
    }

    /// Filters written for a block: the innermost takes the block's text.
    pub(super) fn filter_chain(&self, expr: &Expr, value: Value, scope: &Rc<Scope>) -> Res<Value> {
        let Kind::Filter(base, name, args) = &*expr.kind else {
            return fail("expected a filter");
        };
        let value = match base {
            Some(base) => self
                .meter
                .nested(|| self.filter_chain(base, value, scope))?,
            None => value,
        };
        filters::apply(self, name, value, self.args(args, scope)?)
    }

    /// Calls a value.
    pub(super) fn call(&self, callee: &Value, given: Given) -> Res<Value> {
        self.meter.step(1)?;
        let func = match callee {
            Value::Func(func) => func,
            Value::Undefined(message) => return undefined(message),
            other => return fail(format!("'{}' object is not callable", other.type_name())),
        };
        match &**func {
            Func::Global(name) => globals::call(self, name, given),
            Func::Method(Value::Func(state), name) => self.state_method(state, name, given),
            Func::Method(value, name) => methods::call(value, name, given, &self.meter),
            Func::Macro(node, scope) => self.call_macro(node, scope, given),
            Func::Loop(state) => self.recurse(state, given),
            Func::Joiner(separator, used) => {
                given.none("joiner")?;
                let first = !used.replace(true);
                Ok(if first {
                    Value::str("")
                } else {
                    Value::Str(separator.clone())
                })
            }
            Func::Cycler(..) => fail("'Cycler' object is not callable"),
        }
    }

    /// Methods of `loop` and of a cycler.
    fn state_method(&self, state: &Func, name: &str, given: Given) -> Res<Value> {
        match (state, name) {
            (Func::Loop(state), "cycle") => match given.positional.len() {
                0 => fail("no items for cycling given"),
                count => Ok(given.positional[state.index.get() % count].clone()),
            },
            (Func::Loop(state), _) => {
                let values = given.positional;
                let same = match &*state.last_changed.borrow() {
                    Some(last) if last.len() == values.len() => {
                        let mut same = true;
                        for (a, b) in last.iter().zip(&values) {
                            same &= a.equals(b, &self.meter)?;
                        }
                        same
                    }
                    _ => false,
                };
                if !same {
                    let old = state.last_changed.replace(Some(values));
                    drop(old);
                }
                Ok(Value::Bool(!same))
            }
            (Func::Cycler(items, at), "next") => {
                let current = items.items.get(at.get()).cloned().unwrap_or(Value::None);
                at.set((at.get() + 1) % items.items.len().max(1));
                Ok(current)
            }
            (Func::Cycler(_, at), _) => {
                at.set(0);
                Ok(Value::None)
            }
            _ => fail(format!("no method '{name}'")),
        }
    }

    /// `value.name`: a method if there is one, else an item.
    fn attribute(&self, value: &Value, name: &Arc<str>) -> Res<Value> {
        if let Value::Undefined(message) = value {
            return undefined(message);
        }
        match self.plain_attribute(value, name) {
            Value::Undefined(missing) => match value {
                Value::Dict(dict) => Ok(dict
                    .get_str(name)
                    .cloned()
                    .unwrap_or(Value::Undefined(missing))),
                _ => Ok(Value::Undefined(missing)),
            },
            found => Ok(found),
        }
    }

    /// What Python's `getattr` finds.
    pub(super) fn plain_attribute(&self, value: &Value, name: &str) -> Value {
        let method = |name| Value::func(Func::Method(value.clone(), name));
        match methods::find(value, name) {
            Some(Found::Method(name)) => return method(name),
            Some(Found::Unsafe) => return unsafe_attribute(value, name),
            None => {}
        }
        let found = match value {
            Value::Namespace(fields) => fields.borrow().get_str(name).cloned(),
            Value::Seq(seq) if seq.kind == SeqKind::Group => match name {
                "grouper" => seq.items.first().cloned(),
                "list" => seq.items.get(1).cloned(),
                _ => None,
            },
            Value::Func(func) => match &**func {
                Func::Loop(state) => match name {
                    "changed" => return method("changed"),
                    "cycle" => return method("cycle"),
                    name => loop_attribute(state, name),
                },
                Func::Cycler(items, at) => match name {
                    "next" => return method("next"),
                    "reset" => return method("reset"),
                    "current" => items.items.get(at.get()).cloned(),
                    _ => None,
                },
                Func::Macro(node, _) if name == "name" => Some(Value::Str(node.name.clone())),
                _ => None,
            },
            _ => None,
        };
        match found {
            Some(found) => found,
            None if name.starts_with("__") && name.ends_with("__") => unsafe_attribute(value, name),
            None => missing_attribute(value, name),
        }
    }

    /// `value[index]`: an item, else a method of that name.
    pub(super) fn item(&self, value: &Value, index: &Value) -> Res<Value> {
        let found = match value {
            Value::Undefined(message) => return undefined(message),
            Value::Dict(dict) => dict.get(index).cloned(),
            Value::Seq(seq)
                if matches!(
                    seq.kind,
                    SeqKind::List | SeqKind::Tuple | SeqKind::Range | SeqKind::Group
                ) =>
            {
                index
                    .as_int()
                    .and_then(|at| place(at, seq.items.len()))
                    .map(|at| seq.items[at].clone())
            }
            Value::Str(text) => match index.as_int() {
                Some(at) => {
                    self.meter.step(text.len() / 64)?;
                    let count = text.chars().count();
                    place(at, count)
                        .and_then(|at| text.chars().nth(at))
                        .map(|c| Value::str(&*c.encode_utf8(&mut [0; 4])))
                }
                None => None,
            },
            _ => None,
        };
        if let Some(found) = found {
            return Ok(found);
        }
        match index {
            Value::Str(name) => Ok(self.plain_attribute(value, name)),
            index => {
                let mut shown = String::new();
                super::text::repr(index, &self.meter, &mut shown)?;
                let message = format!("{} has no element {shown}", object_name(value));
                Ok(Value::Undefined(message.into()))
            }
        }
    }

    fn slice(&self, base: &Expr, parts: &[Option<Expr>; 3], scope: &Rc<Scope>) -> Res<Value> {
        let base = self.eval(base, scope)?;
        let mut bounds = [None; 3];
        for (bound, part) in bounds.iter_mut().zip(parts) {
            *bound = match part
                .as_ref()
                .map(|part| self.eval(part, scope))
                .transpose()?
            {
                None | Some(Value::None) => None,
                Some(value) => match value.as_int() {
                    Some(number) => Some(number),
                    None => return fail("slice indices must be integers or None"),
                },
            };
        }
        if let Value::Undefined(message) = &base {
            return undefined(message);
        }
        match ops::slice(&base, bounds, &self.meter)? {
            Some(value) => Ok(value),
            None => fail(format!(
                "'{}' object is not subscriptable",
                base.type_name()
            )),
        }
    }
}

/// The index of Python's `sequence[at]`.
fn place(at: i128, len: usize) -> Option<usize> {
    let at = if at < 0 { at + len as i128 } else { at };
    usize::try_from(at).ok().filter(|&at| at < len)
}

fn object_name(value: &Value) -> String {
    match value {
        Value::None => "None".into(),
        other => format!("{} object", other.type_name()),
    }
}

fn missing_attribute(value: &Value, name: &str) -> Value {
    Value::Undefined(format!("'{}' has no attribute '{name}'", object_name(value)).into())
}

fn unsafe_attribute(value: &Value, name: &str) -> Value {
    let kind = value.type_name();
    Value::Undefined(format!("access to attribute '{name}' of '{kind}' object is unsafe.").into())
}

fn loop_attribute(state: &Loop, name: &str) -> Option<Value> {
    let (index, length) = (state.index.get(), state.items.items.len());
    let int = |number: usize| Some(Value::Int(number as i128));
    match name {
        "index" => int(index + 1),
        "index0" => int(index),
        "revindex" => int(length - index),
        "revindex0" => int(length - index - 1),
        "first" => Some(Value::Bool(index == 0)),
        "last" => Some(Value::Bool(index + 1 == length)),
        "length" => int(length),
        "depth" => int(state.depth + 1),
        "depth0" => int(state.depth),
        "previtem" => Some(match index.checked_sub(1) {
            Some(at) => state.items.items[at].clone(),
            None => Value::Undefined("there is no previous item".into()),
        }),
        "nextitem" => Some(match state.items.items.get(index + 1) {
            Some(item) => item.clone(),
            None => Value::Undefined("there is no next item".into()),
        }),
        _ => None,
    }
}
