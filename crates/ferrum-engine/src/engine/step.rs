//! One step: planned, handed to the device, and what came of its rows. Between the two the next step may begin:
//! see [`ahead`](super::ahead).

use super::answer::OnDevice;
use super::draft::DraftRequest;
use super::drafter::Drafter;
use super::overlap::StepInFlight;
use super::step_loop::StepLoop;
use super::step_time;
use crate::grammar::MaskThreads;
use crate::scheduler::{StepPlan, Work};
use ferrum_models::{LogitRows, Readback, StepBatch};
use ferrum_types::{Error, Result};
use std::time::{Duration, Instant};

/// What a step computes. Made to be filled again.
#[derive(Default)]
pub(super) struct PlannedStep {
    pub(super) plan: StepPlan,
    pub(super) batch: StepBatch,
}

/// Now, by the machine's clock and by the engine's, which tests move by hand.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Timestamp {
    pub(super) instant: Instant,
    pub(super) clock: Duration,
}

impl StepLoop<'_> {
    /// Plans the next step while none is in flight, and hands it to the device. `None`: everybody waits for files.
    pub(super) fn begin_step(&mut self) -> Result<Option<StepInFlight>> {
        let started = self.now();
        let mut step = self.spare.pop().unwrap_or_default();
        let drafted = self.draft()?;
        let most = self.pace.most_prompt_tokens();
        self.scheduler.limit_prompts(most);
        self.scheduler.schedule(&mut step.plan);
        self.move_parts()?;
        if step.plan.work().is_empty() {
            if self.scheduler.waits_for_files() {
                self.waits_for_files = true;
                self.spare.push(step);
                return Ok(None);
            }
            return Err(Error::invalid("engine", "the scheduler planned nothing"));
        }
        self.note_preemptions(&step.plan);
        let flight = self.submit(step, started)?;
        Ok(Some(StepInFlight { drafted, ..flight }))
    }

    /// Hands a planned step to the device.
    pub(super) fn submit(&mut self, step: PlannedStep, started: Timestamp) -> Result<StepInFlight> {
        let PlannedStep { plan, mut batch } = step;
        self.scheduler.begin(&plan, &mut batch)?;
        self.move_parts()?;
        self.begin_masks(&plan);
        self.want_rows(&plan, &mut batch);
        self.tap_rows(&plan, &mut batch);
        let prompt_tokens = step_time::prompt_tokens(plan.work());
        let expected = self.pace.expected(prompt_tokens);
        if self.flight.is_none() {
            self.shared.watchdog.step_begins(expected);
        }
        let submitted = self.now();
        let ticket = self.runner.submit(&batch, &self.wanted)?;
        Ok(StepInFlight {
            can_be_followed: self.can_be_followed(&plan),
            ticket,
            step: PlannedStep { plan, batch },
            drafted: None,
            prompt_tokens,
            expected,
            started,
            submitted,
        })
    }

    /// Waits for a step, chooses tokens, and tells.
    pub(super) fn end_step(&mut self, flight: StepInFlight) -> Result<()> {
        self.runner.collect(flight.ticket, &mut self.output)?;
        let (collected, before) = (self.now(), self.generated);
        // A step that overlaps with the one before it has the device from when that one ended.
        let since = flight.submitted.max(self.last_collected);
        let took = collected.clock.saturating_sub(since.clock);
        self.pace.learn(flight.prompt_tokens, took);
        self.model_time += collected.instant - since.instant;
        self.last_collected = collected;
        if let Some(next) = &self.flight {
            self.shared.watchdog.step_begins(next.expected);
        }
        let plan = &flight.step.plan;
        self.scheduler.commit(plan);
        self.probe_wanted = false;
        self.choose_ahead(plan);
        self.take_rows(plan, flight.started.clock);
        self.take_hidden_states(plan);
        self.shared
            .watchdog
            .step_ended(self.shared.config.clock.now());
        let ended = Instant::now();
        let time = ended - flight.started.instant.max(self.last_ended);
        self.last_ended = ended;
        // Steps with prompts say nothing about drafts.
        let decodes = |work: &Work| work.len == work.draft + 1;
        if let (Some(draft), Some(drafted)) = (&mut self.draft, flight.drafted)
            && plan.work().iter().all(decodes)
        {
            let tokens = (self.generated - before) as usize;
            let sequences = plan.work().len();
            draft
                .speedup
                .learn(drafted, time.as_secs_f64(), tokens, sequences);
        }
        self.update_stats(Some((plan.tokens(), time)));
        self.spare.push(flight.step);
        if !self.adapters.is_empty() {
            // The step may have been the last that has one.
            self.forget_adapters();
        }
        Ok(())
    }

    /// Goes through the rows of a step that began at a time.
    fn take_rows(&mut self, plan: &StepPlan, began: Duration) {
        let (mut row, mut hidden_row) = (0, 0);
        for work in plan.work() {
            let rows = row..row + work.rows();
            row = rows.end;
            self.note_admission(work.seq, began);
            if work.hidden {
                self.pool(work, hidden_row);
                hidden_row += work.hidden_rows();
                continue;
            }
            if work.draft > 0 {
                self.verify(work, rows);
                continue;
            }
            if work.logits == LogitRows::All {
                self.give_prompt_logprobs(work, rows.start);
            }
            if let Some(last) = rows.last().filter(|_| work.gives_token) {
                self.advance(work.seq, last);
            }
        }
    }

    pub(super) fn now(&self) -> Timestamp {
        Timestamp {
            instant: Instant::now(),
            clock: self.shared.config.clock.now(),
        }
    }

    /// Proposes drafts for those who want them. Whether the small model, or the head, drafted; `None` when it is still
    /// reading.
    fn draft(&mut self) -> Result<Option<bool>> {
        let ask_model = self.draft.as_mut().is_some_and(|d| d.speedup.drafts());
        // A head reads along.
        let follows = self.draft.as_ref().is_some_and(Drafter::follows);
        let (mut found, mut asks) = (Vec::new(), Vec::new());
        for (&id, answer) in &mut self.answers {
            if answer.pool.is_some() || answer.lookup.is_none() && !ask_model && !follows {
                continue;
            }
            let Some(seq) = self.scheduler.sequence(id) else {
                continue;
            };
            let tokens = seq.tokens();
            let mut ask = DraftRequest {
                id,
                tokens,
                room: 0,
            };
            if seq.is_decoding() {
                // The step gives one token anyway.
                let room = (answer.max_tokens - answer.generated).saturating_sub(1);
                let lookup = answer.lookup.as_mut();
                let draft = lookup.map_or(&[][..], |lookup| lookup.draft(tokens, room));
                if !draft.is_empty() {
                    found.push((id, draft.to_vec()));
                } else if ask_model {
                    ask.room = room;
                }
            }
            if ask.room > 0 || follows {
                asks.push(ask);
            }
        }
        let mut drafted = Some(false);
        // Maps have no order, and who is read first should not be luck.
        asks.sort_unstable_by_key(|ask| ask.id);
        if let Some(draft) = self.draft.as_mut().filter(|_| ask_model || follows) {
            let (ready, drafts) = draft.draft(&asks)?;
            found.extend(drafts);
            if ask_model {
                drafted = ready.then_some(true);
            }
        }
        for (id, draft) in found {
            self.scheduler.propose(id, &draft);
        }
        Ok(drafted)
    }

    /// Has masks computed beside the step, for those of its rows that choose tokens under a grammar.
    fn begin_masks(&mut self, plan: &StepPlan) {
        for work in plan.work() {
            let seq = self.scheduler.sequence(work.seq);
            let answer = self.answers.get_mut(&work.seq);
            let (Some(seq), Some(guide)) = (seq, answer.and_then(|a| a.guide.as_mut())) else {
                continue;
            };
            // A chunk with more of the prompt to come chooses nothing.
            if work.gives_token {
                let threads = self.mask_threads.get_or_insert_with(MaskThreads::start);
                guide.begin(&seq.draft()[..work.draft], threads);
            }
        }
    }

    /// Says what is read of each row: a token, or what the host needs to choose it.
    fn want_rows(&mut self, plan: &StepPlan, batch: &mut StepBatch) {
        self.wanted.clear();
        let (samples, vocab) = (self.runner.samples(), self.runner.spec().vocab_size);
        let StepBatch {
            pending_tokens,
            sampling,
            ..
        } = batch;
        let mut pending_tokens = pending_tokens.iter();
        for work in plan.work().iter().filter(|work| work.rows() > 0) {
            // Those of a prompt are for its log-probabilities.
            let (others, tokens) = match (work.gives_token, work.draft) {
                (false, _) => (work.rows(), 0),
                (true, 0) => (work.rows() - 1, 1),
                (true, _) => (0, work.rows()),
            };
            let answer = self.answers.get_mut(&work.seq);
            let seq = self.scheduler.sequence(work.seq);
            let token = match (answer, seq) {
                (Some(answer), Some(seq)) => {
                    let end = work.start + work.len - work.draft;
                    let is_due = end > seq.tokens().len();
                    let last = is_due
                        .then(|| pending_tokens.next())
                        .flatten()
                        .map(|last| last.row);
                    // Chance goes on only with the rows of a draft that are right.
                    let on_device = samples && work.gives_token && work.draft == 0;
                    let on_device = on_device.then_some(OnDevice {
                        batch: &mut *sampling,
                        vocab,
                        masks: self.overlaps,
                    });
                    answer.wanted(seq.tokens(), last, on_device)
                }
                _ => Readback::GREEDY,
            };
            let others = std::iter::repeat_n(Readback::Logits, others);
            let rows = others.chain(std::iter::repeat_n(token, tokens));
            self.wanted.extend(rows);
        }
    }
}
