//! The loop of the engine's thread: handles commands, runs steps, sends events.

use super::state::StepLoop;
use super::{Command, Phase};
use crate::FinishReason;
use crate::pool::BlockTable;
use crate::sync::mpsc::TryRecvError;
use ferrum_models::{LogitRows, Readback, RowOutput, SeqStep, StepBatch};
use ferrum_types::{Error, Result};
use std::ops::ControlFlow;
use std::time::Duration;

/// How long to wait for files before deadlines are checked again.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

impl StepLoop<'_> {
    /// Runs until a command stops it.
    pub(super) fn run(&mut self) -> Result<()> {
        self.update_stats(None);
        while self.read_commands()?.is_continue() {
            let now = self.shared.config.clock.now();
            while let Some(id) = self.scheduler.overdue(now) {
                self.finish(id, FinishReason::Deadline.into());
            }
            if self.has_work() {
                self.advance()?;
            } else if self.probe_wanted {
                self.probe()?;
            }
        }
        Ok(())
    }

    fn has_work(&self) -> bool {
        !self.scheduler.is_empty() || self.in_flight.is_some()
    }

    /// Executes pending commands, and waits for commands while there is nothing else to do.
    fn read_commands(&mut self) -> Result<ControlFlow<()>> {
        loop {
            let command = match self.inbox.try_recv() {
                Ok(command) => command,
                Err(TryRecvError::Disconnected) => return Ok(ControlFlow::Break(())),
                Err(TryRecvError::Empty) if self.waits_for_files && !self.probe_wanted => {
                    self.waits_for_files = false;
                    match self.inbox.recv_timeout(POLL_INTERVAL) {
                        Ok(command) => command,
                        // Deadlines may have passed meanwhile.
                        Err(_) => return Ok(ControlFlow::Continue(())),
                    }
                }
                Err(TryRecvError::Empty) => {
                    if self.has_work() || self.probe_wanted {
                        return Ok(ControlFlow::Continue(()));
                    }
                    self.on_idle()?;
                    let draining = *self.shared.phase.borrow() == Phase::Draining;
                    let command = match draining {
                        // A request that was accepted before the drain may have arrived since the last look.
                        true => self.inbox.try_recv().ok(),
                        false => self.inbox.recv().ok(),
                    };
                    match command {
                        Some(command) => command,
                        None => return Ok(ControlFlow::Break(())),
                    }
                }
            };
            match command {
                Command::Submit(submission) => self.admit_request(&submission),
                Command::Cancel(id) => self.cancel(id),
                Command::AddAdapter(new) => self.add_adapter(*new),
                Command::RetireAdapter(id) => self.retire_adapter(id),
                Command::Probe(asked) => {
                    self.shared.watchdog.work_arrived(asked);
                    self.probe_wanted = true;
                }
                Command::Drain | Command::BlocksRead => {}
                Command::Shutdown => return Ok(ControlFlow::Break(())),
            }
        }
    }

    /// Runs when there is nothing to compute: checks the pool at its interval and updates statistics and watchdog.
    fn on_idle(&mut self) -> Result<()> {
        let now = self.shared.config.clock.now();
        let due =
            |last: Duration| now.saturating_sub(last) >= self.shared.config.pool_check_interval;
        if self.last_check.is_none_or(due) {
            self.last_check = Some(now);
            let fault = |fault: crate::pool::PoolFault| Error::invalid("engine", fault.to_string());
            self.scheduler.check().map_err(fault)?;
        }
        self.update_stats(None);
        self.shared.watchdog.idle();
        Ok(())
    }

    /// Runs a one-token probe step, which shows that steps still end.
    fn probe(&mut self) -> Result<()> {
        self.probe_wanted = false;
        let mut table = BlockTable::default();
        let has_block = self.scheduler.take_probe_block(&mut table);
        self.move_entries()?;
        if !has_block {
            return Ok(());
        }
        let mut batch = StepBatch::default();
        batch.push(SeqStep {
            tokens: &[0],
            start: 0,
            prompt_len: 1,
            blocks: table.blocks(),
            hidden: false,
            logits: LogitRows::Last,
            adapter: None,
        })?;
        for group in 1..table.groups() {
            batch.add_table(group, table.group(group))?;
        }
        if let Some(slot) = table.state() {
            batch.add_state(slot);
        }
        let readbacks = [Readback::GREEDY];
        self.runner.run(&batch, &readbacks, &mut self.output)?;
        if matches!(self.output.row(0), RowOutput::Token(..)) {
            self.shared.reset_nan_streak();
        }
        self.scheduler.return_probe_block(&mut table);
        self.shared
            .watchdog
            .step_ended(self.shared.config.clock.now());
        Ok(())
    }

    /// Updates the statistics. `step`: tokens and time of a step that has ended.
    pub(super) fn update_stats(&self, step: Option<(usize, Duration)>) {
        let counters = self.scheduler.counters();
        let pool = self.scheduler.pool();
        let offload = self.offload.as_ref().map(|offload| offload.stats());
        let mut stats = self.shared.stats();
        stats.offload = offload.unwrap_or_default();
        stats.running = self.scheduler.running();
        let admitted = self.choices.values().filter(|a| a.admitted).count();
        stats.preempted = admitted.saturating_sub(stats.running);
        stats.kv_tokens = self.shared.kv_tokens;
        stats.kv_blocks = pool.blocks();
        stats.kv_block_size = pool.block_size();
        stats.kv_blocks_used = pool.used();
        stats.kv_blocks_cached = pool.cached();
        stats.prompt_tokens = counters.prompt_tokens;
        stats.cached_tokens = counters.cached_tokens;
        stats.preemptions = counters.preemptions;
        stats.generated_tokens = self.generated;
        stats.model_time = self.model_time;
        (stats.draft_tokens, stats.accepted_tokens) = self.drafted;
        stats.drafts = self.drafts;
        if let Some((tokens, time)) = step {
            stats.computed_tokens += tokens as u64;
            stats.steps += 1;
            stats.step_sizes.add(tokens);
            stats.step_time += time;
            stats.last_step_time = time;
            stats.last_step = self.shared.config.clock.now();
        }
    }
}
