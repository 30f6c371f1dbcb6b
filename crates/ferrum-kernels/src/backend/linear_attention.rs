//! [`BackendState::linear_attention`](super::BackendState::linear_attention) on the host, token by token in f64.

use super::*;
use ferrum_types::{FloatElement, Result};

/// Added to the square of a query's or key's length.
const LENGTH_EPS: f64 = 1e-6;

/// The provided body.
pub(super) fn linear_attention<B: Backend>(
    ctx: &mut B::Context,
    inputs: LinearAttention<'_, B>,
    states: &mut B::Buffer<f32>,
    batch: &DeviceBatch<B>,
    out: &mut Act<B>,
    shape: LinearAttentionShape,
) -> Result<()> {
    let op = "linear_attention";
    let lens = check::linear_attention::<B>(&inputs, states, batch, out, shape)?;
    let (starts, slots) = (
        B::to_vec(ctx, &batch.query_starts)?,
        B::to_vec(ctx, &batch.state_slots)?,
    );
    let wide = |ctx: &mut B::Context, from: &Act<B>, len: usize| -> Result<Vec<f64>> {
        let mut values = vec![B::Act::from_f32(0.0); len];
        B::read(ctx, from, 0, &mut values)?;
        Ok(values.iter().map(|x| f64::from(x.to_f32())).collect())
    };
    let rows = wide(ctx, inputs.x, lens.x)?;
    let gates = wide(ctx, inputs.gates, lens.gates)?;
    let mut params = vec![0.0; lens.params];
    B::read(ctx, inputs.params, 0, &mut params)?;
    let mut kept = vec![0.0; lens.states];
    B::read(ctx, states, 0, &mut kept)?;
    // Rows of no sequence stay.
    let mut written = vec![B::Act::from_f32(0.0); lens.out];
    B::read(ctx, out, 0, &mut written)?;
    let elements = shape.states.elements;
    for s in 0..batch.shape.seqs {
        let lists = (&starts[..], &slots[..]);
        let slots = shape.states.slots;
        let (tokens, slot) = check::state_sequence(op, batch.shape, lists, slots, s)?;
        if tokens.is_empty() {
            continue;
        }
        let state = &mut kept[slot * elements + shape.offset..][..shape.state_len()];
        let mut own: Vec<f64> = state.iter().map(|&x| f64::from(x)).collect();
        for token in tokens {
            let row = &rows[token * shape.row_dim()..][..shape.row_dim()];
            let gates = &gates[token * shape.gate_dim()..][..shape.gate_dim()];
            let out = &mut written[token * shape.value_width()..][..shape.value_width()];
            let heads = own.chunks_exact_mut(shape.key_dim * shape.value_dim);
            let outs = out.chunks_exact_mut(shape.value_dim);
            for (head, (state, out)) in heads.zip(outs).enumerate() {
                let sums = step((row, gates, &params), state, head, shape);
                let sums = out.iter_mut().zip(sums);
                sums.for_each(|(out, sum)| *out = B::Act::from_f32(sum as f32));
            }
        }
        let own = state.iter_mut().zip(own);
        own.for_each(|(state, x)| *state = x as f32);
    }
    B::write(ctx, states, 0, &kept)?;
    B::write(ctx, out, 0, &written)
}

/// A token of a head: the state goes on, and what it says of the query.
fn step(
    (row, gates, params): (&[f64], &[f64], &[f32]),
    state: &mut [f64],
    head: usize,
    shape: LinearAttentionShape,
) -> Vec<f64> {
    let (heads, keys, values) = (shape.value_heads, shape.key_dim, shape.value_dim);
    let [q, k, v] = shape.qkv_offsets(head);
    let (mut query, mut key) = (row[q..][..keys].to_vec(), row[k..][..keys].to_vec());
    let value = &row[v..][..values];
    let [decay, bias, skip] = [0, 1, 2].map(|row| f64::from(params[row * heads + head]));
    let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
    let is_delta = shape.rule == LinearAttentionRule::GatedDelta;
    let (delta, share) = match shape.rule {
        LinearAttentionRule::GatedDelta => {
            let share = 1.0 / (1.0 + (-gates[head]).exp());
            (softplus(gates[heads + head] + bias), share)
        }
        LinearAttentionRule::StateSpace => {
            let delta = softplus(gates[head] + bias);
            (delta, delta)
        }
    };
    if is_delta {
        let length = |x: &[f64]| (x.iter().map(|x| x * x).sum::<f64>() + LENGTH_EPS).sqrt();
        let (of_query, of_key) = (length(&query) * (keys as f64).sqrt(), length(&key));
        query.iter_mut().for_each(|x| *x /= of_query);
        key.iter_mut().for_each(|x| *x /= of_key);
    }
    let decay = (decay * delta).exp();
    state.iter_mut().for_each(|x| *x *= decay);
    let mut out = Vec::with_capacity(values);
    for (c, &value) in value.iter().enumerate() {
        let column = |state: &[f64], with: &[f64]| -> f64 {
            let rows = with.iter().enumerate();
            rows.map(|(i, x)| x * state[i * values + c]).sum()
        };
        let said = if is_delta { column(state, &key) } else { 0.0 };
        let update = share * (value - said);
        for (i, key) in key.iter().enumerate() {
            let element = &mut state[i * values + c];
            // As it is kept between steps, so that chunks change no bit.
            *element = f64::from((*element + key * update) as f32);
        }
        out.push(column(state, &query) + skip * value);
    }
    out
}
