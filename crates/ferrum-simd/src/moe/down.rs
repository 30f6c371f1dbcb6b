//! The projection back to the stream, and the weighted sum of what a token's experts gave, in one.
//!
//! A task has some columns of the result, of all tokens, and takes expert after expert: what they give of these columns is added where
//! it stays in the cache, so that no row of a pair is ever written. The experts of a token are added in ascending order. Where sums over
//! inputs are [cut](SumSplit), so is what is added: the parts of a token are sums over its experts each, and their tree is the result. That is the
//! order of ranks which hold a part of every expert's inputs, add up their tokens' experts, and sum over ranks.

use super::product::{ExpertLinear, MAX_PANELS};
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

/// Tasks for each thread, when there are enough panels: a task passes over all experts, so few are as even as many.
const TASKS_PER_THREAD: usize = 2;
/// Rows of products that are held at once, where there are as many: those of all experts of a few tokens.
const STAGE_ROWS: usize = 32;

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
    let most = routing.tokens_per_expert.iter().copied().max();
    let most = most.map_or(0, |most| usize::try_from(most).unwrap_or(0));
    let pairs = routing.expert_ids.len();
    let stage_rows = pairs.min(STAGE_ROWS).max(tokens).max(most.min(pairs));
    let stage = parts * stage_rows * each * PANEL;
    let x = (x, ExpertInput::PerPair);
    let memory = (2 * pairs, sums + stage);
    let packed = PackedRows::new(run, "moe_down", x, &[stack], routing, memory, (shape, true))?;
    let Some((rows, sorted, buffers)) = packed else {
        if !add {
            out[..tokens * n].fill(0.0);
        }
        return Ok(());
    };
    let (sorted_weights, tokens_of) = sorted.split_at_mut(pairs);
    let tokens_of: &mut [u32] = bytemuck::cast_slice_mut(tokens_of);
    let places = sorted_weights.iter_mut().zip(&mut *tokens_of);
    for ((weight, token), &pair) in places.zip(rows.input.ids) {
        *weight = weights[pair as usize];
        *token = pair as u32 / shape.top_k as u32;
    }
    let work = Work {
        stack,
        biases: experts.bias.map(|bias| &bias[..count * n]),
        weights: sorted_weights,
        tokens: tokens_of,
        shape,
        parts,
        buffers: SharedMut::new(buffers),
        sums,
        stage,
        stage_rows,
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
    /// `[pairs]`, sorted by expert: what each weighs, and its token.
    weights: &'a [f32],
    tokens: &'a [u32],
    shape: MoeShape,
    /// Most parts that sums are cut into.
    parts: usize,
    /// Of each thread: to decode weights, products of a group, and sums.
    buffers: SharedMut<'a, f32>,
    /// Floats of the sums.
    sums: usize,
    /// Floats of products, and rows of them that are held at once: at least those of an expert.
    stage: usize,
    stage_rows: usize,
    /// `[tokens, n]`.
    out: SharedMut<'a, f32>,
    add: bool,
}

impl Work<'_> {
    /// Some columns of the result.
    fn some(&self, panels: Range<usize>, thread: usize) {
        let (exec, n) = (self.rows.exec, self.shape.experts.n);
        let columns = panels.start * PANEL..(panels.end * PANEL).min(n);
        let own = self.rows.buffer + self.sums + self.stage;
        // SAFETY: no two running tasks share a thread number.
        let own = unsafe { self.buffers.part(thread * own, own) };
        let (buffer, own) = own.split_at_mut(self.rows.buffer);
        let (stage, sums) = own.split_at_mut(self.stage);
        let width = columns.len();
        let sums = &mut sums[..self.parts * self.shape.tokens * width];
        sums.fill(0.0);
        let mut groups = self.rows.groups;
        while let Some(&[_, first, _]) = groups.first() {
            // As many experts as have room together, and at least one.
            let held = groups.iter().take_while(|[_, start, rows]| {
                *start == first || start + rows - first <= self.stage_rows
            });
            let (some, rest) = groups.split_at(held.count());
            groups = rest;
            let rows: usize = some.iter().map(|[_, _, rows]| rows).sum();
            let stride = rows * width;
            let stage = &mut stage[..self.parts * stride];
            let products = SharedMut::new(stage);
            for &group in some {
                let (split, _) = self.stack.split(group[0]);
                let sums = PartSums::Apart(split, stride);
                let to = Columns::from(products, width, (0, columns.start));
                let to = to.behind((group[1] - first) * width);
                self.rows
                    .product((0, self.stack, sums), group, panels.clone(), buffer, to);
            }
            exec.level.run(AddProducts {
                work: self,
                groups: some,
                columns: columns.clone(),
                first,
                stride,
                stage,
                sums: &mut *sums,
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

/// Adds the products of some groups to the sums of their tokens, each part to its own.
struct AddProducts<'a> {
    work: &'a Work<'a>,
    groups: &'a [[usize; 3]],
    columns: Range<usize>,
    /// The place of the first row.
    first: usize,
    /// `[parts, rows, columns]`, with so many elements for each part.
    stage: &'a [f32],
    stride: usize,
    /// `[parts, tokens, columns]`.
    sums: &'a mut [f32],
}

impl Kernel for AddProducts<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (work, width) = (self.work, self.columns.len());
        for &[expert, start, rows] in self.groups {
            let (split, terms) = work.stack.split(expert);
            let held = expert * work.shape.experts.n;
            let held = held + self.columns.start..held + self.columns.end;
            let bias = work.biases.map(|biases| &biases[held]);
            let some = |part| !split.part(part, terms).is_empty();
            for place in start..start + rows {
                let (weight, token) = (s.splat(work.weights[place]), work.tokens[place]);
                for part in (0..split.parts()).filter(|&part| some(part)) {
                    let row = part * self.stride + (place - self.first) * width;
                    let products = &self.stage[row..][..width];
                    let sums = (part * work.shape.tokens + token as usize) * width;
                    let sums = &mut self.sums[sums..][..width];
                    // It belongs to the first part.
                    let bias = bias.filter(|_| part == 0);
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
