//! Running a template: statements, scopes and macros.

use super::ast::{For, Macro, Stmt, Target};
use super::call::Given;
use super::globals::check_field;
use super::meter::{Fault, MAX_OUTPUT_BYTES, Meter, Res, fail};
use super::text::str_of;
use super::value::{Dict, Func, Loop, Scope, Seq, SeqKind, Value};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

/// One rendering.
pub(super) struct Interp {
    pub(super) meter: Meter,
    pub(super) now: SystemTime,
    /// Line of the expression evaluated last.
    pub(super) line: Cell<u32>,
    /// Scopes and namespaces that may hold themselves; emptied at the end.
    scopes: RefCell<Vec<Rc<Scope>>>,
    namespaces: RefCell<Vec<Rc<RefCell<Dict>>>>,
}

/// How a list of statements ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    Next,
    Break,
    Continue,
}

impl Drop for Interp {
    fn drop(&mut self) {
        // One by one, while the lists still hold them all: nothing is dropped within another.
        for scope in self.scopes.borrow().iter() {
            let names = std::mem::take(&mut *scope.names.borrow_mut());
            drop(names);
        }
        for namespace in self.namespaces.borrow().iter() {
            let fields = std::mem::take(&mut *namespace.borrow_mut());
            drop(fields);
        }
    }
}

impl Interp {
    pub(super) fn new(now: SystemTime) -> Self {
        Interp {
            meter: Meter::new(),
            now,
            line: Cell::new(1),
            scopes: RefCell::default(),
            namespaces: RefCell::default(),
        }
    }

    /// Renders a template over its variables.
    pub(super) fn render(&self, body: &[Stmt], scope: &Rc<Scope>) -> Res<String> {
        let mut out = String::new();
        self.run(body, scope, &mut out)?;
        Ok(out)
    }

    pub(super) fn keep_namespace(&self, namespace: &Rc<RefCell<Dict>>) {
        self.namespaces.borrow_mut().push(namespace.clone());
    }

    fn make_macro(&self, node: &Arc<Macro>, scope: &Rc<Scope>) -> Res<Value> {
        self.meter.bytes(128)?;
        let mut scopes = self.scopes.borrow_mut();
        if !scopes.last().is_some_and(|last| Rc::ptr_eq(last, scope)) {
            scopes.push(scope.clone());
        }
        Ok(Value::func(Func::Macro(node.clone(), scope.clone())))
    }

    fn write(&self, text: &str, out: &mut String) -> Res<()> {
        self.meter.bytes(text.len())?;
        if (out.len() + text.len()) as u64 > MAX_OUTPUT_BYTES {
            return Err(Fault::Exhausted {
                what: "output",
                limit: MAX_OUTPUT_BYTES,
            });
        }
        out.push_str(text);
        Ok(())
    }

    /// Runs statements.
    pub(super) fn run(&self, body: &[Stmt], scope: &Rc<Scope>, out: &mut String) -> Res<Flow> {
        self.meter.nested(|| {
            for statement in body {
                let flow = self.statement(statement, scope, out)?;
                if flow != Flow::Next {
                    return Ok(flow);
                }
            }
            Ok(Flow::Next)
        })
    }

    fn statement(&self, statement: &Stmt, scope: &Rc<Scope>, out: &mut String) -> Res<Flow> {
        self.meter.step(1)?;
        match statement {
            Stmt::Text(text) => self.write(text, out)?,
            Stmt::Print(expr) => {
                let text = str_of(&self.eval(expr, scope)?, &self.meter)?;
                self.write(&text, out)?;
            }
            Stmt::If(branches) => {
                for (condition, body) in branches {
                    let taken = match condition {
                        Some(condition) => self.eval(condition, scope)?.truth(),
                        None => true,
                    };
                    if taken {
                        return self.run(body, scope, out);
                    }
                }
            }
            Stmt::For(node) => {
                let items = self.eval(&node.iter, scope)?.items(&self.meter)?;
                self.for_loop(node, scope, items, 0, out)?;
            }
            Stmt::Set(target, expr) => {
                let value = self.eval(expr, scope)?;
                self.assign(target, value, scope)?;
            }
            Stmt::SetBlock(target, filter, body) => {
                let text = self.captured(body, scope)?;
                let value = match filter {
                    Some(filter) => self.filter_chain(filter, Value::str(text), scope)?,
                    None => Value::str(text),
                };
                self.assign(target, value, scope)?;
            }
            Stmt::Macro(node) => {
                let value = self.make_macro(node, scope)?;
                scope.set(&node.name, value);
            }
            Stmt::CallBlock(node, call) => {
                let caller = self.make_macro(node, scope)?;
                let text = str_of(&self.call_with(call, Some(caller), scope)?, &self.meter)?;
                self.write(&text, out)?;
            }
            Stmt::FilterBlock(filter, body) => {
                let text = self.captured(body, scope)?;
                let value = self.filter_chain(filter, Value::str(text), scope)?;
                let text = str_of(&value, &self.meter)?;
                self.write(&text, out)?;
            }
            Stmt::With(values, body) => {
                let inner = Scope::within(scope);
                for (target, expr) in values {
                    let value = self.eval(expr, scope)?;
                    self.assign(target, value, &inner)?;
                }
                return self.run(body, &inner, out);
            }
            Stmt::Scoped(body) => return self.run(body, &Scope::within(scope), out),
            Stmt::Break => return Ok(Flow::Break),
            Stmt::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::Next)
    }

    /// What a body puts out, in a scope of its own.
    fn captured(&self, body: &[Stmt], scope: &Rc<Scope>) -> Res<String> {
        let mut text = String::new();
        self.run(body, &Scope::within(scope), &mut text)?;
        Ok(text)
    }

    fn assign(&self, target: &Target, value: Value, scope: &Rc<Scope>) -> Res<()> {
        match target {
            Target::Name(name) => {
                self.meter.bytes(64)?;
                scope.set(name, value);
            }
            Target::Field(name, field) => {
                let Some(Value::Namespace(namespace)) = scope.get(name) else {
                    return fail("cannot assign attribute on non-namespace object");
                };
                check_field(field)?;
                // Taken out first, so that the old value is not dropped within the borrow.
                let old = namespace.borrow().get_str(field).cloned();
                namespace
                    .borrow_mut()
                    .insert(&self.meter, Value::Str(field.clone()), value)?;
                drop(old);
            }
            Target::Tuple(targets) => {
                let values = value.items(&self.meter)?;
                let (expected, found) = (targets.len(), values.len());
                if found < expected {
                    return fail(format!(
                        "not enough values to unpack (expected {expected}, got {found})"
                    ));
                }
                if found > expected {
                    return fail(format!("too many values to unpack (expected {expected})"));
                }
                for (target, value) in targets.iter().zip(values) {
                    self.assign(target, value, scope)?;
                }
            }
        }
        Ok(())
    }

    fn for_loop(
        &self,
        node: &Arc<For>,
        scope: &Rc<Scope>,
        mut items: Vec<Value>,
        depth: usize,
        out: &mut String,
    ) -> Res<()> {
        if let Some(filter) = &node.filter {
            let mut kept = Vec::new();
            for item in items {
                let inner = Scope::within(scope);
                self.assign(&node.target, item.clone(), &inner)?;
                if self.eval(filter, &inner)?.truth() {
                    kept.push(item);
                }
            }
            items = kept;
        }
        let items = Seq::new(&self.meter, SeqKind::Tuple, items)?;
        let state = Rc::new(Func::Loop(Loop {
            items: items.clone(),
            index: Cell::new(0),
            depth,
            node: node.clone(),
            scope: scope.clone(),
            last_changed: RefCell::new(None),
        }));
        let name: Arc<str> = "loop".into();
        let mut finished = false;
        for (index, item) in items.items.iter().enumerate() {
            self.meter.bytes(128)?;
            if let Func::Loop(state) = &*state {
                state.index.set(index);
            }
            let inner = Scope::within(scope);
            inner.set(&name, Value::Func(state.clone()));
            self.assign(&node.target, item.clone(), &inner)?;
            match self.run(&node.body, &inner, out)? {
                Flow::Next => finished = true,
                Flow::Continue => {}
                Flow::Break => break,
            }
        }
        // As Jinja has it: when no walk reached the end of the body.
        if !finished {
            self.run(&node.otherwise, &Scope::within(scope), out)?;
        }
        Ok(())
    }

    /// `loop(items)` inside a recursive loop.
    pub(super) fn recurse(&self, state: &Loop, given: Given) -> Res<Value> {
        if !state.node.recursive {
            return fail("The loop must have the 'recursive' marker to be called recursively.");
        }
        let [items] = given.bind("loop", ["iterable"])?;
        let items = items.unwrap_or(Value::None).items(&self.meter)?;
        let mut out = String::new();
        self.meter.nested(|| {
            self.for_loop(&state.node, &state.scope, items, state.depth + 1, &mut out)
        })?;
        Ok(Value::str(out))
    }

    /// Calls a macro.
    pub(super) fn call_macro(&self, node: &Macro, scope: &Rc<Scope>, given: Given) -> Res<Value> {
        let inner = Scope::within(scope);
        let mut positional = given.positional.into_iter();
        let mut named = given.named;
        for (name, default) in &node.params {
            let by_name = named.iter().position(|(known, _)| known == name);
            let value = match (positional.next(), by_name, default) {
                (Some(_), Some(_), _) => {
                    return fail(format!(
                        "macro '{}' got multiple values for argument '{name}'",
                        node.name
                    ));
                }
                (Some(value), ..) => value,
                (None, Some(at), _) => named.remove(at).1,
                (None, None, Some(default)) => self.eval(default, &inner)?,
                (None, None, None) => {
                    Value::Undefined(format!("parameter '{name}' was not provided").into())
                }
            };
            inner.set(name, value);
        }
        let extra: Vec<Value> = positional.collect();
        if node.reads.varargs {
            inner.set(&"varargs".into(), Value::tuple(&self.meter, extra)?);
        } else if !extra.is_empty() {
            return fail(format!(
                "macro '{}' takes not more than {} argument(s)",
                node.name,
                node.params.len()
            ));
        }
        if node.reads.caller {
            let at = named.iter().position(|(name, _)| &**name == "caller");
            let missing = || Value::Undefined("No caller defined".into());
            inner.set(
                &"caller".into(),
                at.map_or_else(missing, |at| named.remove(at).1),
            );
        }
        if node.reads.kwargs {
            let named = named
                .into_iter()
                .map(|(name, value)| (Value::Str(name), value));
            inner.set(&"kwargs".into(), Value::dict(&self.meter, named.collect())?);
        } else if let Some((name, _)) = named.first() {
            return fail(format!(
                "macro '{}' takes no keyword argument '{name}'",
                node.name
            ));
        }
        let mut out = String::new();
        self.run(&node.body, &inner, &mut out)?;
        Ok(Value::str(out))
    }
}
