//! Processes the output rows of a step: next tokens, embeddings, prompt log-probabilities.

use super::choice::{ChoiceFinish, SampleOutcome};
use super::request::{EngineError, Event, StopMatch};
use super::state::StepLoop;
use crate::FinishReason;
use crate::sampler::{has_number, logprobs};
use crate::scheduler::ScheduledSequence;
use ferrum_models::RowOutput;
use ferrum_types::SeqId;
use std::ops::Range;

impl StepLoop<'_> {
    /// Appends the next token of a sequence, which is read or sampled from a row.
    pub(super) fn process_token_row(&mut self, id: SeqId, row: usize) {
        let seq = self.scheduler.sequence(id);
        let (Some(choice), Some(seq)) = (self.choices.get_mut(&id), seq) else {
            return;
        };
        if seq.pending_tokens() == 0 {
            // The draft was rejected at an earlier row.
            return;
        }
        if choice.max_tokens == 0 {
            return self.finish(id, FinishReason::Length.into());
        }
        let before = self.chosen.get_mut(row).and_then(Option::take);
        let chosen = before.unwrap_or_else(|| match self.output.row(row) {
            RowOutput::Token(token, logprobs) => SampleOutcome::Token(token, logprobs.cloned()),
            RowOutput::Logits(logits) => choice.choose(logits, seq.tokens()),
            RowOutput::NoToken(none) => choice.no_token_on_device(none),
            RowOutput::Nothing => SampleOutcome::Failed(EngineError::NotANumber),
        });
        let (token, logprobs) = match chosen {
            SampleOutcome::Token(token, logprobs) => {
                self.shared.reset_nan_streak();
                (token, logprobs)
            }
            SampleOutcome::End => return self.finish(id, FinishReason::Stop.into()),
            SampleOutcome::Failed(error) => return self.fail_choice(id, error),
        };
        let Some(request) = self.requests.get_mut(&choice.request) else {
            return;
        };
        // Stop tokens count as generated tokens, as in OpenAI's API and vLLM.
        request.usage.completion_tokens += 1;
        self.generated += 1;
        if request.stop_tokens.contains(&token) {
            let finish = ChoiceFinish {
                stop: Some(StopMatch::Token(token)),
                logprobs,
                ..FinishReason::Stop.into()
            };
            return self.finish(id, finish);
        }
        let text = match choice.push(token) {
            Ok(text) => text,
            Err(error) => return self.fail_choice(id, error),
        };
        let event = Event::Token {
            choice: choice.index,
            token,
            text,
            logprobs,
        };
        let gone = request.events.try_send(event).is_err();
        let has_room = self.scheduler.append(id, token);
        let finish = match gone {
            true => Some(FinishReason::Cancelled.into()),
            false => choice.finish(has_room),
        };
        if let Some(finish) = finish {
            self.finish(id, finish);
        }
    }

    /// Verifies a draft row by row and records how many of its tokens were accepted.
    pub(super) fn verify(&mut self, scheduled: &ScheduledSequence, rows: Range<usize>) {
        let before = self.generated;
        for row in rows {
            self.process_token_row(scheduled.seq, row);
        }
        // A step without a draft generates one token, too.
        let accepted = (self.generated - before).saturating_sub(1);
        self.drafted.0 += scheduled.draft as u64;
        self.drafted.1 += accepted;
        self.drafts.add(scheduled.draft, accepted as usize);
        let choice = self.choices.get_mut(&scheduled.seq);
        if let Some(lookup) = choice.and_then(|choice| choice.lookup.as_mut()) {
            lookup.record(scheduled.draft, accepted as usize);
        }
        if let Some(draft) = &mut self.draft {
            draft.record(scheduled.seq, scheduled.draft, accepted as usize);
        }
    }

    /// Pools the hidden states of a sequence, which are rows from `first` on. After the last of them, sends the embedding
    /// and finishes the sequence.
    pub(super) fn pool_hidden_states(&mut self, scheduled: &ScheduledSequence, first: usize) {
        let Some(choice) = self.choices.get_mut(&scheduled.seq) else {
            return;
        };
        let seq = self.scheduler.sequence(scheduled.seq);
        let (Some(pooling), Some(seq)) = (&mut choice.pooling, seq) else {
            return;
        };
        let dim = self.runner.spec().hidden_size;
        let rows = scheduled.hidden_rows();
        let end = scheduled.start + scheduled.len;
        for (i, position) in (end - rows..end).enumerate() {
            pooling.add(position, &self.output.hidden()[(first + i) * dim..][..dim]);
        }
        if end < seq.prompt_len() {
            return;
        }
        let vector = pooling.vector();
        if vector.iter().any(|x| x.is_nan()) {
            return self.fail_choice(scheduled.seq, EngineError::NotANumber);
        }
        self.shared.reset_nan_streak();
        if let Some(request) = self.requests.get_mut(&choice.request) {
            // A receiver that is gone has cancelled the request.
            let _ = request.events.try_send(Event::Embedding(vector));
        }
        self.finish(scheduled.seq, FinishReason::Stop.into());
    }

    /// Sends log-probabilities of the prompt tokens after those in `scheduled`, whose logits begin at `first`.
    pub(super) fn send_prompt_logprobs(&mut self, scheduled: &ScheduledSequence, first: usize) {
        let Some(choice) = self.choices.get(&scheduled.seq) else {
            return;
        };
        let seq = self.scheduler.sequence(scheduled.seq);
        let request = self.requests.get_mut(&choice.request);
        let (Some(seq), Some(request)) = (seq, request) else {
            return;
        };
        let Some(top) = request.prompt_logprobs else {
            return;
        };
        // The logits of a position predict the next token. Rows that were sent before a preemption
        // are not sent again.
        let end = (scheduled.start + scheduled.len).min(seq.prompt_len() - 1);
        let fresh = scheduled.start.max(request.prompt_rows)..end;
        if fresh.is_empty() {
            return;
        }
        request.prompt_rows = end;
        let of = |at: usize| match self.output.row(first + at - scheduled.start) {
            RowOutput::Logits(row) if has_number(row) => {
                Some(logprobs(row, seq.tokens()[at + 1], top))
            }
            _ => None,
        };
        let Some(found) = fresh.map(of).collect() else {
            return self.fail_choice(scheduled.seq, EngineError::NotANumber);
        };
        let event = Event::PromptLogprobs(found);
        // A receiver that is gone has cancelled the request.
        let _ = request.events.try_send(event);
    }
}
