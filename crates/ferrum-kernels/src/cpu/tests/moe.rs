//! A feed-forward of experts, from logits to the normed residual.

use super::*;
use ferrum_types::{Error, GgufQuantType, SrcDtype};
use half::{bf16, f16};

/// How stacks are stored.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Dense(SrcDtype),
    Blocks(GgufQuantType),
}

const KINDS: [Kind; 5] = [
    Kind::Dense(SrcDtype::F32),
    Kind::Dense(SrcDtype::F16),
    Kind::Dense(SrcDtype::BF16),
    Kind::Blocks(GgufQuantType::Q4_0),
    Kind::Blocks(GgufQuantType::Q8_0),
];

impl Kind {
    fn bytes(self, values: &[f32]) -> Vec<u8> {
        let ty = match self {
            Kind::Dense(SrcDtype::F32) => {
                return values.iter().flat_map(|x| x.to_le_bytes()).collect();
            }
            Kind::Dense(SrcDtype::F16) => {
                let bytes = |x: &f32| f16::from_f32(*x).to_le_bytes();
                return values.iter().flat_map(bytes).collect();
            }
            Kind::Dense(SrcDtype::BF16) => {
                let bytes = |x: &f32| bf16::from_f32(*x).to_le_bytes();
                return values.iter().flat_map(bytes).collect();
            }
            Kind::Blocks(ty) => ty,
        };
        let mut bytes = vec![0; ty.bytes_for(values.len()).unwrap()];
        ferrum_quant::quantize(ty, values, &mut bytes).unwrap();
        bytes
    }

    fn load<B: BackendQuantExperts>(
        self,
        device: &B,
        values: &[f32],
        s: ExpertShape,
    ) -> B::Experts {
        let bytes = self.bytes(values);
        match self {
            Kind::Dense(dtype) => device.load_experts(&bytes, dtype, s).unwrap(),
            Kind::Blocks(ty) => device.load_quant_experts(&bytes, ty, s).unwrap(),
        }
    }
}

/// A feed-forward with the inputs of some tokens.
struct Block {
    tokens: usize,
    top_k: usize,
    experts: usize,
    hidden: usize,
    inner: usize,
    kind: Kind,
    gate: Vec<f32>,
    up: Vec<f32>,
    down: Vec<f32>,
    logits: Vec<f32>,
    x: Vec<f32>,
    residual: Vec<f32>,
}

impl Block {
    fn new(tokens: usize, kind: Kind) -> Self {
        let (experts, top_k, hidden) = (9, 3, 96);
        // A size that is no whole number of panels, and for blocks one of theirs.
        let inner = if matches!(kind, Kind::Dense(_)) {
            50
        } else {
            64
        };
        let mut random = Random::new(tokens as u64);
        let size = experts * inner * hidden;
        let mut logits = random.vec(tokens * experts);
        // Most tokens go to one expert, so that it has many rows and others few.
        logits
            .iter_mut()
            .skip(4)
            .step_by(experts)
            .for_each(|x| *x += 1.0);
        Self {
            tokens,
            top_k,
            experts,
            hidden,
            inner,
            kind,
            gate: random.vec(size),
            up: random.vec(size),
            down: random.vec(size),
            logits,
            x: random.vec(tokens * hidden),
            residual: random.vec(tokens * hidden),
        }
    }

    /// The same weights with one of the tokens.
    fn token(&self, token: usize) -> Self {
        let row = |x: &[f32], dim: usize| x[token * dim..][..dim].to_vec();
        Self {
            tokens: 1,
            gate: self.gate.clone(),
            up: self.up.clone(),
            down: self.down.clone(),
            logits: row(&self.logits, self.experts),
            x: row(&self.x, self.hidden),
            residual: row(&self.residual, self.hidden),
            ..*self
        }
    }

    fn shape(&self, n: usize, k: usize) -> MoeShape {
        let experts = self.experts;
        MoeShape {
            tokens: self.tokens,
            top_k: self.top_k,
            experts: ExpertShape { experts, n, k },
        }
    }

    fn route(&self) -> RouteShape {
        RouteShape {
            renormalize: true,
            ..RouteShape::softmax(self.tokens, self.experts, self.top_k)
        }
    }

    /// `[tokens, hidden]` normed, and the residual.
    fn run<B: BackendQuantExperts>(&self, device: &B) -> Vec<f32> {
        let mut ctx = device.new_context().unwrap();
        let ctx = &mut ctx;
        let (wide, narrow) = (
            self.shape(self.inner, self.hidden),
            self.shape(self.hidden, self.inner),
        );
        let load = |values, shape: MoeShape| self.kind.load(device, values, shape.experts);
        let (gate, up, down) = (
            load(&self.gate, wide),
            load(&self.up, wide),
            load(&self.down, narrow),
        );
        let mut routing =
            MoeRouting::<B>::alloc(device, self.tokens, self.experts, self.top_k).unwrap();
        let (route, pairs) = (self.route(), wide.pairs());
        let size = self.tokens * self.hidden;
        let logits: Logits<B> = of_role(device, &self.logits);
        let x = act(device, &self.x);
        let (mut gated, mut each) = (
            poison(device, pairs * self.inner),
            poison(device, pairs * self.hidden),
        );
        let mut residual: Residual<B> = of_role(device, &self.residual);
        let mut out = poison(device, size);
        let weight = device.from_slice(&vec![0.75f32; self.hidden]).unwrap();
        let norm = NormShape {
            rows: self.tokens,
            dim: self.hidden,
            eps: 1e-6,
        };
        B::route_topk(ctx, &logits, None, &mut routing, route).unwrap();
        B::compute_ids_tpe(ctx, &mut routing, route).unwrap();
        B::moe_gate_up(
            ctx,
            &x,
            [&gate, &up].map(ExpertProjection::new),
            ExpertActivation::Silu,
            &routing,
            &mut gated,
            wide,
        )
        .unwrap();
        let input = ExpertInput::PerPair;
        B::moe_gemm(
            ctx,
            &gated,
            input,
            ExpertProjection::new(&down),
            &routing,
            &mut each,
            narrow,
        )
        .unwrap();
        let (sum, to) = ((&weight, norm), &mut residual);
        B::moe_weighted_sum_residual_norm(ctx, &each, &routing, to, sum, &mut out, route).unwrap();
        let mut found = host::<B, _>(ctx, &out);
        found.extend(host::<B, _>(ctx, &residual));
        found
    }
}

#[test]
fn every_level_and_number_of_threads_gives_the_same_bits() {
    for kind in KINDS {
        let limit = match kind {
            Kind::Dense(_) => 1e-10,
            Kind::Blocks(_) => 5e-4,
        };
        for tokens in [1, 2, 7, 90] {
            let block = Block::new(tokens, kind);
            let expected = block.run(&ReferenceBackend::new());
            // Exact, with rounded rows, and with these in tiles.
            let mut firsts: [Option<Vec<f32>>; 3] = [const { None }; 3];
            for device in devices() {
                let found = block.run(&device);
                let error = nmse(&found, &expected);
                let rounded = rounds(&device) && matches!(kind, Kind::Dense(SrcDtype::BF16));
                let limit = if rounded { BF16_ROWS } else { limit };
                assert!(
                    error <= limit,
                    "{kind:?}, {tokens} tokens, {device:?}: {error:e}"
                );
                let tiles = rounded && device.exec().level.has_tiles();
                let first = &mut firsts[usize::from(rounded) + usize::from(tiles)];
                let first = first.get_or_insert_with(|| found.clone());
                assert!(
                    bits(&found) == bits(first),
                    "{kind:?}, {tokens} tokens: {device:?} differs"
                );
            }
        }
    }
}

#[test]
fn experts_of_bf16_with_rounded_rows() {
    let [one, several] = [0, 1].map(|i| rounding_devices().swap_remove(i));
    for tokens in [1, 7, 90] {
        let block = Block::new(tokens, Kind::Dense(SrcDtype::BF16));
        let (found, expected) = (block.run(&several), block.run(&ReferenceBackend::new()));
        let error = nmse(&found, &expected);
        let seen = (1e-9..=BF16_ROWS).contains(&error);
        assert!(seen, "{tokens} tokens: {error:e}");
        assert!(bits(&block.run(&one)) == bits(&found), "{tokens} tokens");
    }
}

#[test]
fn a_token_has_the_bits_that_it_has_alone() {
    for kind in KINDS {
        let block = Block::new(90, kind);
        for device in devices() {
            let all = block.run(&device);
            for token in [0, 1, 44, 89] {
                let alone = block.token(token).run(&device);
                let (normed, residual) = all.split_at(all.len() / 2);
                let row = |x: &[f32]| x[token * block.hidden..][..block.hidden].to_vec();
                let among = [row(normed), row(residual)].concat();
                assert!(
                    bits(&alone) == bits(&among),
                    "{kind:?}, token {token}, {device:?}"
                );
            }
        }
    }
}

/// A routing that products must not trust: what is changed, and how.
type Spoil = fn(&mut MoeRouting<CpuBackend>);

#[test]
fn a_routing_that_is_not_sorted_is_refused() {
    let device = CpuBackend::open(0).unwrap();
    let spoils: [Spoil; 8] = [
        |r| r.sorted_pairs.as_mut_slice()[0] = -1,
        |r| r.sorted_pairs.as_mut_slice()[0] = i32::MAX,
        |r| r.sorted_pairs.as_mut_slice()[1] = r.sorted_pairs.as_slice()[0],
        |r| r.expert_ids.as_mut_slice()[2] = 77,
        |r| r.tokens_per_expert.as_mut_slice()[0] = -3,
        |r| r.offsets.as_mut_slice()[9] = 1 << 30,
        |r| r.offsets.as_mut_slice()[1] = -1,
        |r| r.tokens_per_expert.as_mut_slice().fill(0),
    ];
    let block = Block::new(6, KINDS[0]);
    let shape = block.shape(block.inner, block.hidden);
    let gate = block.kind.load(&device, &block.gate, shape.experts);
    for (i, spoil) in spoils.into_iter().enumerate() {
        let mut ctx = device.new_context().unwrap();
        let (logits, x) = (act(&device, &block.logits), act(&device, &block.x));
        let mut routing = MoeRouting::alloc(&device, 6, block.experts, block.top_k).unwrap();
        let mut out = poison(&device, shape.pairs() * block.inner);
        CpuBackend::route_topk(&mut ctx, &logits, None, &mut routing, block.route()).unwrap();
        CpuBackend::compute_ids_tpe(&mut ctx, &mut routing, block.route()).unwrap();
        let mut gemm = |routing: &MoeRouting<CpuBackend>| {
            let input = ExpertInput::PerToken;
            CpuBackend::moe_gemm(
                &mut ctx,
                &x,
                input,
                ExpertProjection::new(&gate),
                routing,
                &mut out,
                shape,
            )
        };
        gemm(&routing).unwrap();
        spoil(&mut routing);
        let found = gemm(&routing);
        assert!(
            matches!(found, Err(Error::InvalidArgument { .. })),
            "spoil {i}: {found:?}"
        );
    }
}

#[test]
fn stacks_of_wrong_sizes_are_refused() {
    let device = CpuBackend::open(0).unwrap();
    let shape = |experts, n, k| ExpertShape { experts, n, k };
    let huge = usize::MAX / 2;
    for ty in [
        GgufQuantType::Q8_0,
        GgufQuantType::Q4_K,
        GgufQuantType::IQ2_S,
        GgufQuantType::F16,
    ] {
        for wrong in [
            shape(0, 4, 256),
            shape(4, 0, 256),
            shape(4, 4, 0),
            shape(huge, 4, 256),
            shape(4, huge, 256),
            shape(4, 4, huge - 1),
            shape(3, 4, 256),
            shape(4, 5, 256),
        ] {
            let bytes = vec![0; ty.bytes_for(256).unwrap() * 16];
            let found = device.load_quant_experts(&bytes, ty, wrong);
            assert!(found.is_err(), "{ty} as {wrong:?}");
            let found = device.load_experts(&bytes, SrcDtype::F16, wrong);
            assert!(
                found.is_err() || ty == GgufQuantType::F16,
                "{ty} as {wrong:?}"
            );
        }
        let bytes = vec![0; ty.bytes_for(256).unwrap() * 16];
        device
            .load_quant_experts(&bytes, ty, shape(4, 4, 256))
            .unwrap();
    }
    let part = |rows| WeightPart::new(&[0; 24], SrcDtype::F32, rows);
    device.load_expert_parts(&[part(2), part(2)], 3).unwrap();
    for parts in [&[][..], &[part(2), part(1)], &[part(0), part(0)]] {
        assert!(device.load_expert_parts(parts, 3).is_err());
    }
}
