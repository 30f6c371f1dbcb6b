//! The JSON files of a Hugging Face folder: config, generation config, quantisation config.
//!
//! What is read here is only what the files say. Which value a family takes when a field is absent
//! is the family's business, so optional fields stay optional.

mod config;
mod generation;
mod quantization;
mod rope;

pub use config::HfConfig;
pub(crate) use config::describe;
pub use generation::GenerationConfig;
pub use quantization::{
    AwqConfig, CompressedArgs, CompressedGroup, CompressedTensorsConfig, Fp8Config, GptqConfig,
    QuantizationConfig,
};
pub use rope::{RopeConfig, RopeConfigs, RopeKind};
