//! Transcripts as subtitles.

use super::Transcript;
use std::fmt::Write;

/// `00:01:02,345`; hours may be more than two digits.
fn clock(seconds: f64, point: char) -> String {
    let millis = (seconds.max(0.0) * 1000.0).round() as u64;
    let (seconds, millis) = (millis / 1000, millis % 1000);
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    let seconds = seconds % 60;
    format!("{hours:02}:{minutes:02}:{seconds:02}{point}{millis:03}")
}

/// A text on one line, without what subtitles take for an end or an arrow.
fn line(text: &str) -> String {
    let words: Vec<_> = text.split_whitespace().collect();
    words.join(" ").replace("-->", "->")
}

/// As SubRip.
pub fn srt(transcript: &Transcript) -> String {
    let mut out = String::new();
    for (i, segment) in transcript.segments.iter().enumerate() {
        let (start, end) = (clock(segment.start, ','), clock(segment.end, ','));
        let text = line(&segment.text);
        // Writing to a string does not fail.
        let _ = write!(out, "{}\n{start} --> {end}\n{text}\n\n", i + 1);
    }
    out
}

/// As WebVTT.
pub fn vtt(transcript: &Transcript) -> String {
    let mut out = "WEBVTT\n\n".to_owned();
    for segment in &transcript.segments {
        let (start, end) = (clock(segment.start, '.'), clock(segment.end, '.'));
        let text = line(&segment.text);
        let _ = write!(out, "{start} --> {end}\n{text}\n\n");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::{SpeechSegment, WindowFigures};
    use super::*;

    #[test]
    fn subtitles_have_their_times_and_one_line_each() {
        let segment = |start, end, text: &str| SpeechSegment {
            start,
            end,
            text: text.into(),
            tokens: Vec::new(),
            figures: WindowFigures::default(),
        };
        let transcript = Transcript {
            text: String::new(),
            language: None,
            duration: 0.0,
            segments: vec![
                segment(0.0, 1.5, " Hello\nthere."),
                segment(3661.0004, 3662.9996, " a --> b"),
            ],
        };
        assert_eq!(
            srt(&transcript),
            "1\n00:00:00,000 --> 00:00:01,500\nHello there.\n\n2\n01:01:01,000 --> 01:01:03,000\na -> b\n\n"
        );
        assert_eq!(
            vtt(&transcript),
            "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello there.\n\n01:01:01.000 --> 01:01:03.000\na -> b\n\n"
        );
    }
}
