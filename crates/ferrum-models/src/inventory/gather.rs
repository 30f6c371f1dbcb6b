//! Products over inputs that the ranks of a group give each other.
//!
//! A rank has some of the inputs of a product behind attention or behind an activation, and holds the columns of the weight
//! that belong to them. Some formats cannot be cut there: a block of ggml lies across the border, or the inputs of a group are
//! spread over all ranks (`desc_act` of GPTQ). What a device makes of such a weight, with rounded activations, only the whole
//! rows give. So such a layer is column-parallel: all ranks gather the inputs (`all_gather`), each computes some of the outputs, and
//! they gather these, which takes the place of one `all_reduce`. Each rank holds its share of the weight as it is stored.

use super::shard::{LayerShard, ShardBoundaries, split_evenly};
use super::sum_split::{GroupShards, group_shards};
use super::{DecoderTensor, TensorId};
use crate::spec::DecoderSpec;
use ferrum_types::SumSplit;
use std::collections::BTreeMap;
use std::ops::Range;

/// Where a matrix can be cut whose products ranks sum.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputBoundaries {
    /// Of what borders between inputs are multiples if a device makes of the parts what it makes of the whole; `None` where that
    /// is nowhere.
    pub inputs: Option<usize>,
    /// For outputs, as [`ShardBoundaries::tokens`](super::ShardBoundaries::tokens).
    pub outputs: Vec<usize>,
}

/// A product over inputs of all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatheredProduct {
    /// How many inputs each rank gives.
    pub inputs: Vec<usize>,
    /// How many outputs each rank makes.
    pub outputs: Vec<usize>,
    /// How its sums are cut: as those of one rank.
    pub(super) sums: SumSplit,
}

impl GatheredProduct {
    /// The outputs of a rank.
    pub(super) fn outputs_of(&self, rank: usize) -> Range<usize> {
        let start = self.outputs.iter().take(rank).sum();
        start..start + self.outputs.get(rank).copied().unwrap_or(0)
    }
}

/// The products of a group whose inputs are gathered.
pub(super) fn gathered(
    spec: &DecoderSpec,
    borders: &ShardBoundaries,
    ranks: usize,
) -> BTreeMap<TensorId, GatheredProduct> {
    if borders.inputs.is_empty() || ranks < 2 {
        return BTreeMap::new();
    }
    // A group that cannot be made gathers nothing.
    let group = group_shards(spec, borders, ranks).unwrap_or_default();
    let product = |(&id, at): (&TensorId, &InputBoundaries)| {
        let tensor = spec.tensor(id)?;
        let shape = tensor.shape.matrix()?;
        let inputs = inputs_of(&tensor, &group)?;
        let is_border =
            |place: usize| place == 0 || at.inputs.is_some_and(|unit| place.is_multiple_of(unit));
        if inputs.iter().all(|part| is_border(part.start)) {
            return None;
        }
        let outputs = split_evenly(shape.rows, &at.outputs, ranks)?;
        let unit = at.outputs.last().copied().unwrap_or(1).max(1);
        let in_format = outputs
            .iter()
            .all(|part| part.start.is_multiple_of(unit) && !part.is_empty());
        let product = GatheredProduct {
            inputs: inputs.iter().map(Range::len).collect(),
            outputs: outputs.iter().map(Range::len).collect(),
            sums: SumSplit::WHOLE,
        };
        in_format.then_some((id, product))
    };
    borders.inputs.iter().filter_map(product).collect()
}

/// The inputs of each rank.
fn inputs_of(tensor: &DecoderTensor, group: &GroupShards) -> Option<Vec<Range<usize>>> {
    let layer = tensor.id.layer?;
    let range = |rank: &Vec<LayerShard>| rank.get(layer)?.range(tensor);
    group.iter().map(range).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;
    use crate::inventory::{RankShard, ShardAxis, ShardBoundaries, TensorRole};
    use crate::model::read_model;
    use ferrum_formats::ModelSource;

    /// A decoder with a feed-forward of 96, and where its down projection can be cut.
    fn cut_at(inputs: Option<usize>, outputs: usize) -> (DecoderSpec, TensorId, ShardBoundaries) {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../fixtures/models/llama-gptq4"
        );
        let spec = read_model(ModelSource::open(path).unwrap()).unwrap().spec;
        let down = TensorId::in_layer(0, TensorRole::Down);
        assert_eq!(spec.tensor(down).unwrap().shape.dims()[1], 96);
        let outputs = vec![outputs];
        let borders = ShardBoundaries {
            inputs: [(down, InputBoundaries { inputs, outputs })].into(),
            ..ShardBoundaries::default()
        };
        (spec, down, borders)
    }

    /// The inputs that ranks give, in groups of two and of four.
    fn inputs(case: &(DecoderSpec, TensorId, ShardBoundaries)) -> [Option<Vec<usize>>; 2] {
        let (spec, down, borders) = case;
        [2, 4].map(|ranks| {
            let cut = RankShard::new(spec, borders, (1, ranks)).unwrap();
            let product = cut.gathered(*down)?;
            let tensor = spec.tensor(*down).unwrap();
            assert_eq!(cut.axis(&tensor), ShardAxis::Rows);
            assert_eq!(cut.slice(&tensor).range, product.outputs_of(1));
            Some(product.inputs.clone())
        })
    }

    #[test]
    fn inputs_are_gathered_where_a_border_lies_elsewhere() {
        assert_eq!(inputs(&cut_at(Some(24), 1)), [None, None]);
        assert_eq!(inputs(&cut_at(Some(48), 1)), [None, Some(vec![24; 4])]);
        let all = [Some(vec![48; 2]), Some(vec![24; 4])];
        assert_eq!(inputs(&cut_at(Some(32), 1)), all);
        assert_eq!(inputs(&cut_at(None, 1)), all);
        // Outputs that cannot be cut, either.
        assert_eq!(inputs(&cut_at(None, 1024)), [None, None]);
    }

    /// One rank, a rank of two and a rank of four make the same sums.
    #[test]
    fn sums_are_those_of_one_rank() {
        let splits = |case: &(DecoderSpec, TensorId, ShardBoundaries)| {
            let (spec, down, borders) = case;
            let tensor = spec.tensor(*down).unwrap();
            [1, 2, 4].map(|ranks| {
                let cut = match ranks {
                    1 => RankShard::whole_with_splits(spec, borders),
                    _ => RankShard::new(spec, borders, (0, ranks)).unwrap(),
                };
                cut.sum_split(&tensor)
            })
        };
        let at = |cuts| SumSplit::at(cuts).unwrap();
        let quarters = at(&[24, 48, 72]);
        let summed = [quarters, at(&[24]), SumSplit::WHOLE];
        assert_eq!(splits(&cut_at(Some(24), 1)), summed);
        // Four gather what two sum: each of the four makes all sums.
        let by_four = [quarters, at(&[24]), quarters];
        assert_eq!(splits(&cut_at(Some(48), 1)), by_four);
        assert_eq!(splits(&cut_at(None, 1)), [quarters; 3]);
        // An adapter's numbers can be cut anywhere.
        let (spec, down, borders) = &cut_at(None, 1);
        let cut = RankShard::new(spec, borders, (1, 2)).unwrap();
        let tensor = spec.tensor(*down).unwrap();
        let summed = cut.without_gathers();
        assert_eq!(summed.axis(&tensor), ShardAxis::Columns);
        assert_eq!(summed.sum_split(&tensor), at(&[24]));
    }
}
