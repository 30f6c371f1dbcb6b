//! Attention: one routine over closures for keys and values; the ops differ only in where keys lie.

use super::buffer::RefBuffer;
use super::precision::{narrow, wide};
use crate::backend::{AttnConfig, FlashShape, MlaShape, check};
use ferrum_types::{FloatElement, Result};
use std::ops::Range;

/// Softmax attention of one query over the keys in `visible`.
///
/// `key(j, d)` and `value(j, d)` are element `d` of key and value `j`. `sink` is one more logit, with
/// no value. Without a visible key `out` is zeros.
pub(super) fn attend<A: FloatElement>(
    query: &[A],
    visible: Range<usize>,
    key: impl Fn(usize, usize) -> f32,
    value: impl Fn(usize, usize) -> f32,
    sink: Option<f32>,
    config: &AttnConfig,
    out: &mut [A],
) {
    let score = |j| {
        let products = query.iter().enumerate();
        let dot: f64 = products.map(|(d, &q)| wide(q) * f64::from(key(j, d))).sum();
        let scaled = dot * f64::from(config.scale);
        match config.softcap.map(f64::from) {
            Some(cap) => cap * (scaled / cap).tanh(),
            None => scaled,
        }
    };
    let scores: Vec<f64> = visible.clone().map(score).collect();
    if scores.is_empty() {
        return out.fill(A::zeroed());
    }
    let sink = sink.map_or(f64::NEG_INFINITY, f64::from);
    let largest = scores
        .iter()
        .fold(sink, |largest, &score| largest.max(score));
    let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
    let total = weights.iter().sum::<f64>() + (sink - largest).exp();
    for (d, out) in out.iter_mut().enumerate() {
        let values = visible.clone().map(|j| f64::from(value(j, d)));
        let sum: f64 = weights
            .iter()
            .zip(values)
            .map(|(weight, value)| weight * value)
            .sum();
        *out = narrow(sum / total);
    }
}

/// Attention over a contiguous head-major cache.
pub(super) fn flash_attention<A: FloatElement>(
    q: &RefBuffer<A>,
    (k, v): (&RefBuffer<A>, &RefBuffer<A>),
    sinks: Option<&RefBuffer<f32>>,
    out: &mut RefBuffer<A>,
    shape: FlashShape,
    config: &AttnConfig,
) -> Result<()> {
    check::flash_attention(q, (k, v), sinks, out, shape, config)?;
    let AttnConfig {
        heads,
        kv_heads,
        head_dim,
        value_dim,
        ..
    } = *config;
    let FlashShape {
        q_len,
        kv_len,
        kv_seq_stride,
        pos_offset,
    } = shape;

    for head in 0..heads {
        // Consecutive query heads share a kv head.
        let kv_head = head / (heads / kv_heads);
        let at = |j: usize| kv_head * kv_seq_stride + j;
        for i in 0..q_len {
            let query = head * q_len + i;
            attend(
                &q.0[query * head_dim..][..head_dim],
                config.visible(pos_offset.saturating_add(i), kv_len),
                |j, d| k.0[at(j) * head_dim + d].to_f32(),
                |j, d| v.0[at(j) * value_dim + d].to_f32(),
                sinks.map(|sinks| sinks.0[head]),
                config,
                &mut out.0[query * value_dim..][..value_dim],
            );
        }
    }
    Ok(())
}

/// Attention of all heads over one latent cache, whose rows are keys and begin with the values.
pub(super) fn mla_attention<A: FloatElement>(
    q: &RefBuffer<A>,
    latent: &RefBuffer<A>,
    out: &mut RefBuffer<A>,
    shape: MlaShape,
) -> Result<()> {
    check::mla_attention(q, latent, out, shape)?;
    let MlaShape {
        q_len,
        kv_len,
        heads,
        rank,
        ..
    } = shape;
    let (dim, config) = (shape.key_dim(), shape.config());
    for i in 0..q_len {
        let visible = config.visible(shape.pos_offset.saturating_add(i), kv_len);
        for head in 0..heads {
            let vector = i * heads + head;
            attend(
                &q.0[vector * dim..][..dim],
                visible.clone(),
                |j, d| latent.0[j * dim + d].to_f32(),
                |j, d| latent.0[j * dim + d].to_f32(),
                None,
                &config,
                &mut out.0[vector * rank..][..rank],
            );
        }
    }
    Ok(())
}
