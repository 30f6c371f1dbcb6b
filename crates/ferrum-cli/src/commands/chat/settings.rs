//! What `/set` changes: how answers are chosen, how long they may be, and what is said about them.

use crate::args::Seed;
use crate::commands::generation::fresh_seed;
use ferrum_engine::{GenerationParams, SamplingParams};
use serde_json::{Map, Value};
use std::fmt::Display;
use std::str::FromStr;

/// Names that `/set` knows beside `system` and `verbose`, in the order in which they are listed.
const NUMBERS: [&str; 7] = [
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "seed",
    "max_tokens",
];

/// No bound of an answer.
const NO_BOUND: &str = "none";

/// See the [module](self).
#[derive(Clone, Debug)]
pub(super) struct Settings {
    /// All but the seed.
    generation: GenerationParams,
    seed: Seed,
    /// Whether each answer is followed by how long it took.
    pub(super) verbose: bool,
}

impl Settings {
    pub(super) fn new(generation: GenerationParams, seed: Seed, verbose: bool) -> Self {
        Self {
            generation,
            seed,
            verbose,
        }
    }

    /// How the next answer is generated.
    pub(super) fn generation(&self) -> GenerationParams {
        let mut generation = self.generation.clone();
        generation.sampling.seed = self.seed.fixed().unwrap_or_else(fresh_seed);
        generation
    }

    /// Changes a setting; `name` may be written with hyphens as on the command line.
    ///
    /// # Errors
    /// What is wrong with the name or the value; nothing has changed then.
    pub(super) fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let name = name.replace('-', "_");
        if name == "verbose" {
            self.verbose = match value {
                "" | "on" | "true" => true,
                "off" | "false" => false,
                other => return Err(format!("verbose: found {other:?}, expected on or off")),
            };
            return Ok(());
        }
        let mut sampling = self.generation.sampling.clone();
        match name.as_str() {
            "temperature" => sampling.temperature = number(&name, value)?,
            "top_k" => sampling.top_k = number(&name, value)?,
            "top_p" => sampling.top_p = number(&name, value)?,
            "min_p" => sampling.min_p = number(&name, value)?,
            "repeat_penalty" => sampling.repeat_penalty = number(&name, value)?,
            "seed" => {
                self.seed = value.parse().map_err(|e| format!("seed: {e}"))?;
                return Ok(());
            }
            "max_tokens" => {
                self.generation.max_tokens = match value {
                    NO_BOUND => usize::MAX,
                    value => number(&name, value)?,
                };
                return Ok(());
            }
            _ => {
                let known = NUMBERS.join(", ");
                return Err(format!(
                    "there is no setting {name:?}\nhint: /set knows {known}, system and verbose"
                ));
            }
        }
        sampling.validate().map_err(|e| e.to_string())?;
        self.generation.sampling = sampling;
        Ok(())
    }

    /// The settings with their values, as they are typed.
    fn values(&self) -> [(&'static str, String); NUMBERS.len()] {
        let SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            repeat_penalty,
            ..
        } = &self.generation.sampling;
        let most = match self.generation.max_tokens {
            usize::MAX => NO_BOUND.to_owned(),
            n => n.to_string(),
        };
        let values = [
            temperature.to_string(),
            top_k.to_string(),
            top_p.to_string(),
            min_p.to_string(),
            repeat_penalty.to_string(),
            self.seed.to_string(),
            most,
        ];
        let mut values = values.into_iter();
        NUMBERS.map(|name| (name, values.next().unwrap_or_default()))
    }

    /// What `/set` alone shows.
    pub(super) fn list(&self, system: Option<&str>) -> String {
        let verbose = if self.verbose { "on" } else { "off" };
        let rows = self.values().into_iter().chain([
            ("system", system.unwrap_or(NO_BOUND).to_owned()),
            ("verbose", verbose.to_owned()),
        ]);
        let rows = rows.map(|(name, value)| format!("{name:<15}{value}"));
        rows.collect::<Vec<_>>().join("\n")
    }

    /// The settings as a file has them: as texts, so that no digit is lost.
    pub(super) fn to_json(&self) -> Value {
        let entry = |(name, value): (&str, String)| (name.to_owned(), Value::String(value));
        Value::Object(self.values().into_iter().map(entry).collect())
    }

    /// These settings with those of a file.
    ///
    /// # Errors
    /// What is wrong with one of them.
    pub(super) fn with_json(&self, file: &Map<String, Value>) -> Result<Self, String> {
        let mut settings = self.clone();
        for (name, value) in file {
            let value = value
                .as_str()
                .filter(|_| NUMBERS.contains(&name.as_str()))
                .ok_or_else(|| format!("settings: {name:?} is no setting of a conversation"))?;
            settings
                .set(name, value)
                .map_err(|e| format!("settings: {e}"))?;
        }
        Ok(settings)
    }
}

fn number<T: FromStr + Display>(name: &str, value: &str) -> Result<T, String> {
    let whole = ["top_k", "max_tokens"].contains(&name);
    let expected = match (name, whole) {
        ("max_tokens", _) => "a whole number such as 200, or none",
        (_, true) => "a whole number such as 40",
        (_, false) => "a number such as 0.7",
    };
    value
        .parse()
        .map_err(|_| format!("{name}: found {value:?}, expected {expected}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> Settings {
        let generation = GenerationParams {
            max_tokens: usize::MAX,
            ..GenerationParams::default()
        };
        Settings::new(generation, Seed::Fresh, false)
    }

    #[test]
    fn each_answer_has_another_seed_unless_one_is_set() {
        let mut settings = settings();
        let seed = |settings: &Settings| settings.generation().sampling.seed;
        assert_ne!(seed(&settings), seed(&settings));
        assert!(settings.list(None).contains("seed           -1\n"));
        for (value, expected) in [("7", Some(7)), ("-1", None)] {
            assert_eq!(settings.set("seed", value), Ok(()));
            assert_eq!(seed(&settings) == seed(&settings), expected.is_some());
            assert!(expected.is_none_or(|expected| seed(&settings) == expected));
        }
    }

    #[test]
    fn values_are_set_shown_and_kept_in_files() {
        let mut settings = settings();
        for (name, value) in [
            ("temperature", "0.3"),
            ("top-k", "7"),
            ("top_p", "0.9"),
            ("min_p", "0.1"),
            ("repeat_penalty", "1.1"),
            ("seed", "18446744073709551615"),
            ("max_tokens", "20"),
            ("verbose", ""),
        ] {
            assert_eq!(settings.set(name, value), Ok(()), "{name}");
        }
        let list = settings.list(Some("be brief"));
        let expected = "temperature    0.3\ntop_k          7\ntop_p          0.9\nmin_p          0.1\n\
            repeat_penalty 1.1\nseed           18446744073709551615\nmax_tokens     20\n\
            system         be brief\nverbose        on";
        assert_eq!(list, expected);
        let file = settings.to_json();
        let other = self::settings().with_json(file.as_object().expect("an object"));
        let other = other.expect("what was written");
        assert_eq!(other.to_json(), file);
        assert_eq!(settings.set("max_tokens", "none"), Ok(()));
        assert!(settings.list(None).contains("max_tokens     none"));
    }

    #[test]
    fn wrong_values_change_nothing_and_are_told() {
        let cases = [
            (
                "temperature",
                "hot",
                "temperature: found \"hot\", expected a number such as 0.7",
            ),
            ("temperature", "nan", "temperature"),
            ("temperature", "-1", "temperature"),
            ("top_p", "2", "top"),
            (
                "top_k",
                "1.5",
                "top_k: found \"1.5\", expected a whole number such as 40",
            ),
            ("seed", "-2", "seed: found \"-2\", expected a whole number"),
            (
                "max_tokens",
                "many",
                "max_tokens: found \"many\", expected a whole number such as 200, or none",
            ),
            (
                "verbose",
                "maybe",
                "verbose: found \"maybe\", expected on or off",
            ),
            ("tone", "x", "there is no setting \"tone\""),
        ];
        for (name, value, expected) in cases {
            let mut settings = settings();
            let before = settings.list(None);
            let error = settings.set(name, value).expect_err(value);
            assert!(error.contains(expected), "{error}");
            assert_eq!(settings.list(None), before);
        }
        let files = [
            serde_json::json!({"system": "x"}),
            serde_json::json!({"temperature": 1}),
            serde_json::json!({"top_p": "7"}),
        ];
        for file in files {
            let file = file.as_object().expect("an object");
            assert!(settings().with_json(file).is_err(), "{file:?}");
        }
    }
}
