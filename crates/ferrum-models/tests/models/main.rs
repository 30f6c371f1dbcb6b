//! Models as a whole on every backend. One program: each would compile the forward path for all backends again.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../support/mod.rs"]
mod support;

mod bidirectional;
mod caches;
mod captured;
mod clip;
mod converted;
mod decode;
mod draft_heads;
mod encoders;
mod experts;
mod gpu;
mod group;
mod invariance;
mod inventory;
mod lora;
mod native;
mod parity;
mod pooling;
mod quantised;
mod spec;
mod stages;
mod vision;
mod whisper;
mod windows;
