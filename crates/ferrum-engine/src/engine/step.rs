//! One step: plan, submit, collect, process outputs. Steps may overlap: see [`overlap`](super::overlap).

use super::choice::OnDevice;
use super::draft::DraftRequest;
use super::drafter::Drafter;
use super::state::{PlannedStep, StepInFlight, StepLoop, Timestamp};
use super::step_time;
use crate::grammar::MaskThreads;
use crate::scheduler::{ScheduledSequence, StepPlan};
use ferrum_models::{AuxHiddenPoint, LogitRows, Readback, StepBatch};
use ferrum_types::{Error, Result};
use std::time::{Duration, Instant};

impl StepLoop<'_> {
    /// Plans the next step while none is in flight, and submits it. `None`: all sequences wait for files.
    pub(super) fn begin_step(&mut self) -> Result<Option<StepInFlight>> {
        let started = self.now();
        let mut step = self.spare.pop().unwrap_or_default();
        let drafted = self.draft()?;
        let most = self.step_time.max_prompt_tokens();
        self.scheduler.limit_prompts(most);
        self.scheduler.schedule(&mut step.plan);
        self.move_entries()?;
        if step.plan.sequences().is_empty() {
            if self.scheduler.waits_for_files() {
                self.waits_for_files = true;
                self.spare.push(step);
                return Ok(None);
            }
            return Err(Error::invalid("engine", "the scheduler planned nothing"));
        }
        self.note_preemptions(&step.plan);
        let in_flight = self.submit(step, started)?;
        Ok(Some(StepInFlight {
            drafted,
            ..in_flight
        }))
    }

    /// Submits a planned step to the device.
    pub(super) fn submit(&mut self, step: PlannedStep, started: Timestamp) -> Result<StepInFlight> {
        let PlannedStep { plan, mut batch } = step;
        self.scheduler.begin(&plan, &mut batch)?;
        self.move_entries()?;
        self.begin_masks(&plan);
        self.set_readbacks(&plan, &mut batch);
        self.add_aux_hidden(&plan, &mut batch);
        let prompt_tokens = step_time::prompt_tokens(plan.sequences());
        let expected = self.step_time.expected(prompt_tokens);
        if self.in_flight.is_none() {
            self.shared.watchdog.step_begins(expected);
        }
        let submitted = self.now();
        let ticket = self.runner.submit(&batch, &self.readbacks)?;
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

    /// Collects a step, samples tokens, and sends events.
    pub(super) fn end_step(&mut self, flight: StepInFlight) -> Result<()> {
        self.runner.collect(flight.ticket, &mut self.output)?;
        let (collected, before) = (self.now(), self.generated);
        // A step that overlaps with the one before it starts on the device when that one ends.
        let since = flight.submitted.max(self.last_collected);
        let took = collected.clock.saturating_sub(since.clock);
        self.step_time.record(flight.prompt_tokens, took);
        self.model_time += collected.instant - since.instant;
        self.last_collected = collected;
        if let Some(next) = &self.in_flight {
            self.shared.watchdog.step_begins(next.expected);
        }
        let plan = &flight.step.plan;
        self.scheduler.commit(plan);
        self.probe_wanted = false;
        self.choose_ahead(plan);
        self.process_rows(plan, flight.started.clock);
        self.take_hidden_states(plan);
        self.shared
            .watchdog
            .step_ended(self.shared.config.clock.now());
        let ended = Instant::now();
        let time = ended - flight.started.instant.max(self.last_ended);
        self.last_ended = ended;
        // Steps with prompt tokens do not count for the speedup of drafts. What is computed again counts for drafts alone, as it
        // comes of one.
        let replays = plan.sequences().iter().any(|scheduled| scheduled.replay);
        if let (Some(draft), Some(drafted)) = (&mut self.draft, flight.drafted)
            && plan.sequences().iter().all(ScheduledSequence::is_decode)
            && (drafted || !replays)
        {
            let tokens = (self.generated - before) as usize;
            let sequences = plan.sequences().len();
            draft
                .speedup
                .record(drafted, time.as_secs_f64(), tokens, sequences);
        }
        self.update_stats(Some((plan.tokens(), time)));
        self.spare.push(flight.step);
        if !self.adapters.is_empty() {
            // The step may have been the last one that uses a retired adapter.
            self.forget_adapters();
        }
        Ok(())
    }

    /// Processes the rows of a step that started at `began`.
    fn process_rows(&mut self, plan: &StepPlan, began: Duration) {
        let (mut row, mut hidden_row) = (0, 0);
        for scheduled in plan.sequences() {
            let rows = row..row + scheduled.rows();
            row = rows.end;
            self.note_admission(scheduled.seq, began);
            if scheduled.hidden {
                self.pool_hidden_states(scheduled, hidden_row);
                hidden_row += scheduled.hidden_rows();
                continue;
            }
            if scheduled.draft > 0 {
                self.verify(scheduled, rows);
                continue;
            }
            if scheduled.logits == LogitRows::All {
                self.send_prompt_logprobs(scheduled, rows.start);
            }
            if let Some(last) = rows.last().filter(|_| scheduled.gives_token) {
                self.process_token_row(scheduled.seq, last);
            }
        }
    }

    pub(super) fn now(&self) -> Timestamp {
        Timestamp {
            instant: Instant::now(),
            clock: self.shared.config.clock.now(),
        }
    }

    /// Proposes drafts for the sequences that request them. Returns whether the draft model or head drafted; `None` while
    /// it is still reading.
    fn draft(&mut self) -> Result<Option<bool>> {
        let draft_now = self.draft.as_mut().is_some_and(|d| d.speedup.drafts());
        // A draft head reads in every step.
        let follows = self.draft.as_ref().is_some_and(Drafter::follows);
        let (mut drafts, mut requests) = (Vec::new(), Vec::new());
        for (&id, choice) in &mut self.choices {
            if choice.pooling.is_some() || choice.lookup.is_none() && !draft_now && !follows {
                continue;
            }
            let Some(seq) = self.scheduler.sequence(id) else {
                continue;
            };
            let tokens = seq.tokens();
            let mut request = DraftRequest {
                id,
                tokens,
                room: 0,
            };
            if seq.is_decoding() {
                // A step without a draft generates one token.
                let room = (choice.max_tokens - choice.generated).saturating_sub(1);
                let lookup = choice.lookup.as_mut();
                let draft = lookup.map_or(&[][..], |lookup| lookup.draft(tokens, room));
                if !draft.is_empty() {
                    drafts.push((id, draft.to_vec()));
                } else if draft_now {
                    request.room = room;
                }
            }
            if request.room > 0 || follows {
                requests.push(request);
            }
        }
        let mut drafted = Some(false);
        // The order of a map is random; the order of reading must not be.
        requests.sort_unstable_by_key(|request| request.id);
        if let Some(draft) = self.draft.as_mut().filter(|_| draft_now || follows) {
            let (ready, drafted_now) = draft.draft(&requests)?;
            drafts.extend(drafted_now);
            if draft_now {
                drafted = ready.then_some(true);
            }
        }
        for (id, draft) in drafts {
            self.scheduler.propose(id, &draft);
        }
        Ok(drafted)
    }

    /// Starts computing the masks of rows that sample under a grammar, in parallel with the step.
    fn begin_masks(&mut self, plan: &StepPlan) {
        for scheduled in plan.sequences() {
            let seq = self.scheduler.sequence(scheduled.seq);
            let choice = self.choices.get_mut(&scheduled.seq);
            let (Some(seq), Some(guide)) = (seq, choice.and_then(|a| a.guide.as_mut())) else {
                continue;
            };
            // A chunk before the end of the prompt generates no token.
            if scheduled.gives_token {
                let threads = self.mask_threads.get_or_insert_with(MaskThreads::start);
                guide.begin(&seq.draft()[..scheduled.draft], threads);
            }
        }
    }

    /// Sets what is read of each row: a token, or what the host needs to sample it.
    fn set_readbacks(&mut self, plan: &StepPlan, batch: &mut StepBatch) {
        self.readbacks.clear();
        let (samples, vocab) = (self.runner.samples(), self.runner.spec().vocab_size);
        let StepBatch {
            pending_tokens,
            sampling,
            ..
        } = batch;
        let mut pending_tokens = pending_tokens.iter();
        for scheduled in plan
            .sequences()
            .iter()
            .filter(|scheduled| scheduled.rows() > 0)
        {
            // Rows of a prompt are for its log-probabilities.
            let (others, tokens) = match (scheduled.gives_token, scheduled.draft) {
                (false, _) => (scheduled.rows(), 0),
                (true, 0) => (scheduled.rows() - 1, 1),
                (true, _) => (0, scheduled.rows()),
            };
            let choice = self.choices.get_mut(&scheduled.seq);
            let seq = self.scheduler.sequence(scheduled.seq);
            let token = match (choice, seq) {
                (Some(choice), Some(seq)) => {
                    let end = scheduled.start + scheduled.len - scheduled.draft;
                    let is_due = end > seq.tokens().len();
                    let last = is_due
                        .then(|| pending_tokens.next())
                        .flatten()
                        .map(|last| last.row);
                    // The random state advances only with the accepted rows of a draft, so the host samples those.
                    let on_device = samples && scheduled.gives_token && scheduled.draft == 0;
                    let on_device = on_device.then_some(OnDevice {
                        batch: &mut *sampling,
                        vocab,
                        masks: self.overlaps,
                    });
                    choice.readback(seq.tokens(), last, on_device)
                }
                _ => Readback::GREEDY,
            };
            let others = std::iter::repeat_n(Readback::Logits, others);
            let rows = others.chain(std::iter::repeat_n(token, tokens));
            self.readbacks.extend(rows);
        }
    }

    /// Asks for the hidden states that a draft head reads: those of all rows, as any of them may be accepted.
    pub(super) fn add_aux_hidden(&mut self, plan: &StepPlan, batch: &mut StepBatch) {
        let Some(head) = self.draft.as_mut().and_then(Drafter::head) else {
            return;
        };
        let points: &[AuxHiddenPoint] = head.points();
        for (seq, scheduled) in plan.sequences().iter().enumerate() {
            if !scheduled.hidden {
                batch.add_aux_hidden(seq, points);
            }
        }
    }

    /// Gives a draft head the hidden states of the rows whose tokens were accepted and have a known next token.
    pub(super) fn take_hidden_states(&mut self, plan: &StepPlan) {
        let Some(head) = self.draft.as_mut().and_then(Drafter::head) else {
            return;
        };
        let (width, aux_hidden) = (head.width(), self.output.aux_hidden());
        let mut row = 0;
        for scheduled in plan
            .sequences()
            .iter()
            .filter(|scheduled| !scheduled.hidden)
        {
            let rows = &aux_hidden[row * width..][..scheduled.len * width];
            row += scheduled.len;
            if let Some(seq) = self.scheduler.sequence(scheduled.seq) {
                let known = seq.tokens().len().saturating_sub(scheduled.start + 1);
                let known = known.min(scheduled.len);
                head.take(scheduled.seq, scheduled.start, &rows[..known * width]);
            }
        }
    }
}
