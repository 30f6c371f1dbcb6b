//! Audio files to mono samples: WAV, MP3, FLAC and Ogg Vorbis, decoded by Symphonia.

use super::resample;
use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};
use symphonia::core::codecs::audio::AudioDecoderOptions;
use symphonia::core::errors::Error as MediaError;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatOptions, TrackType};
use symphonia::core::io::MediaSourceStream;
use symphonia::core::meta::MetadataOptions;

/// What an audio file may be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AudioLimits {
    /// Longest duration in seconds.
    pub seconds: u32,
}

impl Default for AudioLimits {
    /// Four hours, whose samples take 0.9 GiB at 16 kHz.
    fn default() -> Self {
        Self {
            seconds: 4 * 60 * 60,
        }
    }
}

/// Samples of one channel.
#[derive(Clone, Debug, PartialEq)]
pub struct Audio {
    /// From -1 to 1.
    pub samples: Vec<f32>,
    /// Samples per second.
    pub rate: u32,
}

/// Audio decoding error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AudioError {
    /// It is in no known format, or is damaged from the start.
    #[error(
        "the file is not audio that is supported: {0}\nhint: supported are WAV, MP3, FLAC and Ogg Vorbis"
    )]
    Unreadable(String),
    /// There is not one sample.
    #[error("the file has no audio")]
    Empty,
    /// It is longer than the limits allow.
    #[error("the audio is longer than {0} seconds, the most that is taken")]
    TooLong(u32),
    /// Its rate is none that can be heard.
    #[error("the audio has {0} samples per second, expected 1000 to 768000")]
    Rate(u32),
}

/// Rates that files may have.
const RATES: std::ops::RangeInclusive<u32> = 1_000..=768_000;

/// Channels that files may have.
const MAX_CHANNELS: usize = 64;

/// Packets that cannot be decoded one after the other, after which a file counts as damaged.
const MAX_BAD_PACKETS: usize = 64;

/// Decodes a file to the mean of its channels, at `rate` samples per second.
///
/// What is damaged in the middle is left out; a file that ends too early is as long as it is.
///
/// # Errors
/// [`AudioError`], for whatever bytes.
pub fn decode(bytes: Vec<u8>, rate: u32, limits: AudioLimits) -> Result<Audio, AudioError> {
    if bytes.is_empty() {
        return Err(AudioError::Empty);
    }
    // The decoders are not ours, and the bytes are anybody's.
    let decoded = catch_unwind(AssertUnwindSafe(|| read(bytes, limits)));
    let damaged = |_| Err(AudioError::Unreadable("it is damaged".into()));
    let audio = decoded.unwrap_or_else(damaged)?;
    if audio.samples.is_empty() {
        return Err(AudioError::Empty);
    }
    Ok(Audio {
        samples: resample(audio.samples, audio.rate, rate),
        rate,
    })
}

fn read(bytes: Vec<u8>, limits: AudioLimits) -> Result<Audio, AudioError> {
    let unreadable = |e: MediaError| AudioError::Unreadable(e.to_string());
    let stream = MediaSourceStream::new(Box::new(Cursor::new(bytes)), Default::default());
    let (format, meta) = (FormatOptions::default(), MetadataOptions::default());
    let probe = symphonia::default::get_probe();
    let mut reader = probe
        .probe(&Hint::new(), stream, format, meta)
        .map_err(unreadable)?;
    let track = reader.default_track(TrackType::Audio);
    let track = track.ok_or(AudioError::Empty)?;
    let track_id = track.id;
    let codec = track.codec_params.as_ref().and_then(|codec| codec.audio());
    let codec = codec.ok_or_else(|| AudioError::Unreadable("its codec is not named".into()))?;
    let codecs = symphonia::default::get_codecs();
    let mut decoder = codecs
        .make_audio_decoder(codec, &AudioDecoderOptions::default())
        .map_err(unreadable)?;
    let mut audio = Audio {
        samples: Vec::new(),
        rate: 0,
    };
    let (mut interleaved, mut bad) = (Vec::<f32>::new(), 0);
    // An end that comes too early is an end.
    while let Ok(Some(packet)) = reader.next_packet() {
        if packet.track_id != track_id {
            continue;
        }
        let decoded = match decoder.decode(&packet) {
            Ok(decoded) => decoded,
            Err(MediaError::DecodeError(_)) if bad < MAX_BAD_PACKETS => {
                bad += 1;
                continue;
            }
            Err(e) if audio.samples.is_empty() => return Err(unreadable(e)),
            Err(_) => break,
        };
        bad = 0;
        let (rate, channels) = (decoded.spec().rate(), decoded.spec().channels().count());
        if !RATES.contains(&rate) {
            return Err(AudioError::Rate(rate));
        }
        if channels == 0 || channels > MAX_CHANNELS || (audio.rate != 0 && audio.rate != rate) {
            break;
        }
        audio.rate = rate;
        let most = limits.seconds as usize * rate as usize;
        if audio.samples.len() + decoded.frames() > most {
            return Err(AudioError::TooLong(limits.seconds));
        }
        interleaved.resize(decoded.samples_interleaved(), 0.0);
        decoded.copy_to_slice_interleaved(&mut interleaved);
        let share = 1.0 / channels as f32;
        let frames = interleaved.chunks_exact(channels);
        let mean = frames.map(|frame| finite(frame.iter().sum::<f32>() * share));
        audio.samples.extend(mean);
    }
    Ok(audio)
}

/// Files of floats may hold anything.
fn finite(sample: f32) -> f32 {
    match sample.is_finite() {
        true => sample.clamp(-1e3, 1e3),
        false => 0.0,
    }
}
