//! Linear attention over states that decay: gated delta networks and Mamba-2.
//!
//! A value head of a sequence is a task: no other task reads its state, and its tokens come one after the other, each a
//! decay, an update of rank 1 and a product. So chunks and batches change no bit. Columns of a state are independent,
//! and a vector of them goes through all keys before the next one, with its sums in registers.

use super::exec::{Exec, Scratch};
use super::isa::Kernel;
use super::math::{for_vectors, load_at, store_at, sum_squares};
use super::memory::SharedMut;
use super::simd::Simd;
use ferrum_types::{LinearAttentionRule, LinearAttentionShape, Result};

/// What is read: rows of inputs, gates, and `[3, value_heads]` of decay, bias of the step and skip.
pub struct LinearAttentionInputs<'a> {
    /// `[tokens, row_dim]`.
    pub x: &'a [f32],
    /// `[tokens, gate_dim]`.
    pub gates: &'a [f32],
    /// `[3, value_heads]`.
    pub params: &'a [f32],
}

/// Linear attention of a step. `scratch.items` has a sequence each: its first token, how many it has (at least one),
/// and the slot of its state, which no other has.
///
/// # Errors
/// [`OutOfMemory`](ferrum_types::Error::OutOfMemory) for scratch memory.
///
/// # Panics
/// When a slice is shorter than the shape says.
pub fn linear_attention(
    exec: &Exec,
    scratch: &mut Scratch,
    inputs: &LinearAttentionInputs<'_>,
    (states, out): (&mut [f32], &mut [f32]),
    shape: LinearAttentionShape,
) -> Result<()> {
    let (row, part) = (shape.states.elements, shape.state_len());
    let fits = shape.offset <= row && part <= row - shape.offset;
    assert!(fits, "the part of a state");
    assert!(
        inputs.params.len() >= 3 * shape.value_heads,
        "the parameters"
    );
    let heads = shape.value_heads;
    let tasks = scratch.items.len() * heads;
    let (room, sequences) = scratch.floats_and_items(tasks * 2 * shape.key_dim)?;
    let tokens: usize = sequences.iter().map(|[_, tokens, _]| tokens).sum();
    let room = SharedMut::new(room);
    let call = Call {
        inputs,
        states: SharedMut::new(states),
        out: SharedMut::new(out),
        shape,
    };
    exec.parallel_for_dynamic(tasks, 4 * tokens * part, |task, _| {
        // SAFETY: each task has a part of its own.
        let room = unsafe { room.part(task * 2 * shape.key_dim, 2 * shape.key_dim) };
        exec.level.run(Head {
            call: &call,
            sequence: sequences[task / heads],
            head: task % heads,
            room,
        });
    });
    Ok(())
}

struct Call<'a> {
    inputs: &'a LinearAttentionInputs<'a>,
    states: SharedMut<'a, f32>,
    out: SharedMut<'a, f32>,
    shape: LinearAttentionShape,
}

/// A value head of a sequence.
struct Head<'a> {
    call: &'a Call<'a>,
    /// First token, tokens, and the slot of the state.
    sequence: [usize; 3],
    head: usize,
    /// Room for a query and a key.
    room: &'a mut [f32],
}

impl Kernel for Head<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (inputs, shape) = (self.call.inputs, self.call.shape);
        let [start, tokens, slot] = self.sequence;
        let (keys, values) = (shape.key_dim, shape.value_dim);
        let state = slot * shape.states.elements + shape.offset + self.head * keys * values;
        // SAFETY: no two sequences are in one slot, and no other task has this head of it.
        let state = unsafe { self.call.states.part(state, keys * values) };
        let (query, key) = self.room.split_at_mut(keys);
        let [q_at, k_at, v_at] = shape.qkv_offsets(self.head);
        let skip = inputs.params[2 * shape.value_heads + self.head];
        for token in start..start + tokens {
            let row = &inputs.x[token * shape.row_dim()..][..shape.row_dim()];
            let value = &row[v_at..][..values];
            let (decay, share) = gates(inputs, shape, (token, self.head));
            query.copy_from_slice(&row[q_at..][..keys]);
            key.copy_from_slice(&row[k_at..][..keys]);
            let is_delta = shape.rule == LinearAttentionRule::GatedDelta;
            if is_delta {
                let scale = 1.0 / (keys as f32).sqrt();
                let of_query = scale / (sum_squares(s, query) + LENGTH_EPS).sqrt();
                let of_key = 1.0 / (sum_squares(s, key) + LENGTH_EPS).sqrt();
                query.iter_mut().for_each(|x| *x *= of_query);
                key.iter_mut().for_each(|x| *x *= of_key);
            }
            let out_at = token * shape.value_width() + self.head * values;
            // SAFETY: no other task has this head of the token.
            let out = unsafe { self.call.out.part(out_at, values) };
            let (decay, share, skip) = (s.splat(decay), s.splat(share), s.splat(skip));
            for_vectors(
                values,
                #[inline(always)]
                |at, _| {
                    let v = load_at(s, value, at);
                    let mut said = s.zero();
                    if is_delta {
                        for (row, &k) in state.chunks_exact(values).zip(&*key) {
                            let kept = s.mul(decay, load_at(s, row, at));
                            said = s.fma(s.splat(k), kept, said);
                        }
                    }
                    let update = s.mul(share, s.sub(v, said));
                    let mut sum = s.mul(skip, v);
                    let pairs = key.iter().zip(&*query);
                    for (row, (&k, &q)) in state.chunks_exact_mut(values).zip(pairs) {
                        let kept = s.mul(decay, load_at(s, row, at));
                        let new = s.fma(s.splat(k), update, kept);
                        store_at(s, row, at, new);
                        sum = s.fma(s.splat(q), new, sum);
                    }
                    store_at(s, out, at, sum);
                },
            );
        }
    }
}

/// Added to the square of a query's or key's length.
const LENGTH_EPS: f32 = 1e-6;

/// What a head's state is multiplied with at a token, and what share of the value goes in.
#[inline(always)]
fn gates(
    inputs: &LinearAttentionInputs<'_>,
    shape: LinearAttentionShape,
    (token, head): (usize, usize),
) -> (f32, f32) {
    let heads = shape.value_heads;
    let gates = &inputs.gates[token * shape.gate_dim()..][..shape.gate_dim()];
    let (decay, bias) = (inputs.params[head], inputs.params[heads + head]);
    match shape.rule {
        LinearAttentionRule::GatedDelta => {
            let step = softplus(gates[heads + head] + bias);
            ((decay * step).exp(), 1.0 / (1.0 + (-gates[head]).exp()))
        }
        LinearAttentionRule::StateSpace => {
            let step = softplus(gates[head] + bias);
            ((decay * step).exp(), step)
        }
    }
}

/// `ln(1 + eˣ)`.
fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}
