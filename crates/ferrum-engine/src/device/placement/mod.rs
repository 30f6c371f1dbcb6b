//! [`Placement`]: which devices compute which layers of a model.
//!
//! Mostly one device has them all. [`StageList`] is what `--layers` says where several share them: stages in the order of
//! their layers, each on a device; [`GpuLayers`] is what `--gpu-layers` says. All that depends on where a model runs is asked
//! here: the memory that each device needs, what is dequantised when it is loaded, and the loading itself.

mod gpu_layers;
mod memory;
mod prepared;
mod stage_list;

pub use gpu_layers::GpuLayers;
pub use prepared::{LoadedParts, MemoryShortage, PreparedLoad};
pub use stage_list::StageList;

use super::dispatch::{BackendDispatch, BackendOptions, no_activations};
use super::job::{DeviceJob, KvElement};
use super::kind::{BackendKind, KvDtype};
use super::tensor_parallel::Ranks;
use crate::{Session, StepRunner};
use ferrum_kernels::{
    BackendKvDtype, DeviceInfo, KvBf16, KvDtypeKind, KvF32, KvFp8, KvFp16, KvInt8, LlmBackend,
};
use ferrum_models::{
    DecoderRunner, DraftHead, EarlierStage, LoadProgress, MemoryPlan, Model, ModelRunner,
    RunnerConfig, Stage, WeightForm, load_draft_head, load_stage_weights,
};
use ferrum_types::{Error, Result, SrcDtype};
use stage_list::StageChoice;
use std::fmt;

/// Layers of a model on an open device.
#[derive(Clone)]
pub struct PlacedStage {
    /// The device.
    pub device: BackendDispatch,
    /// The layers.
    pub stage: Stage,
}

/// A draft head that is loaded with its model, and the sizes of its steps.
#[derive(Clone, Copy)]
pub struct DraftHeadLoad<'a> {
    /// The head.
    pub head: &'a DraftHead,
    /// Its sizes.
    pub config: RunnerConfig,
}

/// The stages of a model, in order, on open devices; or its ranks, of which this process has the first.
#[derive(Clone)]
pub struct Placement {
    earlier: Vec<PlacedStage>,
    last: PlacedStage,
    ranks: Option<Ranks>,
}

impl BackendDispatch {
    /// Loads a whole model onto this device for one sequence at a time or many: [`Placement::load`].
    ///
    /// # Errors
    /// Those of [`Placement::load`].
    pub fn load(
        &self,
        model: &Model,
        config: RunnerConfig,
        kv: KvDtype,
        progress: LoadProgress<'_>,
    ) -> Result<Session> {
        Placement::on(self.clone(), model).load(model, config, kv, progress)
    }
}

impl Placement {
    /// All layers of a model on one device.
    pub fn on(device: BackendDispatch, model: &Model) -> Self {
        let stage = Stage::whole(&model.spec);
        Self {
            earlier: Vec::new(),
            last: PlacedStage { device, stage },
            ranks: None,
        }
    }

    /// The same device as rank 0 of a group that computes the model together.
    #[must_use]
    pub fn with_ranks(self, ranks: Ranks) -> Self {
        Self {
            ranks: Some(ranks),
            ..self
        }
    }

    /// Most tokens of a step: what the device with the shortest steps takes.
    pub fn step_tokens(&self) -> usize {
        let of_stages = self.stages().map(|placed| placed.device.step_tokens());
        of_stages.min().unwrap_or(1)
    }

    /// Sizes for one sequence of up to `context` tokens, with steps of [`step_tokens`](Self::step_tokens).
    pub fn single(&self, context: usize) -> RunnerConfig {
        RunnerConfig {
            max_tokens: context.clamp(1, self.step_tokens()),
            ..RunnerConfig::single(context)
        }
    }

    /// How many ranks compute each layer.
    pub fn ranks(&self) -> usize {
        self.ranks.as_ref().map_or(1, |ranks| ranks.end.size())
    }

    /// Each layer of a model in a stage of its own on one device; all of them in one where the model cannot be parted.
    ///
    /// # Errors
    /// `InvalidArgument` for a model without layers.
    pub fn by_layer(device: BackendDispatch, model: &Model) -> Result<Self> {
        if model.spec.per_layer.is_some() {
            return Ok(Self::on(device, model));
        }
        let stages = (0..model.spec.layers.len()).map(|layer| {
            let stage = Stage::new(&model.spec, layer..layer + 1);
            let stage = stage.map_err(|reason| Error::invalid("layers", reason))?;
            let device = device.clone();
            Ok(PlacedStage { device, stage })
        });
        let mut earlier = stages.collect::<Result<Vec<_>>>()?;
        let last = earlier.pop();
        let last = last.ok_or_else(|| Error::invalid("layers", "there is no stage"))?;
        Ok(Self {
            earlier,
            last,
            ranks: None,
        })
    }

    /// Opens the devices for a model: those of `layers`, or else one of `kind` as [`BackendDispatch::for_model`] does.
    /// Stages that name the same device share it.
    ///
    /// # Errors
    /// `InvalidArgument` when the list is not that of the model's layers; [`Error::NoDevice`] names what a choice was
    /// missing.
    pub fn for_model(
        kind: BackendKind,
        layers: Option<&StageList>,
        model: &Model,
        options: BackendOptions,
    ) -> Result<Self> {
        let Some(list) = layers else {
            let device = BackendDispatch::for_model(kind, model, options)?;
            return Ok(Self::on(device, model));
        };
        list.check(model.spec.layers.len())?;
        if let Some(activations) = options.activations
            && list.0.iter().all(|stage| stage.kind != BackendKind::Cuda)
        {
            return Err(no_activations(activations, list.0[0].kind.name()));
        }
        let mut stages: Vec<PlacedStage> = Vec::with_capacity(list.0.len());
        for (index, choice) in list.0.iter().enumerate() {
            let StageChoice { kind, ordinal, .. } = *choice;
            let same = |other: &StageChoice| (other.kind, other.ordinal) == (kind, ordinal);
            let device = match list.0[..index].iter().position(same) {
                Some(opened) => stages[opened].device.clone(),
                None => {
                    let options = BackendOptions {
                        ordinal,
                        activations: options.activations.filter(|_| kind == BackendKind::Cuda),
                        ..options
                    };
                    BackendDispatch::from_kind(kind, options)?
                }
            };
            let stage = Stage::new(&model.spec, choice.first..choice.last + 1);
            let stage = stage.map_err(|reason| Error::invalid("layers", reason))?;
            stages.push(PlacedStage { device, stage });
        }
        let last = stages.pop();
        let last = last.ok_or_else(|| Error::invalid("layers", "there is no stage"))?;
        Ok(Self {
            earlier: stages,
            last,
            ranks: None,
        })
    }

    /// The stages, in order.
    pub fn stages(&self) -> impl Iterator<Item = &PlacedStage> {
        self.earlier.iter().chain([&self.last])
    }

    /// Whether one device has the whole model: there is one stage, and no other rank.
    pub fn is_whole(&self) -> bool {
        self.earlier.is_empty() && self.ranks.is_none()
    }

    /// The device of the last stage, which makes logits and chooses tokens.
    pub fn last_device(&self) -> &BackendDispatch {
        &self.last.device
    }

    /// The quantised types that are dequantised to floats when the model is loaded, on any of the devices.
    pub fn dequantized_types(&self, model: &Model) -> Vec<String> {
        let mut all: Vec<_> = self
            .stages()
            .flat_map(|placed| placed.device.dequantized_types(model))
            .collect();
        all.sort();
        all.dedup();
        all
    }

    /// The types that they are dequantised to, on each device that dequantises some.
    pub fn dequantized_dtypes(&self, model: &Model) -> impl Iterator<Item = SrcDtype> {
        self.stages()
            .filter(|placed| !placed.device.dequantized_types(model).is_empty())
            .map(|placed| placed.device.weight_policy(model).dequantized_dtype())
    }

    /// Bytes of weights that one decode step of one sequence reads.
    pub fn decode_bytes(&self, model: &Model) -> u64 {
        let bytes = self.stages().map(|placed| {
            let policy = placed.device.weight_policy(model);
            model.decode_bytes(policy, &placed.stage)
        });
        bytes.fold(0, u64::saturating_add)
    }

    /// The memory that each stage takes on its device, with a cache of `kv`; of ranks, that of all on this host which share it,
    /// or of the one that takes most.
    pub fn stage_plans(
        &self,
        model: &Model,
        config: &RunnerConfig,
        kv: KvDtype,
    ) -> Vec<MemoryPlan> {
        if let Some(ranks) = &self.ranks
            && let Some(plans) = self.rank_plans(ranks, (model, config, kv))
        {
            let plan = match ranks.own_devices {
                true => plans.max_by_key(MemoryPlan::peak).unwrap_or_default(),
                false => plans.fold(MemoryPlan::default(), MemoryPlan::and),
            };
            return vec![plan];
        }
        let plan = |placed: &PlacedStage| {
            let PlacedStage { device, stage } = placed;
            device.stage_plan(model, config, (kv, stage))
        };
        self.stages().map(plan).collect()
    }

    /// The memory that each rank on this host takes; `None` where the model cannot be cut.
    fn rank_plans(
        &self,
        Ranks { end, local, .. }: &Ranks,
        (model, config, kv): (&Model, &RunnerConfig, KvDtype),
    ) -> Option<impl Iterator<Item = MemoryPlan>> {
        let device = &self.last.device;
        let plans = device.rank_plans(model, config, (kv, end.size())).ok()?;
        Some(plans.into_iter().take(*local))
    }

    /// The memory that a run takes on all devices of this host together.
    pub fn memory_plan(&self, model: &Model, config: &RunnerConfig, kv: KvDtype) -> MemoryPlan {
        let ranks = self.ranks.as_ref();
        if let Some(plans) = ranks.and_then(|ranks| self.rank_plans(ranks, (model, config, kv))) {
            return plans.fold(MemoryPlan::default(), MemoryPlan::and);
        }
        let plans = self.stage_plans(model, config, kv).into_iter();
        plans.fold(MemoryPlan::default(), MemoryPlan::and)
    }

    /// The memory that a run takes on each device, the plans of its stages together.
    pub fn device_plans(
        &self,
        model: &Model,
        config: &RunnerConfig,
        kv: KvDtype,
    ) -> Vec<(DeviceInfo, MemoryPlan)> {
        let mut all: Vec<(DeviceInfo, MemoryPlan)> = Vec::new();
        let plans = self.stage_plans(model, config, kv);
        for (placed, plan) in self.stages().zip(plans) {
            let info = placed.device.info();
            // What is free may have changed meanwhile.
            let same =
                |known: &DeviceInfo| (known.backend, known.ordinal) == (info.backend, info.ordinal);
            match all.iter_mut().find(|(known, _)| same(known)) {
                Some((_, sum)) => *sum = sum.and(plan),
                None => all.push((info, plan)),
            }
        }
        all
    }

    /// Loads the model for one sequence at a time or many.
    ///
    /// # Errors
    /// Those of [`load_stage_weights`] and [`ModelRunner::with_stages`]; [`Error::Unsupported`] when a backend has no
    /// cache of `kv`.
    pub fn load(
        &self,
        model: &Model,
        config: RunnerConfig,
        kv: KvDtype,
        progress: LoadProgress<'_>,
    ) -> Result<Session> {
        let (session, _) = self.load_runners(model, (config, kv), None, progress)?;
        Ok(session)
    }

    fn load_runners(
        &self,
        model: &Model,
        (config, kv): (RunnerConfig, KvDtype),
        head: Option<DraftHeadLoad<'_>>,
        progress: LoadProgress<'_>,
    ) -> Result<(Session, Option<Box<dyn StepRunner>>)> {
        let before: Vec<_> = self.stages().map(|placed| placed.device.info()).collect();
        let sizes = (config, kv);
        let loaded = match kv {
            KvDtype::F32 => self.load_in::<KvF32>(model, sizes, head, progress),
            KvDtype::F16 => self.load_in::<KvFp16>(model, sizes, head, progress),
            KvDtype::Bf16 => self.load_in::<KvBf16>(model, sizes, head, progress),
            KvDtype::Fp8 => self.load_in::<KvFp8>(model, sizes, head, progress),
            KvDtype::Int8 => self.load_in::<KvInt8>(model, sizes, head, progress),
        };
        let explain = |error| self.explained(error, model, (&config, kv), &before);
        let (runner, head) = loaded.map_err(explain)?;
        Ok((Session::new(runner), head))
    }

    fn load_in<K: KvElement>(
        &self,
        model: &Model,
        (config, kv): (RunnerConfig, KvDtype),
        head: Option<DraftHeadLoad<'_>>,
        progress: LoadProgress<'_>,
    ) -> Result<Runners> {
        if let Some(ranks) = &self.ranks {
            if head.is_some() {
                let reason =
                    "a draft head reads hidden states of one device, and the model is on ranks";
                return Err(Error::invalid("ranks", reason));
            }
            let device = &self.last.device;
            let runner = ranks.load::<K>(device, model, (config, kv), progress)?;
            return Ok((runner, None));
        }
        let mut earlier = Vec::with_capacity(self.earlier.len());
        let mut done = 0;
        for PlacedStage { device, stage } in &self.earlier {
            let mut of_stage = 0;
            let part = LoadPart {
                model,
                stage,
                config,
                progress: &mut |bytes, total| {
                    of_stage = bytes;
                    progress((done + bytes).min(total), total);
                },
            };
            earlier.push(device.with_kv::<K, _>(model.keeps_blocks(), LoadEarlier(part))?);
            done += of_stage;
        }
        let part = LoadPart {
            model,
            stage: &self.last.stage,
            config,
            // A table that two stages have is counted twice.
            progress: &mut |bytes, total| progress((done + bytes).min(total), total),
        };
        self.last
            .device
            .with_kv::<K, _>(model.keeps_blocks(), LoadLast(part, earlier, head))
    }
}

impl fmt::Display for Placement {
    /// As in `--layers`; the name of the backend where it has all layers.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(ranks) = &self.ranks {
            write!(f, "{} ranks of ", ranks.end.size())?;
        }
        for (index, PlacedStage { device, stage }) in self.stages().enumerate() {
            let DeviceInfo {
                backend, ordinal, ..
            } = device.info();
            let separator = if index > 0 { "," } else { "" };
            write!(f, "{separator}{backend}")?;
            if ordinal > 0 {
                write!(f, "{ordinal}")?;
            }
            if !stage.is_whole() {
                write!(f, ":{stage}")?;
            }
        }
        Ok(())
    }
}

/// What is loaded onto one device.
struct LoadPart<'a, 'p> {
    model: &'a Model,
    stage: &'a Stage,
    config: RunnerConfig,
    progress: LoadProgress<'p>,
}

/// Loads a stage that is not the last.
struct LoadEarlier<'a, 'p>(LoadPart<'a, 'p>);

impl<K: KvDtypeKind> DeviceJob<K> for LoadEarlier<'_, '_> {
    type Output = EarlierStage<K>;

    fn run<B: LlmBackend + BackendKvDtype<K>, W: WeightForm<B>>(
        self,
        (loading, running): (&B, &B),
    ) -> Result<EarlierStage<K>> {
        let LoadPart {
            model,
            stage,
            config,
            progress,
        } = self.0;
        let weights = load_stage_weights::<B, W>(loading, model, stage, progress)?;
        EarlierStage::new(running, &model.spec, weights, config)
    }
}

fn boxed<B: LlmBackend, K: KvDtypeKind>(runner: ModelRunner<B, K>) -> Box<dyn StepRunner> {
    Box::new(DecoderRunner::from(runner))
}

/// A runner of the model, and one of its draft head.
type Runners = (Box<dyn StepRunner>, Option<Box<dyn StepRunner>>);

/// Loads the last stage, after the others, and a draft head with it.
struct LoadLast<'a, 'p, K: KvDtypeKind>(
    LoadPart<'a, 'p>,
    Vec<EarlierStage<K>>,
    Option<DraftHeadLoad<'a>>,
);

impl<K: KvDtypeKind> DeviceJob<K> for LoadLast<'_, '_, K> {
    type Output = Runners;

    fn run<B: LlmBackend + BackendKvDtype<K>, W: WeightForm<B>>(
        self,
        (loading, running): (&B, &B),
    ) -> Result<Runners> {
        let Self(part, earlier, head) = self;
        let LoadPart {
            model,
            stage,
            config,
            progress,
        } = part;
        let weights = load_stage_weights::<B, W>(loading, model, stage, progress)?;
        let head = match head {
            Some(DraftHeadLoad { head, config }) => {
                let shared = weights.shared_tables();
                let weights = load_draft_head::<B, W>(running, head, model, shared)?;
                let spec = head.spec().clone();
                let runner = ModelRunner::<B, K>::new(running, spec, weights, config)?;
                Some(boxed(runner))
            }
            None => None,
        };
        let spec = model.spec.clone();
        let runner = ModelRunner::<B, K>::with_stages(earlier, running, spec, weights, config)?;
        Ok((boxed(runner), head))
    }
}
