//! Harmony, of gpt-oss: an answer is a row of messages, each with a header and a channel. `analysis` is
//! reasoning, `commentary` to `functions.name` a call, all else content:
//!
//! `<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.name`
//! ` <|constrain|>json<|message|>{…}<|call|>`
//!
//! The recipient may stand before the channel. Arguments are given as they come. A text without headers is
//! content.

use super::definition::FormatDefinition;
use super::deltas::Deltas;
use super::grammar::{CallGrammar, Markers, Rules, lark_string};
use super::pending_text::{PendingText, PrefixMatch, begins};
use super::reader::{CallReader, Step};
use super::{OutputFormat, json};

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const CONSTRAIN: &str = "<|constrain|>";
const END: &str = "<|end|>";
const CALL: &str = "<|call|>";
const RETURN: &str = "<|return|>";
const RECIPIENT: &str = "to=";
const NAMESPACE: &str = "functions.";
const ROLE: &str = "assistant";

/// What ends a message.
const ENDS: [&str; 5] = [END, CALL, RETURN, START, CHANNEL];

/// Most bytes of a header.
const MAX_HEADER_BYTES: usize = 512;

pub(super) const DEFINITION: FormatDefinition = FormatDefinition {
    name: "harmony",
    template: &[&[CHANNEL, MESSAGE]],
    openers: &[],
    markers: &[START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN],
    bare: None,
    reader,
    rules,
};

/// What an answer begins with that goes on from a text of the client's.
pub(super) const FINAL: &str = "<|channel|>final<|message|>";

fn reader(output_format: &OutputFormat, _: &'static str) -> Box<dyn CallReader> {
    Box::new(Reader {
        state: match output_format.reasoning {
            true => State::Between,
            // Its header is in the prompt.
            false => State::Body(Body::Content),
        },
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Body {
    Reasoning,
    Content,
}

#[derive(Debug)]
enum State {
    /// Where a message begins.
    Between,
    Header,
    Body(Body),
    /// Before the arguments of a call of this function.
    Call(String),
    Arguments,
}

#[derive(Debug)]
struct Reader {
    state: State,
}

impl Reader {
    fn between(&mut self, held: &mut PendingText, deltas: &mut Deltas, end: bool) -> Step {
        if !held.skip_space() {
            return Step::Wait;
        }
        let text = held.text();
        if let Some(marker) = [END, CALL, RETURN]
            .iter()
            .find(|marker| text.starts_with(**marker))
        {
            held.commit(marker.len());
            return Step::Again;
        }
        let heads = [START, CHANNEL, MESSAGE, CONSTRAIN, RECIPIENT];
        let known: Vec<_> = heads.iter().map(|marker| begins(text, marker)).collect();
        let ends = [END, CALL, RETURN]
            .iter()
            .map(|marker| begins(text, marker));
        let maybe = known
            .iter()
            .copied()
            .chain(ends)
            .any(|b| b == PrefixMatch::Maybe);
        if known.contains(&PrefixMatch::Yes) {
            self.state = State::Header;
        } else if maybe && !end {
            return Step::Wait;
        } else if maybe && text.len() > 2 {
            // A marker that was cut.
            held.commit(held.text().len());
        } else {
            // Space before a plain text is part of it.
            deltas.content(&held.rollback());
            self.state = State::Body(Body::Content);
        }
        Step::Again
    }

    fn header(&mut self, held: &mut PendingText, deltas: &mut Deltas, end: bool) -> Step {
        let (text, is_cut) = held.front(MAX_HEADER_BYTES);
        let Some(at) = text.find(MESSAGE) else {
            if is_cut {
                return self.plain(held, deltas);
            }
            if !end {
                return Step::Wait;
            }
            if !is_cut_header(text) {
                return self.plain(held, deltas);
            }
            held.commit(held.text().len());
            self.state = State::Between;
            return Step::Again;
        };
        let header = &text[..at];
        if !is_header(header) {
            return self.plain(held, deltas);
        }
        let is_part = |c: char| !c.is_whitespace() && c != '<';
        let word = |marker: &str| {
            let (_, rest) = header.split_once(marker)?;
            let rest = rest.trim_start();
            Some(&rest[..rest.find(|c| !is_part(c)).unwrap_or(rest.len())])
        };
        let recipient = word(RECIPIENT).and_then(|to| to.strip_prefix(NAMESPACE));
        self.state = match (recipient, word(CHANNEL)) {
            (Some(name), _) if !name.is_empty() && deltas.may_call() => {
                State::Call(name.to_owned())
            }
            (_, Some("analysis")) => State::Body(Body::Reasoning),
            _ => State::Body(Body::Content),
        };
        let bytes = at + MESSAGE.len();
        match self.state {
            State::Call(_) => held.consume(bytes),
            _ => {
                held.commit(bytes);
                deltas.trim(true);
            }
        }
        Step::Again
    }

    /// What began like a header is none: its first marker is text, and so is what follows.
    fn plain(&mut self, held: &mut PendingText, deltas: &mut Deltas) -> Step {
        let markers = [START, CHANNEL, MESSAGE, CONSTRAIN, RECIPIENT];
        let marker = markers
            .iter()
            .find(|marker| held.text().starts_with(**marker));
        held.consume(marker.map_or(0, |marker| marker.len()));
        deltas.content(&held.rollback());
        self.state = State::Body(Body::Content);
        Step::Again
    }

    fn body(&mut self, body: Body, held: &mut PendingText, deltas: &mut Deltas, end: bool) -> Step {
        let (text, marker) = held.until(&ENDS, end);
        match body {
            Body::Reasoning => deltas.reasoning(&text),
            Body::Content => deltas.content(&text),
        }
        match marker {
            None => Step::Wait,
            Some(marker) => {
                if [START, CHANNEL].contains(&marker) {
                    // It belongs to the next header.
                    held.put_back(marker);
                }
                held.commit(0);
                self.state = State::Between;
                Step::Again
            }
        }
    }

    fn call(&mut self, held: &mut PendingText, deltas: &mut Deltas, end: bool) -> Step {
        let State::Call(name) = &mut self.state else {
            return Step::Again;
        };
        if !held.skip_space() && !end {
            return Step::Wait;
        }
        let text = held.text();
        let markers = ENDS.iter().map(|marker| begins(text, marker));
        let markers: Vec<_> = markers.collect();
        if text.starts_with('{') {
            held.commit(0);
            deltas.begin_call(std::mem::take(name));
            self.state = State::Arguments;
        } else if text.is_empty() || markers.contains(&PrefixMatch::Yes) {
            held.commit(0);
            deltas.begin_call(std::mem::take(name));
            deltas.arguments(json::NO_ARGUMENTS);
            self.state = State::Between;
        } else if markers.contains(&PrefixMatch::Maybe) && !end {
            return Step::Wait;
        } else {
            deltas.trim(false);
            deltas.content(&held.rollback());
            self.state = State::Body(Body::Content);
        }
        Step::Again
    }
}

impl CallReader for Reader {
    fn read(&mut self, held: &mut PendingText, deltas: &mut Deltas, end: bool) -> Step {
        match &self.state {
            State::Between => self.between(held, deltas, end),
            State::Header => self.header(held, deltas, end),
            State::Body(body) => self.body(*body, held, deltas, end),
            State::Call(_) => self.call(held, deltas, end),
            State::Arguments => match deltas.take_arguments(held) {
                None => Step::Wait,
                Some(_) => {
                    self.state = State::Between;
                    Step::Again
                }
            },
        }
    }
}

/// The words of a header, where markers are words too.
fn words(header: &str) -> impl Iterator<Item = String> {
    let apart = header.replace("<|", " <|").replace("|>", "|> ");
    let words: Vec<_> = apart.split_whitespace().map(str::to_owned).collect();
    words.into_iter()
}

/// What a header may say beside whom it is to and the form of the text.
const WORDS: [&str; 9] = [
    START,
    CHANNEL,
    CONSTRAIN,
    ROLE,
    "analysis",
    "commentary",
    "final",
    "json",
    "code",
];

/// Whether a text before a message's marker says what headers say; else it is none.
fn is_header(text: &str) -> bool {
    let mut last = String::new();
    words(text).all(|word| {
        let form = last == CONSTRAIN && word.bytes().all(|b| b.is_ascii_lowercase());
        let fits = form || word.starts_with(RECIPIENT) || WORDS.contains(&&*word);
        last = word;
        fits
    })
}

/// Whether a header that was cut says nothing that would be lost with it.
fn is_cut_header(text: &str) -> bool {
    let known = |word: &str| {
        let more = [MESSAGE, "to=functions."];
        WORDS
            .iter()
            .chain(&more)
            .any(|known| known.starts_with(word))
    };
    words(text).all(|word| known(&word))
}

fn rules(grammar: &mut CallGrammar<'_>) -> Rules {
    let [start, channel, message, constrain, call_end] = [
        grammar.marker(START),
        grammar.marker(CHANNEL),
        grammar.marker(MESSAGE),
        grammar.marker(CONSTRAIN),
        grammar.marker(CALL),
    ];
    let one = grammar.one(|grammar, i, name| {
        let name = lark_string(&format!("commentary {RECIPIENT}{NAMESPACE}{name} "));
        let arguments = grammar.arguments(i);
        format!("{channel} {name} {constrain} \"json\" {message} {arguments}")
    });
    let more = grammar.more(&format!("{call_end} {start} \"{ROLE}\" call"));
    let said = said(grammar.markers, "said", "/analysis|commentary|final/");
    let open = match grammar.markers.token(END) {
        Some(_) => "(?s:.*)",
        // Where markers are text, what they begin with is none.
        None => "([^<]|<[^|])*<?",
    };
    Rules {
        // The marker behind a call ends most answers.
        calls: format!("calls: call{more} {call_end}?\ncall: {one}\n"),
        free: Some(format!(
            "free: (said {start} \"{ROLE}\")* (calls | open)\n\
             open: {channel} /analysis|commentary|final/ {message} OPEN\nOPEN: /{open}/\n{said}"
        )),
    }
}

/// The rule of a message that ends.
fn said(markers: &Markers<'_>, rule: &str, channel: &str) -> String {
    let text = markers.until(&format!("{rule}_text"), "", END);
    format!(
        "{text}{rule}: {} {channel} {} {rule}_text\n",
        markers.lark(CHANNEL),
        markers.lark(MESSAGE)
    )
}

/// What may come before an answer of a form, and its rules.
pub(super) fn thought(markers: &Markers<'_>) -> (String, String) {
    let before = format!("(thinking {} \"{ROLE}\")? ", markers.lark(START));
    (before, said(markers, "thinking", "\"analysis\""))
}

/// What stands before an answer of a form.
pub(super) fn final_mark(markers: &Markers<'_>) -> String {
    format!(
        "{} \"final\" {} ",
        markers.lark(CHANNEL),
        markers.lark(MESSAGE)
    )
}
