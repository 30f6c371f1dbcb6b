//! The linked list of symbols that merging tokenizers work on, and the order of their merges.
//!
//! Symbols are joined until nothing more can be; candidates wait in a heap, so a text of any shape
//! costs `n log n`.

use std::cmp::Ordering;
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
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate<P> {
    pub(super) priority: P,
    pub(super) left: u32,
    pub(super) right: u32,
    /// Bytes of both when the candidate was found; another length now means it is out of date.
    pub(super) len: u32,
    /// Number of the joined symbol.
    pub(super) id: u32,
}

/// A priority with a total order, greater is better.
pub(super) trait Priority: Copy {
    fn order(self, other: Self) -> Ordering;
}

/// A merge's rank: lower is better.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rank(pub(super) u32);

impl Priority for Rank {
    fn order(self, other: Self) -> Ordering {
        other.0.cmp(&self.0)
    }
}

/// A token's score: higher is better.
#[derive(Clone, Copy, Debug)]
pub(super) struct Score(pub(super) f32);

impl Priority for Score {
    fn order(self, other: Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl<P: Priority> Ord for Candidate<P> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.priority
            .order(other.priority)
            .then(other.left.cmp(&self.left))
    }
}

impl<P: Priority> PartialOrd for Candidate<P> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<P: Priority> PartialEq for Candidate<P> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<P: Priority> Eq for Candidate<P> {}

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
pub(super) fn merge<P: Priority>(
    symbols: &mut [Symbol],
    mut join: impl FnMut(&Symbol, &Symbol) -> Option<(P, u32)>,
) {
    let mut find = |symbols: &[Symbol], left: u32, right: u32| {
        let (l, r) = (symbols.get(left as usize)?, symbols.get(right as usize)?);
        let (priority, id) = join(l, r)?;
        Some(Candidate {
            priority,
            left,
            right,
            len: l.len + r.len,
            id,
        })
    };
    let mut heap: BinaryHeap<Candidate<P>> = (1..symbols.len() as u32)
        .filter_map(|right| find(symbols, right - 1, right))
        .collect();
    while let Some(best) = heap.pop() {
        let (left, right) = (symbols[best.left as usize], symbols[best.right as usize]);
        if left.len == 0 || right.len == 0 || left.len + right.len != best.len {
            continue;
        }
        symbols[best.left as usize] = Symbol {
            len: best.len,
            next: right.next,
            id: best.id,
            ..left
        };
        symbols[best.right as usize].len = 0;
        if let Some(after) = symbols.get_mut(right.next as usize) {
            after.prev = best.left;
        }
        heap.extend(find(symbols, left.prev, best.left));
        heap.extend(find(symbols, best.left, right.next));
    }
}

/// The symbols still in the list, in order.
pub(super) fn left_over(symbols: &[Symbol]) -> impl Iterator<Item = &Symbol> {
    symbols.iter().filter(|symbol| symbol.len > 0)
}
