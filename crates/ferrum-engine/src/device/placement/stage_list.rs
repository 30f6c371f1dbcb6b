//! What `--layers` says: stages in the order of their layers, each on a device.

use crate::device::kind::BackendKind;
use ferrum_types::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// What `--layers` can say: `cpu:0-13,vulkan:14-27`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageList(pub(super) Vec<StageChoice>);

/// Layers and the device that computes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StageChoice {
    pub(super) kind: BackendKind,
    /// Index among the devices of the backend.
    pub(super) ordinal: usize,
    pub(super) first: usize,
    pub(super) last: usize,
}

impl FromStr for StageList {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let stages: Vec<StageChoice> = s.split(',').map(str::parse).collect::<Result<_, _>>()?;
        let mut next = 0;
        for stage in &stages {
            let StageChoice { first, .. } = *stage;
            if first > next {
                let missing = Span(next, first - 1);
                return Err(format!("{missing} come before {stage} and are in no stage"));
            }
            if first < next {
                let twice = Span(first, stage.last.min(next - 1));
                return Err(format!(
                    "{twice} of {stage} are in the stage before it, expected layers from {next} on"
                ));
            }
            next = stage.last + 1;
        }
        Ok(Self(stages))
    }
}

impl FromStr for StageChoice {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let s = s.trim();
        let fail = |reason: &str| Err(format!("found \"{s}\", expected {reason}"));
        let Some((device, layers)) = s.split_once(':') else {
            return fail("BACKEND:FIRST-LAST, such as cpu:0-13");
        };
        let name = device.trim_end_matches(|c: char| c.is_ascii_digit());
        let kind: BackendKind = name.parse()?;
        let Ok(ordinal) = format!("0{}", &device[name.len()..]).parse() else {
            return fail("a device number that exists");
        };
        if kind == BackendKind::Auto {
            return fail("the name of a backend, which auto is not");
        }
        if kind == BackendKind::Cpu && ordinal > 0 {
            return fail("cpu without a number: there is one");
        }
        let (first, last) = layers.split_once('-').unwrap_or((layers, layers));
        // The limit exceeds the layers of any model, so that adding one cannot overflow.
        let number = |text: &str| text.trim().parse().ok().filter(|&n: &usize| n < 1 << 30);
        match (number(first), number(last)) {
            (Some(first), Some(last)) if first <= last => Ok(Self {
                kind,
                ordinal,
                first,
                last,
            }),
            (Some(_), Some(_)) => fail("a first layer that is not behind the last one"),
            _ => fail("numbers of layers from 0 on, such as cpu:0-13"),
        }
    }
}

/// Layers for a sentence.
struct Span(usize, usize);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layers {} to {}", self.0, self.1)
    }
}

impl fmt::Display for StageChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kind, first, last, ..
        } = self;
        write!(f, "{kind}")?;
        if self.ordinal > 0 {
            write!(f, "{}", self.ordinal)?;
        }
        write!(f, ":{first}-{last}")
    }
}

impl fmt::Display for StageList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, stage) in self.0.iter().enumerate() {
            let separator = if index > 0 { "," } else { "" };
            write!(f, "{separator}{stage}")?;
        }
        Ok(())
    }
}

impl StageList {
    /// Holds the list against a model of so many layers.
    pub(super) fn check(&self, layers: usize) -> Result<()> {
        let has = format!("the model has {layers} layers, 0 to {}", layers - 1);
        let end = self.0.last().map_or(0, |stage| stage.last + 1);
        let reason = match end {
            _ if end > layers => format!("found {self}, and {has}"),
            _ if end < layers => {
                let missing = Span(end, layers - 1);
                format!("{missing} are in no stage of {self}, and {has}")
            }
            _ => return Ok(()),
        };
        Err(Error::invalid("layers", reason))
    }
}
