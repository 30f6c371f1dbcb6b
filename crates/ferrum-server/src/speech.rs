//! The answers of a chat model, told apart as they come: what each event adds to which answer, in no
//! API's shape yet.

use crate::answers::Piece;
use crate::conversation::ChatPrompt;
use crate::output::{Delta, OutputParser};
use ferrum_engine::FinishReason;
use ferrum_engine::sampler::Logprobs;

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
    pub(crate) logprobs: Option<Logprobs>,
    pub(crate) end: Option<End>,
}

/// All answers to a request.
pub(crate) struct Speech {
    parsers: Vec<OutputParser>,
    started: Vec<bool>,
}

impl Speech {
    pub(crate) fn new(prompt: &ChatPrompt, answers: usize) -> Self {
        let parser = |_| OutputParser::new(prompt.looks);
        Self {
            parsers: (0..answers).map(parser).collect(),
            started: vec![false; answers],
        }
    }

    /// Takes what came of an answer.
    pub(crate) fn part(&mut self, piece: Piece) -> Part {
        let parser = &mut self.parsers[piece.index];
        let first = !std::mem::replace(&mut self.started[piece.index], true);
        let mut deltas = parser.push(&piece.text);
        if piece.finish.is_some() {
            deltas.extend(parser.finish());
        }
        let end = piece.finish.map(|reason| match reason {
            FinishReason::Length => End::Length,
            _ if parser.has_calls() => End::Calls,
            _ => End::Stop(piece.stop),
        });
        Part {
            first,
            deltas,
            logprobs: piece.logprobs,
            end,
        }
    }
}
