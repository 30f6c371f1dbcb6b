//! A step that begins while the one before it is in flight.
//!
//! What the host does between two steps (choosing tokens, text, events, the next plan) keeps the device waiting,
//! unless the next step is there already. So where a runner takes a second step, it is planned before the tokens of
//! the first are known: each is whatever the device chooses. An answer that ends with such a token has been computed
//! once too often, which changes nothing for anybody else.

use super::step::{PlannedStep, Timestamp};
use super::step_loop::StepLoop;
use crate::scheduler::{StepPlan, Work};
use ferrum_models::{Readback, Ticket};
use ferrum_types::{AdapterId, Result};
use std::time::Duration;

/// A step that was handed to the device.
pub(super) struct StepInFlight {
    pub(super) ticket: Ticket,
    pub(super) step: PlannedStep,
    /// What [`StepLoop::begin_step`] found out about drafts.
    pub(super) drafted: Option<bool>,
    pub(super) prompt_tokens: usize,
    /// What it should take.
    pub(super) expected: Duration,
    /// When its planning began.
    pub(super) started: Timestamp,
    pub(super) submitted: Timestamp,
    /// Whether the next step can be planned without its tokens.
    pub(super) can_be_followed: bool,
}

impl StepInFlight {
    /// Whether one of its sequences has this adapter, or had it when it ended.
    pub(super) fn has_adapter(&self, id: AdapterId) -> bool {
        self.step.batch.adapters.contains(&Some(id))
    }
}

impl StepLoop<'_> {
    /// Begins the next step, if it can be planned now, and ends the one in flight; without a second step in flight,
    /// begins one and ends it.
    pub(super) fn turn(&mut self) -> Result<()> {
        let begun = match &self.flight {
            None => self.begin_step()?,
            Some(flight) if flight.can_be_followed => self.begin_next_step()?,
            Some(_) => None,
        };
        let ended = match self.overlaps {
            true => std::mem::replace(&mut self.flight, begun),
            false => begun,
        };
        ended.map_or(Ok(()), |flight| self.end_step(flight))
    }

    /// Plans the step after the one in flight and hands it to the device, if there is one.
    fn begin_next_step(&mut self) -> Result<Option<StepInFlight>> {
        let started = self.now();
        let mut step = self.spare.pop().unwrap_or_default();
        let most = self.pace.most_prompt_tokens();
        self.scheduler.limit_prompts(most);
        let planned = self.scheduler.schedule_ahead(&mut step.plan);
        self.move_parts()?;
        if !planned {
            self.spare.push(step);
            return Ok(None);
        }
        self.submit(step, started).map(Some)
    }

    /// Whether the step after this one, which has begun, can be planned before its tokens are known: if the device
    /// chooses each of them, or lengths say that it is the last.
    ///
    /// One sequence whose token the host chooses makes all wait. Without it, the next step would compute for the
    /// others alone, and for that one every second time: twice as many steps for it, and as each step reads all
    /// weights, more time for everybody than the host needs between two steps.
    pub(super) fn can_be_followed(&self, plan: &StepPlan) -> bool {
        // Drafts go on from the last token, and the small model wants to read it.
        if !self.overlaps || self.draft.is_some() {
            return false;
        }
        let mut row = 0;
        plan.work().iter().all(|work| {
            row += work.rows();
            !work.gives_token || self.needs_no_host(work, row - 1)
        })
    }

    /// Whether the next step of a sequence can be planned without the token that a row gives.
    fn needs_no_host(&self, work: &Work, row: usize) -> bool {
        if !self.scheduler.goes_on(work.seq) {
            return true;
        }
        let answer = self.answers.get(&work.seq);
        // Drafts go on from the last token, and so do masks.
        let wants_it =
            answer.is_some_and(|answer| answer.lookup.is_some() || answer.guide.is_some());
        matches!(self.wanted.get(row), Some(Readback::Token(_))) && !wants_it && work.draft == 0
    }
}
