//! From a [`Grammar`] to a [`Constraint`].

use super::cache::GrammarCache;
use super::error_text::short_text;
use super::threads::CompileThreads;
use super::{
    Constraint, GRAMMAR_CACHE_BYTES, Grammar, GrammarError, MAX_GRAMMAR_BYTES, MAX_GRAMMAR_DEPTH,
    MAX_GRAMMAR_PARTS, MAX_REPETITIONS, Mask, check_size, gbnf, lark_string,
};
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_types::TokenId;
use llguidance::api::{GrammarWithLexer, ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// White space between the tokens of JSON. Without a bound a model may write it forever.
const WHITE_SPACE: &str = r" |\n[ \t]{0,32}";

/// Longest token that has a place in the trie; longer ones are never allowed.
const MAX_TOKEN_BYTES: usize = 512;

/// Most patterns of an object's `patternProperties`: each is checked against each other, and against each name.
const MAX_PATTERNS: u64 = 32;

/// Most properties of an object that may be left out: after each may come any that follow it, and the parser keeps
/// four items for each of those (see [`limits`]).
const MAX_OPTIONAL: u64 = 250;

/// Timeout of a compilation: many times what large real grammars take on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Compiles grammars for one vocabulary, whose trie is built when it is first needed.
pub struct GrammarCompiler {
    vocabulary: Arc<Vocabulary>,
    cache: GrammarCache,
    threads: CompileThreads,
}

/// What a grammar is compiled for.
struct Vocabulary {
    tokenizer: Arc<Tokenizer>,
    size: usize,
    factory: OnceLock<Result<ParserFactory, GrammarError>>,
}

impl fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarCompiler")
            .field("vocab_size", &self.vocabulary.size)
            .finish_non_exhaustive()
    }
}

impl GrammarCompiler {
    /// For a model with `vocab_size` logits.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab_size: usize) -> Self {
        Self {
            vocabulary: Arc::new(Vocabulary {
                tokenizer,
                size: vocab_size,
                factory: OnceLock::new(),
            }),
            cache: GrammarCache::new(GRAMMAR_CACHE_BYTES),
            threads: CompileThreads::default(),
        }
    }

    /// The constraint of a grammar: one that was compiled lately, or a new one. It is compiled within limits on its
    /// size and on the work that it takes: milliseconds as a rule, tenths of a second at most (and once as long for
    /// the trie). What those limits do not see ends by its time.
    ///
    /// # Errors
    /// What is wrong with the grammar, that it takes too long, or that the vocabulary does not allow any.
    pub fn compile(&self, grammar: &Grammar) -> Result<Constraint, GrammarError> {
        let compile = || {
            let (vocabulary, grammar) = (Arc::clone(&self.vocabulary), grammar.clone());
            let work = move || vocabulary.compile(&grammar);
            self.threads.run(TIMEOUT, work)
        };
        self.cache.get_or_compile(grammar, compile)
    }
}

impl Vocabulary {
    fn compile(&self, grammar: &Grammar) -> Result<Constraint, GrammarError> {
        let grammars = lower(grammar)?;
        let factory = self.factory.get_or_init(|| self.factory());
        let factory = factory.as_ref().map_err(Clone::clone)?;
        let grammar = TopLevelGrammar {
            grammars,
            max_tokens: None,
        };
        let parser = factory.create_parser(grammar);
        let parser = parser.map_err(|e| GrammarError::Invalid(short_text(&e.to_string())))?;
        let mut matcher = Matcher::new(Ok(parser));
        // Every answer begins with this mask, which its clone of the matcher knows then.
        let first = Mask::of(&mut matcher, &[], self.size);
        first.map_err(GrammarError::Invalid)?;
        Ok(Constraint::new(matcher, self.size))
    }

    fn factory(&self) -> Result<ParserFactory, GrammarError> {
        let build = || {
            let vocabulary = self.tokens();
            let slices = SlicedBiasComputer::general_slices();
            ParserFactory::new(&vocabulary, InferenceCapabilities::default(), &slices)
        };
        // The trie has limits of its own, which it asserts.
        let mut factory = match catch_unwind(AssertUnwindSafe(build)) {
            Ok(Ok(factory)) => factory,
            Ok(Err(error)) => return Err(GrammarError::Vocabulary(short_text(&error.to_string()))),
            Err(_) => return Err(GrammarError::Vocabulary("it has no trie".into())),
        };
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(factory)
    }

    /// All tokens by their bytes. Tokens that are not text have a marker byte first, which no text has.
    fn tokens(&self) -> TokEnv {
        let ends = self.tokenizer.eos_ids();
        let word = |id: TokenId| {
            let bytes = self.tokenizer.token_bytes(id).unwrap_or_default();
            let special = self.tokenizer.is_special(id) || ends.contains(&id);
            match special {
                true => [&[TokTrie::SPECIAL_TOKEN_MARKER][..], &bytes].concat(),
                false if bytes.contains(&TokTrie::SPECIAL_TOKEN_MARKER) => Vec::new(),
                false => bytes,
            }
        };
        let ids = 0..TokenId::try_from(self.size).unwrap_or(TokenId::MAX - 1);
        let mut words: Vec<_> = ids.map(word).collect();
        for word in &mut words {
            word.shrink_to_fit();
            if word.len() > MAX_TOKEN_BYTES {
                word.clear();
            }
        }
        // The trie wants one end. Which tokens end an answer is up to the request, so it gets a made-up
        // one after all others, and a guide asks whether the grammar may end.
        words.push(Vec::new());
        let size = u32::try_from(words.len()).unwrap_or(u32::MAX);
        let info = TokRxInfo::new(size, size - 1);
        Arc::new(ApproximateTokEnv::new(TokTrie::from(&info, &words)))
    }
}

/// Bounds on compiling and on each mask. The numbers are a few times what large real schemas need. The
/// work that they allow is tenths of a second for compiling and some milliseconds for a mask as a rule;
/// what takes longer (grammars that are ambiguous everywhere) ends by its time.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 1000,
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 100_000,
        step_max_items: 30_000,
        max_lexer_states: 30_000,
        max_grammar_size: 250_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// A grammar and its parts in the form that the parser reads, within the limits.
fn lower(grammar: &Grammar) -> Result<Vec<GrammarWithLexer>, GrammarError> {
    let mut lowered = Vec::new();
    let mut bytes = 0;
    part("main", grammar, &mut lowered, &mut bytes)?;
    Ok(lowered)
}

fn part(
    name: &str,
    grammar: &Grammar,
    out: &mut Vec<GrammarWithLexer>,
    bytes: &mut u64,
) -> Result<(), GrammarError> {
    let mut count = |found: usize| {
        *bytes = bytes.saturating_add(found as u64);
        check_size("bytes of the grammar", *bytes, MAX_GRAMMAR_BYTES as u64)
    };
    let mut lark = None;
    let mut schema = None;
    let mut inner: &[(String, Grammar)] = &[];
    match grammar {
        Grammar::JsonSchema {
            schema: given,
            lenient,
        } => {
            let given = checked(given, *lenient)?;
            count(given.to_string().len())?;
            schema = Some(given);
        }
        Grammar::Regex(regex) => {
            count(regex.len())?;
            let regex = llguidance::regex_to_lark(regex, "");
            lark = Some(format!("start: /{regex}/"));
        }
        Grammar::Choice(texts) => {
            check_size("strings", texts.len() as u64, MAX_GRAMMAR_PARTS as u64)?;
            count(texts.iter().map(String::len).sum())?;
            if texts.is_empty() {
                return Err(GrammarError::Invalid("there is nothing to choose".into()));
            }
            let texts: Vec<_> = texts.iter().map(|text| lark_string(text)).collect();
            lark = Some(format!("start: {}", texts.join(" | ")));
        }
        Grammar::Lark { text, parts } => {
            check_size("parts", parts.len() as u64, MAX_GRAMMAR_PARTS as u64)?;
            count(text.len())?;
            lark = Some(text.clone());
            inner = parts;
        }
        Grammar::Gbnf(text) => {
            count(text.len())?;
            lark = Some(gbnf::to_lark(text)?);
        }
    }
    out.push(GrammarWithLexer {
        name: Some(name.into()),
        json_schema: schema,
        lark_grammar: lark,
    });
    // Named parts of an inner grammar keep their own names; they do not occur in practice.
    for (name, grammar) in inner {
        part(name, grammar, out, bytes)?;
    }
    Ok(())
}

/// A schema within the limits, with our settings for the JSON of it.
fn checked(schema: &Value, lenient: bool) -> Result<Value, GrammarError> {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        Value::Object(_) => schema.clone(),
        Value::Bool(false) => {
            return Err(GrammarError::Invalid("nothing is valid for `false`".into()));
        }
        _ => {
            let reason = "a schema is an object or a boolean";
            return Err(GrammarError::Invalid(reason.into()));
        }
    };
    check_value(&schema, 1, false)?;
    if let Value::Object(map) = &mut schema {
        let ours = json!({"whitespace_pattern": WHITE_SPACE, "lenient": lenient});
        if map.insert("x-guidance".into(), ours).is_some() {
            return Err(GrammarError::Invalid("x-guidance: not supported".into()));
        }
    }
    Ok(schema)
}

/// Limits on depth and on counts, which cost nothing to write and much to compile. `data`: whether it
/// is a value that is compared with, in which names mean nothing.
fn check_value(value: &Value, depth: u64, data: bool) -> Result<(), GrammarError> {
    const COUNTS: [&str; 6] = [
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "minProperties",
        "maxProperties",
    ];
    const DATA: [&str; 4] = ["const", "enum", "default", "examples"];
    check_size("depth of the schema", depth, MAX_GRAMMAR_DEPTH as u64)?;
    match value {
        Value::Object(map) => {
            if !data {
                check_properties(map)?;
            }
            for (key, value) in map {
                let key = key.as_str();
                let count = value.as_f64().filter(|_| !data && COUNTS.contains(&key));
                check_size(key, count.unwrap_or(0.0) as u64, MAX_REPETITIONS)?;
                check_value(value, depth + 1, data || DATA.contains(&key))?;
            }
            Ok(())
        }
        Value::Array(items) => items
            .iter()
            .try_for_each(|item| check_value(item, depth + 1, data)),
        _ => Ok(()),
    }
}

/// Limits on an object's properties, whose number a parser does not pass over lightly.
fn check_properties(schema: &Map<String, Value>) -> Result<(), GrammarError> {
    let object = |key: &str| schema.get(key).and_then(Value::as_object);
    let patterns = object("patternProperties").map_or(0, Map::len);
    check_size("patternProperties", patterns as u64, MAX_PATTERNS)?;
    let Some(properties) = object("properties") else {
        return Ok(());
    };
    let required = schema.get("required").and_then(Value::as_array);
    let required = required.into_iter().flatten().filter_map(Value::as_str);
    let required: HashSet<_> = required.collect();
    let is_optional = |name: &&String| !required.contains(name.as_str());
    let optional = properties.keys().filter(is_optional).count();
    check_size(
        "properties that are not required",
        optional as u64,
        MAX_OPTIONAL,
    )
}
