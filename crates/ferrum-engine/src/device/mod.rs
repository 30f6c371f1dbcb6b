//! The devices of a model: choice of backends, placement of layers, memory, ranks, and the cache of packed weights.

mod dispatch;
mod job;
mod kind;
mod memory;
mod placement;
mod tensor_parallel;
mod weight_cache;

pub(crate) use dispatch::with_device;
pub use dispatch::{BackendDispatch, BackendOptions, list_devices};
pub(crate) use job::DeviceJob;
pub use kind::{Activations, BackendKind, KvDtype};
pub use memory::MemoryShare;
pub use placement::{
    DraftHeadLoad, GpuLayers, LoadedParts, MemoryShortage, PlacedStage, Placement, PreparedLoad,
    StageList,
};
pub use tensor_parallel::{
    RankDevice, Ranks, check_shard, rank_options, serve_rank, shut_down_ranks,
};
pub use weight_cache::{CacheOutcome, CacheWriter};
