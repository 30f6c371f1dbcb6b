//! What a step brings to its device: all its integers in one transfer, and of block tables what has changed.

use ferrum_kernels::{Backend, DeviceBatch, UploadPiece};
use ferrum_types::{BlockId, Result};

/// The integers of a step that are uploaded, buffer after buffer. Reused from step to step.
#[derive(Default)]
pub(super) struct PackedStep {
    ints: Vec<i32>,
    pieces: Vec<UploadPiece>,
    /// Where the pieces of each buffer end.
    ends: Vec<usize>,
}

impl PackedStep {
    pub(super) fn clear(&mut self) {
        self.ints.clear();
        self.pieces.clear();
        self.ends.clear();
    }

    /// What the next buffer gets, from its first element on; maybe nothing.
    pub(super) fn push(&mut self, values: impl IntoIterator<Item = i32>) {
        self.piece(0, |ints| ints.extend(values));
        self.end_buffer();
    }

    /// What the next buffer gets, as `fill` appends it; how many that is.
    pub(super) fn push_with(&mut self, fill: impl FnOnce(&mut Vec<i32>)) -> usize {
        let len = self.piece(0, fill);
        self.end_buffer();
        len
    }

    /// A part of what the next buffer gets.
    fn piece(&mut self, to: usize, fill: impl FnOnce(&mut Vec<i32>)) -> usize {
        let from = self.ints.len();
        fill(&mut self.ints);
        let len = self.ints.len() - from;
        if len > 0 {
            self.pieces.push(UploadPiece { from, to, len });
        }
        len
    }

    /// The buffer has what it gets.
    fn end_buffer(&mut self) {
        self.ends.push(self.pieces.len());
    }

    /// Uploads it to these buffers, in the order in which they were packed.
    pub(super) fn send<'b, B: Backend>(
        &self,
        ctx: &mut B::Context,
        buffers: impl IntoIterator<Item = &'b mut B::Buffer<i32>>,
    ) -> Result<()> {
        if self.ints.is_empty() {
            return Ok(());
        }
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        let ranges = starts.zip(&self.ends);
        let pieces = ranges.map(|(start, &end)| &self.pieces[start..end]);
        B::write_packed(ctx, &self.ints, buffers.into_iter().zip(pieces))
    }
}

/// The buffers of a batch in the order in which a step is packed.
pub(super) fn buffers<B: Backend>(
    batch: &mut DeviceBatch<B>,
) -> impl Iterator<Item = &mut B::Buffer<i32>> {
    let DeviceBatch {
        tokens,
        rope_rows,
        query_starts,
        kv_lens,
        state_slots,
        block_tables,
        ..
    } = batch;
    [tokens, rope_rows, query_starts, kv_lens, state_slots]
        .into_iter()
        .chain(block_tables)
}

/// What a device has of the block tables of a cache group, row by row. Only differences go up: in a decode step that
/// is a new block once in a while.
pub(super) struct TableCopy {
    /// `[rows, stride]`: what was wanted last. The device has the same, or anything where that is
    /// [released](BlockId::RELEASED).
    entries: Vec<BlockId>,
    stride: usize,
}

impl TableCopy {
    /// Of `rows` tables of `stride` zeros.
    pub(super) fn new(rows: usize, stride: usize) -> Self {
        Self {
            entries: vec![BlockId(0); rows * stride],
            stride,
        }
    }

    /// Packs what is new in a row.
    pub(super) fn update(&mut self, row: usize, table: &[BlockId], packed: &mut PackedStep) {
        let first = row * self.stride;
        let known = &mut self.entries[first..][..table.len()];
        let entries = || known.iter().zip(table);
        // Without branches, as nearly all of it is known.
        if entries().fold(0, |all, (a, b)| all | (a.0 ^ b.0)) == 0 {
            return;
        }
        // Released sequences are not read.
        let is_new = |(a, b): (&BlockId, &BlockId)| a != b && *b != BlockId::RELEASED;
        let from = entries().position(is_new);
        let to = entries().rposition(is_new);
        known.copy_from_slice(table);
        if let (Some(from), Some(to)) = (from, to) {
            let new = table[from..=to].iter().map(|block| block.0.cast_signed());
            packed.piece(first + from, |ints| ints.extend(new));
        }
    }

    /// All rows are packed.
    pub(super) fn end(packed: &mut PackedStep) {
        packed.end_buffer();
    }

    /// Forgets what the device has.
    pub(super) fn forget(&mut self) {
        self.entries.fill(BlockId::RELEASED);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tables of rows, and what goes up for them: places and blocks.
    type Case<'a> = (&'a [&'a [u32]], &'a [(usize, &'a [i32])]);

    /// What goes up for rows with these tables: places and blocks.
    fn sent(copy: &mut TableCopy, rows: &[&[u32]]) -> Vec<(usize, Vec<i32>)> {
        let mut packed = PackedStep::default();
        for (row, table) in rows.iter().enumerate() {
            let table: Vec<_> = table.iter().map(|&block| BlockId(block)).collect();
            copy.update(row, &table, &mut packed);
        }
        TableCopy::end(&mut packed);
        assert_eq!(packed.ends, [packed.pieces.len()]);
        let piece = |p: &UploadPiece| (p.to, packed.ints[p.from..][..p.len].to_vec());
        packed.pieces.iter().map(piece).collect()
    }

    #[test]
    fn only_what_is_new_goes_up() {
        let released = BlockId::RELEASED.0;
        let mut copy = TableCopy::new(3, 4);
        let cases: [Case<'_>; 8] = [
            (&[&[7, 8], &[9]], &[(0, &[7, 8]), (4, &[9])]),
            (&[&[7, 8], &[9]], &[]),
            // A block more.
            (&[&[7, 8, 3], &[9]], &[(2, &[3])]),
            // What is behind a window needs no upload, whether it was there or not.
            (
                &[&[released, 8, 3, 4], &[released, 5]],
                &[(3, &[4]), (5, &[5])],
            ),
            (&[&[released, 8, 3, 4], &[released, 5]], &[]),
            // Another sequence in the row; what it shares with the last one lies between.
            (&[&[1, 8, 2], &[released, 5]], &[(0, &[1, 8, 2])]),
            // A shorter table says nothing of the rest.
            (&[&[1], &[released, 5]], &[]),
            (
                &[&[1, 8, 2, 4], &[0, 5], &[0, 0, 1]],
                &[(4, &[0]), (10, &[1])],
            ),
        ];
        for (rows, expected) in cases {
            let expected: Vec<_> = expected.iter().map(|&(at, e)| (at, e.to_vec())).collect();
            assert_eq!(sent(&mut copy, rows), expected, "{rows:?}");
        }
        copy.forget();
        assert_eq!(sent(&mut copy, &[&[1, 8]]), [(0, vec![1, 8])]);
    }
}
