//! The eager tensor API on every backend that is there, against values computed by hand.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use ferrum_engine::eager::{AttentionSettings, RopeSettings, Tensor};
use ferrum_engine::{BackendDispatch, BackendKind, BackendOptions};
use ferrum_kernels::RopeStyle;
use ferrum_test_support::skip;
use ferrum_types::Error;

fn backends() -> Vec<BackendDispatch> {
    let kinds = [
        BackendKind::Reference,
        BackendKind::Cpu,
        BackendKind::Vulkan,
    ];
    let open = |kind| match BackendDispatch::from_kind(kind, BackendOptions::default()) {
        Ok(device) => Some(device),
        Err(Error::NoDevice { .. }) => {
            skip(format_args!("no {kind} device"));
            None
        }
        Err(e) => panic!("{kind}: {e}"),
    };
    kinds.into_iter().filter_map(open).collect()
}

fn tensor(shape: &[usize], data: &[f32]) -> Tensor {
    Tensor::new(data.to_vec(), shape).unwrap()
}

#[track_caller]
fn close(found: &Tensor, shape: &[usize], expected: &[f32]) {
    assert_eq!(found.shape(), shape);
    for (f, e) in found.data().iter().zip(expected) {
        assert!(
            (f - e).abs() < 1e-5,
            "{:?} is not {expected:?}",
            found.data()
        );
    }
    assert_eq!(found.data().len(), expected.len());
}

#[test]
fn linear_maps_each_row() {
    let x = tensor(&[2, 1, 2], &[1.0, 2.0, -1.0, 0.5]);
    let w = tensor(&[3, 2], &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
    let bias = tensor(&[3], &[10.0, 20.0, 30.0]);
    for device in backends() {
        let out = device.linear_3d(&x, &w).unwrap();
        close(&out, &[2, 1, 3], &[1.0, 2.0, 3.0, -1.0, 0.5, -0.5]);
        let out = device.linear_3d_bias(&x, &w, &bias).unwrap();
        close(&out, &[2, 1, 3], &[11.0, 22.0, 33.0, 9.0, 20.5, 29.5]);
        assert!(device.linear_3d(&x, &tensor(&[2, 3], &[0.0; 6])).is_err());
    }
}

#[test]
fn norms_and_activations() {
    let x = tensor(&[1, 2], &[3.0, 4.0]);
    let (one, half) = (tensor(&[2], &[1.0, 1.0]), tensor(&[2], &[0.5, 0.5]));
    let root = 12.5f32.sqrt();
    for device in backends() {
        close(
            &device.rms_norm(&x, &one, 0.0).unwrap(),
            &[1, 2],
            &[3.0 / root, 4.0 / root],
        );
        let normed = device.layer_norm(&x, &one, Some(&half), 0.0).unwrap();
        close(&normed, &[1, 2], &[-0.5, 1.5]);
        close(
            &device.layer_norm(&x, &half, None, 0.0).unwrap(),
            &[1, 2],
            &[-0.5, 0.5],
        );
        let silu = device.silu(&tensor(&[3], &[0.0, 1.0, -1.0])).unwrap();
        close(&silu, &[3], &[0.0, 0.731_058_6, -0.268_941_4]);
        let gelu = device.gelu(&tensor(&[3], &[0.0, 1.0, -1.0])).unwrap();
        close(&gelu, &[3], &[0.0, 0.841_344_7, -0.158_655_3]);
        close(&device.add(&x, &x).unwrap(), &[1, 2], &[6.0, 8.0]);
        close(&device.mul(&x, &x).unwrap(), &[1, 2], &[9.0, 16.0]);
        assert!(device.add(&x, &one).is_err());
    }
}

#[test]
fn rope_turns_pairs_by_their_angle() {
    let x = tensor(&[1, 2, 1, 4], &[1.0, 2.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0]);
    let (c, s) = (1f32.cos(), 1f32.sin());
    let slow = 0.01f32;
    for device in backends() {
        let out = device.apply_rope_positions(&x, &[0, 1], 10_000.0).unwrap();
        let turned = [c, 2.0 * slow.cos(), s, 2.0 * slow.sin()];
        close(
            &out,
            &[1, 2, 1, 4],
            &[&[1.0, 2.0, 0.0, 0.0], &turned[..]].concat(),
        );
        let settings = RopeSettings {
            rot_dim: 2,
            theta: 10_000.0,
            style: RopeStyle::Interleaved,
        };
        let out = device.apply_rope_partial(&x, &[0, 1], &settings).unwrap();
        let turned = [c - 2.0 * s, s + 2.0 * c, 0.0, 0.0];
        close(
            &out,
            &[1, 2, 1, 4],
            &[&[1.0, 2.0, 0.0, 0.0], &turned[..]].concat(),
        );
        assert!(device.apply_rope_positions(&x, &[0], 10_000.0).is_err());
    }
}

#[test]
fn attention_shares_kv_heads_and_masks_the_future() {
    // Two query heads on one kv head; all keys equal, so every visible value weighs the same.
    let q = tensor(&[1, 2, 2, 1], &[1.0; 4]);
    let k = tensor(&[1, 2, 1, 1], &[1.0, 1.0]);
    let v = tensor(&[1, 2, 1, 1], &[2.0, 4.0]);
    let settings = AttentionSettings {
        scale: None,
        causal: true,
        sliding_window: None,
    };
    for device in backends() {
        let out = device.gqa_attention(&q, &k, &v, &settings).unwrap();
        close(&out, &[1, 2, 2, 1], &[2.0, 2.0, 3.0, 3.0]);
        let all = AttentionSettings {
            causal: false,
            ..settings
        };
        close(
            &device.gqa_attention(&q, &k, &v, &all).unwrap(),
            &[1, 2, 2, 1],
            &[3.0; 4],
        );
        let window = AttentionSettings {
            sliding_window: Some(1),
            ..settings
        };
        let out = device.gqa_attention(&q, &k, &v, &window).unwrap();
        close(&out, &[1, 2, 2, 1], &[2.0, 2.0, 4.0, 4.0]);
    }
}

#[test]
fn logits_of_the_last_row_are_the_last_of_all_rows() {
    let hidden = tensor(&[2, 2, 1], &[1.0, 2.0, 3.0, 4.0]);
    let head = tensor(&[2, 1], &[1.0, 10.0]);
    for device in backends() {
        let all = device.all_row_logits(&hidden, &head).unwrap();
        close(
            &all,
            &[2, 2, 2],
            &[1.0, 10.0, 2.0, 20.0, 3.0, 30.0, 4.0, 40.0],
        );
        let last = device.last_row_logits(&hidden, &head).unwrap();
        close(&last, &[2, 2], &[2.0, 20.0, 4.0, 40.0]);
    }
}

#[test]
fn a_tensor_knows_its_size() {
    assert!(Tensor::new(vec![0.0; 5], &[2, 3]).is_err());
    assert!(Tensor::new(vec![], &[usize::MAX, 2]).is_err());
}
