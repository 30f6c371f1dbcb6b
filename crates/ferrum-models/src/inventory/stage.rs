//! [`Stage`]: the part of a decoder that one device computes, where several share its layers.
//!
//! Stages follow each other: the first looks up the embeddings, each hands the residual stream to the next, and the
//! last has the final norm and the output projection. What a stage holds follows from its range of layers alone.

use super::{TensorId, TensorRole};
use crate::spec::{AttentionSpec, CacheSpec, DecoderSpec};
use std::fmt;
use std::ops::Range;

/// A range of a decoder's layers, with the embedding before the first of them all and the head behind the last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    layers: Range<usize>,
    /// Layers of the whole decoder.
    of: usize,
}

impl Stage {
    /// The only stage of a decoder: everything.
    pub fn whole(spec: &DecoderSpec) -> Self {
        let of = spec.layers.len();
        Self { layers: 0..of, of }
    }

    /// The stage of a decoder with these layers.
    ///
    /// # Errors
    /// Which layers the decoder has, where they are not among them or there are none; which layer shares the cache of
    /// one that is in another stage.
    pub fn new(spec: &DecoderSpec, layers: Range<usize>) -> Result<Self, String> {
        let of = spec.layers.len();
        if layers.is_empty() || layers.end > of {
            let Range { start, end } = layers;
            return Err(format!(
                "found a stage of layers {start} to {end} (exclusive), the model has {of} layers"
            ));
        }
        if spec.per_layer.is_some() && layers.len() < of {
            let reason = "layers with embeddings of their own, expected all in one stage";
            return Err(reason.into());
        }
        for layer in layers.clone() {
            if let CacheSpec::SharedWith(owner) = spec.layers[layer].cache()
                && !layers.contains(&owner)
            {
                return Err(format!(
                    "layer {layer} shares the keys and values of layer {owner}, expected both in one stage"
                ));
            }
        }
        Ok(Self { layers, of })
    }

    /// Its layers, counted in the whole decoder.
    pub fn layers(&self) -> Range<usize> {
        self.layers.clone()
    }

    /// Whether it looks up the embeddings.
    pub fn is_first(&self) -> bool {
        self.layers.start == 0
    }

    /// Whether it has the final norm and the output projection.
    pub fn is_last(&self) -> bool {
        self.layers.end == self.of
    }

    /// Whether it is the only one.
    pub fn is_whole(&self) -> bool {
        self.is_first() && self.is_last()
    }

    /// Whether it needs a tensor of the decoder `spec`. An embedding table that is the output projection, too, is held
    /// by the first and by the last stage.
    pub fn holds(&self, spec: &DecoderSpec, id: TensorId) -> bool {
        match (id.layer, id.role) {
            (Some(layer), _) => self.layers.contains(&layer),
            (None, TensorRole::TokenEmbedding) => {
                self.is_first() || (self.is_last() && spec.tie_embeddings)
            }
            (None, TensorRole::PositionEmbedding) => self.is_first(),
            (None, TensorRole::FinalNorm | TensorRole::Output) => self.is_last(),
            // Of the rotation, which every layer has.
            (None, _) => true,
        }
    }

    /// The decoder as this stage computes it: its layers, counted from 0, and nothing else of `spec` less.
    pub(crate) fn spec(&self, spec: &DecoderSpec) -> DecoderSpec {
        let mut layers = spec.layers[self.layers()].to_vec();
        for layer in &mut layers {
            if let AttentionSpec::Gqa(gqa) = &mut layer.attention {
                let owner = &mut gqa.shared_kv;
                *owner = owner.map(|owner| owner.saturating_sub(self.layers.start));
            }
        }
        DecoderSpec {
            layers,
            ..spec.clone()
        }
    }
}

impl fmt::Display for Stage {
    /// First and last layer, as in `--layers`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Range { start, end } = self.layers;
        match end - start {
            1 => write!(f, "{start}"),
            _ => write!(f, "{start}-{}", end - 1),
        }
    }
}
