//! [`Drafter`]: what drafts with a runner of its own, a smaller model or a head that reads the model's hidden states.

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

    /// Drafts for all of `asks`; those that are not read to their end or have no room get none. Whether
    /// all that have room were read to their end, too.
    pub(super) fn draft(&mut self, asks: &[DraftRequest<'_>]) -> Result<(bool, Drafts)> {
        match &mut self.source {
            DraftSource::Model(model) => model.draft(asks),
            DraftSource::Head(head) => head.draft(asks),
        }
    }

    /// Whether it has to follow sequences that it drafts nothing for.
    pub(super) fn follows(&self) -> bool {
        matches!(self.source, DraftSource::Head(_))
    }

    /// How the last draft for a sequence turned out.
    pub(super) fn learn(&mut self, id: SeqId, tried: usize, right: usize) {
        match &mut self.source {
            DraftSource::Model(model) => model.learn(id, tried, right),
            DraftSource::Head(head) => head.learn(id, tried, right),
        }
    }

    /// A sequence has ended.
    pub(super) fn forget(&mut self, id: SeqId) {
        match &mut self.source {
            DraftSource::Model(model) => model.forget(id),
            DraftSource::Head(head) => head.forget(id),
        }
    }

    /// The head, and where it reads hidden states of the model.
    fn head(&mut self) -> Option<&mut DraftHead> {
        match &mut self.source {
            DraftSource::Model(_) => None,
            DraftSource::Head(head) => Some(head),
        }
    }
}

impl StepLoop<'_> {
    /// Has the hidden states of a step tapped that a draft head reads: those of all rows, as any of them may be confirmed.
    pub(super) fn tap_rows(&mut self, plan: &StepPlan, batch: &mut StepBatch) {
        let Some(head) = self.draft.as_mut().and_then(Drafter::head) else {
            return;
        };
        let points: &[TapPoint] = head.points();
        for (seq, work) in plan.work().iter().enumerate() {
            if !work.hidden {
                batch.tap_rows(seq, points);
            }
        }
    }

    /// Hands a draft head the hidden states of those rows whose tokens were right and have one behind them.
    pub(super) fn take_hidden_states(&mut self, plan: &StepPlan) {
        let Some(head) = self.draft.as_mut().and_then(Drafter::head) else {
            return;
        };
        let (width, tapped) = (head.width(), self.output.tapped());
        let mut row = 0;
        for work in plan.work().iter().filter(|work| !work.hidden) {
            let rows = &tapped[row * width..][..work.len * width];
            row += work.len;
            if let Some(seq) = self.scheduler.sequence(work.seq) {
                let known = seq.tokens().len().saturating_sub(work.start + 1);
                let known = known.min(work.len);
                head.take(work.seq, work.start, &rows[..known * width]);
            }
        }
    }
}
