//! Arguments about where and with what beside its weights a model runs, and commands about devices.

use super::{HubArgs, ModelArgs, token_id, whole};
use clap::{Args, Subcommand, ValueEnum};
use ferrum_engine::{Activations, BackendKind, BackendOptions, GpuLayers, KvDtype, StageList};
use ferrum_kernels::cpu::Isa;
use ferrum_models::WeightDtype;
use std::path::PathBuf;

/// Which device.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct DeviceArgs {
    /// Where to run: auto, cpu, gpu, vulkan, metal, cuda or reference
    #[arg(long, default_value_t = BackendKind::Auto)]
    pub(crate) backend: BackendKind,

    /// Number of the device, as in `ferrum devices`
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = super::count)]
    pub(crate) device: usize,

    /// CPU threads [default: one for each physical core]
    #[arg(long, value_name = "N", value_parser = whole::<u16>(1..=1024))]
    pub(crate) threads: Option<u16>,

    /// Instructions of the CPU, such as avx2 [default: the fastest that it has; amx-f32 for encoders only]
    ///
    /// One of sse2, avx2, avx-vnni, avx512, avx512-bf16, amx, amx-f32; neon, neon-dotprod; scalar on other processors.
    /// `ferrum devices` shows the default of this CPU. All give the same bits but avx512-bf16 and amx, which round activations where
    /// weights are bf16, and amx-f32, which does so, too, and keeps 17 bits of numbers of f32 in products.
    #[arg(long, value_name = "LEVEL")]
    pub(crate) isa: Option<Isa>,

    /// Give a sequence the same bits whatever is computed beside it, on CUDA, where that costs speed; all other
    /// backends do so anyway
    #[arg(long)]
    pub(crate) batch_invariant: bool,

    /// Element of activations, on CUDA: bf16 or f16 [default: bf16]
    ///
    /// f16 has three bits more and less range: what is above 65504 becomes infinite. All other backends compute in f32 and refuse it.
    #[arg(long, value_name = "TYPE")]
    pub(crate) activations: Option<Activations>,
}

impl DeviceArgs {
    pub(crate) fn options(&self) -> BackendOptions {
        BackendOptions {
            ordinal: self.device,
            threads: self.threads.map(usize::from),
            isa: self.isa,
            batch_invariant: self.batch_invariant,
            activations: self.activations,
        }
    }
}

/// How much of a GPU's memory may be taken.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct MemoryArgs {
    /// Part of a GPU's memory that weights, activations and the KV cache may take together, where the device says how much
    /// it has (CUDA); less where others have taken of it
    #[arg(long, value_name = "PART", default_value_t = 0.9, value_parser = memory_part)]
    pub(crate) gpu_memory_utilization: f64,
}

/// Which devices run a model.
#[derive(Clone, Debug, Args)]
pub(crate) struct PlacementArgs {
    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    /// Which backend computes which layers, such as cpu:0-13,vulkan:14-27 for a model that fits neither; a number
    /// behind a backend is that of its device, as in vulkan1:14-27 [default: one device has them all]
    #[arg(long, value_name = "BACKEND:FIRST-LAST,…", conflicts_with_all = ["backend", "device"])]
    pub(crate) layers: Option<StageList>,

    /// The last N layers on a GPU, those before them on the CPU; "auto": as many as the GPU has room for beside a KV cache of
    /// 8192 tokens
    ///
    /// The GPU is that of --backend; without it, the first that is more than software. "all" is all layers, 0 the CPU alone.
    #[arg(long, value_name = "N|auto", conflicts_with = "layers")]
    pub(crate) gpu_layers: Option<GpuLayers>,

    #[command(flatten)]
    pub(crate) memory: MemoryArgs,

    /// How many ranks compute each layer together, each with its part of the weights: threads of this process, or under
    /// mpirun as many processes
    ///
    /// `mpirun -n 2 ferrum run --tensor-parallel 2 MODEL` has two processes, on one machine or on several that find the
    /// model at the same path. It needs a build with the feature mpi. --threads counts for each rank. On CUDA each rank has a
    /// device of its own, from --device on.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<u16>(1..=1024), conflicts_with_all = ["layers", "gpu_layers"])]
    pub(crate) tensor_parallel: u16,
}

/// In what type the matrices of an encoder are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DtypeArg {
    /// As the file has them
    Auto,
    /// Those of f32 rounded to bf16: about twice as fast on processors with products of bf16 (`ferrum devices` says avx512-bf16 or amx),
    /// vectors keep a cosine of about 0.9999
    Bf16,
}

/// How the weights of models that do not generate are kept.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct DtypeArgs {
    /// Type of the matrices of encoders of texts, speech and images
    #[arg(long, value_name = "TYPE", default_value = "auto")]
    pub(crate) dtype: DtypeArg,
}

impl From<DtypeArgs> for WeightDtype {
    fn from(args: DtypeArgs) -> Self {
        match args.dtype {
            DtypeArg::Auto => WeightDtype::Stored,
            DtypeArg::Bf16 => WeightDtype::Bf16,
        }
    }
}

/// Which KV cache.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct CacheArgs {
    /// Element of the KV cache: f32, f16 or bf16; on a CPU also fp8 (E4M3) or int8 (with scales)
    /// [default: f32 for f32 models, else f16]
    #[arg(long, value_name = "TYPE")]
    pub(crate) kv_dtype: Option<KvDtype>,

    /// Longest sequence in tokens [default: what is needed, up to the model's context]
    #[arg(long, value_name = "N", value_parser = whole::<u32>(1..=1 << 24))]
    pub(crate) context: Option<u32>,
}

fn tolerance(s: &str) -> Result<f64, String> {
    match s.parse::<f64>() {
        Ok(share) if share >= 0.0 && share.is_finite() => Ok(share),
        _ => Err("expected a number from 0 on, such as 0.001".into()),
    }
}

fn memory_part(s: &str) -> Result<f64, String> {
    match s.parse::<f64>() {
        Ok(part) if part > 0.0 && part <= 1.0 => Ok(part),
        _ => Err("expected a number above 0 and at most 1, such as 0.9".into()),
    }
}

/// What runs beside the model's weights.
#[derive(Clone, Debug, Args)]
pub(crate) struct AdapterArgs {
    /// LoRA adapter for the model: a folder that PEFT wrote, or a GGUF file
    #[arg(long, value_name = "PATH")]
    pub(crate) lora: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct DevicesArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum VerifyCommand {
    /// Run every op of a backend against its meaning
    Ops(VerifyOpsArgs),
    /// Compare what a model computes, layer by layer, with another backend or with stored activations
    Model(Box<VerifyModelArgs>),
}

#[derive(Debug, Args)]
pub(crate) struct VerifyModelArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    /// The backend to compare with; reference computes every op by its definition, slowly
    #[arg(long, value_name = "BACKEND", default_value_t = BackendKind::Reference, conflicts_with = "against")]
    pub(crate) reference: BackendKind,

    /// Stored activations to compare with: a safetensors file with tokens [n] (I64), logits [n, vocab] and, of the first
    /// layers or all, hidden [layers, n, hidden] (F32), or a folder with such an activations.safetensors
    #[arg(long, value_name = "PATH", conflicts_with_all = ["prompt", "tokens"])]
    pub(crate) against: Option<PathBuf>,

    /// Store what was computed, for --against
    #[arg(long, value_name = "FILE")]
    pub(crate) save: Option<PathBuf>,

    /// Token ids, separated by commas
    #[arg(long, value_name = "IDS", value_delimiter = ',', value_parser = token_id, conflicts_with = "prompt")]
    pub(crate) tokens: Vec<u32>,

    /// Text instead of ids; special tokens are added
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "The quick brown fox jumps over the lazy dog, and the dog sleeps on."
    )]
    pub(crate) prompt: String,

    /// What the difference of a layer may be, as a part of the length of what is expected [default: 0.001, where
    /// weights are quantised or a device rounds activations 0.1, and 0.2 if the model has experts]
    #[arg(long, value_name = "SHARE", value_parser = tolerance)]
    pub(crate) tolerance: Option<f64>,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) hub: HubArgs,
}

#[derive(Debug, Args)]
pub(crate) struct VerifyOpsArgs {
    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    /// Only ops whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub(crate) filter: String,

    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}
