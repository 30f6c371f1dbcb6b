//! `--gpu-layers`: the last layers of a model on a GPU, those before them on the CPU.
//!
//! The last ones, because the stage of the last layer also makes logits and chooses tokens, which gain most from a GPU. It is
//! another way to say what [`StageList`](super::StageList) says, and gives stages like any other.

use super::{PlacedStage, Placement};
use crate::device::dispatch::{BackendDispatch, BackendOptions};
use crate::device::kind::{BackendKind, KvDtype};
use crate::device::memory::MemoryShare;
use ferrum_models::{Model, RunnerConfig, Stage};
use ferrum_types::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// Tokens of KV cache that [`GpuLayers::Auto`] leaves room for, or the model's context if that is shorter.
const CONTEXT: usize = 8192;

/// What `--gpu-layers` can say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuLayers {
    /// As many as the GPU has room for, beside a KV cache of 8192 tokens; none where there is no GPU.
    Auto,
    /// So many; all where the model has no more.
    Last(usize),
}

impl FromStr for GpuLayers {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match (s, s.parse()) {
            ("auto", _) => Ok(Self::Auto),
            ("all", _) => Ok(Self::Last(usize::MAX)),
            (_, Ok(count)) => Ok(Self::Last(count)),
            _ => Err("expected a number of layers, \"auto\" or \"all\"".into()),
        }
    }
}

impl fmt::Display for GpuLayers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Last(usize::MAX) => f.write_str("all"),
            Self::Last(count) => write!(f, "{count}"),
        }
    }
}

impl Placement {
    /// The last layers of a model on a GPU of `kind`, those before them on the CPU.
    ///
    /// # Errors
    /// `InvalidArgument` for a `kind` that is no GPU, and where layers share what the cut would part; [`Error::NoDevice`]
    /// without a GPU, if layers were asked for by number.
    pub fn with_gpu_layers(
        layers: GpuLayers,
        kind: BackendKind,
        model: &Model,
        share: MemoryShare,
        options: BackendOptions,
    ) -> Result<Self> {
        if matches!(kind, BackendKind::Cpu | BackendKind::Reference) {
            let reason =
                format!("found --gpu-layers {layers} with --backend {kind}, which is no GPU");
            return Err(Error::invalid("gpu_layers", reason));
        }
        // The number of a device, and beside a GPU also its activations, are not the CPU's.
        let alone = BackendOptions {
            ordinal: 0,
            ..options
        };
        let beside = BackendOptions {
            activations: None,
            ..alone
        };
        let cpu = |options| BackendDispatch::from_kind(BackendKind::Cpu, options);
        if layers == GpuLayers::Last(0) {
            return Ok(Self::on(cpu(alone)?, model));
        }
        let gpu = match (BackendDispatch::any_gpu(kind, options), layers) {
            (Err(Error::NoDevice { .. }), GpuLayers::Auto) if kind == BackendKind::Auto => {
                return Ok(Self::on(cpu(alone)?, model));
            }
            (gpu, _) => gpu?,
        };
        let count = match layers {
            GpuLayers::Auto => max_layers(&gpu, model, share),
            GpuLayers::Last(count) => count.min(model.spec.layers.len()),
        };
        let first = model.spec.layers.len() - count;
        match (first, count) {
            (0, _) => Ok(Self::on(gpu, model)),
            (_, 0) => Ok(Self::on(cpu(beside)?, model)),
            _ => Self::cut(cpu(beside)?, gpu, model, first),
        }
    }

    /// The layers before `first` on one device, the others on another.
    fn cut(
        before: BackendDispatch,
        behind: BackendDispatch,
        model: &Model,
        first: usize,
    ) -> Result<Self> {
        let stage = |device, layers| -> Result<PlacedStage> {
            let stage = Stage::new(&model.spec, layers);
            let stage = stage.map_err(|reason| Error::invalid("gpu_layers", reason))?;
            Ok(PlacedStage { device, stage })
        };
        Ok(Self {
            earlier: vec![stage(before, 0..first)?],
            last: stage(behind, first..model.spec.layers.len())?,
            ranks: None,
        })
    }
}

/// How many of a model's last layers a device has room for.
fn max_layers(device: &BackendDispatch, model: &Model, share: MemoryShare) -> usize {
    let all = model.spec.layers.len();
    let context = model.spec.context_length.clamp(1, CONTEXT);
    // As if the device had all layers: with another one, steps may be shorter.
    let config = RunnerConfig {
        max_tokens: context.min(device.step_tokens()),
        ..RunnerConfig::single(context)
    };
    let kv = KvDtype::for_model(model);
    let info = device.info();
    let fits = |first: &usize| {
        // A cut that the model does not allow is none.
        let parts = [0..*first, *first..all]
            .into_iter()
            .filter(|part| !part.is_empty());
        let stages: Result<Vec<_>, _> = parts.map(|part| Stage::new(&model.spec, part)).collect();
        let Ok(stages) = stages else { return false };
        let plan = stages
            .last()
            .map(|stage| device.stage_plan(model, &config, (kv, stage)));
        plan.is_some_and(|plan| share.tokens(&plan, &info) >= config.kv_tokens)
    };
    all - (0..all).find(fits).unwrap_or(all)
}
