//! Routing by hand; expert products against a loop over experts.

use super::*;
use ferrum_types::{GgufQuantType, SrcDtype};

const ROUTE: RouteShape = RouteShape::softmax(3, 4, 2);

fn routing(shape: RouteShape) -> MoeRouting<R> {
    MoeRouting::alloc(&R::new(), shape.tokens, shape.experts, shape.top_k).unwrap()
}

#[test]
fn routes_to_the_largest_and_the_lowest_of_equals() {
    let ctx = &mut ctx();
    // Odds 1:2:4:1, equal odds, and only one expert with any weight left in f32.
    let ln = |odds: [f32; 4]| odds.map(f32::ln);
    let logits = buf(&[
        ln([1.0, 2.0, 4.0, 1.0]),
        [5.0; 4],
        [-300.0, 0.0, -200.0, -200.0],
    ]
    .concat());
    let mut found = routing(ROUTE);
    R::route_topk(ctx, &logits, None, &mut found, ROUTE).unwrap();
    assert_eq!(found.expert_ids, ints(&[2, 1, 0, 1, 1, 2]));
    assert_close(
        "weights",
        &found.weights,
        &[0.5, 0.25, 0.25, 0.25, 1.0, 0.0],
    );

    let scaled = RouteShape {
        renormalize: true,
        scale: 3.0,
        ..ROUTE
    };
    R::route_topk(ctx, &logits, None, &mut found, scaled).unwrap();
    assert_eq!(found.expert_ids, ints(&[2, 1, 0, 1, 1, 2]));
    assert_close(
        "renormalised",
        &found.weights,
        &[2.0, 1.0, 1.5, 1.5, 3.0, 0.0],
    );

    for top_k in [0, 5] {
        let wrong = RouteShape { top_k, ..ROUTE };
        assert_invalid(
            "top_k",
            R::route_topk(ctx, &logits, None, &mut found, wrong),
        );
    }
    let more = RouteShape { tokens: 4, ..ROUTE };
    assert_short(
        "logits",
        R::route_topk(ctx, &logits, None, &mut found, more),
    );
}

#[test]
fn routes_by_biased_scores_in_the_best_groups() {
    let ctx = &mut ctx();
    // Sigmoids of 1/2, 3/4, 1/4, 1/2 | 3/4, 0, 1/5, 4/5.
    let ln = |odds: [f32; 4]| odds.map(f32::ln);
    let logits = buf(&[ln([1.0, 3.0, 1.0 / 3.0, 1.0]), ln([3.0, 0.0, 0.25, 4.0])].concat());
    let shape = |groups, score| RouteShape {
        score: ExpertScore::Sigmoid,
        groups: Some(ExpertGroups {
            groups,
            top: 1,
            score,
        }),
        ..RouteShape::softmax(1, 8, 2)
    };
    let bias = buf(&[0.0, 0.0, 0.6, 0.0, 0.0, 0.0, 0.0, -0.5]);
    for (groups, score, bias, ids, weights) in [
        // 1/2 + 3/4 of the first, 3/4 + 4/5 of the second.
        (2, GroupScore::BestTwo, None, [7, 4], [0.8, 0.75]),
        (2, GroupScore::Best, None, [7, 4], [0.8, 0.75]),
        // 17/20 + 3/4 of the first, 3/4 + 3/10 of the second; weights are without the bias.
        (2, GroupScore::BestTwo, Some(&bias), [2, 1], [0.25, 0.75]),
        // 5/4, 29/20, 3/4, 1/2.
        (4, GroupScore::BestTwo, None, [1, 0], [0.75, 0.5]),
        (4, GroupScore::Best, None, [7, 6], [0.8, 0.2]),
        (1, GroupScore::Best, Some(&bias), [2, 1], [0.25, 0.75]),
    ] {
        let mut found = routing(RouteShape::softmax(1, 8, 2));
        let shape = shape(groups, score);
        R::route_topk(ctx, &logits, bias, &mut found, shape).unwrap();
        assert_eq!(found.expert_ids, ints(&ids), "{groups} groups by {score:?}");
        assert_close("weights", &found.weights, &weights);
        let shape = RouteShape {
            renormalize: true,
            scale: 2.0,
            ..shape
        };
        R::route_topk(ctx, &logits, bias, &mut found, shape).unwrap();
        let sum = weights[0] + weights[1];
        let expected = weights.map(|weight| 2.0 * weight / sum);
        assert_close("renormalised", &found.weights, &expected);
    }
    let mut found = routing(RouteShape::softmax(1, 8, 2));
    for wrong in [shape(3, GroupScore::Best), shape(8, GroupScore::Best)] {
        assert_invalid(
            "groups",
            R::route_topk(ctx, &logits, None, &mut found, wrong),
        );
    }
}

#[test]
fn biases_and_bounds_of_gate_and_up() {
    let ctx = &mut ctx();
    let shape = ExpertShape {
        experts: 2,
        n: 1,
        k: 1,
    };
    let load = |values: [f32; 2]| R::new().load_experts(&bytes(&values), SrcDtype::F32, shape);
    let (gate, up) = (load([1.0, 2.0]).unwrap(), load([1.0, -4.0]).unwrap());
    let mut routing = routing(RouteShape::softmax(2, 2, 1));
    routing.expert_ids = ints(&[0, 1]);
    R::compute_ids_tpe(ctx, &mut routing, RouteShape::softmax(2, 2, 1)).unwrap();
    let (gate_bias, up_bias) = (buf(&[0.5, 3.0]), buf(&[0.25, 1.0]));
    let maps = [(&gate, &gate_bias), (&up, &up_bias)].map(|(matrices, bias)| ExpertProjection {
        matrices,
        bias: Some(bias),
    });
    let moe = MoeShape {
        tokens: 2,
        top_k: 1,
        experts: shape,
    };
    let x = buf(&[1.5, 2.0]);
    let mut out = buf(&[0.0; 2]);
    let input = ExpertInput::PerToken;
    R::moe_gemm(ctx, &x, input, maps[1], &routing, &mut out, moe).unwrap();
    assert_close("biased", &out, &[1.75, -7.0]);
    // Gates of 2 and 7 bounded by 3, ups of 7/4 and -7 by ±3.
    let bounded = ExpertActivation::ClampedSwiglu {
        alpha: 2.0,
        limit: 3.0,
    };
    R::moe_gate_up(ctx, &x, maps, bounded, &routing, &mut out, moe).unwrap();
    let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
    let expected = [2.0 * sigmoid(4.0) * 2.75, 3.0 * sigmoid(6.0) * -2.0];
    assert_close("bounded", &out, &expected);
    let short = buf(&[0.5]);
    let maps = maps.map(|maps| ExpertProjection {
        bias: Some(&short),
        ..maps
    });
    assert_short(
        "bias",
        R::moe_gemm(ctx, &x, input, maps[0], &routing, &mut out, moe),
    );
}

#[test]
fn sorts_pairs_by_expert_and_keeps_their_order() {
    let ctx = &mut ctx();
    let mut routing = routing(ROUTE);
    routing.expert_ids = ints(&[3, 0, 0, 3, 1, 3]);
    R::compute_ids_tpe(ctx, &mut routing, ROUTE).unwrap();
    assert_eq!(routing.sorted_pairs, ints(&[1, 2, 4, 0, 3, 5]));
    assert_eq!(routing.tokens_per_expert, ints(&[2, 1, 0, 3]));
    assert_eq!(routing.offsets, ints(&[0, 2, 3, 3, 6]));
    for wrong in [4, -1] {
        routing.expert_ids.0[2] = wrong;
        assert_invalid("expert", R::compute_ids_tpe(ctx, &mut routing, ROUTE));
    }
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// A routing with an expert that no token chose.
fn routed() -> MoeRouting<R> {
    let mut routing = routing(ROUTE);
    routing.expert_ids = ints(&[3, 0, 0, 3, 1, 3]);
    routing.weights = buf(&[0.5, 0.25, 1.0, -1.0, 0.0, 2.0]);
    R::compute_ids_tpe(&mut ctx(), &mut routing, ROUTE).unwrap();
    routing
}

#[test]
fn expert_products_equal_a_loop_over_pairs() {
    let ctx = &mut ctx();
    let shape = ExpertShape {
        experts: 4,
        n: 3,
        k: 5,
    };
    let moe = MoeShape {
        tokens: 3,
        top_k: 2,
        experts: shape,
    };
    let values = noise(1, 4 * 3 * 5);
    let stack = R::new()
        .load_experts(&bytes(&values), SrcDtype::F32, shape)
        .unwrap();
    let other = R::new()
        .load_experts(&bytes(&noise(2, 60)), SrcDtype::F32, shape)
        .unwrap();
    let routing = routed();

    for (input, x_rows) in [(ExpertInput::PerToken, 3), (ExpertInput::PerPair, 6)] {
        let x = noise(3, x_rows * 5);
        let mut out = poisoned(6 * 3);
        R::moe_gemm(
            ctx,
            &buf(&x),
            input,
            ExpertProjection::new(&stack),
            &routing,
            &mut out,
            moe,
        )
        .unwrap();
        for pair in 0..6 {
            let row = if x_rows == 3 { pair / 2 } else { pair };
            let expert = routing.expert_ids.0[pair] as usize;
            let matrix = &values[expert * 15..][..15];
            let mat = MatShape { rows: 3, cols: 5 };
            let weight = R::new()
                .from_weight_bytes(&bytes(matrix), SrcDtype::F32, mat)
                .unwrap();
            let mut expected = poisoned(3);
            let gemm = GemmShape {
                rows: 1,
                n: 3,
                k: 5,
            };
            R::gemm(ctx, &buf(&x[row * 5..][..5]), &weight, &mut expected, gemm).unwrap();
            assert_eq!(out.0[pair * 3..][..3], expected.0, "{input:?}, pair {pair}");
        }
    }

    let x = noise_buf(4, 15);
    let (mut gate, mut up) = (poisoned(18), poisoned(18));
    let per_token = ExpertInput::PerToken;
    R::moe_gemm(
        ctx,
        &x,
        per_token,
        ExpertProjection::new(&stack),
        &routing,
        &mut gate,
        moe,
    )
    .unwrap();
    R::moe_gemm(
        ctx,
        &x,
        per_token,
        ExpertProjection::new(&other),
        &routing,
        &mut up,
        moe,
    )
    .unwrap();
    let mut activated = poisoned(18);
    R::silu(ctx, &gate, &mut activated, 18).unwrap();
    let mut expected = poisoned(18);
    R::mul(ctx, &activated, &up, &mut expected, 18).unwrap();
    let mut fused = poisoned(18);
    R::moe_gate_up(
        ctx,
        &x,
        [&stack, &other].map(ExpertProjection::new),
        ExpertActivation::Silu,
        &routing,
        &mut fused,
        moe,
    )
    .unwrap();
    assert_close("gate · up · silu", &fused, &expected.0);

    let smaller = MoeShape {
        experts: ExpertShape { n: 2, ..shape },
        ..moe
    };
    assert_invalid(
        "n",
        R::moe_gemm(
            ctx,
            &x,
            per_token,
            ExpertProjection::new(&stack),
            &routing,
            &mut gate,
            smaller,
        ),
    );
    let per_pair = ExpertInput::PerPair;
    assert_short(
        "x",
        R::moe_gemm(
            ctx,
            &x,
            per_pair,
            ExpertProjection::new(&stack),
            &routing,
            &mut gate,
            moe,
        ),
    );
    assert_short(
        "bytes",
        R::new().load_experts(&bytes(&values[1..]), SrcDtype::F32, shape),
    );
}

#[test]
fn products_refuse_pairs_that_are_not_sorted() {
    let ctx = &mut ctx();
    let shape = ExpertShape {
        experts: 4,
        n: 1,
        k: 1,
    };
    let moe = MoeShape {
        tokens: 3,
        top_k: 2,
        experts: shape,
    };
    let stack = R::new()
        .load_experts(&bytes(&[1.0; 4]), SrcDtype::F32, shape)
        .unwrap();
    let mut attempt = |routing: &MoeRouting<R>| {
        let (x, mut out) = (buf(&[1.0; 3]), poisoned(6));
        R::moe_gemm(
            ctx,
            &x,
            ExpertInput::PerToken,
            ExpertProjection::new(&stack),
            routing,
            &mut out,
            moe,
        )
    };
    attempt(&routed()).unwrap();
    let mut forgotten = routing(ROUTE);
    forgotten.expert_ids = ints(&[3, 0, 0, 3, 1, 3]);
    assert_invalid("forgotten", attempt(&forgotten));
    let mut stale = routed();
    stale.expert_ids.0.swap(0, 1);
    assert_invalid("stale", attempt(&stale));
    let mut outside = routed();
    outside.sorted_pairs.0[0] = 6;
    assert_invalid("outside", attempt(&outside));
}

#[test]
fn quantised_stacks_are_cut_by_expert() {
    let ty = GgufQuantType::Q8_0;
    let shape = ExpertShape {
        experts: 3,
        n: 2,
        k: 32,
    };
    let raw = blocks(ty, 3 * 2 * 32, 1);
    let stack = R::new().load_quant_experts(&raw, ty, shape).unwrap();
    let mut values = vec![0.0; 3 * 2 * 32];
    ferrum_quant::dequantize(ty, &raw, &mut values).unwrap();
    let dense = R::new()
        .load_experts(&bytes(&values), SrcDtype::F32, shape)
        .unwrap();
    assert_eq!(stack, dense);
    assert_short("stack", R::new().load_quant_experts(&raw[34..], ty, shape));
}

#[test]
fn weighted_sums_go_to_tokens() {
    let ctx = &mut ctx();
    let routing = routed();
    // Rows of pairs: (1, 10), (2, 20), …
    let x: Vec<f32> = (1..=6).flat_map(|i| [i as f32, 10.0 * i as f32]).collect();
    let x = buf(&x);
    let sums = [1.0, 10.0, -1.0, -10.0, 12.0, 120.0];
    let mut out = poisoned(6);
    R::moe_weighted_sum(ctx, &x, &routing, (&mut out, false), ROUTE, 2).unwrap();
    assert_eq!(out, buf(&sums));

    let mut residual = buf(&[1.0; 6]);
    R::moe_weighted_sum_residual(ctx, &x, &routing, &mut residual, ROUTE, 2).unwrap();
    assert_eq!(residual.0, sums.map(|sum| sum + 1.0));

    let mut again = buf(&[1.0; 6]);
    let weight = buf(&[2.0, 0.5]);
    let norm = NormShape {
        rows: 3,
        dim: 2,
        eps: 1e-5,
    };
    let mut normed = poisoned(6);
    R::moe_weighted_sum_residual_norm(
        ctx,
        &x,
        &routing,
        &mut again,
        (&weight, norm),
        &mut normed,
        ROUTE,
    )
    .unwrap();
    assert_eq!(again, residual);
    let mut expected = poisoned(6);
    R::rms_norm(ctx, &residual, &weight, &mut expected, norm).unwrap();
    assert_eq!(normed, expected);
    assert_short(
        "x",
        R::moe_weighted_sum(ctx, &x, &routing, (&mut out, false), ROUTE, 3),
    );
}
