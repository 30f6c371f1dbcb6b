//! What becomes of a step's rows: the next token of a sequence, an embedding, log-probabilities of a prompt.

use super::answer::{Chosen, Ending};
use super::request::{EngineError, Event, StopMatch};
use super::step_loop::StepLoop;
use crate::FinishReason;
use crate::sampler::{has_number, logprobs};
use crate::scheduler::Work;
use ferrum_models::RowOutput;
use ferrum_types::SeqId;
use std::ops::Range;

impl StepLoop<'_> {
    /// The next token of a sequence, from a row of logits.
    pub(super) fn advance(&mut self, id: SeqId, row: usize) {
        let seq = self.scheduler.sequence(id);
        let (Some(answer), Some(seq)) = (self.answers.get_mut(&id), seq) else {
            return;
        };
        if seq.due() == 0 {
            // A row of a draft that was wrong before.
            return;
        }
        if answer.max_tokens == 0 {
            return self.finish(id, FinishReason::Length.into());
        }
        let before = self.chosen.get_mut(row).and_then(Option::take);
        let chosen = before.unwrap_or_else(|| match self.output.row(row) {
            RowOutput::Token(token, logprobs) => Chosen::Token(token, logprobs.cloned()),
            RowOutput::Logits(logits) => answer.choose(logits, seq.tokens()),
            RowOutput::NoToken(none) => answer.no_token_on_device(none),
            RowOutput::Nothing => Chosen::Failed(EngineError::NotANumber),
        });
        let (token, logprobs) = match chosen {
            Chosen::Token(token, logprobs) => {
                self.shared.numbers_came();
                (token, logprobs)
            }
            Chosen::End => return self.finish(id, FinishReason::Stop.into()),
            Chosen::Failed(error) => return self.fail_answer(id, error),
        };
        let Some(open) = self.open.get_mut(&answer.request) else {
            return;
        };
        // What ends an answer was generated, too: OpenAI and vLLM count it.
        open.usage.completion_tokens += 1;
        self.generated += 1;
        if open.stop_tokens.contains(&token) {
            let ending = Ending {
                stop: Some(StopMatch::Token(token)),
                logprobs,
                ..FinishReason::Stop.into()
            };
            return self.finish(id, ending);
        }
        let text = match answer.push(token) {
            Ok(text) => text,
            Err(error) => return self.fail_answer(id, error),
        };
        let event = Event::Token {
            choice: answer.choice,
            token,
            text,
            logprobs,
        };
        let gone = open.events.try_send(event).is_err();
        let has_room = self.scheduler.append(id, token);
        let ending = match gone {
            true => Some(FinishReason::Cancelled.into()),
            false => answer.ending(has_room),
        };
        if let Some(ending) = ending {
            self.finish(id, ending);
        }
    }

    /// Goes through the rows of a draft for as long as it is right.
    pub(super) fn verify(&mut self, work: &Work, rows: Range<usize>) {
        let before = self.generated;
        for row in rows {
            self.advance(work.seq, row);
        }
        // One of them would have come without a draft.
        let right = (self.generated - before).saturating_sub(1);
        self.drafted.0 += work.draft as u64;
        self.drafted.1 += right;
        self.drafts.add(work.draft, right as usize);
        let answer = self.answers.get_mut(&work.seq);
        if let Some(lookup) = answer.and_then(|answer| answer.lookup.as_mut()) {
            lookup.learn(work.draft, right as usize);
        }
        if let Some(draft) = &mut self.draft {
            draft.learn(work.seq, work.draft, right as usize);
        }
    }

    /// Takes the hidden states of a sequence, which are rows from `first` on. When they are all there,
    /// the sequence has what it came for.
    pub(super) fn pool(&mut self, work: &Work, first: usize) {
        let Some(answer) = self.answers.get_mut(&work.seq) else {
            return;
        };
        let (Some(pool), Some(seq)) = (&mut answer.pool, self.scheduler.sequence(work.seq)) else {
            return;
        };
        let dim = self.runner.spec().hidden_size;
        let rows = work.hidden_rows();
        let end = work.start + work.len;
        for (i, position) in (end - rows..end).enumerate() {
            pool.add(position, &self.output.hidden()[(first + i) * dim..][..dim]);
        }
        if end < seq.prompt_len() {
            return;
        }
        let vector = pool.vector();
        if vector.iter().any(|x| x.is_nan()) {
            return self.fail_answer(work.seq, EngineError::NotANumber);
        }
        self.shared.numbers_came();
        if let Some(open) = self.open.get_mut(&answer.request) {
            // Whoever is gone has cancelled, too.
            let _ = open.events.try_send(Event::Embedding(vector));
        }
        self.finish(work.seq, FinishReason::Stop.into());
    }

    /// Log-probabilities of the prompt tokens after those in `work`, whose logits begin at `first`.
    pub(super) fn give_prompt_logprobs(&mut self, work: &Work, first: usize) {
        let Some(answer) = self.answers.get(&work.seq) else {
            return;
        };
        let seq = self.scheduler.sequence(work.seq);
        let open = self.open.get_mut(&answer.request);
        let (Some(seq), Some(open)) = (seq, open) else {
            return;
        };
        let Some(top) = open.prompt_logprobs else {
            return;
        };
        // The logits of a position speak of the next token. Rows that were there before a preemption
        // are not given twice.
        let end = (work.start + work.len).min(seq.prompt_len() - 1);
        let fresh = work.start.max(open.prompt_rows)..end;
        if fresh.is_empty() {
            return;
        }
        open.prompt_rows = end;
        let of = |at: usize| match self.output.row(first + at - work.start) {
            RowOutput::Logits(row) if has_number(row) => {
                Some(logprobs(row, seq.tokens()[at + 1], top))
            }
            _ => None,
        };
        let Some(found) = fresh.map(of).collect() else {
            return self.fail_answer(work.seq, EngineError::NotANumber);
        };
        let event = Event::PromptLogprobs(found);
        // Whoever is gone has cancelled, too.
        let _ = open.events.try_send(event);
    }
}
