//! Words that are not broken at a terminal's right margin, while text comes in pieces.
//!
//! A word is held back until it ends, and goes to the next line where it would cross the margin. Nothing
//! but line breaks is added. Lines between code fences are left alone, and so is a word that is longer
//! than a line: the terminal breaks those.

use unicode_width::UnicodeWidthChar;

/// Narrower terminals are left to break lines themselves.
const NARROWEST: usize = 20;

/// Columns between the stops of a tabulator.
const TAB: usize = 8;

/// What is shown next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Some of the text.
    Text(String),
    /// An end of line that the text does not have.
    Break,
}

/// Parts as they are shown.
pub(super) fn joined(parts: Vec<Part>) -> String {
    let text = parts.into_iter().map(|part| match part {
        Part::Text(text) => text,
        Part::Break => "\n".to_owned(),
    });
    text.collect()
}

/// A whole text for a terminal of `width` columns; 0: as it is.
pub(super) fn wrapped(text: &str, width: usize) -> String {
    let mut wrap = Wrap::default();
    let mut parts = wrap.push(text, width);
    parts.extend(wrap.finish(width));
    joined(parts)
}

/// Wraps text for a terminal.
#[derive(Debug, Default)]
pub(super) struct Wrap {
    /// Columns that are taken of the current line.
    column: usize,
    /// A word that has not ended, and its columns.
    word: String,
    word_width: usize,
    /// Whether the word is longer than a line, and is shown as it comes.
    long: bool,
    /// The text's current line without the spaces before it, as much of it as a fence could have.
    head: String,
    code: bool,
}

/// Most bytes of a line that is a fence.
const FENCE: usize = 100;

impl Wrap {
    /// Takes a piece of the text, for a terminal of `width` columns, and gives what can be shown.
    pub(super) fn push(&mut self, text: &str, width: usize) -> Vec<Part> {
        let mut out = Output::new(width);
        for c in text.chars() {
            match c {
                '\n' => self.end_line(&mut out),
                c if self.code => {
                    self.note(c);
                    out.text(c.encode_utf8(&mut [0; 4]));
                }
                ' ' | '\t' => {
                    self.end_word(&mut out);
                    self.space(c, &mut out);
                }
                c => self.letter(c, &mut out),
            }
        }
        out.parts
    }

    /// What was held back, at the end of the text.
    pub(super) fn finish(&mut self, width: usize) -> Vec<Part> {
        let mut out = Output::new(width);
        self.end_word(&mut out);
        out.parts
    }

    fn note(&mut self, c: char) {
        // Spaces at the beginning belong to no fence.
        if self.head.len() <= FENCE && !(self.head.is_empty() && c.is_whitespace()) {
            self.head.push(c);
        }
    }

    fn end_line(&mut self, out: &mut Output) {
        self.end_word(out);
        let head = self.head.trim_end();
        let mark = head.chars().next().filter(|mark| ['`', '~'].contains(mark));
        let rest = mark.map_or(head, |mark| head.trim_start_matches(mark));
        if head.len() - rest.len() >= 3 && head.len() <= FENCE {
            // Backticks in the rest of a line make it code inside of a line.
            self.code = match self.code {
                true => !rest.is_empty(),
                false => !rest.contains('`'),
            };
        }
        out.text("\n");
        self.head.clear();
        self.column = 0;
    }

    fn space(&mut self, c: char, out: &mut Output) {
        let next = match c {
            '\t' => ((self.column / TAB + 1) * TAB).min(out.width),
            _ => self.column + 1,
        };
        // The last column may be a space's, never a word's: a line that ends with one is not full.
        if self.column >= out.width {
            out.line_break();
            self.column = 1;
        } else {
            self.column = next;
        }
        self.note(c);
        out.text(c.encode_utf8(&mut [0; 4]));
    }

    fn letter(&mut self, c: char, out: &mut Output) {
        let width = c.width().unwrap_or(0);
        // Scripts with wide characters have no spaces: a line may end after each.
        let wide = width > 1;
        if wide {
            self.end_word(out);
        }
        self.word.push(c);
        self.word_width += width;
        if self.long {
            out.text(&std::mem::take(&mut self.word));
            self.advance(width, out.width);
            self.word_width = 0;
        } else if self.word_width >= out.width {
            if self.column > 0 {
                out.line_break();
                self.column = 0;
            }
            let (word, width) = self.take_word();
            out.text(&word);
            self.advance(width, out.width);
            self.long = true;
        } else if wide {
            self.end_word(out);
        }
    }

    /// Where the terminal is after characters that it breaks itself.
    fn advance(&mut self, width: usize, line: usize) {
        self.column += width;
        if self.column > line {
            self.column = width.min(line);
        }
    }

    fn take_word(&mut self) -> (String, usize) {
        let word = std::mem::take(&mut self.word);
        for c in word.chars() {
            self.note(c);
        }
        (word, std::mem::take(&mut self.word_width))
    }

    fn end_word(&mut self, out: &mut Output) {
        self.long = false;
        if self.word.is_empty() {
            return;
        }
        if self.column > 0 && self.column + self.word_width >= out.width {
            out.line_break();
            self.column = 0;
        }
        let (word, width) = self.take_word();
        out.text(&word);
        self.column += width;
    }
}

/// Parts for a width.
struct Output {
    /// Columns of a line, or as good as endless.
    width: usize,
    parts: Vec<Part>,
}

impl Output {
    fn new(width: usize) -> Self {
        Self {
            width: if width < NARROWEST { usize::MAX } else { width },
            parts: Vec::new(),
        }
    }

    fn text(&mut self, text: &str) {
        if let Some(Part::Text(last)) = self.parts.last_mut() {
            last.push_str(text);
        } else if !text.is_empty() {
            self.parts.push(Part::Text(text.to_owned()));
        }
    }

    fn line_break(&mut self) {
        self.parts.push(Part::Break);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use unicode_width::UnicodeWidthStr;

    /// All parts of a text that comes in pieces.
    fn parts(pieces: &[&str], width: usize) -> Vec<Part> {
        let mut wrap = Wrap::default();
        let mut parts: Vec<_> = pieces
            .iter()
            .flat_map(|piece| wrap.push(piece, width))
            .collect();
        parts.extend(wrap.finish(width));
        parts
    }

    fn shown(parts: &[Part]) -> String {
        joined(parts.to_vec())
    }

    #[test]
    fn words_go_to_the_next_line_whole() {
        let cases = [
            ("", ""),
            ("short line\n", "short line\n"),
            (
                "the quick brown fox jumps over it",
                "the quick brown fox \njumps over it",
            ),
            // Nineteen columns fit, and the last is a space's.
            ("abcdefghi abcdefghi x", "abcdefghi abcdefghi \nx"),
            ("abcdefghi abcdefghij x", "abcdefghi \nabcdefghij x"),
            (
                "see https://example.org/a/long/path now",
                "see \nhttps://example.org/a/long/path now",
            ),
            ("你好你好你好你好你好你好", "你好你好你好你好你\n好你好"),
            (
                "a\n```rust\nlet a_line = that(is).far_too_long();\n```\nthe quick brown fox jumps",
                "a\n```rust\nlet a_line = that(is).far_too_long();\n```\nthe quick brown fox \njumps",
            ),
            (
                "```not a fence``` but a long line",
                "```not a fence``` \nbut a long line",
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(shown(&parts(&[text], 20)), expected, "{text}");
        }
        // A narrow terminal breaks lines itself.
        let text = "the quick brown fox";
        assert_eq!(shown(&parts(&[text], 10)), text);
    }

    #[test]
    fn a_resized_terminal_counts_from_then_on() {
        let mut wrap = Wrap::default();
        let mut parts = wrap.push("the quick brown fox jumps ", 40);
        parts.extend(wrap.push("over the dog", 30));
        parts.extend(wrap.finish(30));
        assert_eq!(shown(&parts), "the quick brown fox jumps \nover the dog");
    }

    fn words() -> impl Strategy<Value = String> {
        let word = prop_oneof![
            "[a-z]{1,12}",
            "[a-z]{25,45}",
            "[你好世界é\u{301}]{1,6}",
            Just(" ".to_owned()),
            Just("\t".to_owned()),
            Just("\n".to_owned()),
            Just("\n```\n".to_owned()),
            Just("`".to_owned()),
        ];
        prop::collection::vec(word, 0..60).prop_map(|words| words.join(" ").replace(" \n", "\n"))
    }

    proptest! {
        #[test]
        fn nothing_is_added_but_breaks(text in words(), cuts in prop::collection::vec(0usize..400, 0..8), width in 20usize..60) {
            let whole = parts(&[&text], width);
            let kept: String = whole.iter().filter_map(|part| match part {
                Part::Text(text) => Some(text.as_str()),
                Part::Break => None,
            }).collect();
            prop_assert_eq!(&kept, &text);
            // However it comes in pieces, the same is shown.
            let mut cuts: Vec<_> = cuts.into_iter().filter(|&at| text.is_char_boundary(at)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<_> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            prop_assert_eq!(shown(&parts(&pieces, width)), shown(&whole));
        }

        #[test]
        fn no_line_is_too_long_but_for_a_long_word(text in words(), width in 20usize..60) {
            let text = text.replace('`', "").replace('\t', " ");
            for line in shown(&parts(&[&text], width)).lines() {
                let longest = line.split(' ').map(UnicodeWidthStr::width).max().unwrap_or(0);
                prop_assert!(line.width() <= width || longest >= width, "{line:?}");
            }
        }
    }
}
