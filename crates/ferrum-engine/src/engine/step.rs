//! One step: planned, computed, and what came of its rows.

use super::answer::Answer;
use super::draft::Ask;
use super::pace;
use super::step_loop::StepLoop;
use crate::grammar::MaskThreads;
use crate::scheduler::{StepPlan, Work};
use ferrum_models::{LogitRows, Readback};
use ferrum_types::{Error, Result};
use std::time::Instant;

impl StepLoop<'_> {
    /// One step: plan, compute, choose tokens, tell.
    pub(super) fn step(&mut self) -> Result<()> {
        let (started, before) = (Instant::now(), self.generated);
        let began = self.shared.config.clock.now();
        let mut plan = std::mem::take(&mut self.plan);
        let guessed = self.guess()?;
        let most = self.pace.most_prompt_tokens();
        self.scheduler.limit_prompts(most);
        self.scheduler.schedule(&mut plan);
        if plan.work().is_empty() {
            return Err(Error::invalid("engine", "the scheduler planned nothing"));
        }
        self.note_preemptions(&plan);
        self.scheduler.fill_batch(&plan, &mut self.batch)?;
        self.begin_masks(&plan);
        let prompt_tokens = pace::prompt_tokens(plan.work());
        let expected = self.pace.expected(prompt_tokens);
        self.shared.pulse.step_begins(expected);
        let shared = self.shared;
        let clock = &shared.config.clock;
        let (model_started, on_clock) = (Instant::now(), clock.now());
        self.want_rows(&plan);
        let ticket = self.runner.submit(&self.batch, &self.wanted)?;
        self.runner.collect(ticket, &mut self.output)?;
        let took = clock.now().saturating_sub(on_clock);
        self.pace.learn(prompt_tokens, took);
        self.model_time += model_started.elapsed();
        self.scheduler.commit(&plan);
        self.probe_wanted = false;
        self.choose_ahead(&plan);
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
            if let Some(last) = rows.last() {
                self.advance(work.seq, last);
            }
        }
        self.shared.pulse.step_ended(self.shared.config.clock.now());
        let time = started.elapsed();
        // Steps with prompts say nothing about guesses.
        let decodes = |work: &Work| work.len == work.draft + 1;
        if let (Some(draft), Some(guessed)) = (&mut self.draft, guessed)
            && plan.work().iter().all(decodes)
        {
            let tokens = (self.generated - before) as usize;
            let sequences = plan.work().len();
            draft
                .payoff
                .learn(guessed, time.as_secs_f64(), tokens, sequences);
        }
        self.update_stats(Some((plan.tokens(), time)));
        self.plan = plan;
        Ok(())
    }

    /// Proposes drafts for those who want them. Whether the small model guessed; `None` when it is still
    /// reading.
    fn guess(&mut self) -> Result<Option<bool>> {
        let ask_model = self.draft.as_mut().is_some_and(|d| d.payoff.guesses());
        let (mut found, mut asks) = (Vec::new(), Vec::new());
        for (&id, answer) in &mut self.answers {
            if answer.pool.is_some() || answer.lookup.is_none() && !ask_model {
                continue;
            }
            let seq = self.scheduler.sequence(id);
            let Some(seq) = seq.filter(|seq| seq.is_decoding()) else {
                continue;
            };
            // The step gives one token anyway.
            let room = (answer.max_tokens - answer.generated).saturating_sub(1);
            let lookup = answer.lookup.as_mut();
            let tokens = seq.tokens();
            let guess = lookup.map_or(&[][..], |lookup| lookup.guess(tokens, room));
            if !guess.is_empty() {
                found.push((id, guess.to_vec()));
            } else if ask_model {
                asks.push(Ask { id, tokens, room });
            }
        }
        let mut guessed = Some(false);
        // Maps have no order, and who is read first should not be luck.
        asks.sort_unstable_by_key(|ask| ask.id);
        if let Some(draft) = self.draft.as_mut().filter(|_| ask_model) {
            let (ready, guesses) = draft.guess(&asks)?;
            found.extend(guesses);
            guessed = ready.then_some(true);
        }
        for (id, guess) in found {
            self.scheduler.propose(id, &guess);
        }
        Ok(guessed)
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
            if work.start + work.len - work.draft == seq.tokens().len() {
                let threads = self.mask_threads.get_or_insert_with(MaskThreads::start);
                guide.begin(&seq.draft()[..work.draft], threads);
            }
        }
    }

    /// Says what is read of each row: a token, or what the host needs to choose it.
    fn want_rows(&mut self, plan: &StepPlan) {
        self.wanted.clear();
        for work in plan.work().iter().filter(|work| work.rows() > 0) {
            let answer = self.answers.get(&work.seq);
            let wanted = match (work.logits, work.draft) {
                (LogitRows::All, 0) => Readback::Logits,
                _ if answer.is_none_or(Answer::is_plain_greedy) => Readback::GREEDY,
                _ => Readback::Logits,
            };
            let rows = std::iter::repeat_n(wanted, work.rows());
            self.wanted.extend(rows);
        }
    }
}
