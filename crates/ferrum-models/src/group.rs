//! [`RunnerGroup`]: the ranks of a model in one process, in lock step.
//!
//! Each rank is a [`ModelRunner`] of its own, with a rank's share of heads and widths, on a thread of its own. All get
//! the same batches in the same order, so they make the same collectives; the output of rank 0 counts. A rank that
//! fails ends the group, because the others' caches no longer agree with it.

use crate::batch::StepBatch;
use crate::cache::StateSlots;
use crate::load::{LoadProgress, Model, load_rank_weights};
use crate::readback::{Readback, StepOutput, Ticket};
use crate::runner::{ModelRunner, RunnerConfig};
use crate::spec::DecoderSpec;
use crate::weights::WeightForm;
use ferrum_formats::LoraFolder;
use ferrum_kernels::{
    BackendKvDtype, GroupRank, KvDtypeKind, KvFp16, LlmBackend, LocalGroup, PagedKvShape,
};
use ferrum_types::{AdapterId, Error, Result};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

const OP: &str = "group";

/// What every rank does with its runner.
type Job<B, K> = Arc<dyn Fn(&mut ModelRunner<B, K>) -> Result<()> + Send + Sync>;

/// Ranks that compute one model together.
pub struct RunnerGroup<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind = KvFp16> {
    spec: DecoderSpec,
    /// Rank 0, which runs on the caller's thread.
    first: ModelRunner<B, K>,
    end: GroupRank,
    others: Vec<Worker<B, K>>,
}

/// A rank on its thread.
struct Worker<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind> {
    /// `None` once the thread is to end.
    jobs: Option<Sender<Job<B, K>>>,
    done: Receiver<Result<()>>,
    thread: Option<JoinHandle<()>>,
}

impl<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind> RunnerGroup<B, K> {
    /// Loads a model for as many ranks as there are devices, which may be handles to the same one, in the form `W`.
    ///
    /// # Errors
    /// Those of [`Model::cut`], [`load_rank_weights`] and [`ModelRunner::new`]; `InvalidArgument` without devices.
    pub fn load<W: WeightForm<B>>(
        devices: &[B],
        model: &Model,
        config: RunnerConfig,
        progress: LoadProgress<'_>,
    ) -> Result<Self> {
        let mut runners = Vec::with_capacity(devices.len());
        for (rank, device) in devices.iter().enumerate() {
            let cut = model.cut(rank, devices.len())?;
            let weights = load_rank_weights::<B, W>(device, model, &cut, progress)?;
            runners.push(ModelRunner::new(device, cut.rank_spec(), weights, config)?);
        }
        Self::new(model.spec.clone(), runners)
    }

    /// Joins the runners of all ranks, in order, of the model `spec`.
    fn new(spec: DecoderSpec, runners: Vec<ModelRunner<B, K>>) -> Result<Self> {
        let ends = LocalGroup::ranks(runners.len());
        let mut ranks = runners.into_iter().zip(ends);
        let Some((mut first, end)) = ranks.next() else {
            return Err(Error::invalid(OP, "no device, expected one for each rank"));
        };
        B::join(first.context_mut(), Arc::clone(&end))?;
        let mut others = Vec::new();
        for (mut runner, end) in ranks {
            B::join(runner.context_mut(), Arc::clone(&end))?;
            others.push(Worker::start(runner, end)?);
        }
        Ok(Self {
            spec,
            first,
            end,
            others,
        })
    }

    /// The whole decoder.
    pub fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    /// The sizes that each rank was made for.
    pub fn config(&self) -> &RunnerConfig {
        self.first.config()
    }

    /// The KV pool of one layer on rank 0. Its number of blocks, and their size, are those of every rank.
    pub fn pool(&self) -> PagedKvShape {
        self.first.pool()
    }

    /// [`ModelRunner::state_slots`] of every rank.
    pub fn state_slots(&self) -> Option<StateSlots> {
        self.first.state_slots()
    }

    /// [`ModelRunner::submit`] on all ranks. All have ended when this returns.
    ///
    /// # Errors
    /// Those of `submit`. A batch that does not fit is refused before a rank sees it; any other error ends the group.
    pub fn submit(&mut self, batch: &StepBatch, wanted: &[Readback]) -> Result<Ticket> {
        self.first.check(batch, wanted)?;
        let step = Arc::new((batch.clone(), wanted.to_vec()));
        // What the other ranks read is what rank 0 reads.
        let job: Job<B, K> =
            Arc::new(move |runner| runner.run(&step.0, &step.1, &mut StepOutput::default()));
        let mut ticket = None;
        self.run_all(job, |first| {
            ticket = Some(first.submit(batch, wanted)?);
            Ok(())
        })?;
        ticket.ok_or_else(|| Error::invalid(OP, "rank 0 gave no ticket"))
    }

    /// [`ModelRunner::collect`] of rank 0.
    ///
    /// # Errors
    /// Those of `collect`.
    pub fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<()> {
        self.first.collect(ticket, out)
    }

    /// [`submit`](Self::submit), and [`collect`](Self::collect) at once.
    ///
    /// # Errors
    /// Those of `submit`.
    pub fn run(
        &mut self,
        batch: &StepBatch,
        wanted: &[Readback],
        out: &mut StepOutput,
    ) -> Result<()> {
        let ticket = self.submit(batch, wanted)?;
        self.collect(ticket, out)
    }

    /// Loads a LoRA adapter on all ranks, each its part.
    ///
    /// # Errors
    /// Those of [`ModelRunner::load_adapter`]. One of rank 0, which reads the whole adapter first, leaves the group as
    /// it was; one of another rank ends it.
    pub fn load_adapter(&mut self, id: AdapterId, folder: &Arc<LoraFolder>) -> Result<()> {
        let loaded = self.first.adapter_loader().load(folder)?;
        self.first.add_adapter(id, loaded)?;
        let folder = Arc::clone(folder);
        let job: Job<B, K> = Arc::new(move |runner| runner.load_adapter(id, &folder));
        self.run_all(job, |_| Ok(()))
    }

    /// Forgets an adapter; whether it was there.
    pub fn unload_adapter(&mut self, id: AdapterId) -> bool {
        let job: Job<B, K> = Arc::new(move |runner| {
            runner.unload_adapter(id);
            Ok(())
        });
        let found = self.first.unload_adapter(id);
        // A group that has ended keeps nothing that could be used.
        self.run_all(job, |_| Ok(())).is_ok() && found
    }

    /// Runs a job on all ranks but the first, and `own` on that; the error is that of the rank which failed first.
    fn run_all(
        &mut self,
        job: Job<B, K>,
        own: impl FnOnce(&mut ModelRunner<B, K>) -> Result<()>,
    ) -> Result<()> {
        if let Some((rank, reason)) = self.end.failure() {
            return Err(ended(rank, &reason));
        }
        for worker in &self.others {
            // A thread that is gone has ended the group, which the collectives and `done` tell.
            let _ = worker.jobs.as_ref().map(|jobs| jobs.send(Arc::clone(&job)));
        }
        let mut results = vec![or_abort(&self.end, own(&mut self.first))];
        results.extend(self.others.iter().zip(1..).map(|(worker, rank)| {
            let gone = |_| Err(ended(rank, "its thread panicked"));
            worker.done.recv().unwrap_or_else(gone)
        }));
        let failed = self.end.failure().map(|(rank, _)| rank);
        if let Some(result) = failed.and_then(|rank| results.get_mut(rank)) {
            std::mem::replace(result, Ok(()))?;
        }
        results.into_iter().collect()
    }
}

impl<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind> Worker<B, K> {
    fn start(mut runner: ModelRunner<B, K>, end: GroupRank) -> Result<Self> {
        let (jobs, inbox) = channel::<Job<B, K>>();
        let (outbox, done) = channel();
        let name = format!("rank {}", end.rank());
        let work = move || {
            // A panic drops the runner and `end`, which ends the group for the others.
            for job in inbox {
                if outbox.send(or_abort(&end, job(&mut runner))).is_err() {
                    break;
                }
            }
        };
        let thread = std::thread::Builder::new().name(name).spawn(work);
        let thread =
            thread.map_err(|e| Error::invalid(OP, format!("cannot start a thread: {e}")))?;
        Ok(Self {
            jobs: Some(jobs),
            done,
            thread: Some(thread),
        })
    }
}

/// Threads may wait in a collective for a rank that is being dropped.
impl<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind> Drop for RunnerGroup<B, K> {
    fn drop(&mut self) {
        self.end.abort("the group was dropped");
        for worker in &mut self.others {
            worker.jobs = None;
            if let Some(thread) = worker.thread.take() {
                // Its panic was told by the step that it happened in.
                let _ = thread.join();
            }
        }
    }
}

/// Ends the group when a rank's part of a job is an error.
fn or_abort(end: &GroupRank, result: Result<()>) -> Result<()> {
    if let Err(error) = &result {
        end.abort(&error.to_string());
    }
    result
}

fn ended(rank: usize, reason: &str) -> Error {
    Error::Device {
        backend: OP,
        op: "step",
        reason: format!("rank {rank} ended the group: {reason}"),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;
    use crate::batch::{LogitRows, SeqStep};
    use crate::load::read_model;
    use crate::weights::Expanded;
    use ferrum_formats::ModelSource;
    use ferrum_kernels::reference::ReferenceBackend;
    use ferrum_kernels::{BackendCollective, KvF32};
    use ferrum_types::BlockId;
    use std::path::Path;

    type Group = RunnerGroup<ReferenceBackend, KvF32>;

    fn group(ranks: usize) -> Group {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
        let source = ModelSource::open(fixtures.join("qwen2")).unwrap();
        let model = read_model(source).unwrap();
        let devices = vec![ReferenceBackend::new(); ranks];
        let config = RunnerConfig::single(32);
        RunnerGroup::load::<Expanded>(&devices, &model, config, &mut |_, _| ()).unwrap()
    }

    fn batch() -> StepBatch {
        let mut batch = StepBatch::default();
        let step = SeqStep {
            tokens: &[1, 2, 3],
            start: 0,
            prompt_len: 3,
            blocks: &[BlockId(0)],
            hidden: false,
            logits: LogitRows::Last,
            adapter: None,
        };
        batch.push(step).unwrap();
        batch
    }

    /// The other ranks are in a collective when one fails.
    #[test]
    fn a_rank_that_fails_ends_the_group() {
        let mut group = group(3);
        let (batch, fails) = (Arc::new(batch()), Error::Model("no more paper".into()));
        let (step, error) = (Arc::clone(&batch), fails.clone());
        let job: Job<_, _> = Arc::new(move |runner: &mut ModelRunner<ReferenceBackend, KvF32>| {
            match ReferenceBackend::rank(runner.context_mut()) {
                2 => Err(error.clone()),
                _ => runner.submit(&step, &[Readback::Logits]).map(|_| ()),
            }
        });
        let own = |first: &mut ModelRunner<ReferenceBackend, KvF32>| {
            first.submit(&batch, &[Readback::Logits]).map(|_| ())
        };
        assert_eq!(group.run_all(job, own), Err(fails));
        let later = group.submit(&batch, &[Readback::Logits]).map(|_| ());
        let text = later.unwrap_err().to_string();
        assert!(
            text.contains("rank 2 ended the group: no more paper"),
            "{text}"
        );
    }

    #[test]
    fn a_rank_that_panics_ends_the_group() {
        let mut group = group(2);
        let batch = batch();
        let job: Job<_, _> = Arc::new(|_: &mut ModelRunner<ReferenceBackend, KvF32>| panic!("oh"));
        let own = |first: &mut ModelRunner<ReferenceBackend, KvF32>| {
            first.submit(&batch, &[Readback::Logits]).map(|_| ())
        };
        let text = group.run_all(job, own).unwrap_err().to_string();
        assert!(text.contains("rank 1"), "{text}");
        assert!(group.submit(&batch, &[Readback::Logits]).is_err());
    }

    #[test]
    fn a_group_needs_a_device() {
        let none: Result<Group> = RunnerGroup::new(group(1).spec().clone(), Vec::new());
        assert!(matches!(
            none.map(|_| ()),
            Err(Error::InvalidArgument { .. })
        ));
    }
}
