//! The chat page as a browser gets it; `tools/clients/chat_page.py` uses it.

use super::Running;
use ferrum_server::ServerConfig;

#[test]
fn the_page_is_sent_with_a_strict_policy_and_only_when_it_changed() {
    let server = Running::demo();
    let page = server.get("/");
    assert_eq!(page.status, 200);
    assert_eq!(
        page.header("content-type"),
        Some("text/html; charset=utf-8")
    );
    assert_eq!(page.header("x-content-type-options"), Some("nosniff"));
    assert_eq!(page.header("referrer-policy"), Some("no-referrer"));
    let policy = page.header("content-security-policy").unwrap();
    for part in [
        "default-src 'none'",
        "connect-src 'self'",
        "frame-ancestors 'none'",
    ] {
        assert!(policy.contains(part), "{policy}");
    }
    assert!(!policy.contains("unsafe"), "{policy}");
    let tag = page.header("etag").unwrap().to_owned();
    assert!(page.text().starts_with("<!doctype html>"));

    let again = server.send("GET", "/", &[("If-None-Match", &tag)], b"");
    assert_eq!(
        (again.status, again.header("etag")),
        (304, Some(tag.as_str()))
    );
    assert_eq!(again.text(), "");
    let other = server.send("GET", "/", &[("If-None-Match", "\"old\"")], b"");
    assert_eq!(other.status, 200);
    assert_eq!(server.send("POST", "/", &[], b"").status, 405);
}

#[test]
fn without_a_key_the_page_asks_for_one() {
    let config = ServerConfig {
        api_keys: vec!["secret".into()],
        ..ServerConfig::default()
    };
    let server = Running::configured(config);
    let locked = server.get("/");
    assert_eq!(locked.status, 401);
    assert_eq!(locked.header("www-authenticate"), Some("Bearer"));
    assert_eq!(locked.header("cache-control"), Some("no-store"));
    assert!(locked.header("content-security-policy").is_some());
    assert!(locked.text().contains("key-dialog"));
    let key = ("Authorization", "Bearer secret");
    assert_eq!(server.send("GET", "/", &[key], b"").status, 200);
    // It knows nothing of what is served.
    assert!(!server.get("/").text().contains("\"demo\""));
    assert_eq!(server.send("POST", "/", &[], b"").status, 401);
}
