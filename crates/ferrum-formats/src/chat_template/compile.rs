//! Templates to programs of the template engine, changed so that they can be bounded.
//!
//! minijinja's fuel counts instructions and copied text, but its own lists and operators let a template
//! build in a few steps what then takes minutes to compare, terabytes to print, or the whole stack to free. So the
//! compiled program is rewritten: each instruction that makes, combines, compares or takes apart values becomes a call
//! of our function (`operators.rs`), which works on our lists and dictionaries only (`value.rs`). Those know the depth
//! and the size of all that they hold, which are limited when they are made, and charged when they are walked. What
//! remains of the engine's instructions moves values, jumps, or computes with numbers.
//!
//! Why the limits hold, instruction by instruction:
//!
//! - Lists and dictionaries come from our functions only. Their depth is at most `MAX_VALUE_DEPTH`, so printing, comparing
//!   and freeing them recurses no deeper; their size is at most `MAX_VALUE_BYTES`, counting what they hold twice twice, so a
//!   doubled list in a loop is stopped by its size and not by what walks through it. Walking is charged by that size.
//! - Text that grows (`~`, `+`, `*`, `%`, `replace`, `join`, `format`, …) is charged before it is made.
//! - Namespaces are the one thing that changes. They print as a name, count as no level, and are emptied one by one at
//!   the end of a rendering, so a ring of them is neither walked nor leaked, and a chain not freed recursively.
//! - The engine's own filters get our values, are charged before they run, and their results are converted to ours
//!   (`filters.rs`); so is `loop` where a template keeps it. No filter of the engine is there unless it is named there.
//! - Scopes and calls have the engine's limit of recursion, and the compiler one of its own for what it nests; `check`
//!   adds those for chains of operators and `elif`. Both run on a thread with a stack for that (`mod.rs`).
//! - `check` refuses what the engine compiles to a program that panics: `break` out of a block inside a loop.
//!
//! This uses what minijinja calls `unstable_machinery`; its version is pinned for that. The `match` below names every
//! instruction that is let through, so a new one is an error of the compiler and not a hole.

use super::TemplateError;
use super::value::constant;
use minijinja::machinery::{CodeGenerator, Instruction, Instructions, Token, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, Value, machinery};
use self_cell::self_cell;
use std::collections::{BTreeMap, HashMap};
use std::fmt;

/// What the engine calls the template.
const NAME: &str = "chat template";
/// Tokens of one tag: the compiler recurses once for each operator of a chain.
const MAX_TAG_TOKENS: usize = 1_000;
/// `elif`s of a template: the compiler recurses once for each.
const MAX_ELIFS: usize = 1_000;
/// Names of filters that the engine caches in a program.
const CACHED_FILTERS: u8 = 50;
/// The number of a filter that it does not.
const NOT_CACHED: u8 = u8::MAX;

/// Names of attributes that may be methods of a Python value.
const METHODS: [&str; 5] = ["items", "keys", "values", "get", "copy"];

self_cell! {
    /// A compiled template with its text, which the instructions refer to.
    pub(super) struct Program {
        owner: String,
        #[covariant]
        dependent: Instructions,
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Program")
    }
}

impl Program {
    /// Compiles the text of a template.
    pub(super) fn compile(source: &str) -> Result<Self, TemplateError> {
        Program::try_new(without_generation(source), |source| compile(source))
    }

    /// Runs the program over its variables.
    pub(super) fn render(
        &self,
        env: &'static Environment<'static>,
        variables: Value,
    ) -> Result<String, Error> {
        let mut text = String::new();
        let mut output = machinery::make_string_output(&mut text);
        let blocks = BTreeMap::new();
        let escape = minijinja::AutoEscape::None;
        machinery::eval(
            env,
            self.borrow_dependent(),
            variables,
            &blocks,
            &mut output,
            escape,
        )?;
        Ok(text)
    }
}

fn syntax() -> SyntaxConfig {
    let mut syntax = SyntaxConfig::builder();
    syntax.trim_blocks(true).lstrip_blocks(true);
    // Fails on delimiters only, and these are the usual ones.
    syntax.build().unwrap_or_default()
}

fn syntax_error(line: usize, reason: impl Into<String>) -> TemplateError {
    TemplateError::Syntax {
        line: u32::try_from(line).unwrap_or(u32::MAX),
        reason: reason.into(),
    }
}

fn compile(source: &str) -> Result<Instructions<'_>, TemplateError> {
    check(source)?;
    let failed = |error: Error| {
        let reason = error
            .detail()
            .map_or_else(|| error.kind().to_string(), str::to_owned);
        syntax_error(error.line().unwrap_or(1), reason)
    };
    let tree = parse(source, NAME, syntax()).map_err(failed)?;
    let mut generator = CodeGenerator::new(NAME, source);
    generator.compile_stmt(&tree);
    let (program, _) = generator.finish();
    Rewriter::new(program.source()).rewrite(&program)
}

/// Refuses what the engine's compiler has no limit for, or compiles to a program that fails.
fn check(source: &str) -> Result<(), TemplateError> {
    let mut elifs = 0;
    // Blocks that are open, and the tag that is read.
    let mut blocks: Vec<&str> = Vec::new();
    let mut tag: Vec<Token> = Vec::new();
    for token in tokenize(source, false, syntax()) {
        // An error of the tokenizer is the parser's to tell, and ends the reading here too.
        let Ok((token, span)) = token else {
            return Ok(());
        };
        let line = span.start_line.into();
        match token {
            Token::VariableStart | Token::BlockStart | Token::TemplateData(_) => tag.clear(),
            Token::BlockEnd => {
                let word = |at: usize| match tag.get(at) {
                    Some(Token::Ident(name)) => *name,
                    _ => "",
                };
                match word(0) {
                    "elif" => elifs += 1,
                    "break" | "continue" => {
                        // The engine jumps out of the loop and leaves open what is open inside.
                        let inside = blocks.iter().rev().take_while(|block| **block != "for");
                        if let Some(block) = inside.into_iter().find(|block| **block != "if") {
                            let reason = format!("`{}` cannot leave a `{block}` block", word(0));
                            return Err(syntax_error(line, reason));
                        }
                    }
                    // Transformers does not have it, and minijinja's code for it leaves values on the stack.
                    "do" => return Err(syntax_error(line, "`do` is not supported")),
                    "set" if is_assignment(&tag) => {}
                    block @ ("for" | "if" | "set" | "with" | "filter" | "macro" | "call") => {
                        blocks.push(block)
                    }
                    "else" => {
                        // Of a loop it is not in the loop any more.
                        if let Some(block) = blocks.last_mut().filter(|block| **block == "for") {
                            *block = "else";
                        }
                    }
                    end if end.starts_with("end") => {
                        blocks.pop();
                    }
                    _ => {}
                }
                tag.clear();
            }
            token => tag.push(token),
        }
        if tag.len() > MAX_TAG_TOKENS {
            return Err(syntax_error(
                line,
                format!("a tag has more than {MAX_TAG_TOKENS} parts"),
            ));
        }
        if elifs > MAX_ELIFS {
            return Err(syntax_error(line, format!("more than {MAX_ELIFS} `elif`")));
        }
    }
    Ok(())
}

/// Whether a `set` has its value in the tag, and not in a block that follows.
fn is_assignment(tag: &[Token]) -> bool {
    let mut depth = 0;
    tag.iter().any(|token| {
        match token {
            Token::ParenOpen => depth += 1,
            Token::ParenClose => depth -= 1,
            _ => {}
        }
        depth == 0 && matches!(token, Token::Assign)
    })
}

/// `{% generation %}` of transformers marks what the assistant says and has a scope, as `{% with %}`.
fn without_generation(source: &str) -> String {
    // As Jinja, whatever ends a line.
    let source = &source.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::with_capacity(source.len());
    let mut rest: &str = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        let name = tag.trim_start_matches(['-', '+']).trim_start();
        let marks = &tag[..tag.len() - name.len()];
        rest = tag;
        for (from, to) in [("generation", "with"), ("endgeneration", "endwith")] {
            if let Some(after) = name.strip_prefix(from)
                && after
                    .trim_start()
                    .trim_start_matches(['-', '+'])
                    .starts_with("%}")
            {
                out.push_str(marks);
                out.push_str(to);
                rest = after;
            }
        }
    }
    out + rest
}

/// Rewrites a program.
struct Rewriter<'s> {
    out: Instructions<'s>,
    length: u32,
    line: u16,
    filters: HashMap<&'s str, u8>,
}

impl<'s> Rewriter<'s> {
    fn new(source: &'s str) -> Self {
        let out = Instructions::new(NAME, source);
        Rewriter {
            out,
            length: 0,
            line: 1,
            filters: HashMap::new(),
        }
    }

    fn rewrite(mut self, program: &Instructions<'s>) -> Result<Instructions<'s>, TemplateError> {
        // Where each instruction begins in the new program.
        let mut places = Vec::new();
        while let Some(instruction) = program.get(places.len() as u32) {
            if let Some(line) = program.get_line(places.len() as u32) {
                self.line = u16::try_from(line).unwrap_or(u16::MAX);
            }
            places.push(self.length);
            self.instruction(instruction)?;
        }
        places.push(self.length);
        for at in 0..self.length {
            if let Some(
                Instruction::Iterate(target)
                | Instruction::Jump(target)
                | Instruction::JumpIfFalse(target)
                | Instruction::JumpIfFalseOrPop(target)
                | Instruction::JumpIfTrueOrPop(target)
                | Instruction::BuildMacro(_, target, _),
            ) = self.out.get_mut(at)
            {
                *target = places.get(*target as usize).copied().unwrap_or(self.length);
            }
        }
        Ok(self.out)
    }

    fn add(&mut self, instruction: Instruction<'s>) {
        self.out.add_with_line(instruction, self.line);
        self.length += 1;
    }

    fn filter(&mut self, name: &'s str, args: Option<u16>) {
        let next = u8::try_from(self.filters.len()).unwrap_or(NOT_CACHED);
        let number = *self.filters.entry(name).or_insert(next);
        let number = if number < CACHED_FILTERS {
            number
        } else {
            NOT_CACHED
        };
        self.add(Instruction::ApplyFilter(name, args, number));
    }

    /// Calls one of our functions with what is on the stack.
    fn call(&mut self, function: &'static str, args: u16) {
        self.filter(function, Some(args));
    }

    /// Calls one of our functions with what is on the stack, and a constant.
    fn call_with(&mut self, function: &'static str, args: u16, last: impl Into<Value>) {
        self.add(Instruction::LoadConst(last.into()));
        self.call(function, args.saturating_add(1));
    }

    fn instruction(&mut self, instruction: &Instruction<'s>) -> Result<(), TemplateError> {
        use Instruction as I;
        match instruction {
            I::EmitRaw(text) => {
                self.add(I::LoadConst((*text).into()));
                self.add(I::Emit);
            }
            I::LoadConst(value) if value.is_kwargs() => {
                let names: Vec<Value> = value.try_iter().into_iter().flatten().collect();
                for name in &names {
                    self.add(I::LoadConst(name.clone()));
                    let value = value.get_item(name).unwrap_or_default();
                    self.constant(&value)?;
                }
                self.add(I::BuildKwargs(names.len()));
            }
            I::LoadConst(value) => self.constant(value)?,
            I::BuildMap(pairs) => {
                self.add(I::BuildList(Some(pairs * 2)));
                self.call("@dict", 1);
            }
            I::BuildList(count) => {
                self.add(I::BuildList(*count));
                self.call("@list", 1);
            }
            I::BuildTuple(count) => {
                self.add(I::BuildList(*count));
                self.call("@tuple", 1);
            }
            I::UnpackList(count) => {
                self.call_with("@unpack", 1, *count);
                self.add(I::UnpackList(*count));
            }
            I::GetAttr(name) if METHODS.contains(name) => self.call_with("@attribute", 1, *name),
            I::SetAttr(name) => {
                self.call_with("@set_attribute", 2, *name);
                self.add(I::DiscardTop);
            }
            I::GetItem => self.call("@item", 2),
            I::Slice => self.call("@slice", 4),
            I::Add => self.call("@add", 2),
            I::Mul => self.call("@multiply", 2),
            I::Rem => self.call("@remainder", 2),
            I::StringConcat => self.call("@concat", 2),
            I::In => self.call("@in", 2),
            I::Eq => self.call("@==", 2),
            I::Ne => self.call("@!=", 2),
            I::Lt => self.call("@<", 2),
            I::Lte => self.call("@<=", 2),
            I::Gt => self.call("@>", 2),
            I::Gte => self.call("@>=", 2),
            I::CompareAndPreserve(operator) => {
                // The stack keeps the right operand under the result.
                let operator = format!("{operator:?}");
                self.call_with("@compare", 2, operator);
                self.add(I::UnpackList(2));
            }
            I::ApplyFilter(name, args, _) => self.filter(name, *args),
            I::CallMethod(name, Some(args)) => self.call_with("@method", *args, *name),
            I::BuildMacro(..) => {
                self.call_with("@macro", 0, ());
                self.add(I::DiscardTop);
                self.add(instruction.clone());
            }
            I::PushLoop(_) => {
                self.call("@iterable", 1);
                self.add(instruction.clone());
            }
            I::MergeKwargs(_) | I::UnpackLists(_) => {
                return Err(self.refused("`*` and `**` before arguments are not supported"));
            }
            I::PushAutoEscape | I::PopAutoEscape => {
                return Err(self.refused("`autoescape` is not supported"));
            }
            // What moves values, jumps, or takes numbers only.
            I::Lookup(_)
            | I::StoreLocal(_)
            | I::GetAttr(_)
            | I::BuildKwargs(_)
            | I::Sub
            | I::Div
            | I::IntDiv
            | I::Pow
            | I::Neg
            | I::Not
            | I::PerformTest(..)
            | I::Emit
            | I::PushWith
            | I::Iterate(_)
            | I::PushDidNotIterate
            | I::PopFrame
            | I::PopLoopFrame
            | I::Jump(_)
            | I::JumpIfFalse(_)
            | I::JumpIfFalseOrPop(_)
            | I::JumpIfTrueOrPop(_)
            | I::BeginCapture(_)
            | I::EndCapture
            | I::CallFunction(_, Some(_))
            | I::CallObject(Some(_))
            | I::DupTop
            | I::DiscardTop
            | I::FastRecurse
            | I::Swap
            | I::Return
            | I::IsUndefined
            | I::Enclose(_)
            | I::GetClosure => self.add(instruction.clone()),
            I::CallFunction(..) | I::CallMethod(..) | I::CallObject(_) => {
                return Err(self.refused("a call with more arguments than a call may have"));
            }
        }
        Ok(())
    }

    fn constant(&mut self, value: &Value) -> Result<(), TemplateError> {
        let value = constant(value).map_err(|error| self.refused(&error.to_string()))?;
        self.add(Instruction::LoadConst(value));
        Ok(())
    }

    fn refused(&self, reason: &str) -> TemplateError {
        syntax_error(self.line.into(), reason)
    }
}
