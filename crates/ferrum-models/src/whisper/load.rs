//! From a Whisper model's tensors to weights on a device.

use super::config::WhisperModel;
use super::forward::{Conv, CrossLayer, WhisperWeights};
use crate::linear::MatrixLinear;
use crate::named::{Bias, NamedLoader};
use crate::pre_norm::{PreNormLayer, PreNormNames};
use crate::progress::LoadProgress;
use crate::weights::{MatrixUse, WeightForm};
use ferrum_kernels::{LlmBackend, MatShape};
use ferrum_types::Result;
use std::sync::Arc;

const NAMES: PreNormNames = PreNormNames {
    attention_norm: "self_attn_layer_norm",
    qkv: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    out: "self_attn.out_proj",
    mlp: ["final_layer_norm", "fc1", "fc2"],
};

/// Taps of both convolutions.
const KERNEL: usize = 3;

/// Loads all weights of a Whisper model in the form `W`: what the states of a window are computed with onto the
/// [device for encoders](ferrum_kernels::Backend::for_encoders).
///
/// # Errors
/// [`Error::Model`](ferrum_types::Error::Model) names the tensor that is missing or has the wrong shape or type; otherwise
/// what the device says.
pub fn load_whisper<B: LlmBackend, W: WeightForm<B>>(
    device: &B,
    model: &WhisperModel,
    progress: LoadProgress<'_>,
) -> Result<WhisperWeights<B>> {
    let spec = &model.spec;
    let hidden = spec.encoder.hidden;
    let encoding = device.for_encoders();
    let encoding = encoding.as_ref().unwrap_or(device);
    let mut loader = NamedLoader::<B, W>::new(encoding, &model.source, model.dtype, progress)?;
    let table = |loader: &mut NamedLoader<'_, '_, B, W>, name: &str, rows| {
        loader.load_table(name, [rows, hidden])
    };
    let conv1 = [hidden, spec.mels];
    let conv1 = conv(&mut loader, "model.encoder.conv1", conv1, false)?;
    let conv2 = conv(&mut loader, "model.encoder.conv2", [hidden, hidden], true)?;
    let encoder = (0..spec.encoder.layers).map(|i| format!("model.encoder.layers.{i}"));
    let encoder = encoder.map(|name| PreNormLayer::load(&mut loader, &spec.encoder, &NAMES, &name));
    let encoder = encoder.collect::<Result<_>>()?;
    let encoder_norm = loader.norm("model.encoder.layer_norm", hidden)?;
    let positions = table(&mut loader, "model.encoder.embed_positions", spec.positions)?;
    loader.load_onto(device);
    let decoder = (0..spec.decoder.layers).map(|i| format!("model.decoder.layers.{i}"));
    let decoder = decoder.map(|name| {
        Ok((
            PreNormLayer::load(&mut loader, &spec.decoder, &NAMES, &name)?,
            cross(&mut loader, (encoding, device), hidden, &name)?,
        ))
    });
    let decoder = decoder.collect::<Result<_>>()?;
    let words = table(&mut loader, "model.decoder.embed_tokens", spec.vocab_size)?;
    let head = MatrixLinear::<B, W> {
        weight: Arc::clone(&words.weight),
        bias: None,
        shape: words.shape,
    };
    let places = table(&mut loader, "model.decoder.embed_positions", spec.tokens)?;
    Ok(WhisperWeights {
        conv1,
        conv2,
        encoder_positions: Box::new(positions),
        encoder,
        encoder_norm,
        words: Box::new(words),
        head: Box::new(head),
        decoder_positions: Box::new(places),
        decoder,
        decoder_norm: loader.norm("model.decoder.layer_norm", hidden)?,
    })
}

/// Cross-attention, whose keys and values are computed with the states.
fn cross<'a, B: LlmBackend, W: WeightForm<B>>(
    loader: &mut NamedLoader<'a, '_, B, W>,
    (encoding, device): (&'a B, &'a B),
    hidden: usize,
    prefix: &str,
) -> Result<CrossLayer<B>> {
    let mut map = |device: &'a B, part: &str| -> Result<Box<dyn crate::Linear<B>>> {
        let name = format!("{prefix}.encoder_attn.{part}");
        loader.load_onto(device);
        Ok(Box::new(loader.load_linear(
            &[name],
            [hidden, hidden],
            Bias::Some,
        )?))
    };
    Ok(CrossLayer {
        k: map(encoding, "k_proj")?,
        v: map(encoding, "v_proj")?,
        q: map(device, "q_proj")?,
        out: map(device, "out_proj")?,
        norm: loader.norm(&format!("{prefix}.encoder_attn_layer_norm"), hidden)?,
    })
}

/// A convolution as a product with rows of neighbours: channel by channel, or neighbour by neighbour if `rows`.
fn conv<B: LlmBackend, W: WeightForm<B>>(
    loader: &mut NamedLoader<'_, '_, B, W>,
    name: &str,
    [out, channels]: [usize; 2],
    rows: bool,
) -> Result<Conv<B>> {
    let stored = loader.vector(&format!("{name}.weight"), &[out, channels, KERNEL])?;
    let width = channels * KERNEL;
    let values = match rows {
        false => stored,
        // [out, channels, taps] → [out, taps, channels]
        true => {
            let mut values = vec![0.0; stored.len()];
            for (to, from) in values
                .chunks_exact_mut(width)
                .zip(stored.chunks_exact(width))
            {
                for (i, value) in to.iter_mut().enumerate() {
                    *value = from[i % channels * KERNEL + i / channels];
                }
            }
            values
        }
    };
    let shape = MatShape {
        rows: out,
        cols: width,
    };
    let bias = loader.vector(&format!("{name}.bias"), &[out])?;
    Ok(Conv {
        weight: loader.matrix(&values, shape, MatrixUse::Products)?,
        bias: loader.device().from_slice(&bias)?,
        shape,
    })
}
