//! [`RunnerGroup`]: the ranks of a model in lock step.
//!
//! Each rank is a [`DecoderRunner`] of its own, with a rank's share of heads and widths, on a thread or in a process of its
//! own. Rank 0 leads: it tells the others each step ([`message`]), and what it reads counts. The others [`follow`]. All get
//! the same batches in the same order, so they make the same collectives. A rank that fails ends the group, because the
//! others' caches no longer agree with it.

mod message;

use crate::batch::StepBatch;
use crate::cache::{CacheGroup, StateSlots};
use crate::load::load_rank_weights;
use crate::lora::{AdapterLoader, LoadedAdapter};
use crate::model::Model;
use crate::progress::LoadProgress;
use crate::readback::{Readback, StepOutput, Ticket};
use crate::runner::{DecoderRunner, ModelRunner, RunnerConfig};
use crate::spec::DecoderSpec;
use crate::weights::{WeightForm, WeightPolicy};
use ferrum_formats::LoraFolder;
use ferrum_kernels::{
    BackendKvDtype, BatchInvariance, GroupCall, GroupHandle, KvDtypeKind, LlmBackend, LocalGroup,
    PagedKvShape, Span,
};
use ferrum_types::{AdapterId, Dtype, Error, Result};
use message::Message;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

const OP: &str = "group";

/// The rank that the others follow.
const LEADER: usize = 0;

/// Ranks that compute one model together, as the leading one has them.
pub struct RunnerGroup<B: LlmBackend> {
    spec: DecoderSpec,
    // Dropped in this order: communicators of devices are left by all ranks together, so rank 0 leaves before it waits for the
    // others, and its handle of the group goes last.
    /// Rank 0, which runs on the caller's thread.
    first: DecoderRunner<B>,
    /// The other ranks, where they are threads that this group has started.
    threads: Threads,
    /// Rank 0's handle of the group, by which messages go to the others.
    transport: GroupHandle,
    /// The next message.
    words: Vec<u32>,
    /// Whether a message was sent whose part of the work rank 0 has not done.
    step_pending: bool,
}

/// Threads that are waited for.
#[derive(Default)]
struct Threads(Vec<JoinHandle<()>>);

impl Drop for Threads {
    fn drop(&mut self) {
        for thread in self.0.drain(..) {
            // Its panic has ended the group, and was reported by the step that it happened in.
            let _ = thread.join();
        }
    }
}

/// The part of a LoRA adapter that rank 0 holds, and where the others find theirs.
pub struct GroupAdapter<B: LlmBackend> {
    own: LoadedAdapter<B>,
    path: PathBuf,
}

/// Loads LoRA adapters for a group, on whatever thread.
pub struct GroupAdapterLoader<B: LlmBackend>(AdapterLoader<B>);

impl<B: LlmBackend> GroupAdapterLoader<B> {
    /// Reads an adapter and holds it against the model. The other ranks read it when it is
    /// [added](RunnerGroup::add_adapter).
    ///
    /// # Errors
    /// Those of [`AdapterLoader::load`].
    pub fn load(&self, folder: &LoraFolder) -> Result<GroupAdapter<B>> {
        Ok(GroupAdapter {
            own: self.0.load(folder)?,
            path: folder.opened_path().to_owned(),
        })
    }
}

impl<B: LlmBackend> RunnerGroup<B> {
    /// Loads a model for as many ranks as there are devices, which may be handles to the same one, in the form `W` and
    /// with KV caches of element `K`. The other ranks are threads.
    ///
    /// # Errors
    /// Those of [`Model::shard`], [`load_rank_weights`] and [`ModelRunner::new`]; `InvalidArgument` without devices.
    pub fn load<K: KvDtypeKind, W: WeightForm<B>>(
        devices: &[B],
        model: &Model,
        config: RunnerConfig,
        progress: LoadProgress<'_>,
    ) -> Result<Self>
    where
        B: BackendKvDtype<K>,
    {
        let mut runners = Vec::with_capacity(devices.len());
        for (rank, device) in devices.iter().enumerate() {
            runners.push(rank_runner::<B, K, W>(
                device,
                (model, rank, devices.len()),
                config,
                progress,
            )?);
        }
        let mut ranks = runners.into_iter().zip(LocalGroup::ranks(devices.len()));
        let Some((first, transport)) = ranks.next() else {
            return Err(Error::invalid(OP, "no device, expected one for each rank"));
        };
        let mut group = Self::lead(model.spec.clone(), first, transport)?;
        for (runner, transport) in ranks {
            let name = format!("rank {}", transport.rank());
            // The leader hears of an error from the collective that it is in.
            let work = move || _ = follow(runner, &transport);
            let thread = std::thread::Builder::new().name(name).spawn(work);
            let thread =
                thread.map_err(|e| Error::invalid(OP, format!("cannot start a thread: {e}")))?;
            group.threads.0.push(thread);
        }
        Ok(group)
    }

    /// Leads ranks that [`follow`] on other threads or in other processes: `first` is the runner of rank 0 of the
    /// model `spec`, and `transport` its handle of their group.
    ///
    /// # Errors
    /// Those of [`join`](ferrum_kernels::BackendCollective::join); `InvalidArgument` for another rank's handle.
    pub fn lead(
        spec: DecoderSpec,
        first: impl Into<DecoderRunner<B>>,
        transport: GroupHandle,
    ) -> Result<Self> {
        let mut first = first.into();
        if transport.rank() != LEADER {
            let reason = format!(
                "rank {} cannot lead, expected rank {LEADER}",
                transport.rank()
            );
            return Err(Error::invalid(OP, reason));
        }
        B::join(first.context_mut(), Arc::clone(&transport))?;
        Ok(Self {
            spec,
            first,
            threads: Threads::default(),
            transport,
            words: Vec::new(),
            step_pending: false,
        })
    }

    /// The whole decoder.
    pub fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.transport.size()
    }

    /// The sizes that each rank was made for.
    pub fn config(&self) -> &RunnerConfig {
        self.first.config()
    }

    /// The KV pool of one layer on rank 0. Its number of blocks, and their size, are those of every rank.
    pub fn pool(&self) -> PagedKvShape {
        self.first.pool()
    }

    /// [`DecoderRunner::cache_groups`] of every rank.
    pub fn cache_groups(&self) -> &[CacheGroup] {
        self.first.cache_groups()
    }

    /// [`DecoderRunner::state_slots`] of every rank.
    pub fn state_slots(&self) -> Option<StateSlots> {
        self.first.state_slots()
    }

    /// [`DecoderRunner::samples`] of rank 0, which alone chooses tokens.
    pub fn samples(&self) -> bool {
        self.first.samples()
    }

    /// [`DecoderRunner::batch_invariance`]: where a device promises equal bits, sums over ranks are made element by element, and change nothing
    /// of it.
    pub fn batch_invariance(&self) -> BatchInvariance {
        self.first.batch_invariance()
    }

    /// [`DecoderRunner::take_spans`] of rank 0.
    ///
    /// # Errors
    /// What the device says.
    pub fn take_spans(&mut self) -> Result<Vec<Span>> {
        self.first.take_spans()
    }

    /// [`DecoderRunner::submit`] on all ranks.
    ///
    /// # Errors
    /// Those of `submit`. A batch that does not fit is refused before another rank sees it; any other error ends the
    /// group.
    pub fn submit(&mut self, batch: &StepBatch, wanted: &[Readback]) -> Result<Ticket> {
        self.first.check(batch, wanted)?;
        message::write_step(batch, wanted, &mut self.words)?;
        self.broadcast()?;
        let ticket = self.first.submit(batch, wanted);
        self.done(ticket)
    }

    /// [`DecoderRunner::collect`] of rank 0.
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

    /// What loads rank 0's part of LoRA adapters.
    pub fn adapter_loader(&self) -> GroupAdapterLoader<B> {
        GroupAdapterLoader(self.first.adapter_loader())
    }

    /// Takes a LoRA adapter on all ranks: the others read their parts from the path that rank 0 read its own from.
    ///
    /// # Errors
    /// `Model` names the rank that could not read it, and no rank has the adapter then; what the device says.
    pub fn add_adapter(&mut self, id: AdapterId, adapter: GroupAdapter<B>) -> Result<()> {
        let path = adapter.path.to_string_lossy();
        message::write_adapter(id, &path, &mut self.words)?;
        self.broadcast()?;
        let own = self.first.add_adapter(id, adapter.own);
        let agreed = agree_on_adapter(&self.transport, &mut self.first, id, own);
        // A rank that refuses an adapter goes on, and so do the others without it.
        self.step_pending = false;
        agreed
    }

    /// Loads a LoRA adapter on all ranks, each its part.
    ///
    /// # Errors
    /// Those of [`GroupAdapterLoader::load`] and [`add_adapter`](Self::add_adapter). The group stays as it was.
    pub fn load_adapter(&mut self, id: AdapterId, folder: &LoraFolder) -> Result<()> {
        let adapter = self.adapter_loader().load(folder)?;
        self.add_adapter(id, adapter)
    }

    /// Forgets an adapter; whether it was there.
    pub fn unload_adapter(&mut self, id: AdapterId) -> bool {
        message::write_removal(id, &mut self.words);
        let sent = self.broadcast();
        self.step_pending = false;
        // A group that has ended keeps nothing that could be used.
        self.first.unload_adapter(id) && sent.is_ok()
    }

    /// Sends the written message to all other ranks.
    fn broadcast(&mut self) -> Result<()> {
        send(&self.transport, &self.words)?;
        self.step_pending = true;
        Ok(())
    }

    /// Ends the group when rank 0's part of a message's work is an error.
    fn done<T>(&mut self, result: Result<T>) -> Result<T> {
        self.step_pending = false;
        or_abort(&self.transport, result)
    }
}

/// The others wait for the next step.
impl<B: LlmBackend> Drop for RunnerGroup<B> {
    fn drop(&mut self) {
        // A rank 0 that panicked in a step has left the others in it.
        if self.step_pending {
            self.transport.abort("rank 0 did not finish a step");
        } else if self.transport.failure().is_none() {
            message::write_stop(&mut self.words);
            // Without the others there is no rank to stop.
            let _ = self.broadcast();
        }
    }
}

/// Loads the runner of a rank of a model in the form `W`: rank and ranks. It is not joined yet.
///
/// # Errors
/// Those of [`Model::shard`], [`load_rank_weights`] and [`ModelRunner::new`].
pub fn rank_runner<B, K, W>(
    device: &B,
    (model, rank, ranks): (&Model, usize, usize),
    config: RunnerConfig,
    progress: LoadProgress<'_>,
) -> Result<ModelRunner<B, K>>
where
    B: LlmBackend + BackendKvDtype<K>,
    K: KvDtypeKind,
    W: WeightForm<B>,
{
    let cut = model.shard(WeightPolicy::of::<B, W>(), (rank, ranks))?;
    let weights = load_rank_weights::<B, W>(device, model, &cut, progress)?;
    ModelRunner::new(device, cut.rank_spec(), weights, config)
}

/// Runs the steps that rank 0 tells of, until it says that there are no more.
///
/// # Errors
/// What a step says, which ends the group; that the group has ended.
pub fn follow<B: LlmBackend>(
    runner: impl Into<DecoderRunner<B>>,
    transport: &GroupHandle,
) -> Result<()> {
    let mut runner = runner.into();
    let joined = B::join(runner.context_mut(), Arc::clone(transport));
    let followed = joined.and_then(|()| follow_steps(&mut runner, transport));
    or_abort(transport, followed)
}

fn follow_steps<B: LlmBackend>(
    runner: &mut DecoderRunner<B>,
    transport: &GroupHandle,
) -> Result<()> {
    let (mut words, mut batch) = (Vec::new(), StepBatch::default());
    let (mut wanted, mut output) = (Vec::new(), StepOutput::default());
    loop {
        receive(transport, &mut words)?;
        match message::read(&words, &mut batch, &mut wanted)? {
            Message::Step => runner.run(&batch, &wanted, &mut output)?,
            Message::AddAdapter(id, path) => {
                let folder = LoraFolder::open(&path).map_err(Error::from);
                let loaded = folder.and_then(|folder| runner.load_adapter(id, &folder));
                // An adapter that is refused here is refused by all, and the group goes on.
                match agree_on_adapter(transport, runner, id, loaded) {
                    Err(Error::Model(_)) | Ok(()) => {}
                    Err(error) => return Err(error),
                }
            }
            Message::RemoveAdapter(id) => _ = runner.unload_adapter(id),
            Message::Stop => return Ok(()),
        }
    }
}

/// Tells all ranks how loading an adapter went on this one. Where it failed anywhere, none keeps it.
fn agree_on_adapter<B: LlmBackend>(
    transport: &GroupHandle,
    runner: &mut DecoderRunner<B>,
    id: AdapterId,
    own: Result<()>,
) -> Result<()> {
    let text = own
        .as_ref()
        .map_or_else(ToString::to_string, |()| String::new());
    let call = GroupCall {
        op: "adapter",
        dtype: Dtype::U8,
        len: 0,
        detail: id.0 as usize,
    };
    transport.post(call, text.len(), &mut |bytes| {
        bytes.copy_from_slice(text.as_bytes());
        Ok(())
    })?;
    let mut failed = None;
    transport.gather(&mut |ranks| {
        let mut texts = ranks.iter().map(|text| String::from_utf8_lossy(text));
        failed = texts.position(|text| !text.is_empty()).map(|rank| {
            let text = String::from_utf8_lossy(ranks[rank]);
            Error::Model(format!("rank {rank} of {}: {text}", ranks.len()))
        });
        Ok(())
    })?;
    let Some(error) = failed else {
        return Ok(());
    };
    runner.unload_adapter(id);
    Err(own.err().map_or(error, |own| Error::Model(own.to_string())))
}

/// A message, whose length the other ranks do not know.
const MESSAGE: GroupCall = GroupCall {
    op: "message",
    dtype: Dtype::U32,
    len: 0,
    detail: LEADER,
};

fn send(transport: &GroupHandle, words: &[u32]) -> Result<()> {
    transport.post(MESSAGE, size_of_val(words), &mut |bytes| {
        bytes.copy_from_slice(bytemuck::cast_slice(words));
        Ok(())
    })?;
    transport.gather(&mut |_| Ok(()))
}

fn receive(transport: &GroupHandle, words: &mut Vec<u32>) -> Result<()> {
    transport.post(MESSAGE, 0, &mut |_| Ok(()))?;
    transport.gather(&mut |ranks| {
        let sent = bytemuck::try_cast_slice(ranks[LEADER]);
        let sent = sent.map_err(|_| Error::invalid(OP, "a message is not of whole words"))?;
        words.clear();
        words.extend_from_slice(sent);
        Ok(())
    })
}

/// Ends the group when a rank's part of the work is an error.
fn or_abort<T>(transport: &GroupHandle, result: Result<T>) -> Result<T> {
    if let Err(error) = &result {
        transport.abort(&error.to_string());
    }
    result
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;
    use crate::batch::{LogitRows, SeqStep};
    use crate::model::read_model;
    use crate::weights::Dequantized;
    use ferrum_formats::ModelSource;
    use ferrum_kernels::KvF32;
    use ferrum_kernels::reference::ReferenceBackend;
    use ferrum_types::BlockId;
    use std::path::Path;

    type Group = RunnerGroup<ReferenceBackend>;
    type Runner = ModelRunner<ReferenceBackend, KvF32>;

    fn model() -> Model {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
        read_model(ModelSource::open(fixtures.join("qwen2")).unwrap()).unwrap()
    }

    fn runner(model: &Model, rank: usize, ranks: usize) -> Runner {
        let (device, config) = (ReferenceBackend::new(), RunnerConfig::single(32));
        let part = (model, rank, ranks);
        rank_runner::<_, KvF32, Dequantized>(&device, part, config, &mut |_, _| ()).unwrap()
    }

    /// Rank 0 of a group, whose other ranks do what `work` says.
    fn led(ranks: usize, work: fn(Runner, &GroupHandle)) -> Group {
        let model = model();
        let mut ends = LocalGroup::ranks(ranks).into_iter();
        let first = runner(&model, 0, ranks);
        let mut group = Group::lead(model.spec.clone(), first, ends.next().unwrap()).unwrap();
        for transport in ends {
            let runner = runner(&model, transport.rank(), ranks);
            let thread = std::thread::spawn(move || work(runner, &transport));
            group.threads.0.push(thread);
        }
        group
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

    fn step(group: &mut Group) -> Result<()> {
        group.run(&batch(), &[Readback::Logits], &mut StepOutput::default())
    }

    /// The other ranks are in a collective when one fails.
    #[test]
    fn a_rank_that_fails_ends_the_group() {
        let mut group = led(3, |runner, transport| match transport.rank() {
            2 => {
                receive(transport, &mut Vec::new()).unwrap();
                transport.abort("no more paper");
            }
            _ => assert!(follow(runner, transport).is_err()),
        });
        for _ in 0..2 {
            let text = step(&mut group).unwrap_err().to_string();
            let expected = "rank 2 of 3 ended the group: no more paper";
            assert!(text.contains(expected), "{text}");
        }
    }

    #[test]
    fn a_rank_that_panics_ends_the_group() {
        let mut group = led(2, |_, _| ());
        let text = step(&mut group).unwrap_err().to_string();
        assert!(text.contains("rank 1"), "{text}");
        assert!(step(&mut group).is_err());
    }

    /// Ranks that are told to stop end without an error, and may follow another leader of the same group.
    #[test]
    fn ranks_stop_when_the_leader_goes() {
        let mut group = led(2, |runner, transport| {
            follow(runner, transport).unwrap();
            assert_eq!(transport.failure(), None);
        });
        step(&mut group).unwrap();
        let threads = std::mem::take(&mut group.threads.0);
        // Rank 0's handle outlives its runner, as it does where another model is loaded.
        let _end = Arc::clone(&group.transport);
        drop(group);
        for thread in threads {
            thread.join().unwrap();
        }
    }

    #[test]
    fn words_that_are_no_message_end_the_group() {
        let mut group = led(2, |runner, transport| {
            let text = follow(runner, transport).unwrap_err().to_string();
            assert!(text.contains("found a message of kind 77"), "{text}");
        });
        group.words = vec![77];
        group.broadcast().unwrap();
        let text = step(&mut group).unwrap_err().to_string();
        assert!(text.contains("rank 1 of 2 ended the group"), "{text}");
    }

    #[test]
    fn a_group_needs_a_device_and_its_first_rank() {
        let (model, config) = (model(), RunnerConfig::single(32));
        let none = Group::load::<KvF32, Dequantized>(&[], &model, config, &mut |_, _| ());
        assert!(matches!(
            none.map(|_| ()),
            Err(Error::InvalidArgument { .. })
        ));
        let transport = LocalGroup::ranks(2).pop().unwrap();
        let other = Group::lead(model.spec.clone(), runner(&model, 1, 2), transport);
        let text = other.map(|_| ()).unwrap_err().to_string();
        assert!(text.contains("rank 1 cannot lead"), "{text}");
    }
}
