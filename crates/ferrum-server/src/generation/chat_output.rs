//! Chat output: turns generation events into API-independent deltas.

use crate::error::ApiError;
use crate::generation::generation_stream::{GenerationEvent, GenerationStream, TextChunk};
use crate::ids::fresh_id;
use crate::output::{Delta, OutputParser};
use crate::prompt::conversation::ChatPrompt;
use ferrum_engine::FinishReason;
use ferrum_engine::engine::Usage;
use ferrum_engine::sampler::Logprobs;
use serde_json::{Value, json};

/// Why a choice ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ChatFinish {
    /// By itself, or at this stop string.
    Stop(Option<String>),
    /// It was long enough.
    Length,
    /// To have tools called.
    Calls,
}

/// What a text chunk adds to a choice.
#[derive(Debug)]
pub(crate) struct ChatOutputDelta {
    /// Whether it is the first of its answer.
    pub(crate) first: bool,
    pub(crate) deltas: Vec<Delta>,
    /// Whether it is a token that only added to reasoning.
    pub(crate) is_reasoning: bool,
    pub(crate) logprobs: Option<Logprobs>,
    pub(crate) finish: Option<ChatFinish>,
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

    /// Consumes one text chunk and returns the deltas it causes.
    pub(crate) fn push(&mut self, mut piece: TextChunk) -> ChatOutputDelta {
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
        ChatOutputDelta {
            first,
            deltas,
            is_reasoning: finish.is_none() && *reasons,
            // Chats list what was said.
            logprobs: piece.logprobs.filter(|_| finish.is_none()),
            finish: finish.map(|reason| match reason {
                FinishReason::Length => ChatFinish::Length,
                _ if has_calls => ChatFinish::Calls,
                _ => ChatFinish::Stop(stop),
            }),
        }
    }
}

/// Kind of a block.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum BlockKind {
    Reasoning,
    Text,
    /// A call of this function; its text are the arguments.
    Call(String),
}

/// Consecutive output of one kind.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Block {
    pub(crate) kind: BlockKind,
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

/// A change of the last block.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum BlockEvent {
    Start,
    /// By this text, of these tokens where their log-probabilities were asked for.
    Delta(String, Vec<Logprobs>),
    Stop,
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
    finish: Option<ChatFinish>,
}

impl Blocks {
    pub(crate) fn list(&self) -> &[Block] {
        &self.list
    }

    pub(crate) fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    /// Why it ended.
    pub(crate) fn finish(&self) -> Option<&ChatFinish> {
        self.finish.as_ref()
    }

    /// Applies a delta and emits an event for each changed block, with the block's index.
    pub(crate) fn add(
        &mut self,
        delta: ChatOutputDelta,
        mut emit: impl FnMut(usize, &Block, BlockEvent),
    ) {
        self.reasoning_tokens += usize::from(delta.is_reasoning);
        // Those of reasoning and of marks are not listed.
        let mut own = delta.logprobs.filter(|_| !delta.is_reasoning);
        if delta.deltas.is_empty() {
            self.pending.extend(own.take());
        }
        for change in delta.deltas {
            let mut logprobs = std::mem::take(&mut self.pending);
            match &change {
                Delta::Content(_) => logprobs.extend(own.take()),
                _ => logprobs.clear(),
            }
            let (kind, text) = match change {
                Delta::Reasoning(text) => (Some(BlockKind::Reasoning), text),
                Delta::Content(text) => (Some(BlockKind::Text), text),
                Delta::CallBegins(_, name) => (Some(BlockKind::Call(name)), String::new()),
                Delta::CallArguments(_, text) => (None, text),
            };
            if let Some(kind) = kind {
                self.turn_to(kind, &mut emit);
            }
            self.grow(text, logprobs, &mut emit);
        }
        if delta.finish.is_some() {
            if self.list.is_empty() {
                // Clients look at the first block without asking whether there is one.
                self.turn_to(BlockKind::Text, &mut emit);
            }
            self.close(&mut emit);
            self.finish = delta.finish;
        }
    }

    /// Goes on with a block of this kind.
    fn turn_to(&mut self, kind: BlockKind, emit: &mut impl FnMut(usize, &Block, BlockEvent)) {
        let same = |block: &Block| block.kind == kind && !matches!(kind, BlockKind::Call(_));
        if self.is_open && self.list.last().is_some_and(same) {
            return;
        }
        self.close(emit);
        let block = Block {
            kind,
            tag: fresh_id(""),
            text: String::new(),
            logprobs: Vec::new(),
        };
        emit(self.list.len(), &block, BlockEvent::Start);
        self.list.push(block);
        self.is_open = true;
    }

    fn grow(
        &mut self,
        text: String,
        logprobs: Vec<Logprobs>,
        emit: &mut impl FnMut(usize, &Block, BlockEvent),
    ) {
        let at = self.list.len().saturating_sub(1);
        if let Some(block) = self.list.last_mut()
            && !text.is_empty()
        {
            block.text.push_str(&text);
            block.logprobs.extend_from_slice(&logprobs);
            emit(at, block, BlockEvent::Delta(text, logprobs));
        }
    }

    fn close(&mut self, emit: &mut impl FnMut(usize, &Block, BlockEvent)) {
        if let Some(block) = self.list.last()
            && std::mem::take(&mut self.is_open)
        {
            emit(self.list.len() - 1, block, BlockEvent::Stop);
        }
    }
}

/// Collects the blocks of the only answer of a stream, for a response that is not streamed.
pub(crate) async fn collect_blocks(
    answers: &mut GenerationStream,
    mut output: ChatOutput,
) -> Result<(Blocks, Usage), ApiError> {
    let mut blocks = Blocks::default();
    let mut usage = Usage::default();
    while let Some(event) = answers.next().await {
        match event {
            GenerationEvent::Failed(error) => return Err(error),
            GenerationEvent::Done(total) => usage = total,
            GenerationEvent::PromptLogprobs(..) | GenerationEvent::Embedding(..) => {}
            GenerationEvent::TextChunk(piece) => blocks.add(output.push(piece), |_, _, _| ()),
        }
    }
    Ok((blocks, usage))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generation::generation_stream::Timings;
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

    /// The blocks of these chunks, after a check that the emitted events agree with them.
    fn blocks<'a>(
        pieces: impl IntoIterator<Item = &'a str>,
        finish: FinishReason,
    ) -> Vec<(BlockKind, String)> {
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
            blocks.add(output.push(piece), |at, _, event| match event {
                BlockEvent::Start => {
                    assert!(told.iter().all(|(_, ended)| *ended));
                    assert_eq!(at, told.len());
                    told.push((String::new(), false));
                }
                BlockEvent::Delta(text, _) => told[at].0 += &text,
                BlockEvent::Stop => told[at].1 = true,
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
        let call = |name: &str| BlockKind::Call(name.into());
        let mut expected = vec![
            (BlockKind::Reasoning, "Hm.".to_owned()),
            (BlockKind::Text, "Let me see.".to_owned()),
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
        let empty = vec![(BlockKind::Text, String::new())];
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
                kind: BlockKind::Call("f".into()),
                tag: String::new(),
                text: text.into(),
                logprobs: Vec::new(),
            };
            assert_eq!(block.arguments(), expected);
        }
    }
}
