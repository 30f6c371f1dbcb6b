//! State of the engine's thread: [`StepLoop`], and its requests, adapters and steps. Other files implement what it does.

use super::choice::{ChoiceState, SampleOutcome};
use super::drafter::Drafter;
use super::request::{Event, RequestId, Usage};
use super::stats::{DraftCounts, Progress};
use super::step_time::StepTimeModel;
use super::{Command, Shared};
use crate::StepRunner;
use crate::grammar::MaskThreads;
use crate::offload::OffloadConnector;
use crate::scheduler::{Scheduler, StepPlan};
use crate::sync::mpsc::Receiver;
use ferrum_formats::tokenizer::Tokenizer;
use ferrum_models::{Readback, StepBatch, StepOutput, Ticket};
use ferrum_types::{AdapterId, SeqId, TokenId};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::Sender;

/// State of the engine's thread. See the [module](self).
pub(super) struct StepLoop<'a> {
    pub(super) runner: Box<dyn StepRunner>,
    pub(super) draft: Option<Drafter>,
    pub(super) tokenizer: Option<&'a Tokenizer>,
    pub(super) scheduler: Scheduler,
    pub(super) shared: &'a Shared,
    pub(super) inbox: &'a Receiver<Command>,
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
    pub(super) last_check: Option<Duration>,
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

/// A request that has not ended.
pub(super) struct RequestState {
    pub(super) events: Sender<Event>,
    pub(super) arrived_at: Duration,
    /// Shared with the event stream.
    pub(super) progress: Arc<Progress>,
    /// Choices that have not ended.
    pub(super) seqs: Vec<SeqId>,
    pub(super) adapter: Option<AdapterId>,
    pub(super) stop_tokens: Vec<TokenId>,
    pub(super) usage: Usage,
    pub(super) prompt_logprobs: Option<usize>,
    /// Prompt positions whose logits were used.
    pub(super) prompt_rows: usize,
}

/// State of an adapter on the runner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AdapterState {
    Usable,
    /// Stays until its last request ends; new requests cannot use it.
    Retired,
}

/// Plan and batch of a step. Reused by later steps.
#[derive(Default)]
pub(super) struct PlannedStep {
    pub(super) plan: StepPlan,
    pub(super) batch: StepBatch,
}

/// A time on the machine's clock and on the engine's, which tests set manually.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Timestamp {
    pub(super) instant: Instant,
    pub(super) clock: Duration,
}

/// A step that was submitted to the device.
pub(super) struct StepInFlight {
    pub(super) ticket: Ticket,
    pub(super) step: PlannedStep,
    /// Whether it has drafts, as [`StepLoop::begin_step`] determined; `None`: the step does not count for the speedup.
    pub(super) drafted: Option<bool>,
    pub(super) prompt_tokens: usize,
    /// Its expected duration.
    pub(super) expected: Duration,
    /// When its planning began.
    pub(super) started: Timestamp,
    pub(super) submitted: Timestamp,
    /// Whether the next step can be planned without its tokens.
    pub(super) can_be_followed: bool,
}

impl StepInFlight {
    /// Whether one of its sequences uses this adapter, sequences that have ended since included.
    pub(super) fn has_adapter(&self, id: AdapterId) -> bool {
        self.step.batch.adapters.contains(&Some(id))
    }
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
}
