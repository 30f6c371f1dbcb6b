//! The engine: picks a device, owns a runner, turns logits into tokens and tokens into text.
//!
//! Run-time choices end here: [`BackendDispatch`] picks the backend and the KV element once, and what
//! lies below has no branch on either; [`Placement`] says which devices have which layers. This crate knows nothing of HTTP or of how
//! files are laid out.

mod device;
pub mod eager;
pub mod engine;
mod generate;
pub mod grammar;
mod image_embeddings;
mod kv_entry;
mod offload;
pub mod pool;
pub mod priority;
mod runner;
pub mod sampler;
pub mod scheduler;
mod session;
mod stop;
mod suffix;
mod sync;
mod tasks;
mod trace;

pub use device::{
    Activations, BackendDispatch, BackendKind, BackendOptions, CacheOutcome, CacheWriter,
    DraftHeadLoad, GpuLayers, KvDtype, LoadedParts, MemoryShare, MemoryShortage, PlacedStage,
    Placement, PreparedLoad, RankDevice, Ranks, StageList, check_shard, list_devices, rank_options,
    serve_rank, shut_down_ranks,
};
pub use engine::{
    DraftRunner, Engine, EngineConfig, EngineError, EngineHandle, EngineOffload, Event,
    EventStream, Health, Request, Runners,
};
pub use generate::{
    FinishReason, GenerationParams, GenerationStats, generate, generate_with_images,
};
pub use offload::{KvOffload, OffloadConfig, OffloadStats};
pub use runner::{AdapterLoader, LoadedAdapter, StepRunner};
pub use sampler::{Dry, DryBreakers, Mirostat, Sampler, SamplingParams, Xtc};
pub use session::Session;
pub use stop::StopMatcher;
pub use tasks::{
    Embedded, Encoder, EncoderAnswer, EncoderInput, EncoderTask, EncoderTokenizer, EncoderWant,
};
pub use tasks::{TaskConfig, TaskEngine, TaskHandle, TaskModel, TaskMonitor, TaskOutput};
pub use tasks::{classify, transcribe, vision};
pub use trace::{Comparison, Difference, LayerDifference, Trace};
