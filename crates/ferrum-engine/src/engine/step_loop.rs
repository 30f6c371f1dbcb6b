//! The loop of the engine's thread: handles commands, runs steps, sends events.

use super::adapters::AdapterState;
use super::admission::RequestState;
use super::choice::{ChoiceState, SampleOutcome};
use super::drafter::Drafter;
use super::overlap::StepInFlight;
use super::request::RequestId;
use super::stats::DraftCounts;
use super::step::{PlannedStep, Timestamp};
use super::step_time::StepTimeModel;
use super::{Command, Phase, Shared};
use crate::grammar::MaskThreads;
use crate::offload::OffloadConnector;
use crate::pool::BlockTable;
use crate::scheduler::Scheduler;
use crate::{FinishReason, StepRunner};
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_models::{LogitRows, Readback, RowOutput, SeqStep, StepBatch, StepOutput};
use ferrum_types::{AdapterId, Error, Result, SeqId};
use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

/// How long to wait for files before deadlines are checked again.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// State of the engine's thread.
pub(super) struct StepLoop<'a> {
    pub(super) runner: Box<dyn StepRunner>,
    pub(super) draft: Option<Drafter>,
    pub(super) tokenizer: Option<&'a Tokenizer>,
    pub(super) scheduler: Scheduler,
    pub(super) shared: &'a Shared,
    inbox: &'a Receiver<Command>,
    pub(super) requests: HashMap<RequestId, RequestState>,
    /// LoRA adapters on the runner.
    pub(super) adapters: BTreeMap<AdapterId, AdapterState>,
    pub(super) choices: HashMap<SeqId, ChoiceState<'a>>,
    pub(super) next_seq: u64,
    /// Whether a step may be submitted while another is in flight.
    pub(super) overlaps: bool,
    /// The submitted step, between two calls of [`advance`](Self::advance).
    pub(super) in_flight: Option<StepInFlight>,
    /// Memory of steps that have ended, for reuse.
    pub(super) spare: Vec<PlannedStep>,
    /// When the last step was collected, and when its events were sent.
    pub(super) last_collected: Timestamp,
    pub(super) last_ended: Instant,
    /// By row of logits: what is read of it.
    pub(super) readbacks: Vec<Readback>,
    /// Outputs of the collected step.
    pub(super) output: StepOutput,
    /// By row of logits: tokens that were sampled in parallel.
    pub(super) chosen: Vec<Option<SampleOutcome>>,
    /// Started with the first request that has a grammar.
    pub(super) mask_threads: Option<MaskThreads>,
    pub(super) probe_wanted: bool,
    last_check: Option<Duration>,
    pub(super) generated: u64,
    pub(super) model_time: Duration,
    /// Tokens that were drafted, and those that were accepted.
    pub(super) drafted: (u64, u64),
    pub(super) drafts: DraftCounts,
    pub(super) step_time: StepTimeModel,
    /// The offload tiers.
    pub(super) offload: Option<Arc<OffloadConnector>>,
    /// Buffer for entries that are read from the device.
    pub(super) kv_bytes: Vec<u8>,
    /// Whether all sequences wait for files that are being read.
    pub(super) waits_for_files: bool,
}

impl<'a> StepLoop<'a> {
    pub(super) fn new(
        (runner, draft): (Box<dyn StepRunner>, Option<Drafter>),
        tokenizer: Option<&'a Tokenizer>,
        scheduler: Scheduler,
        shared: &'a Shared,
        inbox: &'a Receiver<Command>,
    ) -> Self {
        let now = Instant::now();
        Self {
            overlaps: runner.in_flight() > 1,
            runner,
            draft,
            tokenizer,
            scheduler,
            shared,
            inbox,
            requests: HashMap::new(),
            adapters: BTreeMap::new(),
            choices: HashMap::new(),
            next_seq: 0,
            in_flight: None,
            spare: Vec::new(),
            last_collected: Timestamp {
                instant: now,
                clock: Duration::ZERO,
            },
            last_ended: now,
            readbacks: Vec::new(),
            output: StepOutput::default(),
            chosen: Vec::new(),
            mask_threads: None,
            probe_wanted: false,
            last_check: None,
            generated: 0,
            model_time: Duration::ZERO,
            drafted: (0, 0),
            drafts: DraftCounts::default(),
            step_time: StepTimeModel::new(shared.config.step_time),
            offload: None,
            kv_bytes: Vec::new(),
            waits_for_files: false,
        }
    }

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
                    if *self.shared.phase.borrow() == Phase::Draining {
                        return Ok(ControlFlow::Break(()));
                    }
                    match self.inbox.recv() {
                        Ok(command) => command,
                        Err(_) => return Ok(ControlFlow::Break(())),
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
