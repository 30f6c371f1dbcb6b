//! The answers of a chat model, told apart as they come: what each event adds to which answer, in no
//! API's shape yet.

use crate::answers::{Answers, Next, TextChunk};
use crate::app::fresh_id;
use crate::conversation::ChatPrompt;
use crate::error::ApiError;
use crate::output::{Delta, OutputParser};
use ferrum_engine::FinishReason;
use ferrum_engine::engine::Usage;
use ferrum_engine::sampler::Logprobs;
use serde_json::{Value, json};

/// Why an answer ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum End {
    /// By itself, or at this stop string.
    Stop(Option<String>),
    /// It was long enough.
    Length,
    /// To have tools called.
    Calls,
}

/// What an event adds to an answer.
#[derive(Debug)]
pub(crate) struct Part {
    /// Whether it is the first of its answer.
    pub(crate) first: bool,
    pub(crate) deltas: Vec<Delta>,
    /// Whether it is a token that only added to reasoning.
    pub(crate) is_reasoning: bool,
    pub(crate) logprobs: Option<Logprobs>,
    pub(crate) end: Option<End>,
}

/// All answers to a request.
pub(crate) struct ChatOutput {
    parsers: Vec<OutputParser>,
    started: Vec<bool>,
    /// Whether what each answer said last was reasoning.
    reasons: Vec<bool>,
}

impl ChatOutput {
    pub(crate) fn new(prompt: &ChatPrompt, answers: usize) -> Self {
        let parser = |_| OutputParser::new(prompt.output_format.clone());
        Self {
            parsers: (0..answers).map(parser).collect(),
            started: vec![false; answers],
            reasons: vec![false; answers],
        }
    }

    /// Takes what came of an answer.
    pub(crate) fn part(&mut self, mut piece: TextChunk) -> Part {
        let stop = piece.stop_string();
        let parser = &mut self.parsers[piece.index];
        let first = !std::mem::replace(&mut self.started[piece.index], true);
        let mut deltas = parser.push(&piece.text);
        if let Some(reason) = piece.finish {
            let ended = reason == FinishReason::Stop && stop.is_none();
            deltas.extend(parser.finish(!ended));
        }
        let has_calls = parser.has_calls();
        let reasons = &mut self.reasons[piece.index];
        if let Some(last) = deltas.last() {
            *reasons = matches!(last, Delta::Reasoning(_));
        }
        let finish = piece.finish;
        Part {
            first,
            deltas,
            is_reasoning: finish.is_none() && *reasons,
            // Chats list what was said.
            logprobs: piece.logprobs.filter(|_| finish.is_none()),
            end: finish.map(|reason| match reason {
                FinishReason::Length => End::Length,
                _ if has_calls => End::Calls,
                _ => End::Stop(stop),
            }),
        }
    }
}

/// What a stretch of an answer is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Kind {
    Reasoning,
    Text,
    /// A call of this function; its text are the arguments.
    Call(String),
}

/// A stretch of an answer of one kind.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Block {
    pub(crate) kind: Kind,
    /// A part of names that no other block has.
    pub(crate) tag: String,
    pub(crate) text: String,
    /// Of the tokens of a text, where they were asked for.
    pub(crate) logprobs: Vec<Logprobs>,
}

impl Block {
    /// The arguments of a call as an object. Those that are none, as when the answer was cut, are empty.
    pub(crate) fn arguments(&self) -> Value {
        let parsed = serde_json::from_str(&self.text).ok();
        parsed.filter(Value::is_object).unwrap_or_else(|| json!({}))
    }
}

/// What happens to the last block.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Change {
    Begins,
    /// By this text, of these tokens where their log-probabilities were asked for.
    Grows(String, Vec<Logprobs>),
    Ends,
}

/// One answer as blocks, one after the other.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    list: Vec<Block>,
    is_open: bool,
    /// Of tokens whose text is not certain yet.
    pending: Vec<Logprobs>,
    /// Tokens that only added to reasoning.
    reasoning_tokens: usize,
    end: Option<End>,
}

impl Blocks {
    pub(crate) fn list(&self) -> &[Block] {
        &self.list
    }

    pub(crate) fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    /// Why it ended.
    pub(crate) fn end(&self) -> Option<&End> {
        self.end.as_ref()
    }

    /// Takes a part, and tells of each change with the place of the block.
    pub(crate) fn add(&mut self, part: Part, mut tell: impl FnMut(usize, &Block, Change)) {
        self.reasoning_tokens += usize::from(part.is_reasoning);
        // Those of reasoning and of marks are not listed.
        let mut own = part.logprobs.filter(|_| !part.is_reasoning);
        if part.deltas.is_empty() {
            self.pending.extend(own.take());
        }
        for delta in part.deltas {
            let mut logprobs = std::mem::take(&mut self.pending);
            match &delta {
                Delta::Content(_) => logprobs.extend(own.take()),
                _ => logprobs.clear(),
            }
            let (kind, text) = match delta {
                Delta::Reasoning(text) => (Some(Kind::Reasoning), text),
                Delta::Content(text) => (Some(Kind::Text), text),
                Delta::CallBegins(_, name) => (Some(Kind::Call(name)), String::new()),
                Delta::CallArguments(_, text) => (None, text),
            };
            if let Some(kind) = kind {
                self.turn_to(kind, &mut tell);
            }
            self.grow(text, logprobs, &mut tell);
        }
        if part.end.is_some() {
            if self.list.is_empty() {
                // Clients look at the first block without asking whether there is one.
                self.turn_to(Kind::Text, &mut tell);
            }
            self.close(&mut tell);
            self.end = part.end;
        }
    }

    /// Goes on with a block of this kind.
    fn turn_to(&mut self, kind: Kind, tell: &mut impl FnMut(usize, &Block, Change)) {
        let same = |block: &Block| block.kind == kind && !matches!(kind, Kind::Call(_));
        if self.is_open && self.list.last().is_some_and(same) {
            return;
        }
        self.close(tell);
        let block = Block {
            kind,
            tag: fresh_id(""),
            text: String::new(),
            logprobs: Vec::new(),
        };
        tell(self.list.len(), &block, Change::Begins);
        self.list.push(block);
        self.is_open = true;
    }

    fn grow(
        &mut self,
        text: String,
        logprobs: Vec<Logprobs>,
        tell: &mut impl FnMut(usize, &Block, Change),
    ) {
        let at = self.list.len().saturating_sub(1);
        if let Some(block) = self.list.last_mut()
            && !text.is_empty()
        {
            block.text.push_str(&text);
            block.logprobs.extend_from_slice(&logprobs);
            tell(at, block, Change::Grows(text, logprobs));
        }
    }

    fn close(&mut self, tell: &mut impl FnMut(usize, &Block, Change)) {
        if let Some(block) = self.list.last()
            && std::mem::take(&mut self.is_open)
        {
            tell(self.list.len() - 1, block, Change::Ends);
        }
    }
}

/// Waits for an answer of which there is one.
pub(crate) async fn whole(
    answers: &mut Answers,
    mut output: ChatOutput,
) -> Result<(Blocks, Usage), ApiError> {
    let mut blocks = Blocks::default();
    let mut usage = Usage::default();
    while let Some(next) = answers.next().await {
        match next {
            Next::Failed(error) => return Err(error),
            Next::Done(total) => usage = total,
            Next::Prompt(..) | Next::Embedding(..) => {}
            Next::TextChunk(piece) => blocks.add(output.part(piece), |_, _, _| ()),
        }
    }
    Ok((blocks, usage))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answers::Timings;
    use crate::output::OutputFormat;

    const TEXT: &str = "<think>\nHm.\n</think>\n\nLet me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": {\"b\"";

    fn piece(text: &str, finish: Option<FinishReason>) -> TextChunk {
        TextChunk {
            index: 0,
            text: text.into(),
            logprobs: None,
            finish,
            stop: None,
            token: None,
            timings: Timings::default(),
        }
    }

    /// The blocks of an answer in these pieces, after holding what was told against them.
    fn blocks<'a>(
        pieces: impl IntoIterator<Item = &'a str>,
        finish: FinishReason,
    ) -> Vec<(Kind, String)> {
        let prompt = ChatPrompt {
            must_call: false,
            images: Vec::new(),
            tokens: Vec::new(),
            output_format: OutputFormat {
                reasoning: true,
                max_calls: 8,
                ..OutputFormat::default()
            },
        };
        let mut output = ChatOutput::new(&prompt, 1);
        let mut blocks = Blocks::default();
        let mut told: Vec<(String, bool)> = Vec::new();
        let pieces = pieces.into_iter().map(|text| piece(text, None));
        for piece in pieces.chain([piece("", Some(finish))]) {
            blocks.add(output.part(piece), |at, _, change| match change {
                Change::Begins => {
                    assert!(told.iter().all(|(_, ended)| *ended));
                    assert_eq!(at, told.len());
                    told.push((String::new(), false));
                }
                Change::Grows(text, _) => told[at].0 += &text,
                Change::Ends => told[at].1 = true,
            });
        }
        let list = blocks.list().iter();
        let list: Vec<_> = list.map(|b| (b.kind.clone(), b.text.clone())).collect();
        assert!(told.iter().all(|(_, ended)| *ended));
        let told = told.iter().map(|(text, _)| text);
        assert!(told.eq(list.iter().map(|(_, text)| text)));
        list
    }

    #[test]
    fn kinds_of_text_become_blocks_wherever_pieces_end() {
        let call = |name: &str| Kind::Call(name.into());
        let mut expected = vec![
            (Kind::Reasoning, "Hm.".to_owned()),
            (Kind::Text, "Let me see.".to_owned()),
            (call("f"), "{\"a\": 1}".to_owned()),
            (call("g"), "{\"b\"".to_owned()),
        ];
        assert_eq!(blocks([TEXT], FinishReason::Length), expected);
        // What the model did not end by itself stays as it is; what it did is an object.
        expected[3].1 = "{\"b\": null}".into();
        for cut in 1..TEXT.len() {
            let (left, right) = TEXT.split_at(cut);
            assert_eq!(
                blocks([left, right], FinishReason::Stop),
                expected,
                "{left:?}"
            );
        }
    }

    #[test]
    fn an_answer_has_a_block() {
        let empty = vec![(Kind::Text, String::new())];
        assert_eq!(blocks([""], FinishReason::Stop), empty);
    }

    #[test]
    fn arguments_are_an_object() {
        for (text, expected) in [
            ("{\"a\": 1}", json!({"a": 1})),
            ("{\"a\"", json!({})),
            ("[1]", json!({})),
        ] {
            let block = Block {
                kind: Kind::Call("f".into()),
                tag: String::new(),
                text: text.into(),
                logprobs: Vec::new(),
            };
            assert_eq!(block.arguments(), expected);
        }
    }
}
