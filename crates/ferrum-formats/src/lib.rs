//! The formats people have models in: GGUF, safetensors, Hugging Face folders, tokenizers and chat
//! templates.
//!
//! Everything here reads hostile bytes: counts are held against the bytes that remain before
//! anything is allocated for them. This crate knows nothing of compute.
