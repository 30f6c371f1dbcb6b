//! Attention: one routine over closures for keys and values; the ops differ only in where keys lie.

use super::buffer::{RefBuffer, elements, require};
use super::elementwise::check_cap;
use super::heads::heads_len;
use crate::backend::{AttnConfig, FlashShape, HeadsShape, MlaShape};
use ferrum_types::Result;
use std::ops::Range;

/// How scores are made and which keys a query sees.
#[derive(Clone, Copy)]
pub(super) struct Rule {
    pub(super) scale: f32,
    pub(super) softcap: Option<f32>,
    pub(super) causal: bool,
    pub(super) window: Option<usize>,
}

impl Rule {
    /// The keys that the query at key index `at` sees, of `kv_len` keys.
    pub(super) fn visible(&self, at: usize, kv_len: usize) -> Range<usize> {
        let after = at.saturating_add(1);
        let end = if self.causal {
            after.min(kv_len)
        } else {
            kv_len
        };
        let start = self.window.map_or(0, |window| after.saturating_sub(window));
        start.min(end)..end
    }
}

/// Softmax attention of one query over the keys in `visible`.
///
/// `key(j, d)` and `value(j, d)` are element `d` of key and value `j`. `sink` is one more logit, with
/// no value. Without a visible key `out` is zeros.
pub(super) fn attend(
    query: &[f32],
    visible: Range<usize>,
    key: impl Fn(usize, usize) -> f32,
    value: impl Fn(usize, usize) -> f32,
    sink: Option<f32>,
    rule: Rule,
    out: &mut [f32],
) {
    let score = |j| {
        let products = query.iter().enumerate();
        let dot: f64 = products
            .map(|(d, &q)| f64::from(q) * f64::from(key(j, d)))
            .sum();
        let scaled = dot * f64::from(rule.scale);
        match rule.softcap.map(f64::from) {
            Some(cap) => cap * (scaled / cap).tanh(),
            None => scaled,
        }
    };
    let scores: Vec<f64> = visible.clone().map(score).collect();
    if scores.is_empty() {
        return out.fill(0.0);
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
        *out = (sum / total) as f32;
    }
}

/// Checks what every attention op asks of its config.
pub(super) fn check_config(op: &'static str, config: &AttnConfig) -> Result<Rule> {
    let AttnConfig {
        heads, kv_heads, ..
    } = *config;
    require(op, kv_heads > 0 && heads.is_multiple_of(kv_heads), || {
        format!("{heads} heads are not a multiple of {kv_heads} kv heads")
    })?;
    if let Some(cap) = config.softcap {
        check_cap(op, cap)?;
    }
    Ok(Rule {
        scale: config.scale,
        softcap: config.softcap,
        causal: config.causal,
        window: config.sliding_window,
    })
}

/// Attention over a contiguous head-major cache.
pub(super) fn flash_attention(
    q: &RefBuffer<f32>,
    (k, v): (&RefBuffer<f32>, &RefBuffer<f32>),
    sinks: Option<&RefBuffer<f32>>,
    out: &mut RefBuffer<f32>,
    shape: FlashShape,
    config: &AttnConfig,
) -> Result<()> {
    let op = "flash_attention";
    let rule = check_config(op, config)?;
    let AttnConfig {
        heads,
        kv_heads,
        head_dim,
        ..
    } = *config;
    let FlashShape {
        q_len,
        kv_len,
        kv_seq_stride,
        pos_offset,
    } = shape;
    require(op, kv_len <= kv_seq_stride, || {
        format!("kv_len is {kv_len}, expected at most kv_seq_stride, {kv_seq_stride}")
    })?;
    let q_size = heads_len(
        op,
        HeadsShape {
            tokens: q_len,
            heads,
            head_dim,
        },
    )?;
    let kv_size = elements(op, &[kv_heads, kv_seq_stride, head_dim])?;
    let q = q.first(op, "q", q_size)?;
    let k = k.first(op, "k", kv_size)?;
    let v = v.first(op, "v", kv_size)?;
    let sinks = sinks
        .map(|sinks| sinks.first(op, "sinks", heads))
        .transpose()?;
    let out = out.first_mut(op, "out", q_size)?;

    for head in 0..heads {
        // Consecutive query heads share a kv head.
        let kv_head = head / (heads / kv_heads);
        let at = |j: usize, d: usize| (kv_head * kv_seq_stride + j) * head_dim + d;
        for i in 0..q_len {
            let query = (head * q_len + i) * head_dim;
            attend(
                &q[query..][..head_dim],
                rule.visible(pos_offset.saturating_add(i), kv_len),
                |j, d| k[at(j, d)],
                |j, d| v[at(j, d)],
                sinks.map(|sinks| sinks[head]),
                rule,
                &mut out[query..][..head_dim],
            );
        }
    }
    Ok(())
}

/// Attention of all heads over one latent cache, whose rows are keys and begin with the values.
pub(super) fn mla_attention(
    q: &RefBuffer<f32>,
    latent: &RefBuffer<f32>,
    out: &mut RefBuffer<f32>,
    shape: MlaShape,
) -> Result<()> {
    let op = "mla_attention";
    let MlaShape {
        q_len,
        kv_len,
        heads,
        rank,
        rope_dim,
        ..
    } = shape;
    let dim = rank.saturating_add(rope_dim);
    let q = q.first(op, "q", elements(op, &[q_len, heads, dim])?)?;
    let latent = latent.first(op, "latent", elements(op, &[kv_len, dim])?)?;
    let out = out.first_mut(op, "out", elements(op, &[q_len, heads, rank])?)?;
    let rule = Rule {
        scale: shape.scale,
        softcap: None,
        causal: shape.causal,
        window: None,
    };
    for i in 0..q_len {
        let visible = rule.visible(shape.pos_offset.saturating_add(i), kv_len);
        for head in 0..heads {
            let vector = i * heads + head;
            attend(
                &q[vector * dim..][..dim],
                visible.clone(),
                |j, d| latent[j * dim + d],
                |j, d| latent[j * dim + d],
                None,
                rule,
                &mut out[vector * rank..][..rank],
            );
        }
    }
    Ok(())
}
