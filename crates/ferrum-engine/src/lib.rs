//! The engine: picks a device, owns a runner, turns logits into tokens and tokens into text.
//!
//! Run-time choices end here: [`BackendDispatch`] picks the backend and the KV element once, and what
//! lies below is generic code without a branch on either; [`Placement`] says which devices have which layers. This crate knows nothing of HTTP or of how
//! files are laid out.

pub mod classify;
mod dispatch;
pub mod eager;
mod encoder;
pub mod engine;
mod generate;
pub mod grammar;
mod memory;
mod offload;
mod placement;
pub mod pool;
pub mod priority;
mod runner;
pub mod sampler;
pub mod scheduler;
mod session;
mod stop;
mod suffix;
mod tasks;
mod tensor_parallel;
mod trace;
pub mod transcribe;
pub mod vision;
mod weight_cache;

pub use dispatch::{BackendDispatch, BackendKind, BackendOptions, KvDtype, list_devices};
pub use encoder::{
    Embedded, Encoder, EncoderAnswer, EncoderInput, EncoderTask, EncoderTokenizer, EncoderWant,
};
pub use engine::{
    DraftRunner, Engine, EngineConfig, EngineError, EngineHandle, EngineOffload, Event,
    EventStream, Health, Request, Runners,
};
pub use generate::{FinishReason, Generation, GenerationStats, generate, generate_with_images};
pub use memory::MemoryShare;
pub use offload::{KvOffload, OffloadConfig, OffloadStats};
pub use placement::{GpuLayers, HeadLoad, LoadedParts, PlacedStage, Placement, StageList};
pub use runner::{AdapterLoader, LoadedAdapter, StepRunner};
pub use sampler::{Dry, DryBreakers, Mirostat, Sampler, SamplingParams, Xtc};
pub use session::Session;
pub use stop::StopMatcher;
pub use tasks::{TaskConfig, TaskEngine, TaskHandle, TaskModel, TaskMonitor, TaskOutput};
pub use tensor_parallel::{
    RankDevice, Ranks, check_shard, rank_options, serve_rank, shut_down_ranks,
};
pub use trace::{Comparison, Difference, LayerDifference, Trace};
pub use weight_cache::{CacheOutcome, KeptWeights};
