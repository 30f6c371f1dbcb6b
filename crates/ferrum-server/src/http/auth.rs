//! API keys: who may ask, and for what.

use crate::config::ServerConfig;
use crate::error::ApiError;
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use subtle::ConstantTimeEq;

/// What a request may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rights {
    /// Use the routes that change the server.
    pub(crate) admin: bool,
    /// Go before others.
    pub(crate) priority: bool,
}

impl Rights {
    /// Where nothing is asked for that needs some.
    pub(crate) const NONE: Self = Self {
        admin: false,
        priority: false,
    };
}

/// What a request brings as its key.
fn key(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(AUTHORIZATION).map(|value| value.as_bytes());
    let bearer = bearer.and_then(|value| {
        let (scheme, key) = value.split_at_checked("Bearer ".len())?;
        scheme.eq_ignore_ascii_case(b"Bearer ").then_some(key)
    });
    // Anthropic's clients send it so.
    let plain = headers.get("x-api-key").map(|value| value.as_bytes());
    bearer.or(plain)
}

/// What is said to a request that needs the key of an administrator and brings none.
pub(crate) fn not_admin(headers: &HeaderMap) -> ApiError {
    match key(headers) {
        None => ApiError::unauthorized(false),
        Some(_) => ApiError::forbidden("this needs the key of an administrator"),
    }
}

/// The rights of a request by the key that it brings.
///
/// # Errors
/// 401 where a key is needed and there is none, or another.
pub(crate) fn check(config: &ServerConfig, headers: &HeaderMap) -> Result<Rights, ApiError> {
    let (users, admins) = (&config.api_keys, &config.admin_keys);
    let found = key(headers);
    let is = |key: &str| found.is_some_and(|found| same(key.as_bytes(), found));
    // Every key is looked at, so that the time does not tell which one came close.
    let admin = admins.iter().filter(|key| is(key)).count() > 0;
    let matching = users.iter().filter(|user| is(&user.key));
    let (known, priority) = matching.fold((0, false), |(known, priority), user| {
        (known + 1, priority | user.priority)
    });
    let none = users.is_empty() && admins.is_empty();
    if !users.is_empty() && known == 0 && !admin {
        return Err(ApiError::unauthorized(found.is_some()));
    }
    Ok(Rights {
        admin: admin || admins.is_empty(),
        priority: admin || priority || none,
    })
}

/// Whether both are equal, in a time that depends on their lengths alone. An empty key never matches.
fn same(key: &[u8], found: &[u8]) -> bool {
    !key.is_empty() && bool::from(key.ct_eq(found))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_equal_keys_are_the_same() {
        let cases: [(&str, &str, bool); 7] = [
            ("secret", "secret", true),
            ("secret", "secreT", false),
            ("secret", "secre", false),
            ("secret", "secretsecret", false),
            ("secret", "", false),
            ("", "", false),
            ("", "x", false),
        ];
        for (key, found, expected) in cases {
            assert_eq!(same(key.as_bytes(), found.as_bytes()), expected, "{found}");
        }
    }

    fn with(name: &'static str, value: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(name, value.parse().unwrap());
        headers
    }

    #[test]
    fn a_key_comes_in_either_header() {
        let config = ServerConfig {
            api_keys: vec!["one".into(), "two".into()],
            ..ServerConfig::default()
        };
        let check = |headers: HeaderMap| check(&config, &headers);
        assert!(check(with("authorization", "Bearer two")).is_ok());
        assert!(check(with("authorization", "bearer one")).is_ok());
        assert!(check(with("x-api-key", "one")).is_ok());
        assert!(check(with("authorization", "Basic one")).is_err());
        assert!(check(with("authorization", "Bearer three")).is_err());
        assert!(check(HeaderMap::new()).is_err());
    }

    #[test]
    fn rights_are_those_of_the_key() {
        let (users, admins) = (["plain", "fast priority"], ["boss"]);
        // Which keys there are, which one is sent, and whether it passes, administrates and goes first.
        type Case = (bool, bool, &'static str, Option<(bool, bool)>);
        let cases: [Case; 10] = [
            (false, false, "", Some((true, true))),
            (false, false, "any", Some((true, true))),
            (true, false, "plain", Some((true, false))),
            (true, false, "fast", Some((true, true))),
            (true, false, "boss", None),
            (true, true, "plain", Some((false, false))),
            (true, true, "fast", Some((false, true))),
            (true, true, "boss", Some((true, true))),
            (false, true, "", Some((false, false))),
            (false, true, "boss", Some((true, true))),
        ];
        for (some_users, some_admins, sent, expected) in cases {
            let users = users.iter().filter(|_| some_users);
            let config = ServerConfig {
                api_keys: users.map(|line| line.parse().unwrap()).collect(),
                admin_keys: admins
                    .iter()
                    .filter(|_| some_admins)
                    .map(|key| (*key).to_owned())
                    .collect(),
                ..ServerConfig::default()
            };
            let headers = match sent {
                "" => HeaderMap::new(),
                key => with("x-api-key", key),
            };
            let found = check(&config, &headers).ok();
            let found = found.map(|rights| (rights.admin, rights.priority));
            assert_eq!(found, expected, "{some_users} {some_admins} {sent}");
        }
    }
}
