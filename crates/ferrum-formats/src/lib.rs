//! The formats people have models in: GGUF, safetensors, Hugging Face folders and caches, tokenizers and
//! chat templates.
//!
//! Everything here reads hostile bytes: counts are checked against the bytes that remain before
//! anything is allocated for them. This crate knows nothing of compute.

mod bytes;
pub mod chat_template;
mod error;
mod files;
pub mod gguf;
pub mod hf;
pub mod hub;
mod identity;
mod imatrix;
pub mod kv_blocks;
mod lora;
mod private_folder;
mod safetensors;
mod source;
mod tensor;
pub mod tokenizer;
pub mod weight_cache;

pub use error::{FormatError, Result, Shown};
pub use gguf::Gguf;
pub use hf::{GenerationConfig, HfConfig, QuantizationConfig, RopeConfig, RopeConfigs, RopeKind};
pub use identity::FileIdentity;
pub use imatrix::Imatrix;
pub use lora::{LoraFolder, LoraPair, MAX_LORA_RANK};
pub use safetensors::Safetensors;
pub use source::{HfFolder, ModelSource};
pub use tensor::{TensorDtype, TensorInfo, TensorSource, TensorView};
