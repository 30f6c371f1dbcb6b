//! Products whose sums are cut: the tree of the products of all parts, bit for bit, at every level and for any number of rows.

use super::*;
use ferrum_types::{GgufQuantType, SrcDtype};

/// Inputs: more steps and units than are decoded at once, in whole blocks of every type.
const INPUTS: usize = 2304;
/// Outputs: more panels than one block of them, the last one not full.
const OUTPUTS: usize = 301;
/// Rows of products: in registers, in one block, and more than sums of parts are held of at once.
const ROWS: [usize; 6] = [1, 2, 7, 19, 70, 270];

/// Where sums are cut: parts of any size, a quarter that is empty, and two halves.
const CUTS: [&[usize]; 4] = [
    &[256, 768, 2048],
    &[1024, 1024, 1280],
    &[512, 1024, INPUTS],
    &[1280],
];

/// A matrix that can be loaded whole and in parts.
enum Matrix {
    Floats(SrcDtype, Vec<u8>),
    Blocks(GgufQuantType, Vec<u8>),
    /// Codes of 4 bits in groups of [`GROUP`] inputs, which cuts lie inside of; and a scale for each.
    Groups(Vec<u8>, Vec<half::f16>),
}

/// Inputs of a group.
const GROUP: usize = 512;
/// Inputs of a group of a part.
const PART_GROUP: usize = 256;

impl Matrix {
    fn floats(dtype: SrcDtype, rows: usize) -> Self {
        let values = Random::new(5).vec(rows * INPUTS);
        let bytes = values.iter().flat_map(|&x| match dtype {
            SrcDtype::F32 => x.to_le_bytes().to_vec(),
            SrcDtype::F16 => half::f16::from_f32(x).to_le_bytes().to_vec(),
            SrcDtype::BF16 => half::bf16::from_f32(x).to_le_bytes().to_vec(),
        });
        Self::Floats(dtype, bytes.collect())
    }

    /// Rows of random blocks, but for those that would hold what is hardly a number.
    fn blocks(ty: GgufQuantType, rows: usize) -> Self {
        let (mut random, mut blocks) = (Random::new(6), Vec::new());
        let mut values = vec![0.0; ty.block_len()];
        while blocks.len() < ty.bytes_for(rows * INPUTS).unwrap() {
            let block: Vec<u8> = (0..ty.block_bytes()).map(|_| random.next() as u8).collect();
            ferrum_quant::dequantize(ty, &block, &mut values).unwrap();
            if values.iter().all(|x| x.abs() < 1e9) {
                blocks.extend(block);
            }
        }
        Self::Blocks(ty, blocks)
    }

    fn groups(rows: usize) -> Self {
        let mut random = Random::new(7);
        let codes = (0..rows * INPUTS / 2).map(|_| random.next() as u8);
        let codes = codes.collect();
        let scales = random.vec(rows * INPUTS.div_ceil(GROUP));
        let scales = scales.into_iter().map(|x| half::f16::from_f32(x / 8.0));
        Self::Groups(codes, scales.collect())
    }

    /// The scales of some columns in groups of so many.
    fn scales(scales: &[half::f16], cols: &std::ops::Range<usize>, group: usize) -> Vec<u8> {
        let rows = scales.chunks_exact(INPUTS.div_ceil(GROUP));
        let firsts = || cols.clone().step_by(group);
        rows.flat_map(|row| firsts().flat_map(|col| row[col / GROUP].to_le_bytes()))
            .collect()
    }

    fn name(&self) -> String {
        match self {
            Matrix::Groups(..) => "pack-quantized".to_owned(),
            Matrix::Floats(dtype, _) => dtype.to_string(),
            Matrix::Blocks(ty, _) => ty.to_string(),
        }
    }

    /// Bytes of some columns.
    fn columns(&self, cols: &std::ops::Range<usize>) -> Vec<u8> {
        let (bytes, place): (_, Box<dyn Fn(usize) -> usize>) = match self {
            Matrix::Floats(dtype, bytes) => (bytes, Box::new(|col| col * dtype.size())),
            Matrix::Blocks(ty, bytes) => (bytes, Box::new(|col| ty.bytes_for(col).unwrap())),
            Matrix::Groups(bytes, _) => (bytes, Box::new(|col| col / 2)),
        };
        let rows = bytes.chunks_exact(place(INPUTS));
        rows.flat_map(|row| row[place(cols.start)..place(cols.end)].to_vec())
            .collect()
    }

    /// `x · Wᵀ` over some inputs, with sums that are cut.
    fn product(
        &self,
        device: &CpuBackend,
        (x, rows): (&[f32], usize),
        cols: std::ops::Range<usize>,
        split: SumSplit,
    ) -> Vec<f32> {
        let k = cols.len();
        let bytes = self.columns(&cols);
        let x: Vec<f32> = x
            .chunks_exact(INPUTS)
            .flat_map(|row| row[cols.clone()].to_vec())
            .collect();
        let ctx = &mut device.new_context().unwrap();
        let (x, mut out) = (act(device, &x), poison(device, rows * OUTPUTS));
        let shape = GemmShape {
            rows,
            n: OUTPUTS,
            k,
        };
        match self {
            Matrix::Floats(dtype, _) => {
                let part = WeightPart::new(&bytes, *dtype, OUTPUTS);
                let mut weight = device.from_weight_parts(&[part], k).unwrap();
                CpuBackend::split_sums(&mut weight, split);
                CpuBackend::gemm(ctx, &x, &weight, &mut out, shape).unwrap();
            }
            Matrix::Blocks(ty, _) => {
                let part = GgufRows::new(&bytes, *ty, OUTPUTS);
                let mut weight = device.load_quant_fused(&[part], k).unwrap();
                CpuBackend::split_quant_sums(&mut weight, split);
                CpuBackend::gemm_quant(ctx, &x, &weight, &mut out, shape).unwrap();
            }
            Matrix::Groups(_, scales) => {
                let group_size = if k == INPUTS { GROUP } else { PART_GROUP };
                let scales = Self::scales(scales, &cols, group_size);
                let part = PackQuantizedWeights {
                    bits: 4,
                    group_size,
                    in_features: k,
                    out_features: OUTPUTS,
                    codes: &bytes,
                    scales: &scales,
                    scale_dtype: SrcDtype::F16,
                    zeros: PackedZeros::None,
                    g_idx: None,
                };
                let part = [QuantWeights::PackQuantized(part)];
                let mut weight = device.load_layers_fused(&part, k).unwrap();
                CpuBackend::split_layer_sums(&mut weight, split);
                CpuBackend::gemm_gptq(ctx, &x, &weight, &mut out, shape).unwrap();
            }
        }
        host::<CpuBackend, _>(ctx, &out)
    }
}

/// The tree of what `of` gives of each part of `INPUTS` terms.
fn tree(split: SumSplit, of: impl Fn(std::ops::Range<usize>, usize) -> Vec<f32>) -> Vec<f32> {
    let (mut pair, mut total) = (Vec::new(), Vec::new());
    for part in 0..split.parts() {
        let terms = split.part(part, INPUTS);
        let sums = (!terms.is_empty()).then(|| of(terms, part));
        SumSplit::add_part(part, sums, (&mut pair, &mut total), |a, b| {
            a.iter().zip(b).map(|(a, b)| a + b).collect()
        });
    }
    total
}

#[test]
fn products_are_trees_of_those_of_parts() {
    let native = GgufQuantType::all().filter(|ty| CpuBackend::is_native(*ty));
    let blocks = native.map(|ty| Matrix::blocks(ty, OUTPUTS));
    let floats =
        [SrcDtype::F32, SrcDtype::F16, SrcDtype::BF16].map(|dtype| Matrix::floats(dtype, OUTPUTS));
    let groups = [Matrix::groups(OUTPUTS)];
    let all: Vec<_> = blocks.chain(floats).chain(groups).collect();
    assert!(all.len() > 15);
    let x = Random::new(9).vec(ROWS[ROWS.len() - 1] * INPUTS);
    for matrix in all {
        for (i, device) in devices().iter().enumerate() {
            // Each of the larger products at some of the levels.
            let rows = ROWS.iter().enumerate();
            let rows = rows.filter(|(r, rows)| **rows < 70 || (i + r).is_multiple_of(3));
            for (r, &rows) in rows {
                let cuts = CUTS[(i + r) % CUTS.len()];
                let split = SumSplit::at(cuts).unwrap();
                let x = (&x[..rows * INPUTS], rows);
                let found = matrix.product(device, x, 0..INPUTS, split);
                let expected = tree(split, |terms, _| {
                    matrix.product(device, x, terms, SumSplit::WHOLE)
                });
                let same = bits(&found) == bits(&expected);
                let name = matrix.name();
                assert!(same, "{name}, {device:?}: {rows} rows, cut at {cuts:?}");
            }
        }
    }
}

/// The sums of norms that ranks share are those of one device.
#[test]
fn norms_are_trees_of_those_of_parts() {
    let (rows, split) = (3, SumSplit::at(CUTS[0]).unwrap());
    let x = Random::new(3).vec(rows * INPUTS);
    let weight = Random::new(4).vec(INPUTS);
    for device in devices() {
        let norm = |sums| {
            let ctx = &mut device.new_context().unwrap();
            let (x, weight) = (act(&device, &x), device.from_slice(&weight).unwrap());
            let mut out = poison(&device, rows * INPUTS);
            let shape = ParallelNorm {
                part: NormShape {
                    rows,
                    dim: INPUTS,
                    eps: 1e-5,
                },
                dim: INPUTS,
                counts: true,
                sums,
            };
            CpuBackend::rms_norm_parallel(ctx, &x, &weight, &mut out, shape).unwrap();
            host::<CpuBackend, _>(ctx, &out)
        };
        let found = norm(split);
        assert!(nmse(&found, &norm(SumSplit::WHOLE)) < 1e-12);
        let ranks = LocalGroup::ranks(4).into_iter().enumerate();
        let parts: Vec<Vec<f32>> = std::thread::scope(|scope| {
            let rank = |(rank, end): (usize, GroupHandle)| {
                let (device, x, weight) = (&device, &x, &weight);
                scope.spawn(move || {
                    let columns = split.part(rank, INPUTS);
                    let own = x.chunks_exact(INPUTS).flat_map(|row| &row[columns.clone()]);
                    let own: Vec<f32> = own.copied().collect();
                    let ctx = &mut device.new_context().unwrap();
                    CpuBackend::join(ctx, end).unwrap();
                    let part = NormShape {
                        rows,
                        dim: columns.len(),
                        eps: 1e-5,
                    };
                    let mut out = poison(device, own.len());
                    let (own, weight) = (act(device, &own), &weight[columns]);
                    let weight = device.from_slice(weight).unwrap();
                    let shape = ParallelNorm {
                        part,
                        dim: INPUTS,
                        counts: true,
                        sums: SumSplit::WHOLE,
                    };
                    CpuBackend::rms_norm_parallel(ctx, &own, &weight, &mut out, shape).unwrap();
                    host::<CpuBackend, _>(ctx, &out)
                })
            };
            let threads: Vec<_> = ranks.map(rank).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        for (rank, part) in parts.iter().enumerate() {
            let columns = split.part(rank, INPUTS);
            let rows = part
                .chunks_exact(columns.len())
                .zip(found.chunks_exact(INPUTS));
            for (part, whole) in rows {
                assert!(bits(part) == bits(&whole[columns.clone()]), "rank {rank}");
            }
        }
    }
}

/// The experts of a token are added in ascending order for each part, then the parts.
#[test]
fn sums_over_experts_are_trees_of_those_of_parts() {
    const EXPERTS: usize = 5;
    const N: usize = 70;
    let mut random = Random::new(12);
    let biases = random.vec(EXPERTS * N);
    for (ty, top_k, tokens) in [
        (GgufQuantType::Q4_K, 2, 1),
        (GgufQuantType::Q6_K, 3, 40),
        (GgufQuantType::F32, 2, 1),
        (GgufQuantType::F32, 3, 40),
        (GgufQuantType::F32, 1, 90),
        // More rows an expert than are multiplied with panels decoded in registers, at every level.
        (GgufQuantType::F32, 2, 305),
    ] {
        let pairs = tokens * top_k;
        let matrix = match ty {
            GgufQuantType::F32 => Matrix::floats(SrcDtype::F32, EXPERTS * N),
            ty => Matrix::blocks(ty, EXPERTS * N),
        };
        // Best first, which is not in ascending order.
        let ids: Vec<i32> = (0..pairs)
            .map(|pair| ((pair / top_k + 3 * (pair % top_k)) % EXPERTS) as i32)
            .collect();
        let weigh = random.vec(pairs);
        let x = random.vec(pairs * INPUTS);
        for (i, device) in devices().iter().enumerate() {
            let ctx = &mut device.new_context().unwrap();
            let mut routing =
                MoeRouting::<CpuBackend>::alloc(device, tokens, EXPERTS, top_k).unwrap();
            routing.expert_ids = device.from_slice(&ids).unwrap();
            routing.weights = device.from_slice(&weigh).unwrap();
            let route = RouteShape::softmax(tokens, EXPERTS, top_k);
            CpuBackend::compute_ids_tpe(ctx, &mut routing, route).unwrap();
            let load = |terms: &std::ops::Range<usize>| {
                let bytes = matrix.columns(terms);
                let shape = ExpertShape {
                    experts: EXPERTS,
                    n: N,
                    k: terms.len(),
                };
                (device.load_quant_experts(&bytes, ty, shape).unwrap(), shape)
            };
            let shape = |experts| MoeShape {
                tokens,
                top_k,
                experts,
            };
            let bias = device.from_slice(&biases).unwrap();
            let split = SumSplit::at(CUTS[i % CUTS.len()]).unwrap();
            let (mut experts, sizes) = load(&(0..INPUTS));
            CpuBackend::split_expert_sums(&mut experts, split);
            let (own, mut room) = (act(device, &x), poison(device, pairs * N));
            let mut out = poison(device, tokens * N);
            let maps = ExpertProjection {
                matrices: &experts,
                bias: Some(&bias),
            };
            let (both, to) = ((&routing, &routing), (&mut out, false));
            CpuBackend::moe_down(ctx, &own, maps, both, &mut room, to, shape(sizes)).unwrap();
            let found = host::<CpuBackend, _>(ctx, &out);
            let ctx = std::cell::RefCell::new(ctx);
            let expected = tree(split, |terms, part| {
                let ctx = &mut **ctx.borrow_mut();
                let (experts, sizes) = load(&terms);
                let rows = x.chunks_exact(INPUTS);
                let own: Vec<f32> = rows.flat_map(|row| row[terms.clone()].to_vec()).collect();
                let (own, mut each) = (act(device, &own), poison(device, pairs * N));
                let maps = ExpertProjection {
                    matrices: &experts,
                    bias: (part == 0).then_some(&bias),
                };
                let input = ExpertInput::PerPair;
                let shape = shape(sizes);
                CpuBackend::moe_gemm(ctx, &own, input, maps, &routing, &mut each, shape).unwrap();
                let each = host::<CpuBackend, _>(ctx, &each);
                let mut sums = vec![0.0; tokens * N];
                for (token, sums) in sums.chunks_exact_mut(N).enumerate() {
                    let mut own: Vec<_> = (token * top_k..(token + 1) * top_k).collect();
                    own.sort_by_key(|&pair| ids[pair]);
                    for pair in own {
                        for (sum, product) in sums.iter_mut().zip(&each[pair * N..]) {
                            *sum = weigh[pair].mul_add(*product, *sum);
                        }
                    }
                }
                sums
            });
            let same = bits(&found) == bits(&expected);
            assert!(same, "{ty}, {tokens} tokens, {device:?}: {split:?}");
        }
    }
}
