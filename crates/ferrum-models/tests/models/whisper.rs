//! Whisper's encoder and decoder give what `transformers` gives, on every backend.

use crate::gpu::gpu;
use crate::support::exact_cpu;
use crate::support::whisper::{difference, expected, fixture, greedy, mel, runner, text};
use ferrum_conformance::minimal::Minimal;
use ferrum_formats::ModelSource;
use ferrum_kernels::Backend;
use ferrum_kernels::cpu::{CpuBackend, CpuConfig};
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_models::read_model;
use ferrum_models::whisper::SpeechModel;
use ferrum_types::{Error, TokenId};

#[test]
fn states_are_those_of_transformers_on_every_backend() {
    let expected = expected();
    let mut cpu = runner(&exact_cpu());
    let found = difference(&mut cpu, &expected);
    assert!(found <= 2e-5, "cpu: {found}");
    let mut reference = runner(&ReferenceBackend::open(0).unwrap());
    let found = difference(&mut reference, &expected);
    assert!(found <= 2e-5, "reference: {found}");
    if let Some(device) = gpu() {
        let found = difference(&mut runner(&device), &expected);
        assert!(found <= 5e-5, "gpu: {found}");
    }
    // Activations of eight bits of precision.
    let found = difference(&mut runner(&Minimal::default()), &expected);
    assert!(found <= 0.25 && found > 1e-4, "bf16: {found}");
}

#[test]
fn chosen_tokens_are_those_of_transformers() {
    let mut model = runner(&exact_cpu());
    model.encode(&mel()).unwrap();
    assert_eq!(greedy(&mut model, 60), text(&expected(), 60));
}

#[test]
fn a_device_that_splits_for_encoders_splits_nothing_of_the_decoder() {
    let device = CpuBackend::open(0).unwrap();
    let Some(encoder) = device.for_encoders() else {
        ferrum_test_support::skip("this machine has no tiles");
        return;
    };
    let all_split = CpuConfig {
        isa: Some(encoder.isa()),
        ..CpuConfig::default()
    };
    let mut split = runner(&CpuBackend::with_config(all_split).unwrap());
    let mut found = runner(&device);
    assert!(difference(&mut found, &expected()) <= 1e-4);
    split.encode(&mel()).unwrap();
    assert!(found.states().unwrap() == split.states().unwrap());
    let mut exact = runner(&exact_cpu());
    exact.encode(&mel()).unwrap();
    let tokens: Vec<TokenId> = (0..20).map(|i| i * 13 % 250).collect();
    let [found, split, exact] =
        [&mut found, &mut split, &mut exact].map(|model| model.decode(&tokens, 0).unwrap());
    let off = |logits: &[f32]| {
        let pairs = logits.iter().zip(&exact);
        pairs.fold(0.0, |most: f32, (a, b)| most.max((a - b).abs()))
    };
    let largest = exact.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
    assert!(off(&found) <= 1e-4 * largest, "{}", off(&found));
    assert!(found != split);
}

#[test]
fn tokens_read_at_once_and_one_by_one_give_the_same() {
    let mut model = runner(&exact_cpu());
    model.encode(&mel()).unwrap();
    let tokens: Vec<TokenId> = (0..20).map(|i| i * 13 % 250).collect();
    let at_once = model.decode(&tokens, 0).unwrap();
    let mut last = Vec::new();
    for (position, token) in tokens.iter().enumerate() {
        last = model.decode(&[*token], position).unwrap();
    }
    let most = at_once.iter().zip(&last).map(|(a, b)| (a - b).abs());
    assert!(most.fold(0.0, f32::max) < 1e-4);
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut model = runner(&exact_cpu());
    assert!(matches!(
        model.encode(&[0.0; 7]),
        Err(Error::InvalidArgument { .. })
    ));
    for tokens in [&[][..], &[1_000_000]] {
        assert!(matches!(
            model.decode(tokens, 0),
            Err(Error::InvalidArgument { .. })
        ));
    }
    let overflow = Error::ContextOverflow {
        requested: 65,
        capacity: 64,
    };
    assert_eq!(model.decode(&[1], 64), Err(overflow));
    let source = ModelSource::open(fixture("whisper")).unwrap();
    let Err(Error::Model(reason)) = read_model(source) else {
        panic!("it was read as a decoder");
    };
    assert!(reason.contains("ferrum transcribe runs it"), "{reason}");
}
