//! How sums of one rank are cut, so that larger groups of ranks make the same.
//!
//! A product on one rank makes the partial sums of two and of four ranks ([`SumSplit`]), so that all three have the same bits.

use super::shard::{LayerShard, ShardBoundaries, layer_shards};
use crate::spec::DecoderSpec;
use ferrum_types::SumSplit;
use std::ops::Range;

/// What all ranks of a group hold of each layer.
pub(super) type GroupShards = Vec<Vec<LayerShard>>;

/// What all ranks of a group hold.
pub(super) fn group_shards(
    spec: &DecoderSpec,
    borders: &ShardBoundaries,
    ranks: usize,
) -> Result<GroupShards, String> {
    (0..ranks)
        .map(|rank| layer_shards(spec, borders, (rank, ranks)))
        .collect()
}

/// What ranks of groups of two and of four hold that are this rank's part of a group; none where they are not several, or where there is
/// no such group.
pub(super) fn finer(
    spec: &DecoderSpec,
    borders: &ShardBoundaries,
    (rank, ranks): (usize, usize),
) -> [GroupShards; 2] {
    [2, SumSplit::MAX_PARTS].map(|all| {
        if all == ranks || !all.is_multiple_of(ranks) {
            return GroupShards::new();
        }
        let each = all / ranks;
        let own = rank * each..(rank + 1) * each;
        let shards = group_shards(spec, borders, all);
        shards.map_or_else(|_| Vec::new(), |mut all| all.drain(own).collect())
    })
}

/// How a sum over `whole` is cut: as ranks of a group of four that hold it would, or else as those of a group of two. Of each rank, what it
/// holds and whether that counts.
pub(super) fn split_as(
    whole: &Range<usize>,
    [halves, quarters]: [Vec<(Range<usize>, bool)>; 2],
) -> SumSplit {
    let ends = |part: &(Range<usize>, bool)| part.0.end;
    // Quarters are those of both groups only if two of them are a half.
    let pairs = quarters.iter().skip(1).step_by(2).map(ends);
    let nested = halves.is_empty() || pairs.eq(halves.iter().map(ends));
    let quarters = Some(quarters).filter(|quarters| nested && !quarters.is_empty());
    let quarters = quarters.and_then(|quarters| split_at(whole, &quarters));
    quarters
        .or_else(|| split_at(whole, &halves))
        .unwrap_or_default()
}

/// Cuts a sum over `whole` where ranks of finer groups begin that hold parts of it one after the other, some of which do not count
/// (those of other ranks are the same). `None` where they do not make it up, or have no tree of that many parts.
fn split_at(whole: &Range<usize>, parts: &[(Range<usize>, bool)]) -> Option<SumSplit> {
    let mut end = whole.start;
    for (part, counts) in parts {
        let follows = part.start == end || (!counts && part.end == end);
        if !follows || part.is_empty() {
            return None;
        }
        end = part.end;
    }
    let counted: Vec<_> = parts.iter().map(|(_, counts)| *counts).collect();
    // A part that does not count adds nothing.
    let begins: &[usize] = match counted[..] {
        [true] | [true, false] | [true, false, false, false] => &[],
        [true, true] => &[1],
        [true, false, true, false] => &[2],
        [true, false, true, true] => &[2, 2, 3],
        [true, true, true, true] => &[1, 2, 3],
        _ => return None,
    };
    let cuts: Vec<_> = begins
        .iter()
        .map(|&i| parts[i].0.start - whole.start)
        .collect();
    SumSplit::at(&cuts).filter(|_| end == whole.end)
}
