//! The linked list of symbols that merging tokenizers work on, and the order of their merges.
//!
//! Symbols are joined until nothing more can be; candidates wait in a heap, so a text of any shape
//! costs `n log n`.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// No symbol.
pub(super) const NONE: u32 = u32::MAX;

/// A stretch of the text that has become one symbol.
#[derive(Clone, Copy, Debug)]
pub(super) struct Symbol {
    pub(super) prev: u32,
    pub(super) next: u32,
    /// First byte in the text.
    pub(super) start: u32,
    /// Bytes; 0 once it has been joined to the one before.
    pub(super) len: u32,
    /// The tokenizer's own number for it.
    pub(super) id: u32,
}

/// Two neighbours that could be joined. The greatest is joined first: the highest priority, and
/// among equals the leftmost.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    priority: i64,
    left: Reverse<u32>,
    right: u32,
    /// Bytes of both when the candidate was found; another length now means it is out of date.
    len: u32,
    /// Number of the joined symbol.
    id: u32,
}

/// The priority of a merge's rank: lower is better.
pub(super) fn by_rank(rank: u32) -> i64 {
    -i64::from(rank)
}

/// The priority of a token's score: higher is better, in the order of [`f32::total_cmp`].
pub(super) fn by_score(score: f32) -> i64 {
    let bits = score.to_bits() as i32;
    // Of negative numbers, those with greater bits are less.
    i64::from(if bits < 0 { bits ^ i32::MAX } else { bits })
}

/// Appends a symbol to the list.
pub(super) fn push(symbols: &mut Vec<Symbol>, start: usize, len: usize, id: u32) {
    let index = symbols.len() as u32;
    if let Some(last) = symbols.last_mut() {
        last.next = index;
    }
    let prev = index.checked_sub(1).unwrap_or(NONE);
    symbols.push(Symbol {
        prev,
        next: NONE,
        start: start as u32,
        len: len as u32,
        id,
    });
}

/// Joins neighbours in order of priority until `join` knows no more. `join` says what two adjacent
/// symbols become: their priority and the number of the joined symbol.
pub(super) fn merge(
    symbols: &mut [Symbol],
    mut join: impl FnMut(&Symbol, &Symbol) -> Option<(i64, u32)>,
) {
    let mut find = |symbols: &[Symbol], left: u32, right: u32| {
        let (l, r) = (symbols.get(left as usize)?, symbols.get(right as usize)?);
        let (priority, id) = join(l, r)?;
        Some(Candidate {
            priority,
            left: Reverse(left),
            right,
            len: l.len + r.len,
            id,
        })
    };
    let mut heap: BinaryHeap<Candidate> = (1..symbols.len() as u32)
        .filter_map(|right| find(symbols, right - 1, right))
        .collect();
    while let Some(best) = heap.pop() {
        let Reverse(at) = best.left;
        let (left, right) = (symbols[at as usize], symbols[best.right as usize]);
        if left.len == 0 || right.len == 0 || left.len + right.len != best.len {
            continue;
        }
        symbols[at as usize] = Symbol {
            len: best.len,
            next: right.next,
            id: best.id,
            ..left
        };
        symbols[best.right as usize].len = 0;
        if let Some(after) = symbols.get_mut(right.next as usize) {
            after.prev = at;
        }
        heap.extend(find(symbols, left.prev, at));
        heap.extend(find(symbols, at, right.next));
    }
}

/// The symbols still in the list, in order.
pub(super) fn left_over(symbols: &[Symbol]) -> impl Iterator<Item = &Symbol> {
    symbols.iter().filter(|symbol| symbol.len > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_keep_their_order() {
        let scores = [
            f32::NEG_INFINITY,
            -1e9,
            -2.0,
            -1.5,
            -1e-40,
            0.0,
            1e-40,
            1.0,
            f32::INFINITY,
        ];
        assert!(scores.map(by_score).is_sorted_by(|a, b| a < b));
    }
}
