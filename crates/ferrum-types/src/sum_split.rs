//! [`SumSplit`]: one order of sums for a model on one device and on several ranks.
//!
//! A rank of a group sums over the inputs that it holds, and the group adds the sums of ranks. Floating-point sums depend on
//! their order, so a device that is alone gets the same bits only if it makes the same partial sums. It does so for up to four
//! ranks: the cuts are where the group would be cut, and both add partial sums as a balanced tree. (Elsewhere such sums are called split-K, and
//! such trees pairwise summation.)

use std::ops::Range;

/// How sums over the inputs of a matrix are cut: each part is summed for itself, and two, or two pairs of parts, are
/// added in turn: `p0`, `p0 + p1`, or `(p0 + p1) + (p2 + p3)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SumSplit {
    /// Cuts less one, in binary digits: 0 for one part, 1 for two, 2 for four.
    depth: u8,
    /// Where parts begin, but for the first; the first `2^depth - 1` count.
    cuts: [usize; Self::MAX_PARTS - 1],
}

impl SumSplit {
    /// Most parts.
    pub const MAX_PARTS: usize = 4;

    /// One sum of all.
    pub const WHOLE: Self = Self {
        depth: 0,
        cuts: [0; Self::MAX_PARTS - 1],
    };

    /// Parts that begin at 0 and at these cuts; `None` unless these are none, one or three, and each half begins behind 0 and behind the
    /// other one. Of four parts, the second and the last may be empty.
    pub fn at(cuts: &[usize]) -> Option<Self> {
        let depth = match cuts {
            [] => 0,
            [middle] if *middle > 0 => 1,
            [first, middle, last] if 0 < *first && first <= middle && middle < last => 2,
            _ => return None,
        };
        let mut split = Self {
            depth,
            ..Self::WHOLE
        };
        split.cuts[..cuts.len()].copy_from_slice(cuts);
        Some(split)
    }

    /// Number of parts: 1, 2 or 4.
    #[inline]
    pub fn parts(&self) -> usize {
        1 << self.depth
    }

    /// Terms of part `part` of sums of `len` terms.
    #[inline]
    pub fn part(&self, part: usize, len: usize) -> Range<usize> {
        let end = match self.cuts.get(part) {
            Some(&end) if part + 1 < self.parts() => end,
            _ => len,
        };
        let start = part.checked_sub(1).map_or(0, |before| self.cuts[before]);
        start..end
    }

    /// Adds the sum of part `part`, which is `None` for an empty one, to the tree of the parts before it: `total` is that of all behind the
    /// last one. `pair` holds the sum of the first half of a pair.
    #[inline(always)]
    pub fn add_part<T: Clone>(
        part: usize,
        sum: Option<T>,
        (pair, total): (&mut T, &mut T),
        add: impl Fn(T, T) -> T,
    ) {
        if let Some(sum) = sum {
            *pair = match part {
                0 | 2 => sum,
                _ => add(pair.clone(), sum),
            };
        }
        match part {
            0 | 1 => *total = pair.clone(),
            3 => *total = add(total.clone(), pair.clone()),
            _ => {}
        }
    }

    /// The same for terms of which `count` are one of these.
    pub fn in_finer_terms(self, count: usize) -> Self {
        Self {
            cuts: self.cuts.map(|cut| cut.saturating_mul(count)),
            ..self
        }
    }

    /// The same for terms that are `size` of these each, of sums of `len` of these. Where a cut lies inside of a term, what it cuts is one
    /// part: ranks have none of these terms, either.
    pub fn in_terms_of(self, size: usize, len: usize) -> Self {
        let term =
            |cut: usize| (size > 0 && cut.is_multiple_of(size) && cut < len).then(|| cut / size);
        let [first, middle, last] = self.cuts;
        let split = match self.depth {
            0 => None,
            1 => term(first).and_then(|middle| Self::at(&[middle])),
            _ => term(middle).and_then(|middle| match (term(first), term(last)) {
                (None, None) => Self::at(&[middle]),
                (first, last) => {
                    let last = last.unwrap_or(len.div_ceil(size));
                    Self::at(&[first.unwrap_or(middle), middle, last])
                }
            }),
        };
        split.unwrap_or(Self::WHOLE)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_all_terms() {
        for cuts in [&[][..], &[4], &[1, 4, 9], &[4, 4, 9], &[1, 4, 10]] {
            let split = SumSplit::at(cuts).unwrap();
            let parts: Vec<_> = (0..split.parts()).map(|i| split.part(i, 10)).collect();
            let starts: Vec<_> = parts.iter().skip(1).map(|part| part.start).collect();
            assert_eq!((parts.len(), &starts[..]), (cuts.len() + 1, cuts));
            let terms: Vec<_> = parts.into_iter().flatten().collect();
            assert!(terms.into_iter().eq(0..10), "{cuts:?}");
        }
        assert_eq!(SumSplit::at(&[]), Some(SumSplit::WHOLE));
        for wrong in [&[0][..], &[4, 6], &[1, 2, 2], &[3, 2, 5], &[1, 2, 3, 4]] {
            assert_eq!(SumSplit::at(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn terms_are_counted_in_blocks() {
        let at = |cuts| SumSplit::at(cuts).unwrap();
        let split = at(&[64, 128, 160]);
        assert_eq!(split.in_terms_of(32, 256), at(&[2, 4, 5]));
        assert_eq!(split.in_terms_of(64, 256), at(&[1, 2, 4]));
        assert_eq!(at(&[16, 32, 64]).in_terms_of(32, 96), at(&[1, 1, 2]));
        assert_eq!(at(&[16, 32, 80]).in_terms_of(32, 96), at(&[1]));
        assert_eq!(split.in_terms_of(256, 256), SumSplit::WHOLE);
        assert_eq!(split.in_terms_of(32, 160), at(&[2, 4, 5]));
        assert_eq!(at(&[48]).in_terms_of(32, 96), SumSplit::WHOLE);
        assert_eq!(SumSplit::WHOLE.in_terms_of(32, 0), SumSplit::WHOLE);
    }

    #[test]
    fn parts_are_added_as_a_tree() {
        let tree = |parts: &[&str]| {
            let (mut pair, mut total) = (String::new(), String::new());
            for (part, sum) in parts.iter().enumerate() {
                let sum = (!sum.is_empty()).then(|| (*sum).to_owned());
                let add = |a: String, b: String| format!("({a}+{b})");
                SumSplit::add_part(part, sum, (&mut pair, &mut total), add);
            }
            total
        };
        assert_eq!(tree(&["a"]), "a");
        assert_eq!(tree(&["a", "b"]), "(a+b)");
        assert_eq!(tree(&["a", "b", "c", "d"]), "((a+b)+(c+d))");
        assert_eq!(tree(&["a", "", "c", "d"]), "(a+(c+d))");
        assert_eq!(tree(&["a", "b", "c", ""]), "((a+b)+c)");
    }
}
