//! API keys with their rights, as settings and files of keys have them.

use std::fmt;
use std::str::FromStr;

/// A key of a client, with its further rights.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey {
    /// What the client sends.
    pub key: String,
    /// Whether its requests may go before those of others: ask for a `priority` above 0.
    pub priority: bool,
}

impl fmt::Debug for ApiKey {
    /// Without the key, which belongs into no log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let priority = self.priority;
        f.debug_struct("ApiKey")
            .field("priority", &priority)
            .finish_non_exhaustive()
    }
}

impl From<&str> for ApiKey {
    /// A key without rights.
    fn from(key: &str) -> Self {
        Self {
            key: key.to_owned(),
            priority: false,
        }
    }
}

impl FromStr for ApiKey {
    type Err = String;

    /// A line of a file of keys: `KEY`, or `KEY priority`.
    fn from_str(line: &str) -> Result<Self, String> {
        let mut words = line.split_whitespace();
        let mut key = Self::from(words.next().ok_or("there is no key")?);
        for right in words {
            // Not the line itself: it is a secret.
            match right {
                "priority" => key.priority = true,
                _ => return Err("expected KEY or KEY priority".into()),
            }
        }
        Ok(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_keys_have_known_rights_and_are_not_repeated() {
        let fast: ApiKey = "secret  priority".parse().unwrap();
        assert_eq!((fast.key.as_str(), fast.priority), ("secret", true));
        assert!(!format!("{fast:?}").contains("secret"));
        let wrong = "secret admin".parse::<ApiKey>().unwrap_err();
        assert_eq!(wrong, "expected KEY or KEY priority");
        assert!("".parse::<ApiKey>().is_err());
    }
}
