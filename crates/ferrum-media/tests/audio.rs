//! The log-mel spectrogram of `transformers`, and files that are damaged in any way.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use ferrum_media::audio::{AudioError, AudioLimits, LogMelExtractor, RATE, decode};
use proptest::prelude::*;
use serde_json::Value;
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/speech");
    root.join(name)
}

fn bytes(name: &str) -> Vec<u8> {
    std::fs::read(fixture(name)).unwrap()
}

#[test]
fn the_spectrogram_is_that_of_transformers() {
    let expected: Value = serde_json::from_slice(&bytes("expected.json")).unwrap();
    let mut audio = decode(bytes("sentence.wav"), RATE, AudioLimits::default()).unwrap();
    audio.samples.resize(30 * RATE as usize, 0.0);
    let mel = LogMelExtractor::new(80).compute(&audio.samples);
    assert_eq!((mel.frames, mel.values.len()), (3000, 80 * 3000));
    for pair in expected["mel"].as_array().unwrap() {
        let (at, value) = (pair[0].as_u64().unwrap(), pair[1].as_f64().unwrap());
        let found = f64::from(mel.values[at as usize]);
        assert!((found - value).abs() < 1e-5, "{at}: {found} {value}");
    }
    let loudest = mel.values.iter().copied().fold(f32::MIN, f32::max);
    let expected = expected["mel_loudest"].as_f64().unwrap();
    assert!((f64::from(loudest) - expected).abs() < 1e-5);
}

#[test]
fn all_formats_have_the_same_sound() {
    let wav = decode(bytes("sentence.wav"), RATE, AudioLimits::default()).unwrap();
    for name in ["sentence.flac", "sentence.ogg", "sentence.mp3"] {
        let other = decode(bytes(name), RATE, AudioLimits::default()).unwrap();
        let power = |samples: &[f32]| samples.iter().map(|x| x * x).sum::<f32>();
        let share = power(&other.samples) / power(&wav.samples);
        assert!((0.9..1.1).contains(&share), "{name}: {share}");
    }
}

/// What comes after a damaged part keeps its time, and a warning tells of the damage.
#[test]
fn damage_is_told_and_keeps_its_time() {
    let whole = |name: &str| decode(bytes(name), RATE, AudioLimits::default()).unwrap();
    for name in [
        "sentence.wav",
        "sentence.flac",
        "sentence.ogg",
        "sentence.mp3",
    ] {
        assert_eq!(whole(name).damage, None, "{name}");
    }
    for (name, keep) in [("sentence.wav", 20_000), ("sentence.flac", 12_000)] {
        let mut cut = bytes(name);
        cut.truncate(keep);
        let audio = decode(cut, RATE, AudioLimits::default()).unwrap();
        assert!(audio.samples.len() < whole(name).samples.len());
        let told = audio.damage.unwrap();
        assert!(told.contains("of its 1.25 seconds can be read"), "{told}");
    }
    let mut damaged = bytes("sentence.flac");
    let middle = damaged.len() / 2;
    damaged[middle..middle + 100].fill(0x55);
    let (audio, sound) = (
        decode(damaged, RATE, AudioLimits::default()).unwrap(),
        whole("sentence.flac"),
    );
    assert!(audio.damage.is_some());
    assert_eq!(audio.samples.len(), sound.samples.len());
    let last = audio.samples.len() - 1000;
    assert_eq!(audio.samples[last..], sound.samples[last..]);
}

#[test]
fn what_is_too_long_is_refused() {
    let short = AudioLimits { seconds: 1 };
    assert_eq!(
        decode(bytes("sentence.mp3"), RATE, short),
        Err(AudioError::TooLong(1))
    );
    // A header that promises more than there is.
    let mut wav = bytes("sentence.wav");
    let data = wav.windows(4).position(|w| w == b"data").unwrap();
    wav[data + 4..data + 8].copy_from_slice(&u32::MAX.to_le_bytes());
    let found = decode(wav, RATE, AudioLimits::default());
    assert!(found.map_or(true, |audio| audio.samples.len() < 100_000));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn damaged_files_are_errors_or_sound(
        which in 0..4usize,
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..40),
        head in prop::collection::vec((0..64usize, any::<u8>()), 0..4),
        keep in any::<prop::sample::Index>(),
    ) {
        let names = ["sentence.wav", "sentence.flac", "sentence.mp3", "sentence.ogg"];
        let mut file = bytes(names[which]);
        for (at, value) in damage {
            let at = at.index(file.len());
            file[at] = value;
        }
        for (at, value) in head {
            file[at] = value;
        }
        file.truncate(keep.index(file.len()).max(file.len() / 2));
        if let Ok(audio) = decode(file, RATE, AudioLimits { seconds: 60 }) {
            prop_assert!(audio.samples.iter().all(|x| x.is_finite()));
        }
    }
}
