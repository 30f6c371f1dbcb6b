//! Overlapping steps: a step is submitted while the one before it is in flight.
//!
//! The device would be idle while the host works between two steps (sampling, detokenising, events, the next plan). So
//! where a runner takes a second step, it is planned before the tokens of the first are known: each is the token that
//! the device chooses. A sequence that ends with such a token is computed once too often, which does not affect other
//! sequences.

use super::state::{StepInFlight, StepLoop};
use crate::scheduler::{ScheduledSequence, StepPlan};
use ferrum_models::Readback;
use ferrum_types::Result;

impl StepLoop<'_> {
    /// Submits the next step, if it can be planned now, and collects the one in flight. Without overlapping steps,
    /// submits one step and collects it.
    pub(super) fn advance(&mut self) -> Result<()> {
        let begun = match &self.in_flight {
            None => self.begin_step()?,
            Some(flight) if flight.can_be_followed => self.begin_next_step()?,
            Some(_) => None,
        };
        let ended = match self.overlaps {
            true => std::mem::replace(&mut self.in_flight, begun),
            false => begun,
        };
        ended.map_or(Ok(()), |flight| self.end_step(flight))
    }

    /// Plans and submits the step after the one in flight, if there is one.
    fn begin_next_step(&mut self) -> Result<Option<StepInFlight>> {
        let started = self.now();
        let mut step = self.spare.pop().unwrap_or_default();
        let most = self.step_time.max_prompt_tokens();
        self.scheduler.limit_prompts(most);
        let planned = self.scheduler.schedule_ahead(&mut step.plan);
        self.move_entries()?;
        if !planned {
            self.spare.push(step);
            return Ok(None);
        }
        self.submit(step, started).map(Some)
    }

    /// Whether the step after this one can be planned before the tokens of this one are known: if the device chooses
    /// each of them, or the length limit ends the sequence with it.
    ///
    /// One sequence whose token the host chooses blocks the overlap. Otherwise that sequence would be in every second
    /// step only and take twice as many steps. As each step reads all weights, that costs more time than the host needs
    /// between two steps.
    pub(super) fn can_be_followed(&self, plan: &StepPlan) -> bool {
        // A draft model reads the last token, so it has to be known.
        if !self.overlaps || self.draft.is_some() {
            return false;
        }
        let mut row = 0;
        plan.sequences().iter().all(|scheduled| {
            row += scheduled.rows();
            !scheduled.gives_token || self.needs_no_host(scheduled, row - 1)
        })
    }

    /// Whether the next step of a sequence can be planned without the token that a row gives.
    fn needs_no_host(&self, scheduled: &ScheduledSequence, row: usize) -> bool {
        if !self.scheduler.goes_on(scheduled.seq) {
            return true;
        }
        let choice = self.choices.get(&scheduled.seq);
        // Prompt lookup and masks need the last token.
        let needs_token =
            choice.is_some_and(|choice| choice.lookup.is_some() || choice.guide.is_some());
        let is_read = matches!(self.readbacks.get(row), Some(Readback::Token(_)));
        is_read && !needs_token && scheduled.draft == 0
    }
}
