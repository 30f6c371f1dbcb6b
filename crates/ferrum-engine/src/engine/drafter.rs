//! [`Drafter`]: drafts with a runner of its own, a smaller model or a head that reads the model's hidden states.

use super::draft::{DraftModel, DraftRequest, Drafts};
use super::draft_head::DraftHead;
use super::speculation::DraftSpeedup;
use super::step_loop::StepLoop;
use crate::scheduler::StepPlan;
use ferrum_models::{StepBatch, TapPoint};
use ferrum_types::{Result, SeqId};

/// See the [module](self).
pub(super) struct Drafter {
    pub(super) speedup: DraftSpeedup,
    pub(super) source: DraftSource,
}

pub(super) enum DraftSource {
    Model(DraftModel),
    Head(DraftHead),
}

impl Drafter {
    pub(super) fn new(source: DraftSource) -> Self {
        let speedup = DraftSpeedup::default();
        Self { speedup, source }
    }

    /// Drafts for all of `requests`. Sequences that are not read to their end or have no room get no draft. Also returns
    /// whether all sequences with room were read to their end.
    pub(super) fn draft(&mut self, requests: &[DraftRequest<'_>]) -> Result<(bool, Drafts)> {
        match &mut self.source {
            DraftSource::Model(model) => model.draft(requests),
            DraftSource::Head(head) => head.draft(requests),
        }
    }

    /// Whether it reads every decoding sequence, also in steps without drafts.
    pub(super) fn follows(&self) -> bool {
        matches!(self.source, DraftSource::Head(_))
    }

    /// Records the outcome of the last draft for a sequence.
    pub(super) fn record(&mut self, id: SeqId, drafted: usize, accepted: usize) {
        match &mut self.source {
            DraftSource::Model(model) => model.record(id, drafted, accepted),
            DraftSource::Head(head) => head.record(id, drafted, accepted),
        }
    }

    /// Drops the state of a sequence that has ended.
    pub(super) fn forget(&mut self, id: SeqId) {
        match &mut self.source {
            DraftSource::Model(model) => model.forget(id),
            DraftSource::Head(head) => head.forget(id),
        }
    }

    /// The head, if the source is one.
    fn head(&mut self) -> Option<&mut DraftHead> {
        match &mut self.source {
            DraftSource::Model(_) => None,
            DraftSource::Head(head) => Some(head),
        }
    }
}

impl StepLoop<'_> {
    /// Taps the hidden states that a draft head reads: those of all rows, as any of them may be accepted.
    pub(super) fn tap_rows(&mut self, plan: &StepPlan, batch: &mut StepBatch) {
        let Some(head) = self.draft.as_mut().and_then(Drafter::head) else {
            return;
        };
        let points: &[TapPoint] = head.points();
        for (seq, scheduled) in plan.sequences().iter().enumerate() {
            if !scheduled.hidden {
                batch.tap_rows(seq, points);
            }
        }
    }

    /// Gives a draft head the hidden states of the rows whose tokens were accepted and have a known next token.
    pub(super) fn take_hidden_states(&mut self, plan: &StepPlan) {
        let Some(head) = self.draft.as_mut().and_then(Drafter::head) else {
            return;
        };
        let (width, tapped) = (head.width(), self.output.tapped());
        let mut row = 0;
        for scheduled in plan
            .sequences()
            .iter()
            .filter(|scheduled| !scheduled.hidden)
        {
            let rows = &tapped[row * width..][..scheduled.len * width];
            row += scheduled.len;
            if let Some(seq) = self.scheduler.sequence(scheduled.seq) {
                let known = seq.tokens().len().saturating_sub(scheduled.start + 1);
                let known = known.min(scheduled.len);
                head.take(scheduled.seq, scheduled.start, &rows[..known * width]);
            }
        }
    }
}
