//! Arguments of `ferrum quantize`.

use super::{HubArgs, whole};
use clap::Args;
use ferrum_models::quantize::{Recipe, Search};
use std::path::PathBuf;

/// What a person has to know to choose; bits are those of large models.
const TYPES: &str = "\
Types, with the bits that a weight takes:
  q8_0                        8.5        as good as the original
  q6_k                        6.6        hardly worse
  q5_k_m, q5_k_s, q5_1, q5_0  5.5 to 6
  q4_k_m, q4_k_s, q4_1, q4_0  4.5 to 5   q4_k_m is the usual choice
  iq4_nl, iq4_xs              4.5, 4.25  better than q4_0 at its size, or smaller
  mxfp4, mxfp4_moe            4.25       all matrices, or only those of experts (the rest: q8_0)
  q3_k_l, q3_k_m, q3_k_s      3.4 to 4.3 when memory is short
  q2_k                        2.6 to 3   the smallest
  f32, f16, bf16              32, 16     conversion only

Tensors that suffer most take more bits, by llama.cpp's rules (--dry-run shows the type of each);
_s, _m and _l say how many do. llama.cpp reads the new file too.

Examples:
  ferrum quantize Qwen3-0.6B/ qwen3-q4_k_m.gguf --type q4_k_m
  ferrum quantize model-bf16.gguf model-q3_k_m.gguf --type q3_k_m --imatrix imatrix.gguf
  ferrum quantize model-bf16.gguf model.gguf --type iq4_xs --dry-run";

#[derive(Debug, Args)]
#[command(after_long_help = TYPES)]
pub(crate) struct QuantizeArgs {
    /// Hugging Face folder, GGUF file or ORG/NAME[:FILE] of a hub, in f32, f16 or bf16
    #[arg(value_name = "SRC")]
    pub(crate) source: PathBuf,

    /// The GGUF file to write
    #[arg(value_name = "DST")]
    pub(crate) destination: PathBuf,

    /// What to write: q4_k_m is the usual choice; --help lists all
    #[arg(long = "type", short = 't', value_name = "TYPE")]
    pub(crate) recipe: Recipe,

    /// Importance of the columns, as `llama-imatrix` writes it (.dat or .gguf)
    #[arg(long, value_name = "FILE")]
    pub(crate) imatrix: Option<PathBuf>,

    /// How long scales are searched for: fast or thorough, which leaves slightly smaller errors
    #[arg(long, value_name = "HOW", default_value_t)]
    pub(crate) search: Search,

    /// Threads [default: one for each core]; the file does not depend on it
    #[arg(long, value_name = "N", value_parser = whole::<u16>(1..=1024))]
    pub(crate) threads: Option<u16>,

    /// Write over a file that is there
    #[arg(long)]
    pub(crate) force: bool,

    /// Take a source that is quantised already, and lose quality twice
    #[arg(long)]
    pub(crate) requantize: bool,

    /// Only show which type each tensor would take
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Print JSON: what was written, tensor by tensor
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) hub: HubArgs,
}
