//! Sizes of routings, stacks and sums that cannot be, and pairs that are not sorted.

use crate::case::{Cases, act_name, both};
use crate::io::{Check, Refusals, wrong};
use ferrum_kernels::{
    Act, BackendMoeFused, ExpertActivation, ExpertGroups, ExpertInput, ExpertProjection,
    ExpertShape, GroupScore, Logits, MoeRouting, MoeShape, NormShape, Residual, RouteShape,
    WeightPart,
};
use ferrum_types::{FloatElement, SrcDtype};

/// More elements than there can be.
const MANY: usize = usize::MAX / 2 + 1;

const ROUTE: RouteShape = RouteShape::softmax(3, 4, 2);

const STACK: ExpertShape = ExpertShape {
    experts: 4,
    n: 3,
    k: 5,
};

/// Routings that do not fit their buffers, or choose more experts than there are.
fn wrong_routes() -> [RouteShape; 5] {
    [
        RouteShape {
            tokens: MANY,
            ..ROUTE
        },
        RouteShape {
            tokens: 1 << 32,
            experts: 1,
            top_k: 1,
            ..ROUTE
        },
        RouteShape {
            experts: usize::MAX,
            ..ROUTE
        },
        RouteShape { tokens: 4, ..ROUTE },
        RouteShape {
            experts: 400,
            ..ROUTE
        },
    ]
}

fn routing<B: BackendMoeFused>(device: &B, refused: &mut Refusals) -> Check {
    let mut ctx = device.new_context()?;
    let mut routing = MoeRouting::alloc(device, ROUTE.tokens, ROUTE.experts, ROUTE.top_k)?;
    let logits: Logits<B> = device.alloc(12)?;
    let choices = [0, 5, MANY].map(|top_k| RouteShape { top_k, ..ROUTE });
    let groups = |groups, top, top_k| RouteShape {
        groups: Some(ExpertGroups {
            groups,
            top,
            score: GroupScore::Best,
        }),
        top_k,
        ..ROUTE
    };
    let grouped = [
        groups(0, 1, 2),
        groups(3, 1, 2),
        groups(2, 0, 2),
        groups(2, 3, 2),
        groups(4, 1, 2),
        groups(MANY, 1, 2),
        RouteShape {
            experts: 130,
            tokens: 0,
            ..groups(65, 1, 2)
        },
    ];
    let bias: B::Buffer<f32> = device.alloc(3)?;
    let result = B::route_topk(&mut ctx, &logits, Some(&bias), &mut routing, ROUTE);
    refused.expect("a bias of 3 for 4 experts", result)?;
    for shape in wrong_routes().into_iter().chain(choices).chain(grouped) {
        let result = B::route_topk(&mut ctx, &logits, None, &mut routing, shape);
        refused.expect(&format!("a routing of {shape:?}"), result)?;
    }
    for shape in wrong_routes() {
        let result = B::compute_ids_tpe(&mut ctx, &mut routing, shape);
        refused.expect(&format!("sorting {shape:?}"), result)?;
    }
    Ok(())
}

fn loads<B: BackendMoeFused>(device: &B, refused: &mut Refusals) -> Check {
    let bytes = [0; 4 * 60];
    for shape in [
        ExpertShape {
            experts: 0,
            ..STACK
        },
        ExpertShape { n: 0, ..STACK },
        ExpertShape { k: 0, ..STACK },
        ExpertShape { n: 4, ..STACK },
        ExpertShape { k: MANY, ..STACK },
        ExpertShape {
            experts: MANY,
            ..STACK
        },
    ] {
        let result = device.load_experts(&bytes, SrcDtype::F32, shape);
        refused.expect(&format!("240 bytes as {shape:?}"), result)?;
    }
    let part = |rows| WeightPart::new(&bytes[..20 * rows], SrcDtype::F32, rows);
    let short = WeightPart {
        bytes: &bytes[..59],
        ..part(3)
    };
    for (what, parts) in [
        ("no expert", vec![]),
        ("experts of several sizes", vec![part(3), part(2)]),
        ("an expert without rows", vec![part(0)]),
        ("an expert a byte too short", vec![part(3), short]),
    ] {
        refused.expect(what, device.load_expert_parts(&parts, 5))?;
    }
    Ok(())
}

fn products<B: BackendMoeFused>(device: &B, refused: &mut Refusals) -> Check {
    let mut ctx = device.new_context()?;
    let mut routing = MoeRouting::alloc(device, ROUTE.tokens, ROUTE.experts, ROUTE.top_k)?;
    let stack = device.load_experts(&[0; 240], SrcDtype::F32, STACK)?;
    let (x, mut out): (Act<B>, Act<B>) = (device.alloc(1000)?, device.alloc(1000)?);
    let maps = ExpertProjection::new(&stack);
    B::compute_ids_tpe(&mut ctx, &mut routing, ROUTE)?;
    let shape = MoeShape {
        tokens: ROUTE.tokens,
        top_k: ROUTE.top_k,
        experts: STACK,
    };
    for shape in [
        MoeShape { tokens: 4, ..shape },
        MoeShape {
            tokens: MANY,
            ..shape
        },
        MoeShape {
            tokens: 1 << 32,
            top_k: 1,
            ..shape
        },
        MoeShape { top_k: 9, ..shape },
        MoeShape {
            experts: ExpertShape {
                experts: 3,
                ..STACK
            },
            ..shape
        },
        MoeShape {
            experts: ExpertShape { n: 2, ..STACK },
            ..shape
        },
        MoeShape {
            experts: ExpertShape { k: 6, ..STACK },
            ..shape
        },
    ] {
        for input in [ExpertInput::PerToken, ExpertInput::PerPair] {
            let result = B::moe_gemm(&mut ctx, &x, input, maps, &routing, &mut out, shape);
            refused.expect(&format!("a product {input:?} of {shape:?}"), result)?;
        }
        let (both, mut room) = ((&routing, &routing), device.alloc(1000)?);
        let result = B::moe_down(
            &mut ctx,
            &x,
            maps,
            both,
            &mut room,
            (&mut out, false),
            shape,
        );
        refused.expect(&format!("a product and sum of {shape:?}"), result)?;
        let silu = ExpertActivation::Silu;
        let result = B::moe_gate_up(&mut ctx, &x, [maps; 2], silu, &routing, &mut out, shape);
        refused.expect(&format!("gate and up of {shape:?}"), result)?;
    }
    Ok(())
}

fn sums<B: BackendMoeFused>(device: &B, refused: &mut Refusals) -> Check {
    let mut ctx = device.new_context()?;
    let routing = MoeRouting::alloc(device, ROUTE.tokens, ROUTE.experts, ROUTE.top_k)?;
    let weight: B::Buffer<f32> = device.alloc(1000)?;
    let x: Act<B> = device.alloc(1000)?;
    let (mut a, mut b): (Act<B>, Act<B>) = (device.alloc(1000)?, device.alloc(1000)?);
    let mut residual: Residual<B> = device.alloc(1000)?;
    let norm = NormShape {
        rows: ROUTE.tokens,
        dim: 7,
        eps: 1e-6,
    };
    let tokens = |tokens| RouteShape { tokens, ..ROUTE };
    for (shape, dim) in [
        (tokens(4), 7),
        (tokens(MANY), 7),
        (ROUTE, 1000),
        (ROUTE, MANY),
    ] {
        let case = |op: &str| format!("{op} of {shape:?} and rows of {dim}");
        let result = B::moe_weighted_sum(&mut ctx, &x, &routing, (&mut a, false), shape, dim);
        refused.expect(&case("a sum"), result)?;
        let result =
            B::moe_weighted_sum_residual(&mut ctx, &x, &routing, &mut residual, shape, dim);
        refused.expect(&case("a residual sum"), result)?;
        let norm = NormShape {
            rows: shape.tokens,
            dim,
            ..norm
        };
        let (norm, out) = ((&weight, norm), &mut b);
        let result = B::moe_weighted_sum_residual_norm(
            &mut ctx,
            &x,
            &routing,
            &mut residual,
            norm,
            out,
            shape,
        );
        refused.expect(&case("a normed sum"), result)?;
    }
    let rows = NormShape { rows: 2, ..norm };
    let (norm, out) = ((&weight, rows), &mut b);
    let result =
        B::moe_weighted_sum_residual_norm(&mut ctx, &x, &routing, &mut residual, norm, out, ROUTE);
    refused.expect("a norm of fewer rows than tokens", result)?;
    let zeros = B::to_vec(&mut ctx, &residual)?;
    if zeros.iter().any(|x| x.to_f32() != 0.0) {
        return wrong("a refused sum changed the residual");
    }
    Ok(())
}

pub(super) fn cases<B: BackendMoeFused>(cases: &mut Cases<B>) {
    let act = act_name::<B>();
    let mut add = |op, name, runs| cases.refuses((op, act, name), runs);
    add("route_topk", "sizes that cannot be", both!(routing));
    add("load_experts", "stacks that cannot be", both!(loads));
    add("moe_gemm", "sizes that cannot be", both!(products));
    add("moe_weighted_sum", "sizes that cannot be", both!(sums));
}
