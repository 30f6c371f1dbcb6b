//! The projection back to the stream, and the weighted sum of what a token's experts gave, in one.
//!
//! A task has some columns of the result, of all tokens, and takes expert after expert: what they give of these columns is added where
//! it stays in the cache, so that no row of a pair is ever written. The experts of a token are added in ascending order. Where sums over
//! inputs are [cut](SumSplit), so is what is added: the parts of a token are sums over its experts each, and their tree is the result. That is the
//! order of ranks which hold a part of every expert's inputs, add up their tokens' experts, and sum over ranks.

use super::product::{ExpertLinear, MAX_PANELS, TASKS_PER_THREAD};
use super::rows::PackedRows;
use super::{CpuExperts, Matrices};
use crate::exec::{Exec, Scratch};
use crate::gemm::tile::PANEL;
use crate::gemm::{Columns, PartSums};
use crate::isa::Kernel;
use crate::math::{for_vectors, load_at, store_at};
use crate::memory::SharedMut;
use crate::quant::format::UNIT;
use crate::simd::Simd;
use ferrum_types::check::SortedPairs;
use ferrum_types::{ExpertInput, ExpertShape, MoeShape, Result, SumSplit};
use std::ops::Range;

/// Floats of the sums of a task, while a narrower task is possible: they stay in the second-level cache.
const SUMS_AT_ONCE: usize = 128 << 10;

impl CpuExperts {
    /// Cuts the sums over inputs where each matrix's panels allow it.
    pub fn split_sums(&mut self, split: SumSplit) {
        match &mut self.matrices {
            Matrices::Dense(all) => all.iter_mut().for_each(|one| one.split_sums(split)),
            Matrices::Packed(all) => all.iter_mut().for_each(|one| one.split_sums(split)),
        }
    }

    /// How those of an expert are cut, and of how many terms they are.
    fn split(&self, expert: usize) -> (SumSplit, usize) {
        match &self.matrices {
            Matrices::Dense(all) => (all[expert].sums, all[expert].steps()),
            Matrices::Packed(all) => (all[expert].sums, self.shape.k / UNIT),
        }
    }
}

/// `out[token] = Σ weights[pair] · (x[pair] · matrix(pair)ᵀ + bias(pair))` over the token's pairs; with `add`, that is added to what
/// was there.
///
/// # Errors
/// `InvalidArgument` when the pairs are not sorted, [`OutOfMemory`](ferrum_types::Error::OutOfMemory) for scratch memory.
///
/// # Panics
/// When a slice is shorter than the shape says, or the stack is of another one.
pub fn down(
    run: (&Exec, &mut Scratch),
    x: &[f32],
    experts: ExpertLinear<'_>,
    (routing, weights): (SortedPairs<'_>, &[f32]),
    (out, add): (&mut [f32], bool),
    shape: MoeShape,
) -> Result<()> {
    let ExpertShape {
        experts: count, n, ..
    } = shape.experts;
    let stack = experts.matrices;
    let tokens = shape.tokens;
    let parts = (0..count).map(|expert| stack.split(expert).0.parts());
    let parts = parts.max().unwrap_or(1);
    let panels = n.div_ceil(PANEL);
    let wanted = run.0.pool.threads() * TASKS_PER_THREAD;
    let fit = SUMS_AT_ONCE / (parts * tokens * PANEL).max(1);
    let each = (panels / wanted).min(fit.max(2)).clamp(1, MAX_PANELS);
    let sums = parts * tokens * each * PANEL;
    let x = (x, ExpertInput::PerPair);
    let packed = PackedRows::new(run, "moe_down", x, &[stack], routing, (0, 2 * sums), shape)?;
    let Some((rows, _, buffers)) = packed else {
        return Ok(());
    };
    let work = Work {
        stack,
        biases: experts.bias.map(|bias| &bias[..count * n]),
        weights,
        shape,
        parts,
        buffers: SharedMut::new(buffers),
        sums,
        out: SharedMut::new(&mut out[..tokens * n]),
        add,
        rows,
    };
    let exec = work.rows.exec;
    exec.parallel_for_dynamic(panels.div_ceil(each), work.rows.cost(n), |task, thread| {
        let first = task * each;
        work.some(first..(first + each).min(panels), thread);
    });
    Ok(())
}

/// The products of all groups, and what is added up of them.
struct Work<'a> {
    rows: PackedRows<'a>,
    stack: &'a CpuExperts,
    /// `[experts, n]`.
    biases: Option<&'a [f32]>,
    /// `[pairs]`.
    weights: &'a [f32],
    shape: MoeShape,
    /// Most parts that sums are cut into.
    parts: usize,
    /// Of each thread: to decode weights, products of a group, and sums.
    buffers: SharedMut<'a, f32>,
    /// Floats of the sums, and of the products.
    sums: usize,
    /// `[tokens, n]`.
    out: SharedMut<'a, f32>,
    add: bool,
}

impl Work<'_> {
    /// Some columns of the result.
    fn some(&self, panels: Range<usize>, thread: usize) {
        let (exec, n) = (self.rows.exec, self.shape.experts.n);
        let columns = panels.start * PANEL..(panels.end * PANEL).min(n);
        let own = self.rows.buffer + 2 * self.sums;
        // SAFETY: no two running tasks share a thread number.
        let own = unsafe { self.buffers.part(thread * own, own) };
        let (buffer, own) = own.split_at_mut(self.rows.buffer);
        let (stage, sums) = own.split_at_mut(self.sums);
        let width = columns.len();
        let sums = &mut sums[..self.parts * self.shape.tokens * width];
        sums.fill(0.0);
        for &group in self.rows.groups {
            let [expert, start, rows] = group;
            let (split, terms) = self.stack.split(expert);
            let stride = rows * width;
            let stage = &mut stage[..split.parts() * stride];
            let products = Columns::from(SharedMut::new(stage), width, (0, columns.start));
            let product = (0, self.stack, PartSums::Apart(split, stride));
            self.rows
                .product(product, group, panels.clone(), buffer, products);
            let held = expert * n + columns.start..expert * n + columns.end;
            exec.level.run(AddProducts {
                pairs: &self.rows.input.ids[start..][..rows],
                top_k: self.shape.top_k,
                tokens: self.shape.tokens,
                weights: self.weights,
                bias: self.biases.map(|biases| &biases[held]),
                split,
                terms,
                stage,
                sums,
                width,
            });
        }
        exec.level.run(Finish {
            sums,
            parts: self.parts,
            tokens: self.shape.tokens,
            columns,
            n,
            out: self.out,
            add: self.add,
        });
    }
}

/// Adds the products of a group to the sums of its tokens, part by part.
struct AddProducts<'a> {
    /// The pair of each row.
    pairs: &'a [i32],
    top_k: usize,
    tokens: usize,
    weights: &'a [f32],
    /// Of the columns; it belongs to the first part.
    bias: Option<&'a [f32]>,
    /// How sums of so many terms are cut.
    split: SumSplit,
    terms: usize,
    /// `[parts, rows, width]`.
    stage: &'a [f32],
    /// `[parts, tokens, width]`.
    sums: &'a mut [f32],
    width: usize,
}

impl Kernel for AddProducts<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.width;
        let parts = self.stage.chunks_exact(self.pairs.len() * width);
        let sums = self.sums.chunks_exact_mut(self.tokens * width);
        for (part, (products, sums)) in parts.zip(sums).enumerate() {
            if self.split.part(part, self.terms).is_empty() {
                continue;
            }
            let bias = self.bias.filter(|_| part == 0);
            for (products, &pair) in products.chunks_exact(width).zip(self.pairs) {
                let pair = pair as usize;
                let weight = s.splat(self.weights[pair]);
                let sums = &mut sums[pair / self.top_k * width..][..width];
                for_vectors(
                    width,
                    #[inline(always)]
                    |at, _| {
                        let mut product = load_at(s, products, at);
                        if let Some(bias) = bias {
                            product = s.add(product, load_at(s, bias, at));
                        }
                        let sum = s.fma(weight, product, load_at(s, sums, at));
                        store_at(s, sums, at, sum);
                    },
                );
            }
        }
    }
}

/// The trees of all parts' sums, to columns of the result.
struct Finish<'a> {
    /// `[parts, tokens, width]`.
    sums: &'a [f32],
    parts: usize,
    tokens: usize,
    columns: Range<usize>,
    n: usize,
    out: SharedMut<'a, f32>,
    add: bool,
}

impl Kernel for Finish<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (first, width) = (self.columns.start, self.columns.len());
        for token in 0..self.tokens {
            // SAFETY: a task has its columns of all rows for itself.
            let out = unsafe { self.out.part(token * self.n + first, width) };
            for_vectors(
                width,
                #[inline(always)]
                |at, _| {
                    let (mut pair, mut total) = (s.zero(), s.zero());
                    for part in 0..self.parts {
                        let sums = &self.sums[(part * self.tokens + token) * width..][..width];
                        SumSplit::add_part(
                            part,
                            Some(load_at(s, sums, at)),
                            (&mut pair, &mut total),
                            #[inline(always)]
                            |a, b| s.add(a, b),
                        );
                    }
                    if self.add {
                        total = s.add(load_at(s, out, at), total);
                    }
                    store_at(s, out, at, total);
                },
            );
        }
    }
}
