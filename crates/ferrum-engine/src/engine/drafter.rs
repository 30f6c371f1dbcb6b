//! [`Drafter`]: drafts with a runner of its own, a smaller model or a head that reads the model's hidden states.

use super::draft::{DraftModel, DraftRequest, Drafts};
use super::draft_head::DraftHead;
use super::speculation::DraftSpeedup;
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
    pub(super) fn head(&mut self) -> Option<&mut DraftHead> {
        match &mut self.source {
            DraftSource::Model(_) => None,
            DraftSource::Head(head) => Some(head),
        }
    }
}
