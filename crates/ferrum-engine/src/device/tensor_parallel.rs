//! Ranks that compute one model together (tensor parallelism): how they meet, and what each of them does.
//!
//! Rank 0 leads. It loads its part of a model like any model, with [`Ranks`] in the [`Placement`](crate::Placement), and
//! gets a runner like any other. Before that, it sends the other ranks what to load, in a message of plain integers that
//! they check against their model files. Those ranks do nothing but [`serve_rank`]: load their part, follow the
//! steps, and wait for the next model. Whether they are threads or processes is the group's business.

use super::dispatch::{BackendDispatch, BackendOptions, cuda_devices};
use super::job::{DeviceJob, KvElement};
use super::kind::{BackendKind, KvDtype};
use crate::runner::StepRunner;
use ferrum_kernels::cpu::{CpuBackend, CpuConfig};
use ferrum_kernels::{
    BackendKvDtype, GroupCall, GroupHandle, KvBf16, KvDtypeKind, KvF32, KvFp8, KvFp16, KvInt8,
    LlmBackend,
};
use ferrum_models::{
    KvLayout, LoadProgress, MemoryPlan, Model, ModelRunner, RunnerConfig, RunnerGroup, WeightForm,
    WeightPolicy, follow, rank_memory_plan, rank_runner,
};
use ferrum_types::{Dtype, Error, Result};
use std::hash::{DefaultHasher, Hash, Hasher};

const OP: &str = "ranks";

/// Most ranks that a model is tried for, to say how many it can be cut for.
const MAX_RANKS: usize = 1024;

/// What rank 0 knows of its group.
#[derive(Clone, Debug)]
pub struct Ranks {
    /// Its end.
    pub end: GroupHandle,
    /// Ranks on this host, this one among them.
    pub local: usize,
    /// Whether each of them has a device of its own; otherwise they share the memory of one.
    pub own_devices: bool,
    /// Where the others find the model; empty for the one inside the program.
    pub path: String,
}

/// The model that the ranks load next, as rank 0 sends it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct LoadCommand {
    path: String,
    fingerprint: u64,
    kv: KvDtype,
    config: RunnerConfig,
}

/// The first number of a message: a load command, or the end.
const LOAD: u64 = 0x6665_7272_756d_0001;
const SHUTDOWN: u64 = 0x6665_7272_756d_0002;

/// Numbers of a load command before its path.
const NUMBERS: usize = 14;

impl LoadCommand {
    fn of(model: &Model, ranks: &Ranks, (config, kv): (RunnerConfig, KvDtype)) -> Self {
        Self {
            path: ranks.path.clone(),
            fingerprint: fingerprint(model),
            kv,
            config,
        }
    }

    fn to_bytes(&self) -> Vec<u8> {
        let config = &self.config;
        let (layout, block_size) = match config.layout {
            KvLayout::Paged { block_size } => (0, block_size),
            KvLayout::Grouped { block_size } => (1, block_size),
            KvLayout::Contiguous => (2, 0),
        };
        let kv = KvDtype::NAMES.iter().position(|(_, kv)| *kv == self.kv);
        let sizes = [
            kv.unwrap_or(usize::MAX),
            config.context,
            config.max_seqs,
            config.max_tokens,
            config.max_logit_rows,
            config.kv_tokens,
            config.kept_states,
            layout,
            block_size,
            config.profile.into(),
            self.path.len(),
            0,
        ];
        let sizes = sizes.map(|n| n as u64);
        let numbers: [u64; NUMBERS] = std::array::from_fn(|i| match i {
            0 => LOAD,
            1 => self.fingerprint,
            _ => sizes[i - 2],
        });
        let mut bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        bytes.extend_from_slice(self.path.as_bytes());
        bytes
    }

    /// Reads a message; `None`: there is nothing more to load.
    fn from_bytes(bytes: &[u8]) -> Result<Option<Self>> {
        let wrong = |what: &str| Error::invalid(OP, format!("a load command has {what}"));
        let (numbers, _) = bytes.as_chunks::<8>();
        let number = |i: usize| -> Result<u64> {
            let number = numbers.get(i).map(|n| u64::from_le_bytes(*n));
            number.ok_or_else(|| wrong("too few numbers"))
        };
        match number(0)? {
            SHUTDOWN => return Ok(None),
            LOAD => {}
            _ => return Err(wrong("a beginning that is not known")),
        }
        let size = |i: usize| -> Result<usize> {
            let size = usize::try_from(number(i + 2)?).ok();
            size.filter(|&n| n <= i32::MAX as usize)
                .ok_or_else(|| wrong("a size that does not fit 31 bits"))
        };
        let kv = KvDtype::NAMES.get(size(0)?);
        let (_, kv) = *kv.ok_or_else(|| wrong("a KV cache that is not known"))?;
        let block_size = size(8)?;
        let layout = match size(7)? {
            0 => KvLayout::Paged { block_size },
            1 => KvLayout::Grouped { block_size },
            2 => KvLayout::Contiguous,
            _ => return Err(wrong("a layout that is not known")),
        };
        let profile = size(9)? != 0;
        let path = bytes.get(8 * NUMBERS..).unwrap_or_default();
        let path = (numbers.len() >= NUMBERS && path.len() == size(10)?)
            .then(|| String::from_utf8(path.to_vec()).ok());
        Ok(Some(Self {
            path: path
                .flatten()
                .ok_or_else(|| wrong("another path than it says"))?,
            fingerprint: number(1)?,
            kv,
            config: RunnerConfig {
                context: size(1)?,
                max_seqs: size(2)?,
                max_tokens: size(3)?,
                max_logit_rows: size(4)?,
                kv_tokens: size(5)?,
                kept_states: size(6)?,
                layout,
                profile,
            },
        }))
    }
}

/// What tells a model, and the program that reads it, from others: of each tensor some bytes, because ranks read but their parts.
fn fingerprint(model: &Model) -> u64 {
    const SAMPLE: usize = 64;
    let mut hasher = DefaultHasher::new();
    env!("CARGO_PKG_VERSION").hash(&mut hasher);
    format!("{:?}", model.spec).hash(&mut hasher);
    let tensors = model.tensors();
    tensors.total_bytes().hash(&mut hasher);
    for info in tensors.infos() {
        info.name.hash(&mut hasher);
        let bytes = tensors.get(&info.name).map_or(&[][..], |view| view.bytes);
        for start in [0, bytes.len() / 2] {
            let end = bytes.len().min(start + SAMPLE);
            bytes[start..end].hash(&mut hasher);
        }
    }
    tensors.release();
    hasher.finish()
}

/// A message whose length the other ranks do not know.
fn call(op: &'static str) -> GroupCall {
    GroupCall {
        op,
        dtype: Dtype::U8,
        len: 0,
        detail: 0,
    }
}

/// Sends rank 0's bytes to all ranks, which receive them; the other ranks pass none.
fn broadcast(end: &GroupHandle, op: &'static str, bytes: &[u8]) -> Result<Vec<u8>> {
    end.post(call(op), bytes.len(), &mut |to| {
        to.copy_from_slice(bytes);
        Ok(())
    })?;
    let mut received = Vec::new();
    end.gather(&mut |ranks| {
        received.extend_from_slice(ranks[0]);
        Ok(())
    })?;
    Ok(received)
}

/// Tells the other ranks that there is nothing more to load, which ends their [`serve_rank`].
///
/// # Errors
/// That the group has ended.
pub fn shut_down_ranks(end: &GroupHandle) -> Result<()> {
    broadcast(end, "load command", &SHUTDOWN.to_le_bytes()).map(drop)
}

/// What a rank other than the first does: loads its part of what rank 0 says, as `open` finds it and on what `device`
/// opens for it, follows the steps, and waits for the next model, until [`shut_down_ranks`].
///
/// # Errors
/// An error of this rank, which fails the group; or that the group has failed.
pub fn serve_rank(
    end: &GroupHandle,
    open: &dyn Fn(&str) -> Result<Model>,
    device: &dyn Fn(&Model) -> Result<BackendDispatch>,
) -> Result<()> {
    let served = loop {
        let received = broadcast(end, "load command", &[]);
        match received.and_then(|bytes| LoadCommand::from_bytes(&bytes)) {
            Ok(None) => return Ok(()),
            Err(error) => break Err(error),
            Ok(Some(command)) => {
                if let Err(error) = follow_load(end, &command, open, device) {
                    break Err(error);
                }
            }
        }
    };
    if let Err(error) = &served {
        end.abort(&error.to_string());
    }
    served
}

fn follow_load(
    end: &GroupHandle,
    command: &LoadCommand,
    open: &dyn Fn(&str) -> Result<Model>,
    device: &dyn Fn(&Model) -> Result<BackendDispatch>,
) -> Result<()> {
    let model = open(&command.path)?;
    if fingerprint(&model) != command.fingerprint {
        return Err(Error::Model(format!(
            "{:?}: this is another model than rank 0 has, or another version of this program",
            command.path
        )));
    }
    let device = device(&model)?;
    let rank = RankLoad {
        model: &model,
        config: command.config,
        end,
        progress: &mut |_, _| (),
    };
    let keeps = model.keeps_blocks();
    match command.kv {
        KvDtype::F32 => device.with_kv::<KvF32, _>(keeps, Follow(rank)),
        KvDtype::F16 => device.with_kv::<KvFp16, _>(keeps, Follow(rank)),
        KvDtype::Bf16 => device.with_kv::<KvBf16, _>(keeps, Follow(rank)),
        KvDtype::Fp8 => device.with_kv::<KvFp8, _>(keeps, Follow(rank)),
        KvDtype::Int8 => device.with_kv::<KvInt8, _>(keeps, Follow(rank)),
    }
}

/// What a rank loads.
struct RankLoad<'a, 'p> {
    model: &'a Model,
    config: RunnerConfig,
    end: &'a GroupHandle,
    progress: LoadProgress<'p>,
}

impl RankLoad<'_, '_> {
    /// The runner of this rank, once all ranks have theirs.
    fn runner<B, K, W>(self, loading: &B) -> Result<ModelRunner<B, K>>
    where
        B: LlmBackend + BackendKvDtype<K>,
        K: KvDtypeKind,
        W: WeightForm<B>,
    {
        let Self {
            model,
            config,
            end,
            progress,
        } = self;
        let part = (model, end.rank(), end.size());
        let runner = rank_runner::<B, K, W>(loading, part, config, progress)?;
        broadcast(end, "loaded", &[])?;
        Ok(runner)
    }
}

/// Loads a rank other than the first and follows.
struct Follow<'a, 'p>(RankLoad<'a, 'p>);

impl<K: KvDtypeKind> DeviceJob<K> for Follow<'_, '_> {
    type Output = ();

    fn run<B: LlmBackend + BackendKvDtype<K>, W: WeightForm<B>>(
        self,
        (loading, _): (&B, &B),
    ) -> Result<()> {
        let end = self.0.end;
        follow(self.0.runner::<B, K, W>(loading)?, end)
    }
}

/// Loads rank 0 and leads.
struct Lead<'a, 'p>(RankLoad<'a, 'p>);

impl<K: KvDtypeKind> DeviceJob<K> for Lead<'_, '_> {
    type Output = Box<dyn StepRunner>;

    fn run<B: LlmBackend + BackendKvDtype<K>, W: WeightForm<B>>(
        self,
        (loading, _): (&B, &B),
    ) -> Result<Self::Output> {
        let (spec, end) = (self.0.model.spec.clone(), self.0.end);
        let runner = self.0.runner::<B, K, W>(loading)?;
        let group = RunnerGroup::lead(spec, runner, end.clone())?;
        Ok(Box::new(group))
    }
}

impl Ranks {
    /// Has all ranks load their parts of a model; the runner is that of the group.
    pub(crate) fn load<K: KvElement>(
        &self,
        device: &BackendDispatch,
        model: &Model,
        (config, kv): (RunnerConfig, KvDtype),
        progress: LoadProgress<'_>,
    ) -> Result<Box<dyn StepRunner>> {
        check_shard(model, self.end.size())?;
        let command = LoadCommand::of(model, self, (config, kv));
        broadcast(&self.end, "load command", &command.to_bytes())?;
        let rank = RankLoad {
            model,
            config,
            end: &self.end,
            progress,
        };
        let loaded = device.with_kv::<K, _>(model.keeps_blocks(), Lead(rank));
        if let Err(error) = &loaded {
            // The others have loaded what has no use now.
            self.end.abort(&error.to_string());
        }
        loaded
    }
}

/// Says whether a model can be cut for so many ranks.
///
/// # Errors
/// [`Error::Model`] says what is too small, and for how many ranks the model can be cut.
pub fn check_shard(model: &Model, ranks: usize) -> Result<()> {
    // What can be cut does not depend on what a device keeps.
    let shard = |ranks| model.shard(WeightPolicy::floats(), (0, ranks));
    let Err(error) = shard(ranks) else {
        return Ok(());
    };
    let most = (1..ranks.min(MAX_RANKS)).rev();
    let most = most.into_iter().find(|&n| shard(n).is_ok());
    Err(Error::Model(format!(
        "{error}\nhint: this model can be cut for 1 to {} ranks",
        most.unwrap_or(1)
    )))
}

/// The settings of one of several ranks on this machine: without a number of threads, its share of the threads that one
/// process would have.
///
/// # Errors
/// What the CPU says.
pub fn rank_options(options: BackendOptions, rank: usize, ranks: usize) -> Result<BackendOptions> {
    if options.threads.is_some() {
        return Ok(options);
    }
    let config = CpuConfig {
        threads: None,
        isa: options.isa,
    };
    let all = CpuBackend::with_config(config)?.threads();
    Ok(BackendOptions {
        threads: Some(share(all, rank, ranks)),
        ..options
    })
}

/// The device of a rank.
#[derive(Clone)]
pub struct RankDevice {
    /// The device.
    pub device: BackendDispatch,
    /// Whether no other rank of this host has it.
    pub is_own: bool,
}

impl RankDevice {
    /// Opens the device of one of several ranks on this host: on CUDA, one for each rank, from `options.ordinal` on. `Auto` does
    /// so where there are as many that are more than software; what else it takes, all ranks share.
    ///
    /// # Errors
    /// Those of [`BackendDispatch::for_model`]; [`Error::NoDevice`] when there are fewer CUDA devices than ranks.
    pub fn open(
        kind: BackendKind,
        model: &Model,
        options: BackendOptions,
        (rank, ranks): (usize, usize),
    ) -> Result<Self> {
        let shared = |device| Self {
            device,
            is_own: false,
        };
        if ranks < 2 || !matches!(kind, BackendKind::Auto | BackendKind::Cuda) {
            return BackendDispatch::for_model(kind, model, options).map(shared);
        }
        let cards = cuda_devices();
        let first = options.ordinal;
        let is_enough = cards.len() >= first + ranks;
        if kind == BackendKind::Auto {
            let found = BackendDispatch::for_model(kind, model, options)?;
            let has_cards = is_enough && cards.iter().all(|card| !card.software);
            if !has_cards || found.info().backend != BackendKind::Cuda.name() {
                return Ok(shared(found));
            }
        } else if !is_enough && !cards.is_empty() {
            let (found, plural) = (cards.len(), if cards.len() == 1 { "" } else { "s" });
            let from = match first {
                0 => String::new(),
                first => format!(" from number {first} on"),
            };
            return Err(Error::NoDevice {
                backend: BackendKind::Cuda.name(),
                reason: format!(
                    "found {found} device{plural}, expected {ranks}{from}, one for each rank"
                ),
                hint: "use fewer ranks, or --backend cpu".into(),
            });
        }
        let options = BackendOptions {
            ordinal: first + rank,
            ..options
        };
        let device = BackendDispatch::from_kind(BackendKind::Cuda, options)?;
        Ok(Self {
            device,
            is_own: true,
        })
    }
}

/// At least one.
fn share(all: usize, rank: usize, ranks: usize) -> usize {
    (all * (rank + 1) / ranks - all * rank / ranks).max(1)
}

impl BackendDispatch {
    /// The memory that each of so many ranks takes of a device like this one.
    ///
    /// # Errors
    /// Those of [`check_shard`].
    pub fn rank_plans(
        &self,
        model: &Model,
        config: &RunnerConfig,
        (kv, ranks): (KvDtype, usize),
    ) -> Result<Vec<MemoryPlan>> {
        check_shard(model, ranks)?;
        let policy = self.weight_policy(model);
        let plan = |rank| {
            let cut = &model.shard(policy, (rank, ranks))?;
            let plan = match kv {
                KvDtype::F32 => rank_memory_plan::<KvF32>(model, policy, config, cut),
                KvDtype::F16 => rank_memory_plan::<KvFp16>(model, policy, config, cut),
                KvDtype::Bf16 => rank_memory_plan::<KvBf16>(model, policy, config, cut),
                KvDtype::Fp8 => rank_memory_plan::<KvFp8>(model, policy, config, cut),
                KvDtype::Int8 => rank_memory_plan::<KvInt8>(model, policy, config, cut),
            };
            Ok(plan.with_workspace(self.workspace_bytes(ranks)))
        };
        (0..ranks).map(plan).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(layout: KvLayout) -> LoadCommand {
        LoadCommand {
            path: "models/ä b".into(),
            fingerprint: u64::MAX - 1,
            kv: KvDtype::Int8,
            config: RunnerConfig {
                layout,
                profile: true,
                kept_states: 3,
                ..RunnerConfig::single(77)
            },
        }
    }

    #[test]
    fn a_model_with_other_weights_is_another() {
        let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models/qwen3");
        let open = |dir: &std::path::Path| {
            ferrum_models::read_model(ferrum_formats::ModelSource::open(dir).unwrap()).unwrap()
        };
        let dir = tempfile::tempdir().unwrap();
        for file in std::fs::read_dir(fixture).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
        }
        let before = fingerprint(&open(dir.path()));
        assert_eq!(before, fingerprint(&open(fixture.as_ref())));
        let weights = dir.path().join("model.safetensors");
        let mut bytes = std::fs::read(&weights).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        bytes[8 + header] ^= 1;
        std::fs::write(&weights, bytes).unwrap();
        assert_ne!(before, fingerprint(&open(dir.path())));
    }

    #[test]
    fn a_load_command_arrives_as_it_was_sent() {
        for layout in [
            KvLayout::Contiguous,
            KvLayout::Paged { block_size: 8 },
            KvLayout::Grouped { block_size: 32 },
        ] {
            let command = command(layout);
            assert_eq!(
                LoadCommand::from_bytes(&command.to_bytes()),
                Ok(Some(command))
            );
        }
        assert_eq!(LoadCommand::from_bytes(&SHUTDOWN.to_le_bytes()), Ok(None));
    }

    #[test]
    fn a_load_command_that_is_cut_or_changed_is_refused() {
        let bytes = command(KvLayout::Contiguous).to_bytes();
        for end in 0..bytes.len() {
            assert!(LoadCommand::from_bytes(&bytes[..end]).is_err(), "{end}");
        }
        // Every number but the fingerprint, the sizes and whether ops are measured has few values.
        for number in [0, 2, 9, 12] {
            let mut wrong = bytes.clone();
            wrong[8 * number..][..8].fill(0xfe);
            assert!(LoadCommand::from_bytes(&wrong).is_err(), "{number}");
        }
    }

    #[test]
    fn ranks_share_the_threads() {
        let shares = |all, ranks| -> Vec<_> { (0..ranks).map(|r| share(all, r, ranks)).collect() };
        assert_eq!(shares(8, 2), [4, 4]);
        assert_eq!(shares(7, 3), [2, 2, 3]);
        assert_eq!(shares(1, 2), [1, 1]);
    }
}
