//! Finishes, cancels and fails requests and their choices.

use super::choice::ChoiceFinish;
use super::request::{EngineError, Event, RequestId};
use super::state::StepLoop;
use crate::FinishReason;
use crate::sync::atomic::Ordering;
use ferrum_types::SeqId;

impl StepLoop<'_> {
    /// Cancels a request.
    pub(super) fn cancel(&mut self, id: RequestId) {
        let seqs = self.requests.get(&id).map(|request| request.seqs.clone());
        for seq in seqs.into_iter().flatten() {
            self.finish(seq, FinishReason::Cancelled.into());
        }
    }

    /// Finishes a choice: frees its blocks and sends the event. The last choice finishes the request.
    pub(super) fn finish(&mut self, id: SeqId, finish: ChoiceFinish) {
        self.scheduler.remove(id);
        if let Some(draft) = &mut self.draft {
            draft.forget(id);
        }
        let Some(mut choice) = self.choices.remove(&id) else {
            return;
        };
        if !choice.admitted {
            self.shared.queued.fetch_sub(1, Ordering::AcqRel);
        }
        let Some(request) = self.requests.get_mut(&choice.request) else {
            return;
        };
        let _ = request.events.try_send(Event::Finished {
            choice: choice.index,
            text: choice.flush(),
            reason: finish.reason,
            stop: finish.stop,
            logprobs: finish.logprobs,
        });
        request.seqs.retain(|&seq| seq != id);
        if request.seqs.is_empty() {
            let _ = request.events.try_send(Event::Done(request.usage));
            let adapted = request.adapter.is_some();
            self.requests.remove(&choice.request);
            self.count_finished();
            if adapted {
                self.forget_adapters();
            }
        }
    }

    /// Fails the request of a choice.
    pub(super) fn fail_choice(&mut self, id: SeqId, error: EngineError) {
        let Some(request) = self.choices.get(&id).map(|choice| choice.request) else {
            return;
        };
        if error == EngineError::NotANumber {
            tracing::error!(request = request.0, "the model computed NaN for a request");
            self.shared.nan_streak.fetch_add(1, Ordering::AcqRel);
            self.shared.stats().nan_failures += 1;
        }
        self.fail_request(request, error);
    }

    /// Fails a request: sends the error and frees the blocks of all its choices.
    pub(super) fn fail_request(&mut self, id: RequestId, error: EngineError) {
        let Some(request) = self.requests.remove(&id) else {
            return;
        };
        let _ = request.events.try_send(Event::Failed(error));
        for seq in request.seqs {
            self.scheduler.remove(seq);
            if let Some(draft) = &mut self.draft {
                draft.forget(seq);
            }
            if self.choices.remove(&seq).is_some_and(|a| !a.admitted) {
                self.shared.queued.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    /// Fails all open requests. Reads no state that a panic may have left inconsistent.
    pub(super) fn fail_all(&mut self) {
        let error = self.shared.phase.borrow().refusal();
        let error = error.unwrap_or(EngineError::ShuttingDown);
        for (_, request) in self.requests.drain() {
            let _ = request.events.try_send(Event::Failed(error.clone()));
        }
    }

    fn count_finished(&self) {
        self.shared.stats().finished_requests += 1;
    }
}
