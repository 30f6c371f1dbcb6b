//! Audio files to mono samples: WAV, MP3, FLAC and Ogg Vorbis, decoded by Symphonia.

use super::resample;
use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};
use symphonia::core::codecs::audio::AudioDecoderOptions;
use symphonia::core::codecs::audio::well_known::{CODEC_ID_FLAC, CODEC_ID_MP3};
use symphonia::core::errors::Error as MediaError;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatOptions, TrackType};
use symphonia::core::io::MediaSourceStream;
use symphonia::core::meta::MetadataOptions;
use symphonia::core::units::TimeBase;

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
    /// What of the file is damaged or missing, in words for a warning.
    pub damage: Option<String>,
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

/// Seconds of silence that stand for damaged parts, in all.
const MAX_SILENCE: usize = 30;

/// Decodes a file to the mean of its channels, at `rate` samples per second.
///
/// What is damaged in the middle is silence; a file that ends too early is as long as it is. [`Audio::damage`] tells of both.
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
        damage: audio.damage,
    })
}

fn read(bytes: Vec<u8>, limits: AudioLimits) -> Result<Audio, AudioError> {
    let unreadable = |e: MediaError| AudioError::Unreadable(reason(&e));
    let stream = MediaSourceStream::new(Box::new(Cursor::new(bytes)), Default::default());
    let (format, meta) = (FormatOptions::default(), MetadataOptions::default());
    let probe = symphonia::default::get_probe();
    let mut reader = probe
        .probe(&Hint::new(), stream, format, meta)
        .map_err(unreadable)?;
    let track = reader.default_track(TrackType::Audio);
    let track = track.ok_or(AudioError::Empty)?;
    let (track_id, time_base) = (track.id, track.time_base);
    let codec = track.codec_params.as_ref().and_then(|codec| codec.audio());
    let codec = codec.ok_or_else(|| AudioError::Unreadable("its codec is not named".into()))?;
    // Without a header of their own, MP3 files have an estimate here; times of Ogg pages are no times of packets.
    let stated = track.num_frames.filter(|_| codec.codec != CODEC_ID_MP3);
    let has_times = codec.codec == CODEC_ID_FLAC;
    let codecs = symphonia::default::get_codecs();
    let mut decoder = codecs
        .make_audio_decoder(codec, &AudioDecoderOptions::default())
        .map_err(unreadable)?;
    let mut timeline = Timeline::new(limits);
    let (mut interleaved, mut bad) = (Vec::<f32>::new(), 0);
    // An end that comes too early is an end.
    while let Ok(Some(packet)) = reader.next_packet() {
        if packet.track_id != track_id {
            continue;
        }
        timeline.first.get_or_insert(packet.pts.get());
        let decoded = match decoder.decode(&packet) {
            Ok(decoded) => decoded,
            Err(MediaError::DecodeError(_)) if bad < MAX_BAD_PACKETS => {
                bad += 1;
                timeline.damaged = true;
                continue;
            }
            Err(e) if timeline.samples.is_empty() => return Err(unreadable(e)),
            Err(_) => {
                timeline.damaged = true;
                break;
            }
        };
        bad = 0;
        let (rate, channels) = (decoded.spec().rate(), decoded.spec().channels().count());
        if !RATES.contains(&rate) {
            return Err(AudioError::Rate(rate));
        }
        if channels == 0 || channels > MAX_CHANNELS || !timeline.takes(rate) {
            timeline.damaged = true;
            break;
        }
        // Its times are numbers of samples.
        if has_times && time_base == TimeBase::try_from_recip(rate) {
            timeline.fill_gap(packet.pts.get());
        }
        interleaved.resize(decoded.samples_interleaved(), 0.0);
        decoded.copy_to_slice_interleaved(&mut interleaved);
        timeline.push(&interleaved, channels)?;
    }
    Ok(timeline.end(stated))
}

/// What went wrong, in our words where a library's say nothing to a user.
fn reason(error: &MediaError) -> String {
    match error {
        MediaError::IoError(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => {
            "it ends too early".into()
        }
        MediaError::Unsupported(_) => "its format or codec is another one".into(),
        other => other.to_string(),
    }
}

/// Samples in the order of their times.
struct Timeline {
    samples: Vec<f32>,
    rate: u32,
    limits: AudioLimits,
    /// The time of the first sample.
    first: Option<i64>,
    /// Samples of silence in place of damaged parts.
    silence: usize,
    /// Whether anything could not be decoded.
    damaged: bool,
}

impl Timeline {
    fn new(limits: AudioLimits) -> Self {
        Self {
            samples: Vec::new(),
            rate: 0,
            limits,
            first: None,
            silence: 0,
            damaged: false,
        }
    }

    /// Whether samples of this rate continue it.
    fn takes(&mut self, rate: u32) -> bool {
        if self.rate == 0 {
            self.rate = rate;
        }
        self.rate == rate
    }

    fn most(&self) -> usize {
        self.limits.seconds as usize * self.rate as usize
    }

    /// Silence up to a time, so that what follows a damaged part is where it belongs. Beyond [`MAX_SILENCE`] a time counts as damaged
    /// itself: a few bytes may state any.
    fn fill_gap(&mut self, time: i64) {
        let at = self.first.and_then(|first| time.checked_sub(first));
        let at = at.and_then(|at| usize::try_from(at).ok());
        let Some(at) = at.filter(|&at| at > self.samples.len()) else {
            return;
        };
        self.damaged = true;
        let silence = self.silence + (at - self.samples.len());
        if silence <= MAX_SILENCE * self.rate as usize && at <= self.most() {
            self.silence = silence;
            self.samples.resize(at, 0.0);
        }
    }

    /// The mean of the channels.
    fn push(&mut self, interleaved: &[f32], channels: usize) -> Result<(), AudioError> {
        let frames = interleaved.chunks_exact(channels);
        if self.samples.len() + frames.len() > self.most() {
            return Err(AudioError::TooLong(self.limits.seconds));
        }
        let share = 1.0 / channels as f32;
        let mean = frames.map(|frame| finite(frame.iter().sum::<f32>() * share));
        self.samples.extend(mean);
        Ok(())
    }

    /// The audio, of which the file's header states so many samples. Headers of streams state any number.
    fn end(self, stated: Option<u64>) -> Audio {
        let most = self.most() as u64;
        let stated = stated.filter(|&stated| stated <= most);
        let seconds = |samples: u64| samples as f64 / f64::from(self.rate.max(1));
        let found = self.samples.len() as u64;
        let damage = match stated {
            Some(stated) if found < stated => Some(format!(
                "the file is damaged: {:.2} of its {:.2} seconds can be read",
                seconds(found),
                seconds(stated)
            )),
            _ if self.damaged => Some("parts of the file are damaged".into()),
            _ => None,
        };
        Audio {
            samples: self.samples,
            rate: self.rate,
            damage,
        }
    }
}

/// Files of floats may hold anything.
fn finite(sample: f32) -> f32 {
    match sample.is_finite() {
        true => sample.clamp(-1e3, 1e3),
        false => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_bounded_and_a_rate_stays() {
        let mut timeline = Timeline::new(AudioLimits::default());
        assert!(timeline.takes(8_000) && !timeline.takes(16_000) && timeline.takes(8_000));
        timeline.first = Some(5);
        timeline.fill_gap(5 + 8_000 * 20);
        assert_eq!(timeline.samples.len(), 8_000 * 20);
        for far in [8_000 * 31, i64::MAX, i64::MIN, -1] {
            timeline.fill_gap(far);
            assert_eq!(timeline.samples.len(), 8_000 * 20, "{far}");
        }
        assert!(timeline.damaged);
    }
}
