//! Draft heads: small decoders that draft the next tokens from hidden states of the model that they draft for.
//!
//! For position `t` a head reads the embedding of token `t + 1` and hidden states of the target at `t`, and its logits are
//! a draft of token `t + 2`. Its own hidden state at `t` takes the place of the target's at `t + 1` for the draft after that.
//! Two kinds are read:
//!
//! - Layers for multi-token prediction that stand behind a model's own in its checkpoint ([`read_mtp`]). They read what is
//!   behind the target's final norm, and share its embeddings and its output projection.
//! - EAGLE-3 in a folder of its own ([`read_eagle3`]). It reads the residual stream behind three layers, and may have a
//!   smaller vocabulary.
//!
//! A head is run as any decoder by a [`DecoderRunner`](crate::DecoderRunner); what is different is its input
//! ([`StepBatch::features`](crate::StepBatch::features)).

mod eagle3;
mod mtp;

pub use eagle3::read_eagle3;
pub use mtp::read_mtp;

use crate::batch::AuxHiddenPoint;
use crate::layer::Norm;
use crate::model::Model;
use crate::named::NamedLoader;
use crate::runner::{DecoderWeights, SharedTables};
use crate::spec::DecoderSpec;
use crate::weights::WeightForm;
use eagle3::Eagle3;
use ferrum_kernels::LlmBackend;
use ferrum_types::{Result, TokenId};
use mtp::Mtp;
pub(crate) use mtp::{MtpLayer, MtpNames, further_layers};
use std::sync::Arc;

/// A draft head that has been understood: what it is, and where its weights are.
pub struct DraftHead {
    spec: DecoderSpec,
    features: DraftFeatures,
    kind: Kind,
}

enum Kind {
    Mtp(Box<Mtp>),
    Eagle3(Box<Eagle3>),
}

/// What a head reads of its target and of itself, and what its tokens mean.
#[derive(Clone, Debug)]
pub struct DraftFeatures {
    /// Where hidden states of the target are read: one behind the other they are a token's features.
    pub target: Vec<AuxHiddenPoint>,
    /// Where the head's own are, which take their place.
    pub own: AuxHiddenPoint,
    /// The target's token for each of the head's; `None`: the same.
    pub tokens: Option<Arc<[TokenId]>>,
}

impl DraftHead {
    /// What a runner of it runs.
    pub fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    /// What it reads.
    pub fn features(&self) -> &DraftFeatures {
        &self.features
    }

    /// Its kind, for people.
    pub fn kind(&self) -> &'static str {
        match self.kind {
            Kind::Mtp(_) => "multi-token prediction",
            Kind::Eagle3(_) => "EAGLE-3",
        }
    }
}

/// Loads the weights of a draft head in the form `W`, for a runner of its [`spec`](DraftHead::spec). Tables that it has not are
/// those of its `target`, which are `shared` as far as they are on the device.
///
/// # Errors
/// As [`load_weights`](crate::load_weights).
pub fn load_draft_head<B: LlmBackend, W: WeightForm<B>>(
    device: &B,
    head: &DraftHead,
    target: &Model,
    shared: SharedTables<B>,
) -> Result<DecoderWeights<B>> {
    match &head.kind {
        Kind::Mtp(mtp) => mtp.load::<B, W>(device, &head.spec, target, shared),
        Kind::Eagle3(eagle) => eagle.load::<B, W>(device, &head.spec, target, shared),
    }
}

/// The weight of an RMS norm by its name, more by `offset`.
fn rms_norm<B: LlmBackend, W: WeightForm<B>>(
    loader: &mut NamedLoader<'_, '_, B, W>,
    name: &str,
    (dim, offset): (usize, f32),
) -> Result<Norm<B>> {
    let mut values = loader.vector(&format!("{name}.weight"), &[dim])?;
    values.iter_mut().for_each(|value| *value += offset);
    Ok(Norm {
        weight: loader.device().from_slice(&values)?,
        bias: None,
    })
}
