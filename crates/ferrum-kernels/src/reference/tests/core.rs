//! The device, memory, graphs, timers and collectives.

use super::*;
use ferrum_types::SrcDtype;
use half::{bf16, f16};

#[test]
fn opens_only_device_zero() {
    assert!(R::open(0).is_ok());
    assert!(matches!(R::open(1), Err(Error::NoDevice { .. })));
    let names: Vec<_> = R::devices().into_iter().map(|info| info.backend).collect();
    assert_eq!(names, ["reference"]);
}

#[test]
fn copies_between_host_and_device() {
    let ctx = &mut ctx();
    let mut a = R::new().alloc::<i8>(5).unwrap();
    R::write(ctx, &mut a, 2, &[7, -8]).unwrap();
    assert_eq!(R::to_vec(ctx, &a).unwrap(), [0, 0, 7, -8, 0]);
    let b = R::new().from_slice(&[1i8, 2, 3]).unwrap();
    R::copy_slice(ctx, &b, 1, &mut a, 0, 2).unwrap();
    let mut out = [0; 3];
    R::read(ctx, &a, 1, &mut out).unwrap();
    assert_eq!(out, [3, 7, -8]);

    assert_short("write", R::write(ctx, &mut a, 4, &[1, 2]));
    assert_short("read", R::read(ctx, &a, 3, &mut out));
    assert_short("copy from", R::copy_slice(ctx, &b, 2, &mut a, 0, 2));
    assert_short("copy to", R::copy_slice(ctx, &b, 0, &mut a, 4, 2));
    assert_invalid("overflow", R::copy_slice(ctx, &b, usize::MAX, &mut a, 0, 2));
    assert!(matches!(
        R::new().alloc::<f32>(usize::MAX),
        Err(Error::OutOfMemory { .. })
    ));
}

#[test]
fn weights_decode_exactly_from_every_dtype() {
    // Numbers that all three types hold.
    let values = [1.0f32, -2.5, 0.0, 3.0, -0.125, 96.0];
    let bytes = |dtype| -> Vec<u8> {
        match dtype {
            SrcDtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            SrcDtype::F16 => values
                .iter()
                .flat_map(|&x| f16::from_f32(x).to_le_bytes())
                .collect(),
            SrcDtype::BF16 => values
                .iter()
                .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
                .collect(),
        }
    };
    let shape = MatShape { rows: 2, cols: 3 };
    for dtype in [SrcDtype::F32, SrcDtype::F16, SrcDtype::BF16] {
        let raw = bytes(dtype);
        let weight = R::new().from_weight_bytes(&raw, dtype, shape).unwrap();
        assert_eq!(weight.values, values, "{dtype}");
        assert_short(
            "one byte less",
            R::new().from_weight_bytes(&raw[1..], dtype, shape),
        );
        let wider = MatShape { rows: 2, cols: 4 };
        assert_short("wider", R::new().from_weight_bytes(&raw, dtype, wider));
    }

    let (first, second) = (bytes(SrcDtype::F16), bytes(SrcDtype::F32));
    let parts = [
        WeightPart::new(&first, SrcDtype::F16, 2),
        WeightPart::new(&second[12..], SrcDtype::F32, 1),
    ];
    let fused = R::new().from_weight_parts(&parts, 3).unwrap();
    assert_eq!(fused.shape, MatShape { rows: 3, cols: 3 });
    assert_eq!(fused.values, [&values[..], &values[3..]].concat());
    assert_invalid("overflow", R::new().from_weight_parts(&parts, usize::MAX));
}

#[test]
fn a_graph_is_its_body() {
    let ctx = &mut ctx();
    let mut runs = 0;
    let mut body = |_: &mut RefContext<Uniform<f32>>| {
        runs += 1;
        if runs == 3 {
            Err(Error::Model("third".into()))
        } else {
            Ok(())
        }
    };
    assert_eq!(R::run_graph(ctx, 1, &mut body), Ok(GraphRun::Immediate));
    assert_eq!(R::run_graph(ctx, 1, &mut body), Ok(GraphRun::Immediate));
    assert_eq!(
        R::run_graph(ctx, 1, &mut body),
        Err(Error::Model("third".into()))
    );
    R::reset_graph(ctx, 1).unwrap();
    R::reset_all_graphs(ctx).unwrap();
}

#[test]
fn spans_come_in_order_of_opening() {
    let ctx = &mut ctx();
    let mut timer = <R as Backend>::Timer::new(&R::new()).unwrap();
    assert_invalid("nothing open", timer.end(ctx));
    timer.begin(ctx, "outer").unwrap();
    timer.begin(ctx, "inner").unwrap();
    timer.end(ctx).unwrap();
    timer.begin(ctx, "second").unwrap();
    timer.end(ctx).unwrap();
    let names = |spans: Vec<Span>| spans.iter().map(|span| span.name).collect::<Vec<_>>();
    assert_eq!(names(timer.take_spans(ctx).unwrap()), ["inner", "second"]);
    timer.end(ctx).unwrap();
    assert_eq!(names(timer.take_spans(ctx).unwrap()), ["outer"]);
    assert_invalid("all closed", timer.end(ctx));
}

#[test]
fn collectives_of_one_rank_are_the_identity() {
    let ctx = &mut ctx();
    assert_eq!((R::world_size(ctx), R::rank(ctx)), (1, 0));
    let mut x = buf(&[1.0, 2.0]);
    R::all_reduce(ctx, &mut x, 2, ReduceOp::Sum).unwrap();
    R::broadcast(ctx, &mut x, 2, 0).unwrap();
    let mut gathered = poisoned(2);
    R::all_gather(ctx, &x, &mut gathered, 2).unwrap();
    assert_eq!(gathered, buf(&[1.0, 2.0]));
    assert_invalid("root", R::broadcast(ctx, &mut x, 2, 1));
    assert_short("length", R::all_reduce(ctx, &mut x, 3, ReduceOp::Max));
}
