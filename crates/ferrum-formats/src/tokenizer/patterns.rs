//! From the regular expressions of pre-tokenizers to the rules that match them in linear time.
//!
//! A GGUF file names its pre-tokenizer and a `tokenizer.json` spells it out; both come to the same
//! expressions. The long ones are alternations of few parts in a fixed order, so they are read part
//! by part from lists of spellings. A rule that is read here matches the same text as its
//! expression; `tokenizers` and `fancy-regex` are what the tests compare with.

use super::pretokenize::{
    Contraction, Lead, Letters, Numbers, Other, Rule, Spaces, Tail, WordRule,
};
use super::unicode::{CharSet, DIGIT};
use regex_syntax::ast::{Ast, RepetitionKind, RepetitionRange, parse::Parser};

/// Spellings of a part, and what it means.
type Spellings<T> = [(&'static str, T)];

const CONTRACTIONS: &Spellings<Contraction> = &[
    ("'s|'t|'re|'ve|'m|'ll|'d|", Contraction::Lower),
    ("(?i:'s|'t|'re|'ve|'m|'ll|'d)|", Contraction::AnyCase),
    ("'(?i:[sdmt]|ll|ve|re)|", Contraction::AnyCase),
];

/// The two alternatives of [`Letters::Cased`].
macro_rules! cased {
    ($upper:literal, $lower:literal, $suffix:literal) => {
        concat!(
            r"[^\r\n\p{L}\p{N}]?",
            concat!($upper, "*", $lower, "+", $suffix, "|"),
            r"[^\r\n\p{L}\p{N}]?",
            concat!($upper, "+", $lower, "*", $suffix, "|"),
        )
    };
}

/// Letters, and whether a contraction may follow them in the same word.
const LETTERS: &Spellings<(Letters, bool)> = &[
    (r" ?\p{L}+|", (Letters::AfterSpace, false)),
    (r"[^\r\n\p{L}\p{N}]?\p{L}+|", (Letters::AfterAny, false)),
    // Giving the lead back could not help: it is no letter.
    (r"[^\r\n\p{L}\p{N}]?+\p{L}+|", (Letters::AfterAny, false)),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|",
        (Letters::MarksAfterAny, false),
    ),
    (
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|",
        (Letters::AfterPunct, false),
    ),
    (
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"##,
        (Letters::AfterPunct, false),
    ),
    (
        cased!(
            r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
            r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
            "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        ),
        (Letters::Cased, true),
    ),
    (
        cased!(
            r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
            r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
            ""
        ),
        (Letters::Cased, false),
    ),
    (
        concat!(
            r"[\p{Han}]+|",
            cased!(
                r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
                r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
                "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            )
        ),
        (Letters::HanOrCased, true),
    ),
    (
        r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|",
        (Letters::Phrase, false),
    ),
];

const NUMBERS: &Spellings<Numbers> = &[
    (r" ?\p{N}+|", Numbers::AfterSpace),
    (r"\p{N}|", Numbers::UpTo(1)),
    (r"\p{N}{1,2}|", Numbers::UpTo(2)),
    (r"\p{N}{1,3}|", Numbers::UpTo(3)),
    (r"\p{N}+|", Numbers::UpTo(usize::MAX)),
];

const OTHERS: &Spellings<Other> = &[
    // Giving a character back could not help: what follows may be empty.
    (r" ?[^\s\p{L}\p{N}]++", Other::NotWord),
    (r" ?[^\s\p{L}\p{N}]+", Other::NotWord),
    (r" ?[^\s\p{L}\p{N}\r\n]+", Other::NotWord),
    (r" ?[^\s\p{L}\p{M}\p{N}]+", Other::NotWordOrMark),
    (r" ?[\p{P}\p{S}]+", Other::PunctOrSymbol),
];

const TAILS: &Spellings<Tail> = &[
    ("|", Tail::None),
    (r"[\r\n]*|", Tail::Breaks),
    (r"[\r\n/]*|", Tail::BreaksOrSlashes),
    (r"[\r\n/]?|", Tail::OneBreakOrSlash),
];

/// White space, to the end of the expression.
const SPACES: &Spellings<Spaces> = &[
    (r"\s+(?!\S)|\s+", Spaces::Plain),
    (r"\s*[\r\n]+|\s+(?!\S)|\s+", Spaces::BreaksFirst),
    (r"\s*[\r\n]|\s+(?!\S)|\s+", Spaces::BreaksFirst),
    (r"[\r\n]|\s+(?!\S)|\s+", Spaces::OneBreakFirst),
    (
        concat!(
            r"\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|",
            r"\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
        ),
        Spaces::Cascade,
    ),
];

/// Most characters that a run is asked to have: where it falls short, they are read again.
const MAX_MIN: u32 = 4;

impl Rule {
    /// The rule that matches as `pattern` does; `None`: not an expression known here.
    pub(super) fn from_regex(pattern: &str) -> Option<Rule> {
        Some(match pattern {
            r"\s+$" => Rule::TrailingSpace,
            r"[\t\n]|    |  " => Rule::Indent,
            r"\d{1,3}(?=(?:\d{3})*\b)" => Rule::Thousands {
                class: DIGIT,
                at_boundary: true,
            },
            "[0-9][0-9][0-9]" => runs("[0-9]{3}")?,
            _ => match words(pattern) {
                Some(words) => Rule::Word(words),
                None => runs(pattern)?,
            },
        })
    }
}

/// Takes the first of the spellings that `rest` begins with.
fn take<T: Copy>(rest: &mut &str, spellings: &Spellings<T>) -> Option<T> {
    spellings.iter().find_map(|&(spelling, meaning)| {
        *rest = rest.strip_prefix(spelling)?;
        Some(meaning)
    })
}

/// The alternation over words, numbers, punctuation and white space.
fn words(pattern: &str) -> Option<WordRule> {
    let mut rest = pattern;
    let before = take(&mut rest, CONTRACTIONS);
    let (letters, suffix) = take(&mut rest, LETTERS)?;
    let contraction = match (before, suffix) {
        (None, false) => Contraction::None,
        (None, true) => Contraction::Suffix,
        (Some(contraction), false) => contraction,
        (Some(_), true) => return None,
    };
    let numbers = take(&mut rest, NUMBERS).unwrap_or(Numbers::None);
    let other = take(&mut rest, OTHERS)?;
    let tail = take(&mut rest, TAILS)?;
    let &(_, spaces) = SPACES.iter().find(|(spelling, _)| *spelling == rest)?;
    Some(WordRule {
        contraction,
        letters,
        numbers,
        other,
        tail,
        spaces,
    })
}

/// Runs of characters of one class: `X+`, `X{1,3}`, ` ?X+`, `\s?X+`, `X+|Y+`.
fn runs(pattern: &str) -> Option<Rule> {
    let ast = Parser::new().parse(pattern).ok()?;
    match &ast {
        Ast::Alternation(alternatives) => {
            let set = |ast| match run(pattern, ast)? {
                (set, 1, usize::MAX) => Some(set),
                _ => None,
            };
            let sets: Option<_> = alternatives.asts.iter().map(set).collect();
            Some(Rule::AnyRun(sets?))
        }
        Ast::Concat(parts) => match parts.asts.as_slice() {
            [lead, ast] => {
                let lead = match text(pattern, lead) {
                    " ?" => Lead::Space,
                    r"\s?" => Lead::AnySpace,
                    _ => return None,
                };
                run(pattern, ast).map(|run| led(lead, run))
            }
            _ => None,
        },
        ast => run(pattern, ast).map(|run| led(Lead::None, run)),
    }
}

fn led(lead: Lead, (set, min, max): (CharSet, usize, usize)) -> Rule {
    Rule::Run {
        lead,
        set,
        min,
        max,
    }
}

/// The class that `ast` repeats, and how many times at least and at most.
fn run(pattern: &str, ast: &Ast) -> Option<(CharSet, usize, usize)> {
    use RepetitionRange::{AtLeast, Bounded, Exactly};
    let (class, min, max) = match ast {
        Ast::Repetition(repeated) if repeated.greedy => {
            let (min, max) = match repeated.op.kind {
                RepetitionKind::OneOrMore => (1, u32::MAX),
                RepetitionKind::Range(AtLeast(min)) => (min, u32::MAX),
                RepetitionKind::Range(Exactly(count)) => (count, count),
                RepetitionKind::Range(Bounded(min, max)) => (min, max),
                RepetitionKind::ZeroOrOne | RepetitionKind::ZeroOrMore => return None,
            };
            (&*repeated.ast, min, max)
        }
        ast => (ast, 1, 1),
    };
    // No run is an empty match, and none is given up after much reading.
    if !(1..=MAX_MIN).contains(&min) {
        return None;
    }
    let is_class = matches!(
        class,
        Ast::ClassBracketed(_) | Ast::ClassUnicode(_) | Ast::ClassPerl(_)
    );
    let set = CharSet::new(text(pattern, class)).filter(|_| is_class)?;
    let max = match max {
        u32::MAX => usize::MAX,
        max => max as usize,
    };
    Some((set, min as usize, max))
}

/// The part of `pattern` that `ast` was read from.
fn text<'a>(pattern: &'a str, ast: &Ast) -> &'a str {
    let span = ast.span();
    &pattern[span.start.offset..span.end.offset]
}
