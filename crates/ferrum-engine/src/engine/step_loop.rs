//! The engine's thread: commands, a step, events, and again.

use super::adapters::AdapterState;
use super::admission::RequestState;
use super::answer::{Answer, Chosen};
use super::drafter::Drafter;
use super::overlap::StepInFlight;
use super::request::RequestId;
use super::stats::DraftCounts;
use super::step::{PlannedStep, Timestamp};
use super::step_time::StepTimeModel;
use super::{Command, Phase, Shared};
use crate::grammar::MaskThreads;
use crate::offload::HostCache;
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

/// How long to wait for files before looking at deadlines again.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Everything on the engine's thread.
pub(super) struct StepLoop<'a> {
    pub(super) runner: Box<dyn StepRunner>,
    pub(super) draft: Option<Drafter>,
    pub(super) tokenizer: Option<&'a Tokenizer>,
    pub(super) scheduler: Scheduler,
    pub(super) shared: &'a Shared,
    inbox: &'a Receiver<Command>,
    pub(super) open: HashMap<RequestId, RequestState>,
    /// On the runner.
    pub(super) adapters: BTreeMap<AdapterId, AdapterState>,
    pub(super) answers: HashMap<SeqId, Answer<'a>>,
    pub(super) next_seq: u64,
    /// Whether a step may begin while another is in flight.
    pub(super) overlaps: bool,
    /// The step that the device has, between two turns.
    pub(super) flight: Option<StepInFlight>,
    /// Memory of steps that have ended.
    pub(super) spare: Vec<PlannedStep>,
    /// When the last step was collected, and when its tokens were told.
    pub(super) last_collected: Timestamp,
    pub(super) last_ended: Instant,
    /// By rows of logits: what is read of each.
    pub(super) wanted: Vec<Readback>,
    /// What was read of the step.
    pub(super) output: StepOutput,
    /// By rows of logits: what was chosen on other threads.
    pub(super) chosen: Vec<Option<Chosen>>,
    /// There once a request has a grammar.
    pub(super) mask_threads: Option<MaskThreads>,
    pub(super) probe_wanted: bool,
    last_check: Option<Duration>,
    pub(super) generated: u64,
    pub(super) model_time: Duration,
    /// Tokens that were drafted, and those that were right.
    pub(super) drafted: (u64, u64),
    pub(super) drafts: DraftCounts,
    pub(super) pace: StepTimeModel,
    /// Where blocks are that the device has no room for.
    pub(super) host: Option<Arc<HostCache>>,
    /// Memory for blocks on their way there.
    pub(super) kv_bytes: Vec<u8>,
    /// Whether nothing can be computed before files were read.
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
            open: HashMap::new(),
            adapters: BTreeMap::new(),
            answers: HashMap::new(),
            next_seq: 0,
            flight: None,
            spare: Vec::new(),
            last_collected: Timestamp {
                instant: now,
                clock: Duration::ZERO,
            },
            last_ended: now,
            wanted: Vec::new(),
            output: StepOutput::default(),
            chosen: Vec::new(),
            mask_threads: None,
            probe_wanted: false,
            last_check: None,
            generated: 0,
            model_time: Duration::ZERO,
            drafted: (0, 0),
            drafts: DraftCounts::default(),
            pace: StepTimeModel::new(shared.config.step_time),
            host: None,
            kv_bytes: Vec::new(),
            waits_for_files: false,
        }
    }

    /// Runs until it is told to stop.
    pub(super) fn run(&mut self) -> Result<()> {
        self.update_stats(None);
        while self.read_commands()?.is_continue() {
            let now = self.shared.config.clock.now();
            while let Some(id) = self.scheduler.overdue(now) {
                self.finish(id, FinishReason::Deadline.into());
            }
            if self.has_work() {
                self.turn()?;
            } else if self.probe_wanted {
                self.probe()?;
            }
        }
        Ok(())
    }

    fn has_work(&self) -> bool {
        !self.scheduler.is_empty() || self.flight.is_some()
    }

    /// Carries out what has been asked, and waits for more when there is nothing else to do.
    fn read_commands(&mut self) -> Result<ControlFlow<()>> {
        loop {
            let command = match self.inbox.try_recv() {
                Ok(command) => command,
                Err(TryRecvError::Disconnected) => return Ok(ControlFlow::Break(())),
                Err(TryRecvError::Empty) if self.waits_for_files && !self.probe_wanted => {
                    self.waits_for_files = false;
                    match self.inbox.recv_timeout(LOOK_AGAIN) {
                        Ok(command) => command,
                        // Deadlines pass meanwhile.
                        Err(_) => return Ok(ControlFlow::Continue(())),
                    }
                }
                Err(TryRecvError::Empty) => {
                    if self.has_work() || self.probe_wanted {
                        return Ok(ControlFlow::Continue(()));
                    }
                    self.rest()?;
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
                Command::Submit(submission) => self.open(&submission),
                Command::Cancel(id) => self.cancel(id),
                Command::AddAdapter(new) => self.add_adapter(*new),
                Command::RetireAdapter(id) => self.retire_adapter(id),
                Command::Probe(asked) => {
                    self.shared.watchdog.work_came(asked);
                    self.probe_wanted = true;
                }
                Command::Drain | Command::BlocksRead => {}
                Command::Shutdown => return Ok(ControlFlow::Break(())),
            }
        }
    }

    /// Nothing to do: a good time to look at the books.
    fn rest(&mut self) -> Result<()> {
        let now = self.shared.config.clock.now();
        let due = |last: Duration| now.saturating_sub(last) >= self.shared.config.check_every;
        if self.last_check.is_none_or(due) {
            self.last_check = Some(now);
            let fault = |fault: crate::pool::PoolFault| Error::invalid("engine", fault.to_string());
            self.scheduler.check().map_err(fault)?;
        }
        self.update_stats(None);
        self.shared.watchdog.idle();
        Ok(())
    }

    /// A step of one token for nobody, which shows that steps still end.
    fn probe(&mut self) -> Result<()> {
        self.probe_wanted = false;
        let mut table = BlockTable::default();
        let lent = self.scheduler.lend(&mut table);
        self.move_parts()?;
        if !lent {
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
        let wanted = [Readback::GREEDY];
        self.runner.run(&batch, &wanted, &mut self.output)?;
        if matches!(self.output.row(0), RowOutput::Token(..)) {
            self.shared.numbers_came();
        }
        self.scheduler.take_back(&mut table);
        self.shared
            .watchdog
            .step_ended(self.shared.config.clock.now());
        Ok(())
    }

    /// `step`: tokens and time of a step that has ended.
    pub(super) fn update_stats(&self, step: Option<(usize, Duration)>) {
        let counters = self.scheduler.counters();
        let pool = self.scheduler.pool();
        let offload = self.host.as_ref().map(|host| host.stats());
        let mut stats = self.shared.stats();
        stats.offload = offload.unwrap_or_default();
        stats.running = self.scheduler.running();
        let admitted = self.answers.values().filter(|a| a.admitted).count();
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
