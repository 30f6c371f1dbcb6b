//! Where products write their sums, and how the sums of parts are added up.

use crate::isa::Kernel;
use crate::math;
use crate::memory::SharedMut;
use crate::simd::Simd;
use ferrum_types::SumSplit;
use std::ops::Range;

/// Columns of a row-major result.
#[derive(Clone, Copy)]
pub(crate) struct Columns<'a> {
    out: SharedMut<'a, f32>,
    /// Elements of a row.
    pub(crate) stride: usize,
    /// Where row 0, column 0 would be, modulo 2^64: a result may begin with a later one.
    first: usize,
}

impl<'a> Columns<'a> {
    /// Columns from `first` on, of rows of `stride` elements.
    #[inline(always)]
    pub(crate) fn new(out: SharedMut<'a, f32>, stride: usize, first: usize) -> Self {
        Self { out, stride, first }
    }

    /// Memory that begins with row `row` and column `column`, of rows of `stride` elements.
    #[inline(always)]
    pub(crate) fn from(
        out: SharedMut<'a, f32>,
        stride: usize,
        (row, column): (usize, usize),
    ) -> Self {
        let before = row * stride + column;
        Self::new(out, stride, 0usize.wrapping_sub(before))
    }

    /// Columns that lie so many elements behind these.
    #[inline(always)]
    pub(crate) fn behind(self, elements: usize) -> Self {
        Self {
            first: self.first.wrapping_add(elements),
            ..self
        }
    }

    /// Where an element is.
    #[inline(always)]
    fn at(&self, row: usize, column: usize) -> usize {
        (row * self.stride + column).wrapping_add(self.first)
    }

    /// Elements `column..column + len` of row `row`, to write.
    ///
    /// # Safety
    /// No other live part, in any task, overlaps this one.
    #[inline(always)]
    pub(crate) unsafe fn part(&self, row: usize, column: usize, len: usize) -> &'a mut [f32] {
        // SAFETY: the caller's contract.
        unsafe { self.out.part(self.at(row, column), len) }
    }

    /// Where a block of `cols` columns of some rows begins; all of it lies inside.
    #[inline(always)]
    pub(crate) fn rows(&self, rows: Range<usize>, column: usize, cols: usize) -> *mut f32 {
        let start = self.at(rows.start, column);
        self.out.at(start, (rows.len() - 1) * self.stride + cols)
    }
}

/// What becomes of the sums of a product's parts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PartSums {
    /// They are added as a tree.
    Tree(SumSplit),
    /// Each part has a result of its own, so many elements behind that of the part before it.
    Apart(SumSplit, usize),
}

impl PartSums {
    /// One sum of all.
    pub(crate) const WHOLE: Self = Self::Tree(SumSplit::WHOLE);

    pub(crate) fn split(self) -> SumSplit {
        match self {
            PartSums::Tree(split) | PartSums::Apart(split, _) => split,
        }
    }

    /// How sums are cut that are held apart, and the elements from one part's to the next one's.
    ///
    /// # Panics
    /// For parts that are to be added.
    pub(crate) fn apart(self) -> (SumSplit, usize) {
        match self {
            PartSums::Apart(split, stride) => (split, stride),
            PartSums::Tree(split) => {
                assert_eq!(split, SumSplit::WHOLE, "sums that are held apart, or one");
                (split, 0)
            }
        }
    }

    /// Where the sums of part `part` go; [`add_partials`] makes a tree of those in `out`, `left` and `right`.
    #[inline(always)]
    pub(crate) fn place<'a>(
        self,
        part: usize,
        out: Columns<'a>,
        [left, right]: [Columns<'a>; 2],
    ) -> Columns<'a> {
        match self {
            PartSums::Tree(_) => [out, left, left, right][part],
            PartSums::Apart(_, stride) => out.behind(part * stride),
        }
    }
}

/// `to += from`, of some rows and columns.
pub(crate) struct AddColumns<'a> {
    from: Columns<'a>,
    to: Columns<'a>,
    rows: Range<usize>,
    columns: Range<usize>,
}

impl<'a> AddColumns<'a> {
    /// # Safety
    /// The running task has these rows and columns for itself in both, which are different memory.
    #[inline(always)]
    pub(crate) unsafe fn new(
        (from, to): (Columns<'a>, Columns<'a>),
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Self {
        Self {
            from,
            to,
            rows,
            columns,
        }
    }
}

impl Kernel for AddColumns<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (first, len) = (self.columns.start, self.columns.len());
        for row in self.rows {
            // SAFETY: that of the constructor.
            let (from, to) = unsafe {
                (
                    self.from.part(row, first, len),
                    self.to.part(row, first, len),
                )
            };
            math::for_vectors(
                len,
                #[inline(always)]
                |at, _| {
                    let sum = s.add(math::load_at(s, to, at), math::load_at(s, from, at));
                    math::store_at(s, to, at, sum);
                },
            );
        }
    }
}

/// Calls `add` as [`SumSplit::add_part`] does behind part `part`, whose sums are where [`PartSums::place`] says.
#[inline(always)]
pub(crate) fn add_partials<'a>(
    part: usize,
    some: bool,
    [left, right]: [Columns<'a>; 2],
    out: Columns<'a>,
    add: impl Fn(Columns<'a>, Columns<'a>),
) {
    match part {
        1 if some => add(left, out),
        3 => {
            if some {
                add(right, left);
            }
            add(left, out);
        }
        _ => {}
    }
}
