//! How a byte-level BPE vocabulary cuts text into words before merging.
//!
//! Published tokenizers give this step as a list of regular expressions, each applied to the
//! pieces the one before it left: a match becomes a piece of its own, and so does the text between
//! matches. All of those expressions are combinations of few parts, so they are written here as
//! values of [`Rule`] and matched by hand: in linear time on any input, with no backtracking limit
//! that a hostile text could hit. The regular expression each part stands for is beside it;
//! `patterns.rs` reads a rule from its expression.

use super::unicode::{
    CharSet, Classes, HAN, LETTER, LOWERISH, MARK, NUMBER, PUNCT, SPACE, SYMBOL, UPPERISH, WORD,
};
use std::cell::Cell;
use std::ops::Range;
use tokenizers::Offsets;
use tokenizers::tokenizer::pattern::Pattern;

/// `'s|'t|'re|'ve|'m|'ll|'d`, and how it is matched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contraction {
    /// Not an alternative of its own.
    None,
    /// Lower case only.
    Lower,
    /// `(?i:…)`, a word of its own.
    AnyCase,
    /// `(?i:…)?` at the end of the letters.
    Suffix,
}

/// The alternative that takes letters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Letters {
    /// ` ?\p{L}+`
    AfterSpace,
    /// `[^\r\n\p{L}\p{N}]?\p{L}+`
    AfterAny,
    /// `[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+`
    MarksAfterAny,
    /// ``[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+``
    AfterPunct,
    /// With U = `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`, W = `[\p{Ll}\p{Lm}\p{Lo}\p{M}]`:
    /// `[^\r\n\p{L}\p{N}]?U*W+|[^\r\n\p{L}\p{N}]?U+W*`
    Cased,
    /// `\p{Han}+`, then [`Letters::Cased`] without Han in U and W.
    HanOrCased,
    /// `[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+`
    Phrase,
}

/// The alternative that takes numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Numbers {
    /// An earlier rule has set them apart.
    None,
    /// ` ?\p{N}+`
    AfterSpace,
    /// `\p{N}{1,max}`
    UpTo(usize),
}

/// The alternative that takes everything else that is not white space: ` ?X+tail`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Other {
    /// X = `[^\s\p{L}\p{N}]`
    NotWord,
    /// X = `[^\s\p{L}\p{M}\p{N}]`
    NotWordOrMark,
    /// X = `[\p{P}\p{S}]`
    PunctOrSymbol,
}

/// What [`Other`] takes along at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tail {
    /// Nothing.
    None,
    /// `[\r\n]*`
    Breaks,
    /// `[\r\n/]*`
    BreaksOrSlashes,
    /// `[\r\n/]?`
    OneBreakOrSlash,
}

/// White space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spaces {
    /// `\s+(?!\S)|\s+`
    Plain,
    /// `\s*[\r\n]+|\s+(?!\S)|\s+`; `\s*[\r\n]` takes the same text
    BreaksFirst,
    /// `[\r\n]|\s+(?!\S)|\s+`
    OneBreakFirst,
    /// `\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|…|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}`
    Cascade,
}

/// One big alternation, tried in the order of the fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WordRule {
    pub(super) contraction: Contraction,
    pub(super) letters: Letters,
    pub(super) numbers: Numbers,
    pub(super) other: Other,
    pub(super) tail: Tail,
    pub(super) spaces: Spaces,
}

/// What may stand before a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lead {
    None,
    /// ` ?`
    Space,
    /// `\s?`
    AnySpace,
}

/// One regular expression of a pre-tokenizer.
#[derive(Debug)]
pub(super) enum Rule {
    /// The alternation over words, numbers, punctuation and white space.
    Word(WordRule),
    /// `lead X{min,max}`
    Run {
        lead: Lead,
        set: CharSet,
        min: usize,
        max: usize,
    },
    /// `X+|Y+|…`
    AnyRun(Vec<CharSet>),
    /// Digits in groups of three from the right; `at_boundary`: only where `\b` follows the run.
    Thousands { class: u16, at_boundary: bool },
    /// `\s+$`
    TrailingSpace,
    /// `[\t\n]|    |  `
    Indent,
}

/// What a rule says of the text at a position.
enum Step {
    /// The rule takes this many bytes.
    Match(usize),
    /// No match begins within this many bytes.
    Skip(usize),
}

/// Cuts `text` by each rule in turn; the ranges cover it without gaps, in order.
pub(super) fn split(rules: &[Rule], text: &str) -> Vec<Range<usize>> {
    let classes = Classes::get();
    let mut pieces = Vec::new();
    if !text.is_empty() {
        pieces.push(0..text.len());
    }
    for rule in rules {
        let mut finer = Vec::with_capacity(pieces.len().max(text.len() / 6));
        for piece in pieces {
            rule.cut(classes, text, piece, |range, _| finer.push(range));
        }
        pieces = finer;
    }
    pieces
}

/// What the `tokenizers` crate splits by: the offsets in bytes, and whether each part is a match.
impl Pattern for &Rule {
    fn find_matches(&self, inside: &str) -> tokenizers::Result<Vec<(Offsets, bool)>> {
        let mut parts = Vec::new();
        self.cut(Classes::get(), inside, 0..inside.len(), |range, found| {
            parts.push(((range.start, range.end), found));
        });
        Ok(parts)
    }
}

impl Rule {
    /// Calls `part` with each match in `piece` and with the text between matches, in order.
    fn cut(
        &self,
        k: Classes,
        text: &str,
        piece: Range<usize>,
        mut part: impl FnMut(Range<usize>, bool),
    ) {
        let scan = Scan {
            text: &text[..piece.end],
            k,
            calm: Cell::new(0),
        };
        let (mut gap, mut at) = (piece.start, piece.start);
        while at < piece.end {
            let step = match self {
                Rule::Thousands { class, at_boundary } => {
                    let run = scan.run(at, *class);
                    let follows = scan.class(run) & WORD != 0;
                    if run == at || (*at_boundary && follows) {
                        Step::Skip((run - at).max(scan.width(at)))
                    } else {
                        if gap < at {
                            part(gap..at, false);
                        }
                        thousands(&scan, at..run, |group| part(group, true));
                        (gap, at) = (run, run);
                        continue;
                    }
                }
                rule => rule.step(&scan, at),
            };
            match step {
                Step::Match(len) => {
                    if gap < at {
                        part(gap..at, false);
                    }
                    at += len;
                    part(at - len..at, true);
                    gap = at;
                }
                Step::Skip(len) => at += len,
            }
        }
        if gap < piece.end {
            part(gap..piece.end, false);
        }
    }

    fn step(&self, scan: &Scan, at: usize) -> Step {
        let taken = match self {
            Rule::Word(rule) => rule.end(scan, at) - at,
            Rule::Run {
                lead,
                set,
                min,
                max,
            } => scan.led_run(at, *lead, set, *min, *max) - at,
            Rule::AnyRun(sets) => sets
                .iter()
                .map(|set| scan.run_of(at, usize::MAX, |c| set.contains(c)).0 - at)
                .find(|&len| len > 0)
                .unwrap_or(0),
            Rule::TrailingSpace => {
                let end = scan.run(at, SPACE);
                if end > at && end < scan.text.len() {
                    return Step::Skip(end - at);
                }
                end - at
            }
            Rule::Indent => {
                let rest = &scan.text[at..];
                ["\t", "\n", "    ", "  "]
                    .iter()
                    .find(|p| rest.starts_with(**p))
                    .map_or(0, |p| p.len())
            }
            Rule::Thousands { .. } => 0,
        };
        if taken > 0 {
            Step::Match(taken)
        } else {
            Step::Skip(scan.width(at))
        }
    }
}

/// Cuts a run of digits into groups of three from the right.
fn thousands(scan: &Scan, run: Range<usize>, mut group: impl FnMut(Range<usize>)) {
    let count = scan.text[run.clone()].chars().count();
    let first = match count % 3 {
        0 => 3,
        rest => rest,
    };
    let (mut start, mut size) = (run.start, first);
    while start < run.end {
        let end = scan.run_of(start, size, |_| true).0.min(run.end);
        group(start..end);
        (start, size) = (end, 3);
    }
}

/// A text, to be looked at from positions in it; past its end there is nothing.
struct Scan<'a> {
    text: &'a str,
    k: Classes,
    /// End of a run of white space known to hold no further line break: without it, a long run
    /// that is taken in many small pieces would be searched anew for each.
    calm: Cell<usize>,
}

impl Scan<'_> {
    #[inline]
    fn peek(&self, at: usize) -> Option<char> {
        self.text[at..].chars().next()
    }

    #[inline]
    fn class(&self, at: usize) -> u16 {
        self.peek(at).map_or(0, |c| self.k.of(c))
    }

    /// Bytes of the character at `at`, 0 at the end.
    #[inline]
    fn width(&self, at: usize) -> usize {
        self.peek(at).map_or(0, char::len_utf8)
    }

    /// End of the longest run of at most `max` characters that `held` accepts, and their number.
    #[inline]
    fn run_of(&self, at: usize, max: usize, held: impl Fn(char) -> bool) -> (usize, usize) {
        let mut count = 0;
        for (offset, c) in self.text[at..].char_indices() {
            if count == max || !held(c) {
                return (at + offset, count);
            }
            count += 1;
        }
        (self.text.len(), count)
    }

    /// End of the run of characters with any of the bits of `class`.
    #[inline]
    fn run(&self, at: usize, class: u16) -> usize {
        self.run_of(at, usize::MAX, |c| self.k.of(c) & class != 0).0
    }

    fn led_run(&self, at: usize, lead: Lead, set: &CharSet, min: usize, max: usize) -> usize {
        let led = match (lead, self.peek(at)) {
            (Lead::Space, Some(' ')) => true,
            (Lead::AnySpace, Some(c)) => self.k.of(c) & SPACE != 0,
            _ => false,
        };
        for start in [at + if led { self.width(at) } else { 0 }, at] {
            let (end, count) = self.run_of(start, max, |c| set.contains(c));
            if count >= min {
                return end;
            }
        }
        at
    }

    /// End of `\s*[\r\n]` at `at`, if it matches.
    fn last_break(&self, at: usize) -> Option<usize> {
        if at < self.calm.get() {
            return None;
        }
        let end = self.run(at, SPACE);
        let last = self.text[at..end]
            .rfind(['\r', '\n'])
            .map(|last| at + last + 1);
        self.calm.set(end);
        last
    }

    /// End of a contraction at `at`, or `at`.
    fn contraction(&self, at: usize, any_case: bool) -> usize {
        let mut chars = self.text[at..].chars();
        if chars.next() != Some('\'') {
            return at;
        }
        // Simple case folding: `ſ` is an `s` to a case-insensitive regular expression.
        let fold = |c: char| match c {
            'ſ' if any_case => 's',
            c if any_case => c.to_ascii_lowercase(),
            c => c,
        };
        let Some(first) = chars.next() else { return at };
        let second = chars.next();
        match (fold(first), second.map(fold)) {
            ('s' | 't' | 'm' | 'd', _) => at + 1 + first.len_utf8(),
            ('r' | 'v', Some('e')) | ('l', Some('l')) => at + 3,
            _ => at,
        }
    }
}

impl WordRule {
    /// End of the match at `at`; every character is taken by some alternative, except marks and
    /// the like between [`Other::PunctOrSymbol`] and the letters.
    fn end(&self, scan: &Scan, at: usize) -> usize {
        if matches!(self.contraction, Contraction::Lower | Contraction::AnyCase) {
            let end = scan.contraction(at, self.contraction == Contraction::AnyCase);
            if end > at {
                return end;
            }
        }
        for end in [
            self.letters(scan, at),
            self.numbers(scan, at),
            self.other(scan, at),
        ] {
            if end > at {
                return end;
            }
        }
        self.spaces(scan, at)
    }

    fn letters(&self, scan: &Scan, at: usize) -> usize {
        let class = scan.class(at);
        // `lead?run+`: with the lead when a run follows it, else without.
        let led = |lead: bool, run: u16| {
            if lead {
                let start = at + scan.width(at);
                let end = scan.run(start, run);
                if end > start {
                    return end;
                }
            }
            scan.run(at, run)
        };
        let line_break = matches!(scan.peek(at), Some('\r' | '\n'));
        let any_lead = class & (LETTER | NUMBER) == 0 && !line_break && at < scan.text.len();
        match self.letters {
            Letters::AfterSpace => led(scan.peek(at) == Some(' '), LETTER),
            Letters::AfterAny => led(any_lead, LETTER),
            Letters::MarksAfterAny => led(any_lead, LETTER | MARK),
            Letters::AfterPunct => {
                if scan.peek(at).is_some_and(|c| c.is_ascii_punctuation()) {
                    let end = scan
                        .run_of(at + 1, usize::MAX, |c| c.is_ascii_alphabetic())
                        .0;
                    if end > at + 1 {
                        return end;
                    }
                }
                let lead = class & (LETTER | PUNCT | SYMBOL) == 0 && !line_break;
                led(lead, LETTER | MARK)
            }
            Letters::Cased => self.cased(scan, at, any_lead, 0),
            Letters::HanOrCased => match scan.run(at, HAN) {
                end if end > at => end,
                _ => self.cased(scan, at, any_lead, HAN),
            },
            Letters::Phrase => match any_lead {
                true if scan.class(at + scan.width(at)) & LETTER != 0 => {
                    phrase(scan, at + scan.width(at))
                }
                _ => phrase(scan, at),
            },
        }
    }

    fn cased(&self, scan: &Scan, at: usize, lead: bool, without: u16) -> usize {
        let after_lead = if lead { at + scan.width(at) } else { at };
        let upper = |c| {
            let class = scan.k.of(c);
            class & UPPERISH != 0 && class & without == 0
        };
        let lower = |c| {
            let class = scan.k.of(c);
            class & LOWERISH != 0 && class & without == 0
        };
        let starts = [after_lead, at];
        let starts = if lead { &starts[..] } else { &starts[1..] };
        // U*W+: U takes all it can and gives back until a W begins.
        let mut end = at;
        for &start in starts {
            let run = scan.run_of(start, usize::MAX, upper).0;
            end = scan.run_of(run, usize::MAX, lower).0;
            if end == run {
                end = scan.text[start..run]
                    .char_indices()
                    .rfind(|&(_, c)| lower(c))
                    .map_or(at, |(offset, c)| start + offset + c.len_utf8());
            }
            if end > at {
                break;
            }
        }
        // U+W*: only reached where no W follows, so it is U+.
        if end == at {
            for &start in starts {
                let run = scan.run_of(start, usize::MAX, upper).0;
                if run > start {
                    end = run;
                    break;
                }
            }
        }
        if end > at && self.contraction == Contraction::Suffix {
            end = scan.contraction(end, true);
        }
        end
    }

    fn numbers(&self, scan: &Scan, at: usize) -> usize {
        match self.numbers {
            Numbers::None => at,
            Numbers::AfterSpace => {
                let start = at + usize::from(scan.peek(at) == Some(' '));
                let end = scan.run(start, NUMBER);
                if end > start { end } else { at }
            }
            Numbers::UpTo(max) => scan.run_of(at, max, |c| scan.k.of(c) & NUMBER != 0).0,
        }
    }

    fn other(&self, scan: &Scan, at: usize) -> usize {
        let held = |c| {
            let class = scan.k.of(c);
            match self.other {
                Other::NotWord => class & (SPACE | LETTER | NUMBER) == 0,
                Other::NotWordOrMark => class & (SPACE | LETTER | MARK | NUMBER) == 0,
                Other::PunctOrSymbol => class & (PUNCT | SYMBOL) != 0,
            }
        };
        // Without a tail, line breaks are white space and so never in X.
        let start = at + usize::from(scan.peek(at) == Some(' '));
        let end = scan.run_of(start, usize::MAX, held).0;
        if end == start {
            return at;
        }
        let max = if self.tail == Tail::OneBreakOrSlash {
            1
        } else {
            usize::MAX
        };
        match self.tail {
            Tail::None => end,
            Tail::Breaks => scan.run_of(end, max, |c| matches!(c, '\r' | '\n')).0,
            Tail::BreaksOrSlashes | Tail::OneBreakOrSlash => {
                scan.run_of(end, max, |c| matches!(c, '\r' | '\n' | '/')).0
            }
        }
    }

    fn spaces(&self, scan: &Scan, at: usize) -> usize {
        if self.spaces == Spaces::OneBreakFirst && matches!(scan.peek(at), Some('\r' | '\n')) {
            return at + 1;
        }
        if matches!(self.spaces, Spaces::BreaksFirst | Spaces::Cascade)
            && let Some(end) = scan.last_break(at)
        {
            return end;
        }
        let max = if self.spaces == Spaces::Cascade {
            513
        } else {
            usize::MAX
        };
        let (end, count) = scan.run_of(at, max, |c| scan.k.of(c) & SPACE != 0);
        let at_end = end == scan.text.len();
        if self.spaces == Spaces::Cascade {
            let fits = |&n: &usize| count > n || (count == n && at_end);
            let take = [512, 256, 128, 64, 32, 16, 8, 4, 2]
                .into_iter()
                .find(fits)
                .unwrap_or(1);
            return scan.run_of(at, take.min(count), |_| true).0;
        }
        match scan.text[at..end].char_indices().next_back() {
            Some((last, _)) if count > 1 && !at_end => at + last,
            _ => end,
        }
    }
}

/// `(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+`
fn phrase(scan: &Scan, at: usize) -> usize {
    let mut end = at;
    loop {
        let start = match scan.peek(end) {
            Some(' ') if end > at => end + 1,
            _ => end,
        };
        if scan.class(start) & LETTER == 0 {
            return end;
        }
        end = scan.run(start + scan.width(start), MARK);
    }
}
