//! A Whisper and a spoken sentence, with what `transformers` makes of them.

use super::best;
use ferrum_formats::ModelSource;
use ferrum_kernels::LlmBackend;
use ferrum_media::audio::{AudioLimits, LogMelExtractor, RATE, decode};
use ferrum_models::Dequantized;
use ferrum_models::whisper::{SpeechModel, WhisperRunner, is_whisper, load_whisper, read_whisper};
use ferrum_types::TokenId;
use serde_json::Value;
use std::path::{Path, PathBuf};

pub(crate) fn fixture(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/speech");
    root.join(name)
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixture(name)).unwrap()).unwrap()
}

pub(crate) fn expected() -> Value {
    json("expected.json")
}

pub(crate) fn runner<B: LlmBackend>(device: &B) -> WhisperRunner<B> {
    let source = ModelSource::open(fixture("whisper")).unwrap();
    assert!(is_whisper(&source));
    let model = read_whisper(source).unwrap();
    let weights = load_whisper::<B, Dequantized>(device, &model, &mut |_, _| ()).unwrap();
    WhisperRunner::new(device, model.spec, weights).unwrap()
}

pub(crate) fn mel() -> Vec<f32> {
    let file = std::fs::read(fixture("sentence.wav")).unwrap();
    let mut audio = decode(file, RATE, AudioLimits::default()).unwrap();
    audio.samples.resize(30 * RATE as usize, 0.0);
    LogMelExtractor::new(80).compute(&audio.samples).values
}

/// The largest difference of the encoder's states, as a share of the largest of them.
pub(crate) fn difference(runner: &mut impl SpeechModel, expected: &Value) -> f64 {
    runner.encode(&mel()).unwrap();
    let found = runner.states().unwrap();
    let pairs = expected["states"].as_array().unwrap().iter().map(|pair| {
        let at = pair[0].as_u64().unwrap() as usize;
        (f64::from(found[at]), pair[1].as_f64().unwrap())
    });
    let largest = pairs.clone().fold(0.0, |most, (_, x)| x.abs().max(most));
    pairs.fold(0.0, |most, (a, b)| (a - b).abs().max(most)) / largest
}

fn id(value: &Value) -> TokenId {
    value.as_u64().unwrap() as TokenId
}

fn ids(value: &Value) -> Vec<TokenId> {
    value.as_array().unwrap().iter().map(id).collect()
}

/// The first tokens of `transformers`' English text without timestamps, by greedy decoding of the window.
pub(crate) fn text(expected: &Value, tokens: usize) -> Vec<TokenId> {
    ids(&expected["texts"]["en transcribe"])[..tokens].to_vec()
}

/// As many tokens of that text, of the window that was encoded last. Those that the generation config suppresses are not
/// chosen.
pub(crate) fn greedy(runner: &mut impl SpeechModel, tokens: usize) -> Vec<TokenId> {
    let config = json("whisper/generation_config.json");
    let mut next = vec![
        id(&config["decoder_start_token_id"]),
        id(&config["lang_to_id"]["<|en|>"]),
        id(&config["task_to_id"]["transcribe"]),
        id(&config["no_timestamps_token_id"]),
    ];
    let suppressed = ids(&config["suppress_tokens"]);
    let at_first = ids(&config["begin_suppress_tokens"]);
    let (mut chosen, mut position) = (Vec::new(), 0);
    while chosen.len() < tokens {
        let mut logits = runner.decode(&next, position).unwrap();
        let first = at_first.iter().filter(|_| chosen.is_empty());
        for &token in suppressed.iter().chain(first) {
            logits[token as usize] = f32::NEG_INFINITY;
        }
        position += next.len();
        next = vec![best(&logits) as TokenId];
        chosen.extend_from_slice(&next);
    }
    chosen
}
