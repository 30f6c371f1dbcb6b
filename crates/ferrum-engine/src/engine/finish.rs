//! How requests end: a choice at a time, or all at once because something failed.

use super::answer::Ending;
use super::request::{EngineError, Event, RequestId};
use super::step_loop::StepLoop;
use crate::FinishReason;
use ferrum_types::SeqId;
use std::sync::atomic::Ordering;

impl StepLoop<'_> {
    /// Ends a request at its receiver's wish.
    pub(super) fn cancel(&mut self, id: RequestId) {
        let seqs = self.open.get(&id).map(|open| open.seqs.clone());
        for seq in seqs.into_iter().flatten() {
            self.finish(seq, FinishReason::Cancelled.into());
        }
    }

    /// Ends a choice: frees its blocks and tells its request.
    pub(super) fn finish(&mut self, id: SeqId, ending: Ending) {
        self.scheduler.remove(id);
        if let Some(draft) = &mut self.draft {
            draft.forget(id);
        }
        let Some(mut answer) = self.answers.remove(&id) else {
            return;
        };
        if !answer.admitted {
            self.shared.queued.fetch_sub(1, Ordering::AcqRel);
        }
        let Some(open) = self.open.get_mut(&answer.request) else {
            return;
        };
        let _ = open.events.try_send(Event::Finished {
            choice: answer.choice,
            text: answer.rest(),
            reason: ending.reason,
            stop: ending.stop,
            logprobs: ending.logprobs,
        });
        open.seqs.retain(|&seq| seq != id);
        if open.seqs.is_empty() {
            let _ = open.events.try_send(Event::Done(open.usage));
            let adapted = open.adapter.is_some();
            self.open.remove(&answer.request);
            self.count_finished();
            if adapted {
                self.forget_adapters();
            }
        }
    }

    /// Ends a request of whose answers one cannot go on.
    pub(super) fn fail_answer(&mut self, id: SeqId, error: EngineError) {
        let Some(request) = self.answers.get(&id).map(|answer| answer.request) else {
            return;
        };
        if error == EngineError::NotANumber {
            tracing::error!(request = request.0, "the model computed NaN for a request");
            self.shared.nan_streak.fetch_add(1, Ordering::AcqRel);
            self.shared.stats().nan_failures += 1;
        }
        self.fail_request(request, error);
    }

    /// Ends a request that cannot be answered.
    pub(super) fn fail_request(&mut self, id: RequestId, error: EngineError) {
        let Some(open) = self.open.remove(&id) else {
            return;
        };
        let _ = open.events.try_send(Event::Failed(error));
        for seq in open.seqs {
            self.scheduler.remove(seq);
            if let Some(draft) = &mut self.draft {
                draft.forget(seq);
            }
            if self.answers.remove(&seq).is_some_and(|a| !a.admitted) {
                self.shared.queued.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    /// Tells everybody who is still there that it is over. Looks at nothing that a panic may have left
    /// half done.
    pub(super) fn fail_all(&mut self) {
        let error = self.shared.phase.borrow().refusal();
        let error = error.unwrap_or(EngineError::ShuttingDown);
        for (_, open) in self.open.drain() {
            let _ = open.events.try_send(Event::Failed(error.clone()));
        }
    }

    fn count_finished(&self) {
        self.shared.stats().finished_requests += 1;
    }
}
