//! Arguments of `classify`.

use super::HubArgs;
use super::device::{DeviceArgs, DtypeArgs};
use clap::Args;
use ferrum_engine::classify::TEMPLATE;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct ClassifyArgs {
    /// Hugging Face folder, or ORG/NAME of a hub: CLIP or SigLIP
    #[arg(value_name = "MODEL")]
    pub(crate) model: PathBuf,

    /// PNG or JPEG
    #[arg(value_name = "IMAGE")]
    pub(crate) image: PathBuf,

    /// Labels that are scored; the flag may be given more than once
    #[arg(long, value_name = "LABEL,…", value_delimiter = ',', required = true)]
    pub(crate) labels: Vec<String>,

    /// The sentence in which a label stands in the place of {}
    #[arg(long, value_name = "TEXT", default_value = TEMPLATE)]
    pub(crate) template: String,

    #[command(flatten)]
    pub(crate) device: DeviceArgs,

    #[command(flatten)]
    pub(crate) dtype: DtypeArgs,

    /// Print JSON, the best first: {"labels":[…],"scores":[…]}
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) hub: HubArgs,
}
